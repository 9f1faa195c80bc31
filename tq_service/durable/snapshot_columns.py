"""Columns of the domain as records of a snapshot, a few ten thousand values each, and back."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, Final

import numpy as np
from numpy.typing import DTypeLike, NDArray

from tq_service.domain.tables.column import FrozenColumn
from tq_service.domain.tables.puts import Put
from tq_service.v1 import metadata_pb2
from tq_service.v1 import snapshot_pb2 as pb

_NUMBERS_A_RECORD: Final = 1 << 16
_RUN_BYTES: Final = 12


def encode_numbers(name: str, column: FrozenColumn) -> Iterator[pb.SnapshotColumn]:
    """Yield the records of a column of integers, truth values or doubles."""
    for values in _joined(column.blocks(), _NUMBERS_A_RECORD):
        record = pb.SnapshotColumn(name=name)
        if values.dtype.kind == "f":
            record.doubles = values.astype("<f8", copy=False).tobytes()
        else:
            _encode_integers(values, record)
        yield record


def encode_strings(name: str, column: FrozenColumn) -> Iterator[pb.SnapshotColumn]:
    """Yield the records of a column of strings."""
    for values in column.blocks():
        present = values != None  # noqa: E711  (of each)
        strings = pb.SnapshotStrings()
        if not present.all():
            strings.present = present.tobytes()
        strings.values.extend(values[present].tolist())
        yield pb.SnapshotColumn(name=name, strings=strings)


def encode_puts(name: str, column: FrozenColumn) -> Iterator[pb.SnapshotColumn]:
    """Yield the records of a column of puts."""
    for values in column.blocks():
        numbers: dict[tuple[str, bytes] | None, int] = {None: 0}
        places = pb.SnapshotPlaces()
        puts: list[Put | None] = values.tolist()
        storages = [None if put is None else (put.storage_id, put.boot_id) for put in puts]
        of_slots = [numbers.setdefault(storage, len(numbers)) for storage in storages]
        places.storage_numbers = np.array(of_slots, "<i4").tobytes()
        places.put_ids.extend(put.put_id for put in puts if put is not None)
        places.storages.extend(
            metadata_pb2.StorageEndpoint(storage_id=storage[0], boot_id=storage[1]) for storage in numbers if storage
        )
        yield pb.SnapshotColumn(name=name, places=places)


def decode_column(take: Callable[[], pb.SnapshotColumn], size: int, dtype: DTypeLike) -> FrozenColumn:
    """Return the column of the next records, which together have `size` values.

    Raises:
        ValueError: they have more, or of another type.
    """
    values = np.empty(size, dtype)
    start = 0
    while start < size:
        record = take()
        some = _decode(record, values.dtype)
        if start + some.size > size:
            raise ValueError(f"column {record.name!r} has more than {size} values")
        values[start : start + some.size] = some
        start += some.size
    return FrozenColumn(values, size)


def _encode_integers(values: NDArray[Any], record: pb.SnapshotColumn) -> None:
    numbers = values.view(np.uint8) if values.dtype == np.bool_ else values
    base, top = int(numbers.min()), int(numbers.max())
    width = next(width for width in (0, 1, 2, 4, 8) if top - base < 1 << (8 * width))
    if width > 1:
        heads = np.flatnonzero(np.diff(numbers) != 1) + 1
        if (heads.size + 1) * _RUN_BYTES < width * numbers.size:
            record.runs.firsts = numbers[np.r_[0, heads]].astype("<i8").tobytes()
            record.runs.lengths = np.diff(np.r_[0, heads, numbers.size]).astype("<i4").tobytes()
            return
    integers = record.integers
    integers.count, integers.base, integers.width = numbers.size, base, width
    if width:
        integers.data = (numbers.astype(np.uint64) - np.uint64(base % (1 << 64))).astype(f"<u{width}").tobytes()


def _decode(record: pb.SnapshotColumn, dtype: np.dtype[Any]) -> NDArray[Any]:
    match record.WhichOneof("values"):
        case "integers" if dtype.kind in "iub":
            return _decode_integers(record.integers, dtype)
        case "runs" if dtype.kind in "iu":
            return _decode_runs(record.runs)
        case "doubles" if dtype.kind == "f":
            return np.frombuffer(record.doubles, "<f8")
        case "strings" if dtype.kind == "O":
            return _decode_strings(record.strings)
        case "places" if dtype.kind == "O":
            return _decode_places(record.places)
        case kind:
            raise ValueError(f"column {record.name!r} has {kind}, which are no values of type {dtype}")


def _decode_integers(integers: pb.SnapshotIntegers, dtype: np.dtype[Any]) -> NDArray[Any]:
    base = np.array([integers.base % (1 << 64)], np.uint64)
    if integers.width == 0:
        return np.full(integers.count, base.astype(np.int64)[0]).astype(dtype, copy=False)
    distances = np.frombuffer(integers.data, f"<u{integers.width}")
    return (distances + base).astype(np.int64, copy=False).astype(dtype, copy=False)


def _decode_runs(runs: pb.SnapshotRuns) -> NDArray[np.int64]:
    firsts, lengths = np.frombuffer(runs.firsts, "<i8"), np.frombuffer(runs.lengths, "<i4").astype(np.int64)
    ends = np.cumsum(lengths)
    return np.repeat(firsts - (ends - lengths), lengths) + np.arange(ends[-1], dtype=np.int64)


def _decode_strings(strings: pb.SnapshotStrings) -> NDArray[Any]:
    values = np.empty(len(strings.values), object)
    values[:] = list(strings.values)
    if not strings.present:
        return values
    present = np.frombuffer(strings.present, np.bool_)
    spread = np.full(present.size, None, object)
    spread[present] = values
    return spread


def _decode_places(places: pb.SnapshotPlaces) -> NDArray[Any]:
    storages = [(storage.storage_id, storage.boot_id) for storage in places.storages]
    numbers = np.frombuffer(places.storage_numbers, "<i4")
    values = np.full(numbers.size, None, object)
    taken = np.flatnonzero(numbers).tolist()
    for slot, number, put_id in zip(taken, numbers[taken].tolist(), places.put_ids, strict=True):
        storage_id, boot_id = storages[number - 1]
        values[slot] = Put(storage_id, boot_id, put_id)
    return values


def _joined(blocks: Iterable[NDArray[Any]], least: int) -> Iterator[NDArray[Any]]:
    """Yield the values of blocks in arrays of at least so many, the last one apart."""
    some: list[NDArray[Any]] = []
    size = 0
    for block in blocks:
        some.append(block)
        size += block.size
        if size >= least:
            yield np.concatenate(some)
            some, size = [], 0
    if some:
        yield np.concatenate(some)
