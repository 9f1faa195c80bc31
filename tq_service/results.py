"""Result types of client calls that report on partitions, tasks and services."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum, StrEnum
from typing import Any

from tq_service.schema import Admission, BatchUnit, EvictionReason, FieldSpec, RefillOutcome, Release
from tq_service.step_times import StepTimes


@dataclass(frozen=True, slots=True, kw_only=True)
class Revision:
    """A point in the history of a service instance at which `watch` can start. A revision is plain, serializable data.

    Attributes:
        instance_id: id of the service instance, 16 random bytes. After a restart, a service has a new id and a new
            history.
        number: change counter. Later states have higher numbers.
    """

    instance_id: bytes
    number: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ConsumptionStatus:
    """Progress of a task through a partition.

    Attributes:
        consumed_count: number of samples consumed in this epoch, including cleared samples.
        total_count: number of samples inserted into the partition so far, including cleared samples.
        skipped_count: number of samples that the task will never receive. The count includes the remaining members of
            groups that have lost a member.
        sealed: whether the partition is closed to new samples.
        complete: whether the task has received every sample that it can receive. This requires that the partition is
            sealed or, with `samples_per_round`, that every round that has begun is finished.
        epoch: number of times the task's consumption was reset or its ranks were restarted.
        leased_count: number of consumed samples that are leased but not acknowledged. These samples may be delivered
            again.
        dead_lettered_count: number of skipped samples that were delivered `max_deliveries` times without being
            acknowledged.
        expected_count: number of samples expected in the rounds that have begun, including the first round. None
            without `samples_per_round`.
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
        produced_count: number of samples that have all of the requested fields.
        total_count: number of samples that have the requested fields or can still receive them. Cleared and failed
            samples are excluded.
        complete: whether all `total_count` samples have the fields and no new samples will be inserted. With
            `samples_per_round`, the second condition applies only until the next round.
    """

    produced_count: int
    total_count: int
    complete: bool


class WaitCode(StrEnum):
    """Stable code that identifies why a claim is waiting.

    Attributes:
        PARTITION_NOT_FOUND: the partition does not exist.
        NO_SAMPLES: the partition is empty.
        FIELD_NEVER_PUT: one of the requested fields has never received a value.
        ALL_CONSUMED: the task has consumed all samples, but more can arrive because the partition is not sealed, or
            some of the samples are still leased.
        TOO_FEW_READY: fewer samples are ready than the claim requests.
        GROUPS_INCOMPLETE: too few groups are complete. A group is complete when all of its samples are ready.
        SAMPLER_WAITS: enough samples are ready, but the sampler has not planned a batch yet.
        VERSION_NOT_PUBLISHED: the claim waits for a policy version that has not been published yet.
        STALENESS_BOUNDED: enough samples are ready, but delivering them would make older, unfinished samples too stale.
        NO_CAPACITY: enough prompts are ready, but the service lacks the capacity for the slots requested with `admit`.
        RATIO_BOUNDED: a delivery would exceed the ratio of deliveries to inserted samples that the task's admission
            permits.
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
    """Reason why samples cannot be delivered yet.

    The value of each member is a message template, in which `{0}` stands for the `NotReady` object.

    Attributes:
        FIELD: the samples lack the field `name`.
        WHERE: the samples do not meet the condition on the custom_meta column `name`.
        LENGTH: the sampler needs the samples' lengths, but they are missing from the custom_meta column `name`.
        HELD: the samples are held.
        LEASED: the samples are leased to workers of the task.
        GROUP: the samples are ready, but other members of their groups are not.
        LOST: the samples' groups have permanently lost a member, so the task will never receive these samples.
        OLDER: the samples are not ready, and would become too stale if newer samples were used for training first.
    """

    FIELD = "{0.sample_count} lack field {0.name!r}"
    WHERE = "{0.sample_count} do not meet the condition on {0.name!r}"
    LENGTH = "{0.sample_count} have no length for the sampler in the custom_meta column {0.name!r}"
    HELD = "{0.sample_count} are held"
    LEASED = "{0.sample_count} are leased, and the first lease expires in {0.ends_in_seconds:.0f} s"
    GROUP = "{0.sample_count} are ready, but other members of their groups are not ({0.example})"
    OLDER = "{0.sample_count} are awaited; training on newer samples first would make them too stale ({0.example})"
    LOST = "{0.sample_count} are lost, since their groups lost a member that failed, was cleared or was dead-lettered"

    @property
    def kind(self) -> str:
        """Name of the reason, as stored in `NotReady.kind`."""
        return self.name.lower()


@dataclass(frozen=True, slots=True, kw_only=True)
class NotReady:
    """A reason why samples cannot be delivered yet, and the number of these samples.

    Attributes:
        kind: kind of reason; see `Lack.kind`. A newer service may report kinds that this version of the client does not
            define.
        name: name of the field or custom_meta column that the reason refers to. The name is empty if the reason refers
            to neither a field nor a column.
        sample_count: number of samples that cannot be delivered for this reason.
        ends_in_seconds: for kind "leased", the time until the first lease expires; None for other kinds.
        example: text with details. For kind "group", the text contains the name and counts of one incomplete group. For
            kind "older", it describes one of the samples. For kind "field", it states that the groups lack a value,
            which must be put for the groups. It is empty for other kinds, and for fields that groups do not share.
    """

    kind: str
    name: str = ""
    sample_count: int
    ends_in_seconds: float | None = None
    example: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class WaitReason:
    """The reason why claims with identical arguments are waiting. All sample counts refer to a single point in time.

    Attributes:
        code: the reason as a stable code; see `WaitCode`.
        text: the reason as a sentence for users.
        task_name: task for which the claims consume samples.
        data_fields: the fields that the claims request.
        waiting_count: number of calls waiting for this reason. In the response to a claim, the count is 0.
        left_count: number of live or held samples that the task has not consumed.
        ready_count: number of samples in `left_count` that could be delivered now. If `counts_groups` is set, this is
            the number of groups or rollouts that could be delivered.
        needed_count: number of ready samples that the claim needs. If `counts_groups` is set, this is the number of
            ready groups or rollouts that the claim needs.
        counts_groups: whether `ready_count` and `needed_count` count groups or rollouts instead of samples.
        not_ready: number of samples that cannot be delivered yet, by reason. A sample can be counted for more than one
            reason.
        sealed: whether the partition is closed to new samples.
        waiting_put_count: number of puts of new samples that wait for capacity.
        put_waits_for: what the first waiting put is waiting for, or "" if no put is waiting.
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
        incarnation: 16 random bytes that identify the partition. These bytes change if the partition is cleared and
            created again.
        inserted_count: number of samples inserted so far, including cleared samples.
        present_count: number of samples that have not been cleared.
        sealed: whether the partition is closed to new samples.
    """

    partition_id: str
    incarnation: bytes
    inserted_count: int
    present_count: int
    sealed: bool


class PartitionList(list[PartitionSummary]):
    """A list of partitions, sorted by name.

    Attributes:
        revision: revision of the complete list, from which `watch` can start.
    """

    def __init__(self, partitions: Iterable[PartitionSummary], revision: Revision | None = None) -> None:
        super().__init__(partitions)
        self.revision = revision


@dataclass(frozen=True, slots=True, kw_only=True)
class FieldStatus:
    """A field of a partition, and the number of samples that have a value for it."""

    spec: FieldSpec
    produced_count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RecentBatch:
    """Statistics of a batch planned for ranks.

    Attributes:
        batch_index: index of the batch within the epoch.
        tokens_per_rank: token counts of the first 128 ranks, by `dp_rank`; empty if any sample length is unknown.
        imbalance: largest token count of any rank divided by the mean over all ranks, minus 1.
        padding_share: fraction of tokens that are padding. In packs, padding fills the remaining space. In
            micro-batches, each sample is padded to the length of the longest sample. Jagged fields need no padding in
            micro-batches.
        staleness: upper bound on the number of versions between creating the oldest sample's slot and training on that
            sample. Only tasks with a `max_staleness` have this bound. If None, staleness is unbounded.
    """

    batch_index: int
    tokens_per_rank: tuple[int, ...] = ()
    imbalance: float = 0.0
    padding_share: float = 0.0
    staleness: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ClaimLease:
    """A claim that holds leased samples.

    Attributes:
        claim_id: first 8 hexadecimal digits of the claim's request_id, as shown in the call log.
        claim_name: name given to the claim by the caller. The name is empty if the claim is unnamed.
        leased_count: number of the claim's leased samples that have not been acknowledged.
        delivered_ago_seconds: time since the delivery, or since the start of the service if the service started later.
        ends_in_seconds: time until the lease expires if it is not extended.
    """

    claim_id: str
    claim_name: str
    leased_count: int
    delivered_ago_seconds: float
    ends_in_seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskStatus:
    """Status of a task in a partition.

    Attributes:
        task_name: name of the task.
        epoch: number of times the task's consumption was reset or its ranks were restarted.
        consumed_count: number of samples consumed in this epoch.
        skipped_count: number of samples that the task will never receive. The count includes the remaining members of
            groups that have lost a member.
        planned_batch_count: number of batches planned for ranks in this epoch.
        dp_size: number of data-parallel ranks; 0 until the first rank's claim sets it.
        waiting_count: number of waiting calls.
        complete: whether the task has received every sample that it can receive.
        leased_count: number of leased samples that have not been acknowledged. These samples may be delivered again.
        dead_lettered_count: number of samples that were delivered `max_deliveries` times without being acknowledged.
        dead_lettered_indexes: indexes of the first 100 dead-lettered samples that have not been cleared.
        pending_count: number of live or held samples that the task has neither consumed nor dead-lettered.
        redelivered_count: number of samples delivered again in this epoch because a lease expired. Redeliveries of
            released or cleared samples do not count.
        delivered_per_second: recent delivery rate, as an exponentially weighted average with a time constant of 10
            seconds. The rate is 0 when the service starts.
        recent_batches: the last 16 batches planned for the task's ranks in this epoch, in order. The tuple is empty
            after a restart of the service.
        oldest_version: lowest `version` among the task's remaining live and held samples, as of the most recent scan.
            The version is None in updates from `watch`, and also if the samples lack a version or have not been scanned
            yet.
        staleness_versions: number of versions by which the producers are ahead of the task. This is the highest version
            of any sample in the partition minus `oldest_version`. The number is None if `oldest_version` is None.
        leasing_claim_count: number of claims that hold leased samples.
        leases: the first 20 claims with leased samples, in order of delivery. In updates from `watch`, this tuple is
            always empty.
        trained_batch_count: number of batches that ranks have trained on in this epoch; see `advance`.
        saved_batch_count: number of batches in this epoch that a trainer checkpoint covers; see `advance`.
        outstanding_count: number of outstanding units, as counted by the task's admission. The count is None if the
            task has no admission.
        running_count: number of held units (units being generated), as counted by the task's admission. The count is
            None if `most_running` is not set.
        unmatched_count: number of samples and groups that the task's claims have evicted because `where` excluded them.
            The count covers all epochs.
        too_small_count: number of groups that the task's claims have evicted because too few members were left. The
            count covers all epochs.
        late_count: number of samples and groups that the task's claims have evicted because they would have become too
            stale.
        overflow_count: number of samples and groups that `Admission(overflow="drop_lowest")` cleared to make space for
            new samples.
        delivered_count: number of sample deliveries in all epochs, excluding deliveries to claims that were released.
        refilled_count: number of samples that became claimable again for the task to replace evicted ones. The count
            covers all epochs.
        step_times: time breakdown of the latest steps, summed over the ranks that report step times. Loaders report
            step times. The breakdown is None if no rank reports step times.
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
    """A trainer's progress in the current epoch of the task from which its ranks claim batches.

    Attributes:
        trained_batch_count: number of batches that the ranks have trained on so far.
        saved_batch_count: number of batches covered by a trainer checkpoint.
        planned_batch_count: number of batches planned so far.
    """

    trained_batch_count: int
    saved_batch_count: int
    planned_batch_count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RestartedRanks:
    """The point from which a task's ranks continue after a restart.

    Attributes:
        epoch: the task's epoch after the restart.
        batch_index: index of the first batch that the ranks must request.
        repeated_batch_count: number of batches, starting at `batch_index`, that the ranks have already trained on and
            will train on again. The count is 0 if an earlier call already restarted the ranks.
        repeated_sample_count: number of samples in the batches that the ranks will train on again. The count is 0 if an
            earlier call already restarted the ranks.
    """

    epoch: int
    batch_index: int
    repeated_batch_count: int = 0
    repeated_sample_count: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class EvictedUnit:
    """A sample, rollout or group evicted by a task's claims or admission.

    Attributes:
        serial: sequence number of the unit within the task, starting at 1.
        unit: "sample" if a single sample was evicted, otherwise "rollout" or "group".
        group: name of the evicted group, or of the group that contained the unit, or None if there is no group.
        key: key of the unit's first sample, or None if the sample has no key.
        reason: why the unit was evicted. "unmatched": `where` excluded the unit or one of its members. "too_small":
            fewer than `least_members` members were left. "late": the unit was unfinished and would have become too
            stale. "overflow": new samples were put, and the unit had the lowest priority.
        version: published version of the policy at the time of the eviction. The policy is taken from `where`,
            otherwise from `not_before_version`, otherwise from the partition's `max_staleness`. The version is None if
            no policy is named, or if the policy has no published version.
        sample_count: number of evicted samples. For a cleared group, the count includes samples that had failed
            earlier.
        refill: outcome of the refill that `claim(refill=)` requested, or None if no refill was requested. "refilled":
            the sample is claimable again. "pending": the sample was already claimable. "unknown": the partition or key
            does not exist. "used_up": the sample had already been refilled `max_refills` times. "given_up": the task
            will never receive the sample. The reason is that the sample failed, was dead-lettered, dropped or skipped,
            or that the ranks have reached the end of the partition.
        rollout: name of the evicted rollout, or of the rollout that contained the unit's first sample. The name is None
            if there is no rollout.
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
    """Units evicted by a task's claims, sorted by serial.

    Attributes:
        units: evicted units whose serial is greater than the requested serial.
        dropped_count: number of evicted units with a greater serial that the service no longer stores.
    """

    units: tuple[EvictedUnit, ...]
    dropped_count: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyStatus:
    """The published version of a policy.

    Attributes:
        policy: name of the policy.
        version: version number of the policy's weights.
        published_ago_seconds: time since this version was published.
    """

    policy: str
    version: int
    published_ago_seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class MetaColumnStatus:
    """The name and value types of a custom_meta column.

    Attributes:
        name: name of the column.
        kind: type of the values that claims can compare: "int64", "double", "bool" or "string". The kind is empty until
            the first such value is written.
        has_json: whether a value of a different type has ever been written to the column. Such values are stored as
            JSON.
    """

    name: str
    kind: str
    has_json: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class PartitionDescription:
    """Description of a partition: sample counts by state, fields, tasks and limits.

    Attributes:
        summary: name, incarnation and basic counts of the partition.
        expected_samples: number of samples that will be inserted, as declared by the creator, or None if the
            creator declared no number.
        live_count: number of live samples.
        held_count: number of held samples.
        failed_count: number of failed samples.
        group_count: number of groups that have at least one member in the partition. Rollouts without a group are not
            counted.
        rollout_count: number of rollouts with samples in the partition.
        fields: the partition's fields, each with the number of its values.
        tasks: status of each task in the partition.
        custom_meta_columns: names and types of the partition's custom_meta columns.
        used_bytes: total size of the sample values in bytes. The size of partly freed puts is estimated per field.
        max_bytes: byte quota of the partition, or None if unlimited.
        admissions: limits on the outstanding work of each task.
        waiting_put_count: number of puts of new samples that wait for capacity or for a task.
        declared_tasks: names of the tasks that may consume the partition. If empty, any task may consume the partition.
        samples_per_round: number of samples per round, as declared by the creator, or None if the creator declared no
            number.
        revision: revision of this description, from which `watch` can start.
        release: rules for clearing samples automatically. If None, samples are never cleared automatically.
        released_count: number of samples released because all required tasks had finished with them.
        expired_count: number of samples released because of their age.
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
    """A sampler option, set in `sampler_config`.

    Attributes:
        name: name of the option.
        type: type of the option, such as "whole number", "text or null" or "one of skip, take". The string is empty if
            the sampler does not declare a type.
        default_json: default value as JSON, or None if the option is required.
        summary: one-sentence description of the option.
    """

    name: str
    type: str
    default_json: str | None
    summary: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplerDescription:
    """Description of a sampler: its name, as passed to `claim`, a summary, and its options."""

    name: str
    summary: str
    options: tuple[SamplerOption, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class StorageStat:
    """Byte sizes and put counts of a storage service.

    Attributes:
        storage_id: name of the storage service.
        boot_id: id of the service instance, 16 bytes.
        max_bytes: byte quota of the storage service, or None if unlimited.
        used_bytes: number of bytes stored and reserved.
        pooled_bytes: number of free bytes retained for reuse, not included in `used_bytes`.
        put_count: number of stored puts.
        uncommitted_put_count: number of puts that have not been committed yet.
        shared_memory_count: number of memory files (memfd) received from clients on the same host.
        damaged_put_count: number of puts found damaged since the service started.
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
    """State of a service's step recording.

    Attributes:
        place: directory or URL of the recording, without passwords. Empty if the caller's token does not cover all
            partitions.
        is_recording: whether the service is recording steps. The value is False after an error.
        error: the error that stopped the recording. The text is empty if there was no error.
        step_count: number of steps in the recording.
        stored_bytes: size in bytes of all steps in the recording.
        recorded_step_count: number of steps recorded since the service started.
        skipped_step_count: number of steps that the service has failed to record since it started.
        removed_step_count: number of steps removed since the service started to make space for newer ones.
        pending_bytes: number of bytes in memory that are waiting to be written to the recording.
        copied_bytes: number of bytes that were copied from puts into the recording since the service started.
        linked_bytes: number of bytes recorded since the service started by linking to files in the data directory
            instead of copying them.
        processor_seconds: CPU time spent on recording since the service started. Writes by the operating system are not
            counted.
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
        instance_id: 16 random bytes, newly generated at each start of the process.
        role: "all" if the process also contains the storage service, or "controller" if storage services run in other
            processes.
        uptime_seconds: time since the process started.
        durability: worst failure that acknowledged changes survive: none ("memory"), a process crash ("process"), a
            host crash ("disk"), or the loss of the host ("cluster").
        data_dir: directory of the service's persistent state. The path is empty if the service has no persistent state,
            or if the caller's token does not cover all partitions.
        tls: whether the service uses TLS.
        client_certificates: whether clients must present a certificate.
        auth: whether calls require a token.
        shared_memory: whether the service shares memory with clients on its own host.
        recording: state of the recording, or None if the service does not record steps.
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
    """A controller in a cluster, as seen by the leader.

    Attributes:
        name: name of the controller within the cluster. The name is stored in the controller's data directory.
        address: address that clients use to reach the controller.
        is_leader: whether the controller is the leader. All other controllers are standbys.
        epoch: for the leader, a number higher than the epoch of every earlier leader. The epoch is 0 for standbys.
        lag_count: number of journal records that the controller had not yet applied about one second ago.
    """

    name: str
    address: str
    is_leader: bool
    epoch: int
    lag_count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class MirrorStatus:
    """Status of a storage service's mirror, which stores copies of puts on other nodes.

    Attributes:
        url: URL of the object store, without user name, password or settings.
        is_reachable: whether the object store responded to the last call. The value is None before the first call.
        unmirrored_bytes: number of bytes in puts that lack required copies, including incomplete puts.
        short_put_count: number of puts that have all required copies but fewer copies than requested.
        unfetched_put_count: number of puts taken over from another storage service but not fetched yet.
        spilled_bytes: number of used bytes that exist only in the mirror because the puts were evicted from memory.
    """

    url: str
    is_reachable: bool | None
    unmirrored_bytes: int
    short_put_count: int
    unfetched_put_count: int = 0
    spilled_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class StorageStatus:
    """A storage service, as seen by its controller.

    Attributes:
        storage_id: name of the storage service.
        address: address that clients use to reach the service. The address is empty if the service runs in the
            controller's process and shares the controller's address.
        used_bytes: number of bytes stored and reserved.
        max_bytes: byte quota of the service, or None if unlimited.
        put_count: number of stored puts.
        version: version of the service. Empty if unknown.
        heard_ago_seconds: time since the last heartbeat. The time is None if the service runs in the controller's
            process.
        is_silent: whether heartbeats have stopped. A silent service receives no new puts.
        mirror: state of the mirror as of the last heartbeat. The state is None if the service has no mirror.
        is_adopted: whether this entry describes the puts of a lost storage service that has been replaced. The storage
            service at `address` has taken over the puts. `used_bytes` and `max_bytes` describe the adopting service,
            whose quota includes the adopted puts.
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
    """Calls that wait on the same partition for the same reason.

    Calls other than claims are included only while they wait for the partition to be created.

    Attributes:
        partition_id: name of the partition, which may not exist yet.
        reason: why the calls are waiting. Without `explain`, only `task_name`, `data_fields` and `waiting_count` are
            set. For `lookup_samples` calls, `task_name` is empty.
    """

    partition_id: str
    reason: WaitReason


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceStatus:
    """Status of a service, including its storage services, partitions and waiting calls.

    Attributes:
        service: properties of the service process.
        storages: the controller's storage services, sorted by name.
        partitions: the service's partitions, sorted by name.
        waits: waiting calls by reason, sorted by partition and, within a partition, by the arrival of the first call.
            At most 32 entries are listed per partition.
        revision: revision of the complete status. A `watch` call can start from this revision.
        controllers: the controllers of the cluster, starting with the leader. The tuple is empty if there is only a
            single controller.
        policies: published version of each policy, sorted by policy.
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
        """The storage services, excluding adopted entries. Use this list when you add up bytes or quotas."""
        return [storage for storage in self.storages if not storage.is_adopted]

    def successor_of(self, adopted: StorageStatus) -> str | None:
        """Return the name of the service that took over the adopted puts, or None if that service is not registered."""
        return next((each.storage_id for each in self.own_storages if each.address == adopted.address), None)


@dataclass(frozen=True, slots=True, kw_only=True)
class RestoredCheckpoint:
    """Contents of a restored checkpoint.

    Attributes:
        put_count: number of puts created from the checkpoint.
        value_bytes: total size of the created puts in bytes.
        metadata: metadata that the caller of `checkpoint` specified.
    """

    partition_count: int
    sample_count: int
    put_count: int
    value_bytes: int
    metadata: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointSummary:
    """Summary of a checkpoint, as returned by `list_checkpoints`.

    Attributes:
        name: name of the checkpoint, relative to the service's `checkpoint_dir`.
        written_at: time when the service began writing the checkpoint, in seconds since 1970 (UTC).
        file_bytes: size of the checkpoint file in bytes.
        metadata: metadata that the caller of `checkpoint` specified.
        problem: reason why the checkpoint cannot be read, according to its header. The reason is empty if the
            checkpoint can be read.
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
    """Summary of a newly written checkpoint.

    Attributes:
        name: name of the checkpoint, relative to the service's `checkpoint_dir`.
        put_count: number of puts that are created when the checkpoint is restored.
        value_bytes: total size in bytes of the puts that are created when the checkpoint is restored.
        pause_seconds: longest period during which the service answered no calls while writing the checkpoint.
    """

    name: str
    partition_count: int
    sample_count: int
    put_count: int
    value_bytes: int
    pause_seconds: float
