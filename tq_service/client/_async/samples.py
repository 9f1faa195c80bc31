"""Calls of producers: samples, their data and their metadata. A put is placed, sent to a storage service, committed."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final, Literal

import numpy as np
from google.protobuf.message import Message
from numpy.typing import ArrayLike

from tq_service.client._async.calls import AsyncBase
from tq_service.client.allocations import Allocation, column_shapes, ordinary, take_allocation
from tq_service.client.batch_meta import NAMED_AT_ONCE, BatchMeta, check_is_batch, in_parts, joined
from tq_service.client.gathering import Answered, JointPut, Lines, Member, Put, seconds_without_capacity
from tq_service.client.reads import to_batch
from tq_service.client.requests import (
    GroupColumn,
    MetaGiven,
    NameColumn,
    Write,
    changed_samples,
    check_ack,
    check_leased,
    check_rows,
    check_word,
    condition_messages,
    meta_columns_of,
    named_samples,
    new_id,
    partition_of,
    request_of,
    row_lengths,
    seconds,
    write_of,
)
from tq_service.client.transport import (
    AsyncSignal,
    Deadline,
    async_current_home,
    async_is_over,
    async_sleep,
    async_unless_light,
)
from tq_service.client_probes import probes
from tq_service.dataplane.driver import Allocated
from tq_service.errors import (
    DataLossError,
    DeadlineError,
    FieldMismatchError,
    InvalidArgumentError,
    PartitionNotFoundError,
    PreconditionError,
    PutNotFoundError,
    TqError,
    UnavailableError,
)
from tq_service.results import Revision
from tq_service.schema import FieldSpec, KeyMode, SampleState
from tq_service.v1 import commit_pb2
from tq_service.v1 import controller_service_pb2 as pb
from tq_service.v1.metadata_pb2 import MetaColumn
from tq_service.v1.storage_service_pb2 import PutHeader, PutResponse
from tq_service.wire.columns import put_header
from tq_service.wire.encoding import encode_appended, encode_columns, has_lists
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
        fenced: bool = True,
        ack: bool = False,
        return_meta: Literal["written", "all"] = "written",
        timeout: float | None = None,
    ) -> BatchMeta:
        """Put columns of `n` samples, with their metadata, in one step: visible whole or not at all.

        The samples are new ones, those of `metadata`, or those of `keys`. Columns that are there already are
        overwritten, which does not touch what has been consumed.

        Small puts that wait at the same moment are sent as one, see `AsyncClient`.

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
            fenced: whether a put to the samples of a leased claim is refused once they are no longer leased to this
                worker. False: it is not checked, and may overwrite what another worker has written since.
            ack: acknowledge the samples of `metadata`, a leased claim or a part of one, in the same change: either both
                are durable, or neither happens. Takes what `ack` takes. Held samples become live, unless `state` says
                otherwise.
            return_meta: "written", or "all": besides what this put wrote, all that is known of the samples by now, of
                65,536 at most: in the same call.
            timeout: seconds until the call fails; None: the client's. A put without capacity waits until then.

        Returns:
            The samples, with the fields, keys, groups and custom_meta that were given. With "all", with all that the
            samples have, whichever put it was of, as `lookup_samples` answers it: the fields that at least one of them
            has, and in `produced` which. `get_data` takes it.

        Raises:
            InvalidArgumentError: row counts differ, keys come twice, an empty put; `ack` without the samples of one
                leased claim, with a part of a group, or with `fenced=False`; FieldMismatchError: a field has
                another dtype, another number of dimensions, or a declared layout that does not take these rows.
            UnsupportedObjectError: a Python object that only pickle could carry; nothing was sent.
            KeyNotFoundError, AlreadyExistsError: a key does not fit `key_mode`.
            PartitionSealedError: new samples for a sealed partition, or an upsert there of columns that their samples
                have already, perhaps from another run; `key_mode="existing"` overwrites them.
            LeaseExpiredError: `metadata` is of a leased claim, and samples are no longer leased to this worker, which
                has not acknowledged them either; nothing is written. See `ack`, and `fenced`.
            StaleIncarnationError: the partition of `metadata` has been cleared.
            QuotaExceededError: no capacity until the deadline, or more than the quota.
        """
        check_word("return_meta", return_meta, ("written", "all"))
        if ack:
            check_ack(metadata, fenced=fenced)
        if metadata is not None:
            check_is_batch(metadata)
            if not metadata.size:  # of a rank: it makes no call, so that all ranks run one program
                if data is not None and any(len(column) for column in data.values()):
                    raise InvalidArgumentError(
                        "data has rows, but metadata names no samples; put one row for each", field="data"
                    )
                if ack:
                    await self._ack(metadata, timeout)
                return metadata
        deadline = self._deadline(timeout)
        full_name = partition_of(self._namespace, partition_id, metadata)
        known = {} if metadata is None else {spec.name: spec for spec in metadata.fields}

        def encode() -> tuple[Put, JointPut | None]:
            columns = encode_columns(data, known) if data is not None else []
            if metadata is not None:
                check_rows(metadata, columns)
            write = write_of(
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
                fenced=fenced,
                ack=ack,
            )
            put = Put(
                columns=columns,
                write=write,
                for_existing_rows=metadata is not None or key_mode == "existing",
                return_all_meta=return_meta == "all",
            )
            return put, self._alone(put)

        asks_first, refused, refused_specs = full_name in self._refused_lists and has_lists(data), None, None
        for knows_held in (asks_first, True):
            if knows_held:
                known |= await self._held_fields(full_name, deadline)
            put, alone = await async_unless_light(encode, data, keys, groups, custom_meta)
            if refused is not None and refused_specs == [column.spec for column in put.columns]:
                raise refused  # not for its lists: the same again is refused again
            began_at = time.perf_counter()
            try:
                written = await self._write(put, alone, deadline)
            except FieldMismatchError as error:
                # A list is put again as its field holds rows, which only the service knows.
                if knows_held or not has_lists(data):
                    raise
                refused, refused_specs = error, [column.spec for column in put.columns]
                continue
            for probe in probes if put.columns else ():
                probe.put(time.perf_counter() - began_at, put.size_bytes)
            break
        if knows_held and full_name not in self._refused_lists:
            self._refused_lists.append(full_name)  # is asked first from now on, so that lists are sent once
        return written

    async def append(
        self, data: Any, *, metadata: BatchMeta, at: Iterable[int], timeout: float | None = None
    ) -> BatchMeta:
        """Add to the ends of jagged fields of unfinished samples; only the new values are sent and stored.

        The samples are held and leased to the caller: slots, or what `get_meta(held=True, lease=...)` claims. The value
        of a cell is all that was appended to it, in order, along the first dimension of its rows; `get_data` returns it
        as one. A field that does not exist is made: jagged, of the dtype of the data. A cell takes 1,024 appends; a
        `put` of the field replaces them all by one value. A batch that was claimed or looked up before an append has
        the cells of then: `get_data` takes the one that this returns.

        Args:
            data: as for `put`, without objects and scalars: what to add to each of `n` samples, none of it included.
            metadata: the samples, of one leased claim.
            at: `n` lengths, in the first dimension: those that the fields of `data` have before. A field that a sample
                lacks has length 0. Fields of other lengths take calls of their own.
            timeout: seconds until the call fails; None: the client's. An append without capacity waits until then.

        Returns:
            The samples, with the fields of `data`.

        Raises:
            PreconditionError: a field of a sample has another length (reason LENGTH_MISMATCH, with `got` and
                `expected`), a sample is not held (SAMPLE_NOT_HELD), or has grown too often (TOO_MANY_EXTENTS). Nothing
                is written.
            LeaseExpiredError: samples are no longer leased to this worker, or were acknowledged; nothing is written.
            FieldMismatchError: a field is of another dtype or shape, or cannot be jagged.
            InvalidArgumentError: `metadata` is not of one leased claim, or counts differ.
            QuotaExceededError: no capacity until the deadline, or more than the quota.
        """
        check_leased(metadata)
        lengths = row_lengths("at", at, metadata.size)
        if not metadata.size:
            return metadata
        deadline = self._deadline(timeout)
        known = {spec.name: spec for spec in metadata.fields}

        def encode() -> tuple[Put, JointPut]:
            columns = encode_appended(data, known)
            check_rows(metadata, columns)
            write = Write(
                partition_id=metadata.full_partition_id, row_count=metadata.size, metadata=metadata, append_at=lengths
            )
            put = Put(columns=columns, write=write, for_existing_rows=True)
            return put, JointPut((put,))

        put, alone = await async_unless_light(encode, data)
        return await self._write(put, alone, deadline)

    async def truncate(
        self, *, metadata: BatchMeta, to: Iterable[int], data_fields: Iterable[str], timeout: float | None = None
    ) -> None:
        """Discard what jagged fields of unfinished samples have beyond a length.

        A field that is cut to length 0 is not produced any more, as if it was never put. What was appended last is
        freed first: each append as a whole. The bytes of one that is cut are freed once all of it goes.

        Args:
            metadata: the samples, held and of one leased claim; see `append`.
            to: `n` lengths, in the first dimension, to which all these fields of each sample are cut.
            data_fields: the fields; those that a sample lacks have length 0.
            timeout: seconds until the call fails; None: the client's.

        Raises:
            PreconditionError: a field of a sample is shorter (reason LENGTH_MISMATCH, with `got` and `expected`), or
                a sample is not held (SAMPLE_NOT_HELD); nothing is cut.
            LeaseExpiredError: samples are no longer leased to this worker, or were acknowledged; nothing is cut.
            FieldMismatchError: a field is not jagged in its first dimension.
            InvalidArgumentError: `metadata` is not of one leased claim, counts differ, or no field is named.
        """
        check_leased(metadata)
        lengths = row_lengths("to", to, metadata.size)
        if not metadata.size:
            return
        await self._ask(
            pb.TruncateSamplesResponse,
            timeout,
            batch=metadata,
            incarnation=metadata.incarnation,
            global_indexes=metadata.indexes,
            lengths=lengths,
            data_fields=data_fields,
            claim=metadata.leased_claim,
        )

    async def _held_fields(self, full_partition_id: str, deadline: Deadline) -> dict[str, FieldSpec]:
        """Return what the fields of a partition hold, none of one that is not there."""
        try:
            return await self._fields_of(full_partition_id, deadline)
        except PartitionNotFoundError:
            return {}

    def _alone(self, put: Put) -> JointPut | None:
        """Return a put as it is sent by itself; None if it may be gathered with others."""
        may_be_gathered = self.gathers_puts and put.likeness is not None
        is_gathered = may_be_gathered and time.monotonic() >= self._apart.get(put.write.partition_id, 0.0)
        return None if is_gathered else JointPut((put,))

    async def _write(self, put: Put, alone: JointPut | None, deadline: Deadline) -> BatchMeta:
        """Write the put of one call: by itself, or together with puts of other calls at the same moment."""
        if alone is None:
            likeness = put.likeness, self._credentials.metadata()
            lines = self._lines()
            member = lines.join(likeness, put, deadline, AsyncSignal())
            try:
                while not member.is_over:
                    if member.leads:
                        await self._lead(lines, member)
                    elif deadline.remaining():
                        await member.signal.wait_until(deadline)
                    else:
                        raise member.overdue()
            finally:
                lines.leave(member)
            if (written := member.answer()) is not None:
                return written
            alone = JointPut((put,))
        return Answered(await self._send(alone, deadline), self._namespace).part(put.write)

    async def _lead(self, lines: Lines, leader: Member) -> None:
        """Send the batch of a caller, and note what the service answers.

        Raises:
            TqError: it is not known what became of the batch, so that another caller goes on with it; or the service
                refused it, and it has one put.
        """
        if leader.line.batches:
            await async_sleep(0)  # those that put in this turn come along
        batch = lines.take(leader)
        answered = None
        try:
            if batch.joint is None:
                batch.joint = JointPut([member.put for member in batch.members], is_gathered=True)
            answer = await self._send(batch.joint, leader.deadline, batch.note)
            answered = Answered(answer, self._namespace)
        except TqError as error:
            seconds = seconds_without_capacity(error)
            if not batch.is_refused_by(error) or (seconds is None and len(batch.members) == 1):
                if isinstance(error, DeadlineError) and leader.line.failure is not None:
                    raise leader.overdue() from error  # a try in the last moment, after others that say more
                raise
            if seconds is not None:  # each waits for capacity by itself, as do those that come soon
                self._keep_apart(leader.put.write.partition_id, seconds)
        lines.end(batch, answered)

    def _keep_apart(self, full_partition_id: str, seconds: float) -> None:
        """Have the next puts to a partition sent by themselves."""
        now = time.monotonic()
        for name, until in list(self._apart.items()):
            if until < now:
                self._apart.pop(name, None)
        self._apart[full_partition_id] = now + seconds

    def _lines(self) -> Lines:
        """Return the lines of this event loop, or of this process; those of others that are over are forgotten."""
        home = async_current_home()
        lines = self._lines_of.get(home)
        if lines is None:
            for other in list(self._lines_of):
                if async_is_over(other):
                    self._lines_of.pop(other, None)
            lines = self._lines_of.setdefault(home, Lines())
        return lines

    async def _send(
        self, joint: JointPut, deadline: Deadline, note: Callable[[TqError], object] = lambda failure: None
    ) -> Any:
        """Send puts and commit them, all again where a service is unavailable in the middle.

        Args:
            joint: the puts.
            deadline: until when.
            note: is called with the failure of each try.
        """
        loss_count = 0

        async def attempt() -> Message:
            nonlocal loss_count
            if not joint.columns:
                return await self._calls.unary_once(joint.kind, joint.request, deadline)
            try:
                return await self._put_where_placed(joint, deadline, note)
            except TqError as error:
                self._placement.end()
                # The put was lost before its commit, by a restart or since it waited for too long.
                if not isinstance(error, DataLossError | PutNotFoundError) or loss_count == _MOST_LOSSES:
                    raise
                loss_count += 1
                joint.header.put_id = new_id()  # the service may still be freeing the bytes of the old one
                raise UnavailableError(error.message) from error

        return await self._calls.retried(attempt, deadline, note)

    async def _put_where_placed(
        self, joint: JointPut, deadline: Deadline, note: Callable[[TqError], object]
    ) -> commit_pb2.CommitResponse:
        header, request, columns = joint.header, joint.request, joint.columns
        if self._allocations:
            allocation = take_allocation(self._allocations, header.partition_id, columns)
            if allocation is not None:
                return await self._commit_put(allocation.header, allocation.allocated.put, request, deadline, note)
        place = await self._place(header, deadline)
        if place.embedded:
            if not header.HasField("commit"):
                header.commit.CopyFrom(request)
            return (await self._calls.endpoint().driver.put(header, columns, deadline)).commit
        header.ClearField("commit")
        address = self._placement.endpoint(place).address
        answer = await self._calls.endpoint(address).driver.put(header, columns, deadline)
        return await self._commit_put(header, answer, request, deadline, note)

    async def _place(self, header: PutHeader, deadline: Deadline) -> pb.PlacePutResponse:
        """Return where a put goes, and say so in its header."""
        place = self._placement.place(header.size_bytes)
        if place is None:
            asked = pb.PlacePutRequest(
                size_bytes=header.size_bytes, partition_id=header.partition_id, put_id=header.put_id
            )
            place = await self._calls.unary_once(pb.PlacePutResponse, asked, deadline)
            self._placement.renew(place)
        header.controller_id = place.controller_id
        return place

    async def _commit_put(
        self,
        header: PutHeader,
        answer: PutResponse,
        request: commit_pb2.CommitRequest,
        deadline: Deadline,
        note: Callable[[TqError], object],
    ) -> commit_pb2.CommitResponse:
        """Commit a put that a storage service holds."""
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
                lambda: self._calls.unary_once(commit_pb2.CommitResponse, commit, deadline), patience, note
            )
        except UnavailableError as given_up:  # the message has the tries of the whole put, not those of this part
            raise given_up.__cause__ or given_up from None

    async def allocate(
        self,
        fields: Iterable[FieldSpec],
        row_count: int,
        *,
        partition_id: str,
        lengths: Mapping[str, ArrayLike] = MappingProxyType({}),
        timeout: float | None = None,
    ) -> Any:
        """Return columns to be filled in place and put once: on the host of the service, that put copies nothing.

        Put all of them, in the same order, to the same partition. The put is then only a commit, and the columns are
        the stored data: do not write to them any more, allocate new ones. Where the service shares no memory with this
        process, or keeps puts beyond its own (with a data directory or a mirror), they are ordinary memory, and the
        put copies them; so is any other put of them. What they contain before they are filled is not defined. A
        forked child must not use them.

        The capacity is taken until the put is cleared, or for `put_ttl_seconds` of the service where it is not put:
        then a put copies.

        Args:
            fields: name, dtype and row shape of each; of jagged fields with -1 in ragged dimensions.
            row_count: number of samples.
            partition_id: the partition that they are for.
            lengths: of each jagged field the size of each row `(n,)`; with several ragged dimensions `(n, dims)`.
            timeout: seconds until the call fails; None: the client's. It waits for capacity until then.

        Returns:
            A TensorDict of batch size `[n]`, or a dict, as `get_data` returns it.

        Raises:
            InvalidArgumentError: a field is of objects, or its size is not known.
            QuotaExceededError: no capacity until the deadline, or more than the quota.
        """
        shapes = column_shapes(fields, row_count, lengths)
        deadline = self._deadline(timeout)
        header = put_header(new_id(), shapes, partition_id=self._namespace.full_name(partition_id))

        async def attempt() -> Allocated | None:
            place = await self._place(header, deadline)
            address = "" if place.embedded else self._placement.endpoint(place).address
            try:
                return await self._calls.endpoint(address).driver.allocate(header, deadline)
            except PreconditionError:
                return None
            except TqError:
                self._placement.end()
                raise

        allocated = await self._calls.retried(attempt, deadline)
        if allocated is None:
            return to_batch(ordinary(shapes), row_count)
        allocation = Allocation(header, shapes, allocated)
        self._allocations[allocated.mapping.address] = allocation
        return to_batch(allocation.received(), row_count)

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
        deadline = self._deadline(timeout)

        def encode() -> tuple[Put, JointPut | None]:
            write = write_of(
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
            put = Put(kind=pb.InsertResponse, write=write)
            return put, self._alone(put)

        put, alone = await async_unless_light(encode, keys, groups, custom_meta)
        return await self._write(put, alone, deadline)

    async def set_custom_meta(
        self, metadata: BatchMeta, custom_meta: MetaGiven, *, fenced: bool = True, timeout: float | None = None
    ) -> None:
        """Write custom_meta of samples; values merge with what is there.

        Args:
            metadata: the samples.
            custom_meta: a mapping of names to what JSON has for each of them, or columns, see `put`; None removes a
                value.
            fenced: whether it is refused once samples of a leased claim are no longer this worker's, see `put`.
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
            claim=metadata.leased_claim if fenced else None,
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
        conditions = condition_messages(where, self._namespace)
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
        task_name: str = "",
        missing_ok: bool = False,
        fenced: bool = True,
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
            task_name: of these only samples that are left for this task, and that no worker of any task has leased.
            missing_ok: whether there is nothing to remove where the partition is not there, instead of an error.
            fenced: whether it is refused once samples of a leased claim are no longer this worker's, see `put`.
            timeout: seconds until the call fails; None: the client's.

        Returns:
            The number of samples removed.

        Raises:
            PartitionNotFoundError: there is no such partition.
            StaleIncarnationError: the partition of `metadata` was created again.
            LeaseExpiredError: samples of a leased claim are no longer this worker's, see `put`; none is removed.
            TaskNotFoundError: `skipped_by` or `task_name` has not asked for samples of the partition yet.
            InvalidArgumentError: samples are named besides groups or `skipped_by`, or a condition does not fit its
                column.
        """
        request = changed_samples(
            pb.ClearSamplesRequest,
            self._namespace,
            metadata,
            partition_id=partition_id,
            keys=keys,
            global_indexes=global_indexes,
            groups=groups,
            where=where,
            task_name=task_name,
            skipped_by=skipped_by,
            missing_ok=missing_ok,
            fenced=fenced,
        )
        if request is None:
            return 0
        answer = await self._calls.unary(pb.ClearSamplesResponse, request, self._deadline(timeout))
        return answer.cleared_count

    async def fail_samples(
        self,
        metadata: BatchMeta | None = None,
        *,
        partition_id: str | None = None,
        keys: Iterable[str] | None = None,
        global_indexes: Iterable[int] | None = None,
        groups: Iterable[str] | None = None,
        where: Iterable[tuple[str, str, Any]] = (),
        task_name: str = "",
        fenced: bool = True,
        timeout: float | None = None,
    ) -> int:
        """Have samples fail: they count as done for all tasks, and their bytes are freed. Nothing undoes it.

        Keys, groups and custom_meta stay. Samples that do not exist, or have failed before, are ignored.

        Args:
            metadata: the samples.
            partition_id: or the partition,
            keys: with keys of samples,
            global_indexes: or their indexes,
            groups: or groups, all of whose members fail.
            where: conditions `(column, operator, value)` on custom_meta, all of which must hold for a sample in the
                step that has it fail. Where nothing else names samples, all fail that satisfy them.
            task_name: of these only samples that are left for this task, and that no worker of any task has leased.
            fenced: whether it is refused once samples of a leased claim are no longer this worker's, see `put`.
            timeout: seconds until the call fails; None: the client's.

        Returns:
            The number of samples that have failed by this call.

        Raises:
            PartitionNotFoundError: there is no such partition.
            StaleIncarnationError: the partition of `metadata` was created again.
            LeaseExpiredError: samples of a leased claim are no longer this worker's, see `put`; none fails.
            TaskNotFoundError: the task has not asked for samples of the partition yet.
            InvalidArgumentError: samples are named besides groups, or a condition does not fit its column.
        """
        request = changed_samples(
            pb.FailSamplesRequest,
            self._namespace,
            metadata,
            partition_id=partition_id,
            keys=keys,
            global_indexes=global_indexes,
            groups=groups,
            where=where,
            task_name=task_name,
            fenced=fenced,
        )
        if request is None:
            return 0
        answer = await self._calls.unary(pb.FailSamplesResponse, request, self._deadline(timeout))
        return answer.failed_count
