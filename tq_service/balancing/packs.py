"""Assignment of samples to ranks, optimizer steps and fixed-size packs, based only on sample lengths.

All ranks are planned together. Packs are treated as bins and filled by the best-fit-decreasing heuristic. A search then
tries to eliminate bins one at a time. References: S. Martello, P. Toth, "Knapsack Problems", chapter 8, 1990 (bounds,
branch and bound); J. N. D. Gupta, J. C. Ho, "A new heuristic algorithm for the one-dimensional bin-packing problem",
1999 (filling bins one by one, each as full as possible).
"""

from __future__ import annotations

import bisect
import time
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Literal, get_args

import numpy as np

from tq_service.balancing.partitions import (
    Cost,
    Int64s,
    Lengths,
    check_count,
    check_lengths,
    get_costs,
    get_even_partitions,
    get_free_partitions,
)

Bins = list[list[int]]
Overlong = Literal["error", "truncate", "drop"]

# Limits on the search for a packing with fewer bins: the size in bits of the tables of reachable sums, the number of
# items considered per bin, the number of nodes in a tree search, and the number of items in a tree search.
_MOST_BITS = 2**24
_MOST_FILL_ITEMS = 192
_MOST_NODES = 4_000
_MOST_TREE_ITEMS = 48


@dataclass(frozen=True, slots=True, kw_only=True)
class PackPlan:
    """A plan that assigns each sample to a rank, an optimizer step and a pack.

    Attributes:
        packs: `packs[dp_rank][step][pack]` is the list of sample indexes in a pack. An empty list represents a pack
            that contains only padding. All ranks have the same number of steps. In each step, all ranks have the same
            number of packs, at least 1.
        lengths: number of tokens that each sample occupies in its pack, as an array of shape `(n,)`. Truncated samples
            occupy `pack_max_length` tokens, and dropped samples occupy 0.
        pack_max_length: number of tokens per pack, including padding.
        truncated: indexes of the samples truncated to `pack_max_length`, in ascending order.
        dropped: indexes of the samples dropped for exceeding `pack_max_length`, in ascending order.
        rank_costs: total cost of each rank's samples, as an array of shape `(dp_size,)`. See `get_costs`.
        pack_count_lower_bound: lower bound on the total number of packs in any plan for these samples, ranks and steps.
        seconds: planning time in seconds.
    """

    packs: list[list[list[list[int]]]] = field(repr=False)
    lengths: Int64s
    pack_max_length: int
    truncated: Int64s
    dropped: Int64s
    rank_costs: Int64s
    pack_count_lower_bound: int
    seconds: float

    @property
    def dp_size(self) -> int:
        """Number of ranks."""
        return len(self.packs)

    @property
    def optimizer_steps(self) -> int:
        """Number of optimizer steps."""
        return len(self.packs[0])

    @property
    def tokens(self) -> Int64s:
        """Number of sample tokens per rank and step, as an array of shape `(dp_size, optimizer_steps)`."""
        return np.array(
            [[sum(self.pack_tokens(pack) for pack in step) for step in steps] for steps in self.packs], np.int64
        )

    @property
    def packs_by_step(self) -> list[int]:
        """Number of packs per rank in each step. All ranks have the same number of packs in a step."""
        return [len(step) for step in self.packs[0]]

    @property
    def pack_count(self) -> int:
        """Total number of packs across all ranks and steps."""
        return self.dp_size * sum(self.packs_by_step)

    @property
    def padding_tokens(self) -> int:
        """Total number of padding tokens in all packs, including packs that contain only padding."""
        return self.pack_count * self.pack_max_length - int(self.lengths.sum())

    @property
    def fill_ratio(self) -> float:
        """Fraction of the total pack space occupied by sample tokens, from 0.0 to 1.0."""
        return float(self.lengths.sum()) / (self.pack_count * self.pack_max_length)

    @property
    def imbalance(self) -> float:
        """Ratio of the highest rank cost to the mean rank cost, minus 1. For example, 0.01 means 1% above the mean."""
        return _above_mean(self.rank_costs)

    @property
    def step_imbalance(self) -> float:
        """Highest token count of any rank divided by the mean of all ranks, minus 1, in the most imbalanced step."""
        return max(_above_mean(of_ranks) for of_ranks in self.tokens.T)

    def pack_tokens(self, pack: list[int]) -> int:
        """Return the number of sample tokens in a pack."""
        return int(self.lengths[pack].sum()) if pack else 0


def _above_mean(values: Int64s) -> float:
    mean = float(values.mean())
    return float(values.max()) / mean - 1 if mean else 0.0


def plan_packs(
    seqlens: Lengths,
    *,
    dp_size: int,
    optimizer_steps: int,
    pack_max_length: int,
    groups: Sequence[Hashable | None] | None = None,
    rollouts: Sequence[Hashable | None] | None = None,
    overlong: Overlong = "error",
    cost: Cost | None = None,
    even_steps: bool = True,
    packs_multiple_of: int = 1,
) -> PackPlan:
    """Plan the packs of a batch for all ranks. In each step, every rank has the same number of packs.

    1. The Karmarkar-Karp algorithm, followed by a refinement, distributes samples or groups across the ranks so that
       costs are balanced. The number of samples (or groups) per rank differs by at most one.
    2. Each rank's samples are distributed across the optimizer steps, with token totals as equal as possible. Each
       rank's steps are sorted by token count, heaviest first, so that heavy steps run at the same time on all ranks.
    3. The samples of each rank in each step are packed with the best-fit-decreasing heuristic. If a rank has more packs
       than the other ranks and more than the lower bound, a search tries to eliminate its packs one at a time. Packs
       that contain only padding are added until all ranks have the same number of packs, which is at least one. Packs
       are sorted by token count, heaviest first.

    Args:
        seqlens: token count of each sample, as an array of shape `(n,)`; n may be 0.
        dp_size: number of ranks.
        optimizer_steps: number of optimizer steps; the plan contains exactly this many.
        pack_max_length: maximum number of tokens per pack.
        groups: group of each sample, or None for a sample without a group. All samples in a group are assigned to the
            same rank, but not necessarily to the same step. If `groups` is None, no sample has a group.
        rollouts: rollout of each sample, in the same form as `groups`. All samples in a rollout are assigned to the
            same step, and must belong to the same group. If `groups` is None, each rollout is treated as a group.
        overlong: how to treat samples longer than `pack_max_length`. "error" raises an error, "truncate" shortens the
            samples to `pack_max_length`, and "drop" omits them. The plan lists truncated and dropped samples.
        cost: quantity to balance across the ranks; see `get_costs`. None: tokens.
        even_steps: whether to balance token totals across each rank's steps. If a step has only a few packs, balancing
            can add a lot of padding. For example, tokens that would fill 2.1 packs take up 3 packs. If False, all
            samples of a rank are packed first, and the packs are then assigned to steps. The numbers of packs in any
            two steps then differ by at most one, or by at most `packs_multiple_of`. If any rollout has several samples,
            steps are always balanced, because assigning whole packs to steps could split a rollout.
        packs_multiple_of: the number of packs in each step is a multiple of this number, as interleaved pipelines
            require.

    Returns:
        The plan and its statistics. The packs depend only on the arguments.

    Raises:
        ValueError: `seqlens` is not a one-dimensional sequence of non-negative integers, a count is below 1, `groups`
            or `rollouts` does not have one element per sample, or `overlong` or `cost` is unknown. With
            `overlong="error"`, the error is also raised if a sample is longer than `pack_max_length`. The message
            contains the sample's index.
    """
    started = time.perf_counter()
    lengths = check_lengths(seqlens)
    check_count("dp_size", dp_size)
    check_count("optimizer_steps", optimizer_steps)
    check_count("pack_max_length", pack_max_length)
    check_count("packs_multiple_of", packs_multiple_of)
    kept, truncated, dropped = _apply_overlong(lengths, pack_max_length, overlong)
    lengths = np.minimum(lengths, pack_max_length)
    lengths[dropped] = 0
    costs = get_costs(lengths, cost)
    turns = _units("rollouts", rollouts, lengths.size, kept)
    units = turns if groups is None else _units("groups", groups, lengths.size, kept)
    rollout_of = None
    if len(turns) < kept.size:
        rollout_of, even_steps = np.zeros(lengths.size, np.int64), True
        for number, samples in enumerate(turns):
            rollout_of[samples] = number
    parts = get_even_partitions(np.array([costs[unit].sum() for unit in units], np.int64), dp_size)
    ranks = [np.sort(np.concatenate([kept[:0], *(units[position] for position in part)])) for part in parts]
    if even_steps:
        cells = [_spread_over_steps(samples, lengths, optimizer_steps, rollout_of) for samples in ranks]
        steps = [_pack(of_ranks, lengths, pack_max_length, packs_multiple_of) for of_ranks in zip(*cells, strict=True)]
        packs = [[step[rank] for step in steps] for rank in range(dp_size)]
    else:
        packed = _pack(ranks, lengths, pack_max_length, packs_multiple_of, spread=True)
        packs = [_deal(of_rank, optimizer_steps, packs_multiple_of) for of_rank in packed]
    least_of_rank = -(-count_bins_at_least(lengths[kept], pack_max_length) // (dp_size * packs_multiple_of))
    return PackPlan(
        packs=packs,
        lengths=lengths,
        pack_max_length=pack_max_length,
        truncated=truncated,
        dropped=dropped,
        rank_costs=np.array([costs[samples].sum() for samples in ranks], np.int64),
        pack_count_lower_bound=dp_size * packs_multiple_of * max(optimizer_steps, least_of_rank),
        seconds=time.perf_counter() - started,
    )


def check_overlong(overlong: str) -> None:
    """Raise ValueError if `overlong` has an invalid value."""
    if overlong not in get_args(Overlong):
        raise ValueError(f"overlong: got {overlong!r}, expected 'error', 'truncate' or 'drop'")


def _apply_overlong(lengths: Int64s, pack_max_length: int, overlong: Overlong) -> tuple[Int64s, Int64s, Int64s]:
    """Return the indexes of the samples to pack, the samples to truncate, and the samples to drop."""
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


def _units(name: str, groups: Sequence[Hashable | None] | None, count: int, kept: Int64s) -> list[Int64s]:
    """Return the sample indexes of each group or rollout. Groups are ordered by their first sample."""
    if groups is None:
        return list(kept[:, None])
    if len(groups) != count:
        raise ValueError(f"{name}: got {len(groups)} for {count} samples; expected one per sample, or None")
    members: dict[tuple[bool, Hashable], list[int]] = {}
    for sample in kept.tolist():
        group = groups[sample]
        members.setdefault((True, sample) if group is None else (False, group), []).append(sample)
    return [np.array(unit, np.int64) for unit in members.values()]


def _spread_over_steps(
    samples: Int64s, lengths: Int64s, optimizer_steps: int, rollout_of: Int64s | None
) -> list[Int64s]:
    """Distribute a rank's samples across steps without splitting rollouts, and return the samples of each step."""
    if rollout_of is None:
        parts = [samples[part] for part in get_free_partitions(lengths[samples], optimizer_steps)]
    else:
        _, place = np.unique(rollout_of[samples], return_inverse=True)
        tokens = np.zeros(place.max(initial=-1) + 1, np.int64)
        np.add.at(tokens, place, lengths[samples])
        parts = [samples[np.isin(place, part)] for part in get_free_partitions(tokens, optimizer_steps)]
    return sorted(parts, key=lambda part: -int(lengths[part].sum()))


def _deal(packs: Bins, optimizer_steps: int, multiple_of: int) -> list[Bins]:
    """Distribute a rank's packs across steps, starting with the fullest packs.

    The number of packs in each step is a multiple of `multiple_of`. The numbers of packs in any two steps differ by at
    most `multiple_of`.

    Args:
        packs: all packs of the rank, fullest first. The number of packs is a multiple of `multiple_of`.
        optimizer_steps: number of steps.
        multiple_of: the number of packs in each step is a multiple of this number.
    """
    count = max(len(packs) // multiple_of, optimizer_steps)
    dealt = packs + [[] for _ in range(count * multiple_of - len(packs))]
    return [
        [dealt[at] for at in range(len(dealt)) if at % count % optimizer_steps == step]
        for step in range(optimizer_steps)
    ]


def _pack(
    of_ranks: Sequence[Int64s], lengths: Int64s, pack_max_length: int, multiple_of: int, *, spread: bool = False
) -> list[Bins]:
    """Pack each rank's samples into the same number of packs."""
    packed = pack_ranks_equally(
        [lengths[samples] for samples in of_ranks], pack_max_length, multiple_of=multiple_of, spread=spread
    )
    return [
        [np.sort(samples[pack]).tolist() for pack in packs] for samples, packs in zip(of_ranks, packed, strict=True)
    ]


def pack_ranks_equally(
    sizes_of_ranks: Sequence[Int64s], capacity: int, *, multiple_of: int = 1, spread: bool = False
) -> list[Bins]:
    """Pack each rank's items into the same number of bins, as few as a bounded search can find.

    First, each rank's items are packed with the best-fit-decreasing heuristic. Then the items of the ranks with the
    most bins are repeatedly repacked into one bin fewer, until this fails for one of these ranks.

    Args:
        sizes_of_ranks: for each rank, the sizes of its items. No size may exceed `capacity`.
        capacity: maximum total size of the items in a bin.
        multiple_of: the number of bins per rank is a multiple of this number.
        spread: whether to distribute each rank's items evenly across all bins instead of leaving some bins empty.

    Returns:
        The bins of each rank, fullest first, including empty bins. Each rank has at least one bin.
    """
    packed = [best_fit_decreasing(sizes, capacity) for sizes in sizes_of_ranks]
    at_least = max([1, *(count_bins_at_least(sizes, capacity) for sizes in sizes_of_ranks)])
    _try_fewer(packed, sizes_of_ranks, capacity, _round_up(at_least, multiple_of))
    count = _round_up(max([1, *map(len, packed)]), multiple_of)
    if spread:
        packed = [_spread(sizes, bins, capacity, count) for sizes, bins in zip(sizes_of_ranks, packed, strict=True)]
    fullest_first = (
        sorted(bins, key=lambda items: -int(sizes[items].sum()))
        for sizes, bins in zip(sizes_of_ranks, packed, strict=True)
    )
    return [bins + [[] for _ in range(count - len(bins))] for bins in fullest_first]


def _round_up(count: int, multiple_of: int) -> int:
    return -(-count // multiple_of) * multiple_of


def _try_fewer(packed: list[Bins], sizes_of_ranks: Sequence[Int64s], capacity: int, at_least: int) -> None:
    while (count := max(map(len, packed), default=0)) > at_least:
        fewer: dict[int, Bins] = {}
        for rank, bins in enumerate(packed):
            if len(bins) == count:
                better = pack_into(sizes_of_ranks[rank], capacity, count - 1)
                if better is None:
                    return
                fewer[rank] = better
        for rank, better in fewer.items():
            packed[rank] = better


def _spread(sizes: Int64s, bins: Bins, capacity: int, count: int) -> Bins:
    """Distribute the items evenly across `count` bins. If a bin would overflow, return `bins` unchanged."""
    even = [part for part in get_free_partitions(sizes, count) if part]
    return even if all(int(sizes[part].sum()) <= capacity for part in even) else bins


def count_bins_at_least(sizes: Int64s, capacity: int) -> int:
    """Return a lower bound on the number of bins required for the items.

    An item is large if it exceeds half the capacity. Two large items never fit into the same bin, so each large item
    needs its own bin. For a threshold t, an item larger than `capacity - t` cannot share a bin with any item of size t
    or more. Items with sizes from t to half the capacity can therefore share bins only with large items of size
    `capacity - t` or less. If these items need more space than those large items leave free in their bins, additional
    bins are required. The result is the largest lower bound over all thresholds.
    """
    if not sizes.size:
        return 0
    ascending = np.sort(sizes)
    total = np.concatenate([np.zeros(1, np.int64), np.cumsum(ascending)])
    bound = max(-(-int(total[-1]) // capacity), 1)
    half = int(np.searchsorted(2 * ascending, capacity, side="right"))  # later items exceed half the capacity
    thresholds = np.unique(ascending[:half])
    thresholds = thresholds[thresholds > 0]
    large_from = np.searchsorted(ascending, capacity - thresholds, side="right")  # later items leave less than t free
    small_from = np.searchsorted(ascending, thresholds, side="left")
    middle_free = (large_from - half) * capacity - (total[large_from] - total[half])
    missing = np.maximum(total[half] - total[small_from] - middle_free, 0)
    return max(bound, ascending.size - half + int((-(-missing // capacity)).max(initial=0)))


def best_fit_decreasing(sizes: Int64s, capacity: int) -> Bins:
    """Pack the items, largest first, each into the fullest bin with enough space or into a new bin. Return the bins."""
    bins: Bins = []
    free: list[tuple[int, int]] = []  # (free capacity, bin), in ascending order
    listed = sizes.tolist()
    for item in np.argsort(-sizes, kind="stable").tolist():
        size = listed[item]
        at = bisect.bisect_left(free, (size, -1))
        if at == len(free):
            bins.append([item])
            bisect.insort(free, (capacity - size, len(bins) - 1))
        else:
            left, chosen = free.pop(at)
            bins[chosen].append(item)
            bisect.insort(free, (left - size, chosen))
    return bins


def pack_into(sizes: Int64s, capacity: int, bin_count: int) -> Bins | None:
    """Try to pack the items into at most `bin_count` bins, with bounded effort.

    Returns:
        The filled bins, or None if the search found no packing, even though one may exist.
    """
    if count_bins_at_least(sizes, capacity) > bin_count:
        return None
    bins = _fill_one_by_one(sizes, capacity, bin_count)
    if bins is None and sizes.size <= _MOST_TREE_ITEMS:
        bins = _TreeSearch(sizes, capacity, bin_count).run()
    return bins


def _fill_one_by_one(sizes: Int64s, capacity: int, bin_count: int) -> Bins | None:
    """Fill each bin in turn with the largest remaining item and the items that best fill the rest of the bin.

    Return None if more than `bin_count` bins are needed.
    """
    listed = sizes.tolist()
    left = np.argsort(-sizes, kind="stable").tolist()
    most_items = min(_MOST_FILL_ITEMS, max(8, _MOST_BITS // (capacity + 1)))
    spare = bin_count * capacity - int(sizes.sum())
    bins: Bins = []
    while left:
        if len(bins) == bin_count:
            return None
        largest = left[0]
        others = [item for item in left[1:] if listed[item] <= capacity - listed[largest]]
        chosen = [largest, *_fullest_subset(others[:most_items], listed, capacity - listed[largest])]
        spare -= capacity - sum(listed[item] for item in chosen)
        if spare < 0:
            return None
        taken = set(chosen)
        left = [item for item in left if item not in taken]
        bins.append(chosen)
    return bins


def _fullest_subset(items: list[int], listed: list[int], capacity: int) -> list[int]:
    """Return the items whose total size is as large as possible without exceeding `capacity`.

    The algorithm uses bit tables: bit s is set if the total size of some subset of the items is s.
    """
    window = (1 << (capacity + 1)) - 1
    tables = [1]
    for item in items:
        tables.append((tables[-1] | (tables[-1] << listed[item])) & window)
        if tables[-1] >> capacity:
            break
    rest = tables[-1].bit_length() - 1
    chosen = []
    for place in range(len(tables) - 2, -1, -1):
        if not tables[place] >> rest & 1:  # the sum `rest` cannot be reached without this item
            chosen.append(items[place])
            rest -= listed[items[place]]
    return chosen


class _TreeSearch:
    """A depth-first search for a packing that places the largest items first and tries the fullest bins first."""

    def __init__(self, sizes: Int64s, capacity: int, bin_count: int) -> None:
        self._order: list[int] = np.argsort(-sizes, kind="stable").tolist()
        self._sizes: list[int] = sizes[self._order].tolist()
        self._free = [capacity] * bin_count
        self._bins: Bins = [[] for _ in range(bin_count)]
        self._spare = bin_count * capacity - int(sizes.sum())
        self._nodes = 0

    def run(self) -> Bins | None:
        """Return the non-empty bins, or None if the search found no solution within `_MOST_NODES` nodes."""
        return [found for found in self._bins if found] if self._place(0) else None

    def _place(self, at: int) -> bool:
        if at == len(self._order):
            return True
        self._nodes += 1
        # Free space that is too small for the smallest item is wasted.
        wasted = sum(free for free in self._free if free < self._sizes[-1])
        if self._nodes > _MOST_NODES or wasted > self._spare:
            return False
        size = self._sizes[at]
        tried = set()
        for chosen in sorted(range(len(self._free)), key=self._free.__getitem__):
            free = self._free[chosen]
            if free < size or free in tried:
                continue
            tried.add(free)
            self._free[chosen] -= size
            self._bins[chosen].append(self._order[at])
            if self._place(at + 1):
                return True
            self._free[chosen] += size
            self._bins[chosen].pop()
            if free == size:  # the item fills this bin exactly, so no bin can be better
                return False
        return False
