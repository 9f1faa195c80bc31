"""What messages say of samples, both ways: words of the API, field specs, and custom_meta.

custom_meta travels in columns. Users give and read it as one mapping a sample; `rows_to_meta_columns` and
`meta_columns_to_rows` go between the two.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from itertools import chain, repeat
from typing import Any, Final, Generic, TypeVar, get_args

import numpy as np
from numpy.typing import NDArray

from tq_service.errors import InvalidArgumentError
from tq_service.schema import (
    BatchUnit,
    Encoding,
    FieldSpec,
    KeyMode,
    Layout,
    MetaColumn,
    MetaValue,
    Operator,
    SampleState,
)
from tq_service.v1 import commit_pb2, controller_service_pb2
from tq_service.v1 import metadata_pb2 as pb
from tq_service.wire.dtypes import LARGEST_EXACT, exact_numbers
from tq_service.wire.runs import decode_integers

Word = TypeVar("Word", bound=str)


class EnumWords(Generic[Word]):
    """The words of one enum; None stands for "unspecified".

    Args:
        name: of the field, for errors.
        numbers: the number of each word.
    """

    def __init__(self, name: str, numbers: Mapping[Word, int]) -> None:
        self._name = name
        self._numbers = {str(word): number for word, number in numbers.items()}
        self._words: dict[int, Word | None] = {0: None, **{number: word for word, number in numbers.items()}}

    def encode(self, word: str | None, name: str | None = None) -> Any:
        """Return the number of a word; `name` is that of the argument it was given as.

        Raises:
            InvalidArgumentError: the enum has no such word.
        """
        if word is None:
            return 0
        if word not in self._numbers:
            name = name or self._name
            raise InvalidArgumentError(f"{name} is {word!r}, expected one of {', '.join(self._numbers)}", field=name)
        return self._numbers[word]

    def decode(self, number: int) -> Word | None:
        """Return the word of a number.

        Raises:
            InvalidArgumentError: the enum has no such number.
        """
        if number not in self._words:
            raise InvalidArgumentError(
                f"{self._name}: the number {number} is unknown; send that of {', '.join(self._numbers)}",
                field=self._name,
            )
        return self._words[number]


def _numbers(enum: Any, words: Iterable[Word]) -> dict[Word, int]:
    """Return the numbers of words that are the names of the enum's values, without their common prefix."""
    prefix = enum.Name(0).removesuffix("UNSPECIFIED")
    return {word: enum.Value(prefix + word.upper()) for word in words}


LAYOUTS: Final = EnumWords("layout", _numbers(pb.Layout, Layout))
ENCODINGS: Final = EnumWords("encoding", _numbers(pb.Encoding, Encoding))
STATES: Final = EnumWords("state", _numbers(pb.SampleState, SampleState))
KEY_MODES: Final[EnumWords[KeyMode]] = EnumWords("key_mode", _numbers(commit_pb2.KeyMode, get_args(KeyMode)))
BATCH_UNITS: Final[EnumWords[BatchUnit]] = EnumWords(
    "batch_unit", _numbers(controller_service_pb2.BatchUnit, get_args(BatchUnit))
)
OPERATORS: Final[EnumWords[Operator]] = EnumWords(
    "where",
    {
        "==": controller_service_pb2.OPERATOR_EQ,
        "!=": controller_service_pb2.OPERATOR_NE,
        "<": controller_service_pb2.OPERATOR_LT,
        "<=": controller_service_pb2.OPERATOR_LE,
        ">": controller_service_pb2.OPERATOR_GT,
        ">=": controller_service_pb2.OPERATOR_GE,
        "in": controller_service_pb2.OPERATOR_IN,
    },
)


_DTYPES: Final[dict[str, Any]] = {
    "bool_values": np.bool_, "int64_values": np.int64, "double_values": np.float64, "string_values": np.object_,
}  # fmt: skip
_FIELDS: Final = {np.dtype(dtype): field for field, dtype in _DTYPES.items()}
_REMEMBERED_SPEC_BYTES: Final = 256

_INT64: Final = np.iinfo(np.int64)


def encode_spec(spec: FieldSpec) -> pb.FieldSpec:
    """Return a field spec as protobuf."""
    return pb.FieldSpec(
        name=spec.name,
        dtype=spec.dtype,
        layout=LAYOUTS.encode(spec.layout),
        row_shape=spec.row_shape or (),
        row_shape_known=spec.row_shape is not None,
        encoding=ENCODINGS.encode(spec.encoding),
    )


def decode_spec(message: pb.FieldSpec) -> FieldSpec:
    """Return the field spec of a message.

    Raises:
        InvalidArgumentError: an empty name, an unknown dtype or layout.
    """
    serialized = message.SerializeToString(deterministic=True)
    return _remembered_spec(serialized) if len(serialized) <= _REMEMBERED_SPEC_BYTES else _read_spec(message)


@lru_cache(maxsize=1024)
def _remembered_spec(serialized: bytes) -> FieldSpec:
    """Return a spec read before: every claim, put and get brings the same few."""
    return _read_spec(pb.FieldSpec.FromString(serialized))


def _read_spec(message: pb.FieldSpec) -> FieldSpec:
    return FieldSpec(
        name=message.name,
        dtype=message.dtype,
        layout=LAYOUTS.decode(message.layout),
        row_shape=tuple(message.row_shape) if message.row_shape_known else None,
        encoding=ENCODINGS.decode(message.encoding),
    )


def decode_value(message: controller_service_pb2.MetaValue) -> MetaValue | None:
    """Return a value of custom_meta, None for a message that has none."""
    kind = message.WhichOneof("kind")
    value: MetaValue | None = None if kind is None else getattr(message, kind)
    return value


def encode_meta_columns(columns: Iterable[MetaColumn]) -> list[pb.MetaColumn]:
    """Return custom_meta columns as protobuf; only values that are present travel."""
    return [_encode_meta_column(column) for column in columns]


def _encode_meta_column(column: MetaColumn) -> pb.MetaColumn:
    complete = bool(column.present.all())
    message = pb.MetaColumn()
    if not complete:
        message.present = column.present.astype(np.uint8).tobytes()
    kind: Any = getattr(message, _FIELDS[column.values.dtype])
    kind.SetInParent()  # also without a value the column has its type
    values: list[Any] = (column.values if complete else column.values[column.present]).tolist()
    try:
        message.name = column.name
        kind.values.extend(values)
    except UnicodeEncodeError as error:
        raise InvalidArgumentError(
            f"custom_meta column {column.name!r} has {error.object!r:.200}, expected text in valid Unicode ({error})",
            field="custom_meta",
        ) from None
    return message


def decode_meta_columns(messages: Iterable[pb.MetaColumn], row_count: int) -> list[MetaColumn]:
    """Return the custom_meta columns of messages about `row_count` samples.

    Raises:
        InvalidArgumentError: a name is empty or comes twice, a column has no type, or counts do not fit `row_count`.
    """
    columns: dict[str, MetaColumn] = {}
    for message in messages:
        if not message.name:
            raise InvalidArgumentError("a custom_meta column has no name; name every column", field="custom_meta")
        if message.name in columns:
            raise InvalidArgumentError(
                f"custom_meta column {message.name!r} comes twice; send each column once", field="custom_meta"
            )
        columns[message.name] = _decode_meta_column(message, row_count)
    return list(columns.values())


def _decode_meta_column(message: pb.MetaColumn, row_count: int) -> MetaColumn:
    present = _decode_present(message, row_count)
    values = _decode_values(message)
    present_count = int(np.count_nonzero(present))
    if values.size != present_count:
        raise InvalidArgumentError(
            f"custom_meta column {message.name!r} has {values.size} values, expected {present_count}: "
            f"one for each sample that has a value, of {row_count} samples",
            field="custom_meta",
        )
    return _spread(message.name, values, present)


def _spread(name: str, values: NDArray[Any], present: NDArray[np.bool_]) -> MetaColumn:
    """Return the column of the values of those samples that have one."""
    if values.size < present.size:
        column = np.full(present.size, "" if values.dtype == object else 0, values.dtype)
        column[present] = values
        values = column
    return MetaColumn(name=name, values=values, present=present)


def _decode_present(message: pb.MetaColumn, row_count: int) -> NDArray[np.bool_]:
    if not message.present:
        return np.ones(row_count, np.bool_)
    if len(message.present) != row_count:
        raise InvalidArgumentError(
            f"custom_meta column {message.name!r} says of {len(message.present)} samples whether they have a value, "
            f"expected {row_count}, or none where all have one",
            field="custom_meta",
        )
    return np.frombuffer(message.present, np.uint8).astype(np.bool_)


def _decode_values(message: pb.MetaColumn) -> NDArray[Any]:
    field = message.WhichOneof("values")
    if field is None:
        raise InvalidArgumentError(
            f"custom_meta column {message.name!r} has no values; set {', '.join(_DTYPES)}", field="custom_meta"
        )
    values = getattr(message, field).values
    return decode_integers(values) if field == "int64_values" else np.array(values, _DTYPES[field])


def rows_to_meta_columns(rows: Sequence[Mapping[str, Any]]) -> list[MetaColumn]:
    """Return the custom_meta of `n` samples as columns, each over all `n`.

    Values are bool, int, float or str, also as scalars of numpy or torch. A column is of one kind; integers among
    floats become floats. A sample without the key has no value.

    Raises:
        InvalidArgumentError: another type, kinds mixed in one column, or an integer beyond 64 bits; names row and key.
    """
    plain = rows if set(map(type, rows)) == {dict} else [_checked(position, row) for position, row in enumerate(rows)]
    # Most rows have the same names; what is done for each takes no step in Python.
    has_all = bool(plain) and len(plain[0]) == len(set().union(*plain))
    names = plain[0] if has_all else dict.fromkeys(chain.from_iterable(plain))
    get: Any = dict.get
    present = np.ones(len(plain), np.bool_)
    return [_column(name, list(map(get, plain, repeat(name), repeat(_NO_VALUE))), present) for name in names]


class _NoValue:
    """What a sample has that has no value."""


_NO_VALUE: Final = _NoValue()


def _checked(position: int, row: Any) -> dict[str, Any]:
    if not isinstance(row, Mapping):
        raise InvalidArgumentError(
            f"custom_meta[{position}] is {type(row).__name__}, expected a mapping of names to values",
            field="custom_meta",
        )
    return dict(row)


def _column(name: str, values: list[Any], present: NDArray[np.bool_]) -> MetaColumn:
    """Return the column of the values of all rows, some of which may have none; `present` is that of none without."""
    if not isinstance(name, str) or not name:
        raise InvalidArgumentError(
            f"custom_meta has the key {name!r}, expected a string that is not empty", field="custom_meta"
        )
    kinds = set(map(type, values))
    if _NoValue in kinds:
        present = np.array([value is not _NO_VALUE for value in values])
        values = [value for value in values if value is not _NO_VALUE]
        kinds.remove(_NoValue)
    if not kinds <= {bool, int, float, str}:
        values = [_plain_value(name, position, value) for position, value in zip(_rows(present), values, strict=True)]
        kinds = set(map(type, values))
    array = np.array(values, np.object_) if kinds == {str} else exact_numbers(values, kinds)
    if array is None:
        raise _unlike(name, present, values)
    return _spread(name, array, present)


def _rows(present: NDArray[np.bool_]) -> list[int]:
    return np.flatnonzero(present).tolist()


def _plain_value(name: str, position: int, value: Any) -> MetaValue:
    if not isinstance(value, bool | int | float | str) and getattr(value, "ndim", None) == 0:
        value = value.item()
    for kind in (bool, int, float, str):
        if isinstance(value, kind):
            return kind(value)
    raise InvalidArgumentError(
        f"custom_meta[{position}][{name!r}] is {type(value).__name__}, expected bool, int, float or str; "
        "put anything larger as a field",
        field="custom_meta",
    )


def _unlike(name: str, present: NDArray[np.bool_], values: list[Any]) -> InvalidArgumentError:
    """Return the error of the first value that does not go into one column with the others."""
    first = type(values[0])
    fits = {int, float} if first in (int, float) else {first}
    has_floats = float in set(map(type, values))
    for position, value in zip(_rows(present), values, strict=True):
        if type(value) not in fits:
            got, before = type(value).__name__, first.__name__
            problem = f"{got}, while samples before it have {before}; a column holds one kind of value"
        elif type(value) is int and not _INT64.min <= value <= _INT64.max:
            problem = f"{value}, expected an integer of 64 bits; give it as a string"
        elif type(value) is int and has_floats and abs(value) > LARGEST_EXACT:
            problem = (
                f"{value}, while other samples have floats, as which it would be another number; give all as integers, "
                "or as strings"
            )
        else:
            continue
        return InvalidArgumentError(f"custom_meta[{position}][{name!r}] is {problem}", field="custom_meta")
    return InvalidArgumentError(f"custom_meta column {name!r} has numbers that are too large", field="custom_meta")


def meta_columns_to_rows(columns: Iterable[MetaColumn], row_count: int) -> list[dict[str, MetaValue]]:
    """Return custom_meta as one dict a sample `(row_count,)`; a sample without a value lacks the key."""
    rows: list[dict[str, MetaValue]] = [{} for _ in range(row_count)]
    for column in columns:
        name = column.name
        values = column.values.tolist()
        if column.present.all():
            for row, value in zip(rows, values, strict=True):
                row[name] = value
        else:
            for position in _rows(column.present):
                rows[position][name] = values[position]
    return rows
