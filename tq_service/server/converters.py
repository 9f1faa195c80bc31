"""Conversions between the controller's protobuf messages and the core's types."""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any, Final

from google.protobuf.json_format import MessageToDict
from google.protobuf.message import Message

from tq_service.errors import InvalidArgumentError
from tq_service.machine.group_cells import GroupsWritten
from tq_service.machine.samples import SampleWrite, Written
from tq_service.samplers import Sampler
from tq_service.samplers.options import whole_numbers
from tq_service.schema import MOST_SAMPLES, EndCounts, Layout, SampleState, check_range
from tq_service.serving.catalog import Claimed
from tq_service.serving.lookup import Page, Selection, no_page_token
from tq_service.serving.planner import Answer
from tq_service.serving.status import consumption_states
from tq_service.state.cells import CellRuns, ColumnWrite, Put
from tq_service.state.ledger import Claim
from tq_service.state.partition import Partition
from tq_service.state.plan import (
    BatchSpec,
    ClaimRequest,
    ClaimSpec,
    Condition,
    Indexes,
    LeasedClaim,
    LeaseTerms,
    NotBefore,
    Rank,
    RankPlan,
    TotalsOfStep,
)
from tq_service.step_times import StepTimes
from tq_service.v1 import commit_pb2, metadata_pb2
from tq_service.v1 import controller_service_pb2 as pb
from tq_service.wire.columns import ColumnShape
from tq_service.wire.messages import read_message, read_seconds, to_duration, to_message
from tq_service.wire.metadata import (
    KEY_MODES,
    STATES,
    check_json,
    decode_integers,
    decode_meta_columns,
    encode_meta_columns,
    encode_produced,
    encode_spec,
    set_indexes,
)

_REMEMBERED_REQUEST_BYTES: Final = 1024
_MOST_CLAIM_BYTES: Final = 256 * 1024  # the claim spec stays in memory with the waiting call and its batches
_MOST_RANGE_BYTES: Final = 1 << 20  # per response with several batches
_RANK_FIELDS: Final = ("dp_rank", "dp_size", "batch_index")
# Fields of GetMetaRequest that may differ between the ranks of a task.
_FIELDS_OF_ONE_CALL: Final = (
    "request_id", "partition_id", "incarnation", "task_name", "epoch", "dp_rank", "batch_index", "max_wait", "lease",
    "max_deliveries", "claim_name", "explain", "not_before_version", "policy", "batch_count", "step_times",
)  # fmt: skip
# Fields of LookupSamplesRequest that do not select samples.
_FIELDS_OF_A_PAGE: Final = ("page_size", "page_token", "missing_ok", "task_name", "min_count", "max_wait")

Endpoints = Callable[[str, bytes], metadata_pb2.StorageEndpoint | None]


# Requests


def sample_write(
    write: commit_pb2.SampleWrite,
    put: Put | None = None,
    columns: Sequence[ColumnShape] = (),
) -> SampleWrite:
    """Convert the `write` field of an Insert or Commit request."""
    if write.global_indexes and not write.incarnation:
        raise InvalidArgumentError(
            "global_indexes are set without an incarnation; send the incarnation of the BatchMeta with these indexes",
            field="incarnation",
        )
    for column in columns:
        if column.row_count != write.row_count:
            raise InvalidArgumentError(
                f"field {column.spec.name!r} has {column.row_count} rows for {write.row_count} samples; "
                "send one row per sample",
                field="row_count",
                metadata={
                    "field_name": column.spec.name,
                    "got": str(write.row_count),
                    "expected": str(column.row_count),
                },
            )
    check_range("row_count", write.row_count, 0, MOST_SAMPLES)  # before allocating memory for the samples
    claim = leased_claim(write)
    if write.ack and claim is None:
        raise InvalidArgumentError(
            "ack is set without a claim; send the leased claim that contains the samples to acknowledge, or unset ack",
            field="ack",
        )
    if write.append_at and claim is None:
        raise InvalidArgumentError(
            "append_at is set without a claim; send the leased claim that contains the samples to append to",
            field="append_at",
        )
    return SampleWrite(
        row_count=write.row_count,
        global_indexes=decode_integers(write.global_indexes) if write.global_indexes else None,
        keys=list(write.keys) or None,
        key_mode=KEY_MODES.decode(write.key_mode) or "upsert",
        groups=list(write.groups) or None,
        group_size=write.group_size,
        rollouts=list(write.rollouts) or None,
        ends_rollouts=write.ends_rollouts,
        rows_per_put=0 if write.rows_per_put == write.row_count else write.rows_per_put,
        state=STATES.decode(write.state),
        meta=check_json(decode_meta_columns(write.custom_meta, write.row_count)),
        put=put,
        columns=_column_writes(columns),
        claim=None if write.ack else claim,
        acks=claim if write.ack else None,
        append_at=decode_integers(write.append_at) if write.append_at else None,
    )


_OF_GROUP_WRITES: Final = {"partition_id", "incarnation", "row_count", "groups", "key_mode", "of_groups"}


def group_write(write: commit_pb2.SampleWrite, put: Put, columns: Sequence[ColumnShape]) -> GroupsWritten:
    """Convert the `write` field of a commit that writes to groups.

    Raises:
        InvalidArgumentError: a field that applies only to samples is set, or the numbers of groups and rows differ.
    """
    for name in sorted({each.name for each, _ in write.ListFields()} - _OF_GROUP_WRITES):
        raise InvalidArgumentError(
            f"write sets of_groups and {name}, which applies only to samples; send {name} in a separate call",
            field=name,
        )
    if write.key_mode == commit_pb2.KEY_MODE_NEW or len(write.groups) != write.row_count:
        raise InvalidArgumentError(
            f"write has of_groups set, but contains {len(write.groups)} groups for {write.row_count} rows, and "
            f"key_mode {KEY_MODES.decode(write.key_mode)}; expected one group per row, and key_mode upsert or existing",
            field="groups" if len(write.groups) != write.row_count else "key_mode",
        )
    return GroupsWritten(
        partition_id=write.partition_id,
        names=list(write.groups),
        put=put,
        columns=_column_writes(columns),
        must_exist=write.key_mode == commit_pb2.KEY_MODE_EXISTING,
    )


def _column_writes(columns: Iterable[ColumnShape]) -> list[ColumnWrite]:
    return [
        ColumnWrite(
            spec=column.spec,
            extents=column.extents if column.spec.layout is Layout.JAGGED else None,
            value_bytes=column.value_bytes,
        )
        for column in columns
    ]


def slots(request: pb.AcquireRequest, start_version: int | None) -> SampleWrite:
    """Convert a request for slots into the write that creates the slots.

    Args:
        request: request for slots.
        start_version: policy version that generation starts with, or None.

    Raises:
        InvalidArgumentError: the request refers to existing samples, or sets a field that slots do not support.
    """
    write = request.write
    for name in ("global_indexes", "key_mode", "state", "claim", "rows_per_put", "append_at", "of_groups"):
        if name in {field.name for field, _ in write.ListFields()}:
            raise InvalidArgumentError(
                f"write.{name} is set, but slots are always new samples in the held state. Unset write.{name}",
                field=f"write.{name}",
            )
    return replace(
        sample_write(write),
        key_mode="new",
        state=SampleState.HELD,
        is_of_slots=True,
        start_version=start_version,
    )


def leased_claim(
    request: commit_pb2.SampleWrite
    | pb.SetCustomMetaRequest
    | pb.TruncateSamplesRequest
    | pb.ClearFieldsRequest
    | pb.ClearSamplesRequest
    | pb.FailSamplesRequest
    | pb.HeldSamples,
) -> LeasedClaim | None:
    """Return the leased claim specified by a request that changes samples, or None if no claim is specified."""
    if not request.HasField("claim"):
        return None
    return LeasedClaim(task_name=request.claim.task_name, request_id=request.claim.claim_request_id)


def placement(message: commit_pb2.PutPlacement) -> Put:
    """Return the put that a placement identifies."""
    storage: metadata_pb2.StorageEndpoint = message.storage
    if len(message.put_id) != 16 or len(storage.boot_id) != 16 or not storage.storage_id:
        raise InvalidArgumentError(
            "placement lacks a storage_id, a 16-byte boot_id or a 16-byte put_id; send the placement unchanged, as "
            "returned by Put",
            field="placement",
        )
    return Put(storage.storage_id, storage.boot_id, message.put_id)


def claim_spec(request: pb.GetMetaRequest) -> ClaimSpec:
    """Return the part of a GetMeta request that is the same for all ranks and batches. The parsed result is cached."""
    _check_size(request, "name fewer fields")
    alike = pb.GetMetaRequest()
    alike.CopyFrom(request)
    for name in _FIELDS_OF_ONE_CALL:
        alike.ClearField(name)
    read = _read_claim_spec.__wrapped__ if alike.ByteSize() > _REMEMBERED_REQUEST_BYTES else _read_claim_spec
    return read(alike.SerializeToString(deterministic=True))


def read_step_times(request: pb.GetMetaRequest) -> StepTimes:
    """Read the step times reported by a trainer rank.

    Raises:
        InvalidArgumentError: a step time is negative.
    """
    times = read_message(StepTimes, request.step_times, rank_count=1)
    for name in StepTimes.__slots__:
        check_range(f"step_times.{name}", getattr(times, name), 0)
    return times


def _check_size(request: Message, remedy: str) -> None:
    """Reject a request that is too large to be kept in memory while its call waits."""
    if request.ByteSize() > _MOST_CLAIM_BYTES:
        largest = max(request.ListFields(), key=lambda field: _size_alone(request, field[0].name))[0].name
        raise InvalidArgumentError(
            f"the request has {request.ByteSize()} bytes, most of them in {largest}; expected at most "
            f"{_MOST_CLAIM_BYTES} bytes. To shorten the request, {remedy}. Instead of listing many values in where, "
            "tag samples with custom_meta",
            field=largest,
            metadata={"got": str(request.ByteSize()), "limit": str(_MOST_CLAIM_BYTES)},
        )


def _size_alone(request: Message, name: str) -> int:
    """Return the size of a single request field in bytes."""
    rest = type(request)()
    rest.CopyFrom(request)
    rest.ClearField(name)
    return request.ByteSize() - rest.ByteSize()


@lru_cache(maxsize=1024)
def _read_claim_spec(serialized: bytes) -> ClaimSpec:
    request = pb.GetMetaRequest.FromString(serialized)
    # Use canonical JSON with whole floats as integers, so that equal sampler options from different ranks match.
    config = json.dumps(whole_numbers(MessageToDict(request.sampler_config)), sort_keys=True)
    data_fields = tuple(sorted(request.data_fields))
    batch_spec = read_message(BatchSpec, request, sampler_config=config, data_fields=data_fields)
    return read_message(ClaimSpec, request, batch_spec=batch_spec)


def claim_request(request: pb.GetMetaRequest, spec: ClaimSpec, sampler: Sampler) -> ClaimRequest:
    """Convert a GetMeta request to a claim request for the planner."""
    lease = None
    if request.HasField("lease"):
        lease = LeaseTerms(seconds=read_seconds("lease", request.lease), max_deliveries=request.max_deliveries or None)
    elif request.max_deliveries:
        raise InvalidArgumentError(
            f"max_deliveries is {request.max_deliveries}, but lease is not set; set lease too", field="max_deliveries"
        )
    return ClaimRequest(
        request_id=request.request_id,
        task_name=request.task_name,
        spec=spec,
        sampler=sampler,
        rank=rank_of(request),
        epoch=request.epoch if request.HasField("epoch") else None,
        lease=lease,
        claim_name=request.claim_name,
        batch_count=request.batch_count or 1,
        not_before=NotBefore(policy=request.policy, version=request.not_before_version)
        if request.HasField("not_before_version")
        else None,
    )


def rank_of(request: pb.GetMetaRequest) -> Rank | None:
    """Return the rank and batch index from a request, or None if the caller is a queue worker."""
    return Rank.of(**{name: getattr(request, name) if request.HasField(name) else None for name in _RANK_FIELDS})


def selection(request: pb.LookupSamplesRequest) -> Selection:
    """Convert a lookup request to a selection of samples. If `all_samples` is set, any listed samples are ignored."""
    if request.HasField("max_wait"):
        _check_size(request, "name fewer samples or groups")
    where = tuple(read_message(Condition, each) for each in request.where)
    if request.all_samples:
        return Selection(is_all=True, where=where)
    indexes = decode_integers(request.global_indexes)
    return Selection(indexes=indexes, keys=request.keys, groups=request.groups, rollouts=request.rollouts, where=where)


def _question(request: pb.LookupSamplesRequest) -> str:
    """Return a checksum of a lookup's selection. The checksum ties page tokens to the lookup."""
    samples = pb.LookupSamplesRequest()
    samples.CopyFrom(request)
    for name in _FIELDS_OF_A_PAGE:
        samples.ClearField(name)
    return f"{zlib.crc32(samples.SerializeToString(deterministic=True)):08x}"


def page_token(request: pb.LookupSamplesRequest) -> str:
    """Return the page token from a request.

    Raises:
        InvalidArgumentError: the token comes from a lookup with a different selection.
    """
    if not request.page_token:
        return ""
    question, _, token = request.page_token.partition("-")
    if question != _question(request) or not token:
        raise no_page_token(request.page_token)
    return token


def changed_selection(
    request: pb.ClearFieldsRequest | pb.ClearSamplesRequest | pb.FailSamplesRequest, skipped_by: str = ""
) -> Selection:
    """Return the selection of samples to change.

    If the request lists no samples, all samples that match the conditions and tasks are selected.

    Args:
        request: request that changes samples.
        skipped_by: see `Selection`.
    """
    where = tuple(read_message(Condition, each) for each in request.where)
    indexes = decode_integers(request.global_indexes)
    others = bool(request.keys or request.groups or request.rollouts)
    if request.HasField("claim") and (others or not indexes.size):
        raise InvalidArgumentError(
            "claim is set, but the samples are not specified by global_indexes alone; set global_indexes, and unset "
            "keys, groups and rollouts",
            field="claim",
        )
    is_all = bool(where or skipped_by or request.task_name) and not (indexes.size or others)
    return Selection(
        indexes=indexes,
        keys=request.keys,
        groups=request.groups,
        rollouts=request.rollouts,
        is_all=is_all,
        skipped_by=skipped_by,
        left_for=request.task_name,
        where=where,
    )


# Responses


def written_meta(written: Written) -> metadata_pb2.BatchMeta:
    """Return the metadata for the response to a write, omitting information that the client already has."""
    meta = groups_meta(written)
    set_indexes(meta, written.global_indexes)
    return meta


def groups_meta(written: Written) -> metadata_pb2.BatchMeta:
    """Return the metadata for the response to a group write. The metadata lists no samples."""
    return _meta_of(written.partition, fields=[encode_spec(spec) for spec in written.specs])


def claim_answer(
    partition_id: str,
    claimed: Claimed,
    task_name: str,
    data_fields: Sequence[str],
    endpoints: Endpoints,
    *,
    now: float,
) -> pb.GetMetaResponse:
    """Return the response to a claim. `now` is the current time on the event loop's clock."""
    partition = claimed.partition
    if partition is None:
        meta = metadata_pb2.BatchMeta(status=metadata_pb2.BATCH_STATUS_NOT_YET, partition_id=partition_id)
        return pb.GetMetaResponse(meta=meta)
    response = pb.GetMetaResponse(
        meta=_claim_meta(partition, claimed.answer, task_name, data_fields, endpoints, now=now)
    )
    size_bytes = response.ByteSize() if claimed.more else 0
    for answer in claimed.more:
        meta = _claim_meta(partition, answer, task_name, data_fields, endpoints, now=now)
        size_bytes += meta.ByteSize()
        if size_bytes > _MOST_RANGE_BYTES:
            break
        response.more.append(meta)
    return response


def slots_answer(
    partition: Partition, answer: Answer, task_name: str, endpoints: Endpoints, *, now: float
) -> pb.AcquireResponse:
    """Return the response to a request for slots. `now` is the current time on the event loop's clock."""
    meta = _claim_meta(partition, answer, task_name, (), endpoints, now=now)
    if isinstance(answer, Claim) and answer.lease is not None:  # the lease starts at the end of this step
        meta.lease.CopyFrom(to_duration(answer.lease.seconds))
    return pb.AcquireResponse(meta=meta)


def _claim_meta(
    partition: Partition,
    answer: Answer,
    task_name: str,
    data_fields: Sequence[str],
    endpoints: Endpoints,
    *,
    now: float,
) -> metadata_pb2.BatchMeta:
    epoch = partition.tasks[task_name].epoch
    if isinstance(answer, RankPlan | Claim):
        part = answer if isinstance(answer, RankPlan) else answer.plan.part()
        meta = samples_meta(partition, part.rows, data_fields, endpoints)
        meta.epoch = epoch
        add_plan(meta, part)
        if isinstance(answer, Claim) and (answer.name or answer.delivery_counts is not None):
            meta.claim_request_id = answer.request_id
        if isinstance(answer, Claim) and answer.delivery_counts is not None:
            meta.lease.CopyFrom(to_duration(answer.leased_seconds(now)))
            meta.delivery_counts.extend(answer.delivery_counts.tolist())
        return meta
    if isinstance(answer, EndCounts):
        end = to_message(metadata_pb2.EndCounts, answer)
        return _meta_of(partition, status=metadata_pb2.BATCH_STATUS_END, epoch=epoch, end=end)
    return _meta_of(partition, status=metadata_pb2.BATCH_STATUS_NOT_YET, epoch=epoch)


def _meta_of(
    partition: Partition,
    *,
    status: metadata_pb2.BatchStatus.ValueType = metadata_pb2.BATCH_STATUS_BATCH,
    **others: Any,
) -> metadata_pb2.BatchMeta:
    return metadata_pb2.BatchMeta(
        status=status, partition_id=partition.partition_id, incarnation=partition.incarnation, **others
    )


def samples_meta(
    partition: Partition,
    rows: Indexes,
    data_fields: Sequence[str],
    endpoints: Endpoints | None,
) -> metadata_pb2.BatchMeta:
    """Return metadata of existing samples, including the locations of the `data_fields` that all samples have."""
    positions = partition.table.find(rows)
    meta = located_meta(partition, positions, data_fields, endpoints)
    if partition.groups.in_use:
        meta.groups.extend(names_of(partition.groups.names_of(positions)))
        meta.rollouts.extend(names_of(partition.groups.rollout_names_of(positions)))
    meta.custom_meta.extend(encode_meta_columns(partition.meta.read_all(positions)))
    return meta


def found_page(
    page: Page, request: pb.LookupSamplesRequest, endpoints: Endpoints, *, not_yet: bool
) -> pb.LookupSamplesResponse:
    """Return the response to a lookup.

    Raises:
        TaskNotFoundError: the task does not exist, and `missing_ok` is not set.
    """
    partition = page.partition
    consumption: Any = ()
    if request.HasField("task_name"):
        states = consumption_states(partition, request.task_name, page.positions, missing_ok=request.missing_ok)
        consumption = states.tolist()
    rows = partition.table.index.data[page.positions]
    return pb.LookupSamplesResponse(
        meta=all_meta(partition, rows, endpoints),
        missing_keys=page.missing_keys,
        missing_global_indexes=page.missing_indexes.tolist(),
        missing_groups=page.missing_groups,
        missing_rollouts=page.missing_rollouts,
        consumption=consumption,
        next_page_token=f"{_question(request)}-{page.next_token}" if page.next_token else "",
        not_yet=not_yet,
    )


def nothing_found(request: pb.LookupSamplesRequest, *, not_yet: bool) -> pb.LookupSamplesResponse:
    """Return the response to a lookup in a partition that does not exist."""
    named = pb.LookupSamplesRequest() if request.all_samples else request
    return pb.LookupSamplesResponse(
        meta=metadata_pb2.BatchMeta(status=metadata_pb2.BATCH_STATUS_BATCH, partition_id=request.partition_id),
        not_yet=not_yet,
        missing_keys=named.keys,
        missing_global_indexes=named.global_indexes,
        missing_groups=named.groups,
        missing_rollouts=named.rollouts,
    )


def all_meta(partition: Partition, rows: Indexes, endpoints: Endpoints | None) -> metadata_pb2.BatchMeta:
    """Return all metadata of existing samples, including every field that at least one sample has.

    Args:
        partition: partition that contains the samples.
        rows: global indexes of the samples.
        endpoints: function that returns the endpoint of a storage service, or None to omit cell locations.
    """
    produced = partition.cells.produced_by(partition.table.find(rows))
    meta = samples_meta(partition, rows, list(produced), endpoints)
    meta.produced.extend(encode_produced(produced.values()))
    return meta


def located_meta(
    partition: Partition,
    positions: Indexes,
    data_fields: Sequence[str],
    endpoints: Endpoints | None,
) -> metadata_pb2.BatchMeta:
    """Return metadata of the samples at `positions`, with the locations of the `data_fields` that all samples have.

    If `endpoints` is None, the locations are omitted.
    """
    cells = partition.cells
    known = [name for name in data_fields if name in cells.fields]
    specs = map(cells.last_spec, data_fields)
    meta = _meta_of(
        partition,
        keys=names_of(partition.key.data[positions].tolist()) if not partition.key.is_blank else (),
        fields=[encode_spec(spec) for spec in specs if spec is not None],
    )
    set_indexes(meta, partition.table.index.data[positions])
    if endpoints is not None:
        _add_locations(meta.locations, partition.cells.locate(known, positions), endpoints)
    return meta


def names_of(names: Sequence[str | None]) -> list[str]:
    """Return sample names for a message, with "" for unnamed samples. The result is empty if all are unnamed."""
    return [name or "" for name in names] if any(names) else []


def _add_locations(message: metadata_pb2.Locations, runs: Iterable[CellRuns], endpoints: Endpoints) -> None:
    storage_indexes: dict[tuple[str, bytes], int] = {}
    put_indexes: dict[Put, int] = {}
    for run in runs:
        for put in run.puts:
            if put in put_indexes:
                continue
            storage = (put.storage_id, put.boot_id)
            if storage not in storage_indexes:
                storage_indexes[storage] = len(storage_indexes)
                known = endpoints(*storage)
                storage_message = message.storages.add()
                if known is not None:
                    storage_message.CopyFrom(known)
                storage_message.storage_id, storage_message.boot_id = storage
                storage_message.is_away = known is None
            put_indexes[put] = len(put_indexes)
            message.puts.add(put_id=put.put_id, storage_index=storage_indexes[storage])
        numbers = [put_indexes[put] for put in run.puts]
        message.runs.add(
            field_names=run.field_names,
            put_indexes=[numbers[index] for index in run.put_indexes],
            first_rows=run.first_rows,
            row_counts=run.row_counts,
            extent_counts=run.extent_counts,
            extent_lengths=run.extent_lengths,
            sample_counts=run.sample_counts,
        )


def add_plan(meta: metadata_pb2.BatchMeta, part: RankPlan) -> None:
    """Add a rank's steps, its dropped samples and its batch's totals to the metadata."""
    _add_steps(meta, part)
    meta.dropped_indexes.extend(part.dropped.tolist())
    if part.totals:
        meta.MergeFromString(_totals_of(part.totals, part.summed))


def _add_steps(meta: metadata_pb2.BatchMeta, part: RankPlan) -> None:
    for packs in part.steps:
        step = meta.steps.add()
        for pack in packs:
            step.packs.add(
                rows=pack.positions.tolist(),
                lengths=() if pack.lengths is None else pack.lengths.tolist(),
                padding_tokens=pack.padding_tokens,
            )


@lru_cache(maxsize=256)
def _totals_of(totals: tuple[TotalsOfStep, ...], summed: tuple[str, ...]) -> bytes:
    """Return a serialized BatchMeta with the totals of a batch, which are the same for all ranks."""
    meta = metadata_pb2.BatchMeta()
    for samples, rollouts, groups, tokens, sums in totals:
        meta.totals.add(
            sample_count=samples,
            rollout_count=rollouts,
            group_count=groups,
            token_count=tokens,
            sums=dict(zip(summed, sums, strict=True)),
        )
    return meta.SerializeToString()
