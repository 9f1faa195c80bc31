"""Getting data: located, read from the storage services at the same time, put back in order."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, Literal, get_args

from tq_service.client._async.calls import AsyncBase
from tq_service.client.batch_meta import BatchMeta, StorageRef, in_parts, joined
from tq_service.client.landing import Landing
from tq_service.client.reads import (
    StorageRead,
    each_once,
    empty_columns,
    lost_samples,
    merge_answers,
    plan_reads,
    take_rows,
    to_batch,
    unread_samples,
)
from tq_service.client.requests import check_word, listed, named_samples, partition_of, request_of
from tq_service.client.transport import HEAVY, Deadline, answer_weight, async_gather, async_unless_light
from tq_service.client_probes import probes
from tq_service.dataplane.receiving import Received
from tq_service.errors import (
    DataLossError,
    DeadlineError,
    FieldNotFoundError,
    InternalError,
    InvalidArgumentError,
    PutNotFoundError,
    UnavailableError,
    nearest,
)
from tq_service.schema import FieldSpec, ReadLayout
from tq_service.v1 import controller_service_pb2 as pb
from tq_service.wire.metadata import Indexes


class AsyncFetchCalls(AsyncBase):
    """The part of the client that gets data. See `AsyncClient`."""

    async def get_data(
        self,
        metadata: BatchMeta | None = None,
        *,
        partition_id: str | None = None,
        keys: Iterable[str] | None = None,
        global_indexes: Iterable[int] | None = None,
        data_fields: Sequence[str] | None = None,
        missing: Literal["error", "skip"] = "error",
        missing_fields: Literal["error", "skip"] = "error",
        layout: ReadLayout | None = None,
        device: Any = None,
        out: Any = None,
        timeout: float | None = None,
    ) -> Any:
        """Get the data of samples, in their order; one that is named several times is fetched once.

        Args:
            metadata: the samples; an empty batch gives empty columns without a call.
            partition_id: or the partition,
            keys: with keys of samples,
            global_indexes: or their indexes.
            data_fields: the fields; None: those of `metadata`, or all of the partition.
            missing: "error", or "skip" to leave out samples that are unknown or lack one of the fields.
            missing_fields: "error", or "skip" to leave out fields that are unknown or that one of the samples lacks, so
                that None for `data_fields` gets the fields that all of the samples have. No sample is left out for a
                field, then.
            layout: of fields of tensors with rows of one or more dimensions. None: as the field is, whatever rows these
                are: of a dense field dense tensors, of one that was put or declared jagged, or of which rows of any put
                differ in shape, nested ones. Else as these rows are: "auto": dense where all of them are alike, else
                jagged; "dense": dense, an error where they differ; "jagged": nested tensors, also where all are alike.
            device: a CUDA device, such as "cuda:0", where the tensors are to be; objects stay on the CPU. The bytes are
                received in pinned memory and copied up at once, on a stream that the caller's current stream waits for;
                this call does not. None, "cpu": the CPU.
            out: by field, contiguous tensors of the dtype and shape `(n, ...)` of dense fields, on the CPU or a device,
                that are filled and returned in the place of new ones. Those of a call that failed while it received may
                have been written to.
            timeout: seconds until the call fails; None: the client's.

        Returns:
            A TensorDict of batch size `[n]`; a dict of numpy arrays where torch is not installed. Jagged fields are
            nested tensors, ragged in the dimension in which rows differ; lists of tensors where they differ in several.
            Objects are lists.

        Raises:
            PartitionNotFoundError, FieldNotFoundError, KeyNotFoundError, SampleNotFoundError: nothing has this name.
            CellNotFoundError: a sample lacks one of the fields; `missing` or `missing_fields` may leave it out.
            FieldMismatchError: rows differ in shape that are to be dense, or a tensor of `out` has another dtype or
                shape than its field; it is not changed.
            InvalidArgumentError: the device does not exist, or `out` cannot be filled.
            torch.OutOfMemoryError: the device is full; the received data is freed.
            StaleIncarnationError: the partition of `metadata` was created again.
            DataLossError: the storage service that held them came back empty; names the samples.
            UnavailableError: the controller, or the storage service that holds them, did not answer until the timeout.
        """
        began_at = time.perf_counter()
        deadline = self._deadline(timeout)
        fields = None if data_fields is None else listed("data_fields", data_fields)
        check_word("missing", missing, ("error", "skip"))
        check_word("missing_fields", missing_fields, ("error", "skip"))
        check_word("layout", layout, (None, *get_args(ReadLayout)))
        landing = None if device is None and out is None else Landing.of(device, out)
        name, named = named_samples(metadata=metadata, keys=keys, global_indexes=global_indexes)
        if name is None:
            raise InvalidArgumentError(
                "samples are named by nothing; give one of metadata, keys or global_indexes", field="metadata"
            )
        wanted = fields if fields is not None else metadata.data_fields if metadata is not None else []
        partition = partition_of(self._namespace, partition_id, metadata)
        if not len(named):
            # The partition is asked only for fields that the batch does not describe.
            specs = {} if metadata is None else {spec.name: spec for spec in metadata.fields}
            if not specs or not specs.keys() >= set(wanted):
                specs = await self._fields_of(partition, deadline) | specs
            unknown = [name for name in wanted if name not in specs]
            if unknown and missing_fields == "error":
                raise self._namespace.explain(
                    FieldNotFoundError(
                        f"partition {partition!r} has no field {unknown[0]!r}; {nearest(unknown[0], specs)}",
                        metadata={"partition_id": partition, "field_name": unknown[0]},
                    )
                )
            return self._empty([specs[name] for name in wanted or specs if name in specs], 0, layout, landing)
        locate = partial(
            self._locate,
            deadline,
            name,
            named,
            partition_id=partition,
            incarnation=b"" if metadata is None else metadata.incarnation,
            data_fields=wanted,
            skip_missing=missing == "skip",
            skip_missing_fields=missing_fields == "skip",
        )
        is_located = metadata is not None and missing == "error" and wanted and metadata.locations.covers(wanted)
        located = metadata if metadata is not None and is_located else await locate()
        stale: BatchMeta | None = None
        while True:
            try:
                fetched = await self._fetch(located, fields, missing_fields, deadline, layout=layout, landing=landing)
                for probe in probes:
                    probe.fetched(time.perf_counter() - began_at)
                return fetched
            except (PutNotFoundError, DataLossError):
                # Overwritten since it was located: the cells are elsewhere now. Where they are not, they are lost.
                if stale is not None and stale.locations.puts == located.locations.puts:
                    raise
                stale, located = located, await locate()

    async def _locate(
        self, deadline: Deadline, name: str, named: Sequence[Any] | Indexes, **arguments: Any
    ) -> BatchMeta:
        """Ask where samples are; `name` is how they are named: by keys, or by global_indexes."""
        parts: list[BatchMeta] = []
        for some in in_parts(named):
            request = request_of(pb.LocateRequest, **{name: some}, **arguments)
            answer = await self._calls.unary(pb.LocateResponse, request, deadline)
            parts.append(BatchMeta.from_proto(answer.meta, self._namespace))
        return joined(parts)

    async def _fetch(
        self,
        located: BatchMeta,
        fields: Sequence[str] | None,
        missing_fields: str,
        deadline: Deadline,
        *,
        layout: ReadLayout | None,
        landing: Landing | None,
    ) -> Any:
        specs = {spec.name: spec for spec in located.fields}
        wanted = list(specs) if fields is None else list(fields)
        if missing_fields == "skip":
            wanted = [name for name in wanted if name in specs]
        known = [specs[name] for name in wanted if name in specs]
        if not located.size or not wanted:
            return self._empty(known, located.size, layout, landing)
        if landing is not None:
            landing.check(known, located.size, layout)

        def plan() -> tuple[BatchMeta, Indexes | None, Sequence[StorageRead]]:
            distinct, order = each_once(located)
            if not distinct.locations.covers(wanted):
                raise InternalError(f"the controller did not say where the fields {', '.join(wanted)} are")
            return distinct, order, plan_reads(distinct.locations, wanted)

        distinct, order, reads = await async_unless_light(plan, range(located.size * len(wanted)))
        answers = await async_gather(
            [partial(self._read, distinct, read, read.size_bytes(specs), landing, deadline) for read in reads]
        )
        value_bytes = sum(column.value_bytes for answer in answers for column, _ in answer)
        for probe in probes:
            probe.received(value_bytes)

        def decode() -> Any:
            received = merge_answers(reads, answers, wanted, specs, distinct.locations)
            if order is not None:
                received = [take_rows(column, order) for column in received]
            return to_batch(received, located.size, layout, landing)

        weight = answer_weight(located.size * len(wanted), value_bytes) if landing is None else HEAVY
        return await async_unless_light(decode, weight)

    def _empty(
        self, specs: Sequence[FieldSpec], row_count: int, layout: ReadLayout | None, landing: Landing | None
    ) -> Any:
        if landing is not None:
            landing.check(specs, row_count, layout)
        return to_batch(empty_columns(specs), row_count, layout, landing)

    async def _read(
        self,
        located: BatchMeta,
        read: StorageRead,
        size_bytes: int | None,
        landing: Landing | None,
        deadline: Deadline,
    ) -> list[Received]:
        """Read from one storage service; while it does not answer, ask the controller where it is now."""
        storage, loss_count = read.storage, 0

        async def attempt() -> list[Received]:
            nonlocal storage, loss_count
            try:
                if storage.is_away:
                    raise UnavailableError("it has not announced itself since the controller started")
                driver = self._calls.endpoint(storage.address).driver
                return await driver.get(read.request, read.positions.size, deadline, size_bytes, landing)
            except DataLossError as error:
                # Another storage service may have taken the puts over, or be about to.
                now = await self._find_storage(located, read, deadline)
                if now == storage and loss_count:
                    raise
                storage, loss_count = now, loss_count + 1 if now == storage else 0
                raise UnavailableError(error.message, metadata=error.metadata) from error
            except UnavailableError:
                with suppress(DeadlineError, UnavailableError):  # that of the storage service says more
                    storage = await self._find_storage(located, read, deadline)
                raise

        try:
            return await self._calls.retried(attempt, deadline)
        except DataLossError as error:
            raise lost_samples(located, read, error) from None
        except (DeadlineError, UnavailableError) as error:
            raise unread_samples(located, read, storage, deadline, error) from error

    async def _find_storage(self, located: BatchMeta, read: StorageRead, deadline: Deadline) -> StorageRef:
        """Ask where a storage service is that does not answer: it may have come back at another address."""
        now = await self._locate(
            deadline,
            "global_indexes",
            located.indexes[read.samples[:1]],
            partition_id=located.full_partition_id,
            incarnation=located.incarnation,
            data_fields=read.field_names[:1],
        )
        for put in now.locations.puts:
            if put.storage[:2] == read.storage[:2]:
                return put.storage
        raise PutNotFoundError(
            f"the cells have moved from storage service {read.storage.storage_id!r} to another",
            metadata={"put_id": read.request.put_ids[0].hex(), "storage_id": read.storage.storage_id},
        )
