"""What the calls about partitions, tasks and services answer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tq_service.schema import FieldSpec, StalenessLimit


@dataclass(frozen=True, slots=True, kw_only=True)
class ConsumptionStatus:
    """What a task has consumed of a partition.

    Attributes:
        consumed_count: samples consumed in this epoch, cleared ones included.
        total_count: samples ever inserted.
        skipped_count: samples the task will never get.
        sealed: whether no new samples will come.
        complete: whether nothing is left for the task: of a sealed partition, or with `samples_per_round` of the rounds
            that have begun.
        epoch: that of the task, which counts its resets.
        leased_count: those of `consumed_count` that are leased and not acknowledged; they may come back.
        dead_lettered_count: those of `skipped_count` that were delivered `max_deliveries` times and never
            acknowledged.
        expected_count: with `samples_per_round`, samples in all rounds that have begun, the first one included; None
            without.
    """

    consumed_count: int
    total_count: int
    skipped_count: int
    sealed: bool
    complete: bool
    epoch: int
    leased_count: int = 0
    dead_lettered_count: int = 0
    expected_count: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ProductionStatus:
    """How many samples have all of some fields.

    Attributes:
        produced_count: samples that have them.
        total_count: samples that can have them: not cleared, not failed.
        complete: whether all have them and no new samples will come, or with `samples_per_round` none before the next
            round.
    """

    produced_count: int
    total_count: int
    complete: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class PartitionSummary:
    """A partition in short.

    Attributes:
        partition_id: its name.
        incarnation: 16 random bytes, others once its name is used again after a clear.
        inserted_count: samples ever inserted.
        present_count: samples not cleared.
        sealed: whether no new samples will come.
    """

    partition_id: str
    incarnation: bytes
    inserted_count: int
    present_count: int
    sealed: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class FieldStatus:
    """A field in a partition, and the number of samples that have it."""

    spec: FieldSpec
    produced_count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskStatus:
    """A task in a partition.

    Attributes:
        task_name: its name.
        epoch: how often its consumption was reset.
        consumed_count: samples consumed in this epoch.
        skipped_count: samples it will never get.
        planned_batch_count: batches planned in this epoch (ranked consumers).
        dp_size: number of ranks, once bound; 0 before.
        waiting_count: calls that wait.
        complete: whether nothing is left for it.
        leased_count: samples that are leased and not acknowledged; they may come back.
        dead_lettered_count: samples that were delivered `max_deliveries` times without being acknowledged.
        dead_lettered_indexes: the first hundred of them that are not cleared.
    """

    task_name: str
    epoch: int
    consumed_count: int
    skipped_count: int
    planned_batch_count: int
    dp_size: int
    waiting_count: int
    complete: bool
    leased_count: int = 0
    dead_lettered_count: int = 0
    dead_lettered_indexes: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class MetaColumnStatus:
    """A custom_meta column, and the types of its values.

    Attributes:
        name: its name.
        kind: type of the values that claims compare: "int64", "double", "bool" or "string"; "" before the first.
        has_json: whether samples had other values, which are JSON.
    """

    name: str
    kind: str
    has_json: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class PartitionDescription:
    """A partition: its samples by state, fields and tasks.

    Attributes:
        summary: the partition in short.
        expected_samples: number of samples that will be inserted, where declared.
        live_count: samples that are live.
        held_count: samples that are held.
        failed_count: samples that failed.
        group_count: groups with members in the partition.
        fields: its fields.
        tasks: its tasks.
        custom_meta_columns: its custom_meta columns.
        used_bytes: bytes of the values of its samples; where a part of a put was freed, its share by number of cells.
        max_bytes: most bytes that they may take, None where that is not bounded.
        staleness_limits: how far producers may be ahead of its tasks.
        waiting_put_count: puts of new samples that wait for capacity or for a task.
        declared_tasks: names of all tasks that may consume it; empty where any may.
        samples_per_round: samples of a round, where declared.
    """

    summary: PartitionSummary
    expected_samples: int | None
    live_count: int
    held_count: int
    failed_count: int
    group_count: int
    fields: tuple[FieldStatus, ...]
    tasks: tuple[TaskStatus, ...]
    custom_meta_columns: tuple[MetaColumnStatus, ...]
    used_bytes: int
    max_bytes: int | None
    staleness_limits: tuple[StalenessLimit, ...]
    waiting_put_count: int
    declared_tasks: tuple[str, ...]
    samples_per_round: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplerDescription:
    """A sampler: the name `get_meta` takes, what it does, and the names of its options."""

    name: str
    summary: str
    options: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class StorageStat:
    """Sizes and counts of a storage service.

    Attributes:
        storage_id: its name.
        boot_id: of this instance of it, 16 bytes.
        max_bytes: its quota; None: none.
        used_bytes: bytes stored and reserved.
        pooled_bytes: bytes of memory held for reuse, besides `used_bytes`.
        put_count: puts held.
        uncommitted_put_count: puts not yet committed.
        shared_memory_count: memfds that clients of the same host have sent.
        damaged_put_count: puts whose bytes are lost, as far as they were looked at since the start.
    """

    storage_id: str
    boot_id: bytes
    max_bytes: int | None
    used_bytes: int
    pooled_bytes: int
    put_count: int
    uncommitted_put_count: int
    shared_memory_count: int
    damaged_put_count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RestoredCheckpoint:
    """What a checkpoint brought back.

    Attributes:
        put_count: puts that were made of its bytes.
        value_bytes: their bytes.
        metadata: what its caller gave with it.
    """

    partition_count: int
    sample_count: int
    put_count: int
    value_bytes: int
    metadata: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointSummary:
    """A checkpoint in a list.

    Attributes:
        name: its name, below the `checkpoint_dir` of the service.
        written_at: when it was begun, in seconds since 1970 (UTC).
        file_bytes: size of its file.
        metadata: what its caller gave with it.
        problem: why it cannot be read, as far as its beginning says; empty: it can.
    """

    name: str
    written_at: float
    partition_count: int
    sample_count: int
    file_bytes: int
    metadata: Mapping[str, Any]
    problem: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointCopy:
    """What a checkpoint holds.

    Attributes:
        name: its name, below the `checkpoint_dir` of the service.
        put_count: puts that its bytes will be when they are restored.
        value_bytes: their bytes.
        pause_seconds: the longest time for which the service answered no call while it was written.
    """

    name: str
    partition_count: int
    sample_count: int
    put_count: int
    value_bytes: int
    pause_seconds: float
