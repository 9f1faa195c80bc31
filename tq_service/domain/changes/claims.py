"""Changes of what tasks consume."""

from __future__ import annotations

from dataclasses import dataclass

from tq_service.domain.changes.state_machine import Change
from tq_service.domain.claims.end import End
from tq_service.domain.claims.request import BatchSpec
from tq_service.domain.plan import Indexes, Plan, RankPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskSeen(Change):
    """A task asked for the first time."""

    partition_id: str
    task_name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchPlanned(Change):
    """The next batch_index of a task was planned, for all ranks."""

    partition_id: str
    task_name: str
    batch_spec: BatchSpec
    plan: Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class EndReached(Change):
    """No further batch comes in this epoch of a task."""

    partition_id: str
    task_name: str
    dp_size: int
    end: End


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueClaimed(Change):
    """A queue worker was given samples.

    Attributes:
        lease_seconds: None: they are done.
        max_deliveries: None: no bound.
        group_block_size: of a leased claim of whole groups, see `LeaseTerms`; None: of samples.
    """

    partition_id: str
    task_name: str
    request_id: bytes
    part: RankPlan
    lease_seconds: float | None = None
    max_deliveries: int | None = None
    group_block_size: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ClaimReleased(Change):
    """A queue claim was given back.

    Attributes:
        global_indexes: samples of a leased claim; None: all that were left of it.
        is_final: whether its request_id is refused from now on.
    """

    partition_id: str
    task_name: str
    request_id: bytes
    global_indexes: Indexes | None = None
    is_final: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class ClaimAcked(Change):
    """Samples of a leased claim are done; None: all that were left of it."""

    partition_id: str
    task_name: str
    request_id: bytes
    global_indexes: Indexes | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ClaimExtended(Change):
    """A leased claim was given more time, from then on."""

    partition_id: str
    task_name: str
    request_id: bytes
    lease_seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseExpired(Change):
    """What was left of a leased claim is claimable again, or set aside."""

    partition_id: str
    task_name: str
    request_id: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class ConsumptionReset(Change):
    """The next epoch of a task began."""

    partition_id: str
    task_name: str
    keep_consumed: bool
