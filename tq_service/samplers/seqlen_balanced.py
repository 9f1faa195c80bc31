"""Batches of which every rank gets as many tokens as the others."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from tq_service.balancing import get_even_partitions
from tq_service.errors import InvalidArgumentError
from tq_service.samplers.base import Groups, LengthSource, Plan, PlanRequest, Sampler, View
from tq_service.samplers.whole_groups import (
    IncompleteGroups,
    check_group_options,
    check_holds_whole_groups,
    rows_of_ranks,
    take_groups,
)

# Balancing up to so many groups takes less than a millisecond; larger batches are planned off the event loop.
_QUICK_GROUPS = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class SeqlenBalancedSampler(Sampler):
    """Takes whole groups and spreads them over the ranks so that token totals are as equal as can be.

    One batch for all ranks is taken in the order of the groups' first members, then split by Karmarkar-Karp on the
    groups' token totals. Group counts are equal, or differ by at most one where they do not divide; so with groups of
    one size each rank gets `batch_size` samples. Within a rank, groups keep their order.

    Attributes:
        n_samples_per_prompt: members of a group that declared no size, and without explicit groups the length of the
            blocks of consecutive indexes; None: explicit groups, or else single samples.
        length_key: custom_meta column with the token count of a sample.
        length_field: jagged field whose row length stands in where the column has no value.
        incomplete_groups: what to do with a group of which members failed or were cleared: "skip" it, or "take" the
            rest.
    """

    name: ClassVar[str] = "seqlen_balanced"

    n_samples_per_prompt: int | None = None
    length_key: str = "total_lengths"
    length_field: str | None = None
    incomplete_groups: IncompleteGroups = "skip"

    def __post_init__(self) -> None:
        check_group_options(self.n_samples_per_prompt, self.incomplete_groups)
        if not self.length_key:
            raise ValueError("length_key: got an empty name, expected a custom_meta column")

    @property
    def length(self) -> LengthSource:
        """The token count of a sample."""
        return LengthSource(key=self.length_key, field=self.length_field)

    def check(self, request: PlanRequest) -> None:
        """Raise InvalidArgumentError where `batch_size` does not hold whole groups."""
        check_holds_whole_groups(self.name, request, self.n_samples_per_prompt)

    def is_quick(self, request: PlanRequest) -> bool:
        """Whether few groups are to be balanced."""
        group_size = (self.n_samples_per_prompt or 1) if request.batch_unit == "sample" else 1
        return request.total_size <= _QUICK_GROUPS * group_size

    def plan(self, view: View, request: PlanRequest) -> Plan | None:
        """Return a balanced share for each rank, or None where too few groups are ready.

        Raises:
            InvalidArgumentError: a length is negative.
        """
        self.check(request)
        groups = take_groups(
            view, request, block_size=self.n_samples_per_prompt, incomplete_groups=self.incomplete_groups
        )
        if groups is None:
            return None
        deal = get_even_partitions(self._token_totals(view, groups), request.rank_count)
        return Plan.of(rows_of_ranks(groups, [np.array(part, dtype=np.int64) for part in deal]))

    def _token_totals(self, view: View, groups: Groups) -> NDArray[np.int64]:
        lengths = view.lengths(groups.rows)
        if lengths.min(initial=0) < 0:
            position = int(np.argmin(lengths))
            raise InvalidArgumentError(
                f"{self.length_key}: got {lengths[position]} for sample {groups.rows[position]}, expected a token "
                "count of at least 0; correct it with set_custom_meta",
                field=self.length_key,
            )
        return np.add.reduceat(lengths, groups.starts)
