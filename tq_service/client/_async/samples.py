"""Calls of producers: samples, their data and their metadata. A put is placed, sent to a storage service, committed."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from typing import Any, Final, Literal

import numpy as np

from tq_service.client._async.calls import AsyncBase
from tq_service.client.batch_meta import NAMED_AT_ONCE, BatchMeta, check_is_batch, in_parts, joined
from tq_service.client.requests import (
    GroupColumn,
    MetaGiven,
    NameColumn,
    check_word,
    condition_messages,
    fill_write,
    meta_columns_of,
    named_samples,
    new_id,
    partition_of,
    request_of,
    seconds,
    written_meta,
)
from tq_service.client.transport import Deadline, async_unless_light
from tq_service.client_probes import probes
from tq_service.errors import (
    DataLossError,
    FieldMismatchError,
    InvalidArgumentError,
    PartitionNotFoundError,
    PutNotFoundError,
    TqError,
    UnavailableError,
)
from tq_service.results import Revision
from tq_service.schema import FieldSpec, KeyMode, SampleState
from tq_service.v1 import commit_pb2
from tq_service.v1 import controller_service_pb2 as pb
from tq_service.v1.metadata_pb2 import MetaColumn
from tq_service.v1.storage_service_pb2 import PutHeader
from tq_service.wire.columns import SourceColumn, put_header
from tq_service.wire.encoding import encode_columns, has_lists
from tq_service.wire.messages import read_message, to_duration
from tq_service.wire.metadata import encode_meta_columns

_COMMIT_PATIENCE_SECONDS: Final = 5.0
_MOST_LOSSES: Final = 3


class AsyncSampleCalls(AsyncBase):
    """The part of the client for producers. See `AsyncClient`."""

    async def put(
        self,
        data: Any = None,
        *,
        partition_id: str | None = None,
        metadata: BatchMeta | None = None,
        keys: NameColumn | None = None,
        key_mode: KeyMode | None = None,
        groups: GroupColumn | None = None,
        group_size: int | None = None,
        custom_meta: MetaGiven | None = None,
        state: SampleState | str | None = None,
        return_meta: Literal["written", "all"] = "written",
        timeout: float | None = None,
    ) -> BatchMeta:
        """Put columns of `n` samples, with their metadata, in one step: visible whole or not at all.

        The samples are new ones, those of `metadata`, or those of `keys`. Columns that are there already are
        overwritten, which does not touch what has been consumed.

        Do not change the data before this returns: large tensors are sent from where they are, and the async client
        encodes in a thread whatever takes long.

        Args:
            data: a TensorDict, or a dict of columns: a dense tensor or array `(n, ...)`; a jagged nested tensor; a list
                of tensors of one or more dimensions (jagged where they differ in shape, else dense); a list of numbers
                (dense; int64, float64 or bool); a list of lists of numbers (jagged, or dense if all have one length); a
                list of strings, bytes, None, JSON-like values or dicts with tensors (objects). A field of objects takes
                any list. Arrays of objects, `NonTensorStack` and `NonTensorData` are objects whatever their rows are;
                `NonTensorData` is one value for all rows, as tensordict's `tolist()` has it. None: metadata or state
                only.
            partition_id: the partition; made on first use.
            metadata: existing samples, instead of `partition_id`.
            keys: `n` unique names of the samples: a list, or an array of text; at most 16,384 in one call.
            key_mode: "upsert" (default): known keys name their sample, unknown ones make one; "new": every key makes a
                sample; "existing": every key names one.
            groups: `n` groups of new samples: a list with None, or an array of text with "", for a sample without; at
                most 16,384 in one call.
            group_size: number of members that completes each of these groups.
            custom_meta: `n` mappings of names to what JSON has, or columns: one mapping of names to arrays, tensors or
                lists of `n` values, which is by far the quickest way for many samples. They merge with what is there.
                None removes the value of the sample, `tq.JSON_NULL` stores null. Claims compare and order by the
                values of one type, that of the first number, truth value or text of a name.
            state: "live" (default for new samples), "held" or "failed".
            return_meta: "written", or "all": besides what this put wrote, all that is known of the samples by now, of
                65,536 at most: in the same call.
            timeout: seconds until the call fails; None: the client's. A put without capacity waits until then.

        Returns:
            The samples, with the fields, keys, groups and custom_meta that were given. With "all", with all that the
            samples have, whichever put it was of, as `lookup_samples` answers it: the fields that at least one of them
            has, and in `produced` which. `get_data` takes it.

        Raises:
            InvalidArgumentError: row counts differ, keys come twice, an empty put; FieldMismatchError: a field has
                another dtype, another number of dimensions, or a declared layout that does not take these rows.
            UnsupportedObjectError: a Python object that only pickle could carry; nothing was sent.
            KeyNotFoundError, AlreadyExistsError: a key does not fit `key_mode`.
            PartitionSealedError: new samples for a sealed partition, or an upsert there of columns that their samples
                have already, perhaps from another run; `key_mode="existing"` overwrites them.
            LeaseExpiredError: `metadata` is of a leased claim, and samples are no longer leased to this worker, which
                has not acknowledged them either; nothing is written. See `ack`.
            StaleIncarnationError: the partition of `metadata` has been cleared.
            QuotaExceededError: no capacity until the deadline, or more than the quota.
        """
        check_word("return_meta", return_meta, ("written", "all"))
        if metadata is not None:
            check_is_batch(metadata)
            if not metadata.size:  # of a rank: it makes no call, so that all ranks run one program
                if data is not None and any(len(column) for column in data.values()):
                    raise InvalidArgumentError(
                        "data has rows, but metadata names no samples; put one row for each", field="data"
                    )
                return metadata
        deadline = self._deadline(timeout)
        full_name = partition_of(self._namespace, partition_id, metadata)
        known = {} if metadata is None else {spec.name: spec for spec in metadata.fields}

        def encode() -> tuple[Sequence[SourceColumn], PutHeader, BatchMeta]:
            columns = encode_columns(data, known) if data is not None else []
            for column in columns:
                if metadata is not None and column.row_count != metadata.size:
                    raise InvalidArgumentError(
                        f"metadata has {metadata.size} samples, field {column.spec.name!r} has {column.row_count} "
                        "rows; put one row for each sample, or give the metadata of the samples that the rows are for",
                        field="data",
                    )
            header = PutHeader()
            if columns:
                is_for_existing = metadata is not None or key_mode == "existing"
                header = put_header(new_id(), columns, for_existing_rows=is_for_existing)
            given = fill_write(
                header.commit.write,
                self._namespace,
                partition_id=partition_id,
                metadata=metadata,
                row_count=columns[0].row_count if columns else None,
                keys=keys,
                key_mode=key_mode,
                groups=groups,
                group_size=group_size,
                custom_meta=custom_meta,
                state=state,
            )
            return columns, header, given

        asks_first, refused, refused_specs = full_name in self._refused_lists and has_lists(data), None, None
        for knows_held in (asks_first, True):
            if knows_held:
                known |= await self._held_fields(full_name, deadline)
            columns, header, given = await async_unless_light(encode, data, keys, groups, custom_meta)
            if refused is not None and refused_specs == [column.spec for column in columns]:
                raise refused  # not for its lists: the same again is refused again
            request = header.commit  # where it goes if the storage service is the controller: a copy of it takes long
            request.request_id = new_id()
            request.return_all_meta = return_meta == "all"
            header.partition_id = request.write.partition_id
            if not columns:
                answer = await self._calls.unary(commit_pb2.CommitResponse, request, deadline)
                break
            began_at = time.perf_counter()
            try:
                answer = await self._put_columns(header, request, columns, deadline)
            except FieldMismatchError as error:
                # A list is put again as its field holds rows, which only the service knows.
                if knows_held or not has_lists(data):
                    raise
                refused, refused_specs = error, [column.spec for column in columns]
                continue
            for probe in probes:
                probe.put(time.perf_counter() - began_at, header.size_bytes)
            break
        if knows_held and full_name not in self._refused_lists:
            self._refused_lists.append(full_name)  # is asked first from now on, so that lists are sent once
        return written_meta(answer.meta, given, metadata, namespace=self._namespace, all_meta=answer.all_meta)

    async def _held_fields(self, full_partition_id: str, deadline: Deadline) -> dict[str, FieldSpec]:
        """Return what the fields of a partition hold, none of one that is not there."""
        try:
            return await self._fields_of(full_partition_id, deadline)
        except PartitionNotFoundError:
            return {}

    async def _put_columns(
        self, header: PutHeader, request: commit_pb2.CommitRequest, columns: Sequence[SourceColumn], deadline: Deadline
    ) -> commit_pb2.CommitResponse:
        """Put columns and commit them, all again where a service is unavailable in the middle."""
        loss_count = 0

        async def attempt() -> commit_pb2.CommitResponse:
            nonlocal loss_count
            try:
                return await self._put_where_placed(header, request, columns, deadline)
            except TqError as error:
                self._placement.end()
                # The put was lost before its commit, by a restart or since it waited for too long.
                if not isinstance(error, DataLossError | PutNotFoundError) or loss_count == _MOST_LOSSES:
                    raise
                loss_count += 1
                header.put_id = new_id()  # the service may still be freeing the bytes of the old one
                raise UnavailableError(error.message) from error

        return await self._calls.retried(attempt, deadline)

    async def _put_where_placed(
        self, header: PutHeader, request: commit_pb2.CommitRequest, columns: Sequence[SourceColumn], deadline: Deadline
    ) -> commit_pb2.CommitResponse:
        place = self._placement.place(header.size_bytes)
        if place is None:
            asked = pb.PlacePutRequest(
                size_bytes=header.size_bytes, partition_id=header.partition_id, put_id=header.put_id
            )
            place = await self._calls.unary_once(pb.PlacePutResponse, asked, deadline)
            self._placement.renew(place)
        header.controller_id = place.controller_id
        if place.embedded:
            if not header.HasField("commit"):
                header.commit.CopyFrom(request)
            return (await self._calls.endpoint().driver.put(header, columns, deadline)).commit
        header.ClearField("commit")
        address = self._placement.endpoint(place).address
        answer = await self._calls.endpoint(address).driver.put(header, columns, deadline)
        commit = commit_pb2.CommitRequest(
            request_id=request.request_id,
            write=request.write,
            placement=commit_pb2.PutPlacement(storage=answer.storage, put_id=header.put_id, receipt=answer.receipt),
            columns=header.columns,
            return_all_meta=request.return_all_meta,
        )
        # Where it stays unavailable, the put is sent again: perhaps to another storage service.
        patience = Deadline.after(min(_COMMIT_PATIENCE_SECONDS, deadline.remaining()))
        try:
            return await self._calls.retried(
                lambda: self._calls.unary_once(commit_pb2.CommitResponse, commit, deadline), patience
            )
        except UnavailableError as given_up:  # the message has the tries of the whole put, not those of this part
            raise given_up.__cause__ or given_up from None

    async def insert(
        self,
        partition_id: str,
        row_count: int | None = None,
        *,
        keys: NameColumn | None = None,
        groups: GroupColumn | None = None,
        group_size: int | None = None,
        custom_meta: MetaGiven | None = None,
        state: SampleState | str | None = None,
        timeout: float | None = None,
    ) -> BatchMeta:
        """Make `row_count` samples without data; `put(..., metadata=...)` adds columns.

        Args:
            partition_id: the partition; made on first use.
            row_count: number of samples; None: as many as there are keys, custom_meta or groups.
            keys: their unique names; at most 16,384 in one call.
            groups: their groups, None for a sample without; at most 16,384 in one call.
            group_size: number of members that completes each of these groups.
            custom_meta: mappings of names to what JSON has, or columns; see `put`, for keys and groups too.
            state: "live" (default), "held" or "failed".
            timeout: seconds until the call fails; None: the client's.

        Raises:
            AlreadyExistsError: a key is known.
            PartitionSealedError: the partition is sealed.
        """
        request = request_of(pb.InsertRequest)

        def encode() -> BatchMeta:
            return fill_write(
                request.write,
                self._namespace,
                partition_id=partition_id,
                row_count=row_count,
                keys=keys,
                key_mode="new" if keys is not None else None,
                groups=groups,
                group_size=group_size,
                custom_meta=custom_meta,
                state=state,
            )

        given = await async_unless_light(encode, keys, groups, custom_meta)
        answer = await self._calls.unary(pb.InsertResponse, request, self._deadline(timeout))
        return written_meta(answer.meta, given, None, namespace=self._namespace)

    async def set_custom_meta(
        self, metadata: BatchMeta, custom_meta: MetaGiven, *, timeout: float | None = None
    ) -> None:
        """Write custom_meta of samples; values merge with what is there.

        Args:
            metadata: the samples.
            custom_meta: a mapping of names to what JSON has for each of them, or columns, see `put`; None removes a
                value.
            timeout: seconds until the call fails; None: the client's.

        Raises:
            InvalidArgumentError: a value is nothing that JSON has, or too large.
            SampleNotFoundError: a sample was cleared.
            LeaseExpiredError: samples of a leased claim are no longer this worker's, see `put`; nothing is written.
            StaleIncarnationError: the partition was created again.
        """
        check_is_batch(metadata)

        def encode() -> Sequence[MetaColumn]:
            columns, _ = meta_columns_of(custom_meta, metadata.size)
            return encode_meta_columns(columns)

        encoded = await async_unless_light(encode, custom_meta)
        if not metadata.size:
            return
        await self._ask(
            pb.SetCustomMetaResponse,
            timeout,
            batch=metadata,
            incarnation=metadata.incarnation,
            global_indexes=metadata.indexes,
            custom_meta=encoded,
            claim=metadata.leased_claim,
        )

    async def lookup_samples(
        self,
        partition_id: str,
        keys: Iterable[str] | None = None,
        *,
        global_indexes: Iterable[int] | None = None,
        groups: Iterable[str] | None = None,
        where: Iterable[tuple[str, str, Any]] = (),
        task_name: str | None = None,
        min_count: int | None = None,
        max_wait: float = 0.0,
        missing_ok: bool = False,
        limit: int | None = None,
        timeout: float | None = None,
    ) -> tuple[BatchMeta, list[Any]]:
        """Return samples with all that is known of them, and which of those that were named are not there.

        The samples come with their keys, groups and custom_meta, the fields that at least one of them has, and in
        `produced` which samples have which.

        Many samples come page by page, each as of its moment: one that is cleared meanwhile may be missing, and one
        that is inserted may be there.

        Args:
            partition_id: the partition.
            keys: keys of samples.
            global_indexes: or their indexes,
            groups: or groups, whose members are meant. None of the three: every sample of the partition, held and
                failed ones too.
            where: conditions `(column, operator, value)` on custom_meta, as `get_meta` takes them, all of which must
                hold for a sample to be in the answer.
            task_name: a consumer: the answer has in `consumed`, `leased` and `dead_lettered` what it has done with each
                sample.
            min_count: how many samples to wait for, of those that are meant and satisfy the conditions; None: one.
            max_wait: seconds to wait for them, and for the partition; then the answer is what there is. It comes
                earlier where there never will be so many: the partition is sealed, and has fewer samples. 0: it comes
                at once, and `min_count` does not matter.
            missing_ok: whether a partition that is not there has no samples, and a task that has not asked yet has
                consumed nothing.
            limit: most samples that are looked at, the first ones of those that are meant; None: all. Where samples are
                named, each of those.
            timeout: seconds beyond `max_wait` until the call fails; None: the client's.

        Returns:
            The samples, and the keys, indexes or groups that no sample has. Samples that are named come in the order
            asked, all others in the order of insertion.

        Raises:
            PartitionNotFoundError: there is no such partition, unless `missing_ok`.
            TaskNotFoundError: the task has not asked for anything yet, unless `missing_ok`; or the partition was
                created for other tasks.
            StaleIncarnationError: the partition was cleared between two pages; PartitionClearedError: while the call
                waited.
            InvalidArgumentError: samples are named in two ways, or too many to wait for (16,384), or a condition does
                not fit its column.
        """
        wait = seconds("max_wait", max_wait)
        deadline = self._deadline(timeout, wait)
        name, named = named_samples(keys=keys, global_indexes=global_indexes, groups=groups)
        if wait and len(named) > NAMED_AT_ONCE:
            raise InvalidArgumentError(
                f"max_wait is given for {len(named)} names, at most {NAMED_AT_ONCE} expected; wait for a condition on "
                f"custom_meta instead",
                field="max_wait",
            )
        conditions = condition_messages(where)
        parts: list[BatchMeta] = []
        missing: list[Any] = []
        for some in in_parts(named):
            request = request_of(
                pb.LookupSamplesRequest,
                partition_id=self._namespace.full_name(partition_id),
                all_samples=name is None,
                where=conditions,
                task_name=task_name,
                min_count=min_count or 0,
                missing_ok=missing_ok,
                page_size=limit or 0,
                **({} if name is None else {name: some}),
            )
            first = await self._first_page(request, Deadline.after(wait), deadline)
            if limit is not None:
                first.ClearField("next_page_token")
            async for page in self._pages(pb.LookupSamplesResponse, request, deadline, first):
                states = None if task_name is None else np.array(page.consumption, np.uint8)
                revision = read_message(Revision, page.revision)
                parts.append(BatchMeta.from_proto(page.meta, self._namespace, consumption=states, revision=revision))
                missing += () if name is None else getattr(page, f"missing_{name}")
        found = joined(parts)
        if groups is not None and len(named) > NAMED_AT_ONCE:
            found = found.select_samples(np.argsort(found.indexes))
        return found, missing

    async def _first_page(
        self, request: pb.LookupSamplesRequest, wait: Deadline, deadline: Deadline
    ) -> pb.LookupSamplesResponse:
        """Ask until there are enough samples or the wait is spent: the server may cap how long one call waits."""

        async def attempt(max_wait: float) -> pb.LookupSamplesResponse:
            request.ClearField("max_wait")
            if max_wait:
                request.max_wait.CopyFrom(to_duration(max_wait))
            return await self._calls.unary_once(pb.LookupSamplesResponse, request, deadline)

        answer = await self._calls.polled(attempt, lambda page: page.not_yet, wait, deadline)
        request.ClearField("max_wait")
        return answer

    async def clear_samples(
        self,
        metadata: BatchMeta | None = None,
        *,
        partition_id: str | None = None,
        keys: Iterable[str] | None = None,
        global_indexes: Iterable[int] | None = None,
        groups: Iterable[str] | None = None,
        skipped_by: str = "",
        where: Iterable[tuple[str, str, Any]] = (),
        missing_ok: bool = False,
        timeout: float | None = None,
    ) -> int:
        """Remove samples; unknown keys, indexes and groups are ignored.

        Args:
            metadata: the samples.
            partition_id: or the partition,
            keys: with keys of samples,
            global_indexes: or their indexes,
            groups: or groups, all of whose members are removed,
            skipped_by: or a task: all samples are removed that it never gets, as counted in its `skipped_count`: those
                that failed before it took them, that it dead-lettered, and the rest of groups that lost a member while
                the task keeps groups whole. Other tasks may still want them.
            where: conditions `(column, operator, value)` on custom_meta, all of which must hold for a sample in the
                step that removes it. Where nothing else names samples, all are removed that satisfy them.
            missing_ok: whether there is nothing to remove where the partition is not there, instead of an error.
            timeout: seconds until the call fails; None: the client's.

        Returns:
            The number of samples removed.

        Raises:
            PartitionNotFoundError: there is no such partition.
            StaleIncarnationError: the partition of `metadata` was created again.
            LeaseExpiredError: samples of a leased claim are no longer this worker's, see `put`; none is removed.
            TaskNotFoundError: `skipped_by` has not asked for samples of the partition yet.
            InvalidArgumentError: samples are named besides groups or `skipped_by`, or a condition does not fit its
                column.
        """
        if metadata is not None:
            check_is_batch(metadata)
        request = request_of(
            pb.ClearSamplesRequest,
            partition_id=partition_of(self._namespace, partition_id, metadata),
            incarnation=b"" if metadata is None else metadata.incarnation,
            global_indexes=global_indexes if metadata is None else metadata.handled_indexes,
            keys=keys,
            groups=groups,
            skipped_by=skipped_by,
            where=condition_messages(where),
            missing_ok=missing_ok,
            claim=None if metadata is None else metadata.leased_claim,
        )
        is_named = any(names is not None for names in (metadata, keys, global_indexes, groups))
        is_all = (request.where and not is_named) or request.skipped_by
        if not (request.global_indexes or request.keys or request.groups or is_all):
            return 0
        answer = await self._calls.unary(pb.ClearSamplesResponse, request, self._deadline(timeout))
        return answer.cleared_count
