"""What each sampler would do with a batch of samples of known lengths."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tq_service.balancing import AttentionCost, Overlong, get_even_partitions, plan_packs
from tq_service.balancing.token_budget import RankBudget, assign_within

Int64s = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """How the batch is to be spread.

    Attributes:
        dp_size: number of ranks.
        optimizer_steps: steps of a packed batch.
        pack_max_length: tokens of a pack.
        n_samples_per_prompt: samples of a group; groups are consecutive and stay on one rank.
        tokens_per_rank: budget of a rank for `token_budget`.
        overlong: what packing does with samples longer than a pack.
    """

    dp_size: int
    optimizer_steps: int
    pack_max_length: int
    n_samples_per_prompt: int
    tokens_per_rank: int
    overlong: Overlong


@dataclass(frozen=True, slots=True, kw_only=True)
class Preview:
    """What one sampler would do.

    Attributes:
        sampler: its name, with what else tells it from the others.
        batches: how many batches it makes of the samples.
        rank_tokens: tokens of each rank in the first batch, `(dp_size,)`.
        rank_costs: their cost with attention, `(dp_size,)`.
        rank_samples: samples of each rank in the first batch, `(dp_size,)`.
        pack_fills: for packed batches the share of each pack that samples fill, over all ranks and steps.
        packs_by_step: for packed batches the packs of each step of a rank.
    """

    sampler: str
    batches: int
    rank_tokens: Int64s
    rank_costs: NDArray[np.float64]
    rank_samples: Int64s
    pack_fills: NDArray[np.float64] | None = None
    packs_by_step: list[int] | None = None


def preview_samplers(lengths: Int64s, shape: Shape) -> list[Preview]:
    """Return what the samplers would do with all samples as one batch, `token_budget` with as many as it needs.

    Raises:
        ValueError: a length is negative or, unless `overlong` says otherwise, longer than a pack; or the first group
            has more tokens than the budget of a rank.
    """
    starts = np.arange(0, lengths.size, shape.n_samples_per_prompt)
    unit_tokens = np.add.reduceat(lengths, starts)
    units, ranks = np.arange(starts.size), range(shape.dp_size)
    blocks = np.array_split(units, shape.dp_size)
    in_turn = [units[rank :: shape.dp_size] for rank in ranks]
    balanced = [np.array(part, np.int64) for part in get_even_partitions(unit_tokens, shape.dp_size)]
    samples = np.split(np.arange(lengths.size), starts[1:])

    def of_units(sampler: str, parts: Sequence[Int64s], batches: int = 1) -> Preview:
        empty = np.zeros(0, np.int64)
        rows = [np.concatenate([empty, *(samples[unit] for unit in part.tolist())]) for part in parts]
        return _preview(sampler, rows, lengths, batches)

    return [
        of_units("sequential", blocks),
        of_units("rank_aware", in_turn),
        of_units("seqlen_balanced", balanced),
        of_units("token_budget", *_by_budget(unit_tokens, shape)),
        _packed("packed", lengths, shape, even_steps=True),
        _packed("packed, uneven steps", lengths, shape, even_steps=False),
    ]


def _preview(sampler: str, parts: Sequence[Int64s], lengths: Int64s, batches: int) -> Preview:
    cost = AttentionCost()
    return Preview(
        sampler=sampler,
        batches=batches,
        rank_tokens=np.array([lengths[part].sum() for part in parts], np.int64),
        rank_costs=np.array([cost(lengths[part]).sum() for part in parts]),
        rank_samples=np.array([len(part) for part in parts], np.int64),
    )


def _by_budget(unit_tokens: Int64s, shape: Shape) -> tuple[list[Int64s], int]:
    """Return the first batch, and how many there are."""
    budget = RankBudget(rank_count=shape.dp_size, tokens=shape.tokens_per_rank, units=unit_tokens.size)
    too_large = unit_tokens > shape.tokens_per_rank
    if too_large.any():
        first = int(too_large.argmax())
        raise ValueError(
            f"tokens_per_rank: got {shape.tokens_per_rank}, expected at least {unit_tokens[first]}, the tokens of "
            f"group {first}"
        )
    first_batch: list[Int64s] = []
    batches = taken = 0
    while taken < unit_tokens.size:
        rest = unit_tokens[taken:]
        assignment = assign_within(budget, rest, np.ones(rest.size, np.int64))
        first_batch = first_batch or assignment
        taken += sum(part.size for part in assignment)
        batches += 1
    return first_batch, batches


def _packed(sampler: str, lengths: Int64s, shape: Shape, *, even_steps: bool) -> Preview:
    plan = plan_packs(
        lengths,
        dp_size=shape.dp_size,
        optimizer_steps=shape.optimizer_steps,
        pack_max_length=shape.pack_max_length,
        groups=(np.arange(lengths.size) // shape.n_samples_per_prompt).tolist(),
        overlong=shape.overlong,
        even_steps=even_steps,
    )
    packs = [[pack for step in steps for pack in step] for steps in plan.packs]
    parts = [np.array([sample for pack in of_rank for sample in pack], np.int64) for of_rank in packs]
    base = _preview(sampler, parts, plan.lengths, 1)
    fills = [plan.pack_tokens(pack) / shape.pack_max_length for of_rank in packs for pack in of_rank]
    return Preview(
        sampler=sampler,
        batches=1,
        rank_tokens=base.rank_tokens,
        rank_costs=base.rank_costs,
        rank_samples=base.rank_samples,
        pack_fills=np.array(fills),
        packs_by_step=plan.packs_by_step,
    )
