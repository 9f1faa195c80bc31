"""Answers become dataclasses with the fields of the same names."""

import dataclasses

import pytest
from google.protobuf.duration_pb2 import Duration

from tq_service.errors import InvalidArgumentError
from tq_service.results import (
    CheckpointCopy,
    ClaimLease,
    ConsumptionStatus,
    ControllerStatus,
    FieldStatus,
    MetaColumnStatus,
    PartitionDescription,
    PartitionSummary,
    PartitionWait,
    ProductionStatus,
    RecentBatch,
    RestoredCheckpoint,
    SamplerDescription,
    SamplerOption,
    ServiceInfo,
    StorageStat,
    StorageStatus,
    TaskStatus,
    WaitReason,
)
from tq_service.schema import Admission, FieldSpec
from tq_service.state.plan import BatchSpec, Condition, Order
from tq_service.v1 import controller_service_pb2 as pb
from tq_service.v1 import metadata_pb2
from tq_service.v1 import storage_service_pb2 as storage_pb
from tq_service.wire.messages import read_message, to_message

MESSAGES = {
    ConsumptionStatus: pb.CheckConsumptionResponse,
    ProductionStatus: pb.CheckProductionResponse,
    PartitionSummary: pb.PartitionSummary,
    PartitionDescription: pb.DescribePartitionResponse,
    FieldStatus: pb.FieldStatus,
    TaskStatus: pb.TaskStatus,
    ClaimLease: pb.ClaimLease,
    SamplerDescription: pb.SamplerDescription,
    SamplerOption: pb.SamplerOption,
    CheckpointCopy: pb.CheckpointResponse,
    RestoredCheckpoint: pb.RestoreResponse,
    ServiceInfo: pb.ServiceInfo,
    StorageStatus: pb.StorageStatus,
    ControllerStatus: pb.ControllerStatus,
    PartitionWait: pb.PartitionWait,
    WaitReason: pb.WaitReason,
}


@pytest.mark.parametrize("kind", MESSAGES, ids=lambda kind: kind.__name__)
def test_every_field_of_a_message_is_read_and_no_other(kind):
    names = {
        field.name + ("_seconds" if field.message_type is Duration.DESCRIPTOR else "")
        for field in MESSAGES[kind].DESCRIPTOR.fields
    }
    assert {field.name for field in dataclasses.fields(kind)} == names


def test_spans_are_seconds_in_both_directions():
    message = pb.CheckpointResponse(name="a", pause={"seconds": 1, "nanos": 500_000_000})
    copy = read_message(CheckpointCopy, message)
    assert copy.pause_seconds == 1.5
    assert to_message(pb.CheckpointResponse, copy) == message
    message.pause.nanos = -1
    with pytest.raises(InvalidArgumentError, match="pause has 1 seconds and -1 nanos") as caught:
        read_message(CheckpointCopy, message)
    assert caught.value.field == "pause"


def test_numbers_and_text_are_as_in_the_message():
    message = pb.CheckConsumptionResponse(
        consumed_count=1, total_count=2, skipped_count=3, sealed=True, epoch=5, leased_count=6
    )
    assert read_message(ConsumptionStatus, message) == ConsumptionStatus(
        consumed_count=1, total_count=2, skipped_count=3, sealed=True, complete=False, epoch=5, leased_count=6
    )
    options = [pb.SamplerOption(name="a", type="text", default_json='""', summary="A."), pb.SamplerOption(name="b")]
    message = pb.SamplerDescription(name="packed", summary="Packs.", options=options)
    assert read_message(SamplerDescription, message).options == (
        SamplerOption(name="a", type="text", default_json='""', summary="A."),
        SamplerOption(name="b", type="", default_json=None, summary=""),
    )


def test_messages_in_messages_become_dataclasses():
    message = pb.DescribePartitionResponse(
        summary=pb.PartitionSummary(partition_id="train", incarnation=b"i" * 16, inserted_count=4),
        expected_samples=0,
        fields=[pb.FieldStatus(spec=metadata_pb2.FieldSpec(name="x", dtype="int64"), produced_count=3)],
        tasks=[pb.TaskStatus(task_name="t", dead_lettered_indexes=[3, 1])],
        custom_meta_columns=[pb.MetaColumnStatus(name="version", kind="int64", has_json=True)],
        admissions=[pb.Admission(task_name="t", most=7)],
    )
    description = read_message(PartitionDescription, message)
    assert (description.summary.partition_id, description.summary.incarnation) == ("train", b"i" * 16)
    assert (description.expected_samples, description.max_bytes) == (0, None)  # one is set, the other is not
    assert description.fields == (FieldStatus(spec=FieldSpec("x", "int64"), produced_count=3),)
    assert description.tasks[0].dead_lettered_indexes == (3, 1)
    assert description.custom_meta_columns == (MetaColumnStatus(name="version", kind="int64", has_json=True),)
    assert description.admissions == (Admission("t", 7),)
    hash(description)  # nothing of protobuf is left in it


def test_what_is_otherwise_in_the_message_is_given():
    message = storage_pb.StatResponse(storage=metadata_pb2.StorageEndpoint(storage_id="s"), used_bytes=5)
    stat = read_message(StorageStat, message, storage_id="s", boot_id=b"b", max_bytes=None)
    assert (stat.storage_id, stat.boot_id, stat.max_bytes, stat.used_bytes) == ("s", b"b", None, 5)


def test_objects_become_messages_and_come_back():
    reason = WaitReason(code="NO_SAMPLES", text="none", task_name="t", data_fields=("x",), waiting_count=2)
    assert read_message(WaitReason, to_message(pb.WaitReason, reason)) == reason
    summary = PartitionSummary(partition_id="p", incarnation=b"", inserted_count=2, present_count=1, sealed=True)
    assert read_message(PartitionSummary, to_message(pb.PartitionSummary, summary)) == summary
    assert to_message(pb.PartitionSummary, summary, present_count=5).present_count == 5


def test_what_is_empty_has_the_default_of_the_dataclass():
    message = pb.Admission(task_name="t", most=7)
    assert read_message(Admission, message) == Admission("t", 7, "sample", "delivered", "default")
    assert not (message.policy or message.unit or message.given_back)
    message = pb.Admission(
        task_name="t", most=7, unit=pb.BATCH_UNIT_GROUP, given_back=pb.GIVEN_BACK_PUBLISHED, policy="actor"
    )
    assert read_message(Admission, message) == Admission("t", 7, "group", "published", "actor")


def test_words_and_values_are_read_as_what_they_mean():
    message = pb.GetMetaRequest(
        batch_size=4,
        batch_unit=pb.BATCH_UNIT_GROUP,
        where=[pb.Condition(column="v", operator=pb.OPERATOR_IN, values=[pb.MetaValue(int64_value=0)])],
        order_by=[pb.Order(column="v", descending=True)],
    )
    spec = read_message(BatchSpec, message, sampler_config="{}", data_fields=("x",))
    assert (spec.batch_unit, spec.micro_batch_size, spec.sampler) == ("group", None, "sequential")
    assert spec.where == (Condition("v", "in", (0,)),)
    assert spec.order_by == (Order("v", descending=True),)
    message.where[0].values.add()
    with pytest.raises(InvalidArgumentError, match="got 1 values"):
        read_message(BatchSpec, message, sampler_config="{}", data_fields=("x",))
    message.batch_unit = 9  # type: ignore[assignment]
    with pytest.raises(InvalidArgumentError, match="is 9; expected the enum number"):
        read_message(BatchSpec, message, sampler_config="{}", data_fields=("x",))


def test_dataclasses_become_messages_in_messages():
    summary = PartitionSummary(
        partition_id="train", incarnation=b"i" * 16, inserted_count=4, present_count=3, sealed=True
    )
    description = PartitionDescription(
        summary=summary,
        expected_samples=None,
        live_count=1,
        held_count=1,
        failed_count=1,
        group_count=0,
        rollout_count=2,
        fields=(FieldStatus(spec=FieldSpec("x", "int64"), produced_count=3),),
        tasks=(
            TaskStatus(
                task_name="t",
                epoch=1,
                consumed_count=2,
                skipped_count=0,
                planned_batch_count=0,
                dp_size=0,
                waiting_count=0,
                complete=False,
                dead_lettered_indexes=(3, 1),
                recent_batches=(
                    RecentBatch(batch_index=0),
                    RecentBatch(batch_index=1, tokens_per_rank=(5, 3), imbalance=0.25, padding_share=0.5),
                ),
            ),
        ),
        custom_meta_columns=(MetaColumnStatus(name="v", kind="", has_json=True),),
        used_bytes=8,
        max_bytes=9,
        admissions=(),
        waiting_put_count=0,
        declared_tasks=("t",),
        samples_per_round=4,
    )
    message = to_message(pb.DescribePartitionResponse, description)
    assert not message.HasField("expected_samples")
    assert read_message(PartitionDescription, message) == description
