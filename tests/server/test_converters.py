"""Requests are read once for all calls that ask alike, and never mixed up."""

import pytest

from tq_service.errors import InvalidArgumentError
from tq_service.samplers import SequentialSampler
from tq_service.server.converters import claim_request, claim_spec
from tq_service.state.plan import Rank
from tq_service.v1 import controller_service_pb2 as pb


def request(**arguments):
    asked = {"request_id": bytes(16), "partition_id": "p", "task_name": "t", "data_fields": ["x"], "batch_size": 8}
    return pb.GetMetaRequest(**{**asked, **arguments})


def test_what_differs_between_calls_makes_no_other_claim_spec():
    first = claim_spec(request(dp_rank=0, dp_size=4, batch_index=0))
    calls = [
        request(dp_rank=3, dp_size=4, batch_index=9, epoch=2, incarnation=b"i" * 16, max_wait={"seconds": 3}),
        request(dp_rank=0, dp_size=4, batch_index=0, request_id=b"r" * 16, partition_id="q", task_name="u"),
    ]
    assert all(claim_spec(call) is first for call in calls)


@pytest.mark.parametrize(
    "other",
    [
        {"data_fields": ["x", "y"]},
        {"batch_size": 16},
        {"min_batch_size": 4},
        {"batch_unit": pb.BATCH_UNIT_GROUP},
        {"micro_batch_size": 2},
        {"sampler": "rank_aware"},
        {"sampler_config": {"n_samples_per_prompt": 2}},
        {"where": [pb.Condition(column="v", operator=pb.OPERATOR_EQ)]},
        {"order_by": [pb.Order(column="v")]},
        {"drop_last": True},
        {"finite": True},
    ],
)
def test_everything_else_does(other):
    if "where" in other:
        other["where"][0].values.add(int64_value=1)
    assert claim_spec(request()) != claim_spec(request(**other))


def test_a_long_request_is_read_without_being_remembered():
    long = request(data_fields=[f"field_{number:03}" for number in range(200)])
    assert claim_spec(long) == claim_spec(long)
    assert claim_spec(long) is not claim_spec(long)


def test_options_are_compared_as_canonical_json():
    one = request(sampler_config={"b": 2, "a": [1.5, 3.0]})
    assert claim_spec(one).batch_spec.sampler_config == '{"a": [1.5, 3], "b": 2}'
    assert claim_spec(request()).batch_spec.sampler_config == "{}"


def test_a_wrong_request_is_refused_each_time():
    for _ in range(2):
        with pytest.raises(InvalidArgumentError, match="batch_size is -1"):
            claim_spec(request(batch_size=-1))


def test_a_claim_has_what_is_its_own():
    call = request(dp_rank=3, dp_size=4, batch_index=9, epoch=2)
    claim = claim_request(call, claim_spec(call), SequentialSampler())
    assert claim.rank == Rank(dp_rank=3, dp_size=4, batch_index=9)
    assert (claim.task_name, claim.epoch, claim.spec.min_batch_size, claim.spec.data_fields) == ("t", 2, 8, ("x",))
    queue = request(min_batch_size=2)
    claim = claim_request(queue, claim_spec(queue), SequentialSampler())
    assert (claim.rank, claim.epoch, claim.spec.min_batch_size) == (None, None, 2)


def test_a_request_of_any_size_is_not_kept_waiting():
    where = pb.Condition(column="v", operator=pb.OPERATOR_IN)
    for number in range(60_000):
        where.values.add(int64_value=1_000_000 + number)
    assert request(where=[where]).ByteSize() > 256 * 1024
    with pytest.raises(InvalidArgumentError, match="expected at most 262144"):
        claim_spec(request(where=[where]))
    del where.values[20_000:]
    assert len(claim_spec(request(where=[where])).batch_spec.where[0].values) == 20_000
