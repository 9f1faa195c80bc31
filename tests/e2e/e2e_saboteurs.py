"""Plug-in samplers that break the service from within, for tests of what it does then."""

from __future__ import annotations

from typing import Any

from tq_service.samplers import Plan, PlanRequest, Sampler, View
from tq_service.server import converters
from tq_service.state.ledger import TaskLedger


def _fail(*_arguments: Any) -> Any:
    raise ZeroDivisionError("a fault of the service")


class LosesAnswers(Sampler):
    """From its first plan on, writes are made and cannot be answered."""

    def plan(self, view: View, request: PlanRequest) -> Plan | None:
        converters.written_meta = _fail
        return None


class BreaksClaims(Sampler):
    """From its first plan on, claims fail when they are made in part."""

    def plan(self, view: View, request: PlanRequest) -> Plan | None:
        TaskLedger.deliver = _fail  # type: ignore[assignment,method-assign]
        return None
