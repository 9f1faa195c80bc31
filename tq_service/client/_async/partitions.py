"""Calls about partitions, about checkpoints of all of them, and about the services."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict
from typing import Any, Final

from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse

from tq_service.addresses import parse_address
from tq_service.client._async.calls import AsyncBase
from tq_service.client.requests import all_of, listed, request_of
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
from tq_service.schema import Admission, FieldSpec, Layout
from tq_service.v1 import controller_service_pb2 as pb
from tq_service.v1.storage_service_pb2 import StatRequest, StatResponse
from tq_service.wire.messages import read_message
from tq_service.wire.metadata import encode_spec
from tq_service.wire.objects import decode_json_object, encode_json_object

# How long a checkpoint may take to be written or restored where the caller does not say.
_CHECKPOINT_SECONDS: Final = 3600.0


class AsyncPartitionCalls(AsyncBase):
    """The part of the client about partitions and services. See `AsyncClient`."""

    async def create_partition(
        self,
        partition_id: str,
        *,
        expected_samples: int | None = None,
        default_layout: Layout | str = Layout.AUTO,
        fields: Iterable[FieldSpec] = (),
        max_bytes: int | None = None,
        admissions: Iterable[Admission] = (),
        tasks: Iterable[str] = (),
        samples_per_round: int | None = None,
        timeout: float | None = None,
    ) -> bytes:
        """Make a partition, or confirm that it is there as asked. Optional: its first samples make it too.

        Args:
            partition_id: its name.
            expected_samples: number of samples that will be inserted: reaching it seals the partition. None: sealed
                by `seal_partition`.
            default_layout: of tensor fields without a declared layout. "auto": dense until a row differs in shape from
                the others, jagged from then on. "dense": rows that differ are refused. "jagged": jagged also while all
                rows are alike; scalars are dense.
            fields: fields known beforehand; dtype, layout and row shape may be left to the first put.
            max_bytes: most bytes that its samples may take; puts of new samples wait for capacity. None: only the quota
                of the service.
            admissions: how much work may be outstanding for its tasks; puts of new samples wait for their turn. Empty:
                as far as there is capacity.
            tasks: names of all tasks that may consume it: each has consumed 0 before it ever asks, and another name
                raises TaskNotFoundError. Empty: any name is a task.
            samples_per_round: number of samples of a round, where the partition is used again and again: without a
                seal, `check_consumption` is complete once the rounds that have begun are whole and consumed, and
                `check_production` once they are whole and produced. None: that takes a seal.
            timeout: seconds until the call fails; None: the client's.

        Returns:
            The incarnation of the partition (16 bytes).

        Raises:
            AlreadyExistsError: it is there with other settings.
        """
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
                for each in all_of(Admission, "admissions", admissions)
            ],
            tasks=listed("tasks", tasks),
            samples_per_round=samples_per_round,
        )
        return answer.incarnation

    async def seal_partition(self, partition_id: str, *, incarnation: bytes = b"", timeout: float | None = None) -> int:
        """Say that no new samples will come; columns for existing ones still may.

        Args:
            partition_id: the partition.
            incarnation: that of the partition; empty: whichever.
            timeout: seconds until the call fails; None: the client's.

        Returns:
            The number of samples ever inserted.

        Raises:
            PartitionNotFoundError: there is no such partition.
            StaleIncarnationError: it was created again.
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
        """Remove a partition with all it holds; its name may be used again. Calls that wait on it end.

        Args:
            partition_id: the partition.
            incarnation: that of the partition; empty: whichever.
            missing_ok: return 0 instead of raising either of the errors below.
            timeout: seconds until the call fails; None: the client's.

        Returns:
            The number of samples removed.

        Raises:
            PartitionNotFoundError: there is no such partition.
            StaleIncarnationError: it was created again.
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
        """Say that no further members of these groups will come: they are complete as they are.

        Raises:
            PartitionNotFoundError: there is no such partition.
            NotFoundError: the partition has no such group.
        """
        await self._ask(
            pb.CloseGroupsResponse,
            timeout,
            partition_id=partition_id,
            incarnation=incarnation,
            groups=groups,
        )

    async def list_partitions(self, prefix: str = "", *, timeout: float | None = None) -> PartitionList:
        """Return the partitions whose names begin with `prefix`, in the order of their names.

        Many of them come page by page: one that is made or cleared meanwhile may be among them or not. `watch` goes on
        from the `revision` of the list.
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
        """Return samples by state, fields and tasks of a partition.

        Raises:
            PartitionNotFoundError: there is no such partition.
        """
        answer = await self._ask(
            pb.DescribePartitionResponse,
            timeout,
            partition_id=partition_id,
        )
        self._name_as_own([answer])
        return read_message(PartitionDescription, answer)

    def _name_as_own(self, described: Iterable[pb.DescribePartitionResponse]) -> None:
        """Give partitions and policies their names in the client's namespace."""
        for each in described:
            each.summary.partition_id = self._namespace.own_name(each.summary.partition_id)
            for admission in each.admissions:
                admission.policy = self._namespace.own_name(admission.policy)

    async def status(self, prefix: str = "", *, explain: bool = True, timeout: float | None = None) -> ServiceStatus:
        """Return what the service is, its storage services, its partitions, and what is waited for, and why.

        Many partitions come page by page: one that is made or cleared meanwhile may be among them or not.

        Args:
            prefix: how the names of partitions begin, those included that do not exist and are waited for.
            explain: whether waits come with their reasons, which takes the service a pass over the samples of each
                partition that is waited for.
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
        """Return the samplers that `get_meta` takes, with their options."""
        answer = await self._ask(pb.ListSamplersResponse, timeout)
        return [read_message(SamplerDescription, one) for one in answer.samplers]

    async def checkpoint(
        self, name: str, *, metadata: Mapping[str, Any] | None = None, timeout: float | None = None
    ) -> CheckpointCopy:
        """Write a consistent copy of everything to the controller's disk, while all else goes on.

        The name has the new checkpoint whole, or the one before it. A client with a namespace copies the partitions of
        that, under the names that it has for them.

        Args:
            name: a place below the `checkpoint_dir` of the service, such as "nightly/2026-11-21"; parts of letters,
                digits and "._=@+-" that begin with a letter or digit, at most 200 characters in all.
            metadata: what `restore` and `list_checkpoints` are to answer with it, such as the step of a trainer: a
                mapping of strings to what JSON has, at most 256 KiB; tuples come back as lists.
            timeout: seconds until the call fails and the copy is cancelled; None: an hour.

        Raises:
            InvalidArgumentError: the name is none, or cannot be written to; or the metadata is not JSON.
            PreconditionError: another checkpoint is being written or restored, or the service has no `checkpoint_dir`.
            DiskFullError: the disk has no space.
            DataLossError: bytes that are to be copied are lost; it names their samples.
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
        """Return the checkpoints whose names begin with `prefix`, in the order of their names, with their metadata.

        Raises:
            PreconditionError: the service has no `checkpoint_dir`.
        """
        answer = await self._ask(pb.ListCheckpointsResponse, timeout, prefix=prefix)
        return [
            read_message(CheckpointSummary, one, metadata=decode_json_object(one.metadata))
            for one in answer.checkpoints
        ]

    async def restore(self, name: str, *, replace: bool = False, timeout: float | None = None) -> RestoredCheckpoint:
        """Bring back what a checkpoint holds: into a service that has no partitions, or in place of all it has.

        It is read and checked whole before anything is done. Its bytes go to the storage services there are now, and
        all its partitions appear in one step, with their claims: trainers go on where they were. A client with a
        namespace puts them there, whichever they were written in, and no partition of another one is touched.

        Args:
            name: the name that it was written under.
            replace: whether it takes the place of all partitions there are, in that step: a crash leaves what was there
                or what was restored. Calls that wait on what was there end with PartitionClearedError, and its
                BatchMetas are stale (StaleIncarnationError), also those of partitions that come back. The storage
                services need capacity for both.
            timeout: seconds until the call fails and nothing is restored; None: an hour.

        Raises:
            PreconditionError: there are partitions and `replace` is False, or another checkpoint is being written or
                restored, or the service has no `checkpoint_dir`.
            InvalidArgumentError: there is no checkpoint.
            SnapshotDamagedError: it is damaged.
            QuotaExceededError: the storage services have no capacity for its bytes.
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
        """Return sizes and counts of the storage service at an address; None: the client's own."""
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
        """Return whether the service answers that it is serving. One try: a service that is down raises at once.

        Raises:
            UnavailableError: nothing answers at the address.
        """
        request = HealthCheckRequest()
        answer = await self._calls.unary_once(HealthCheckResponse, request, self._deadline(timeout), is_retried=False)
        return bool(answer.status == HealthCheckResponse.SERVING)
