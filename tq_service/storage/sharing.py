"""Which columns of a read a client of the same host can take from shared memory, and where they are in it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from tq_service.storage.cells import Rows
from tq_service.storage.reading import Reading
from tq_service.storage.shared_region import SharedRegion

# Below these, the bytes are sent sooner than a file descriptor is handed over and mapped, or slices are copied one by
# one.
_LEAST_COLUMN_BYTES: Final = 64 << 10
_LEAST_MEAN_SLICE_BYTES: Final = 4 << 10


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SharedSlices:
    """A column in shared memory: slices, one after the other.

    Attributes:
        column_index: which column of the read.
        memory_indexes: for each slice, the index of its memory in `Shared.fds`.
        starts: where each starts in its memory, in bytes.
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
        fds: file descriptors of the memory, open as long as the read is.
        columns: the columns in it.
    """

    fds: Sequence[int]
    columns: Sequence[SharedSlices]


def shared_part(reading: Reading) -> Shared:
    """Return the columns of a read that lie in shared memory from end to end, in slices large enough to pay."""
    number_of: dict[int, int] = {}  # of the puts, in the order of the file descriptors
    columns = []
    for index, header in enumerate(reading.headers):
        if header.value_bytes < _LEAST_COLUMN_BYTES:
            continue
        puts, starts, sizes = reading.slices(index)
        if header.value_bytes < _LEAST_MEAN_SLICE_BYTES * len(sizes):
            continue
        distinct, of_slice = np.unique(puts, return_inverse=True)
        regions = [reading.region(put) for put in distinct.tolist()]
        shared_at = [region.shared_at for region in regions if isinstance(region, SharedRegion)]
        if len(shared_at) < len(regions):
            continue
        numbers = [number_of.setdefault(put, len(number_of)) for put in distinct.tolist()]
        columns.append(
            SharedSlices(
                column_index=index,
                memory_indexes=np.array(numbers, np.int64)[of_slice],
                starts=starts - np.array(shared_at, np.int64)[of_slice],
                sizes=sizes,
            )
        )
    fds = [region.fd for region in map(reading.region, number_of) if isinstance(region, SharedRegion)]
    return Shared(fds=fds, columns=columns)
