"""Checks of what a sampler returned, before anything is recorded of it."""

from __future__ import annotations

from typing import Any

import numpy as np

from tq_service.domain.plan import Pack, Plan, PlanRequest, RankPlan
from tq_service.errors import SamplerError

_LARGEST_INT64 = 2**63 - 1


def check_plan(sampler: str, plan: object, request: PlanRequest) -> Plan | None:
    """Return the plan if it is well formed; whether its rows are ready is for the planner to see.

    A plan that passes can be written down and sent: that must not fail once its rows are consumed.

    Raises:
        SamplerError: it is no plan, has not one part for each rank, has no rows or a row twice, positions outside a
            rank's rows or twice, numbers of steps or packs that differ between ranks, or anything that is not of the
            type `tq_service.domain.plan` says.
    """
    if plan is None:
        return None
    if not isinstance(plan, Plan):
        raise _fault(sampler, f"a {type(plan).__name__}", "a Plan or None")
    if not isinstance(plan.ranks, tuple) or not all(isinstance(rank, RankPlan) for rank in plan.ranks):
        raise _fault(sampler, f"ranks of {plan.ranks!r:.80}", "a tuple of RankPlan; Plan.of(parts) makes it")
    if len(plan.ranks) != request.rank_count:
        raise _fault(sampler, f"parts for {len(plan.ranks)} ranks", f"one for each of {request.rank_count}")
    for rank, part in enumerate(plan.ranks):
        _check_array(sampler, f"rows of rank {rank}", part.rows)
    rows = np.concatenate([part.rows for part in plan.ranks])
    if not rows.size:
        raise _fault(sampler, "a plan without rows", "at least one row, or None where not enough is ready")
    rows.sort()
    is_repeated = rows[1:] == rows[:-1]
    if is_repeated.any():
        raise _fault(
            sampler, f"row {rows[is_repeated.argmax()]} more than once", "every row at most once over all ranks"
        )
    _check_shape_of_steps(sampler, plan)
    for rank, part in enumerate(plan.ranks):
        _check_packs(sampler, rank, part)
    return plan


def _check_shape_of_steps(sampler: str, plan: Plan) -> None:
    for rank, part in enumerate(plan.ranks):
        if not isinstance(part.steps, tuple) or not all(isinstance(step, tuple) for step in part.steps):
            raise _fault(
                sampler, f"steps of rank {rank} as {part.steps!r:.80}", "a tuple of steps, each a tuple of Pack"
            )
    shapes = [[len(step) for step in part.steps] for part in plan.ranks]
    for rank, shape in enumerate(shapes):
        if shape != shapes[0]:
            raise _fault(
                sampler,
                f"packs by step {shapes[0]} for rank 0 and {shape} for rank {rank}",
                "the same numbers of steps and packs for every rank; fill up with empty packs",
            )


def _check_packs(sampler: str, rank: int, part: RankPlan) -> None:
    packs = [pack for step in part.steps for pack in step]
    for pack in packs:
        if not isinstance(pack, Pack):
            raise _fault(sampler, f"a {type(pack).__name__} among the packs of rank {rank}", "Pack objects")
        _check_array(sampler, f"positions of rank {rank}", pack.positions)
        if pack.lengths is not None:
            _check_array(sampler, f"lengths of rank {rank}", pack.lengths)
            if pack.lengths.shape != pack.positions.shape:
                raise _fault(
                    sampler, f"{pack.lengths.size} lengths for {pack.positions.size} positions", "one for each"
                )
            if pack.lengths.min(initial=0) < 0:
                raise _fault(sampler, f"a length of {pack.lengths.min()} for rank {rank}", "lengths of 0 or more")
        _check_count(sampler, "padding_tokens", pack.padding_tokens)
    if not packs:
        return
    positions = np.concatenate([pack.positions for pack in packs])
    if positions.size and (positions.min() < 0 or positions.max() >= part.rows.size):
        raise _fault(
            sampler,
            f"positions {positions.min()} to {positions.max()} for rank {rank}",
            f"positions in [0, {part.rows.size}), which index the rank's rows",
        )
    if np.bincount(positions).max(initial=0) > 1:
        raise _fault(sampler, f"position {np.bincount(positions).argmax()} of rank {rank} in two packs", "one at most")


def _check_array(sampler: str, what: str, array: Any) -> None:
    if type(array) is not np.ndarray:  # one with masked values is of another class, and cannot be sent
        raise _fault(sampler, f"{what} as {type(array).__name__}", "a numpy array of int64; Plan.of(parts) converts")
    if array.ndim != 1 or array.dtype != np.int64:
        raise _fault(sampler, f"{what} as {array.dtype} of shape {array.shape}", "one dimension of int64")


def _check_count(sampler: str, what: str, count: Any) -> None:
    if isinstance(count, bool) or not isinstance(count, int | np.integer):
        raise _fault(sampler, f"{what} as {type(count).__name__}", "an int")
    if not 0 <= count <= _LARGEST_INT64:
        raise _fault(sampler, f"{what} of {count}", "an int of 0 to 2**63 - 1")


def _fault(sampler: str, got: str, expected: str) -> SamplerError:
    return SamplerError(
        f"sampler {sampler!r} returned {got}, expected {expected}; nothing was consumed", metadata={"sampler": sampler}
    )
