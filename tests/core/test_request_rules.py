"""What must hold of requests whatever the state of the service is refused as they are made, by whoever makes them."""

import math

import pytest
from domain_support import asks, batch_spec, new_write

from tq_service.errors import InvalidArgumentError
from tq_service.schema import Admission, FieldSpec
from tq_service.state.partition import PartitionSettings
from tq_service.state.plan import ClaimSpec, Condition, LeaseTerms, Order, Rank


def claim_spec(**arguments):
    fixed = {name: arguments.pop(name) for name in ("batch_size", "micro_batch_size", "order_by") if name in arguments}
    return ClaimSpec(**{"batch_spec": batch_spec(**fixed), "data_fields": ("x",), **arguments})


@pytest.mark.parametrize(
    ("make", "field", "words"),
    [
        (lambda: PartitionSettings(expected_samples=-1), "expected_samples", "is -1; expected 0 or more"),
        (lambda: PartitionSettings(samples_per_round=0), "samples_per_round", "is 0; expected 1 or more, or no value"),
        (lambda: PartitionSettings(tasks=("a", "a")), "tasks", "contains duplicates"),
        (lambda: PartitionSettings(tasks=("a", "")), "tasks", "printable"),
        (
            lambda: PartitionSettings(tasks=("train", "reward"), admissions=(Admission("trian", 1),)),
            "admissions",
            "'trian', which is not among tasks; .*'train'",
        ),
        (lambda: PartitionSettings(max_bytes=0), "max_bytes", "is 0; expected 1 or more, or no value"),
        (lambda: PartitionSettings(fields=(FieldSpec("x"), FieldSpec("x"))), "fields", "contains duplicates"),
        (lambda: PartitionSettings(fields=(FieldSpec("x", "bool", "object"),)), "dtype", "declared as an object field"),
        (
            lambda: PartitionSettings(fields=(FieldSpec("x", "", "object", (2,)),)),
            "row_shape",
            "declared as an object field",
        ),
        (
            lambda: PartitionSettings(admissions=(Admission("", 1),)),
            "task_name",
            "printable",
        ),
        (
            lambda: PartitionSettings(admissions=(Admission("t", 1),) * 2),
            "admissions",
            "contains duplicates",
        ),
        (lambda: new_write(1, key_mode="existing"), "key_mode", "neither keys nor global_indexes"),
        (lambda: claim_spec(data_fields=()), "data_fields", "is empty"),
        (lambda: claim_spec(data_fields=("",)), "data_fields", "name each field"),
        (lambda: claim_spec(data_fields=("x", "x")), "data_fields", "contains duplicates"),
        (lambda: claim_spec(batch_size=0), "batch_size", "expected a positive number"),
        (lambda: claim_spec(batch_size=2**23, dp_size=3), "batch_size", "for 3 ranks"),
        (lambda: claim_spec(micro_batch_size=-1), "micro_batch_size", "0 for the whole batch"),
        (lambda: claim_spec(order_by=(Order("a"), Order(""))), "order_by", "empty column name at position 1"),
        (lambda: claim_spec(order_by=(Order("a"), Order("a", descending=True))), "order_by", "contains duplicates"),
        (lambda: claim_spec(batch_size=4, min_batch_size=5), "min_batch_size", "expected 1 to 4, the batch_size"),
        (lambda: claim_spec(batch_size=4, min_batch_size=2, dp_size=1), "min_batch_size", "is only for queue workers"),
        (lambda: Rank(dp_rank=0, dp_size=0, batch_index=0), "dp_size", "expected 1 to 65536"),
        (lambda: Rank(dp_rank=2, dp_size=2, batch_index=0), "dp_rank", "less than dp_size"),
        (lambda: Rank(dp_rank=0, dp_size=1, batch_index=-1), "batch_index", "count from 0"),
        (lambda: Rank.of(dp_rank=0, dp_size=None, batch_index=1), "dp_size", "got dp_rank and batch_index without"),
        (lambda: LeaseTerms(seconds=math.nan), "lease", "is nan; expected a positive number"),
        (lambda: LeaseTerms(seconds=86_401), "lease", r"at most 86400 \(a day\)"),
        (lambda: LeaseTerms(seconds=0, max_deliveries=2), "lease", "is 0; expected a positive number"),
        (lambda: LeaseTerms(seconds=1, max_deliveries=-1), "max_deliveries", "0 for no limit"),
        (lambda: asks((0, 2, 0), lease=LeaseTerms(seconds=1)), "lease", "lease is only for queue workers"),
        (lambda: asks(request_id=b"short"), "request_id", "has 5 bytes"),
        (lambda: asks(task=""), "task_name", "printable"),
        (lambda: Condition("", "==", (1,)), "where", "expected both"),
        (lambda: Condition("v", None, (1,)), "where", "expected both"),
        (lambda: Condition("v", "==", (1, 2)), "where", "got 2 values"),
        (lambda: Condition("v", "in", (1, None)), "where", "got 1 values"),
        (lambda: Condition("v", "in", (1, "a")), "where", "text and numbers"),
    ],
)
def test_what_can_never_be_right_is_refused(make, field, words):
    with pytest.raises(InvalidArgumentError, match=words) as caught:
        make()
    assert caught.value.field == field


def test_no_number_of_a_rank_is_a_queue_worker():
    assert Rank.of(dp_rank=None, dp_size=None, batch_index=None) is None
    assert Rank.of(dp_rank=1, dp_size=2, batch_index=3) == Rank(dp_rank=1, dp_size=2, batch_index=3)


def test_the_least_batch_is_the_whole_one_where_none_is_given():
    assert claim_spec(batch_size=4) == claim_spec(batch_size=4, min_batch_size=4)
    assert claim_spec(batch_size=4, dp_size=2).min_batch_size == 4


def test_limits_are_the_same_in_any_order():
    a, b = Admission("a", 1), Admission("b", 2, "group")
    assert PartitionSettings(admissions=(b, a)) == PartitionSettings(admissions=(a, b))


def test_tasks_are_the_same_in_any_order():
    assert PartitionSettings(tasks=("b", "a")) == PartitionSettings(tasks=("a", "b"))
