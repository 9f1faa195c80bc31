"""Fetches data: locates cells, reads them from storage services in parallel, and restores the requested order."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, get_args

from tq_service.client._async.calls import AsyncBase
from tq_service.client.batch_meta import BatchMeta, StorageRef, in_parts, joined
from tq_service.client.group_cells import SharedRows, arrangement, check_not_expanded
from tq_service.client.landing import Landing
from tq_service.client.padding import Padding, Side
from tq_service.client.read_form import ReadForm
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
from tq_service.client.requests import (
    Target,
    check_word,
    listed,
    metadata_of,
    named_samples,
    partition_of,
    request_of,
)
from tq_service.client.slices import SliceGiven, Slices
from tq_service.client.transport import HEAVY, Deadline, answer_weight, async_gather, async_unless_light
from tq_service.client_probes import Stage, collected_here, probes
from tq_service.dataplane.receiving import Received, RowPlacement
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
from tq_service.schema import FieldScope, FieldSpec, ReadLayout
from tq_service.v1 import controller_service_pb2 as pb
from tq_service.wire.metadata import Indexes

if TYPE_CHECKING:
    from tensordict import TensorDict


class AsyncFetchCalls(AsyncBase):
    """The client's calls that fetch data. See `AsyncClient`."""

    async def get_data(
        self,
        target: Target,
        *,
        keys: Iterable[str] | None = None,
        global_indexes: Iterable[int] | None = None,
        data_fields: Sequence[str] | None = None,
        missing: Literal["error", "skip"] = "error",
        missing_fields: Literal["error", "skip"] = "error",
        layout: ReadLayout | None = None,
        device: Any = None,
        out: Any = None,
        expand: bool = True,
        slices: Mapping[str, SliceGiven] | None = None,
        padded: bool | Sequence[str] = False,
        pad_value: Any = 0,
        length: int | Mapping[str, int] | None = None,
        side: Side = "right",
        mask: bool = False,
        truncate: bool = False,
        timeout: float | None = None,
    ) -> TensorDict:
        """Fetch the data of samples, in the order of the request. Repeated samples are fetched only once.

        Args:
            target: the samples' metadata, such as a batch. Alternatively, the name of a partition, together with `keys`
                or `global_indexes`. For an empty batch, the method returns empty columns without calling the service.
            keys: keys of the samples.
            global_indexes: indexes of the samples, instead of keys.
            data_fields: the fields to fetch. Defaults to the fields of the metadata, or to all fields of the partition.
            missing: "error" to raise an error, or "skip" to omit samples that do not exist or are missing one of the
                fields.
            missing_fields: "error" to raise an error, or "skip" to omit fields that do not exist or are missing from at
                least one sample. With `data_fields=None`, "skip" fetches only the fields that all samples have, so no
                sample is omitted because of a missing field.
            layout: layout in which to return tensor fields whose rows have at least one dimension. If None, each field
                keeps its own layout, regardless of which rows are fetched. Dense fields are returned as dense tensors.
                Fields that were put or declared as jagged, or that have rows of different shapes in any put, are
                returned as nested tensors. "auto" returns dense tensors if all fetched rows have the same shape, and
                nested tensors otherwise. "dense" returns dense tensors, and raises an error if the shapes of fetched
                rows differ. "jagged" always returns nested tensors.
            device: CUDA device for the tensors, such as "cuda:0". Columns of Python objects always stay on the CPU.
                Data is received in pinned memory and copied to the device on a separate stream. The caller's current
                stream waits for the copy, but the call returns before the copy ends. Defaults to the CPU.
            out: a dict that maps fields to contiguous tensors on the CPU or a CUDA device. The call fills and returns
                these tensors instead of allocating new ones. The fields must be dense, and each tensor must have the
                dtype of its field and the shape `(n, ...)`. If a call fails while receiving data, the contents of these
                tensors are undefined.
            expand: whether to expand fields that the samples of a group share. Each shared value is fetched only once
                per group. If True, shared fields have one row per sample. In a list column, all samples of a group
                refer to the same object. If all samples belong to one group, the rows of a tensor share memory
                (`Tensor.expand`), so do not modify the rows in place. If the samples belong to several groups, the rows
                are copies. If False, shared fields have one row per group, in order of first appearance. The field
                `group_index`, of shape `(n,)`, then maps each sample to its row.
            slices: a dict that maps each field to the part of its rows to fetch. Each value is a pair `(start, stop)`,
                a list with one pair per sample, or a `RowSlice`, which supports further forms. The storage service
                slices the rows and sends only the selected bytes. A dense field remains dense if all slices have the
                same length; otherwise it becomes jagged.
            padded: whether to pad jagged fields and return them as dense tensors of shape `(n, longest, ...)`. Fields
                that are ragged in several dimensions are not padded. To pad only some fields, pass a list of fields.
                The list may include dense fields, which are padded in the first dimension.
            pad_value: value used to pad shorter rows, or a dict that maps fields to values.
            length: row length of padded fields, or a dict that maps fields to lengths. Defaults to the length of the
                longest fetched row. Longer rows raise an error unless `truncate` is set.
            side: where padding is added: "right" (after the values) or "left" (before the values).
            mask: whether to add a bool field `<name>_mask` of shape `(n, length)` for each padded field. A mask is True
                for values and False for padding.
            truncate: whether the storage service truncates rows longer than `length` to their first `length` items.
            timeout: seconds until the call fails. Defaults to the client's `timeout`.

        Returns:
            A TensorDict with batch size `[n]`, or `[]` with `expand=False`. A jagged field is a nested tensor, or a
            list of tensors if its rows are ragged in several dimensions. An object field is returned as a list. If
            tensordict is not installed, the result is a dict of tensors and lists. If torch is not installed either,
            the result is a dict of numpy arrays and lists. Without tensordict, type checkers treat the result as `Any`.

        Raises:
            PartitionNotFoundError, FieldNotFoundError, KeyNotFoundError, SampleNotFoundError: a partition, field, key
                or sample does not exist.
            CellNotFoundError: a sample is missing one of the fields. To omit the sample or the field, set `missing` or
                `missing_fields`.
            FieldMismatchError: rows requested as dense differ in shape, a row is longer than `length`, or a field
                cannot be padded. Also raised if the dtype or shape of a tensor in `out` does not match its field; the
                tensor is then left unchanged.
            InvalidArgumentError: the device does not exist, `out` cannot be filled, a field cannot be sliced, or
                `pad_value` is not valid for the dtype.
            torch.OutOfMemoryError: the device has too little free memory. The received data is freed.
            StaleIncarnationError: the partition was cleared and created again after the metadata was returned.
            DataLossError: the storage service that stored the data lost it in a restart. The error names the samples.
            UnavailableError: the controller, or the storage service that stores the data, did not respond in time.
        """
        began_at = time.perf_counter()
        deadline = self._deadline(timeout)
        fields = None if data_fields is None else listed("data_fields", data_fields)
        check_word("missing", missing, ("error", "skip"))
        check_word("missing_fields", missing_fields, ("error", "skip"))
        check_word("layout", layout, (None, *get_args(ReadLayout)))
        landing = None if device is None and out is None else Landing.of(device, out)
        metadata = metadata_of(target)
        name, named = named_samples(metadata=metadata, keys=keys, global_indexes=global_indexes)
        if name is None:
            raise InvalidArgumentError(
                "target is a partition, but keys and global_indexes are missing; set one of them, or pass metadata",
                field="keys",
            )
        form = None
        given = (slices, padded, pad_value, length, side, mask, truncate)
        if given != (None, False, 0, None, "right", False, False):
            padding = Padding.of(padded, pad_value=pad_value, length=length, side=side, mask=mask, truncate=truncate)
            form = ReadForm.of(Slices.of(slices, len(named)), padding, layout)
            if missing == "skip":
                form.check_rows_stay()
        wanted = fields if fields is not None else metadata.data_fields if metadata is not None else []
        partition = partition_of(self._namespace, target)
        if not len(named):
            # Query the partition only if the batch does not describe all requested fields.
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
            known = [specs[name] for name in wanted or specs if name in specs]
            return self._empty(known, 0, layout, landing, form, expand=expand)
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
                fetched = await self._fetch(
                    located,
                    fields,
                    missing_fields,
                    deadline,
                    layout=layout,
                    landing=landing,
                    form=form,
                    expand=expand,
                )
                for probe in probes:
                    probe.fetched(time.perf_counter() - began_at)
                return fetched
            except (PutNotFoundError, DataLossError):
                # The data may have been overwritten after it was located, so locate it again. If the location is
                # unchanged, the data is lost.
                if stale is not None and stale.locations.puts == located.locations.puts:
                    raise
                stale, located = located, await locate()

    async def _locate(
        self, deadline: Deadline, name: str, named: Sequence[Any] | Indexes, **arguments: Any
    ) -> BatchMeta:
        """Locate the cells of samples. `name` is the request field to set: "keys" or "global_indexes"."""
        parts: list[BatchMeta] = []
        began_at = time.perf_counter()
        for some in in_parts(named):
            request = request_of(pb.LocateRequest, **{name: some}, **arguments)
            answer = await self._calls.unary(pb.LocateResponse, request, deadline)
            parts.append(BatchMeta.from_proto(answer.meta, self._namespace))
        if (collected := collected_here.get()) is not None:
            collected.note(Stage.PLAN, began_at)
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
        form: ReadForm | None,
        expand: bool,
    ) -> TensorDict:
        specs = {spec.name: spec for spec in located.fields}
        wanted = list(specs) if fields is None else list(fields)
        if missing_fields == "skip":
            wanted = [name for name in wanted if name in specs]
        known = [specs[name] for name in wanted if name in specs]
        if not located.size or not wanted:
            return self._empty(known, located.size, layout, landing, form, expand=expand)
        are_shared = _are_shared(known)
        if are_shared and not expand:
            check_not_expanded(known, landing)
        chosen = None if form is None else form.of_fields(known)
        if landing is not None:
            landing.check(known if chosen is None else chosen.result, located.size, layout)

        def plan() -> tuple[BatchMeta, Indexes | None, SharedRows | None, list[StorageRead], list[StorageRead]]:
            distinct, order = (located, None) if chosen is not None and chosen.is_by_row else each_once(located)
            if not distinct.locations.covers(wanted):
                raise InternalError(f"the controller did not return the locations of fields {', '.join(wanted)}")
            shared = SharedRows.of(distinct, known) if are_shared else None
            own = wanted if shared is None else [name for name in wanted if name not in shared.names]
            cuts, padded = ({}, ()) if chosen is None else (chosen.cuts, chosen.padded)
            of_groups = [] if shared is None else shared.plan_reads(distinct)
            return distinct, order, shared, plan_reads(distinct.locations, own, cuts, padded), of_groups

        distinct, order, shared, own, of_groups = await async_unless_light(plan, range(located.size * len(wanted)))
        reads = [*own, *of_groups]
        padding = None if chosen is None else chosen.begin(own if order is None else (), located.size, landing)
        sizes = specs if chosen is None else chosen.cut
        began_at = time.perf_counter()
        answers = await async_gather(
            [
                partial(
                    self._read,
                    distinct,
                    read,
                    read.size_bytes(sizes),
                    landing,
                    deadline,
                    rows=None if padding is None else padding.rows_of(read),
                )
                for read in reads
            ]
        )
        value_bytes = sum(column.value_bytes for answer in answers for column, _ in answer)
        received_at = time.perf_counter()
        for probe in probes:
            probe.received(value_bytes)

        def decode() -> TensorDict:
            parts = answers if padding is None else padding.take(reads, answers)
            left = wanted if padding is None else [name for name in wanted if name not in padding.columns]
            received = merge_answers(
                reads, parts, left, specs, distinct.locations, slices=None if chosen is None else chosen.slices
            )
            if order is not None:
                names_of_groups = () if shared is None else shared.names
                received = [
                    column if column[0].spec.name in names_of_groups else take_rows(column, order)
                    for column in received
                ]
            if chosen is not None:
                received = chosen.finish(received, wanted, padding)
            arrange = None if shared is None else arrangement(shared, order, landing, expand=expand)
            return to_batch(received, located.size if expand else None, layout, landing, arrange)

        weight = answer_weight(located.size * len(wanted), value_bytes) if landing is None else HEAVY
        batch = await async_unless_light(decode, weight)
        if (collected := collected_here.get()) is not None:
            stage = Stage.HOST if landing is None or landing.device is None else Stage.DEVICE
            collected.note(Stage.TRANSFER, began_at, received_at, value_bytes, is_call=True)
            collected.note(stage, received_at, size_bytes=value_bytes, is_call=True)
        return batch

    def _empty(
        self,
        specs: Sequence[FieldSpec],
        row_count: int,
        layout: ReadLayout | None,
        landing: Landing | None,
        form: ReadForm | None,
        *,
        expand: bool,
    ) -> TensorDict:
        arrange = None
        if _are_shared(specs):
            if not expand:
                check_not_expanded(specs, landing)
            arrange = arrangement(SharedRows.of_none(specs), None, landing, expand=expand)
        result = specs if form is None else form.of_fields(specs).result
        if landing is not None:
            landing.check(result, row_count, layout)
        return to_batch(empty_columns(result), row_count if expand else None, layout, landing, arrange)

    async def _read(
        self,
        located: BatchMeta,
        read: StorageRead,
        size_bytes: int | None,
        landing: Landing | None,
        deadline: Deadline,
        *,
        rows: RowPlacement | None,
    ) -> list[Received]:
        """Read data from a storage service. If the service does not respond, look up its current address and retry."""
        storage, loss_count = read.storage, 0

        async def attempt() -> list[Received]:
            nonlocal storage, loss_count
            try:
                if storage.is_away:
                    raise UnavailableError("the storage service has not registered since the controller started")
                driver = self._calls.endpoint(storage.address).driver
                return await driver.get(read.request, read.positions.size, deadline, size_bytes, landing, rows=rows)
            except DataLossError as error:
                # Another storage service may have taken over the puts, or may take them over soon.
                now = await self._find_storage(located, read, deadline)
                if now == storage and loss_count:
                    raise
                storage, loss_count = now, loss_count + 1 if now == storage else 0
                raise UnavailableError(error.message, metadata=error.metadata) from error
            except UnavailableError:
                with suppress(DeadlineError, UnavailableError):  # the error of the storage service is more useful
                    storage = await self._find_storage(located, read, deadline)
                raise

        try:
            return await self._calls.retried(attempt, deadline)
        except DataLossError as error:
            raise lost_samples(located, read, error) from None
        except (DeadlineError, UnavailableError) as error:
            raise unread_samples(located, read, storage, deadline, error) from error

    async def _find_storage(self, located: BatchMeta, read: StorageRead, deadline: Deadline) -> StorageRef:
        """Look up the current address of a storage service that does not respond and may have restarted."""
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
            f"the data has moved from storage service {read.storage.storage_id!r} to another storage service",
            metadata={"put_id": read.request.put_ids[0].hex(), "storage_id": read.storage.storage_id},
        )


def _are_shared(specs: Iterable[FieldSpec]) -> bool:
    """Return whether any of the fields has group scope."""
    return any(spec.scope is FieldScope.GROUP for spec in specs)
