"""Samples that the caller has chosen."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from tq_service.errors import InvalidArgumentError
from tq_service.state.plan import Plan, PlanRequest, Sampler, View


@dataclass(frozen=True, slots=True, kw_only=True)
class ChosenSampler(Sampler):
    """Takes the samples that its options name, in this order, once all of them are ready.

    For queue workers that choose by themselves, after a look-up: what another has claimed meanwhile makes no batch.

    Attributes:
        rows: global indexes, each once; `batch_size` is their number.
    """

    name: ClassVar[str] = "chosen"

    rows: Sequence[int]

    def __post_init__(self) -> None:
        if not self.rows:
            raise ValueError("rows: got none, expected at least one global index")
        if len(set(self.rows)) != len(self.rows):
            raise ValueError("rows: one comes twice; name each once")

    def check(self, request: PlanRequest) -> None:
        """Raise InvalidArgumentError for trainer ranks, and where `batch_size` is not the number of rows."""
        if request.ranked or request.batch_unit != "sample":
            raise InvalidArgumentError(
                f"sampler: got {self.name!r} for {'trainer ranks' if request.ranked else 'groups'}, expected a queue "
                "worker that asks for samples",
                field="sampler",
            )
        if request.batch_size != len(self.rows):
            raise InvalidArgumentError(
                f"batch_size: got {request.batch_size} with {len(self.rows)} rows in sampler_config, expected as many",
                field="batch_size",
            )

    def runs_inline(self, request: PlanRequest) -> bool:
        """Return False: all that is ready is looked at."""
        return False

    def plan(self, view: View, request: PlanRequest) -> Plan | None:
        """Return the rows, or None where one of them is not ready."""
        self.check(request)
        rows = np.array(self.rows, np.int64)
        return Plan.of([rows]) if np.isin(rows, view.ready()).all() else None
