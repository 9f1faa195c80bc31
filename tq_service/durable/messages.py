"""Values of the domain as protobuf and back, as journals and snapshots keep them.

What is decoded was encoded here: it is trusted to be well-formed, other than what comes from clients.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, fields

import numpy as np

from tq_service.domain.claims.end import End
from tq_service.domain.claims.request import BatchSpec
from tq_service.domain.plan import Indexes, Pack, RankPlan
from tq_service.domain.tables.field_specs import ColumnWrite
from tq_service.domain.tables.meta import Condition, Order
from tq_service.domain.tables.puts import Put
from tq_service.domain.writes import PartitionSettings, SampleWrite
from tq_service.schema import MetaValue
from tq_service.v1 import controller_service_pb2 as pb
from tq_service.v1 import journal_pb2, metadata_pb2
from tq_service.wire.enums import (
    BATCH_UNIT_WORDS,
    BATCH_UNITS,
    KEY_MODE_WORDS,
    KEY_MODES,
    OPERATOR_WORDS,
    OPERATORS,
)
from tq_service.wire.metadata import (
    decode_integers,
    decode_layout,
    decode_meta_columns,
    decode_spec,
    decode_state,
    encode_layout,
    encode_meta_columns,
    encode_spec,
    encode_state,
)
from tq_service.wire.run_ahead import decode_run_ahead, encode_run_ahead


def encode_indexes(indexes: Indexes) -> bytes:
    """Return integers as little-endian bytes, which cost a copy instead of a step each."""
    return indexes.astype("<i8", copy=False).tobytes()


def decode_indexes(data: bytes) -> Indexes:
    """Return the integers of little-endian bytes; not writable."""
    return np.frombuffer(data, "<i8")


def encode_end(end: End) -> metadata_pb2.EndCounts:
    """Return what became of the samples at the end of a task."""
    return metadata_pb2.EndCounts(**asdict(end))


def decode_end(message: metadata_pb2.EndCounts) -> End:
    """Return what became of the samples at the end of a task."""
    return End(**{each.name: getattr(message, each.name) for each in fields(End)})


def encode_settings(partition_id: str, settings: PartitionSettings) -> pb.CreatePartitionRequest:
    """Return what fixes a partition."""
    return pb.CreatePartitionRequest(
        partition_id=partition_id,
        expected_samples=settings.expected_samples,
        default_layout=encode_layout(settings.default_layout),
        fields=map(encode_spec, settings.fields),
        max_bytes=settings.max_bytes,
        run_ahead_limits=map(encode_run_ahead, settings.run_ahead),
    )


def decode_settings(message: pb.CreatePartitionRequest) -> PartitionSettings:
    """Return what fixes a partition."""
    return PartitionSettings(
        expected_samples=message.expected_samples if message.HasField("expected_samples") else None,
        default_layout=decode_layout(message.default_layout),
        fields=tuple(map(decode_spec, message.fields)),
        max_bytes=message.max_bytes if message.HasField("max_bytes") else None,
        run_ahead=tuple(map(decode_run_ahead, message.run_ahead_limits)),
    )


def encode_write(partition_id: str, write: SampleWrite) -> pb.CommitRequest:
    """Return what is written to samples, with the place of its put and its columns, but without existing samples."""
    message = pb.CommitRequest(
        write=pb.SampleWrite(
            partition_id=partition_id,
            row_count=write.row_count,
            keys=write.keys or (),
            key_mode=KEY_MODES[write.key_mode],
            groups=write.groups or (),
            group_size=write.group_size,
            state=encode_state(write.state),
            custom_meta=encode_meta_columns(write.meta),
        ),
        columns=map(_encode_column, write.columns),
    )
    if write.put is not None:
        message.placement.put_id = write.put.put_id
        message.placement.storage.storage_id = write.put.storage_id
        message.placement.storage.boot_id = write.put.boot_id
    return message


def decode_write(message: pb.CommitRequest, global_indexes: Indexes | None) -> SampleWrite:
    """Return what is written to samples."""
    write, storage = message.write, message.placement.storage
    has_put = message.HasField("placement")
    return SampleWrite(
        row_count=write.row_count,
        global_indexes=global_indexes,
        keys=list(write.keys) or None,
        key_mode=KEY_MODE_WORDS[write.key_mode],
        groups=list(write.groups) or None,
        group_size=write.group_size,
        state=decode_state(write.state),
        meta=decode_meta_columns(write.custom_meta, write.row_count),
        put=Put(storage.storage_id, storage.boot_id, message.placement.put_id) if has_put else None,
        columns=[_decode_column(column) for column in message.columns],
    )


def _encode_column(column: ColumnWrite) -> metadata_pb2.ColumnHeader:
    extents = b"" if column.extents is None else encode_indexes(np.ascontiguousarray(column.extents))
    return metadata_pb2.ColumnHeader(spec=encode_spec(column.spec), extents=extents, value_bytes=column.value_bytes)


def _decode_column(message: metadata_pb2.ColumnHeader) -> ColumnWrite:
    spec = decode_spec(message.spec)
    width = len(spec.ragged_dims)
    extents = decode_indexes(message.extents).reshape(-1, width) if message.extents else None
    return ColumnWrite(spec=spec, extents=extents, value_bytes=message.value_bytes)


def encode_binding(binding: BatchSpec) -> journal_pb2.ClaimBinding:
    """Return what the first plan of a batch_index fixes."""
    return journal_pb2.ClaimBinding(
        batch_size=binding.batch_size,
        batch_unit=BATCH_UNITS[binding.batch_unit],
        micro_batch_size=binding.micro_batch_size or 0,
        sampler=binding.sampler,
        sampler_config=binding.sampler_config,
        where=map(_encode_condition, binding.where),
        order_by=[pb.Order(column=order.column, descending=order.descending) for order in binding.order_by],
        data_fields=binding.data_fields,
        drop_last=binding.drop_last,
        finite=binding.finite,
    )


def decode_binding(message: journal_pb2.ClaimBinding) -> BatchSpec:
    """Return what the first plan of a batch_index fixes."""
    return BatchSpec(
        batch_size=message.batch_size,
        batch_unit=BATCH_UNIT_WORDS[message.batch_unit],
        micro_batch_size=message.micro_batch_size or None,
        sampler=message.sampler,
        sampler_config=message.sampler_config,
        where=tuple(map(_decode_condition, message.where)),
        order_by=tuple(Order(order.column, order.descending) for order in message.order_by),
        data_fields=tuple(message.data_fields),
        drop_last=message.drop_last,
        finite=message.finite,
    )


def _encode_condition(condition: Condition) -> pb.Condition:
    return pb.Condition(
        column=condition.column,
        operator=OPERATORS[condition.operator],
        values=map(_encode_value, condition.values),
    )


def _decode_condition(message: pb.Condition) -> Condition:
    values = tuple(getattr(value, value.WhichOneof("kind") or "") for value in message.values)
    return Condition(message.column, OPERATOR_WORDS[message.operator], values)


def _encode_value(value: MetaValue) -> pb.MetaValue:
    match value:
        case bool():
            return pb.MetaValue(bool_value=value)
        case int():
            return pb.MetaValue(int64_value=value)
        case float():
            return pb.MetaValue(double_value=value)
        case str():
            return pb.MetaValue(string_value=value)


def encode_part(part: RankPlan) -> journal_pb2.PlannedPart:
    """Return one rank's part of a plan."""
    return journal_pb2.PlannedPart(rows=encode_indexes(part.rows), steps=encode_steps(part.steps))


def decode_part(message: journal_pb2.PlannedPart) -> RankPlan:
    """Return one rank's part of a plan."""
    steps = tuple(tuple(map(_decode_pack, step.packs)) for step in message.steps)
    return RankPlan(rows=decode_indexes(message.rows), steps=steps)


def encode_steps(steps: Iterable[Sequence[Pack]]) -> list[metadata_pb2.Step]:
    """Return how the samples of a batch are used."""
    return [metadata_pb2.Step(packs=map(_encode_pack, packs)) for packs in steps]


def _encode_pack(pack: Pack) -> metadata_pb2.Pack:
    return metadata_pb2.Pack(
        rows=pack.positions.tolist(),
        lengths=() if pack.lengths is None else pack.lengths.tolist(),
        padding_tokens=pack.padding_tokens,
    )


def _decode_pack(message: metadata_pb2.Pack) -> Pack:
    return Pack(
        positions=decode_integers(message.rows),
        lengths=decode_integers(message.lengths) if message.lengths else None,
        padding_tokens=message.padding_tokens,
    )
