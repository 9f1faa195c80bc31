"""The state of the domain at one moment: made in a moment, read by another thread, and made into the same state again.

Columns are frozen without a copy (`tables.column`). What is a cache, or follows from other things here, is
left out: scan positions, key indexes, free slots, how many samples of a claim are left.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from tq_service.domain.aging_log import FrozenLog
from tq_service.domain.claims.end import End
from tq_service.domain.tables.column import FrozenColumn
from tq_service.schema import FieldSpec

if TYPE_CHECKING:
    from tq_service.domain.claims.ledger import Batch, QueueClaim
    from tq_service.domain.writes import PartitionSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class FrozenTable:
    """The rows of a partition, gaps included, and how many there are without them."""

    next_index: int
    present_count: int
    index: FrozenColumn
    present: FrozenColumn


@dataclass(frozen=True, slots=True, kw_only=True)
class FrozenGroups:
    """The groups of a partition: the slot of each row, and by slot what is known of it; no name: not in use."""

    in_use: bool
    slot_of_row: FrozenColumn
    names: FrozenColumn
    declared: FrozenColumn
    members: FrozenColumn
    failed: FrozenColumn
    cleared: FrozenColumn
    held: FrozenColumn
    closed: FrozenColumn


@dataclass(frozen=True, slots=True, kw_only=True)
class FrozenMeta:
    """One custom_meta column."""

    name: str
    values: FrozenColumn
    present: FrozenColumn


@dataclass(frozen=True, slots=True, kw_only=True)
class FrozenField:
    """One field; no lengths where it never was jagged."""

    spec: FieldSpec
    cell: FrozenColumn
    length: FrozenColumn | None


@dataclass(frozen=True, slots=True, kw_only=True)
class FrozenPuts:
    """By slot: the put (None: not in use), its cells, how many it was made with, and the bytes of those it has."""

    puts: FrozenColumn
    cell_counts: FrozenColumn
    made_cell_counts: FrozenColumn
    value_bytes: FrozenColumn


@dataclass(frozen=True, slots=True, kw_only=True)
class FrozenCells:
    """The puts of a partition, and which of their cells its samples have."""

    puts: FrozenPuts
    fields: Sequence[FrozenField]


@dataclass(frozen=True, slots=True, kw_only=True)
class FrozenTask:
    """What a task has consumed.

    Attributes:
        end: None: it is not at its end.
        serial: the last one given to a claim.
        claim: for each row what became of it.
        records: the claims that still have rows.
        batches_without_rows: batches kept though their rows are gone.
        deliveries: how often rows were leased, None where none was in this epoch.
        released: ids of claims that were released.
        expired: ids of claims of which samples were not acknowledged in time.
    """

    name: str
    epoch: int
    dp_size: int | None
    next_batch_index: int
    end: End | None
    consumed_count: int
    backlog: int
    serial: int
    claim: FrozenColumn
    records: Sequence[Batch | QueueClaim] = ()
    batches_without_rows: Sequence[Batch] = ()
    deliveries: FrozenColumn | None = None
    dead_lettered_count: int = 0
    released: FrozenLog = field(default_factory=FrozenLog)
    expired: FrozenLog = field(default_factory=FrozenLog)


@dataclass(frozen=True, slots=True, kw_only=True)
class FrozenPartition:
    """One partition."""

    partition_id: str
    incarnation: bytes
    settings: PartitionSettings
    sealed: bool
    insert_size_gcd: int
    table: FrozenTable
    state: FrozenColumn
    key: FrozenColumn
    groups: FrozenGroups
    meta: Sequence[FrozenMeta]
    puts: FrozenPuts
    fields: Sequence[FrozenField]
    tasks: Sequence[FrozenTask]
