"""Result types of calls about partitions, tasks and services."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum, StrEnum
from typing import Any

from tq_service.schema import Admission, BatchUnit, EvictionReason, FieldSpec, RefillOutcome, Release
from tq_service.step_times import StepTimes


@dataclass(frozen=True, slots=True, kw_only=True)
class Revision:
    """A point in a service instance's history that `watch` can start from; plain data that can be serialized.

    Attributes:
        instance_id: id of the instance, 16 random bytes; a restarted service has a new id and a new history.
        number: counter of changes; later states have higher numbers.
    """

    instance_id: bytes
    number: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ConsumptionStatus:
    """Consumption of a partition by a task.

    Attributes:
        consumed_count: samples consumed in this epoch, including cleared ones.
        total_count: samples ever inserted.
        skipped_count: samples that the task will never receive, including the rest of groups that lost a member.
        sealed: whether no new samples will come.
        complete: whether nothing is left for the task in a sealed partition or, with `samples_per_round`, in the rounds
            that have begun.
        epoch: epoch of the task, which counts its resets.
        leased_count: samples of `consumed_count` that are leased and not acknowledged; they may be delivered again.
        dead_lettered_count: samples of `skipped_count` that were delivered `max_deliveries` times and never
            acknowledged.
        expected_count: with `samples_per_round`, samples in all rounds that have begun, including the first; otherwise
            None.
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
    """Number of samples that have all of the requested fields.

    Attributes:
        produced_count: samples that have all of the requested fields.
        total_count: samples that can have these fields, because they are neither cleared nor failed.
        complete: whether all of these samples have the fields and no new samples will come (with `samples_per_round`,
            none before the next round).
    """

    produced_count: int
    total_count: int
    complete: bool


class WaitCode(StrEnum):
    """Why a claim waits, as a stable code.

    Attributes:
        PARTITION_NOT_FOUND: the partition does not exist.
        NO_SAMPLES: the partition is empty.
        FIELD_NEVER_PUT: a requested field was never put.
        ALL_CONSUMED: nothing is left to consume, but the partition is not sealed.
        TOO_FEW_READY: fewer samples are ready than requested.
        GROUPS_INCOMPLETE: too few groups have all their samples ready.
        SAMPLER_WAITS: enough samples are ready, but the sampler does not plan a batch yet.
        VERSION_NOT_PUBLISHED: the claim waits for a version of a policy that is not published yet.
        STALENESS_BOUNDED: enough samples are ready, but older ones that are not ready would become too stale.
        NO_CAPACITY: enough prompts are ready, but capacity for the slots of `admit` is missing.
        RATIO_BOUNDED: the task would be delivered more samples per insert than its admission allows.
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
    RATIO_BOUNDED = "RATIO_BOUNDED"


class Lack(Enum):
    """Reasons why samples cannot be delivered yet; each value is a sentence template in which `{0}` is the `NotReady`.

    Attributes:
        FIELD: the samples lack the field `name`.
        WHERE: a condition on the custom_meta column `name` does not hold.
        LENGTH: the samples have no length for the sampler in the custom_meta column `name`.
        HELD: the samples are held.
        LEASED: the samples are leased to workers of the task.
        GROUP: the samples are ready, but other members of their groups are not.
        LOST: the samples' group has permanently lost a member, so the task will never receive them.
        OLDER: the samples are not ready, and would become too stale if others were trained first.
    """

    FIELD = "{0.sample_count} lack field {0.name!r}"
    WHERE = "for {0.sample_count} the condition on {0.name!r} does not hold"
    LENGTH = "{0.sample_count} have no length for the sampler in the custom_meta column {0.name!r}"
    HELD = "{0.sample_count} are held"
    LEASED = "{0.sample_count} are leased, the first for {0.ends_in_seconds:.0f} s more"
    GROUP = "{0.sample_count} are ready in groups that are not completely ready ({0.example})"
    OLDER = "{0.sample_count} are awaited, since they would become too stale if others went first ({0.example})"
    LOST = "{0.sample_count} are lost, since their groups lost a member that failed, was cleared or was dead-lettered"

    @property
    def kind(self) -> str:
        """The reason's name, as stored in `NotReady.kind`."""
        return self.name.lower()


@dataclass(frozen=True, slots=True, kw_only=True)
class NotReady:
    """Number of samples that cannot be delivered yet for one reason, a `Lack`.

    Attributes:
        kind: kind of the `Lack`; a newer service may report other kinds.
        name: name of the field or column, else empty.
        sample_count: number of samples.
        ends_in_seconds: for "leased": time until the first lease expires; otherwise None.
        example: for "group": name and counts of one such group; for "field": the missing put, if groups share the
            field.
    """

    kind: str
    name: str = ""
    sample_count: int
    ends_in_seconds: float | None = None
    example: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class WaitReason:
    """Why claims with the same arguments wait, with sample counts at one point in time.

    Attributes:
        code: the reason as a code, see `WaitCode`.
        text: the reason as a sentence.
        task_name: the consumer.
        data_fields: the fields that the consumer requests.
        waiting_count: number of calls that wait for this reason; 0 in the answer to the caller's own claim.
        left_count: live or held samples that the task has not consumed.
        ready_count: samples among `left_count` that could be delivered now; with `counts_groups`, groups or rollouts.
        needed_count: number of ready samples that the claim needs; with `counts_groups`, groups or rollouts.
        counts_groups: whether `ready_count` and `needed_count` count groups or rollouts.
        not_ready: samples that cannot be delivered yet, by reason; a sample may be counted several times.
        sealed: whether no new samples will come.
        waiting_put_count: puts with new samples that wait for capacity.
        put_waits_for: why the first of these puts waits; empty if no put waits.
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
    """Summary of a partition.

    Attributes:
        partition_id: name of the partition.
        incarnation: 16 random bytes that change if the name is reused after a clear.
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
    """Partitions, sorted by name.

    Attributes:
        revision: revision of the complete list, which `watch` can start from.
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
    """Statistics of a batch that was planned for ranks.

    Attributes:
        batch_index: number of the batch in its epoch.
        tokens_per_rank: tokens of the first 128 ranks, by `dp_rank`; empty if the length of any sample is unknown.
        imbalance: tokens of the heaviest rank in excess of the mean of all ranks, as a share of the mean.
        padding_share: share of padding tokens: in packs, those that fill up a pack; in micro-batches, those that pad
            each sample to the longest one in its micro-batch, which jagged fields do not need.
        staleness: for a task with a `max_staleness`: the maximum number of versions between the slot of its oldest
            sample and its training; None: unbounded.
    """

    batch_index: int
    tokens_per_rank: tuple[int, ...] = ()
    imbalance: float = 0.0
    padding_share: float = 0.0
    staleness: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ClaimLease:
    """A claim with leased samples.

    Attributes:
        claim_id: the first 8 hexadecimal digits of its request_id, as in the log of calls.
        claim_name: name of the claim, if its caller gave one; otherwise empty.
        leased_count: samples of the claim that are leased and not acknowledged.
        delivered_ago_seconds: time since delivery, or since the start of the service if that was later.
        ends_in_seconds: time until its lease expires, unless it is extended.
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
        task_name: name of the task.
        epoch: number of times its consumption was reset.
        consumed_count: samples consumed in this epoch.
        skipped_count: samples that the task will never receive, including the rest of groups that lost a member.
        planned_batch_count: batches planned in this epoch (ranked consumers).
        dp_size: number of ranks, once bound; 0 before.
        waiting_count: number of calls that wait.
        complete: whether nothing is left for the task.
        leased_count: samples that are leased and not acknowledged; they may be delivered again.
        dead_lettered_count: samples that were delivered `max_deliveries` times without being acknowledged.
        dead_lettered_indexes: indexes of the first hundred dead-lettered samples that are not cleared.
        pending_count: samples left for the task: live or held, neither consumed nor dead-lettered.
        redelivered_count: samples delivered more than once in this epoch because a lease expired; samples that were
            released or cleared do not count.
        delivered_per_second: recent rate of deliveries, in which the weight of a delivery decays by a factor of e every
            10 seconds. The rate starts from 0 when the service starts.
        recent_batches: the last 16 batches planned for its ranks in this epoch, in order; empty after a restart of the
            service.
        oldest_version: lowest `version` of the live or held samples left for the task, as of the last scan, a moment
            ago. None if these samples lack a version or have not been scanned yet, and in updates of `watch`.
        staleness_versions: highest version of a sample in the partition minus `oldest_version`, that is, how far the
            producers are ahead of the task; None if `oldest_version` is None.
        leasing_claim_count: claims with leased samples.
        leases: the 20 of these claims that were delivered first, in order; empty in updates of `watch`.
        trained_batch_count: trained batches of this epoch, see `advance`.
        saved_batch_count: batches of this epoch covered by a checkpoint of the trainer, see `advance`.
        outstanding_count: outstanding units, as counted by the task's admission; None without an admission.
        running_count: held units, which are being generated, as counted by the task's admission; None without
            `most_running`.
        unmatched_count: samples and groups that the task's claims evicted because `where` excluded them, in all epochs.
        too_small_count: groups that the task's claims evicted because too few members were left, in all epochs.
        late_count: samples and groups that the task's claims evicted because they would have become too stale.
        overflow_count: samples and groups that were cleared for new ones (`Admission(overflow="drop_lowest")`).
        delivered_count: deliveries of samples in all epochs, not counting released claims.
        refilled_count: samples that evictions made claimable for the task again, in all epochs.
        step_times: breakdown of the last steps of the task's ranks, summed over the ranks that report it, as loaders
            do; None if no rank does.
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
    overflow_count: int = 0
    delivered_count: int = 0
    refilled_count: int = 0
    step_times: StepTimes | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerProgress:
    """Progress, in the current epoch, of a trainer whose ranks consume a task.

    Attributes:
        trained_batch_count: trained batches.
        saved_batch_count: batches covered by a checkpoint of the trainer.
        planned_batch_count: planned batches.
    """

    trained_batch_count: int
    saved_batch_count: int
    planned_batch_count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RestartedRanks:
    """The point from which the restarted ranks of a task continue.

    Attributes:
        epoch: epoch of the task.
        batch_index: the first batch that the ranks have to request.
        repeated_batch_count: batches from `batch_index` on that were trained before, and whose samples are trained
            again.
        repeated_sample_count: samples of these batches. Both counts are 0 if the ranks had already been restarted
            before this call.
    """

    epoch: int
    batch_index: int
    repeated_batch_count: int = 0
    repeated_sample_count: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class EvictedUnit:
    """A sample, rollout or group that was evicted by claims of a task, or by its admission.

    Attributes:
        serial: number of the unit within the task, counted from 1.
        unit: "sample" if a single sample was evicted, otherwise "rollout" or "group".
        group: name of the evicted group, or of the group that contained the unit; None without a group.
        key: key of the unit's first sample; None without a key.
        reason: "unmatched": `where` excluded the unit or one of its members; "too_small": fewer than `least_members`
            were left; "late": the unit was not finished, and would have become too stale; "overflow": the unit had the
            lowest priority when new samples came.
        version: the version that was published when the unit was evicted. Its policy is the one that `where` compares
            with, or else that of `not_before_version` or of the partition's `max_staleness`; None without a policy or
            version.
        sample_count: evicted samples; for a cleared group also those that had failed before.
        refill: outcome of `get_meta(refill=)`: "refilled"; "pending": the sample to refill was claimable already;
            "unknown": the partition or key does not exist; "used_up": the sample was already refilled `max_refills`
            times; "given_up": the task will never receive the sample, because it failed, was dead-lettered, dropped or
            skipped, or the ranks are at their end. None: no refill was requested.
        rollout: name of the rollout, or of the rollout of its first sample; None without one.
    """

    serial: int
    unit: BatchUnit
    group: str | None
    key: str | None
    reason: EvictionReason
    version: int | None
    sample_count: int
    refill: RefillOutcome | None = None
    rollout: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class EvictedUnits:
    """Units that claims of a task have evicted, sorted by serial.

    Attributes:
        units: the units; empty if no serial is higher than the given one.
        dropped_count: units with higher serials that are no longer stored.
    """

    units: tuple[EvictedUnit, ...]
    dropped_count: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyStatus:
    """The published version of a policy.

    Attributes:
        policy: its name.
        version: version number of its weights.
        published_ago_seconds: time since this version was published.
    """

    policy: str
    version: int
    published_ago_seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class MetaColumnStatus:
    """A custom_meta column, and the types of its values.

    Attributes:
        name: its name.
        kind: type of the values that claims compare: "int64", "double", "bool" or "string"; "" before the first value.
        has_json: whether any sample has had a value of another type, stored as JSON.
    """

    name: str
    kind: str
    has_json: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class PartitionDescription:
    """A partition with its samples by state, its fields and its tasks.

    Attributes:
        summary: summary of the partition.
        expected_samples: number of samples that will be inserted, if declared.
        live_count: samples that are live.
        held_count: samples that are held.
        failed_count: samples that failed.
        group_count: groups with members in the partition; rollouts without a group do not count.
        rollout_count: rollouts with samples in the partition.
        fields: its fields.
        tasks: its tasks.
        custom_meta_columns: its custom_meta columns.
        used_bytes: bytes of the values of its samples; for partly freed puts an estimate by field.
        max_bytes: maximum of these bytes; None: unlimited.
        admissions: limits on outstanding work per task.
        waiting_put_count: puts of new samples that wait for capacity or for a task.
        declared_tasks: names of all tasks that may consume the partition; empty if any task may.
        samples_per_round: samples per round, if declared.
        revision: revision of this answer, which `watch` can start from.
        release: rules for clearing its samples automatically; None: they are never cleared automatically.
        released_count: samples that were released after all required tasks were done with them.
        expired_count: samples that were released because of their age.
    """

    summary: PartitionSummary
    expected_samples: int | None
    live_count: int
    held_count: int
    failed_count: int
    group_count: int
    rollout_count: int
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
    release: Release | None = None
    released_count: int = 0
    expired_count: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplerOption:
    """An option of a sampler, given in `sampler_config`.

    Attributes:
        name: its name.
        type: type of the option, such as "whole number", "text or null" or "one of skip, take"; "" if the sampler does
            not declare it.
        default_json: the default as JSON; None if the option is required.
        summary: description of the option.
    """

    name: str
    type: str
    default_json: str | None
    summary: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplerDescription:
    """A sampler: its name for `get_meta`, a summary, and its options."""

    name: str
    summary: str
    options: tuple[SamplerOption, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class StorageStat:
    """Byte sizes and counts of a storage service.

    Attributes:
        storage_id: its name.
        boot_id: id of the service's instance, 16 bytes.
        max_bytes: its quota; None: unlimited.
        used_bytes: bytes stored and reserved.
        pooled_bytes: bytes of memory held for reuse, in addition to `used_bytes`.
        put_count: stored puts.
        uncommitted_put_count: puts that are not committed yet.
        shared_memory_count: memfds received from clients on the same host.
        damaged_put_count: puts found since the start to have lost bytes.
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
class RecordingStatus:
    """State of the recording of a service.

    Attributes:
        place: directory or URL of the recording, without passwords; empty if the caller's token does not cover all
            partitions.
        is_recording: whether steps are recorded; False after an error.
        error: the error that stopped the recording; otherwise empty.
        step_count: steps in the recording.
        stored_bytes: bytes of these steps.
        recorded_step_count: steps recorded since the start.
        skipped_step_count: steps since the start that could not be recorded.
        removed_step_count: steps removed since the start, to make space for newer ones.
        pending_bytes: bytes in memory that wait to be written.
        copied_bytes: bytes of puts that were copied since the start.
        linked_bytes: bytes of puts that were recorded since the start by linking their file in the data directory
            instead of copying it.
        processor_seconds: CPU time of the recording since the start, without the operating system's writes.
    """

    place: str
    is_recording: bool
    error: str
    step_count: int
    stored_bytes: int
    recorded_step_count: int
    skipped_step_count: int
    removed_step_count: int
    pending_bytes: int
    copied_bytes: int
    linked_bytes: int
    processor_seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceInfo:
    """Properties of a service process.

    Attributes:
        version: version of the service, such as "0.1.0".
        instance_id: 16 random bytes, new for each start of the process.
        role: "all", or "controller" if storage services run in other processes.
        uptime_seconds: time since its start.
        durability: the failures that acknowledged changes survive: none ("memory"), a crash of any process ("process")
            or of the host ("disk"), or the loss of the host ("cluster").
        data_dir: directory of the service's state; empty if it has none, or if the caller's token does not cover all
            partitions.
        tls: whether it uses TLS.
        client_certificates: whether clients must present a certificate.
        auth: whether calls require a token.
        shared_memory: whether it shares memory with clients on its host.
        recording: state of the recording; None if the service does not record.
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
    recording: RecordingStatus | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ControllerStatus:
    """A controller of a cluster, as known to the leader.

    Attributes:
        name: name of the controller within the cluster, which lasts as long as its data directory.
        address: its address for clients.
        is_leader: whether it leads; all other controllers are standbys.
        epoch: for the leader, a number higher than that of every earlier leader; 0 for standbys.
        lag_count: journal records that the controller has not applied yet, as of a second ago.
    """

    name: str
    address: str
    is_leader: bool
    epoch: int
    lag_count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class MirrorStatus:
    """State of the mirror of a storage service, which holds copies of its puts on other nodes.

    Attributes:
        url: the object store, without user, password and settings.
        is_reachable: whether the object store answered the last call; None before the first call.
        unmirrored_bytes: bytes of puts that lack required copies, complete or not.
        short_put_count: puts with all required copies, but fewer copies than requested.
        unfetched_put_count: puts taken over from another storage service and not fetched yet.
        spilled_bytes: used bytes that are only in the mirror, since they were evicted from memory.
    """

    url: str
    is_reachable: bool | None
    unmirrored_bytes: int
    short_put_count: int
    unfetched_put_count: int = 0
    spilled_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class StorageStatus:
    """A storage service, as known to its controller.

    Attributes:
        storage_id: its name.
        address: its address for clients; empty if it runs in the controller's process, at the controller's address.
        used_bytes: bytes stored and reserved.
        max_bytes: its quota; None: unlimited.
        put_count: number of stored puts.
        version: its version; empty if unknown.
        heard_ago_seconds: time since its last heartbeat; None if it runs in the controller's process.
        is_silent: whether it has been silent too long to receive new puts.
        mirror: state of its mirror at the last heartbeat; None without a mirror.
        is_adopted: whether this entry describes the puts of a lost storage service, which the service at `address` has
            taken over; `used_bytes` and `max_bytes` are those of the successor, whose quota these puts count towards.
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
    """Claims that wait for the same reason, or other calls that wait for a partition that does not exist.

    Attributes:
        partition_id: the partition; it may not exist.
        reason: why the calls wait. Without `explain` it contains only `task_name`, `data_fields` and `waiting_count`;
            `task_name` is empty for waits of `lookup_samples`.
    """

    partition_id: str
    reason: WaitReason


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceStatus:
    """Status of a service with its storage services, partitions and waiting calls.

    Attributes:
        service: the service process.
        storages: its storage services, sorted by name.
        partitions: its partitions, sorted by name.
        waits: waiting calls by reason, sorted by partition, then by arrival of the first call; at most 32 per
            partition.
        revision: revision of the complete status, which `watch` can start from.
        controllers: controllers of its cluster, the leader first; empty for a single controller.
        policies: the published versions, sorted by policy.
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
        """Storage services without adopted entries, so their bytes and quotas can be summed."""
        return [storage for storage in self.storages if not storage.is_adopted]

    def successor_of(self, adopted: StorageStatus) -> str | None:
        """Return the name of the storage service that took over these puts, or None if it has not registered."""
        return next((each.storage_id for each in self.own_storages if each.address == adopted.address), None)


@dataclass(frozen=True, slots=True, kw_only=True)
class RestoredCheckpoint:
    """Contents of a restored checkpoint.

    Attributes:
        put_count: puts created from the checkpoint's bytes.
        value_bytes: bytes of these puts.
        metadata: metadata given by the caller of `checkpoint`.
    """

    partition_count: int
    sample_count: int
    put_count: int
    value_bytes: int
    metadata: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointSummary:
    """Summary of a checkpoint in a list.

    Attributes:
        name: its name, below the `checkpoint_dir` of the service.
        written_at: time when writing it began, in seconds since 1970 (UTC).
        file_bytes: size of its file.
        metadata: metadata given by its caller.
        problem: why the checkpoint cannot be read, judging by its header; empty if it can.
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
    """Contents of a written checkpoint.

    Attributes:
        name: its name, below the `checkpoint_dir` of the service.
        put_count: number of puts that restoring the checkpoint will create.
        value_bytes: bytes of these puts.
        pause_seconds: longest time for which the service answered no calls while it wrote the checkpoint.
    """

    name: str
    partition_count: int
    sample_count: int
    put_count: int
    value_bytes: int
    pause_seconds: float
