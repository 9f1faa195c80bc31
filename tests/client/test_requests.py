"""Arguments that cannot be sent are named, with what was got; all others become messages."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from tq_service.client.batch_meta import NO_NAMESPACE
from tq_service.client.requests import get_meta_request, listed, request_of, write_message, write_of
from tq_service.errors import InvalidArgumentError
from tq_service.samplers import ChosenSampler, PackedSampler, ReplaySampler, SequentialSampler
from tq_service.v1 import controller_service_pb2 as pb

CLAIM: dict[str, Any] = {
    "partition_id": "p",
    "task_name": "t",
    "data_fields": ["a"],
    "batch_size": 2,
    "min_batch_size": None,
    "batch_unit": "sample",
    "micro_batch_size": None,
    "sampler": None,
    "sampler_config": None,
    "dp_rank": None,
    "drop_last": False,
    "where": (),
    "order_by": (),
    "lease": None,
    "max_deliveries": None,
    "claim_name": None,
    "max_uses": None,
    "unmatched": "wait",
    "least_members": None,
}
PACKED = PackedSampler(optimizer_steps=2, pack_max_length=64)


@pytest.mark.parametrize(
    ("arguments", "field", "message"),
    [
        ({"partition_id": None}, "partition_id", "partition_id is None"),
        ({"partition_id": 3}, "partition_id", "partition_id is 3, expected a string"),
        ({"partition_id": "\ud800"}, "partition_id", "expected a string of valid Unicode"),
        (
            {"data_fields": "score"},
            "data_fields",
            r"data_fields is 'score', expected a list of strings such as \['score'\]",
        ),
        ({"data_fields": ["a", 3]}, "data_fields", r"data_fields\[1\] is 3, expected a string"),
        ({"data_fields": 3}, "data_fields", "data_fields is 3, expected a list"),
        ({"batch_size": None}, "batch_size", "batch_size is None"),
        ({"batch_size": "2"}, "batch_size", "batch_size is '2', expected a 64-bit integer"),
        ({"batch_size": 2.0}, "batch_size", "batch_size is 2.0, expected a 64-bit integer"),
        ({"batch_size": 1 << 63}, "batch_size", "batch_size is 9223372036854775808, expected a 64-bit integer"),
        ({"dp_rank": 1 << 31}, "dp_rank", "dp_rank is 2147483648, expected a 32-bit integer"),
        ({"batch_unit": "rows"}, "batch_unit", "batch_unit is 'rows'; expected one of sample, group"),
        ({"lease": 0}, "lease", "lease is 0, expected a positive number"),
        ({"lease": float("nan")}, "lease", "expected a finite number of seconds"),
        ({"max_deliveries": 0}, "max_deliveries", "max_deliveries is 0"),
        ({"least_members": 0}, "least_members", "least_members is 0, expected at least 1"),
        ({"unmatched": "drop"}, "unmatched", "unmatched is 'drop'; expected one of wait, fail, clear"),
        ({"where": [("a", "==")]}, "where", r"where\[0\] is \('a', '=='\), expected \(column, operator, value\)"),
        ({"where": [("a", "in", "xy")]}, r"where[0] with 'in'", "expected a list"),
        ({"where": [("a", "==", 1 << 63)]}, "int64_value", "expected a 64-bit integer"),
        ({"where": [(3, "==", 1)]}, "column", "column is 3, expected a string"),
        ({"order_by": ["a", 3]}, "order_by", r"order_by\[1\] is 3, expected a string"),
        ({"sampler_config": {"a": object()}}, "sampler_config", "JSON-like"),
        ({"sampler": 3}, "sampler", "sampler is 3; expected a name"),
        ({"sampler": PackedSampler}, "sampler", "expected a name such as 'seqlen_balanced', or an object"),
        (
            {"sampler": PACKED, "sampler_config": {"align": 8}},
            "sampler_config",
            r"sampler_config is \{'align': 8\} and sampler is PackedSampler\(.*pass the name 'packed'",
        ),
    ],
)
def test_what_cannot_be_sent_is_named(arguments: dict[str, Any], field: str, message: str) -> None:
    with pytest.raises(InvalidArgumentError, match=message) as caught:
        get_meta_request(**{**CLAIM, **arguments})
    assert caught.value.field == field


@pytest.mark.parametrize("name", ["keys", "groups"])
@pytest.mark.parametrize("empty", [[], (), np.array([])])
def test_an_empty_list_is_not_taken_for_one_that_is_not_given(name: str, empty: Any) -> None:
    others = {"keys": None, "groups": None, "group_size": None, "custom_meta": None, name: empty}
    with pytest.raises(InvalidArgumentError, match=f"{name} is empty, expected one name per sample"):
        write_of(NO_NAMESPACE, target="p", row_count=2, **others)
    write = write_of(NO_NAMESPACE, target="p", row_count=0, **others)
    assert write_message([write]).row_count == 0


def test_what_is_not_given_is_not_sent() -> None:
    request = get_meta_request(**CLAIM)
    assert not request.HasField("dp_rank")
    assert not request.HasField("sampler_config")
    assert not request.HasField("lease")
    assert (request.min_batch_size, request.sampler, request.max_deliveries) == (0, "", 0)
    assert len(request.request_id) == 16
    assert get_meta_request(**CLAIM).request_id != request.request_id


@pytest.mark.parametrize(
    "own",
    [
        {},
        {"dp_rank": 3, "batch_index": 7},
        {"claim_name": "rank0/batch3", "lease": 1.5, "max_deliveries": 2},
        {"sampler_config": {"n": 2}, "where": [("v", ">=", 1)], "order_by": ["-v"]},
        {"batch_size": np.int64(2), "data_fields": np.array(["a"])},
    ],
)
def test_a_repeated_request_differs_in_its_id_alone(own: dict[str, Any]) -> None:
    first, second = (get_meta_request(**{**CLAIM, **own}) for _ in range(2))
    assert first.request_id != second.request_id
    second.request_id = first.request_id
    assert first == second
    for name in own:
        assert first.HasField(name) if name in {"dp_rank", "batch_index", "lease"} else getattr(first, name)


@pytest.mark.parametrize("wrong", [{"batch_size": 2.0}, {"batch_size": [2]}, {"max_uses": 0}, {"claim_name": ""}])
def test_a_wrong_argument_is_refused_beside_an_equal_right_one(wrong: dict[str, Any]) -> None:
    for _ in range(2):
        get_meta_request(**CLAIM)
        with pytest.raises(InvalidArgumentError) as caught:
            get_meta_request(**{**CLAIM, **wrong})
        assert caught.value.field == next(iter(wrong))


@pytest.mark.parametrize(
    ("sampler", "name", "config"),
    [
        (SequentialSampler(), "sequential", None),
        (PACKED, "packed", {"optimizer_steps": 2, "pack_max_length": 64}),
        (PackedSampler(optimizer_steps=np.int64(1), pack_max_length=8, align=1, even_steps=False), "packed",
         {"optimizer_steps": 1, "pack_max_length": 8, "even_steps": False}),
        (ReplaySampler(fresh=0, max_uses=3), "replay", {"fresh": 0, "max_uses": 3}),
        (ChosenSampler(rows=(4, 2)), "chosen", {"rows": [4, 2]}),
    ],
)  # fmt: skip
def test_a_sampler_is_sent_by_its_name_with_the_options_that_are_set(
    sampler: Any, name: str, config: dict[str, Any] | None
) -> None:
    request = get_meta_request(**{**CLAIM, "sampler": sampler})
    expected = get_meta_request(**{**CLAIM, "sampler": name, "sampler_config": config})
    expected.request_id = request.request_id
    assert request == expected


def test_conditions_have_the_types_of_their_values() -> None:
    where = [
        ("a", "in", np.array([1, 2])),
        ("b", "==", np.float32(0.5)),
        ("c", "!=", torch.tensor(True)),
        ("d", "<", "x"),
    ]
    conditions = get_meta_request(**{**CLAIM, "where": where}).where
    assert [value.int64_value for value in conditions[0].values] == [1, 2]
    assert [each.values[0].WhichOneof("kind") for each in conditions[1:]] == [
        "double_value",
        "bool_value",
        "string_value",
    ]


@pytest.mark.parametrize(
    "values", [[3, 1], (3, 1), np.array([3, 1]), torch.tensor([3, 1]), range(3, 0, -2), iter([3, 1])]
)
def test_whatever_can_be_iterated_is_a_list(values: Any) -> None:
    assert request_of(pb.ClearSamplesRequest, partition_id="p", global_indexes=values).global_indexes == [3, 1]


def test_a_list_is_copied() -> None:
    names = ["a"]
    assert listed("names", names) == names
    assert listed("names", names) is not names
    assert listed("names", None) == []
