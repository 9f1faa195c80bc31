"""Calls that manage partitions, checkpoints and services."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict
from typing import Any, Final

from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse

from tq_service.addresses import parse_address
from tq_service.client._async.calls import AsyncBase
from tq_service.client.requests import all_of, listed, request_of, with_short_forms
from tq_service.results import (
    CheckpointCopy,
    CheckpointSummary,
    PartitionDescription,
    PartitionList,
    PartitionSummary,
    RestoredCheckpoint,
    Revision,
    SamplerDescription,
    ServiceStatus,
    StorageStat,
)
from tq_service.schema import Admission, BatchUnit, FieldSpec, Layout, LayoutGiven, Release
from tq_service.v1 import controller_service_pb2 as pb
from tq_service.v1.storage_service_pb2 import StatRequest, StatResponse
from tq_service.wire.messages import read_message, to_message
from tq_service.wire.metadata import encode_spec
from tq_service.wire.objects import decode_json_object, encode_json_object

# Default timeout for writing or restoring a checkpoint, in seconds.
_CHECKPOINT_SECONDS: Final = 3600.0


class AsyncPartitionCalls(AsyncBase):
    """Client calls that manage partitions and services. See `AsyncClient`."""

    async def create_partition(
        self,
        partition_id: str,
        *,
        expected_samples: int | None = None,
        default_layout: LayoutGiven = Layout.AUTO,
        fields: Iterable[FieldSpec] = (),
        max_bytes: int | None = None,
        admissions: Iterable[Admission] = (),
        tasks: Iterable[str] = (),
        samples_per_round: int | None = None,
        release: Release | None = None,
        clear_after: Iterable[str] | None = None,
        max_staleness: int | None = None,
        global_batch: int | None = None,
        batch_unit: BatchUnit = "sample",
        timeout: float | None = None,
    ) -> bytes:
        """Create a partition, or check that an existing partition has the same settings.

        The call is optional, because the first put creates the partition if necessary.

        Args:
            partition_id: name of the partition.
            expected_samples: number of samples after which the partition is sealed automatically. If None, only
                `seal_partition` seals the partition.
            default_layout: layout of tensor fields that do not declare a layout. With "auto", a field is dense until a
                row with a different shape is put, and then becomes jagged. "dense" rejects rows with a different shape.
                With "jagged", fields are always jagged, except scalars, which are dense.
            fields: declarations of fields. The first put sets any dtype, layout or row shape that a declaration omits.
            max_bytes: maximum total size of the samples in bytes. Puts of new samples wait until there is capacity. If
                None, only the service's quota applies.
            admissions: limits on the outstanding work of each task. Puts of new samples wait until they are admitted.
                If empty, new samples are limited only by capacity.
            tasks: names of the tasks that may consume the partition. Claims by other tasks raise TaskNotFoundError.
                Until one of these tasks makes its first claim, it counts as having consumed no samples. If empty, any
                task may consume the partition.
            samples_per_round: number of samples per round in a partition that is reused without being sealed.
                `check_consumption` reports completion when all rounds that have begun are full and consumed.
                `check_production` reports completion when these rounds are full and all their samples are produced. If
                None, completion requires a sealed partition.
            release: rule for clearing samples automatically. If None, samples are cleared only by `clear_samples` and
                `clear_partition`.
            clear_after: shorthand for `Release("trained", clear_after)`. Samples are cleared once all of these tasks
                have trained on them or acknowledged them.
            max_staleness: shorthand for adding an entry to `admissions` for the only task in `clear_after`. The value
                limits how many versions of the default policy can be published between creating a sample's slot and
                training on the sample. Samples must be created with `acquire`; see `Admission`. If None, there is no
                limit.
            global_batch: with `max_staleness`, the total number of units that the task's ranks consume per version.
            batch_unit: unit of `global_batch`: "sample", "rollout" or "group". This unit must match the `batch_unit` of
                the ranks' claims.
            timeout: seconds until the call fails. Defaults to the client's `timeout`.

        Returns:
            The incarnation of the partition (16 bytes).

        Raises:
            AlreadyExistsError: the partition already exists with different settings.
            InvalidArgumentError: an argument is invalid, or a shorthand argument is incomplete or contradicts
                `release`.
        """
        all_admissions, any_release = with_short_forms(
            admissions,
            release,
            clear_after=clear_after,
            max_staleness=max_staleness,
            global_batch=global_batch,
            batch_unit=batch_unit,
        )
        answer = await self._ask(
            pb.CreatePartitionResponse,
            timeout,
            partition_id=partition_id,
            expected_samples=expected_samples,
            default_layout=default_layout,
            fields=[encode_spec(spec) for spec in all_of(FieldSpec, "fields", fields)],
            max_bytes=max_bytes,
            admissions=[
                request_of(pb.Admission, **asdict(each) | {"policy": self._namespace.full_name(each.policy)})
                for each in all_admissions
            ],
            tasks=listed("tasks", tasks),
            samples_per_round=samples_per_round,
            release=None if any_release is None else to_message(pb.Release, any_release),
        )
        return answer.incarnation

    async def seal_partition(self, partition_id: str, *, incarnation: bytes = b"", timeout: float | None = None) -> int:
        """Seal a partition so that it accepts columns for existing samples but no new samples.

        Args:
            partition_id: the partition.
            incarnation: expected incarnation of the partition. An empty value matches any incarnation.
            timeout: seconds until the call fails. Defaults to the client's `timeout`.

        Returns:
            The number of samples inserted since the partition was created.

        Raises:
            PartitionNotFoundError: the partition does not exist.
            StaleIncarnationError: the partition was cleared and created again.
        """
        answer = await self._ask(
            pb.SealPartitionResponse,
            timeout,
            partition_id=partition_id,
            incarnation=incarnation,
        )
        return answer.inserted_count

    async def clear_partition(
        self, partition_id: str, *, incarnation: bytes = b"", missing_ok: bool = False, timeout: float | None = None
    ) -> int:
        """Remove a partition and all its contents. Calls waiting on the partition fail. Its name can be reused.

        Args:
            partition_id: the partition.
            incarnation: expected incarnation of the partition. An empty value matches any incarnation.
            missing_ok: whether to return 0 instead of raising PartitionNotFoundError or StaleIncarnationError.
            timeout: seconds until the call fails. Defaults to the client's `timeout`.

        Returns:
            The number of samples removed.

        Raises:
            PartitionNotFoundError: the partition does not exist.
            StaleIncarnationError: the partition was cleared and created again.
        """
        answer = await self._ask(
            pb.ClearPartitionResponse,
            timeout,
            partition_id=partition_id,
            incarnation=incarnation,
            missing_ok=missing_ok,
        )
        return answer.cleared_count

    async def close_groups(
        self, partition_id: str, groups: Iterable[str], *, incarnation: bytes = b"", timeout: float | None = None
    ) -> None:
        """Close groups to new members. A closed group is complete when all of its rollouts are closed.

        Raises:
            PartitionNotFoundError: the partition does not exist.
            NotFoundError: a group does not exist in the partition.
        """
        await self._ask(
            pb.CloseGroupsResponse,
            timeout,
            partition_id=partition_id,
            incarnation=incarnation,
            groups=groups,
        )

    async def close_rollouts(
        self, partition_id: str, rollouts: Iterable[str], *, incarnation: bytes = b"", timeout: float | None = None
    ) -> None:
        """Close rollouts so that no more samples can join them. A closed rollout counts as complete.

        Raises:
            PartitionNotFoundError: the partition does not exist.
            NotFoundError: a rollout does not exist in the partition.
        """
        await self._ask(
            pb.CloseGroupsResponse,
            timeout,
            partition_id=partition_id,
            incarnation=incarnation,
            rollouts=rollouts,
        )

    async def list_partitions(self, prefix: str = "", *, timeout: float | None = None) -> PartitionList:
        """Return the partitions whose names begin with `prefix`, sorted by name.

        Large results are read in pages. Partitions created or cleared during the call may or may not be included. To
        receive later changes, pass the `revision` of the list to `watch`.
        """
        request = request_of(pb.ListPartitionsRequest, prefix=self._namespace.prefix + prefix)
        pages = self._pages(pb.ListPartitionsResponse, request, self._deadline(timeout))
        revision: Revision | None = None
        partitions: list[PartitionSummary] = []
        async for page in pages:
            revision = revision or read_message(Revision, page.revision)
            partitions += (
                read_message(PartitionSummary, one, partition_id=self._namespace.own_name(one.partition_id))
                for one in page.partitions
            )
        return PartitionList(partitions, revision)

    async def describe_partition(self, partition_id: str, *, timeout: float | None = None) -> PartitionDescription:
        """Return a partition's fields, tasks, and sample counts by state.

        Raises:
            PartitionNotFoundError: the partition does not exist.
        """
        answer = await self._ask(
            pb.DescribePartitionResponse,
            timeout,
            partition_id=partition_id,
        )
        self._name_as_own([answer])
        return read_message(PartitionDescription, answer)

    def _name_as_own(self, described: Iterable[pb.DescribePartitionResponse]) -> None:
        """Convert full names of partitions and policies to names in the client's namespace."""
        for each in described:
            each.summary.partition_id = self._namespace.own_name(each.summary.partition_id)
            for admission in each.admissions:
                admission.policy = self._namespace.own_name(admission.policy)

    async def status(self, prefix: str = "", *, explain: bool = True, timeout: float | None = None) -> ServiceStatus:
        """Return the service's state: storage services, partitions, and waiting claims with the reasons for waiting.

        Large results are read in pages. Partitions created or cleared during the call may or may not be included.

        Args:
            prefix: name prefix of the partitions to include. Partitions that clients are waiting for are included even
                if they do not exist yet.
            explain: whether to include the reasons why claims are waiting. To determine the reasons, the service scans
                all samples of each partition with waiting claims.
            timeout: seconds until the call fails. Defaults to the client's `timeout`.
        """
        full_prefix = self._namespace.prefix + prefix
        answer = await self._ask(pb.GetStatusResponse, timeout, prefix=full_prefix, explain=explain)
        self._name_as_own(answer.partitions)
        for wait in answer.waits:
            wait.partition_id = self._namespace.own_name(wait.partition_id)
        for published in answer.policies:
            published.policy = self._namespace.own_name(published.policy)
        return read_message(ServiceStatus, answer)

    async def list_samplers(self, *, timeout: float | None = None) -> list[SamplerDescription]:
        """Return the samplers that the service provides for `claim`, with their options."""
        answer = await self._ask(pb.ListSamplersResponse, timeout)
        return [read_message(SamplerDescription, one) for one in answer.samplers]

    async def checkpoint(
        self, name: str, *, metadata: Mapping[str, Any] | None = None, timeout: float | None = None
    ) -> CheckpointCopy:
        """Write a consistent copy of all partitions to the controller's disk while the service keeps running.

        If a checkpoint with this name exists, it is replaced atomically. A client with a namespace copies only the
        partitions in its namespace, and stores them under names without the namespace.

        Args:
            name: a path of at most 200 characters below the service's `checkpoint_dir`, such as "nightly/2026-11-21".
                Each path component consists of letters, digits and "._=@+-", and begins with a letter or digit.
            metadata: a mapping of strings to JSON values, for example the trainer's step; at most 256 KiB in total.
                `restore` and `list_checkpoints` return this mapping, with tuples converted to lists.
            timeout: seconds until the call fails and the copy is cancelled. Defaults to one hour.

        Raises:
            InvalidArgumentError: the name is invalid, the path is not writable, or the metadata is not JSON.
            PreconditionError: another checkpoint is being written or restored, or the service has no `checkpoint_dir`.
            DiskFullError: the disk is full.
            DataLossError: some of the data to copy has been lost. The error names the affected samples.
        """
        answer = await self._ask(
            pb.CheckpointResponse,
            _CHECKPOINT_SECONDS if timeout is None else timeout,
            name=name,
            metadata=encode_json_object("metadata", metadata),
            prefix=self._namespace.prefix,
        )
        return read_message(CheckpointCopy, answer)

    async def list_checkpoints(self, prefix: str = "", *, timeout: float | None = None) -> list[CheckpointSummary]:
        """Return the checkpoints whose names begin with `prefix`, sorted by name, with their metadata.

        Raises:
            PreconditionError: the service has no `checkpoint_dir`.
        """
        answer = await self._ask(pb.ListCheckpointsResponse, timeout, prefix=prefix)
        return [
            read_message(CheckpointSummary, one, metadata=decode_json_object(one.metadata))
            for one in answer.checkpoints
        ]

    async def restore(self, name: str, *, replace: bool = False, timeout: float | None = None) -> RestoredCheckpoint:
        """Restore a checkpoint into an empty service, or replace all partitions with those in a checkpoint.

        The entire checkpoint is read and checked first, and its data is sent to the current storage services. All
        partitions in the checkpoint then appear atomically, together with their claims, so trainers can continue from
        the checkpoint. A client with a namespace restores into its own namespace, even if the checkpoint was written
        from another namespace. Partitions of other namespaces do not change.

        Args:
            name: the name that was passed to `checkpoint`.
            replace: whether to replace all existing partitions. The replacement is atomic: a crash leaves either the
                old or the restored state. Calls waiting on old partitions fail with PartitionClearedError. Calls that
                pass a BatchMeta from a replaced partition raise StaleIncarnationError, even if the checkpoint also
                contains that partition. The storage services need capacity for both the old and the restored data.
            timeout: seconds until the call fails. Nothing is restored if the call fails. Defaults to one hour.

        Raises:
            PreconditionError: partitions exist and `replace` is False, another checkpoint is being written or restored,
                or the service has no `checkpoint_dir`.
            InvalidArgumentError: the checkpoint does not exist.
            SnapshotDamagedError: the checkpoint is damaged.
            QuotaExceededError: the storage services do not have enough capacity for the checkpoint's data.
        """
        answer = await self._ask(
            pb.RestoreResponse,
            _CHECKPOINT_SECONDS if timeout is None else timeout,
            name=name,
            replace=replace,
            prefix=self._namespace.prefix,
        )
        return read_message(RestoredCheckpoint, answer, metadata=decode_json_object(answer.metadata))

    async def storage_stat(self, address: str | None = None, *, timeout: float | None = None) -> StorageStat:
        """Return the sizes and counts reported by a storage service, by default the service at the client's address."""
        deadline = self._deadline(timeout)
        target = parse_address(address) if address else ""
        answer = await self._calls.unary(StatResponse, StatRequest(), deadline, target)
        return read_message(
            StorageStat,
            answer,
            storage_id=answer.storage.storage_id,
            boot_id=answer.storage.boot_id,
            max_bytes=answer.max_bytes or None,
        )

    async def health(self, *, timeout: float | None = None) -> bool:
        """Return whether the service reports that it is serving. The call is made only once, without retries.

        Raises:
            UnavailableError: no service responds at the address.
        """
        request = HealthCheckRequest()
        answer = await self._calls.unary_once(HealthCheckResponse, request, self._deadline(timeout), is_retried=False)
        return bool(answer.status == HealthCheckResponse.SERVING)
