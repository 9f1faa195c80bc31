"""Which columns of a read a client of the same host can take from shared memory, and where they are in it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from tq_service.storage.cells import Rows, expand_runs
from tq_service.storage.index.reading import Reading

# Below these, the bytes are sent sooner than a file descriptor is sent and mapped, or slices are copied one by
# one.
_LEAST_COLUMN_BYTES: Final = 64 << 10
_LEAST_MEAN_SLICE_BYTES: Final = 4 << 10


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SharedSlices:
    """A column in shared memory: slices, one after the other.

    Attributes:
        column_index: which column of the read.
        memory_indexes: for each slice, the index of its memfd in `Shared.fds`.
        starts: where each starts in its memfd, in bytes.
        sizes: their bytes.
    """

    column_index: int
    memory_indexes: Rows
    starts: Rows
    sizes: Rows


@dataclass(frozen=True, slots=True, kw_only=True)
class Shared:
    """The part of a read that is in shared memory.

    Attributes:
        fds: file descriptors of the memfds, open as long as the read is.
        columns: the columns in them.
    """

    fds: Sequence[int] = ()
    columns: Sequence[SharedSlices] = ()

    @property
    def column_indexes(self) -> frozenset[int]:
        """Which columns of the read these are."""
        return frozenset(column.column_index for column in self.columns)


def shared_part(reading: Reading) -> Shared:
    """Return the columns of a read that lie in shared memory from end to end, in slices large enough to pay."""
    fds: dict[int, int] = {}  # each with its index
    columns = []
    for index, header in enumerate(reading.headers):
        if header.value_bytes < _LEAST_COLUMN_BYTES:
            continue
        puts, starts, sizes = reading.slices(index)
        if header.value_bytes >= _LEAST_MEAN_SLICE_BYTES * len(sizes):
            columns += _shared_slices(reading, index, (puts, starts, sizes), fds)
    return Shared(fds=list(fds), columns=columns)


def _shared_slices(
    reading: Reading, column_index: int, slices: tuple[Rows, Rows, Rows], fds: dict[int, int]
) -> list[SharedSlices]:
    """Return the slices of a column in memfds, which are added to `fds`; nothing where one is not in shared memory."""
    puts, starts, sizes = slices
    distinct, put_of = np.unique(puts, return_inverse=True)
    blobs = [reading.blob(put) for put in distinct.tolist()]
    if not all(blob.fds for blob in blobs):
        return []
    segment_bytes = np.array([blob.segment_bytes for blob in blobs], np.int64)[put_of]
    first_segments = starts // segment_bytes
    counts = (starts + sizes - 1) // segment_bytes - first_segments + 1
    owners = np.repeat(np.arange(len(counts)), counts)
    segments = expand_runs(first_segments, counts)
    segment_starts = segments * segment_bytes[owners]
    first = np.maximum(starts[owners], segment_starts)
    last = np.minimum((starts + sizes)[owners], segment_starts + segment_bytes[owners])
    memories = [blobs[put].fds[segment] for put, segment in zip(put_of[owners], segments.tolist(), strict=True)]
    return [
        SharedSlices(
            column_index=column_index,
            memory_indexes=np.array([fds.setdefault(fd, len(fds)) for fd in memories], np.int64),
            starts=first - segment_starts,
            sizes=last - first,
        )
    ]
