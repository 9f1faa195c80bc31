"""Checks of what callers pass as lengths and partition counts."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Lengths = Sequence[int] | NDArray[np.integer]

# Sums of all lengths must stay exact in int64.
_LARGEST_TOTAL = 2**62


def check_lengths(seqlen_list: Lengths) -> NDArray[np.int64]:
    """Return the lengths as an int64 array `(n,)`.

    Raises:
        ValueError: not one-dimensional, not integers, negative, or too large to add up exactly.
    """
    try:
        lengths = np.asarray(seqlen_list)
    except ValueError as error:
        raise ValueError(
            f"seqlen_list: got rows of different sizes, expected a flat list of integers ({error})"
        ) from error
    if lengths.ndim != 1:
        raise ValueError(f"seqlen_list: got an array of shape {lengths.shape}, expected one dimension")
    if lengths.size == 0:
        return np.zeros(0, np.int64)
    if lengths.dtype.kind not in "iu":
        raise ValueError(
            f"seqlen_list: got {_first_non_integer(lengths)} (dtype {lengths.dtype}), expected integers; "
            "convert lengths with int() first"
        )
    if lengths.min() < 0:
        position = int(np.argmax(lengths < 0))
        raise ValueError(f"seqlen_list: got {lengths[position]} at position {position}, expected lengths of at least 0")
    if float(lengths.sum(dtype=np.float64)) >= _LARGEST_TOTAL:
        raise ValueError(f"seqlen_list: got a total of 2**62 or more, expected less; the largest is {lengths.max()}")
    return lengths.astype(np.int64)


def check_partition_count(k_partitions: int) -> int:
    """Return the number of partitions.

    Raises:
        ValueError: not an integer, or less than 1.
    """
    if isinstance(k_partitions, bool) or not isinstance(k_partitions, (int, np.integer)):
        raise ValueError(f"k_partitions: got {k_partitions!r}, expected an integer of at least 1")
    if k_partitions < 1:
        raise ValueError(f"k_partitions: got {k_partitions}, expected at least 1")
    return int(k_partitions)


def _first_non_integer(lengths: NDArray[np.generic]) -> str:
    for position, value in enumerate(lengths.tolist()):
        if isinstance(value, bool) or not isinstance(value, int) or not -(2**63) <= value < 2**63:
            return f"{value!r} at position {position}"
    return "other values"
