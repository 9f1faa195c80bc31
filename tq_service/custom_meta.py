"""Columns of custom_meta. They hold typed values, which claims can compare and sort, and all other values as JSON.

The first number, bool or string in a column determines its type. Null, lists, objects and scalars of other types are
stored separately as JSON text. A column therefore accepts any JSON value, and typed values incur no extra cost.
`where`, `order_by` and samplers read only typed values.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any, Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from tq_service.errors import InvalidArgumentError
from tq_service.schema import LARGEST_EXACT, Scalar

MOST_JSON_DEPTH: Final = 32
"""Maximum nesting depth of lists and objects in a JSON value."""

JsonValue: TypeAlias = "Scalar | Sequence[JsonValue] | Mapping[str, JsonValue] | None"


class JsonNull(Enum):
    """The type of `JSON_NULL`."""

    JSON_NULL = "null"

    def __repr__(self) -> str:
        return "tq.JSON_NULL"


JSON_NULL: Final = JsonNull.JSON_NULL
"""Write this value to store null for a sample; readers then receive None. Writing None removes the sample's value."""
_NULL: Final = "null"

MetaValue: TypeAlias = "JsonValue | JsonNull"


def keeping_nulls(rows: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return a copy of the custom_meta rows with None replaced by `JSON_NULL`, which is stored as null."""
    return [{name: JSON_NULL if value is None else value for name, value in row.items()} for row in rows]


_INT64: Final = np.iinfo(np.int64)
_KINDS: Final = {bool: "b", int: "i", float: "f", str: "O"}
DTYPES: Final[Mapping[str, Any]] = {"i": np.int64, "f": np.float64, "b": np.bool_, "O": np.object_}
KIND_NAMES: Final = {"i": "int64", "f": "double", "b": "bool", "O": "string"}


@dataclass(frozen=True, slots=True, kw_only=True)
class MetaColumn:
    """The values that several samples have in one custom_meta column.

    Attributes:
        name: name of the column.
        values: typed values, as an array of shape `(n,)` and dtype int64, float64, bool or object (str). The entries
            for samples without a typed value are undefined.
        present: bool array of shape `(n,)`, True for samples with a typed value.
        json: array of shape `(n,)` and dtype object, with the JSON text of samples whose value is not typed, and None
            for others. The attribute is None if no sample has a JSON value.
        removed: bool array of shape `(n,)`, True for samples whose value the write removes. The attribute is None if
            the write does not remove any values.
    """

    name: str
    values: NDArray[Any]
    present: NDArray[np.bool_]
    json: NDArray[Any] | None = None
    removed: NDArray[np.bool_] | None = None

    @property
    def has_json(self) -> NDArray[np.bool_]:
        """Bool array of shape `(n,)`, True for samples with a JSON value."""
        return np.zeros(self.present.size, np.bool_) if self.json is None else self.json != None  # noqa: E711  (of each)

    @property
    def has_value(self) -> NDArray[np.bool_]:
        """Bool array of shape `(n,)`, True for samples with a typed value or a JSON value."""
        return self.present if self.json is None else self.present | self.has_json

    @property
    def is_written(self) -> NDArray[np.bool_]:
        """Bool array of shape `(n,)`, True for samples whose value is set or removed when this column is written."""
        return self.has_value if self.removed is None else self.has_value | self.removed

    def at(self, positions: NDArray[Any]) -> MetaColumn:
        """Return a column that contains only the samples at `positions`."""
        return MetaColumn(
            name=self.name,
            values=self.values[positions],
            present=self.present[positions],
            json=None if self.json is None else self.json[positions],
            removed=None if self.removed is None else self.removed[positions],
        )

    def text_sizes(self, size_of: Callable[[str], int]) -> NDArray[np.int64]:
        """Apply `size_of` to each sample's string and JSON text, and return the sums as an array of shape `(n,)`."""
        sizes = np.zeros(self.present.size, np.int64)
        texts = self.values if self.values.dtype.kind == "O" else None
        for values, has_one in ((texts, self.present), (self.json, self.has_json)):
            if values is not None:
                sizes[has_one] += np.fromiter(map(size_of, values[has_one].tolist()), np.int64)
        return sizes

    def objects(self) -> list[Any]:
        """Return the samples' values as Python objects. Entries are undefined where `has_value` is False."""
        values: list[Any] = self.values.tolist()
        if self.json is not None:
            for position in np.flatnonzero(self.has_json).tolist():
                text = self.json[position]
                values[position] = None if text == _NULL else json.loads(text)
        return values


# Columns of values


def column_of(name: str, size: int, positions: Sequence[int], values: Sequence[Any]) -> MetaColumn:
    """Build a column for `size` samples from JSON values of any type at the given positions. None removes a value.

    Raises:
        InvalidArgumentError: a value cannot be represented as JSON. The message contains the position of the value.
    """
    removed = np.zeros(size, np.bool_)
    texts = np.full(size, None, np.object_)
    scalars: dict[int, Scalar] = {}
    for position, value in zip(positions, values, strict=True):
        if value is None:
            removed[position] = True
            continue
        plain = _plain_value(value, (position, name))
        if type(plain) in _KINDS:
            scalars[position] = plain
        else:
            texts[position] = to_json(name, position, plain)
    column = _assembled(name, _kind_of(list(scalars.values())), scalars, texts)
    return replace(column, removed=removed) if removed.any() else column


def no_values(name: str, size: int, kind: str = "b") -> MetaColumn:
    """Return a column of the given type for `size` samples, none of which has a value."""
    values = np.full(size, "" if kind == "O" else 0, DTYPES[kind])
    return MetaColumn(name=name, values=values, present=np.zeros(size, np.bool_))


def fitted(column: MetaColumn, kind: str | None) -> MetaColumn:
    """Convert a column to another type. Scalars that fit the type become typed values; all other values become JSON.

    Args:
        column: the column to convert.
        kind: the new type, as a numpy kind. If None, the column gets the type of the first scalar.

    Raises:
        InvalidArgumentError: a number that does not fit the type is infinite or NaN, and therefore cannot become JSON.
    """
    scalars: dict[int, Scalar] = {}
    texts = np.full(column.present.size, None, np.object_)
    rows = zip(column.present.tolist(), column.values.tolist(), _texts(column), strict=True)
    for position, (is_typed, value, text) in enumerate(rows):
        if is_typed:
            scalars[position] = value
        elif text is not None and text[0] not in "[{n":
            scalars[position] = json.loads(text)
        else:
            texts[position] = text
    return replace(
        _assembled(column.name, kind or _kind_of(list(scalars.values())), scalars, texts), removed=column.removed
    )


def _texts(column: MetaColumn) -> list[str | None]:
    return [None] * column.present.size if column.json is None else column.json.tolist()


def _kind_of(scalars: Sequence[Scalar]) -> str:
    """Return the kind of the scalars, which is that of the first one.

    For a mix of integers and floats, return the float kind if every integer can be represented exactly as a float.
    """
    kind = _KINDS[type(scalars[0])] if scalars else "b"
    if kind == "i" and all(_fits("f", each) for each in scalars if type(each) is int):
        kind = "f" if float in set(map(type, scalars)) else "i"
    return kind


def _fits(kind: str, value: Scalar) -> bool:
    if type(value) is int:
        return _INT64.min <= value <= _INT64.max if kind == "i" else kind == "f" and abs(value) <= LARGEST_EXACT
    return _KINDS[type(value)] == kind


def _assembled(name: str, kind: str, scalars: Mapping[int, Scalar], texts: NDArray[Any]) -> MetaColumn:
    """Build a column from JSON texts and from scalars keyed by their position in the column.

    Scalars that do not fit the kind are converted to JSON text.
    """
    column = no_values(name, texts.size, kind)
    for position, value in scalars.items():
        if _fits(kind, value):
            column.present[position], column.values[position] = True, value
        else:
            texts[position] = to_json(name, position, value, beside=KIND_NAMES[kind])
    return replace(column, json=texts) if any(text is not None for text in texts.tolist()) else column


def concatenated(columns: Sequence[MetaColumn]) -> MetaColumn:
    """Concatenate columns. Values that do not fit the type of the first typed column become JSON."""
    kinds = [column.values.dtype.kind for column in columns if column.present.any()]
    kind = "f" if set(kinds) == {"i", "f"} else next(iter(kinds), "b")
    alike = [column if column.values.dtype.kind == kind else fitted(column, kind) for column in columns]
    has_json = any(column.json is not None for column in alike)
    return MetaColumn(
        name=columns[0].name,
        values=np.concatenate([column.values for column in alike]),
        present=np.concatenate([column.present for column in alike]),
        json=np.array([text for column in alike for text in _texts(column)], np.object_) if has_json else None,
    )


def laid_over(old: MetaColumn, new: MetaColumn) -> MetaColumn:
    """Return the state of a column after a write to its samples.

    New values replace old values. New values of a different type are stored as JSON.
    """
    rows = np.arange(new.present.size)
    return concatenated([old, new]).at(np.where(new.is_written, rows + rows.size, rows))


# JSON


def to_json(name: str, position: int, value: Any, *, beside: str = "") -> str:
    """Convert a value made up of plain JSON types to JSON text.

    Raises:
        InvalidArgumentError: a number is not finite, or text is not valid Unicode. The message contains the column and
            the position.
    """
    try:
        text = _dumped(value)
    except ValueError as error:  # includes UnicodeEncodeError
        where = f", in a column of {beside} values" if beside else ""
        raise InvalidArgumentError(
            f"custom_meta[{position}][{name!r}] is {value!r:.200}{where}, which cannot be encoded as JSON ({error}); "
            "use finite numbers and valid Unicode",
            field="custom_meta",
        ) from None
    return text


def _dumped(value: Any) -> str:
    if value is None:  # fast path, because tags are often null
        return _NULL
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    text.encode()
    return text


def checked_texts(name: str, texts: Iterable[str]) -> list[str]:
    """Validate JSON texts received from a client, and convert them to their normalized form.

    Raises:
        InvalidArgumentError: one of the texts is not valid JSON or is nested too deeply.
    """
    known: dict[str, str] = {}  # because most columns repeat a few texts
    return [known.get(text) or known.setdefault(text, _checked_text(name, text)) for text in texts]


def _checked_text(name: str, text: str) -> str:
    try:
        value = json.loads(text, parse_constant=_no_constant)
        kept = _dumped(value)
    except (ValueError, RecursionError) as error:
        raise InvalidArgumentError(
            f"custom_meta column {name!r} has the JSON text {text!r:.200}, which is invalid ({error}); expected null, "
            "a number that fits a double, a string of valid Unicode, true, false, a list or an object",
            field="custom_meta",
            metadata={"column": name},
        ) from None
    if text.count("[") + text.count("{") > MOST_JSON_DEPTH and _depth(value) > MOST_JSON_DEPTH:
        raise _too_deep(f"custom_meta column {name!r}")
    return kept


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is not valid JSON")


def _depth(value: Any) -> int:
    """Return how deeply lists and objects are nested, or the limit plus one if the depth exceeds the limit."""
    depth, level = 0, [value]
    while depth <= MOST_JSON_DEPTH:
        level = [each for each in level if isinstance(each, list | dict)]
        if not level:
            break
        depth += 1
        level = [one for each in level for one in (each.values() if isinstance(each, dict) else each)]
    return depth


def _too_deep(where: str) -> InvalidArgumentError:
    return InvalidArgumentError(
        f"{where} nests more than {MOST_JSON_DEPTH} lists and objects; store the value as an object field instead",
        field="custom_meta",
    )


def _plain_value(value: Any, path: tuple[Any, ...]) -> Any:
    """Convert a value to JSON types. Numpy and torch values become numbers and lists, and tuples become lists.

    Args:
        value: the value to convert.
        path: location of the value, consisting of the sample's position, the column's name, and the positions and keys
            within nested lists and dicts.
    """
    if type(value) in _KINDS or value is None:
        return value
    if value is JSON_NULL:
        return None
    if hasattr(value, "tolist"):
        value = value.tolist()
    for kind in _KINDS:
        if isinstance(value, kind):
            return kind(value)
    is_object = isinstance(value, Mapping)
    if not is_object and not isinstance(value, list | tuple):
        raise InvalidArgumentError(
            f"{_shown(path)} has type {type(value).__name__}; expected a JSON value: bool, int, float, str, None, or a "
            "list or dict of these. Store values of other types in a field",
            field="custom_meta",
        )
    if len(path) == MOST_JSON_DEPTH + 2:
        raise _too_deep(_shown(path[:2]))
    if not is_object:
        return [_plain_value(one, (*path, place)) for place, one in enumerate(value)]
    for key in value:
        if not isinstance(key, str):
            raise InvalidArgumentError(
                f"{_shown(path)} has the key {key!r:.200}; expected a string, because JSON object keys are strings",
                field="custom_meta",
            )
    return {str(key): _plain_value(one, (*path, key)) for key, one in value.items()}


def _shown(path: tuple[Any, ...]) -> str:
    return "custom_meta" + "".join(f"[{place!r}]" for place in path)
