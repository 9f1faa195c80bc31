"""Token counts of samples, shared by the samplers that balance them."""

from __future__ import annotations

from typing import Literal

import numpy as np
from numpy.typing import NDArray

from tq_service.balancing import get_costs
from tq_service.domain.plan import Groups, Indexes, PlanRequest, View
from tq_service.errors import InvalidArgumentError

CostName = Literal["tokens", "attention"]


def check_length_key(length_key: str) -> None:
    """Raise ValueError where the name of the custom_meta column is empty."""
    if not length_key:
        raise ValueError("length_key: got an empty name, expected a custom_meta column")


def read_lengths(view: View, rows: Indexes, length_key: str) -> Indexes:
    """Return the token counts `(n,)` of rows.

    Raises:
        InvalidArgumentError: one is negative.
    """
    lengths = view.lengths(rows)
    if lengths.min(initial=0) < 0:
        position = int(np.argmin(lengths))
        raise InvalidArgumentError(
            f"{length_key}: got {lengths[position]} for sample {rows[position]}, expected a token count of at least 0; "
            "correct it with set_custom_meta",
            field=length_key,
        )
    return lengths


def group_costs(groups: Groups, lengths: Indexes, cost: CostName) -> NDArray[np.int64]:
    """Return what each group costs, from the lengths `(n,)` of all members."""
    return np.add.reduceat(get_costs(lengths, cost), groups.starts)


def refuse_micro_batch_size(sampler: str, request: PlanRequest, option: str) -> None:
    """Raise InvalidArgumentError where micro-batches are asked for beside those that the sampler cuts itself."""
    if request.micro_batch_size is not None:
        raise InvalidArgumentError(
            f"micro_batch_size: got {request.micro_batch_size} for sampler {sampler!r}, which cuts micro-batches by "
            f"{option}; leave out one of the two",
            field="micro_batch_size",
        )
