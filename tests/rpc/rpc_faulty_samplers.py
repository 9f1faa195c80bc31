"""Samplers that do what samplers must not."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import numpy as np

from tq_service.samplers import Plan, PlanRequest, Sampler, View

let_go = threading.Event()


class Raises(Sampler):
    def plan(self, view: View, request: PlanRequest) -> Plan | None:
        raise ZeroDivisionError("secret text of the sampler")


class ReturnsForeignRows(Sampler):
    def plan(self, view: View, request: PlanRequest) -> Plan | None:
        return Plan.of([np.array([1_000_000 + rank]) for rank in range(request.rank_count)])


class ReturnsNonsense(Sampler):
    def plan(self, view: View, request: PlanRequest) -> Any:
        return [0, 1]


class Hangs(Sampler):
    def plan(self, view: View, request: PlanRequest) -> Plan | None:
        let_go.wait(60)
        return None


class HangsAwaiting(Sampler):
    async def plan(self, view: View, request: PlanRequest) -> Plan | None:
        await asyncio.sleep(60)
        return None
