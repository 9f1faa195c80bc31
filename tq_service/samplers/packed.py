"""Batches that are packed: each rank's optimizer steps, each of packs of one size."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from tq_service.balancing import Overlong, PackPlan, plan_packs
from tq_service.balancing.costs import CostName, check_cost_name
from tq_service.balancing.plan_packs import check_count, check_overlong
from tq_service.errors import InvalidArgumentError
from tq_service.samplers.token_lengths import LengthSampler
from tq_service.state.plan import Groups, Indexes, Pack, Plan, PlanRequest, RankPlan, View

# Planning up to so many samples for so many steps of all ranks takes less than a millisecond.
_QUICK_SAMPLES = 32
_QUICK_STEPS = 8
# Of all ranks: a plan has packs for each step, empty ones included, so that a step too many costs as much as any other.
_MOST_STEPS = 1 << 16


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedSampler(LengthSampler):
    """Packs whole batches: each rank gets `optimizer_steps` steps of packs of at most `pack_max_length` tokens.

    A batch is taken in the order of the groups' first members, its groups are spread evenly over the ranks, the samples
    of a rank over the steps by their tokens, and each rank's step is bin packed. Every rank has the same number of
    packs in a step, at least one; what is missing are packs of padding only. Groups stay on one rank, though not in one
    step. All in `tq_service.balancing.plan_packs`.

    Attributes:
        optimizer_steps: optimizer steps of a batch, always exactly so many.
        pack_max_length: tokens of a pack; its samples have at most so many, `Pack.padding_tokens` fill it up.
        overlong: what to do with a sample of more tokens than a pack holds: error refuses the batch, truncate plans
            for its first `pack_max_length` tokens (`Pack.lengths` says so), drop leaves it out of the batch for good:
            it is in `RankPlan.dropped` and counts as skipped.
        cost: what is balanced over the ranks: tokens, or what they cost with attention.
        even_steps: whether the steps of a rank get as equal numbers of tokens as can be; else the fewest packs, whose
            numbers differ by at most one between steps.
    """

    name: ClassVar[str] = "packed"

    optimizer_steps: int
    pack_max_length: int
    overlong: Overlong = "error"
    cost: CostName = "tokens"
    even_steps: bool = True

    def __post_init__(self) -> None:
        check_count("optimizer_steps", self.optimizer_steps)
        check_count("pack_max_length", self.pack_max_length)
        LengthSampler.__post_init__(self)
        check_overlong(self.overlong)
        check_cost_name(self.cost)

    def check(self, request: PlanRequest) -> None:
        """Refuse a request that the options do not fit.

        Raises:
            InvalidArgumentError: `batch_size` does not hold whole groups, a micro-batch size is given, or the steps of
                all ranks are more than one plan has.
        """
        LengthSampler.check(self, request)
        self.refuse_micro_batch_size(request, "pack_max_length")
        step_count = self.optimizer_steps * request.rank_count
        if step_count > _MOST_STEPS:
            raise InvalidArgumentError(
                f"optimizer_steps: got {self.optimizer_steps} for {request.rank_count} rank(s), {step_count} steps "
                f"together, expected at most {_MOST_STEPS}; plan fewer steps with a batch",
                field="sampler_config",
                metadata={"option": "optimizer_steps"},
            )

    def runs_inline(self, request: PlanRequest) -> bool:
        """Whether few samples are to be packed for few steps."""
        if request.batch_unit == "group" and self.n_samples_per_prompt is None:
            return False  # of any number of samples
        group_size = (self.n_samples_per_prompt or 1) if request.batch_unit == "group" else 1
        step_count = self.optimizer_steps * request.rank_count
        return request.total_size * group_size <= _QUICK_SAMPLES and step_count <= _QUICK_STEPS

    def plan(self, view: View, request: PlanRequest) -> Plan | None:
        """Return steps and packs for each rank, or None where too few groups are ready.

        Raises:
            InvalidArgumentError: a length is negative, or, with `overlong="error"`, more than a pack holds.
        """
        self.check(request)
        groups = self.take_groups(view, request)
        if groups is None:
            return None
        lengths = self.read_lengths(view, groups.rows)
        self._refuse_overlong(groups.rows, lengths)
        group_of = np.repeat(np.arange(len(groups)), groups.sizes)
        packs = plan_packs(
            lengths,
            dp_size=request.rank_count,
            optimizer_steps=self.optimizer_steps,
            pack_max_length=self.pack_max_length,
            groups=group_of.tolist(),
            overlong=self.overlong,
            cost=self.cost,
            even_steps=self.even_steps,
        )
        return _as_plan(groups, group_of, packs)

    def _refuse_overlong(self, rows: Indexes, lengths: Indexes) -> None:
        if self.overlong != "error" or lengths.max(initial=0) <= self.pack_max_length:
            return
        first = int(np.argmax(lengths > self.pack_max_length))
        raise InvalidArgumentError(
            f"{self.length_key}: got {lengths[first]} for sample {rows[first]}, expected at most pack_max_length "
            f"({self.pack_max_length}); raise pack_max_length, clear the sample, or choose "
            "overlong 'truncate' or 'drop'",
            field="sampler_config",
            metadata={"column": self.length_key},
        )


def _as_plan(groups: Groups, group_of: Indexes, packs: PackPlan) -> Plan:
    """Return the plan in rows; samples that are dropped go with their group, or in turn."""
    rank_of_group = np.arange(len(groups)) % packs.dp_size
    for rank, steps in enumerate(packs.packs):
        rank_of_group[group_of[[sample for step in steps for pack in step for sample in pack]]] = rank
    rank_of = rank_of_group[group_of]
    is_dropped = np.zeros(groups.rows.size, np.bool_)
    is_dropped[packs.dropped] = True
    ranks = []
    for rank, steps in enumerate(packs.packs):
        samples = np.flatnonzero((rank_of == rank) & ~is_dropped)
        ranks.append(
            RankPlan(
                rows=groups.rows[samples],
                dropped=groups.rows[(rank_of == rank) & is_dropped],
                steps=tuple(tuple(_as_pack(samples, pack, packs) for pack in step) for step in steps),
            )
        )
    return Plan(ranks=tuple(ranks))


def _as_pack(samples: Indexes, pack: list[int], packs: PackPlan) -> Pack:
    members = np.array(pack, np.int64)
    lengths = packs.lengths[members]
    return Pack(
        positions=samples.searchsorted(members),
        lengths=lengths,
        padding_tokens=packs.pack_max_length - int(lengths.sum()),
    )
