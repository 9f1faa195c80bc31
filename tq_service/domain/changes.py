"""What can change in the catalog, as data: what a journal writes down, and what `Catalog.apply` does again.

A change says what came of a request, not what was asked: a claim carries its rows, so that replaying it needs no
sampler and gives the same answer. A change is encoded before it is made, and written down in the same step, before
anybody is answered: one that cannot be encoded is not made, so memory and journal never differ.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Final

from tq_service.domain.claims.end import End
from tq_service.domain.claims.request import BatchSpec
from tq_service.domain.plan import Indexes, Plan, RankPlan
from tq_service.domain.writes import PartitionSettings, SampleWrite
from tq_service.schema import MetaColumn


@dataclass(frozen=True, slots=True, kw_only=True)
class PartitionCreated:
    """A partition was made, by itself or by its first samples."""

    partition_id: str
    incarnation: bytes
    settings: PartitionSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplesWritten:
    """Samples were added, or written to."""

    partition_id: str
    write: SampleWrite


@dataclass(frozen=True, slots=True, kw_only=True)
class MetaSet:
    """custom_meta of existing samples was written."""

    partition_id: str
    global_indexes: Indexes
    columns: Sequence[MetaColumn]


@dataclass(frozen=True, slots=True, kw_only=True)
class PartitionSealed:
    """No new samples come. Not told where a write sealed it."""

    partition_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupsClosed:
    """Groups get no further members."""

    partition_id: str
    names: Sequence[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplesCleared:
    """Samples were removed; those that were not there are named too."""

    partition_id: str
    global_indexes: Indexes


@dataclass(frozen=True, slots=True, kw_only=True)
class PartitionCleared:
    """A partition was removed."""

    partition_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskSeen:
    """A task asked for the first time."""

    partition_id: str
    task_name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchPlanned:
    """The next batch_index of a task was planned, for all ranks."""

    partition_id: str
    task_name: str
    batch_spec: BatchSpec
    plan: Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class EndReached:
    """No further batch comes in this epoch of a task."""

    partition_id: str
    task_name: str
    dp_size: int
    end: End


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueClaimed:
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
class ClaimReleased:
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
class ClaimAcked:
    """Samples of a leased claim are done; None: all that were left of it."""

    partition_id: str
    task_name: str
    request_id: bytes
    global_indexes: Indexes | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ClaimExtended:
    """A leased claim was given more time, from then on."""

    partition_id: str
    task_name: str
    request_id: bytes
    lease_seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseExpired:
    """What was left of a leased claim is claimable again, or set aside."""

    partition_id: str
    task_name: str
    request_id: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class ConsumptionReset:
    """The next epoch of a task began."""

    partition_id: str
    task_name: str
    keep_consumed: bool


Change = (
    PartitionCreated
    | SamplesWritten
    | MetaSet
    | PartitionSealed
    | GroupsClosed
    | SamplesCleared
    | PartitionCleared
    | TaskSeen
    | BatchPlanned
    | EndReached
    | QueueClaimed
    | ClaimReleased
    | ClaimAcked
    | ClaimExtended
    | LeaseExpired
    | ConsumptionReset
)
# Encodes a change that is about to be made, or raises. The change is made within what is returned, which writes it down
# at the end; an error in between leaves half a change, so the service must not go on from there.
Tell = Callable[[Change], AbstractContextManager[object]]
UNRECORDED: Final[AbstractContextManager[object]] = nullcontext()  # of changes that nobody writes down
