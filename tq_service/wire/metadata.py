"""Converts sample indexes, cells, enum words, field specs and custom_meta to and from protobuf messages.

Sample indexes and row numbers are large integer arrays that mostly consist of runs of consecutive numbers. In messages,
custom_meta is represented as columns. Users write custom_meta either as columns or as one mapping per sample, but
always read it as one mapping per sample. The functions `values_to_meta_column`, `rows_to_meta_columns` and
`meta_columns_to_rows` convert between the two forms.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import chain
from operator import itemgetter
from typing import Any, Final, Generic, TypeVar, cast, get_args

import numpy as np
from numpy.typing import NDArray

from tq_service.custom_meta import DTYPES, MetaColumn, checked_texts, column_of
from tq_service.errors import InvalidArgumentError
from tq_service.schema import (
    LARGEST_EXACT,
    BatchUnit,
    Encoding,
    EvictionReason,
    FieldScope,
    FieldSpec,
    GivenBack,
    KeyMode,
    Late,
    Layout,
    OnLost,
    Operator,
    Overflow,
    RefillOutcome,
    ReleaseWhen,
    SampleState,
    Scalar,
    Unmatched,
)
from tq_service.v1 import commit_pb2, controller_service_pb2
from tq_service.v1 import metadata_pb2 as pb

Indexes = NDArray[np.int64]

_FEW_VALUES: Final = 64
_LEAST_MEAN_LENGTH: Final = 4
_BYTES_TYPE: Final = 2  # protobuf wire type of packed fields and bytes fields
_MOST_INDEXES: Final = 2**31  # limits the memory that a reader allocates for a few ranges


NO_INTEGERS: Final = np.zeros(0, np.int64)


def decode_integers(values: Sequence[int]) -> Indexes:
    """Convert a repeated integer field to an array of shape `(n,)`.

    For a long field, numpy reads protobuf's buffer with a single copy. For a short field, iterating over the values is
    faster.
    """
    count = len(values)
    return np.fromiter(values, np.int64, count) if count <= _FEW_VALUES else np.array(values, np.int64)


def fill_packed(message: Any, field: str, values: NDArray[Any]) -> None:
    """Fill an empty repeated field whose values are booleans, or numbers of 4 or 8 bytes.

    A packed protobuf field contains the same bytes as an array, so the bytes are copied only once.
    """
    if values.size <= _FEW_VALUES:
        getattr(message, field).extend(values.tolist())
        return
    number = message.DESCRIPTOR.fields_by_name[field].number
    data: Any = np.ascontiguousarray(values, values.dtype.newbyteorder("<"))
    message.MergeFromString(b"".join((encode_varint(number << 3 | _BYTES_TYPE), encode_varint(data.nbytes), data)))


def encode_varint(value: int) -> bytes:
    """Encode a non-negative integer as a varint, which is protobuf's encoding of tags and lengths."""
    encoded = bytearray()
    while value > 0x7F:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    encoded.append(value)
    return bytes(encoded)


def expand_runs(firsts: Indexes, counts: Indexes) -> Indexes:
    """Return the numbers in all runs, in order. For example, `firsts` (3, 8) and `counts` (2, 1) yield (3, 4, 8)."""
    if firsts.size == 1:
        return np.arange(firsts[0], firsts[0] + counts[0], dtype=np.int64)
    starts = np.cumsum(counts) - counts
    return np.repeat(firsts - starts, counts) + np.arange(int(counts.sum()), dtype=np.int64)


def runs_of(values: Indexes) -> tuple[Indexes, Indexes]:
    """Split values into runs of consecutive numbers. For example, (3, 4, 8) yields firsts (3, 8) and counts (2, 1)."""
    starts, counts = _runs_at(np.diff(values) != 1, values.size)
    return values[starts], counts


def _runs_at(breaks: NDArray[np.bool_], count: int) -> tuple[Indexes, Indexes]:
    """Return the starts and lengths of runs in `count` values. If `breaks[i]` is set, a run starts at value `i + 1`."""
    starts = np.flatnonzero(np.concatenate(([count > 0], breaks)))
    return starts, np.diff(starts, append=count)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CellRuns:
    """The locations of cells in fields that were put together.

    The cells are represented as runs of adjacent rows, in the requested order.

    Attributes:
        field_names: names of the fields to which the runs apply.
        put_indexes: array of shape `(runs,)` with the index of each run's put in the accompanying list of puts.
        first_rows: array of shape `(runs,)` with the index of each run's first row within its put.
        row_counts: array of shape `(runs,)` with the number of rows in each run.
        extent_counts: array of shape `(n,)` with the number of rows (extents) in each cell, if values were appended to
            cells. The array is empty if each cell is a single row.
        extent_lengths: array of shape `(rows,)` with the number of each row's items in dimension 0 that belong to the
            cell. `WHOLE_EXTENT` stands for all items.
    """

    field_names: tuple[str, ...]
    put_indexes: Indexes
    first_rows: Indexes
    row_counts: Indexes
    extent_counts: Indexes = field(default_factory=NO_INTEGERS.copy)
    extent_lengths: Indexes = field(default_factory=NO_INTEGERS.copy)

    @classmethod
    def from_proto(cls, message: pb.CellRuns, *, with_extents: bool = True) -> CellRuns:
        """Decode the runs of a get without validation. If `with_extents` is True, also decode the cells' extents."""
        return cls(
            field_names=tuple(message.field_names),
            put_indexes=decode_integers(message.put_indexes),
            first_rows=decode_integers(message.first_rows),
            row_counts=decode_integers(message.row_counts),
            extent_counts=decode_integers(message.extent_counts) if with_extents else NO_INTEGERS,
            extent_lengths=decode_integers(message.extent_lengths) if with_extents else NO_INTEGERS,
        )

    @classmethod
    def of_samples(cls, message: pb.CellRuns) -> CellRuns:
        """Return the location of each sample's cell. A cell shared by several samples is repeated for each of them."""
        runs = cls.from_proto(message)
        if not message.sample_counts:
            return runs
        puts, rows = (np.repeat(each, decode_integers(message.sample_counts)) for each in runs.expand())
        return cls.of_rows(runs.field_names, puts, rows)

    @classmethod
    def of_rows(
        cls,
        field_names: tuple[str, ...],
        puts: Indexes,
        rows: Indexes,
        extent_counts: Indexes = NO_INTEGERS,
        extent_lengths: Indexes = NO_INTEGERS,
    ) -> CellRuns:
        """Build runs from individual rows. For each row, `puts` lists its put, and `rows` its index within that put."""
        starts, counts = _runs_at((np.diff(puts) != 0) | (np.diff(rows) != 1), rows.size)
        return cls(
            field_names=field_names,
            put_indexes=puts[starts],
            first_rows=rows[starts],
            row_counts=counts,
            extent_counts=extent_counts,
            extent_lengths=extent_lengths,
        )

    def to_proto(self) -> pb.CellRuns:
        """Encode the runs as a protobuf message for use in a get request."""
        message = pb.CellRuns(field_names=self.field_names)
        for name in ("put_indexes", "first_rows", "row_counts", "extent_counts", "extent_lengths"):
            fill_packed(message, name, getattr(self, name).astype(np.uint32))
        return message

    @property
    def row_count(self) -> int:
        """Number of rows per field."""
        return int(self.row_counts.sum())

    def expand(self) -> tuple[Indexes, Indexes]:
        """For each row, return the index of its put and its index within the put, as two arrays of shape `(rows,)`."""
        return np.repeat(self.put_indexes, self.row_counts), expand_runs(self.first_rows, self.row_counts)

    def select(self, positions: Indexes) -> CellRuns:
        """Return only the cells at `positions`, in the order of `positions`."""
        puts, rows = self.expand()
        counts = self.extent_counts
        if not counts.size:
            return CellRuns.of_rows(self.field_names, puts[positions], rows[positions])
        at = expand_runs((np.cumsum(counts) - counts)[positions], counts[positions])
        lengths = self.extent_lengths[at]
        return CellRuns.of_rows(self.field_names, puts[at], rows[at], counts[positions], lengths)


def set_indexes(message: pb.BatchMeta, indexes: Indexes | range) -> None:
    """Write the sample indexes to a batch message that does not contain any yet."""
    if len(indexes) > _FEW_VALUES:
        if isinstance(indexes, range):
            firsts, counts = [indexes.start], [len(indexes)]
        else:
            firsts, counts = (each.tolist() for each in runs_of(indexes))
        if len(firsts) * _LEAST_MEAN_LENGTH <= len(indexes):
            message.index_ranges.first_indexes.extend(firsts)
            message.index_ranges.index_counts.extend(counts)
            return
    message.global_indexes.extend(indexes if isinstance(indexes, range) else indexes.tolist())


def read_indexes(message: pb.BatchMeta) -> Indexes:
    """Return the sample indexes in a batch message, in order.

    Raises:
        InvalidArgumentError: both forms of indexes are set, a range is invalid, or the message contains too many
            samples.
    """
    if not message.HasField("index_ranges"):
        return decode_integers(message.global_indexes)
    firsts = decode_integers(message.index_ranges.first_indexes)
    counts = decode_integers(message.index_ranges.index_counts)
    if message.global_indexes or firsts.size != counts.size or bool((counts < 1).any()):
        raise InvalidArgumentError(
            f"index_ranges has {firsts.size} first_indexes and {counts.size} index_counts, and there are "
            f"{len(message.global_indexes)} global_indexes; expected one index_count of at least 1 per first_index, "
            "and no global_indexes",
            field="index_ranges",
        )
    if float(counts.sum(dtype=np.float64)) > _MOST_INDEXES:
        raise InvalidArgumentError(
            f"index_ranges contains more than {_MOST_INDEXES} samples; request fewer samples", field="index_ranges"
        )
    return expand_runs(firsts, counts)


_CONVERTED_AT_ONCE: Final = 1 << 16  # limited, because numpy blocks other threads during a conversion
_NUMBERS: Final[dict[type, Any]] = {bool: np.bool_, int: np.int64, float: np.float64}


def exact_numbers(values: Sequence[Any], kinds: set[type]) -> NDArray[Any] | None:
    """Convert Python bools, integers or floats to an array, or return None if no dtype represents all values exactly.

    Args:
        values: numbers. The result is None if any value has another type.
        kinds: set of the values' types.
    """
    if kinds == {int, float} and not any(type(value) is int and abs(value) > LARGEST_EXACT for value in values):
        kinds = {float}
    dtype = _NUMBERS.get(*kinds) if len(kinds) == 1 else None
    try:
        if dtype is None or len(values) <= _CONVERTED_AT_ONCE:
            return None if dtype is None else np.array(values, dtype)
        starts = range(0, len(values), _CONVERTED_AT_ONCE)
        return np.concatenate([np.array(values[start : start + _CONVERTED_AT_ONCE], dtype) for start in starts])
    except OverflowError:
        return None


Word = TypeVar("Word", bound=str)


class EnumWords(Generic[Word]):
    """A mapping between words and the values of a protobuf enum, in which None represents the unspecified value.

    Args:
        name: name of the field, for use in error messages.
        enum: protobuf enum.
        words: the words, or a mapping from each word to the name of its enum value without the common prefix. Without a
            mapping, each enum value is named after its word, in capitals.
    """

    def __init__(self, name: str, enum: Any, words: Iterable[Word] | Mapping[Word, str]) -> None:
        prefix = enum.Name(0).removesuffix("UNSPECIFIED")
        names = words if isinstance(words, Mapping) else {word: word.upper() for word in words}
        numbers: dict[Word, int] = {word: enum.Value(prefix + value) for word, value in names.items()}
        self._name = name
        self._numbers = {str(word): number for word, number in numbers.items()}
        self._words: dict[int, Word | None] = {0: None, **{number: word for word, number in numbers.items()}}

    def encode(self, word: str | None, name: str | None = None) -> Any:
        """Return the enum number for a word. Error messages refer to the argument as `name`.

        Raises:
            InvalidArgumentError: the word does not belong to the enum.
        """
        if word is None:
            return 0
        if word not in self._numbers:
            name = name or self._name
            raise InvalidArgumentError(f"{name} is {word!r}; expected one of {', '.join(self._numbers)}", field=name)
        return self._numbers[word]

    def decode(self, number: int, name: str | None = None) -> Word | None:
        """Return the word that corresponds to an enum number. Error messages refer to the field as `name`.

        Raises:
            InvalidArgumentError: the number does not belong to the enum.
        """
        if number not in self._words:
            name = name or self._name
            raise InvalidArgumentError(
                f"{name} is {number}; expected the enum number of one of {', '.join(self._numbers)}",
                field=name,
            )
        return self._words[number]


LAYOUTS: Final = EnumWords("layout", pb.Layout, Layout)
ENCODINGS: Final = EnumWords("encoding", pb.Encoding, Encoding)
SCOPES: Final = EnumWords("scope", pb.FieldScope, FieldScope)
STATES: Final = EnumWords("state", pb.SampleState, SampleState)
KEY_MODES: Final[EnumWords[KeyMode]] = EnumWords("key_mode", commit_pb2.KeyMode, get_args(KeyMode))
GIVEN_BACK: Final[EnumWords[GivenBack]] = EnumWords("given_back", controller_service_pb2.GivenBack, get_args(GivenBack))
OVERFLOW: Final[EnumWords[Overflow]] = EnumWords("overflow", controller_service_pb2.Overflow, get_args(Overflow))
RELEASE_WHEN: Final[EnumWords[ReleaseWhen]] = EnumWords(
    "release_when", controller_service_pb2.ReleaseWhen, get_args(ReleaseWhen)
)
LATE: Final[EnumWords[Late]] = EnumWords("late", controller_service_pb2.Late, get_args(Late))
ON_LOST: Final[EnumWords[OnLost]] = EnumWords("on_lost", controller_service_pb2.OnLost, get_args(OnLost))
BATCH_UNITS: Final[EnumWords[BatchUnit]] = EnumWords(
    "batch_unit", controller_service_pb2.BatchUnit, get_args(BatchUnit)
)
EVICTION_REASONS: Final[EnumWords[EvictionReason]] = EnumWords(
    "reason", controller_service_pb2.EvictionReason, get_args(EvictionReason)
)
REFILL_OUTCOMES: Final[EnumWords[RefillOutcome]] = EnumWords(
    "refill", controller_service_pb2.RefillOutcome, get_args(RefillOutcome)
)
UNMATCHED: Final[EnumWords[Unmatched]] = EnumWords("unmatched", controller_service_pb2.Unmatched, get_args(Unmatched))
OPERATORS: Final[EnumWords[Operator]] = EnumWords(
    "where",
    controller_service_pb2.Operator,
    {"==": "EQ", "!=": "NE", "<": "LT", "<=": "LE", ">": "GT", ">=": "GE", "in": "IN"},
)


_DTYPES: Final[dict[str, Any]] = {
    "bool_values": np.bool_, "int64_values": np.int64, "double_values": np.float64, "string_values": np.object_,
}  # fmt: skip
_FIELDS: Final = {np.dtype(dtype): field for field, dtype in _DTYPES.items()}
_REMEMBERED_SPEC_BYTES: Final = 256
# Values of `MetaColumn.kinds`, one per sample. 0 means that the sample has no value.
_TYPED: Final = 1
_JSON: Final = 2
_REMOVED: Final = 3


@lru_cache(maxsize=1024)
def encode_spec(spec: FieldSpec) -> pb.FieldSpec:
    """Encode a field spec as a message. All callers share this message, so they must not modify it."""
    return pb.FieldSpec(
        name=spec.name,
        dtype=spec.dtype,
        layout=LAYOUTS.encode(spec.layout),
        row_shape=spec.row_shape or (),
        row_shape_known=spec.row_shape is not None,
        encoding=ENCODINGS.encode(spec.encoding),
        write_once=spec.write_once,
        scope=SCOPES.encode(None if spec.scope is FieldScope.ROW else spec.scope),
    )


def decode_spec(message: pb.FieldSpec) -> FieldSpec:
    """Decode a field spec.

    Raises:
        InvalidArgumentError: the name is empty, or the dtype or layout is unknown.
    """
    serialized = message.SerializeToString(deterministic=True)
    return _remembered_spec(serialized) if len(serialized) <= _REMEMBERED_SPEC_BYTES else _read_spec(message)


@lru_cache(maxsize=1024)
def _remembered_spec(serialized: bytes) -> FieldSpec:
    """Decode a field spec. Specs are cached, because all claims, puts and gets use the same few specs."""
    return _read_spec(pb.FieldSpec.FromString(serialized))


def _read_spec(message: pb.FieldSpec) -> FieldSpec:
    if message.row_shape and not message.row_shape_known:
        raise InvalidArgumentError(
            f"field {message.name!r} has the row shape {list(message.row_shape)}, but row_shape_known is not set. Set "
            "row_shape_known, or omit the row shape to let the first put determine it",
            field="row_shape_known",
            metadata={"field_name": message.name},
        )
    return FieldSpec(
        name=message.name,
        dtype=message.dtype,
        layout=LAYOUTS.decode(message.layout),
        row_shape=tuple(message.row_shape) if message.row_shape_known else None,
        encoding=ENCODINGS.decode(message.encoding),
        write_once=message.write_once,
        scope=SCOPES.decode(message.scope) or FieldScope.ROW,
    )


def decode_value(message: controller_service_pb2.MetaValue) -> Scalar | None:
    """Return the custom_meta value in a message, or None if there is none."""
    kind = message.WhichOneof("kind")
    value: Scalar | None = None if kind is None else getattr(message, kind)
    return value


def encode_meta_columns(columns: Iterable[MetaColumn]) -> list[pb.MetaColumn]:
    """Encode custom_meta columns as protobuf messages. Missing values are omitted."""
    return list(map(_encode_meta_column, columns))


def _encode_meta_column(column: MetaColumn) -> pb.MetaColumn:
    message = pb.MetaColumn()
    is_complete = bool(column.present.all())
    values = column.values if is_complete else column.values[column.present]
    texts: list[Any] = [] if column.json is None else column.json[column.has_json].tolist()
    if not is_complete and (values.size or len(texts) < column.present.size):
        kinds = column.present.astype(np.uint8)
        kinds[column.has_json] = _JSON
        if column.removed is not None:
            kinds[column.removed] = _REMOVED
        message.kinds = kinds.tobytes()
    try:
        message.name = column.name
        if values.size or (column.json is None and column.removed is None):
            kind: Any = getattr(message, _FIELDS[column.values.dtype])
            kind.SetInParent()  # sets the column's type even if there are no values
            if values.dtype.hasobject:
                kind.values.extend(values.tolist())
            else:
                fill_packed(kind, "values", values)
        message.json_values.extend(texts)
    except UnicodeEncodeError as error:
        given = values.tolist()
        place = f"[{given.index(error.object)}]" if error.object in given else ""
        raise InvalidArgumentError(
            f"custom_meta column {column.name!r}{place} is {error.object!r:.200}; expected text in valid Unicode "
            f"({error})",
            field="custom_meta",
        ) from None
    return message


def decode_meta_columns(messages: Iterable[pb.MetaColumn], row_count: int) -> list[MetaColumn]:
    """Decode the custom_meta columns for `row_count` samples.

    Raises:
        InvalidArgumentError: a column name is empty or repeated, a column has no type, or the number of values does not
            match `row_count`.
    """
    columns: dict[str, MetaColumn] = {}
    for message in messages:
        if not message.name:
            raise InvalidArgumentError("a custom_meta column has no name; set its name", field="custom_meta")
        if message.name in columns:
            raise _wrong_column(message, "appears twice; send each column only once")
        columns[message.name] = _decode_meta_column(message, row_count)
    return list(columns.values())


def _wrong_column(message: pb.MetaColumn, problem: str) -> InvalidArgumentError:
    return InvalidArgumentError(
        f"custom_meta column {message.name!r} {problem}", field="custom_meta", metadata={"column": message.name}
    )


def _decode_meta_column(message: pb.MetaColumn, row_count: int) -> MetaColumn:
    values = _decode_values(message)
    if values.size == row_count and not message.kinds and not message.json_values:
        return MetaColumn(name=message.name, values=values, present=np.ones(row_count, np.bool_))
    if message.kinds:
        kinds = np.frombuffer(message.kinds, np.uint8)
        if kinds.size != row_count or kinds.max() > _REMOVED:
            raise _wrong_column(
                message,
                f"has {kinds.size} kinds up to {kinds.max()}; expected {row_count} kinds from 0 to {_REMOVED}, one per "
                "sample, or no kinds if all values have the same kind",
            )
    else:
        kind = _JSON if message.WhichOneof("values") is None and message.json_values else _TYPED
        kinds = np.full(row_count, kind, np.uint8)
    present, has_json, removed = kinds == _TYPED, kinds == _JSON, kinds == _REMOVED
    for got, mask, what in ((values.size, present, "values"), (len(message.json_values), has_json, "json_values")):
        expected = int(np.count_nonzero(mask))
        if got != expected:
            raise _wrong_column(
                message,
                f"has {got} {what}; expected {expected}, one for each of the {row_count} samples with such a value",
            )
    texts = None
    if message.json_values:
        texts = np.full(row_count, None, np.object_)
        texts[has_json] = list(message.json_values)
    column = _spread(message.name, values, present)
    return replace(column, json=texts, removed=removed if removed.any() else None)


def check_json(columns: Sequence[MetaColumn]) -> list[MetaColumn]:
    """Validate custom_meta columns from a client, and convert their JSON texts to canonical form.

    Raises:
        InvalidArgumentError: a text is not valid JSON, or is nested too deeply.
    """
    checked = []
    for column in columns:
        if column.json is not None:
            texts = np.full(column.present.size, None, np.object_)
            texts[column.has_json] = checked_texts(column.name, column.json[column.has_json].tolist())
            column = replace(column, json=texts)  # noqa: PLW2901
        checked.append(column)
    return checked


def _spread(name: str, values: NDArray[Any], present: NDArray[np.bool_]) -> MetaColumn:
    """Build a column from the values of the samples marked in `present`. The other samples have no value."""
    if values.size < present.size:
        column = np.full(present.size, "" if values.dtype == object else 0, values.dtype)
        column[present] = values
        values = column
    return MetaColumn(name=name, values=values, present=present)


def _decode_values(message: pb.MetaColumn) -> NDArray[Any]:
    field = message.WhichOneof("values")
    if field is None:
        if message.json_values or _REMOVED in message.kinds:
            return np.zeros(0, np.bool_)
        raise _wrong_column(message, f"has no values; set one of {', '.join(_DTYPES)}, or json_values")
    values = getattr(message, field).values
    if field == "string_values":
        known: dict[str, str] = {}  # stores equal texts, such as tags, only once
        return np.fromiter(map(known.setdefault, values, values), np.object_, len(values))
    return decode_integers(values) if field == "int64_values" else np.array(values, _DTYPES[field])


def encode_produced(masks: Iterable[NDArray[np.bool_]]) -> list[bytes]:
    """Encode each field's mask of the samples that have a cell as bits, or as empty bytes if all samples have one."""
    return [b"" if mask.all() else np.packbits(mask, bitorder="little").tobytes() for mask in masks]


def decode_produced(messages: Sequence[bytes], row_count: int) -> tuple[NDArray[np.bool_], ...]:
    """For each field, return a read-only mask of shape `(row_count,)`, which is True for samples that have a cell.

    Raises:
        InvalidArgumentError: a mask does not have one bit per sample.
    """
    all_of_them = np.ones(row_count, np.bool_)
    masks = []
    for message in messages:
        if message and len(message) != -(-row_count // 8):
            raise InvalidArgumentError(
                f"produced has {len(message)} bytes for {row_count} samples; expected one bit per sample, or no bytes",
                field="produced",
            )
        packed = np.frombuffer(message, np.uint8)
        mask = np.unpackbits(packed, count=row_count, bitorder="little").astype(np.bool_) if message else all_of_them
        mask.setflags(write=False)
        masks.append(mask)
    return tuple(masks)


def rows_to_meta_columns(rows: Sequence[Mapping[str, Any]]) -> list[MetaColumn]:
    """Convert the custom_meta mappings of `n` samples to columns that each have an entry for every sample.

    Values are JSON values, or numpy or torch scalars and arrays. None removes a value, and `JSON_NULL` stores null. A
    column has the type of its first number, boolean or text. Values of other types are stored as JSON. If integers and
    floats are mixed, the integers become floats. If a name is missing from a sample's mapping, the sample's value
    remains unchanged.

    Raises:
        InvalidArgumentError: JSON cannot represent a value; the message names the row and the key.
    """
    plain = rows if set(map(type, rows)) == {dict} else [_checked(position, row) for position, row in enumerate(rows)]
    # Fast path for the usual case in which all rows contain the same names. It runs no Python code per value.
    if plain and len(plain[0]) == len(set().union(*plain)) and len(set(map(len, plain))) == 1:
        present = np.ones(len(plain), np.bool_)
        return [_column(name, list(map(itemgetter(name), plain)), present) for name in plain[0]]
    return [
        _column(name, [row[name] for row in plain if name in row], np.array([name in row for row in plain]))
        for name in dict.fromkeys(chain.from_iterable(plain))
    ]


def values_to_meta_column(name: str, values: Any) -> MetaColumn:
    """Build a custom_meta column from an array, a tensor or a list with one value per sample.

    Args:
        name: name of the column.
        values: one value per sample. Additional dimensions become lists. None removes a value. See
            `rows_to_meta_columns` for the supported values.
    """
    if hasattr(values, "detach"):  # the values are a tensor
        tensor = values.detach().cpu()
        values = (tensor.double() if tensor.is_floating_point() else tensor).numpy()
    if isinstance(values, str | bytes | Mapping) or not isinstance(values, Iterable) or getattr(values, "ndim", 1) == 0:
        raise InvalidArgumentError(
            f"custom_meta[{name!r}] has type {type(values).__name__}; expected an array, a tensor or a list with one "
            "value per sample",
            field="custom_meta",
        )
    kind = ""
    if isinstance(values, np.ndarray) and values.ndim == 1 and values.dtype.itemsize <= 8:  # excludes longdouble
        kind = values.dtype.kind
    if kind in {"i", "f", "b"}:
        typed = cast("NDArray[Any]", values).astype(DTYPES[kind])
        return MetaColumn(name=_checked_name(name), values=typed, present=np.ones(typed.size, np.bool_))
    plain = cast("Any", values).tolist() if hasattr(values, "tolist") else list(values)
    return _column(name, plain, np.ones(len(plain), np.bool_))


def _checked(position: int, row: Any) -> dict[str, Any]:
    if not isinstance(row, Mapping):
        raise InvalidArgumentError(
            f"custom_meta[{position}] has type {type(row).__name__}; expected a mapping from names to values",
            field="custom_meta",
        )
    return dict(row)


def _column(name: str, values: list[Any], present: NDArray[np.bool_]) -> MetaColumn:
    """Build a column from the values of the samples marked in `present`."""
    name = _checked_name(name)
    kinds = set(map(type, values))
    array = np.array(values, np.object_) if kinds == {str} else exact_numbers(values, kinds)
    if array is not None:
        return _spread(name, array, present)
    return column_of(name, present.size, np.flatnonzero(present).tolist(), values)


def _checked_name(name: Any) -> str:
    if not isinstance(name, str) or not name:
        raise InvalidArgumentError(
            f"custom_meta contains the key {name!r}; expected a non-empty string", field="custom_meta"
        )
    return name


def meta_columns_to_rows(columns: Iterable[MetaColumn], row_count: int) -> list[dict[str, Any]]:
    """Convert custom_meta columns to one dict per sample. Missing values have no key in the sample's dict."""
    rows: list[dict[str, Any]] = [{} for _ in range(row_count)]
    for column in columns:
        name, values, has_value = column.name, column.objects(), column.has_value
        if has_value.all():
            for row, value in zip(rows, values, strict=True):
                row[name] = value
        else:
            for position in np.flatnonzero(has_value).tolist():
                rows[position][name] = values[position]
    return rows
