"""Columns as parts of a few ten thousand values each, and back.

A part has the form that takes the fewest bytes of those that its dtype allows:

- same: (count, value): booleans and integers that are all the same;
- integers: (base, distances): booleans and integers, as unsigned numbers above `base`, of few bytes;
- runs: (firsts, lengths): integers that mostly count up by 1;
- values: (values,): doubles, and objects that are text or None;
- tuples: (heads, numbers, lasts): objects that are tuples of equal length or None. A tuple is one of a few heads, and a
  last value. `numbers` has the position of its head plus 1, or 0 for None; `lasts` has a value for each tuple.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from tq_service.errors import NewerVersionError
from tq_service.journal.record_file import gathered

Part: TypeAlias = tuple[str, tuple[Any, ...]]
"""Form and content of a part."""
_NUMBERS_A_PART: Final = 1 << 16
_RUN_BYTES: Final = 12


def encode_column(dtype: np.dtype[Any], blocks: Iterable[NDArray[Any]]) -> Iterator[Part]:
    """Yield the parts of a column whose values come in blocks."""
    is_object = dtype == np.object_
    for values in map(np.concatenate, gathered(blocks, 1 if is_object else _NUMBERS_A_PART, np.size)):
        yield _encode_objects(values) if is_object else _encode_numbers(values)


def decode_part(part: Part, dtype: np.dtype[Any], make: Callable[[tuple[Any, ...]], Any]) -> NDArray[Any]:
    """Return the values of a part.

    Args:
        part: as `encode_column` yields it.
        dtype: of the column.
        make: returns the object of a tuple.

    Raises:
        ValueError: it has values of another type.
        NewerVersionError: its form is unknown.
    """
    values: NDArray[Any]
    form, content = part
    match form:
        case "same":
            count, value = content
            values = np.full(count, value, np.int64)
        case "integers":
            base, distances = content
            values = (distances + np.array([base % (1 << 64)], np.uint64)).astype(np.int64, copy=False)
        case "runs":
            firsts, lengths = content
            ends = np.cumsum(lengths, dtype=np.int64)
            values = np.repeat(firsts - (ends - lengths), lengths) + np.arange(ends[-1], dtype=np.int64)
        case "values":
            (values,) = content
        case "tuples":
            heads, numbers, lasts = content
            values = np.full(numbers.size, None, np.object_)
            where = np.flatnonzero(numbers)
            # One by one: numpy would take tuples for rows.
            for position, number, last in zip(where.tolist(), numbers[where].tolist(), lasts, strict=True):
                values[position] = make((*heads[number - 1], last))
        case _:
            raise NewerVersionError(f"it has the unknown form {form!r}, which a newer version wrote: install that one")
    if values.dtype.kind != ("i" if dtype.kind in "iub" else dtype.kind):
        raise ValueError(f"it has {form} of {values.dtype}, expected values of {dtype}")
    return values.astype(dtype, copy=False)


def _encode_numbers(values: NDArray[Any]) -> Part:
    if values.dtype.kind == "f":
        return "values", (values,)
    numbers = values.view(np.uint8) if values.dtype == np.bool_ else values
    base, top = int(numbers.min()), int(numbers.max())
    if base == top:
        return "same", (numbers.size, base)
    width = next(width for width in (1, 2, 4, 8) if top - base < 1 << (8 * width))
    if width > 1:
        heads = np.flatnonzero(np.diff(numbers) != 1) + 1
        if (heads.size + 1) * _RUN_BYTES < width * numbers.size:
            firsts = numbers[np.r_[0, heads]].astype(np.int64)
            return "runs", (firsts, np.diff(np.r_[0, heads, numbers.size]).astype(np.int32))
    distances = numbers.astype(np.uint64) - np.uint64(base % (1 << 64))
    return "integers", (base, distances.astype(f"u{width}"))


def _encode_objects(values: NDArray[Any]) -> Part:
    present = values != None  # noqa: E711  (of each)
    objects = values[present].tolist()
    if not objects or not isinstance(objects[0], tuple):
        return "values", (values,)
    positions: dict[tuple[Any, ...], int] = {}
    numbers = np.zeros(values.size, np.int32)
    numbers[present] = [positions.setdefault(each[:-1], len(positions) + 1) for each in objects]
    return "tuples", (list(positions), numbers, [each[-1] for each in objects])
