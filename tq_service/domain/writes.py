"""What is written to a partition, and what a write did."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from tq_service.domain.plan import Indexes
from tq_service.domain.tables.cells import FreedCells
from tq_service.domain.tables.field_specs import ColumnWrite
from tq_service.domain.tables.names import GroupNames, Names
from tq_service.domain.tables.puts import Put
from tq_service.schema import FieldSpec, KeyMode, Layout, MetaColumn, RunAhead, SampleState


@dataclass(frozen=True, slots=True, kw_only=True)
class PartitionSettings:
    """What CreatePartition fixes.

    Attributes:
        max_bytes: most bytes that its cells may take before new samples wait; None: no bound.
        run_ahead: how far new samples may run ahead of tasks.
    """

    expected_samples: int | None = None
    default_layout: Layout | None = None
    fields: tuple[FieldSpec, ...] = ()
    max_bytes: int | None = None
    run_ahead: tuple[RunAhead, ...] = ()

    @property
    def is_bounded(self) -> bool:
        """Whether new samples may have to wait."""
        return self.max_bytes is not None or bool(self.run_ahead)


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleWrite:
    """What Insert and Commit write.

    Attributes:
        row_count: number of samples.
        global_indexes: existing samples `(n,)`; None: new ones, or those of `keys`.
        keys: unique names, in order.
        groups: groups of new samples in order, "" for none.
        names: what is known of keys and groups already; None: nothing.
        put: where the columns are, None for metadata and state only.
        columns: the columns of the put.
    """

    row_count: int
    global_indexes: Indexes | None = None
    keys: Sequence[str] | None = None
    key_mode: KeyMode = "upsert"
    groups: Sequence[str] | None = None
    names: Names | None = None
    group_size: int = 0
    state: SampleState | None = None
    meta: Sequence[MetaColumn] = ()
    put: Put | None = None
    columns: Sequence[ColumnWrite] = ()

    def group_names(self) -> GroupNames | None:
        """Return the groups that the samples name, None where the write has none."""
        if self.groups is None:
            return None
        known = None if self.names is None else self.names.group_names
        return GroupNames.of(self.groups) if known is None else known


@dataclass(frozen=True, slots=True, kw_only=True)
class Written:
    """What a write did: the samples, the specs of the fields written, and the cells it replaced."""

    global_indexes: Indexes
    specs: tuple[FieldSpec, ...] = ()
    freed: list[FreedCells] = field(default_factory=list)
