"""Changes of the catalog as records of the journal, and back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from tq_service.domain import changes
from tq_service.domain.plan import Indexes, Plan
from tq_service.durable.messages import (
    decode_binding,
    decode_end,
    decode_indexes,
    decode_part,
    decode_settings,
    decode_write,
    encode_binding,
    encode_end,
    encode_indexes,
    encode_part,
    encode_settings,
    encode_write,
)
from tq_service.v1 import controller_service_pb2
from tq_service.v1 import journal_pb2 as pb
from tq_service.wire.metadata import decode_integers, decode_meta_columns, encode_meta_columns


def encode_change(change: changes.Change) -> pb.JournalRecord:
    """Return the record of a change."""
    name, encode, _ = _FORMS[type(change)]
    return pb.JournalRecord(**{name: encode(change)})


def decode_change(record: pb.JournalRecord) -> changes.Change | None:
    """Return the change of a record; None where it is no change of the catalog."""
    name = record.WhichOneof("change")
    decode = _DECODERS.get(name or "")
    return None if decode is None else decode(getattr(record, name or ""))


def _encode_created(change: changes.PartitionCreated) -> pb.PartitionCreated:
    return pb.PartitionCreated(
        settings=encode_settings(change.partition_id, change.settings), incarnation=change.incarnation
    )


def _decode_created(message: pb.PartitionCreated) -> changes.PartitionCreated:
    return changes.PartitionCreated(
        partition_id=message.settings.partition_id,
        incarnation=message.incarnation,
        settings=decode_settings(message.settings),
    )


def _encode_written(change: changes.SamplesWritten) -> pb.SamplesWritten:
    rows = b"" if change.write.global_indexes is None else encode_indexes(change.write.global_indexes)
    return pb.SamplesWritten(commit=encode_write(change.partition_id, change.write), rows=rows)


def _decode_written(message: pb.SamplesWritten) -> changes.SamplesWritten:
    rows = decode_indexes(message.rows) if message.rows else None
    return changes.SamplesWritten(
        partition_id=message.commit.write.partition_id, write=decode_write(message.commit, rows)
    )


def _encode_meta_set(change: changes.MetaSet) -> pb.MetaSet:
    return pb.MetaSet(
        request=controller_service_pb2.SetCustomMetaRequest(
            partition_id=change.partition_id,
            custom_meta=encode_meta_columns(change.columns),
        ),
        rows=encode_indexes(change.global_indexes),
    )


def _decode_meta_set(message: pb.MetaSet) -> changes.MetaSet:
    request, rows = message.request, decode_indexes(message.rows)
    return changes.MetaSet(
        partition_id=request.partition_id,
        global_indexes=rows,
        columns=decode_meta_columns(request.custom_meta, rows.size),
    )


def _encode_sealed(change: changes.PartitionSealed) -> pb.PartitionSealed:
    return pb.PartitionSealed(partition_id=change.partition_id)


def _decode_sealed(message: pb.PartitionSealed) -> changes.PartitionSealed:
    return changes.PartitionSealed(partition_id=message.partition_id)


def _encode_groups_closed(change: changes.GroupsClosed) -> pb.GroupsClosed:
    return pb.GroupsClosed(partition_id=change.partition_id, names=change.names)


def _decode_groups_closed(message: pb.GroupsClosed) -> changes.GroupsClosed:
    return changes.GroupsClosed(partition_id=message.partition_id, names=list(message.names))


def _encode_samples_cleared(change: changes.SamplesCleared) -> pb.SamplesCleared:
    return pb.SamplesCleared(partition_id=change.partition_id, rows=encode_indexes(change.global_indexes))


def _decode_samples_cleared(message: pb.SamplesCleared) -> changes.SamplesCleared:
    return changes.SamplesCleared(partition_id=message.partition_id, global_indexes=decode_indexes(message.rows))


def _encode_partition_cleared(change: changes.PartitionCleared) -> pb.PartitionCleared:
    return pb.PartitionCleared(partition_id=change.partition_id)


def _decode_partition_cleared(message: pb.PartitionCleared) -> changes.PartitionCleared:
    return changes.PartitionCleared(partition_id=message.partition_id)


def _encode_task_seen(change: changes.TaskSeen) -> pb.TaskSeen:
    return pb.TaskSeen(partition_id=change.partition_id, task_name=change.task_name)


def _decode_task_seen(message: pb.TaskSeen) -> changes.TaskSeen:
    return changes.TaskSeen(partition_id=message.partition_id, task_name=message.task_name)


def _encode_batch_planned(change: changes.BatchPlanned) -> pb.BatchPlanned:
    return pb.BatchPlanned(
        partition_id=change.partition_id,
        task_name=change.task_name,
        binding=encode_binding(change.batch_spec),
        ranks=map(encode_part, change.plan.ranks),
    )


def _decode_batch_planned(message: pb.BatchPlanned) -> changes.BatchPlanned:
    return changes.BatchPlanned(
        partition_id=message.partition_id,
        task_name=message.task_name,
        batch_spec=decode_binding(message.binding),
        plan=Plan(ranks=tuple(map(decode_part, message.ranks))),
    )


def _encode_end_reached(change: changes.EndReached) -> pb.EndReached:
    return pb.EndReached(
        partition_id=change.partition_id,
        task_name=change.task_name,
        dp_size=change.dp_size,
        end=encode_end(change.end),
    )


def _decode_end_reached(message: pb.EndReached) -> changes.EndReached:
    return changes.EndReached(
        partition_id=message.partition_id,
        task_name=message.task_name,
        dp_size=message.dp_size,
        end=decode_end(message.end),
    )


def _encode_queue_claimed(change: changes.QueueClaimed) -> pb.QueueClaimed:
    return pb.QueueClaimed(
        partition_id=change.partition_id,
        task_name=change.task_name,
        request_id=change.request_id,
        part=encode_part(change.part),
        lease_seconds=change.lease_seconds or 0.0,
        max_deliveries=change.max_deliveries or 0,
        group_block_size=change.group_block_size,
    )


def _decode_queue_claimed(message: pb.QueueClaimed) -> changes.QueueClaimed:
    return changes.QueueClaimed(
        partition_id=message.partition_id,
        task_name=message.task_name,
        request_id=message.request_id,
        part=decode_part(message.part),
        lease_seconds=message.lease_seconds or None,
        max_deliveries=message.max_deliveries or None,
        group_block_size=message.group_block_size if message.HasField("group_block_size") else None,
    )


def _some(indexes: Indexes | None) -> list[int]:
    return [] if indexes is None else indexes.tolist()


def _encode_claim_released(change: changes.ClaimReleased) -> pb.ClaimReleased:
    return pb.ClaimReleased(
        partition_id=change.partition_id,
        task_name=change.task_name,
        request_id=change.request_id,
        global_indexes=_some(change.global_indexes),
        is_final=change.is_final,
    )


def _decode_claim_released(message: pb.ClaimReleased) -> changes.ClaimReleased:
    return changes.ClaimReleased(
        partition_id=message.partition_id,
        task_name=message.task_name,
        request_id=message.request_id,
        global_indexes=decode_integers(message.global_indexes) if message.global_indexes else None,
        is_final=message.is_final,
    )


def _encode_claim_acked(change: changes.ClaimAcked) -> pb.ClaimAcked:
    return pb.ClaimAcked(
        partition_id=change.partition_id,
        task_name=change.task_name,
        request_id=change.request_id,
        global_indexes=_some(change.global_indexes),
    )


def _decode_claim_acked(message: pb.ClaimAcked) -> changes.ClaimAcked:
    return changes.ClaimAcked(
        partition_id=message.partition_id,
        task_name=message.task_name,
        request_id=message.request_id,
        global_indexes=decode_integers(message.global_indexes) if message.global_indexes else None,
    )


def _encode_claim_extended(change: changes.ClaimExtended) -> pb.ClaimExtended:
    return pb.ClaimExtended(
        partition_id=change.partition_id,
        task_name=change.task_name,
        request_id=change.request_id,
        lease_seconds=change.lease_seconds,
    )


def _decode_claim_extended(message: pb.ClaimExtended) -> changes.ClaimExtended:
    return changes.ClaimExtended(
        partition_id=message.partition_id,
        task_name=message.task_name,
        request_id=message.request_id,
        lease_seconds=message.lease_seconds,
    )


def _encode_lease_expired(change: changes.LeaseExpired) -> pb.LeaseExpired:
    return pb.LeaseExpired(partition_id=change.partition_id, task_name=change.task_name, request_id=change.request_id)


def _decode_lease_expired(message: pb.LeaseExpired) -> changes.LeaseExpired:
    return changes.LeaseExpired(
        partition_id=message.partition_id, task_name=message.task_name, request_id=message.request_id
    )


def _encode_consumption_reset(change: changes.ConsumptionReset) -> pb.ConsumptionReset:
    return pb.ConsumptionReset(
        partition_id=change.partition_id, task_name=change.task_name, keep_consumed=change.keep_consumed
    )


def _decode_consumption_reset(message: pb.ConsumptionReset) -> changes.ConsumptionReset:
    return changes.ConsumptionReset(
        partition_id=message.partition_id, task_name=message.task_name, keep_consumed=message.keep_consumed
    )


# For each kind of change: its name in JournalRecord, how it is encoded and decoded.
_FORMS: Final[dict[type[Any], tuple[str, Callable[[Any], Any], Callable[[Any], changes.Change]]]] = {
    changes.PartitionCreated: ("partition_created", _encode_created, _decode_created),
    changes.SamplesWritten: ("samples_written", _encode_written, _decode_written),
    changes.MetaSet: ("meta_set", _encode_meta_set, _decode_meta_set),
    changes.PartitionSealed: ("partition_sealed", _encode_sealed, _decode_sealed),
    changes.GroupsClosed: ("groups_closed", _encode_groups_closed, _decode_groups_closed),
    changes.SamplesCleared: ("samples_cleared", _encode_samples_cleared, _decode_samples_cleared),
    changes.PartitionCleared: ("partition_cleared", _encode_partition_cleared, _decode_partition_cleared),
    changes.TaskSeen: ("task_seen", _encode_task_seen, _decode_task_seen),
    changes.BatchPlanned: ("batch_planned", _encode_batch_planned, _decode_batch_planned),
    changes.EndReached: ("end_reached", _encode_end_reached, _decode_end_reached),
    changes.QueueClaimed: ("queue_claimed", _encode_queue_claimed, _decode_queue_claimed),
    changes.ClaimReleased: ("claim_released", _encode_claim_released, _decode_claim_released),
    changes.ClaimAcked: ("claim_acked", _encode_claim_acked, _decode_claim_acked),
    changes.ClaimExtended: ("claim_extended", _encode_claim_extended, _decode_claim_extended),
    changes.LeaseExpired: ("lease_expired", _encode_lease_expired, _decode_lease_expired),
    changes.ConsumptionReset: ("consumption_reset", _encode_consumption_reset, _decode_consumption_reset),
}
_DECODERS: Final = {name: decode for name, _, decode in _FORMS.values()}
