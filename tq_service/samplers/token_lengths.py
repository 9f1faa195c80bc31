"""What the samplers that balance tokens share: which lengths they need, and what these cost."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tq_service.balancing import get_costs
from tq_service.balancing.costs import CostName
from tq_service.errors import InvalidArgumentError
from tq_service.samplers.whole_groups import GroupSampler
from tq_service.state.plan import Groups, Indexes, LengthSource, PlanRequest, View


@dataclass(frozen=True, slots=True, kw_only=True)
class LengthSampler(GroupSampler):
    """A sampler of whole groups that needs the token count of each sample; samples without one are not ready.

    Attributes:
        length_key: custom_meta column with the token count of a sample.
        length_field: field whose row length stands in where the column has no value; without it a sample
            needs the column.
    """

    length_key: str = "total_lengths"
    length_field: str | None = None

    def __post_init__(self) -> None:
        GroupSampler.__post_init__(self)
        if not self.length_key:
            raise ValueError("length_key: got an empty name, expected a custom_meta column")

    @property
    def length(self) -> LengthSource:
        """The token count of a sample."""
        return LengthSource(key=self.length_key, field=self.length_field)

    def read_lengths(self, view: View, rows: Indexes) -> Indexes:
        """Return the token counts `(n,)` of rows.

        Raises:
            InvalidArgumentError: one is negative.
        """
        lengths = view.lengths(rows)
        if lengths.min(initial=0) < 0:
            position = int(np.argmin(lengths))
            raise InvalidArgumentError(
                f"{self.length_key}: got {lengths[position]} for sample {rows[position]}, expected a token count of at "
                "least 0; correct it with SetCustomMeta",
                field="sampler_config",
                metadata={"column": self.length_key},
            )
        return lengths

    def refuse_micro_batch_size(self, request: PlanRequest, option: str) -> None:
        """Raise InvalidArgumentError where micro-batches are asked for beside those that `option` makes."""
        if request.micro_batch_size is not None:
            raise InvalidArgumentError(
                f"micro_batch_size: got {request.micro_batch_size} for sampler {self.name!r}, which splits "
                f"micro-batches by {option}; leave out one of the two",
                field="micro_batch_size",
            )


def group_costs(groups: Groups, lengths: Indexes, cost: CostName) -> NDArray[np.int64]:
    """Return what each group costs, from the lengths `(n,)` of all members."""
    return np.add.reduceat(get_costs(lengths, cost), groups.starts)
