"""Requests of the wire as requests of the domain, checked for all that is wrong whatever the state of the service."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, Final

from google.protobuf.json_format import MessageToDict
from google.protobuf.struct_pb2 import Struct

from tq_service.domain.changes.samples import SampleWrite
from tq_service.domain.checks import MOST_SAMPLES, check_id, check_name, check_range, check_unique
from tq_service.domain.claims.request import BatchSpec, ClaimRequest, ClaimSpec, LeaseTerms, Rank
from tq_service.domain.partition import PartitionSettings
from tq_service.domain.tables.cells import ColumnWrite, Put
from tq_service.domain.tables.meta import Condition, Order
from tq_service.domain.tables.names import Names, look_through
from tq_service.errors import InvalidArgumentError
from tq_service.samplers import Sampler
from tq_service.schema import Layout, StalenessLimit
from tq_service.v1 import controller_service_pb2 as pb
from tq_service.v1 import metadata_pb2
from tq_service.wire.columns import ColumnShape, decode_headers
from tq_service.wire.enums import BATCH_UNITS, KEY_MODES, LAYOUTS, OPERATORS, STATES
from tq_service.wire.mapper import read_message
from tq_service.wire.metadata import decode_integers, decode_meta_columns, decode_spec

DEFAULT_SAMPLER = "sequential"
_MOST_RANKS = 65_536
_REMEMBERED_REQUEST_BYTES = 1024
_MOST_CLAIM_BYTES: Final = 256 * 1024  # what is asked for is kept while the call waits, and with its batches
MAX_LEASE_SECONDS: Final = 86_400.0
_RANK_FIELDS: Final = ("dp_rank", "dp_size", "batch_index")
# Of GetMetaRequest: what differs between calls of the ranks of one task.
_FIELDS_OF_ONE_CALL: Final = (
    "request_id", "partition_id", "incarnation", "task_name", "epoch", "dp_rank", "batch_index", "max_wait_seconds",
    "lease_seconds", "max_deliveries",
)  # fmt: skip


def partition_settings(request: pb.CreatePartitionRequest) -> PartitionSettings:
    """Return what CreatePartition fixes."""
    expected = request.expected_samples if request.HasField("expected_samples") else None
    if expected is not None:
        check_range("expected_samples", expected, 0)
    max_bytes = request.max_bytes if request.HasField("max_bytes") else None
    if max_bytes is not None:
        check_range("max_bytes", max_bytes, 1, hint=", or leave it out")
    fields = tuple(decode_spec(spec) for spec in request.fields)
    check_unique("fields", [spec.name for spec in fields])
    return PartitionSettings(
        expected_samples=expected,
        default_layout=LAYOUTS.decode(request.default_layout),
        fields=fields,
        max_bytes=max_bytes,
        staleness_limits=_staleness_limits(request.staleness_limits),
    )


def _staleness_limits(messages: Sequence[pb.StalenessLimit]) -> tuple[StalenessLimit, ...]:
    """Return the limits of a partition in the order of their tasks, so that the same ones compare equal."""
    limits = [read_message(StalenessLimit, message) for message in messages]
    for limit in limits:
        check_name("task_name", limit.task_name)
    check_unique("staleness_limits", [limit.task_name for limit in limits])
    return tuple(sorted(limits, key=lambda limit: limit.task_name))


async def look_through_names(write: pb.SampleWrite) -> Names:
    """Look the keys and groups of a write through, while others have their turns."""
    looking = look_through(write.keys, write.groups)
    while True:
        try:
            next(looking)
        except StopIteration as done:
            names: Names = done.value
            return names
        await asyncio.sleep(0)


def sample_write(
    write: pb.SampleWrite,
    put: Put | None = None,
    columns: Sequence[ColumnShape] = (),
    names: Names | None = None,
) -> SampleWrite:
    """Return what Insert or Commit writes."""
    if write.global_indexes and not write.incarnation:
        raise InvalidArgumentError(
            "global_indexes need the incarnation they belong to; send that of their BatchMeta", field="incarnation"
        )
    check_range("row_count", write.row_count, 0, MOST_SAMPLES)
    if write.key_mode == pb.KEY_MODE_EXISTING and not write.keys and not write.global_indexes:
        raise InvalidArgumentError(
            "key_mode is existing, but neither keys nor global_indexes name the samples; give one of them",
            field="key_mode",
        )
    for column in columns:
        if column.row_count != write.row_count:
            raise InvalidArgumentError(
                f"field {column.spec.name!r} has {column.row_count} rows for {write.row_count} samples; give one row a "
                f"sample",
                field=column.spec.name,
            )
    return SampleWrite(
        row_count=write.row_count,
        global_indexes=decode_integers(write.global_indexes) if write.global_indexes else None,
        keys=(list(write.keys) or None) if names is None else names.keys,
        key_mode=KEY_MODES.decode(write.key_mode) or "upsert",
        groups=(list(write.groups) or None) if names is None else names.groups,
        names=names,
        group_size=write.group_size,
        state=STATES.decode(write.state),
        meta=decode_meta_columns(write.custom_meta, write.row_count),
        put=put,
        columns=[_column_write(column) for column in columns],
    )


def _column_write(column: ColumnShape) -> ColumnWrite:
    extents = column.extents if column.spec.layout is Layout.JAGGED else None
    return ColumnWrite(spec=column.spec, extents=extents, value_bytes=column.value_bytes)


def put_columns(commit: pb.CommitRequest) -> list[ColumnShape]:
    """Return the columns of a commit that has a placement."""
    return decode_headers(commit.columns, commit.write.row_count)


def _config_json(message: Struct) -> str:
    """Return sampler options as canonical JSON, by which those of ranks are compared; whole numbers are integers."""
    config = {name: _plain(value) for name, value in MessageToDict(message).items()}
    return json.dumps(config, sort_keys=True)


def _plain(value: Any) -> Any:
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, list):
        return [_plain(each) for each in value]
    if isinstance(value, dict):
        return {name: _plain(each) for name, each in value.items()}
    return value


def claim_spec(request: pb.GetMetaRequest) -> ClaimSpec:
    """Return what a GetMeta request has in common with those of other ranks and batches; read once for all of them."""
    if request.ByteSize() > _MOST_CLAIM_BYTES:
        raise InvalidArgumentError(
            f"the request has {request.ByteSize()} bytes, at most {_MOST_CLAIM_BYTES} expected; name fewer fields, and "
            f"tag samples with custom_meta by what they are asked for, instead of listing many values in where",
            field="where",
        )
    alike = pb.GetMetaRequest()
    alike.CopyFrom(request)
    for name in _FIELDS_OF_ONE_CALL:
        alike.ClearField(name)
    if alike.ByteSize() > _REMEMBERED_REQUEST_BYTES:
        return _read_claim_spec(alike)
    return _remembered_claim_spec(alike.SerializeToString(deterministic=True))


@lru_cache(maxsize=1024)
def _remembered_claim_spec(serialized: bytes) -> ClaimSpec:
    return _read_claim_spec(pb.GetMetaRequest.FromString(serialized))


def _read_claim_spec(request: pb.GetMetaRequest) -> ClaimSpec:
    data_fields = _data_fields(request.data_fields)
    return ClaimSpec(
        batch_spec=BatchSpec(
            batch_size=request.batch_size,
            batch_unit=BATCH_UNITS.decode(request.batch_unit) or "sample",
            micro_batch_size=request.micro_batch_size or None,
            sampler=request.sampler or DEFAULT_SAMPLER,
            sampler_config=_config_json(request.sampler_config),
            where=tuple(_condition(each) for each in request.where),
            order_by=tuple(Order(each.column, each.descending) for each in request.order_by),
            data_fields=tuple(sorted(data_fields)),
            drop_last=request.drop_last,
            finite=request.finite,
        ),
        data_fields=data_fields,
        min_batch_size=_sizes(request),
        dp_size=request.dp_size if request.HasField("dp_size") else None,
    )


def claim_request(request: pb.GetMetaRequest, spec: ClaimSpec, sampler: Sampler) -> ClaimRequest:
    """Return a GetMeta request as the planner takes it."""
    check_name("task_name", request.task_name)
    check_id("request_id", request.request_id)
    return ClaimRequest(
        request_id=request.request_id,
        task_name=request.task_name,
        spec=spec,
        sampler=sampler,
        rank=_rank(request),
        epoch=request.epoch if request.HasField("epoch") else None,
        lease=_lease(request),
    )


def _lease(request: pb.GetMetaRequest) -> LeaseTerms | None:
    if request.lease_seconds == 0:
        if request.max_deliveries:
            raise InvalidArgumentError(
                f"max_deliveries is {request.max_deliveries} without a lease; give lease_seconds too",
                field="max_deliveries",
            )
        return None
    if any(request.HasField(name) for name in _RANK_FIELDS):
        raise InvalidArgumentError(
            "lease_seconds is for queue workers; the batches of ranks are not leased, a rank that asks again gets the "
            "same",
            field="lease_seconds",
        )
    check_range("max_deliveries", request.max_deliveries, 0, hint=": a positive number, or 0 for no bound")
    return LeaseTerms(seconds=lease_seconds(request.lease_seconds), max_deliveries=request.max_deliveries or None)


def lease_seconds(seconds: float) -> float:
    """Return how long a lease lasts, checked."""
    if not 0 < seconds <= MAX_LEASE_SECONDS:  # which NaN fails too
        raise InvalidArgumentError(
            f"lease_seconds is {seconds}; give a positive number of at most {MAX_LEASE_SECONDS:g} (a day), and extend "
            f"the lease where the work takes longer",
            field="lease_seconds",
        )
    return seconds


def max_wait(request: pb.GetMetaRequest, cap_seconds: float) -> float:
    """Return how long a claim waits, in seconds."""
    check_range("max_wait_seconds", request.max_wait_seconds, 0)
    return min(request.max_wait_seconds, cap_seconds)


def _data_fields(names: Sequence[str]) -> tuple[str, ...]:
    if not names:
        raise InvalidArgumentError("data_fields is empty; name at least one field", field="data_fields")
    if "" in names:
        raise InvalidArgumentError(f"data_fields is {list(names)}; name each field", field="data_fields")
    check_unique("data_fields", names)
    return tuple(names)


def _rank(request: pb.GetMetaRequest) -> Rank | None:
    missing = [name for name in _RANK_FIELDS if not request.HasField(name)]
    if len(missing) == len(_RANK_FIELDS):
        return None
    if missing:
        given = [name for name in _RANK_FIELDS if name not in missing]
        raise InvalidArgumentError(
            f"got {' and '.join(given)} without {' and '.join(missing)}; give all three for a trainer rank, none for a "
            f"queue worker",
            field=missing[0],
        )
    dp_rank, dp_size, batch_index = request.dp_rank, request.dp_size, request.batch_index
    check_range("dp_size", dp_size, 1, _MOST_RANKS)
    check_range("dp_rank", dp_rank, 0, dp_size - 1, hint=", less than dp_size")
    check_range("batch_index", batch_index, 0, hint="; count from 0")
    return Rank(dp_rank=dp_rank, dp_size=dp_size, batch_index=batch_index)


def _sizes(request: pb.GetMetaRequest) -> int:
    """Check the sizes of a claim and return the least a queue worker takes."""
    rank_count = request.dp_size or 1
    if request.batch_size <= 0 or request.batch_size * rank_count > MOST_SAMPLES:
        raise InvalidArgumentError(
            f"batch_size is {request.batch_size} for {rank_count} ranks; give a positive number, at most "
            f"{MOST_SAMPLES} over all ranks",
            field="batch_size",
        )
    check_range("micro_batch_size", request.micro_batch_size, 0, hint=": a positive number, or 0 for the whole batch")
    if request.HasField("dp_size") and request.min_batch_size:
        raise InvalidArgumentError(
            "min_batch_size is for queue workers; a rank's batch is short only at the end", field="min_batch_size"
        )
    least = request.min_batch_size or request.batch_size
    check_range("min_batch_size", least, 1, request.batch_size, hint=", the batch_size")
    return least


def _condition(message: pb.Condition) -> Condition:
    operator = OPERATORS.decode(message.operator)
    values = [getattr(value, kind) for value in message.values if (kind := value.WhichOneof("kind")) is not None]
    if operator is None or not message.column:
        raise InvalidArgumentError(
            f"where: got column {message.column!r} and operator {operator!r}; give both", field="where"
        )
    if len(values) != len(message.values) or (operator != "in" and len(values) != 1):
        raise InvalidArgumentError(
            f"where: column {message.column!r} {operator} got {len(values)} values; give one, or any number with 'in'",
            field="where",
        )
    if len({isinstance(value, str) for value in values}) > 1:
        raise InvalidArgumentError(
            f"where: column {message.column!r} is compared with text and numbers; use one type", field="where"
        )
    return Condition(message.column, operator, tuple(values))


def placement(message: pb.PutPlacement) -> Put:
    """Return where a commit's put is."""
    storage: metadata_pb2.StorageEndpoint = message.storage
    if len(message.put_id) != 16 or len(storage.boot_id) != 16 or not storage.storage_id:
        raise InvalidArgumentError(
            "the placement needs a storage_id and 16 bytes each of boot_id and put_id; send what Put answered",
            field="placement",
        )
    return Put(storage.storage_id, storage.boot_id, message.put_id)
