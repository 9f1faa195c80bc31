"""Answers of the calls about partitions, tasks and services."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum, StrEnum
from typing import Any

from tq_service.schema import Admission, BatchUnit, EvictionReason, FieldSpec, RefillOutcome


@dataclass(frozen=True, slots=True, kw_only=True)
class Revision:
    """A place in the history of one instance of the service, from which `watch` goes on; plain data, to be passed on.

    Attributes:
        instance_id: of the instance, 16 random bytes: after a restart of the service there is another history.
        number: counts changes; a later state has a higher one.
    """

    instance_id: bytes
    number: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ConsumptionStatus:
    """What a task has consumed of a partition.

    Attributes:
        consumed_count: samples consumed in this epoch, cleared ones included.
        total_count: samples ever inserted.
        skipped_count: samples the task will never get, the rest of groups that lost a member included.
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


class WaitCode(StrEnum):
    """Why a claim waits, in a word that stays the same.

    Attributes:
        PARTITION_NOT_FOUND: the partition does not exist.
        NO_SAMPLES: the partition has none.
        FIELD_NEVER_PUT: a requested field was never put.
        ALL_CONSUMED: nothing is left of a partition that is open.
        TOO_FEW_READY: fewer samples are ready than are asked for.
        GROUPS_INCOMPLETE: too few groups have all their samples ready.
        SAMPLER_WAITS: enough samples are ready, and the sampler does not plan a batch yet.
        VERSION_NOT_PUBLISHED: the claim waits for a version of a policy that is not published yet.
        STALENESS_BOUNDED: enough samples are ready, and older ones that are not would become too stale.
        NO_CAPACITY: enough prompts are ready, and there is no capacity for the slots of `admit`.
    """

    PARTITION_NOT_FOUND = "PARTITION_NOT_FOUND"
    NO_SAMPLES = "NO_SAMPLES"
    FIELD_NEVER_PUT = "FIELD_NEVER_PUT"
    ALL_CONSUMED = "ALL_CONSUMED"
    TOO_FEW_READY = "TOO_FEW_READY"
    GROUPS_INCOMPLETE = "GROUPS_INCOMPLETE"
    SAMPLER_WAITS = "SAMPLER_WAITS"
    VERSION_NOT_PUBLISHED = "VERSION_NOT_PUBLISHED"
    STALENESS_BOUNDED = "STALENESS_BOUNDED"
    NO_CAPACITY = "NO_CAPACITY"


class Lack(Enum):
    """What keeps samples from being delivered, each with a sentence; its `{0}` is the `NotReady`.

    Attributes:
        FIELD: they lack the field `name`.
        WHERE: a condition on the custom_meta column `name` does not hold.
        LENGTH: they lack a length for the sampler in the custom_meta column `name`.
        HELD: they are held.
        LEASED: they are leased to workers of the task.
        GROUP: they are ready, and other members of their groups are not.
        LOST: their group lost a member for good, so the task never gets them.
        OLDER: they are not ready, and would become too stale if others were trained before them.
    """

    FIELD = "{0.sample_count} lack field {0.name!r}"
    WHERE = "for {0.sample_count} the condition on {0.name!r} does not hold"
    LENGTH = "{0.sample_count} have no length for the sampler in the custom_meta column {0.name!r}"
    HELD = "{0.sample_count} are held"
    LEASED = "{0.sample_count} are leased, the first for {0.ends_in_seconds:.0f} s more"
    GROUP = "{0.sample_count} are ready in groups that are not ready as a whole ({0.example})"
    OLDER = "{0.sample_count} are awaited, since they would become too stale behind others ({0.example})"
    LOST = "{0.sample_count} are lost, since their groups lost a member that failed, was cleared or was dead-lettered"

    @property
    def kind(self) -> str:
        """Its name in a `NotReady`."""
        return self.name.lower()


@dataclass(frozen=True, slots=True, kw_only=True)
class NotReady:
    """Samples that cannot be delivered yet, by their `Lack`.

    Attributes:
        kind: of the `Lack`; a newer service may know others.
        name: of the field or column, else empty.
        sample_count: number of samples.
        ends_in_seconds: of "leased": until the first lease runs out; None for others.
        example: of "group": the name of one, with its counts.
    """

    kind: str
    name: str = ""
    sample_count: int
    ends_in_seconds: float | None = None
    example: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class WaitReason:
    """Why claims wait that ask alike, in counts of samples of one moment.

    Attributes:
        code: the reason in a word, see `WaitCode`.
        text: the reason in a sentence.
        task_name: the consumer.
        data_fields: the fields that it asks for.
        waiting_count: number of calls that wait for this; 0 in the answer to a claim of one's own.
        left_count: samples that are live or held and that the task has not consumed.
        ready_count: those of them, or where `counts_groups` the groups, that could be delivered now.
        needed_count: how many of these are needed before there is an answer.
        counts_groups: whether the two are numbers of groups.
        not_ready: samples by their lacks; one may be counted in several.
        sealed: whether no new samples come.
        waiting_put_count: puts with new samples that wait for capacity.
        put_waits_for: why the first of them does; empty where none waits.
    """

    code: str
    text: str
    task_name: str = ""
    data_fields: tuple[str, ...] = ()
    waiting_count: int = 0
    left_count: int = 0
    ready_count: int = 0
    needed_count: int = 0
    counts_groups: bool = False
    not_ready: tuple[NotReady, ...] = ()
    sealed: bool = False
    waiting_put_count: int = 0
    put_waits_for: str = ""


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


class PartitionList(list[PartitionSummary]):
    """Partitions in the order of their names.

    Attributes:
        revision: from which `watch` goes on from the whole list.
    """

    def __init__(self, partitions: Iterable[PartitionSummary], revision: Revision | None = None) -> None:
        super().__init__(partitions)
        self.revision = revision


@dataclass(frozen=True, slots=True, kw_only=True)
class FieldStatus:
    """A field in a partition, and the number of samples that have it."""

    spec: FieldSpec
    produced_count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RecentBatch:
    """A batch that was planned for ranks, in numbers.

    Attributes:
        batch_index: its number in the epoch.
        tokens_per_rank: tokens of the first 128 ranks, by `dp_rank`; empty where the length of a sample is not known.
        imbalance: by how much the heaviest rank has more tokens than the mean of all, as a share of the mean.
        padding_share: share of padding: of packs what fills them up; of micro-batches what pads each sample to the
            longest of its micro-batch, which jagged fields do without.
        staleness: for a task with a `max_staleness`: how many versions after its slot the oldest of its samples is
            trained at the latest; None: that is not bounded.
    """

    batch_index: int
    tokens_per_rank: tuple[int, ...] = ()
    imbalance: float = 0.0
    padding_share: float = 0.0
    staleness: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ClaimLease:
    """A claim that has samples under a lease.

    Attributes:
        claim_id: the first 8 hexadecimal digits of its request_id, as in the log of calls.
        claim_name: what its caller calls it; empty: it has no name.
        leased_count: its samples that are leased and not acknowledged.
        delivered_ago_seconds: since when it has them; since the start of the service, if that was later.
        ends_in_seconds: when its lease runs out, unless it is extended.
    """

    claim_id: str
    claim_name: str
    leased_count: int
    delivered_ago_seconds: float
    ends_in_seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskStatus:
    """A task in a partition.

    Attributes:
        task_name: its name.
        epoch: how often its consumption was reset.
        consumed_count: samples consumed in this epoch.
        skipped_count: samples it will never get, the rest of groups that lost a member included.
        planned_batch_count: batches planned in this epoch (ranked consumers).
        dp_size: number of ranks, once bound; 0 before.
        waiting_count: calls that wait.
        complete: whether nothing is left for it.
        leased_count: samples that are leased and not acknowledged; they may come back.
        dead_lettered_count: samples that were delivered `max_deliveries` times without being acknowledged.
        dead_lettered_indexes: the first hundred of them that are not cleared.
        pending_count: samples left for it: live or held, neither consumed nor dead-lettered.
        redelivered_count: samples that were delivered more than once in this epoch, since leases on them ran out;
            neither released nor cleared ones.
        delivered_per_second: samples delivered a second, lately: each delivery counts for less as it gets older, by a
            factor e every 10 seconds. It starts from 0 with each start of the service.
        recent_batches: the last 16 batches that were planned for its ranks in this epoch, in order; a start of the
            service begins with none.
        oldest_version: the lowest `version` of the samples that are left for it, live or held; None: no sample that is
            left has one, or it was not looked at yet. It is as it was last looked at, a moment ago; None in what
            `watch` yields.
        staleness_versions: how far the highest version of a sample of the partition is above `oldest_version`, which is
            how far producers are ahead of the task; None where that is None.
        leasing_claim_count: claims that have samples under a lease.
        leases: the 20 of these that were delivered first, in order; empty in what `watch` yields.
        trained_batch_count: batches of this epoch that were trained, see `advance`.
        saved_batch_count: batches of this epoch that a checkpoint of the trainer covers, see `advance`.
        outstanding_count: units that are outstanding for it, as its admission counts them; None: it has none.
        running_count: units that are held, which are being generated, as its admission counts them; None: it has no
            `most_running`.
        unmatched_count: samples and groups that its claims evicted since `where` excluded them, in all epochs.
        too_small_count: groups that its claims evicted since too few members were left, in all epochs.
        late_count: samples and groups that they evicted since they would have become too stale.
        refilled_count: samples that were made claimable again for it by evictions, in all epochs.
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
    pending_count: int = 0
    redelivered_count: int = 0
    delivered_per_second: float = 0.0
    recent_batches: tuple[RecentBatch, ...] = ()
    oldest_version: float | None = None
    staleness_versions: float | None = None
    leasing_claim_count: int = 0
    leases: tuple[ClaimLease, ...] = ()
    trained_batch_count: int = 0
    saved_batch_count: int = 0
    outstanding_count: int | None = None
    running_count: int | None = None
    unmatched_count: int = 0
    too_small_count: int = 0
    late_count: int = 0
    refilled_count: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerProgress:
    """How far the trainer that is the ranks of a task has come in this epoch.

    Attributes:
        trained_batch_count: batches that were trained.
        saved_batch_count: batches that a checkpoint of the trainer covers.
        planned_batch_count: batches that were planned.
    """

    trained_batch_count: int
    saved_batch_count: int
    planned_batch_count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RestartedRanks:
    """Where the ranks of a task go on that have restarted.

    Attributes:
        epoch: of the task.
        batch_index: the first batch that they ask for.
    """

    epoch: int
    batch_index: int


@dataclass(frozen=True, slots=True, kw_only=True)
class EvictedUnit:
    """A sample or a group that claims of a task have evicted.

    Attributes:
        serial: its number in the task: 1, and one more with each.
        unit: whether it was a "sample", evicted by itself, or a "group".
        group: name of the group that it was, or that the sample was in; None: none.
        key: key of the sample, of a group that of its first sample; None: none.
        reason: "unmatched": `where` excluded it, or a member of it; "too_small": fewer than `least_members` were left;
            "late": it was not finished, and would have become too stale.
        version: the version that was published then, of the policy that `where` compares with, or else of
            `not_before_version` or of the partition's `max_staleness`; None: there is no policy, or it had no version.
        sample_count: samples that went; of a cleared group also those that had failed before.
        refill: what came of `get_meta(refill=)`: "refilled"; "pending": its sample was claimable anyway; "unknown":
            there is no such partition or key; "used_up": it was refilled `max_refills` times before; "given_up": the
            task never gets it, since it failed, was dead-lettered, dropped or skipped, or the ranks are at their end.
            None: no refill was asked for.
    """

    serial: int
    unit: BatchUnit
    group: str | None
    key: str | None
    reason: EvictionReason
    version: int | None
    sample_count: int
    refill: RefillOutcome | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class EvictedUnits:
    """Units that claims of a task have evicted, in order of their serials.

    Attributes:
        units: the units; empty: there are none behind the serial that was given.
        dropped_count: units behind that serial which are not kept any more.
    """

    units: tuple[EvictedUnit, ...]
    dropped_count: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyStatus:
    """The published version of a policy.

    Attributes:
        policy: its name.
        version: the number of its weights.
        published_ago_seconds: how long ago it was published.
    """

    policy: str
    version: int
    published_ago_seconds: float


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
        admissions: how much work may be outstanding for its tasks.
        waiting_put_count: puts of new samples that wait for capacity or for a task.
        declared_tasks: names of all tasks that may consume it; empty where any may.
        samples_per_round: samples of a round, where declared.
        revision: of this answer: `watch` goes on from here.
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
    admissions: tuple[Admission, ...]
    waiting_put_count: int
    declared_tasks: tuple[str, ...]
    samples_per_round: int | None
    revision: Revision | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplerOption:
    """An option of a sampler, given in `sampler_config`.

    Attributes:
        name: its name.
        type: what it takes, such as "whole number", "text or null" or "one of skip, take"; "" where the sampler does
            not say.
        default_json: what stands for it where it is not given, as JSON; None: it must be given.
        summary: what it means.
    """

    name: str
    type: str
    default_json: str | None
    summary: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplerDescription:
    """A sampler: the name `get_meta` takes, what it does, and its options."""

    name: str
    summary: str
    options: tuple[SamplerOption, ...]


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
class ServiceInfo:
    """What a process of the service is, and how it runs.

    Attributes:
        version: its version, such as "0.1.0".
        instance_id: 16 random bytes that name this process: others after each start.
        role: "all", or "controller" where storage services run as other processes.
        uptime_seconds: for how long it has run.
        durability: what an acknowledged change survives: nothing ("memory"), a crash of any process ("process"), or one
            of the host ("disk"), or the loss of the host ("cluster").
        data_dir: the directory that holds its state; empty: none does, or the token is not for all partitions.
        tls: whether it is reached over TLS.
        client_certificates: whether clients have to show a certificate.
        auth: whether it asks for tokens.
        shared_memory: whether clients of its host share memory with it.
    """

    version: str
    instance_id: bytes
    role: str
    uptime_seconds: float
    durability: str
    data_dir: str
    tls: bool
    client_certificates: bool
    auth: bool
    shared_memory: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class ControllerStatus:
    """A controller of a cluster, as that which leads knows it.

    Attributes:
        name: its name among the controllers, which stays as long as its data directory does.
        address: where clients reach it.
        is_leader: whether it leads; the others stand by.
        epoch: of the leader: higher than that of each leader before it; of the others 0.
        lag_count: records of the journal that it has not applied yet, as of a second ago.
    """

    name: str
    address: str
    is_leader: bool
    epoch: int
    lag_count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class MirrorStatus:
    """How the mirror of a storage service is: where its puts are a second time, on other nodes.

    Attributes:
        url: the engine, without user, password and settings.
        is_reachable: whether it answered the last call; None: there was none yet.
        unmirrored_bytes: bytes of puts that do not have the copies required yet, complete or not.
        short_put_count: puts that have these, and fewer copies than asked for.
        unfetched_put_count: puts that were taken over from another storage service and not fetched yet.
        spilled_bytes: bytes that count as used and are in the mirror alone: they have left memory.
    """

    url: str
    is_reachable: bool | None
    unmirrored_bytes: int
    short_put_count: int
    unfetched_put_count: int = 0
    spilled_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class StorageStatus:
    """A storage service, as its controller knows it.

    Attributes:
        storage_id: its name.
        address: where clients reach it; empty: at the address of the controller, in whose process it runs.
        used_bytes: bytes that it stores and has reserved.
        max_bytes: its quota; None: none.
        put_count: number of puts that it stores.
        version: its version; empty: it has not said.
        heard_ago_seconds: since when nothing was heard of it; None: it runs in the process of the controller.
        is_silent: whether it has been silent for too long to get puts.
        mirror: how its mirror was at the last heartbeat; None: it has none.
        is_adopted: whether these are puts of a lost storage service of this name that the one at `address` has taken
            over; `used_bytes` and `max_bytes` are those of that one, whose quota they count for.
    """

    storage_id: str
    address: str
    used_bytes: int
    max_bytes: int | None
    put_count: int
    version: str
    heard_ago_seconds: float | None
    is_silent: bool
    mirror: MirrorStatus | None = None
    is_adopted: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class PartitionWait:
    """Claims that wait for the same, or other calls that wait for a partition that does not exist.

    Attributes:
        partition_id: the partition, which need not exist.
        reason: what is waited for. Without `explain` it has `task_name`, `data_fields` and `waiting_count` alone;
            `task_name` is empty where `lookup_samples` waits.
    """

    partition_id: str
    reason: WaitReason


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceStatus:
    """A service, its storage services, its partitions, and what is waited for.

    Attributes:
        service: what the service is.
        storages: its storage services, in the order of their names.
        partitions: its partitions, in the order of their names.
        waits: what is waited for, in the order of the names of the partitions, and of each in the order of arrival of
            the first calls; at most 32 of a partition.
        revision: from which `watch` goes on from the whole status.
        controllers: those of its cluster, that which leads first; none where the controller is alone.
        policies: the published versions, in the order of the names of their policies.
    """

    service: ServiceInfo
    storages: tuple[StorageStatus, ...]
    partitions: tuple[PartitionDescription, ...]
    waits: tuple[PartitionWait, ...]
    revision: Revision
    controllers: tuple[ControllerStatus, ...] = ()
    policies: tuple[PolicyStatus, ...] = ()

    @property
    def own_storages(self) -> list[StorageStatus]:
        """The storage services under their own names, whose bytes and quotas may be summed up."""
        return [storage for storage in self.storages if not storage.is_adopted]

    def heir_of(self, adopted: StorageStatus) -> str | None:
        """Return the name of the storage service that has taken puts over, None where it has not registered."""
        return next((each.storage_id for each in self.own_storages if each.address == adopted.address), None)


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
