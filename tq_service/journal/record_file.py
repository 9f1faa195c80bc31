"""Files of records, one in each frame, and columns as such records.

A file appears under its name once it is complete and on the disk: "tqrecs02", then the records, numbered from 0 on (see
`file_backend`), and a frame without a body.

A column is stored in parts of a few ten thousand values each. A part has the form that takes the fewest bytes of those
that its dtype allows:

- same: (count, value): booleans and integers that are all the same;
- integers: (base, distances): booleans and integers, as unsigned numbers above `base`, of few bytes;
- runs: (firsts, lengths): integers that mostly count up by 1;
- values: (values,): doubles, and objects that are text or None;
- tuples: (heads, numbers, lasts): objects that are tuples of equal length or None. A tuple is one of a few heads, and a
  last value. `numbers` has the position of its head plus 1, or 0 for None; `lasts` has a value for each tuple.
"""

from __future__ import annotations

import errno
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

from tq_service.errors import NewerVersionError, SnapshotDamagedError
from tq_service.journal.file_backend import HEADER_BYTES, RESERVE_BYTES, Break, frame, read_frame
from tq_service.journal.files import FileWriter, free_bytes

_MAGIC: Final = b"tqrecs02"
_BUFFER_BYTES: Final = 1 << 20
_SPARE_BYTES: Final = 2 * RESERVE_BYTES
"""Disk space left free for the log, and for its reserve."""
_WORK_SECONDS: Final = 0.0005
_REST_SECONDS: Final = 0.0001
Each = TypeVar("Each")


class Pace:
    """Makes Python code in a thread rest every half a millisecond, so that the event loop runs.

    The interpreter alone switches threads every 5 ms, a delay for each step of the loop.
    """

    def __init__(self) -> None:
        self._resumed_at = time.perf_counter()

    def step(self) -> None:
        """Rest for a moment if it is time."""
        if time.perf_counter() - self._resumed_at > _WORK_SECONDS:
            time.sleep(_REST_SECONDS)
            self._resumed_at = time.perf_counter()


class RecordWriter(FileWriter):
    """Writes records in order, in a thread that leaves time to an event loop.

    Raises:
        OSError: the file cannot be written, or would leave hardly any space on the disk.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(path, _BUFFER_BYTES)
        self.file.write(_MAGIC)
        self.count = 0
        self._pace = Pace()
        self._unchecked_bytes = 0  # written since free space was last looked up

    def write(self, *parts: bytes | memoryview) -> None:
        """Append a record, whose bytes may come in parts."""
        head, body = frame(self.count, parts)
        self.file.write(head)
        self.file.write(body)
        self.count += 1
        self._unchecked_bytes += len(body)
        if self._unchecked_bytes >= _BUFFER_BYTES:
            self._unchecked_bytes = 0
            free = free_bytes(self._partial.parent)
            if free < _SPARE_BYTES:
                raise OSError(errno.ENOSPC, f"the disk has {free} bytes free, of which {_SPARE_BYTES} stay so")
        self._pace.step()

    def commit(self) -> None:
        """End the file, and give it its name."""
        self.file.writelines(frame(self.count, ()))
        super().commit()


class Found(NamedTuple):
    """A record, its number, and its position in the file."""

    at: int
    number: int
    data: bytes


def read_records(path: Path, at: int = 0, number: int = 0) -> Iterator[Found]:
    """Yield the records of a file.

    Args:
        path: the file.
        at: position of the first one to read; 0 for the first of all.
        number: of that record.

    Raises:
        SnapshotDamagedError: the file differs from the written one.
        OSError: it cannot be read.
    """
    with path.open("rb", buffering=_BUFFER_BYTES) as file:
        try:
            if file.read(len(_MAGIC)) != _MAGIC:
                raise Break("does not begin like a file of records")
            at = at or len(_MAGIC)
            file.seek(at)
            while body := read_frame(file, number):
                yield Found(at, number, body)
                at += HEADER_BYTES + len(body)
                number += 1
            if file.read(1):
                raise Break("continues after its end")
        except Break as flaw:
            raise damaged(path, at, f"it {flaw}") from None


def gathered(values: Iterable[Each], least: int, size_of: Callable[[Each], int] = lambda _: 1) -> Iterator[list[Each]]:
    """Yield values in lists of at least this size together; the last list may be smaller."""
    some: list[Each] = []
    size = 0
    for value in values:
        some.append(value)
        size += size_of(value)
        if size >= least:
            yield some
            some, size = [], 0
    if some:
        yield some


def damaged(path: Path, at: int, problem: str) -> SnapshotDamagedError:
    """Return the error for damage at a position of a file."""
    return SnapshotDamagedError(
        f"{path} is damaged at byte {at}: {problem}; go on with an older one, or restore a checkpoint",
        metadata={"path": str(path), "byte": str(at)},
    )


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
