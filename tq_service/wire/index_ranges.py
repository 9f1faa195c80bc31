"""The samples of a BatchMeta: listed, or as ranges where they are many and most of them follow each other."""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

from tq_service.errors import InvalidArgumentError
from tq_service.v1 import metadata_pb2 as pb
from tq_service.wire.metadata import decode_integers

Indexes = NDArray[np.int64]
_FEW: Final = 64  # which are listed without a look at them
_LEAST_MEAN_LENGTH: Final = 4
_MOST_INDEXES: Final = 2**31  # a few bytes must not make a reader reserve whatever they say


def set_indexes(message: pb.BatchMeta, indexes: Indexes | range) -> None:
    """Name the samples of a batch, which has none yet."""
    if isinstance(indexes, range):
        if len(indexes) > _FEW:
            message.index_ranges.firsts.append(indexes.start)
            message.index_ranges.counts.append(len(indexes))
        else:
            message.global_indexes.extend(indexes)
        return
    if indexes.size > _FEW:
        heads = np.flatnonzero(np.diff(indexes) != 1) + 1
        if (heads.size + 1) * _LEAST_MEAN_LENGTH <= indexes.size:
            starts = np.concatenate(([0], heads))
            message.index_ranges.firsts.extend(indexes[starts].tolist())
            message.index_ranges.counts.extend(np.diff(starts, append=indexes.size).tolist())
            return
    message.global_indexes.extend(indexes.tolist())


def read_indexes(message: pb.BatchMeta) -> Indexes:
    """Return the samples of a batch, in order.

    Raises:
        InvalidArgumentError: both forms, ranges that are none, or too many samples.
    """
    if not message.HasField("index_ranges"):
        return decode_integers(message.global_indexes)
    firsts = decode_integers(message.index_ranges.firsts)
    counts = decode_integers(message.index_ranges.counts)
    if message.global_indexes or firsts.size != counts.size or bool((counts < 1).any()):
        raise InvalidArgumentError(
            f"index_ranges has {firsts.size} firsts and {counts.size} counts beside {len(message.global_indexes)} "
            f"global_indexes; send as many counts as firsts, each 1 or more, and no global_indexes",
            field="index_ranges",
        )
    if float(counts.sum(dtype=np.float64)) > _MOST_INDEXES:
        raise InvalidArgumentError(
            f"index_ranges names more than {_MOST_INDEXES} samples; ask for fewer", field="index_ranges"
        )
    return expand_runs(firsts, counts)


def expand_runs(firsts: Indexes, counts: Indexes) -> Indexes:
    """Return the numbers in runs of neighbours: of each run the first, and how many there are."""
    starts = np.cumsum(counts) - counts
    return np.repeat(firsts - starts, counts) + np.arange(int(counts.sum()), dtype=np.int64)
