"""Batches that are packed: each rank's optimizer steps, each of packs of one size."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from tq_service.balancing import Overlong, PackPlan, plan_packs
from tq_service.balancing.costs import check_cost_name
from tq_service.balancing.plan_packs import check_count, check_overlong
from tq_service.errors import InvalidArgumentError
from tq_service.samplers.base import Groups, Indexes, LengthSource, Pack, Plan, PlanRequest, RankPlan, Sampler, View
from tq_service.samplers.token_lengths import CostName, check_length_key, read_lengths, refuse_micro_batch_size
from tq_service.samplers.whole_groups import (
    IncompleteGroups,
    check_group_options,
    check_holds_whole_groups,
    take_groups,
)

# Planning up to so many samples for so many steps of all ranks takes less than a millisecond.
_QUICK_SAMPLES = 32
_QUICK_STEPS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedSampler(Sampler):
    """Packs whole batches: each rank gets `optimizer_steps` steps of packs of at most `pack_max_length` tokens.

    A batch is taken in the order of the groups' first members, its groups are spread evenly over the ranks, the samples
    of a rank over the steps by their tokens, and each rank's step is bin packed. Every rank has the same number of
    packs in a step, at least one; what is missing are packs of padding only. All in `tq_service.balancing.plan_packs`.

    Attributes:
        optimizer_steps: optimizer steps of a batch, always exactly so many.
        pack_max_length: tokens of a pack; its samples have at most so many, `Pack.padding_tokens` fill it up.
        n_samples_per_prompt: members of a group that declared no size, and without explicit groups the length of the
            blocks of consecutive indexes; None: explicit groups, or else single samples. Groups stay on one rank,
            though not in one step.
        length_key: custom_meta column with the token count of a sample.
        length_field: jagged field whose row length stands in where the column has no value.
        incomplete_groups: what to do with a group of which members failed or were cleared: "skip" it, or "take" the
            rest.
        overlong: what to do with a sample of more tokens than a pack holds: "error" refuses the batch, "truncate" plans
            for its first `pack_max_length` tokens (`Pack.lengths` says so), "drop" consumes it with the batch without
            putting it into any pack.
        cost: what is evened out over the ranks: "tokens", or their cost with "attention".
        even_steps: whether the steps of a rank get as equal numbers of tokens as can be; False: the fewest packs, whose
            numbers differ by at most one between steps.
    """

    name: ClassVar[str] = "packed"

    optimizer_steps: int
    pack_max_length: int
    n_samples_per_prompt: int | None = None
    length_key: str = "total_lengths"
    length_field: str | None = None
    incomplete_groups: IncompleteGroups = "skip"
    overlong: Overlong = "error"
    cost: CostName = "tokens"
    even_steps: bool = True

    def __post_init__(self) -> None:
        check_count("optimizer_steps", self.optimizer_steps)
        check_count("pack_max_length", self.pack_max_length)
        check_group_options(self.n_samples_per_prompt, self.incomplete_groups)
        check_length_key(self.length_key)
        check_overlong(self.overlong)
        check_cost_name(self.cost)

    @property
    def length(self) -> LengthSource:
        """The token count of a sample."""
        return LengthSource(key=self.length_key, field=self.length_field)

    def check(self, request: PlanRequest) -> None:
        """Raise InvalidArgumentError where `batch_size` does not hold whole groups, or a micro-batch size is given."""
        check_holds_whole_groups(self.name, request, self.n_samples_per_prompt)
        refuse_micro_batch_size(self.name, request, "pack_max_length")

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
        groups = take_groups(
            view, request, block_size=self.n_samples_per_prompt, incomplete_groups=self.incomplete_groups
        )
        if groups is None:
            return None
        lengths = read_lengths(view, groups.rows, self.length_key)
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
            "overlong='truncate' or overlong='drop'",
            field=self.length_key,
        )


def _as_plan(groups: Groups, group_of: Indexes, packs: PackPlan) -> Plan:
    """Return the plan in rows; samples that were left out go with their group, or in turn, and are in no pack."""
    rank_of_group = np.arange(len(groups)) % packs.dp_size
    for rank, steps in enumerate(packs.packs):
        rank_of_group[group_of[[sample for step in steps for pack in step for sample in pack]]] = rank
    rank_of = rank_of_group[group_of]
    ranks = []
    for rank, steps in enumerate(packs.packs):
        samples = np.flatnonzero(rank_of == rank)
        ranks.append(
            RankPlan(
                rows=groups.rows[samples],
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
