"""Calls about partitions, checkpoints of all partitions, and the services."""

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

# Default timeout for writing or restoring a checkpoint.
_CHECKPOINT_SECONDS: Final = 3600.0


class AsyncPartitionCalls(AsyncBase):
    """The part of the client about partitions and services. See `AsyncClient`."""

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
        """Create a partition, or confirm that it exists with these settings. Optional: its first samples create it too.

        Args:
            partition_id: its name.
            expected_samples: number of samples that will be inserted: reaching it seals the partition. None: sealed
                by `seal_partition`.
            default_layout: layout of tensor fields without a declared one. "auto": dense until a row differs in shape
                from the others, jagged from then on. "dense": rows that differ are refused. "jagged": jagged even while
                all rows have the same shape; scalars are dense.
            fields: fields known beforehand; the first put can fix their dtype, layout and row shape.
            max_bytes: maximum total bytes of its samples; puts of new samples wait for capacity. None: limited only by
                the quota of the service.
            admissions: limits on outstanding work per task; puts of new samples wait until they are admitted. Empty:
                limited only by capacity.
            tasks: names of all tasks that may consume it. Each has consumed 0 before its first claim, and other names
                raise TaskNotFoundError. Empty: any name is a task.
            samples_per_round: number of samples per round, for a partition that is reused without a seal:
                `check_consumption` is complete once the rounds that have begun are full and consumed, and
                `check_production` once they are full and produced. None: complete only after a seal.
            release: when the service clears samples automatically. None: only `clear_samples` and `clear_partition`
                clear them.
            clear_after: short form of `release`: samples are cleared once all of these tasks have trained or
                acknowledged them, as by `Release("trained", clear_after)`.
            max_staleness: short form of one of the `admissions`, for the only task in `clear_after`: maximum number of
                versions published between the slot of a sample and its training. Samples are then created by `acquire`,
                and versions are those of the default policy, see `Admission`. None: unbounded.
            global_batch: with `max_staleness`: units that all ranks of the task take per version.
            batch_unit: the unit of `global_batch`: "sample", "rollout" or "group", as in the claims of the ranks.
            timeout: seconds until the call fails; None: the client's.

        Returns:
            The incarnation of the partition (16 bytes).

        Raises:
            AlreadyExistsError: it exists with other settings.
            InvalidArgumentError: an argument is invalid, or a short form is incomplete or contradicts `release`.
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
        """Seal a partition: it accepts no new samples; columns for existing samples are still accepted.

        Args:
            partition_id: the partition.
            incarnation: expected incarnation of the partition; empty: any.
            timeout: seconds until the call fails; None: the client's.

        Returns:
            The number of samples ever inserted.

        Raises:
            PartitionNotFoundError: the partition does not exist.
            StaleIncarnationError: it was cleared and created again.
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
        """Remove a partition with all its contents; its name can be reused. Calls that wait for it end.

        Args:
            partition_id: the partition.
            incarnation: expected incarnation of the partition; empty: any.
            missing_ok: return 0 instead of raising either of the errors below.
            timeout: seconds until the call fails; None: the client's.

        Returns:
            The number of samples removed.

        Raises:
            PartitionNotFoundError: the partition does not exist.
            StaleIncarnationError: it was cleared and created again.
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
        """Declare that these groups get no further members: they are complete once their rollouts are closed.

        Raises:
            PartitionNotFoundError: the partition does not exist.
            NotFoundError: one of the groups does not exist in the partition.
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
        """Declare that these rollouts get no further samples: they are complete as they are.

        Raises:
            PartitionNotFoundError: the partition does not exist.
            NotFoundError: one of the rollouts does not exist in the partition.
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

        Large results are read page by page: partitions created or cleared during the call may be included or not.
        `watch` can start from the `revision` of the list.
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
        """Return the samples by state, fields and tasks of a partition.

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
        """Convert the names of partitions and policies to names in the client's namespace."""
        for each in described:
            each.summary.partition_id = self._namespace.own_name(each.summary.partition_id)
            for admission in each.admissions:
                admission.policy = self._namespace.own_name(admission.policy)

    async def status(self, prefix: str = "", *, explain: bool = True, timeout: float | None = None) -> ServiceStatus:
        """Return the state of the service: storage services, partitions, and waiting claims with their reasons.

        Large results are read page by page: partitions created or cleared during the call may be included or not.

        Args:
            prefix: prefix of partition names, including partitions that are waited for but do not exist.
            explain: whether to include the reasons of waits; the service scans the samples of each partition that is
                waited for.
            timeout: seconds until the call fails; None: the client's.
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
        """Return the samplers available to `get_meta`, with their options."""
        answer = await self._ask(pb.ListSamplersResponse, timeout)
        return [read_message(SamplerDescription, one) for one in answer.samplers]

    async def checkpoint(
        self, name: str, *, metadata: Mapping[str, Any] | None = None, timeout: float | None = None
    ) -> CheckpointCopy:
        """Write a consistent copy of everything to the controller's disk, while the service keeps running.

        The name always refers to a complete checkpoint: the new one, or the one before it. A client with a namespace
        copies only the partitions in it, under their names in the namespace.

        Args:
            name: a path below the `checkpoint_dir` of the service, such as "nightly/2026-11-21"; parts consist of
                letters, digits and "._=@+-" and begin with a letter or digit; at most 200 characters in all.
            metadata: returned by `restore` and `list_checkpoints` with the checkpoint, such as the step of a trainer: a
                mapping of strings to JSON values, at most 256 KiB; tuples come back as lists.
            timeout: seconds until the call fails and the copy is cancelled; None: an hour.

        Raises:
            InvalidArgumentError: the name is invalid or cannot be written to, or the metadata is not JSON.
            PreconditionError: another checkpoint is being written or restored, or the service has no `checkpoint_dir`.
            DiskFullError: the disk is full.
            DataLossError: bytes to copy are lost; it names their samples.
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
        """Restore a checkpoint, into a service without partitions or in place of all its partitions.

        The entire checkpoint is read and checked first. Its bytes go to the current storage services, and all its
        partitions appear in one step, with their claims: trainers continue from there. A client with a namespace
        restores into it, whichever namespace the checkpoint was written from, and leaves partitions of other namespaces
        unchanged.

        Args:
            name: the name given to `checkpoint`.
            replace: whether to replace all existing partitions in the same step: a crash leaves either the old or the
                restored state. Calls waiting on old partitions end with PartitionClearedError, and their BatchMetas are
                stale (StaleIncarnationError), also if the partition is in the checkpoint. The storage services need
                capacity for both.
            timeout: seconds until the call fails and nothing is restored; None: an hour.

        Raises:
            PreconditionError: partitions exist and `replace` is False, or another checkpoint is being written or
                restored, or the service has no `checkpoint_dir`.
            InvalidArgumentError: the checkpoint does not exist.
            SnapshotDamagedError: it is damaged.
            QuotaExceededError: the storage services lack capacity for its bytes.
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
        """Return sizes and counts of the storage service at an address; None: at the client's address."""
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
        """Return whether the service reports that it is serving. No retries: a service that is down raises at once.

        Raises:
            UnavailableError: nothing answers at the address.
        """
        request = HealthCheckRequest()
        answer = await self._calls.unary_once(HealthCheckResponse, request, self._deadline(timeout), is_retried=False)
        return bool(answer.status == HealthCheckResponse.SERVING)
