"""Calls of producers: samples, their data and their metadata. A put is placed, sent to a storage service, committed."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, Literal

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
    Target,
    Write,
    changed_samples,
    check_ack,
    check_group_rows,
    check_leased,
    check_rows,
    check_word,
    condition_messages,
    meta_columns_of,
    metadata_of,
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
from tq_service.client_probes import Stage, collected_here, probes
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
from tq_service.schema import FieldSpec, KeyMode, StateGiven
from tq_service.v1 import commit_pb2
from tq_service.v1 import controller_service_pb2 as pb
from tq_service.v1.metadata_pb2 import MetaColumn
from tq_service.v1.storage_service_pb2 import PutHeader, PutResponse
from tq_service.wire.columns import put_header
from tq_service.wire.encoding import encode_appended, encode_columns, has_lists
from tq_service.wire.messages import read_message, to_duration
from tq_service.wire.metadata import encode_meta_columns

if TYPE_CHECKING:
    from tensordict import TensorDict

_COMMIT_PATIENCE_SECONDS: Final = 5.0
_MOST_LOSSES: Final = 3


def _measured(began_at: float, size_bytes: int) -> None:
    """Report how long a put of columns took."""
    if (collected := collected_here.get()) is not None:
        collected.note(Stage.PUT, began_at, size_bytes=size_bytes, is_call=True)
    for probe in probes:
        probe.put(time.perf_counter() - began_at, size_bytes)


class AsyncSampleCalls(AsyncBase):
    """The part of the client for producers. See `AsyncClient`."""

    async def put(
        self,
        target: Target,
        data: Any = None,
        *,
        keys: NameColumn | None = None,
        key_mode: KeyMode | None = None,
        groups: GroupColumn | None = None,
        group_size: int | None = None,
        rollouts: GroupColumn | None = None,
        ends_rollouts: bool = False,
        custom_meta: MetaGiven | None = None,
        state: StateGiven | None = None,
        fenced: bool = True,
        ack: bool = False,
        return_meta: Literal["written", "all"] = "written",
        timeout: float | None = None,
    ) -> BatchMeta:
        """Put columns of `n` samples with their metadata in one atomic step: all of it becomes visible, or nothing.

            client.put("train", {"prompt": prompts}, keys=names)  # new samples of a partition
            client.put(batch, {"reward": rewards})                # further columns of the samples of a batch

        Existing columns are overwritten, without any effect on consumption.

        Small puts that wait at the same moment are sent in one call, see `AsyncClient`.

        Do not change the data before this returns: large tensors are sent without a copy, and the async client encodes
        large data in a thread.

        Args:
            target: the partition, created on first use, for new samples and those of `keys`; or the metadata of
                existing samples.
            data: a TensorDict, or a dict of columns: a dense tensor or array `(n, ...)`; a jagged nested tensor; a list
                of tensors of one or more dimensions (jagged if shapes differ, else dense); a list of numbers (dense;
                int64, float64 or bool); a list of lists of numbers (jagged, or dense if all have one length); a list of
                strings, bytes, None, JSON-like values or dicts with tensors (objects). A field of objects accepts any
                list. Arrays of objects, `NonTensorStack` and `NonTensorData` are objects, whatever their rows are.
                `NonTensorData` is one value for all rows, like tensordict's `tolist()`. None: only metadata or state.
            keys: `n` unique keys: a list, or an array of text; at most 16,384 per call.
            key_mode: "upsert" (default): existing keys refer to their samples, unknown keys create samples; "new":
                every key creates a sample; "existing": every key must exist.
            groups: `n` groups of new samples, at most 16,384 per call. A list with None, or an array of text with "",
                for samples without a group.
            group_size: number of members that completes each of these groups: rollouts, and samples without one.
            rollouts: `n` rollouts of new samples, such as the turns of an agent, in the form of `groups`. A rollout
                belongs to the group of its first sample.
            ends_rollouts: whether the rollouts of these samples, new or existing, get no further samples.
            custom_meta: `n` mappings of names to JSON values, or columns: one mapping of names to arrays, tensors or
                lists of `n` values, by far the fastest form for many samples. They merge with existing values. None
                removes a value of the sample; `tq.JSON_NULL` stores null. Claims compare and order by the values of one
                type: that of the first number, bool or string under a name.
            state: "live" (default for new samples), "held" or "failed".
            fenced: whether to refuse a put to samples of a leased claim once they are no longer leased to this worker.
                False: not checked; the put may overwrite data that another worker has written since.
            ack: whether to acknowledge the samples of the metadata, a leased claim or a part of one (see `ack`), in the
                same change: either both are durable, or neither happens. Held samples become live, unless `state` is
                given.
            return_meta: "written", or "all": return in the same call all current metadata of the samples, not only the
                part that this put wrote. At most 65,536 samples.
            timeout: seconds until the call fails; None: the client's. A put without capacity waits until then.

        Returns:
            The samples with the given fields, keys, groups, rollouts and custom_meta. With "all", they come with the
            metadata of all puts, as from `lookup_samples`: the fields that at least one of them has, and in `produced`
            which samples have which. `get_data` accepts it.

        Raises:
            InvalidArgumentError: row counts differ, keys are repeated, or the put is empty; `ack` without the samples
                of one leased claim, with a part of a group, or with `fenced=False`. FieldMismatchError: a field has
                another dtype, another number of dimensions, or a declared layout that does not allow these rows.
            UnsupportedObjectError: a Python object would need pickle; nothing was sent.
            KeyNotFoundError, AlreadyExistsError: a key does not fit `key_mode`.
            PartitionSealedError: new samples for a sealed partition, or an upsert there of columns that its samples
                already have, perhaps from another run; `key_mode="existing"` overwrites them.
            LeaseExpiredError: the metadata is of a leased claim whose samples are no longer leased to this worker,
                which has not acknowledged them either; nothing is written. See `ack` and `fenced`.
            StaleIncarnationError: the partition of the metadata was cleared.
            QuotaExceededError: no capacity until the deadline, or larger than the quota.
        """
        check_word("return_meta", return_meta, ("written", "all"))
        full_name, metadata = partition_of(self._namespace, target), metadata_of(target)
        if ack:
            check_ack(metadata, fenced=fenced)
        if metadata is not None:
            check_is_batch(metadata)
            if not metadata.size:  # a rank's empty batch: no call is made, so all ranks can run the same program
                if data is not None and any(len(column) for column in data.values()):
                    raise InvalidArgumentError(
                        "data has rows, but metadata names no samples; put one row for each", field="data"
                    )
                if ack:
                    await self._ack(metadata, timeout)
                return metadata
        deadline = self._deadline(timeout)
        known = {} if metadata is None else {spec.name: spec for spec in metadata.fields}

        def encode() -> tuple[Put, JointPut | None]:
            columns = encode_columns(data, known) if data is not None else []
            if metadata is not None:
                check_rows(metadata, columns)
            write = write_of(
                self._namespace,
                target=target,
                row_count=columns[0].row_count if columns else None,
                keys=keys,
                key_mode=key_mode,
                groups=groups,
                group_size=group_size,
                rollouts=rollouts,
                ends_rollouts=ends_rollouts,
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
            put, alone = await async_unless_light(encode, data, keys, groups, rollouts, custom_meta)
            if refused is not None and refused_specs == [column.spec for column in put.columns]:
                raise refused  # not because of its lists: the same columns would be refused again
            began_at = time.perf_counter()
            try:
                written = await self._write(put, alone, deadline)
            except FieldMismatchError as error:
                # Lists are encoded again in the layout of their field, which only the service knows.
                if knows_held or not has_lists(data):
                    raise
                refused, refused_specs = error, [column.spec for column in put.columns]
                continue
            if put.columns:
                _measured(began_at, put.size_bytes)
            break
        if knows_held and full_name not in self._refused_lists:
            self._refused_lists.append(full_name)  # fields are queried first from now on, to send lists only once
        return written

    async def put_groups(
        self,
        partition_id: str,
        data: Any,
        *,
        groups: NameColumn,
        existing: bool = False,
        timeout: float | None = None,
    ) -> None:
        """Put data shared by the samples of a group, such as the image of their prompt: stored once per group.

        Declare the fields with `FieldSpec(..., scope="group")` when you create the partition. A sample has such a field
        once its group has a value, in whichever order they were put; a sample without a group never has it. A
        rollout in a group has the fields of that group. Values are freed with the last sample of their group. A group
        without samples keeps them until the partition is sealed, or `clear_samples(groups=...)` names it.

        Args:
            partition_id: the partition.
            data: as for `put`, one row per group. Existing values are replaced completely.
            groups: `n` distinct group names: a list, or an array of text; at most 16,384 per call.
            existing: whether all groups must already have samples. Such a put may use the reserve for columns of
                existing samples, so a full service can still drain.
            timeout: seconds until the call fails; None: the client's. A put without capacity in the storage services
                waits until then. It does not wait for the limits of the partition, but its bytes count towards them,
                so new samples may wait.

        Raises:
            InvalidArgumentError: a field is not declared with this scope, or a group name is repeated or empty.
                FieldMismatchError: a field has another dtype, number of dimensions or layout.
            PartitionNotFoundError: the partition does not exist.
            PartitionSealedError: the partition is sealed, and lacks one of the groups.
            NotFoundError: with `existing`, a group is without samples; nothing is written.
            AlreadyExistsError: a field is write-once, and a group already has a value.
            QuotaExceededError: no capacity until the deadline, or larger than the quota.
        """
        deadline = self._deadline(timeout)
        full_name = self._namespace.full_name(partition_id)
        known = await self._fields_of(full_name, deadline) if has_lists(data) else {}

        def encode() -> JointPut:
            columns = encode_columns(data, known)
            write = write_of(
                self._namespace,
                target=partition_id,
                row_count=columns[0].row_count,
                keys=None,
                key_mode="existing" if existing else None,
                groups=groups,
                custom_meta=None,
                of_groups=True,
            )
            check_group_rows(write, columns)
            return JointPut((Put(columns=columns, write=write, for_existing_rows=existing),))

        joint = await async_unless_light(encode, data, groups)
        began_at = time.perf_counter()
        await self._send(joint, deadline)
        for probe in probes:
            probe.put(time.perf_counter() - began_at, sum(column.value_bytes for column in joint.columns))

    async def append(
        self, metadata: BatchMeta, data: Any, *, at: Iterable[int], timeout: float | None = None
    ) -> BatchMeta:
        """Append to jagged fields of unfinished samples; only the new values are sent and stored.

        The samples are held and leased to the caller: slots, or samples claimed by `get_meta(held=True, lease=...)`.
        The value of a cell is the concatenation of everything appended to it, in order, along the first dimension of
        its rows; `get_data` returns it as one value. A field that does not exist is created: jagged, with the dtype of
        the data. A cell accepts 1,024 appends; a `put` of the field replaces them all by one value. A batch that was
        claimed or looked up before an append refers to the older cells: pass the batch returned here to `get_data`.

        Args:
            metadata: the samples, of one leased claim.
            data: as for `put`, without objects and scalars: the values to append to each of `n` samples.
            at: `n` lengths in the first dimension that the fields of `data` have before the append; 0 for a field that
                a sample lacks. Fields with other lengths need separate calls.
            timeout: seconds until the call fails; None: the client's. An append without capacity waits until then.

        Returns:
            The samples, with the fields of `data`.

        Raises:
            PreconditionError: a field of a sample has another length (reason LENGTH_MISMATCH, with `got` and
                `expected`), a sample is not held (SAMPLE_NOT_HELD), or has been appended to too often
                (TOO_MANY_EXTENTS). Nothing is written.
            LeaseExpiredError: samples are no longer leased to this worker, or were acknowledged; nothing is written.
            FieldMismatchError: a field has another dtype or shape, or cannot be jagged.
            InvalidArgumentError: `metadata` is not one leased claim, or counts differ.
            QuotaExceededError: no capacity until the deadline, or larger than the quota.
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
        self, metadata: BatchMeta, *, to: Iterable[int], data_fields: Iterable[str], timeout: float | None = None
    ) -> None:
        """Discard the values of jagged fields of unfinished samples beyond a length.

        A field cut to length 0 is no longer produced, as if it had never been put. The last appends are freed first,
        each as a unit: the bytes of an append that is cut are freed once all of it is discarded.

        Args:
            metadata: the samples, held and of one leased claim; see `append`.
            to: `n` lengths in the first dimension; all these fields of a sample are cut to its length.
            data_fields: the fields; a field that a sample lacks has length 0.
            timeout: seconds until the call fails; None: the client's.

        Raises:
            PreconditionError: a field of a sample is shorter (reason LENGTH_MISMATCH, with `got` and `expected`), or
                a sample is not held (SAMPLE_NOT_HELD); nothing is cut.
            LeaseExpiredError: samples are no longer leased to this worker, or were acknowledged; nothing is cut.
            FieldMismatchError: a field is not jagged in its first dimension.
            InvalidArgumentError: `metadata` is not a single leased claim, `to` does not have one length per sample,
                or `data_fields` is empty.
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
        """Return the fields of a partition by name; empty if it does not exist."""
        try:
            return await self._fields_of(full_partition_id, deadline)
        except PartitionNotFoundError:
            return {}

    def _alone(self, put: Put) -> JointPut | None:
        """Return a put that is sent separately; None if it may be gathered with others."""
        may_be_gathered = self.gathers_puts and put.likeness is not None
        is_gathered = may_be_gathered and time.monotonic() >= self._apart.get(put.write.partition_id, 0.0)
        return None if is_gathered else JointPut((put,))

    async def _write(self, put: Put, alone: JointPut | None, deadline: Deadline) -> BatchMeta:
        """Write the put of one call: separately, or together with puts of other calls at the same moment."""
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
        """Send the batch of a caller, and record the answer of the service.

        Raises:
            TqError: the outcome of the batch is unknown, so another caller must continue with it; or the service
                refused the batch, which has only one put.
        """
        if leader.line.batches:
            await async_sleep(0)  # include puts made in the same iteration of the event loop
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
                    raise leader.overdue() from error  # its last try was short; earlier failures are more useful
                raise
            if seconds is not None:  # each put waits for capacity separately, as do those of the next seconds
                self._keep_apart(leader.put.write.partition_id, seconds)
        lines.end(batch, answered)

    def _keep_apart(self, full_partition_id: str, seconds: float) -> None:
        """Send the next puts to a partition separately, for some seconds."""
        now = time.monotonic()
        for name, until in list(self._apart.items()):
            if until < now:
                self._apart.pop(name, None)
        self._apart[full_partition_id] = now + seconds

    def _lines(self) -> Lines:
        """Return the lines of this event loop or process, and drop lines of homes that no longer exist."""
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
        """Send puts and commit them. If a service becomes unavailable in between, start again.

        Args:
            joint: the puts.
            deadline: of all tries together.
            note: called with the failure of each try.
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
                # The put was lost before its commit: the service restarted, or the put waited too long.
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
        """Choose the storage service for a put, and complete its header."""
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
        """Commit a put stored by a storage service."""
        commit = commit_pb2.CommitRequest(
            request_id=request.request_id,
            write=request.write,
            placement=commit_pb2.PutPlacement(storage=answer.storage, put_id=header.put_id, receipt=answer.receipt),
            columns=header.columns,
            return_all_meta=request.return_all_meta,
        )
        # If the controller stays unavailable, the put is sent again, perhaps to another storage service.
        patience = Deadline.after(min(_COMMIT_PATIENCE_SECONDS, deadline.remaining()))
        try:
            return await self._calls.retried(
                lambda: self._calls.unary_once(commit_pb2.CommitResponse, commit, deadline), patience, note
            )
        except UnavailableError as given_up:  # the message counts the tries of the entire put, not those of the commit
            raise given_up.__cause__ or given_up from None

    async def allocate(
        self,
        partition_id: str,
        fields: Iterable[FieldSpec],
        row_count: int,
        *,
        lengths: Mapping[str, ArrayLike] = MappingProxyType({}),
        timeout: float | None = None,
    ) -> TensorDict:
        """Allocate columns to fill in place and put once. On the host of the service, that put copies nothing.

        Put all of them, in the same order, to the same partition. The put is then only a commit, and the columns are
        the stored data: do not write to them afterwards, allocate new ones. If the service does not share memory
        with this process, or stores puts outside its memory (data directory, mirror), the columns are ordinary memory.
        The put then copies them. Any other put of them copies too. Their initial contents are undefined. A forked child
        must not use them.

        The capacity is reserved until the put is cleared. Columns that are not put within `put_ttl_seconds` of the
        service lose it: a later put copies.

        Args:
            partition_id: the partition of the later put.
            fields: name, dtype and row shape of each field; ragged dimensions of jagged fields are -1.
            row_count: number of samples.
            lengths: by jagged field, the size of each row `(n,)`; with several ragged dimensions `(n, dims)`.
            timeout: seconds until the call fails; None: the client's. It waits for capacity until then.

        Returns:
            A TensorDict of batch size `[n]`, or a dict, as `get_data` returns it.

        Raises:
            InvalidArgumentError: a field has objects, or its size is unknown.
            QuotaExceededError: no capacity until the deadline, or larger than the quota.
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
        rollouts: GroupColumn | None = None,
        ends_rollouts: bool = False,
        custom_meta: MetaGiven | None = None,
        state: StateGiven | None = None,
        timeout: float | None = None,
    ) -> BatchMeta:
        """Create `row_count` samples without data; `put` with the returned metadata adds columns.

        Args:
            partition_id: the partition; created on first use.
            row_count: number of samples; None: the number of keys, custom_meta, groups or rollouts.
            keys: unique keys; at most 16,384 per call.
            groups: their groups, None for a sample without one; at most 16,384 per call.
            group_size: number of members that completes each of these groups: rollouts, and samples without one.
            rollouts: their rollouts, see `put`.
            ends_rollouts: whether these rollouts get no further samples.
            custom_meta: mappings of names to JSON values, or columns; see `put`, also for the forms of keys and groups.
            state: "live" (default), "held" or "failed".
            timeout: seconds until the call fails; None: the client's.

        Raises:
            AlreadyExistsError: a key exists already.
            PartitionSealedError: the partition is sealed.
        """
        deadline = self._deadline(timeout)

        def encode() -> tuple[Put, JointPut | None]:
            write = write_of(
                self._namespace,
                target=partition_id,
                row_count=row_count,
                keys=keys,
                key_mode="new" if keys is not None else None,
                groups=groups,
                group_size=group_size,
                rollouts=rollouts,
                ends_rollouts=ends_rollouts,
                custom_meta=custom_meta,
                state=state,
            )
            put = Put(kind=pb.InsertResponse, write=write)
            return put, self._alone(put)

        put, alone = await async_unless_light(encode, keys, groups, rollouts, custom_meta)
        return await self._write(put, alone, deadline)

    async def set_custom_meta(
        self, metadata: BatchMeta, custom_meta: MetaGiven, *, fenced: bool = True, timeout: float | None = None
    ) -> None:
        """Write custom_meta of samples; values merge with existing ones.

        Args:
            metadata: the samples.
            custom_meta: a mapping of names to JSON values for each sample, or columns, see `put`; None removes a value.
            fenced: whether to refuse the call once samples of a leased claim are no longer this worker's, see `put`.
            timeout: seconds until the call fails; None: the client's.

        Raises:
            InvalidArgumentError: a value is not a JSON value, or is too large.
            SampleNotFoundError: a sample was cleared.
            LeaseExpiredError: samples of a leased claim are no longer this worker's, see `put`; nothing is written.
            StaleIncarnationError: the partition was cleared and created again.
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
        rollouts: Iterable[str] | None = None,
        where: Iterable[tuple[str, str, Any]] = (),
        task_name: str | None = None,
        min_count: int | None = None,
        max_wait: float = 0.0,
        missing_ok: bool = False,
        limit: int | None = None,
        timeout: float | None = None,
    ) -> tuple[BatchMeta, list[Any]]:
        """Return samples with all their metadata, and the names without a sample.

        The samples come with their keys, groups, rollouts and custom_meta, the fields that at least one of them has,
        and in `produced` which samples have which.

        Large results are read page by page, each as of its moment: samples cleared or inserted during the call may be
        included or not.

        Args:
            partition_id: the partition.
            keys: keys of samples.
            global_indexes: or their indexes,
            groups: or groups, for all of their members,
            rollouts: or rollouts, for all of their samples. None of these: every sample of the partition, including
                held and failed ones.
            where: conditions `(column, operator, value)` on custom_meta, as for `get_meta`; a sample must satisfy all
                of them.
            task_name: a consumer: `consumed`, `leased` and `dead_lettered` of the answer then show the state of each
                sample for this task.
            min_count: number of matching samples to wait for; None: one.
            max_wait: seconds to wait for them, and for the partition. After that, the call returns the samples that
                exist. It returns earlier if there will never be enough: the partition is sealed with fewer samples. 0:
                it returns at once and ignores `min_count`.
            missing_ok: whether to treat a missing partition as empty, and a task that has not claimed yet as having
                consumed nothing.
            limit: maximum number of samples to examine, starting with the first; None: all. More than 16,384 names are
                looked up in parts, each with this limit.
            timeout: seconds beyond `max_wait` until the call fails; None: the client's.

        Returns:
            The samples, and the keys, indexes, groups or rollouts without any sample. Named samples come in the order
            requested, all others in insertion order.

        Raises:
            PartitionNotFoundError: the partition does not exist, unless `missing_ok`.
            TaskNotFoundError: the task has not claimed anything yet, unless `missing_ok`; or the partition was
                created for other tasks.
            StaleIncarnationError: the partition was cleared between two pages; PartitionClearedError: while the call
                waited.
            InvalidArgumentError: samples are named in two ways, or too many to wait for (16,384), or a condition does
                not fit its column.
        """
        wait = seconds("max_wait", max_wait)
        deadline = self._deadline(timeout, wait)
        name, named = named_samples(keys=keys, global_indexes=global_indexes, groups=groups, rollouts=rollouts)
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
        if name in {"groups", "rollouts"} and len(named) > NAMED_AT_ONCE:
            found = found.select_samples(np.argsort(found.indexes))
        return found, missing

    async def _first_page(
        self, request: pb.LookupSamplesRequest, wait: Deadline, deadline: Deadline
    ) -> pb.LookupSamplesResponse:
        """Poll until there are enough samples or the wait is spent: the server may cap how long one call waits."""

        async def attempt(max_wait: float) -> pb.LookupSamplesResponse:
            request.ClearField("max_wait")
            if max_wait:
                request.max_wait.CopyFrom(to_duration(max_wait))
            return await self._calls.unary_once(pb.LookupSamplesResponse, request, deadline)

        answer = await self._calls.polled(attempt, lambda page: page.not_yet, wait, deadline)
        request.ClearField("max_wait")
        return answer

    async def tags(
        self, partition_id: str, keys: Iterable[str] | None = None, *, timeout: float | None = None
    ) -> dict[str, dict[str, Any]]:
        """Return the custom_meta of samples by key.

        Args:
            partition_id: the partition.
            keys: the keys; those that do not exist are left out. None: all samples with a key.
            timeout: seconds until the call fails; None: the client's.

        Raises:
            PartitionNotFoundError: the partition does not exist.
        """
        found, _ = await self.lookup_samples(partition_id, keys, timeout=timeout)
        return {key: meta for key, meta in zip(found.keys, found.custom_meta, strict=True) if key}

    async def clear_samples(
        self,
        target: Target,
        *,
        keys: Iterable[str] | None = None,
        global_indexes: Iterable[int] | None = None,
        groups: Iterable[str] | None = None,
        rollouts: Iterable[str] | None = None,
        skipped_by: str = "",
        where: Iterable[tuple[str, str, Any]] = (),
        task_name: str = "",
        missing_ok: bool = False,
        fenced: bool = True,
        timeout: float | None = None,
    ) -> int:
        """Remove samples; unknown keys, indexes, groups and rollouts are ignored.

        Args:
            target: the metadata of the samples, or the partition, with one of the following.
            keys: keys of samples,
            global_indexes: or their indexes,
            groups: or groups, all of whose members are removed,
            rollouts: or, alone or with groups, rollouts, all of whose samples are removed,
            skipped_by: or a task: all samples are removed that it will never get, as counted in its `skipped_count`:
                samples that failed before it took them, its dead-lettered ones, and the rest of groups that lost a
                member while the task needs complete groups. Other tasks may still need them.
            where: conditions `(column, operator, value)` on custom_meta; a sample must satisfy all of them when it is
                removed. If nothing else names samples, all that satisfy them are removed.
            task_name: restricts this to samples left for this task and not leased by a worker of any task.
            missing_ok: whether to return 0 if the partition does not exist, instead of raising an error.
            fenced: whether to refuse the call once samples of a leased claim are no longer this worker's, see `put`.
            timeout: seconds until the call fails; None: the client's.

        Returns:
            The number of samples removed.

        Raises:
            PartitionNotFoundError: the partition does not exist.
            StaleIncarnationError: the partition of the metadata was cleared and created again.
            LeaseExpiredError: samples of a leased claim are no longer this worker's, see `put`; none is removed.
            TaskNotFoundError: `skipped_by` or `task_name` has not claimed samples of the partition yet.
            InvalidArgumentError: samples are named in addition to groups, rollouts or `skipped_by`, or a condition
                does not fit its column.
        """
        request = changed_samples(
            pb.ClearSamplesRequest,
            self._namespace,
            target,
            keys=keys,
            global_indexes=global_indexes,
            groups=groups,
            rollouts=rollouts,
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

    async def clear_fields(
        self,
        target: Target,
        *,
        data_fields: Iterable[str],
        keys: Iterable[str] | None = None,
        global_indexes: Iterable[int] | None = None,
        groups: Iterable[str] | None = None,
        rollouts: Iterable[str] | None = None,
        skipped_by: str = "",
        where: Iterable[tuple[str, str, Any]] = (),
        task_name: str = "",
        missing_ok: bool = False,
        fenced: bool = True,
        timeout: float | None = None,
    ) -> int:
        """Clear fields of samples: their values are freed, and the samples stay.

        Keys, groups, rollouts, custom_meta and consumption of the samples stay. A cleared value counts as never put:
        `get_data` raises `CellNotFoundError`, tasks that need the field wait for it, and it can be put again, also into
        a `write_once` field. So clear a field after its last reader.

        Args:
            target: the metadata of the samples, or the partition, with a selection as for `clear_samples`.
            data_fields: the fields, at least one.
            keys: keys of samples,
            global_indexes: or their indexes,
            groups: or groups, whose samples lose the fields. Fields with group scope can be cleared only in this way,
                without `where` and `task_name`, since all samples of a group share the value.
            rollouts: or, alone or with groups, rollouts, whose samples lose the fields,
            skipped_by: or a task: all samples that it will never get lose the fields.
            where: conditions on custom_meta that a sample must satisfy at this moment.
            task_name: restricts this to samples left for this task and not leased by a worker of any task.
            missing_ok: whether to treat a partition or field that does not exist as having nothing to clear, instead of
                raising an error.
            fenced: whether to refuse the call once samples of a leased claim are no longer this worker's, see `put`.
            timeout: seconds until the call fails; None: the client's.

        Returns:
            The number of values cleared: at most the samples times the fields. A value shared by a group counts once.

        Raises:
            PartitionNotFoundError: the partition does not exist.
            FieldNotFoundError: no sample ever had one of the fields.
            StaleIncarnationError: the partition of the metadata was cleared and created again.
            LeaseExpiredError: samples of a leased claim are no longer this worker's, see `put`; nothing is cleared.
            TaskNotFoundError: `skipped_by` or `task_name` has not claimed samples of the partition yet.
            InvalidArgumentError: `data_fields` is empty, or has a field with group scope and the samples are not
                selected by groups alone; or see `clear_samples`.
        """
        request = changed_samples(
            pb.ClearFieldsRequest,
            self._namespace,
            target,
            keys=keys,
            global_indexes=global_indexes,
            groups=groups,
            rollouts=rollouts,
            where=where,
            task_name=task_name,
            skipped_by=skipped_by,
            missing_ok=missing_ok,
            fenced=fenced,
            data_fields=data_fields,
        )
        if request is None:
            return 0
        answer = await self._calls.unary(pb.ClearFieldsResponse, request, self._deadline(timeout))
        return answer.cleared_count

    async def fail_samples(
        self,
        target: Target,
        *,
        keys: Iterable[str] | None = None,
        global_indexes: Iterable[int] | None = None,
        groups: Iterable[str] | None = None,
        rollouts: Iterable[str] | None = None,
        where: Iterable[tuple[str, str, Any]] = (),
        task_name: str = "",
        fenced: bool = True,
        timeout: float | None = None,
    ) -> int:
        """Mark samples as failed: they count as done for all tasks, and their bytes are freed. This cannot be undone.

        Keys, groups, rollouts and custom_meta stay; rollouts with a failed sample are closed. Samples that do not
        exist or have already failed are ignored.

        Args:
            target: the metadata of the samples, or the partition, with one of the following.
            keys: keys of samples,
            global_indexes: or their indexes,
            groups: or groups, all of whose members fail,
            rollouts: or, alone or with groups, rollouts, all of whose samples fail.
            where: conditions `(column, operator, value)` on custom_meta; a sample must satisfy all of them when it is
                marked as failed. If nothing else names samples, all that satisfy them fail.
            task_name: restricts this to samples left for this task and not leased by a worker of any task.
            fenced: whether to refuse the call once samples of a leased claim are no longer this worker's, see `put`.
            timeout: seconds until the call fails; None: the client's.

        Returns:
            The number of samples marked as failed by this call.

        Raises:
            PartitionNotFoundError: the partition does not exist.
            StaleIncarnationError: the partition of the metadata was cleared and created again.
            LeaseExpiredError: samples of a leased claim are no longer this worker's, see `put`; none fails.
            TaskNotFoundError: the task has not claimed samples of the partition yet.
            InvalidArgumentError: samples are named in addition to groups or rollouts, or a condition does not fit its
                column.
        """
        request = changed_samples(
            pb.FailSamplesRequest,
            self._namespace,
            target,
            keys=keys,
            global_indexes=global_indexes,
            groups=groups,
            rollouts=rollouts,
            where=where,
            task_name=task_name,
            fenced=fenced,
        )
        if request is None:
            return 0
        answer = await self._calls.unary(pb.FailSamplesResponse, request, self._deadline(timeout))
        return answer.failed_count
