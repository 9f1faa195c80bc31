"""What a task has on record of each of its claims: the answer, which those who ask again get too."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

from tq_service.domain.claims.leases import Lease
from tq_service.domain.claims.request import BatchSpec
from tq_service.domain.plan import Plan, RankPlan

Decode: TypeAlias = Callable[[], Plan]
DecodePart: TypeAlias = Callable[[], RankPlan]


class Batch:
    """A recorded plan of `size` samples, of which `remaining` are not cleared.

    Its plan may be given as what decodes it, which is done when somebody asks for it: of a hundred thousand batches
    that are read from a file, few are ever asked for again.
    """

    __slots__ = ("_plan", "batch_index", "batch_spec", "remaining", "size")

    def __init__(
        self, *, batch_spec: BatchSpec, plan: Plan | Decode, batch_index: int, size: int, remaining: int
    ) -> None:
        self.batch_spec = batch_spec
        self.batch_index = batch_index
        self.size = size
        self.remaining = remaining
        self._plan = plan

    @property
    def kept_plan(self) -> Plan | Decode:
        """The plan as it is kept."""
        return self._plan

    @property
    def plan(self) -> Plan:
        """The parts of all ranks."""
        if not isinstance(self._plan, Plan):
            self._plan = self._plan()
        return self._plan


class QueueClaim:
    """What a queue worker got; its part may be given as what decodes it, like the plan of a batch.

    Attributes:
        serial: its number in the task.
        remaining: its samples that are neither cleared nor given back.
        lease: None: its samples are done.
        given_count: calls that were answered with it: a call that left before its answer reached anybody takes the
            claim back only if no retry was given the same.
    """

    __slots__ = ("_part", "given_count", "lease", "remaining", "request_id", "serial")

    def __init__(
        self,
        *,
        request_id: bytes,
        serial: int,
        part: RankPlan | DecodePart,
        remaining: int,
        given_count: int = 1,
        lease: Lease | None = None,
    ) -> None:
        self.request_id = request_id
        self.serial = serial
        self.remaining = remaining
        self.given_count = given_count
        self.lease = lease
        self._part = part

    @property
    def kept_part(self) -> RankPlan | DecodePart:
        """The part as it is kept."""
        return self._part

    @property
    def part(self) -> RankPlan:
        """Its samples, and how they are used."""
        if not isinstance(self._part, RankPlan):
            self._part = self._part()
        return self._part
