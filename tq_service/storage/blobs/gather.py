"""Copying slices of a blob one after the other. Threads do it for files, and where it takes long."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import numpy as np
from numpy.typing import NDArray

from tq_service.errors import TqError
from tq_service.schema import FieldSpec
from tq_service.storage.blobs.base import Blob
from tq_service.storage.cells import Rows
from tq_service.wire.columns import fixed_row_bytes
from tq_service.wire.runs import expand_runs

Octets = NDArray[np.uint8]
_SMALL_BYTES: Final = 1024
_FEW_UNITS: Final = 128  # in a slice, up to which numpy copies it sooner unit by unit than Python in one piece
_FEW_SLICES: Final = 16
_BLOCK_BYTES: Final = 256 << 10  # of scattered slices: some 2 ms
_PIECE_BYTES: Final = 1 << 20
_READ_BYTES: Final = 8 << 10  # take about as long to read as a read of their own costs
_LARGEST_WINDOW_BYTES: Final = 8 << 20


class UnreadableError(Exception):
    """The bytes of a blob cannot be read."""

    def __init__(self, blob: Blob, cause: OSError) -> None:
        super().__init__(blob, cause)
        self.blob = blob
        self.cause = cause


def unit_of(spec: FieldSpec) -> int:
    """Return the bytes of which all rows of a field, and where they start in its values, are multiples."""
    row_bytes = fixed_row_bytes(spec)
    return row_bytes if row_bytes and row_bytes <= _SMALL_BYTES else spec.itemsize


def are_scattered(sizes: Rows, unit: int) -> bool:
    """Whether slices are so many and small that copying them together costs less than a view of each."""
    mean_most = min(_SMALL_BYTES, _FEW_UNITS * unit)
    return len(sizes) >= _FEW_SLICES and int(sizes.sum()) < mean_most * len(sizes)


def blocks(puts: Rows, starts: Rows, sizes: Rows, unit: int) -> Iterator[tuple[Rows, Rows, Rows]]:
    """Cut slices into blocks to be gathered in one step, large slices into several, none within a unit.

    Args:
        puts: which blob each slice is in.
        starts: where each starts in it.
        sizes: their bytes.
        unit: see `gather`.

    Yields:
        The same of some slices.
    """
    most_bytes = max((_BLOCK_BYTES if are_scattered(sizes, unit) else _PIECE_BYTES) // unit, 1) * unit
    counts = -(-sizes // most_bytes)
    if (counts > 1).any():
        pieces = expand_runs(np.zeros_like(counts), counts) * most_bytes
        puts, starts = np.repeat(puts, counts), np.repeat(starts, counts) + pieces
        sizes = np.minimum(np.repeat(sizes, counts) - pieces, most_bytes)
    ends = np.cumsum(sizes)
    first = done = 0
    while first < len(sizes):
        last = max(int(np.searchsorted(ends, done + most_bytes, "right")), first + 1)
        yield puts[first:last], starts[first:last], sizes[first:last]
        first, done = last, int(ends[last - 1])


def gather(blob: Blob, starts: Rows, sizes: Rows, target: Octets, unit: int = 1) -> None:
    """Copy slices of a blob one after the other into `target`, which they fill; any thread may while it is pinned.

    Args:
        blob: the blob.
        starts: where each slice starts, all of them multiples of `unit` apart.
        sizes: their bytes, multiples of `unit`.
        target: memory of as many bytes.
        unit: bytes of which all slices are made up.

    Raises:
        UnreadableError: they cannot be read.
    """
    try:
        _gather(blob, starts, sizes, target, unit)
    except TqError:  # which may be an OSError too
        raise
    except OSError as error:
        raise UnreadableError(blob, error) from error


def _gather(blob: Blob, starts: Rows, sizes: Rows, target: Octets, unit: int) -> None:
    if blob.is_local:
        gather_from(np.frombuffer(blob.view(), np.uint8), starts, sizes, target, unit)
        return
    first = int(starts.min())
    window_bytes = int((starts + sizes).max()) - first
    if len(sizes) > 1 and window_bytes <= min(_LARGEST_WINDOW_BYTES, max(target.size, _READ_BYTES * len(sizes))):
        window = np.empty(window_bytes, np.uint8)
        blob.read_into(window.data, first)
        gather_from(window, starts - first, sizes, target, unit)
        return
    ends = np.cumsum(sizes)
    targets = (target.data[end - size : end] for end, size in zip(ends.tolist(), sizes.tolist(), strict=True))
    blob.read_slices(zip(starts.tolist(), targets, strict=True))


def gather_from(source: Octets, starts: Rows, sizes: Rows, target: Octets, unit: int) -> None:
    """Copy slices of memory one after the other, see `gather`."""
    if are_scattered(sizes, unit):
        base = int(starts[0]) % unit
        table = source[base : base + (source.size - base) // unit * unit].reshape(-1, unit)
        rows = expand_runs((starts - base) // unit, sizes // unit)
        # mode "raise" would copy once more
        np.take(table, rows, axis=0, out=target.reshape(-1, unit), mode="clip")
        return
    at = 0
    for start, size in zip(starts.tolist(), sizes.tolist(), strict=True):
        target[at : at + size] = source[start : start + size]
        at += size
