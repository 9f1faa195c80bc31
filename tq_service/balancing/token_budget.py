"""Groups assigned to ranks within a budget of tokens: as many as fit, in order, balanced."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tq_service.balancing.karmarkar_karp import get_even_partitions, get_free_partitions

Int64s = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class RankBudget:
    """What each rank may get.

    Attributes:
        rank_count: number of ranks.
        tokens: the most tokens of a rank.
        units: the most samples or groups of a rank.
    """

    rank_count: int
    tokens: int
    units: int


def assign_within(budget: RankBudget, tokens: Int64s, units: Int64s) -> list[Int64s]:
    """Assign the first groups, as many as can be found to fit, with token totals as equal as can be.

    Assigning one by one to the least loaded rank tells how many surely fit. Between that number and what the budgets of
    all ranks together would hold, the largest number is searched that still fits when it is balanced.

    Args:
        budget: what each rank may get.
        tokens: tokens of each group, `(n,)`, none above the limit.
        units: samples or groups (1) that each counts as, `(n,)`.

    Returns:
        Positions of the groups of each rank, ascending; together 0 to some number.
    """
    fits = np.cumsum(tokens) <= budget.tokens * budget.rank_count
    fits &= np.cumsum(units) <= budget.units * budget.rank_count
    most = int(fits.sum())
    best: list[Int64s] = _one_by_one(budget, tokens[:most], units[:most])
    least = sum(part.size for part in best)
    balanced = _balanced(budget, tokens[:least], units[:least])
    best = balanced or best
    low, high = least + 1, most
    count = most  # nearly always the answer
    while low <= high:
        found = _balanced(budget, tokens[:count], units[:count])
        if found is None:
            high = count - 1
        else:
            best, low = found, count + 1
        count = (low + high) // 2
    return best


def _one_by_one(budget: RankBudget, tokens: Int64s, units: Int64s) -> list[Int64s]:
    """Assign each group to the rank with the fewest tokens, until one does not fit there."""
    ranks: list[list[int]] = [[] for _ in range(budget.rank_count)]
    loads = [(0, 0, rank) for rank in range(budget.rank_count)]
    for position, (size, count) in enumerate(zip(tokens.tolist(), units.tolist(), strict=True)):
        load, used, rank = loads[0]
        if load + size > budget.tokens or used + count > budget.units:
            break
        ranks[rank].append(position)
        heapq.heapreplace(loads, (load + size, used + count, rank))
    return [np.array(part, np.int64) for part in ranks]


def _balanced(budget: RankBudget, tokens: Int64s, units: Int64s) -> list[Int64s] | None:
    """Assign all groups, balanced by tokens; None where a rank would get more than it may."""
    for split in (get_free_partitions, get_even_partitions):
        assignment = [np.array(part, np.int64) for part in split(tokens, budget.rank_count)]
        if _is_within(budget, assignment, tokens, units):
            return assignment
    return None


def _is_within(budget: RankBudget, assignment: Sequence[Int64s], tokens: Int64s, units: Int64s) -> bool:
    return all(tokens[part].sum() <= budget.tokens and units[part].sum() <= budget.units for part in assignment)
