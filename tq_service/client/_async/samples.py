"""Calls that write, look up and remove samples.

To put samples, the client chooses a storage service, sends the data to that service, and commits the put with the
controller.
"""

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
    """Report the duration and size of a put with columns to the probes."""
    if (collected := collected_here.get()) is not None:
        collected.note(Stage.PUT, began_at, size_bytes=size_bytes, is_call=True)
    for probe in probes:
        probe.put(time.perf_counter() - began_at, size_bytes)


class AsyncSampleCalls(AsyncBase):
    """The client's producer calls. See `AsyncClient`."""

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
        """Write columns and metadata of `n` samples atomically.

            client.put("train", {"prompt": prompts}, keys=names)  # new samples of a partition
            client.put(batch, {"reward": rewards})                # more columns for the samples of a batch

        Readers see either the entire put or none of it. Existing values are overwritten. Samples that a task has
        already consumed remain consumed.

        Concurrent small puts are combined into one call; see `AsyncClient`.

        Do not modify the data until the put returns. Large tensors are sent without being copied, and the async client
        encodes large data in a background thread.

        Args:
            target: the partition that contains the samples named by `keys`, or that receives the new samples. The first
                put creates the partition. To write to existing samples, pass their metadata instead.
            data: a TensorDict, or a dict of columns. A dense column is a tensor or array of shape `(n, ...)`, or a list
                of `n` numbers (stored as int64, float64 or bool). A nested tensor with the jagged layout is a jagged
                column. A list of lists of numbers, or of tensors with at least one dimension, is jagged if the row
                shapes differ, and dense otherwise. A list of strings, bytes, None, JSON-like values or dicts that
                contain tensors is a column of objects. A field of objects accepts any list. Object arrays,
                `NonTensorStack` and `NonTensorData` are always stored as objects. A `NonTensorData` contains a single
                value that all rows share, as in tensordict's `tolist()`. If None, only metadata or state is written.
            keys: `n` unique keys, as a list or an array of strings. A call accepts at most 16,384 keys.
            key_mode: "upsert" (default) updates the sample with each key, or creates a sample if the key is new. "new"
                requires that no sample has any of the keys. "existing" requires that every key belongs to a sample.
            groups: the group of each new sample. A call with `groups` accepts at most 16,384 samples. For a sample
                without a group, pass None in a list, or "" in an array of strings.
            group_size: number of members in a complete group. A member is either a rollout or a sample without a
                rollout.
            rollouts: the rollout of each new sample, in the same form as `groups`. For example, a rollout's samples can
                be an agent's turns. A rollout belongs to the group of its first sample.
            ends_rollouts: whether to close the rollouts of these samples, after which no more samples can join these
                rollouts. Rollouts of existing samples are closed too.
            custom_meta: `n` mappings of names to JSON values, or one mapping of names to arrays, tensors or lists of
                `n` values. The second form is much faster for many samples. New values are merged with existing values.
                None removes a value, and `tq.JSON_NULL` stores null. The first number, bool or string stored under a
                name determines the type of that custom_meta column. Claims compare and order only values of the
                column's type.
            state: the state of the samples: "live" (default for new samples), "held" or "failed".
            fenced: whether to reject the put if the samples come from a leased claim whose lease this worker no longer
                holds. If False, the put may overwrite newer data from another worker.
            ack: whether to also acknowledge the samples, so that the data and acknowledgement become durable
                together. `target` must be a leased claim or part of a leased claim; see `ack`. Held samples become live
                unless `state` is set.
            return_meta: "written" returns the metadata written by this put. "all" returns all current metadata of the
                samples, and is limited to 65,536 samples.
            timeout: seconds until the call fails. Defaults to the client's `timeout`. The timeout includes the time
                spent waiting for capacity.

        Returns:
            The samples' metadata, including the fields, keys, groups, rollouts and custom_meta of this put. With
            `return_meta="all"`, the batch contains all current metadata of the samples, like a batch returned by
            `lookup_samples`. `fields` lists every field that at least one sample has, and `produced` shows which
            samples have each field. Pass the batch to `get_data` to read the data.

        Raises:
            InvalidArgumentError: row counts differ, keys are repeated, or the put is empty. With `ack`, the error is
                also raised if `fenced` is False, if the samples split a group, or if they do not come from a single
                leased claim.
            FieldMismatchError: a field has a different dtype or number of dimensions, or its declared layout does not
                allow these rows.
            UnsupportedObjectError: a Python object could only be stored by pickling, which is not supported. Nothing
                was sent.
            KeyNotFoundError, AlreadyExistsError: a key is missing with `key_mode="existing"`, or already exists with
                `key_mode="new"`.
            PartitionSealedError: the partition is sealed, and the put adds new samples or upserts columns that existing
                samples already have. These columns may come from another run. To overwrite these columns, set
                `key_mode="existing"`.
            LeaseExpiredError: the lease on some samples of a claim ended before this worker acknowledged them. Nothing
                is written. See `ack` and `fenced`.
            StaleIncarnationError: the partition was cleared after the samples' metadata was returned.
            QuotaExceededError: no capacity became available before the deadline, or the put is larger than the quota.
        """
        check_word("return_meta", return_meta, ("written", "all"))
        full_name, metadata = partition_of(self._namespace, target), metadata_of(target)
        if ack:
            check_ack(metadata, fenced=fenced)
        if metadata is not None:
            check_is_batch(metadata)
            if not metadata.size:  # make no call for an empty batch, so that all ranks can run identical code
                if data is not None and any(len(column) for column in data.values()):
                    raise InvalidArgumentError(
                        "data has rows, but metadata contains no samples; provide one row per sample", field="data"
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
                raise refused  # the lists are encoded as before, so the service would reject them again
            began_at = time.perf_counter()
            try:
                written = await self._write(put, alone, deadline)
            except FieldMismatchError as error:
                # The service knows the layout of the field, so get the layout and encode the lists again.
                if knows_held or not has_lists(data):
                    raise
                refused, refused_specs = error, [column.spec for column in put.columns]
                continue
            if put.columns:
                _measured(began_at, put.size_bytes)
            break
        if knows_held and full_name not in self._refused_lists:
            self._refused_lists.append(full_name)  # later puts query the fields first and send lists only once
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
        """Write data shared by the samples of a group, such as a prompt's image. Each value is stored once per group.

        Declare the fields with `FieldSpec(..., scope="group")` when you create the partition. Once a group has a value,
        all samples in the group have the field, whether they were put before or after the value. Samples without a
        group never have the field. A rollout that belongs to a group has the group's fields. A group's values are freed
        when its last sample is removed. If a group has no samples yet, its values are kept until the partition is
        sealed or `clear_samples(groups=...)` clears the group.

        Args:
            partition_id: the partition.
            data: one row per group, in the forms accepted by `put`. Existing values are completely replaced.
            groups: `n` distinct group names, as a list or an array of strings. A call accepts at most 16,384 groups.
            existing: whether to require that all groups already have samples. A put with `existing` may use the
                capacity reserved for columns of existing samples, so a full service can still be drained.
            timeout: seconds until the call fails. Defaults to the client's `timeout`. The timeout includes the time
                spent waiting for capacity in the storage services. The partition's limits do not delay the put, but its
                bytes count toward these limits and may delay puts of new samples.

        Raises:
            InvalidArgumentError: a field is not declared with group scope, or a group name is repeated or empty.
            FieldMismatchError: a field has a different dtype, number of dimensions or layout.
            PartitionNotFoundError: the partition does not exist.
            PartitionSealedError: the partition is sealed and does not contain all of the groups.
            NotFoundError: `existing` is set, and a group has no samples. Nothing is written.
            AlreadyExistsError: a group already has a value in a write-once field.
            QuotaExceededError: no capacity became available before the deadline, or the put is larger than the quota.
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
        """Append values to jagged fields of unfinished samples. Only the new values are sent and stored.

        The samples must be held and leased to the caller. Such samples are either slots, or samples claimed with
        `claim(held=True, lease=...)`. Appended values are concatenated in order along the first dimension, and
        `get_data` returns them as one value. A field that does not exist is created as a jagged field with the dtype of
        the data. A cell accepts at most 1,024 appends. A `put` of the field replaces all appended values with one
        value. To read the data, pass the returned batch to `get_data`. A batch claimed or looked up before the append
        does not include the appended values.

        Args:
            metadata: samples from one leased claim.
            data: the values to append to each of the `n` samples, in the forms accepted by `put`, except objects and
                scalars.
            at: for each of the `n` samples, the current length of its fields in the first dimension. The length is 0 if
                the sample does not have the field. All fields of `data` must have this length. Append fields with
                different lengths in separate calls.
            timeout: seconds until the call fails. Defaults to the client's `timeout`. The timeout includes the time
                spent waiting for capacity.

        Returns:
            The samples' metadata, including the fields of `data`.

        Raises:
            PreconditionError: the length of a sample's field differs from `at` (reason LENGTH_MISMATCH, with `got` and
                `expected`), a sample is not held (SAMPLE_NOT_HELD), or a cell has too many appends (TOO_MANY_EXTENTS).
                Nothing is written.
            LeaseExpiredError: a sample is no longer leased to this worker, or was acknowledged. Nothing is written.
            FieldMismatchError: a field has a different dtype or shape, or cannot be jagged.
            InvalidArgumentError: `metadata` does not belong to a single leased claim, or `at` or `data` does not have
                one value per sample.
            QuotaExceededError: no capacity became available before the deadline, or the append is larger than the
                quota.
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
        """Truncate jagged fields of unfinished samples.

        A field truncated to length 0 is treated as if it had never been put. The bytes of an append are freed once all
        of its values have been discarded.

        Args:
            metadata: held samples from one leased claim; see `append`.
            to: the new length of each sample's fields in the first dimension, as `n` values. All fields in
                `data_fields` are truncated to this length.
            data_fields: the fields to truncate. If a sample does not have a field, the field is treated as having
                length 0.
            timeout: seconds until the call fails. Defaults to the client's `timeout`.

        Raises:
            PreconditionError: a field of a sample is shorter than the new length (reason LENGTH_MISMATCH, with `got`
                and `expected`), or a sample is not held (SAMPLE_NOT_HELD). No field is changed.
            LeaseExpiredError: a sample is no longer leased to this worker, or was acknowledged. No field is changed.
            FieldMismatchError: a field is not jagged in its first dimension.
            InvalidArgumentError: `metadata` does not belong to a single leased claim, `to` does not contain one length
                per sample, or `data_fields` is empty.
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
        """Return a dict of a partition's fields, keyed by name, or an empty dict if the partition does not exist."""
        try:
            return await self._fields_of(full_partition_id, deadline)
        except PartitionNotFoundError:
            return {}

    def _alone(self, put: Put) -> JointPut | None:
        """Return a joint put that contains only this put, or None if the put may be combined with other puts."""
        may_be_gathered = self.gathers_puts and put.likeness is not None
        is_gathered = may_be_gathered and time.monotonic() >= self._apart.get(put.write.partition_id, 0.0)
        return None if is_gathered else JointPut((put,))

    async def _write(self, put: Put, alone: JointPut | None, deadline: Deadline) -> BatchMeta:
        """Send a put, either separately or combined with concurrent puts from other calls."""
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
        """Send the leader's batch of puts, and record the response.

        Raises:
            TqError: the outcome of the batch is unknown, so another caller must resend the batch. This error is also
                raised if the service rejected a batch that contains only one put.
        """
        if leader.line.batches:
            await async_sleep(0)  # let puts from the same event-loop iteration join
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
                    raise leader.overdue() from error  # the last attempt was short, so report earlier failures
                raise
            if seconds is not None:  # send puts separately for some seconds; each then waits for capacity
                self._keep_apart(leader.put.write.partition_id, seconds)
        lines.end(batch, answered)

    def _keep_apart(self, full_partition_id: str, seconds: float) -> None:
        """For the next `seconds` seconds, send each put to the partition separately."""
        now = time.monotonic()
        for name, until in list(self._apart.items()):
            if until < now:
                self._apart.pop(name, None)
        self._apart[full_partition_id] = now + seconds

    def _lines(self) -> Lines:
        """Return the lines of this event loop or process, and drop the lines of loops and processes that have ended."""
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
        """Send and commit puts. If a service becomes unavailable before the commit, start again.

        Args:
            joint: the puts to send.
            deadline: overall deadline for all attempts.
            note: function called with the error of each failed attempt.
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
                # The put was lost before its commit, because the service restarted or the put exceeded its time limit.
                if not isinstance(error, DataLossError | PutNotFoundError) or loss_count == _MOST_LOSSES:
                    raise
                loss_count += 1
                joint.header.put_id = new_id()  # the service may still be freeing the lost put
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
        """Choose the storage service for a put, and fill in the rest of the put header."""
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
        """Commit a put after a storage service has stored the data."""
        commit = commit_pb2.CommitRequest(
            request_id=request.request_id,
            write=request.write,
            placement=commit_pb2.PutPlacement(storage=answer.storage, put_id=header.put_id, receipt=answer.receipt),
            columns=header.columns,
            return_all_meta=request.return_all_meta,
        )
        # If the controller remains unavailable, the caller sends the put again, perhaps to another storage service.
        patience = Deadline.after(min(_COMMIT_PATIENCE_SECONDS, deadline.remaining()))
        try:
            return await self._calls.retried(
                lambda: self._calls.unary_once(commit_pb2.CommitResponse, commit, deadline), patience, note
            )
        except UnavailableError as given_up:  # omit the commit's try count; the caller counts the put's tries
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
        """Allocate columns in shared memory so that a put on the service's host does not copy them.

        Fill in the columns, then put all of them into that partition with a single call, in the same order. Such a put
        sends only a commit, and the columns themselves become the stored data. Do not write to the columns after the
        put; allocate new columns instead. A put that omits some of the columns, reorders them, or writes to another
        partition copies the columns. If the service does not share memory with this process, or stores puts elsewhere
        (data directory, mirror), the columns use ordinary memory. The put then copies them. The initial contents of the
        columns are undefined. A forked child process must not use the columns.

        The allocation occupies capacity until the samples of the put are cleared. If the columns are not put within the
        service's `put_ttl_seconds`, the reservation expires, and a later put copies the columns.

        Args:
            partition_id: the partition into which the columns will be put.
            fields: name, dtype and row shape of each field. In a row shape, -1 marks a ragged dimension.
            row_count: number of samples.
            lengths: the row sizes of each jagged field, as an array of shape `(n,)`, or `(n, dims)` if several
                dimensions are ragged.
            timeout: seconds until the call fails. Defaults to the client's `timeout`. The timeout includes the time
                spent waiting for capacity.

        Returns:
            The columns in the form that `get_data` returns: a TensorDict with batch size `[n]`, or a dict.

        Raises:
            InvalidArgumentError: a field contains objects, or its size is unknown.
            QuotaExceededError: no capacity became available before the deadline, or the allocation is larger than the
                quota.
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
        """Create `row_count` samples without data. Pass the returned metadata to `put` to add columns.

        Args:
            partition_id: the partition, which is created if it does not exist.
            row_count: number of samples. Defaults to the length of `keys`, `custom_meta`, `groups` or `rollouts`.
            keys: unique keys. A call accepts at most 16,384 keys.
            groups: the group of each sample, or None for samples without a group. A call with `groups` accepts at most
                16,384 samples.
            group_size: number of members in a complete group. A member is either a rollout or a sample without a
                rollout.
            rollouts: the rollout of each sample; see `put`.
            ends_rollouts: whether to close these rollouts, after which no more samples can join them.
            custom_meta: mappings of names to JSON values, or columns. See `put` for the forms of `custom_meta`, `keys`
                and `groups`.
            state: the state of the samples: "live" (default), "held" or "failed".
            timeout: seconds until the call fails. Defaults to the client's `timeout`.

        Raises:
            AlreadyExistsError: a key already exists.
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
        """Write the custom_meta of samples. New values are merged with existing values.

        Args:
            metadata: the samples.
            custom_meta: a mapping of names to JSON values for each sample, or columns; see `put`. None removes a value.
            fenced: whether to reject the call if the samples come from a leased claim whose lease this worker no longer
                holds.
            timeout: seconds until the call fails. Defaults to the client's `timeout`.

        Raises:
            InvalidArgumentError: a value is too large or cannot be encoded as JSON.
            SampleNotFoundError: a sample was cleared.
            LeaseExpiredError: samples of a leased claim are no longer leased to this worker. Nothing is written.
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
        """Look up samples and return all their metadata.

        The metadata includes the samples' keys, groups, rollouts and custom_meta, and every field that at least one of
        the samples has. `produced` shows which samples have each field.

        Large results are read in pages. Samples inserted or cleared during the call may or may not be included.

        Args:
            partition_id: the partition.
            keys: keys of samples.
            global_indexes: indexes of samples, as an alternative to keys.
            groups: names of the groups whose members are looked up.
            rollouts: names of the rollouts whose samples are looked up. If no keys, indexes, groups or rollouts are
                passed, the call looks up all samples in the partition, including held and failed samples.
            where: conditions `(column, operator, value)` on custom_meta, as in `claim`. Only samples that satisfy all
                conditions are returned.
            task_name: a task. If set, the result's `consumed`, `leased` and `dead_lettered` attributes show the state
                of each sample for this task.
            min_count: number of matching samples to wait for. Defaults to 1.
            max_wait: maximum time to wait for the partition and for `min_count` samples, in seconds. After this time,
                the call returns the samples that exist. The call returns earlier if the partition is sealed with fewer
                samples. If 0, the call does not wait, and `min_count` is ignored.
            missing_ok: whether to treat a missing partition as empty, and a task without claims as having consumed no
                samples.
            limit: maximum number of samples to examine, starting with the first sample. If None, all samples are
                examined. If more than 16,384 names are passed, the limit applies separately to each request of up to
                16,384 names.
            timeout: seconds until the call fails, in addition to `max_wait`. Defaults to the client's `timeout`.

        Returns:
            The samples, and a list of the requested keys, indexes, groups or rollouts that match no sample. Samples
            requested by name are returned in the order of the names. Other samples are in insertion order.

        Raises:
            PartitionNotFoundError: the partition does not exist and `missing_ok` is False.
            TaskNotFoundError: the task has not claimed any samples yet and `missing_ok` is False, or the partition was
                created with a list of tasks that omits this task.
            StaleIncarnationError: the partition was cleared between the reads of two pages.
            PartitionClearedError: the partition was cleared while the call waited.
            InvalidArgumentError: samples are named by more than one argument, `max_wait` is set with more than 16,384
                names, or a condition does not match its column's type.
        """
        wait = seconds("max_wait", max_wait)
        deadline = self._deadline(timeout, wait)
        name, named = named_samples(keys=keys, global_indexes=global_indexes, groups=groups, rollouts=rollouts)
        if wait and len(named) > NAMED_AT_ONCE:
            raise InvalidArgumentError(
                f"max_wait is set for {len(named)} names; expected at most {NAMED_AT_ONCE}. To wait for more samples, "
                f"use a condition on custom_meta.",
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
        """Repeat the call until enough samples exist or `max_wait` has passed, and return the first page.

        The server may limit how long each call waits, so several calls may be needed.
        """

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
        """Return a dict that maps each sample's key to its custom_meta.

        Args:
            partition_id: the partition.
            keys: the keys to include. Keys that do not exist are omitted. Defaults to the keys of all samples in the
                partition.
            timeout: seconds until the call fails. Defaults to the client's `timeout`.

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
        """Remove samples. Keys, indexes, groups and rollouts that do not exist are ignored.

        Args:
            target: the metadata of the samples. To select samples with the arguments below, pass the partition instead.
            keys: keys of samples.
            global_indexes: indexes of samples, as an alternative to keys.
            groups: names of the groups whose members are removed.
            rollouts: names of the rollouts whose samples are removed. Can be combined with `groups`.
            skipped_by: a task. The call removes all samples that the task will never receive, which are counted in the
                task's `skipped_count`: samples that failed before the task claimed them, samples that the task
                dead-lettered, and samples that its sampler dropped. If the task needs complete groups, the remaining
                members of groups that lost a member are also removed. Other tasks may still need these samples.
            where: conditions `(column, operator, value)` on custom_meta. Only samples that satisfy all conditions are
                removed. Without any other selection, the conditions apply to all samples in the partition.
            task_name: a task. If set, the call affects only samples that this task can still receive and that are not
                leased to any worker.
            missing_ok: whether to return 0 instead of raising an error if the partition does not exist.
            fenced: whether to reject the call if the samples come from a leased claim whose lease this worker no longer
                holds.
            timeout: seconds until the call fails. Defaults to the client's `timeout`.

        Returns:
            The number of samples removed.

        Raises:
            PartitionNotFoundError: the partition does not exist.
            StaleIncarnationError: the partition was cleared and created again after the metadata was returned.
            LeaseExpiredError: samples of a leased claim are no longer leased to this worker. No sample is removed.
            TaskNotFoundError: the task named by `skipped_by` or `task_name` is not declared and has not claimed any
                samples from the partition yet.
            InvalidArgumentError: samples are specified in addition to groups, rollouts or `skipped_by`, or a condition
                does not match the type of its column.
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
        """Clear fields of samples. The values are freed, but the samples remain.

        The samples keep their keys, groups, rollouts, custom_meta and consumption status. A cleared value is treated as
        if it had never been put. `get_data` raises `CellNotFoundError`, and tasks that need the field wait for a new
        value. A new value can be put even if the field is `write_once`. Clear a field only when no task will read it
        again.

        Args:
            target: the metadata of the samples whose fields to clear. To select samples as in `clear_samples`, pass the
                partition instead.
            data_fields: the fields to clear. At least one field is required.
            keys: keys of samples.
            global_indexes: indexes of samples, as an alternative to keys.
            groups: names of groups. The fields of all samples in these groups are cleared. Fields with group scope,
                whose values are shared by all samples of a group, can be cleared only by group, without `where` or
                `task_name`.
            rollouts: names of rollouts. The fields of all samples in these rollouts are cleared. Can be combined with
                `groups`.
            skipped_by: a task. The call clears the fields of all samples that the task will never receive.
            where: conditions on custom_meta. Only the fields of samples that satisfy all conditions are cleared.
            task_name: a task. If set, the call affects only samples that this task can still receive and that are not
                leased to any worker.
            missing_ok: whether to return 0 instead of raising an error if the partition or a field does not exist.
            fenced: whether to reject the call if the samples come from a leased claim whose lease this worker no longer
                holds.
            timeout: seconds until the call fails. Defaults to the client's `timeout`.

        Returns:
            The number of cleared values. A value shared by a group counts once.

        Raises:
            PartitionNotFoundError: the partition does not exist.
            FieldNotFoundError: a field has never been put for any sample.
            StaleIncarnationError: the partition was cleared and created again after the metadata was returned.
            LeaseExpiredError: samples of a leased claim are no longer leased to this worker. No value is cleared.
            TaskNotFoundError: the task named by `skipped_by` or `task_name` is not declared and has not claimed any
                samples from the partition yet.
            InvalidArgumentError: `data_fields` is empty, a field has group scope but the samples are not selected by
                groups alone, or the selection is invalid (see `clear_samples`).
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
        """Irreversibly mark samples as failed. Failed samples count as done for all tasks, and their data is freed.

        The samples keep their keys, groups, rollouts and custom_meta. Rollouts with a failed sample are closed. Samples
        that do not exist or have already failed are ignored.

        Args:
            target: the metadata of the samples. To select samples with the arguments below, pass the partition instead.
            keys: keys of samples.
            global_indexes: indexes of samples, as an alternative to keys.
            groups: names of the groups whose members are marked as failed.
            rollouts: names of the rollouts whose samples are marked as failed. Can be combined with `groups`.
            where: conditions `(column, operator, value)` on custom_meta. Only samples that satisfy all conditions are
                marked as failed. Without any other selection, the conditions apply to all samples in the partition.
            task_name: a task. If set, the call affects only samples that this task can still receive and that are not
                leased to any worker.
            fenced: whether to reject the call if the samples come from a leased claim whose lease this worker no longer
                holds.
            timeout: seconds until the call fails. Defaults to the client's `timeout`.

        Returns:
            The number of samples marked as failed by this call.

        Raises:
            PartitionNotFoundError: the partition does not exist.
            StaleIncarnationError: the partition was cleared and created again after the metadata was returned.
            LeaseExpiredError: samples of a leased claim are no longer leased to this worker. No sample is marked as
                failed.
            TaskNotFoundError: the task has not claimed any samples from the partition yet.
            InvalidArgumentError: samples are specified in addition to groups or rollouts, or a condition does not match
                the type of its column.
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
