"""Writes, lists and restores checkpoints while the service continues to handle other calls."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from typing import Any, Final, TypeVar

from tq_service.dataplane.driver import Seconds
from tq_service.durable.checkpoint import (
    Block,
    Checkpoint,
    CheckpointWriter,
    PartitionPlan,
    checkpoint_names,
    checkpoint_path,
    read_checkpoint,
    read_facts,
    relocate,
)
from tq_service.durable.snapshot import CheckpointFacts, ServiceSnapshot, StoredBlock
from tq_service.durable.state_store import StateStore
from tq_service.errors import DataLossError, FieldNotFoundError, PreconditionError, PutNotFoundError, TqError
from tq_service.log_message import LogMessage
from tq_service.machine.state_machine import Entry, merged
from tq_service.schema import check_name
from tq_service.server.storages import StorageRegistry
from tq_service.serving.catalog import Catalog
from tq_service.serving.lookup import find_names, name_token
from tq_service.state.cells import Put
from tq_service.state.ledger import Claim
from tq_service.state.partition import Partition, PartitionSnapshot
from tq_service.v1 import controller_service_pb2 as pb
from tq_service.v1.storage_service_pb2 import GetRequest
from tq_service.wire.columns import Column, put_header
from tq_service.wire.messages import to_duration, to_message
from tq_service.wire.objects import check_json_object

_log = logging.getLogger(__name__)
Answer = TypeVar("Answer")
_MOST_NAMED: Final = 5
_MOST_METADATA_BYTES: Final = 1 << 20  # per page
_BLOCK_SECONDS: Final = 120.0
# An empty service has no samples to release, so a put that does not fit immediately will never fit.
_CAPACITY_SECONDS: Final = 5.0
_BYTES_A_SECOND: Final = 10e6
_WATCH_SECONDS: Final = 0.002


class Checkpoints:
    """Writes and restores a controller's checkpoints. Only one checkpoint can be written or restored at a time.

    Args:
        catalog: the controller's partitions.
        storages: storage services that store the samples' bytes.
        store: store that persists the state, or None if the state is kept in memory.
        checkpoint_dir: parent directory of all checkpoints, or None if checkpoints are off.
    """

    def __init__(
        self,
        *,
        catalog: Catalog,
        storages: StorageRegistry,
        store: StateStore | None,
        checkpoint_dir: Path | None,
    ) -> None:
        self._catalog = catalog
        self._storages = storages
        self._store = store
        self._checkpoint_dir = checkpoint_dir
        self._running: str | None = None

    # Writing

    async def write(self, name: str, metadata: str = "", prefix: str = "") -> pb.CheckpointResponse:
        """Write a checkpoint of the current state and the caller's `metadata`, which must be a JSON object.

        The checkpoint contains all partitions whose names begin with `prefix`. The names are stored without the prefix.

        Raises:
            InvalidArgumentError: the name is invalid, its directory is unusable, or the metadata is not a JSON object.
            PreconditionError: another checkpoint is being written or restored, or checkpoint_dir is not set.
            DiskFullError: the disk is full.
            DataLossError: the bytes of some samples have been lost.
            UnavailableError: a storage service could not be reached.
        """
        await _in_thread(check_json_object, "metadata", metadata)
        path = await _in_thread(checkpoint_path, self._checkpoint_dir, name)
        with self._alone("written"):
            async with _pauses() as pauses:
                answer = await self._copy(path, metadata or "{}", prefix)
        _log.info(LogMessage("wrote a checkpoint", name=name, path=path))
        answer.name = name
        answer.pause.CopyFrom(to_duration(max(pauses)))
        return answer

    async def _copy(self, path: Path, metadata: str, prefix: str) -> pb.CheckpointResponse:
        """Write the bytes of all current samples, then write the state. Return a summary."""
        with self._storages.puts.holding_frees():
            # There is no `await` between the line above and the snapshot, so no put in the snapshot is freed.
            partitions, answers = self._catalog.snapshot(), self._catalog.answers.snapshot()
            policies = [
                replace(policy, name=policy.name.removeprefix(prefix))
                for policy in self._catalog.policies.values()
                if policy.name.startswith(prefix)
            ]
            if prefix:  # recorded responses are for retries, which use full partition names
                partitions, answers = _renamed(partitions, lambda name: name.removeprefix(prefix), prefix), iter(())
            copied: list[PartitionSnapshot] = []
            facts = CheckpointFacts(
                written_at=time.time(),
                partition_count=len(partitions),
                sample_count=_sample_count(partitions),
                metadata=metadata,
            )
            answer = pb.CheckpointResponse(partition_count=facts.partition_count, sample_count=facts.sample_count)
            async with contextlib.AsyncExitStack() as ending:
                writer = CheckpointWriter(path)
                ending.push_async_callback(_in_thread, writer.abort)
                await _in_thread(writer.begin, facts)
                for partition in partitions:
                    plan = await _in_thread(PartitionPlan, partition)
                    for block in plan.blocks:
                        await self._copy_block(writer, block)
                        answer.value_bytes += block.value_bytes
                    copied.append(plan.partition())
                    answer.put_count += len(plan.blocks)
                await _in_thread(writer.finish, ServiceSnapshot(partitions=copied, policies=policies, answers=answers))
        return answer

    async def _copy_block(self, writer: CheckpointWriter, block: Block) -> None:
        storage_id, boot_id, _ = block.puts[0]
        try:
            driver = self._storages.driver(storage_id, boot_id)
            put_ids = [put.put_id for put in block.puts]
            request = GetRequest(boot_id=boot_id, put_ids=put_ids, runs=[block.runs.to_proto()])
            received = await driver.get(request, block.runs.row_count, Seconds(_BLOCK_SECONDS))
        except (DataLossError, PutNotFoundError, FieldNotFoundError) as error:
            raise _lost(block, error) from error
        await _in_thread(writer.add, block, [(column, values.data) for column, values in received])

    # Listing

    async def page(self, *, prefix: str, size: int, token: str) -> pb.ListCheckpointsResponse:
        """Return a page of checkpoints whose names begin with a prefix. For `size` and `token`, see `find_names`.

        Raises:
            PreconditionError: checkpoint_dir is not set.
            InvalidArgumentError: the size or the token is invalid.
        """
        return await _in_thread(self._read_page, prefix, size, token)

    def _read_page(self, prefix: str, size: int, token: str) -> pb.ListCheckpointsResponse:
        names = [name for name in checkpoint_names(self._checkpoint_dir) if name.startswith(prefix)]
        of = f"checkpoints/{prefix}"
        names, next_token = find_names(names, of=of, size=size, token=token)
        answer = pb.ListCheckpointsResponse(next_page_token=next_token)
        metadata_bytes = 0
        for name in names:
            if metadata_bytes > _MOST_METADATA_BYTES:
                answer.next_page_token = name_token(of, name)
                break
            summary = self._summary(name)
            if summary is not None:
                metadata_bytes += len(summary.metadata)
                answer.checkpoints.append(summary)
        return answer

    def _summary(self, name: str) -> pb.CheckpointSummary | None:
        """Read the summary of a checkpoint. Return None if the checkpoint no longer exists."""
        path, file_bytes = checkpoint_path(self._checkpoint_dir, name), 0
        try:
            file_bytes = path.stat().st_size
            facts = read_facts(path)
        except FileNotFoundError:
            return None
        except (OSError, TqError) as error:
            return pb.CheckpointSummary(name=name, file_bytes=file_bytes, problem=str(error))
        return to_message(pb.CheckpointSummary, facts, name=name, file_bytes=file_bytes, problem="")

    # Restoring

    async def restore(
        self, request_id: bytes, name: str, *, replace: bool = False, prefix: str = ""
    ) -> pb.RestoreResponse:
        """Restore a checkpoint, adding a prefix to its partition names. Each request_id is handled only once.

        If `replace` is set, the checkpoint replaces all partitions whose names begin with the prefix. The replaced
        partitions remain usable until the checkpoint's bytes have been stored. The replaced partitions are removed
        atomically when the new state becomes visible. No partition can be changed while the new state is being
        persisted.

        Raises:
            InvalidArgumentError: the checkpoint does not exist, or the request_id belongs to another call.
            SnapshotDamagedError: the checkpoint is damaged.
            NewerVersionError: a newer version of the service wrote the checkpoint.
            PreconditionError: partitions with the prefix exist and `replace` is not set, another checkpoint is being
                written or restored, or checkpoint_dir is not set.
            QuotaExceededError: the storage services lack the capacity for the checkpoint's bytes.
            UnavailableError: a storage service could not be reached.
        """
        recorded: pb.RestoreResponse | None = self._catalog.recorded(request_id, pb.RestoreResponse)
        if recorded is not None:
            return recorded
        path = await _in_thread(checkpoint_path, self._checkpoint_dir, name)
        with self._alone("restored"), contextlib.nullcontext() if replace else self._catalog.closed(prefix):
            checkpoint = await _in_thread(read_checkpoint, path)
            answer = pb.RestoreResponse(
                partition_count=len(checkpoint.state.partitions),
                sample_count=_sample_count(checkpoint.state.partitions),
                put_count=len(checkpoint.blocks),
                value_bytes=sum(block.size_bytes for block in checkpoint.blocks),
                metadata=checkpoint.facts.metadata,
            )
            # Refuse state written by a newer version before any put is placed.
            named = _renamed(checkpoint.state.partitions, lambda name: prefix + name)
            partitions: list[Partition] = await _in_thread(list, map(Partition.restore, named))
            puts: list[Put] = []
            try:
                for block in checkpoint.blocks:
                    puts.append(await self._place(checkpoint, block, prefix))  # noqa: PERF401  (needed if a later put fails)
                await _in_thread(relocate, partitions, puts)

                await _to_the_end(self._appear(checkpoint, partitions, puts, request_id, answer, prefix=prefix))
            except BaseException:
                self._storages.puts.free_now([put for put in puts if not self._storages.puts.is_committed(put)])
                raise
        return answer

    async def _appear(
        self,
        checkpoint: Checkpoint,
        partitions: Sequence[Partition],
        puts: Sequence[Put],
        request_id: bytes,
        answer: pb.RestoreResponse,
        *,
        prefix: str,
    ) -> None:
        """Persist the restored state. Then atomically replace all partitions whose names begin with the prefix."""
        catalog, answers = self._catalog, checkpoint.state.answers

        policies = [replace(policy, name=prefix + policy.name) for policy in checkpoint.state.policies]

        def restored(now: ServiceSnapshot) -> ServiceSnapshot:
            catalog.prepare_replacement(partitions)
            others = [each for each in now.partitions if not each.facts.partition_id.startswith(prefix)]
            return replace(
                now,
                partitions=[*others, *(partition.snapshot() for partition in partitions)],
                policies=[*(policy for policy in now.policies if not policy.name.startswith(prefix)), *policies],
                answers=merged(answers, now.answers, own),
            )

        def appear() -> None:
            self._storages.puts.mark_committed(puts)
            catalog.replace(partitions, prefix, policies)
            catalog.end_replacement()
            catalog.start_leases()
            catalog.answers.restore(answers)
            catalog.run_once(request_id, lambda: answer, pb.RestoreResponse)

        own = [Entry(request_id, catalog.machine.now_seconds(), catalog.answers.pack(answer))]
        try:
            if self._store is None:
                catalog.prepare_replacement(partitions)
                appear()
            else:
                await self._store.snapshot_restored(restored, appear)
        finally:
            catalog.end_replacement()

    async def _place(self, checkpoint: Checkpoint, block: StoredBlock, prefix: str) -> Put:
        put_id = os.urandom(16)
        place = self._storages.place(block.size_bytes, put_id).storages[0]
        driver = self._storages.driver(place.storage_id, place.boot_id)
        put = Put(place.storage_id, place.boot_id, put_id)
        columns = await _in_thread(_columns, checkpoint, block)
        header = put_header(put.put_id, columns, partition_id=prefix + block.partition_id)
        header.controller_id = self._storages.controller_id
        with self._storages.puts.placing(put):
            await driver.put(header, columns, Seconds(_CAPACITY_SECONDS + header.size_bytes / _BYTES_A_SECOND))
            self._storages.require(put)
        return put

    @contextlib.contextmanager
    def _alone(self, what: str) -> Iterator[None]:
        if self._running is not None:
            raise PreconditionError(f"another checkpoint is being {self._running}. Retry after it has finished")
        self._running = what
        try:
            yield
        finally:
            self._running = None


@contextlib.asynccontextmanager
async def _pauses() -> AsyncIterator[list[float]]:
    """Yield a list whose only element is the longest time, in seconds, for which the event loop was blocked."""
    late = [0.0]

    async def watch() -> None:
        while True:
            began_at = time.perf_counter()
            await asyncio.sleep(_WATCH_SECONDS)
            late.append(time.perf_counter() - began_at - _WATCH_SECONDS)
            late[:] = [max(late)]

    task = asyncio.get_running_loop().create_task(watch())
    await asyncio.sleep(0)  # start the task before the body of the `async with` block
    try:
        yield late
    finally:
        task.cancel()


async def _in_thread(work: Callable[..., Answer], *arguments: Any) -> Answer:
    """Run a function in a thread and return its result."""
    return await _to_the_end(asyncio.to_thread(work, *arguments))


async def _to_the_end(work: Coroutine[Any, Any, Answer]) -> Answer:
    """Run a coroutine to completion and return its result. If cancelled, still wait for the coroutine to end."""
    task = asyncio.get_running_loop().create_task(work)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait([task])
        raise


def _columns(checkpoint: Checkpoint, block: StoredBlock) -> list[Column]:
    """Return the columns of a block with their bytes. A block contains a few MiB of rows or a single larger row."""
    values = memoryview(b"".join(checkpoint.values(block)))
    ends = list(accumulate(column.value_bytes for column in block.columns))
    return [
        Column(
            spec=column.spec,
            row_count=column.row_count,
            extents=column.extents,
            value_bytes=column.value_bytes,
            chunks=(values[end - column.value_bytes : end],),
        )
        for column, end in zip(block.columns, ends, strict=True)
    ]


def _renamed(
    partitions: Sequence[PartitionSnapshot], rename: Callable[[str], str], prefix: str = ""
) -> list[PartitionSnapshot]:
    """Rename the partitions whose names begin with a prefix, as well as the names in their admissions and leases.

    Raises:
        InvalidArgumentError: a new name is too long.
    """
    renamed = []
    for each in partitions:
        facts, settings = each.facts, each.facts.settings
        if facts.partition_id.startswith(prefix):
            admissions = tuple(replace(admission, policy=rename(admission.policy)) for admission in settings.admissions)
            settings = replace(settings, admissions=admissions)
            facts = replace(facts, partition_id=rename(facts.partition_id), settings=settings)
            tasks = [replace(task, claims=[_of_renamed(claim, rename) for claim in task.claims]) for task in each.tasks]
            renamed.append(replace(each, facts=facts, tasks=tasks))
    for each in renamed:
        check_name("prefix", each.facts.partition_id)
    return renamed


def _of_renamed(claim: Claim, rename: Callable[[str], str]) -> Claim:
    """Rename the partition, if any, that shares the claim's lease, and return the resulting claim."""
    if claim.lease is None or not claim.lease.shared_with:
        return claim
    return replace(claim, lease=replace(claim.lease, shared_with=rename(claim.lease.shared_with)))


def _sample_count(partitions: Sequence[PartitionSnapshot]) -> int:
    return sum(each.facts.sample_count for each in partitions)


def _lost(block: Block, error: Exception) -> DataLossError:
    indexes = block.global_indexes[block.global_indexes >= 0]
    names = ", ".join(map(str, indexes[:_MOST_NAMED].tolist()))
    more = f" and {indexes.size - _MOST_NAMED} more" if indexes.size > _MOST_NAMED else ""
    what = "the groups of samples" if block.is_shared else "samples"
    return DataLossError(
        f"{what} {names}{more} of partition {block.partition_id!r} cannot be copied: {error}; clear them, or put "
        f"their fields {', '.join(map(repr, block.runs.field_names))} again",
        metadata={"partition_id": block.partition_id, "storage_id": block.puts[0].storage_id},
    )
