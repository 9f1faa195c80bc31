"""Samples to ranks, to optimizer steps, to packs of one size: planned from lengths alone, for all ranks at once."""

from __future__ import annotations

import time
from collections.abc import Hashable, Sequence
from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray

from tq_service.balancing.bin_packing import Bins, count_bins_at_least
from tq_service.balancing.costs import Cost, get_costs
from tq_service.balancing.karmarkar_karp import get_even_partitions, get_free_partitions
from tq_service.balancing.lengths import Lengths, check_lengths
from tq_service.balancing.pack_plan import PackPlan
from tq_service.balancing.rank_packing import pack_ranks_equally

Int64s = NDArray[np.int64]
Overlong = Literal["error", "truncate", "drop"]


def plan_packs(
    seqlens: Lengths,
    *,
    dp_size: int,
    optimizer_steps: int,
    pack_max_length: int,
    groups: Sequence[Hashable | None] | None = None,
    overlong: Overlong = "error",
    cost: Cost | None = None,
    even_steps: bool = True,
) -> PackPlan:
    """Plan the packs of a batch for all ranks, with the same number of packs in a step on every rank.

    1. Samples, or groups, are spread over the ranks: their numbers are equal or differ by at most one, their costs
       are balanced by Karmarkar-Karp and its refinement.
    2. The samples of a rank are spread over the optimizer steps so that their tokens are as equal as can be. Steps are
       in the order of their tokens on every rank, heaviest first, so that heavy ones meet.
    3. The samples of a rank's step are packed: best fit decreasing; then, while a rank needs more packs than
       its lower bound and the others need fewer, a search for one pack less. Ranks with fewer packs than others get
       packs of padding only, and every step has at least one pack. Packs of a step are in the order of their tokens,
       heaviest first.

    Args:
        seqlens: token count of each sample, `(n,)`; n may be anything, also 0.
        dp_size: number of ranks.
        optimizer_steps: number of optimizer steps, always exactly so many.
        pack_max_length: tokens that a pack holds; no pack has more.
        groups: the group of each sample, `(n,)`; samples of one group stay on one rank, though not in one step. None
            in it: a sample of its own. None: no groups.
        overlong: what to do with a sample longer than `pack_max_length`: refuse it, cut it to `pack_max_length`, or
            leave it out; the plan says which were cut and left out.
        cost: what is balanced over the ranks, see `get_costs`; None: tokens.
        even_steps: whether the steps of a rank get as equal numbers of tokens as can be. Where a step of each rank
            would fill few packs that may cost much padding: tokens for 2.1 packs take 3. False: all samples of a rank
            are packed first and its packs are assigned to the steps, whose numbers of packs then differ by at most one.

    Returns:
        The plan with its figures. The same arguments give the same packs.

    Raises:
        ValueError: lengths that are negative, not integers or not one-dimensional, counts below 1, a number of
            groups that is not that of the samples, an unknown policy or cost; with `overlong="error"` a sample longer
            than `pack_max_length`, named by its index.
    """
    started = time.perf_counter()
    lengths = check_lengths(seqlens)
    for name, value in (
        ("dp_size", dp_size),
        ("optimizer_steps", optimizer_steps),
        ("pack_max_length", pack_max_length),
    ):
        check_count(name, value)
    kept, truncated, dropped = _apply_overlong(lengths, pack_max_length, overlong)
    lengths = np.minimum(lengths, pack_max_length)
    lengths[dropped] = 0
    costs = get_costs(lengths, cost)
    units = _units(groups, lengths.size, kept)
    ranks = _spread_over_ranks(units, costs, dp_size)
    if even_steps:
        cells = [_spread_over_steps(samples, lengths, optimizer_steps) for samples in ranks]
        steps = [_pack(of_ranks, lengths, pack_max_length) for of_ranks in zip(*cells, strict=True)]
        packs = [[step[rank] for step in steps] for rank in range(dp_size)]
    else:
        packed = _pack(ranks, lengths, pack_max_length, spread=True)
        packs = [_assign_to_steps(of_rank, optimizer_steps) for of_rank in packed]
    return PackPlan(
        packs=packs,
        lengths=lengths,
        pack_max_length=pack_max_length,
        truncated=truncated,
        dropped=dropped,
        rank_costs=np.array([costs[samples].sum() for samples in ranks], np.int64),
        pack_count_lower_bound=_pack_count_at_least(lengths[kept], dp_size, optimizer_steps, pack_max_length),
        seconds=time.perf_counter() - started,
    )


def check_count(name: str, value: int) -> None:
    """Raise ValueError where the value is no integer of at least 1."""
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < 1:
        raise ValueError(f"{name}: got {value!r}, expected an integer of at least 1")


def check_overlong(overlong: str) -> None:
    """Raise ValueError where there is no such policy."""
    if overlong not in get_args(Overlong):
        raise ValueError(f"overlong: got {overlong!r}, expected 'error', 'truncate' or 'drop'")


def _apply_overlong(lengths: Int64s, pack_max_length: int, overlong: Overlong) -> tuple[Int64s, Int64s, Int64s]:
    """Return the samples that are packed, those that are cut and those that are left out."""
    check_overlong(overlong)
    too_long, none = np.flatnonzero(lengths > pack_max_length), np.zeros(0, np.int64)
    if too_long.size and overlong == "error":
        first = int(too_long[0])
        raise ValueError(
            f"seqlens: got {lengths[first]} tokens for sample {first}, expected at most pack_max_length "
            f"({pack_max_length}); {too_long.size} of {lengths.size} samples are longer; raise pack_max_length, or "
            "pass overlong='truncate' or overlong='drop'"
        )
    if overlong == "drop":
        return np.flatnonzero(lengths <= pack_max_length), none, too_long
    return np.arange(lengths.size, dtype=np.int64), too_long, none


def _units(groups: Sequence[Hashable | None] | None, count: int, kept: Int64s) -> list[Int64s]:
    """Return what stays together: the samples of each group, in the order of first members."""
    if groups is None:
        return list(kept[:, None])
    if len(groups) != count:
        raise ValueError(f"groups: got {len(groups)} for {count} samples, expected one for each; None: no group")
    members: dict[tuple[bool, Hashable], list[int]] = {}
    for sample in kept.tolist():
        group = groups[sample]
        members.setdefault((True, sample) if group is None else (False, group), []).append(sample)
    return [np.array(unit, np.int64) for unit in members.values()]


def _spread_over_ranks(units: list[Int64s], costs: Int64s, dp_size: int) -> list[Int64s]:
    unit_costs = np.array([costs[unit].sum() for unit in units], np.int64)
    empty = np.zeros(0, np.int64)
    parts = get_even_partitions(unit_costs, dp_size)
    return [np.sort(np.concatenate([empty, *(units[position] for position in part)])) for part in parts]


def _spread_over_steps(samples: Int64s, lengths: Int64s, optimizer_steps: int) -> list[Int64s]:
    parts = [samples[part] for part in get_free_partitions(lengths[samples], optimizer_steps)]
    return sorted(parts, key=lambda part: -int(lengths[part].sum()))


def _pack(of_ranks: Sequence[Int64s], lengths: Int64s, pack_max_length: int, *, spread: bool = False) -> list[Bins]:
    """Return the packs of the samples of every rank, as many for each."""
    packed = pack_ranks_equally([lengths[samples] for samples in of_ranks], pack_max_length, spread=spread)
    return [
        [np.sort(samples[pack]).tolist() for pack in packs] for samples, packs in zip(of_ranks, packed, strict=True)
    ]


def _assign_to_steps(packs: Bins, optimizer_steps: int) -> list[Bins]:
    """Assign packs, fullest first, to the steps in turn: numbers differ by at most one, and each is at least one."""
    filled = packs + [[] for _ in range(optimizer_steps - len(packs))]
    return [filled[step::optimizer_steps] for step in range(optimizer_steps)]


def _pack_count_at_least(lengths: Int64s, dp_size: int, optimizer_steps: int, pack_max_length: int) -> int:
    of_one_rank = -(-count_bins_at_least(lengths, pack_max_length) // dp_size)
    return dp_size * max(optimizer_steps, of_one_rank)
