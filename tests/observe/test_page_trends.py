"""Rates, curves, waits and batches, from one status to the next."""

import pytest
from page_statuses import batch, partition, status, storage, task, wait

from tq_service.observe.page.trends import POINT_COUNT, ROW_POINT_COUNT, Trends, group_of, recent_mean
from tq_service.step_times import StepTimes


def test_samples_are_counted_from_the_second_status_on() -> None:
    trends = Trends()
    trends.see(status(partition(inserted=100)), 10.0)
    assert list(trends.curves["inserted"]) == [None]
    trends.see(status(partition(inserted=130), partition("train@1", 10, incarnation=b"n" * 16)), 12.0)
    assert list(trends.curves["inserted"]) == [None, 20.0]
    assert list(trends.partitions["train@0"].inserted_per_second) == [None, 15.0]
    assert list(trends.partitions["train@1"].inserted_per_second) == [5.0]
    assert list(trends.curves["present"]) == [100, 140]


def test_a_partition_that_is_made_again_begins_again() -> None:
    trends = Trends()
    trends.see(status(partition(inserted=100, incarnation=b"a" * 16)), 0.0)
    trends.see(status(partition(inserted=6, incarnation=b"b" * 16)), 2.0)
    assert list(trends.curves["inserted"]) == [None, 3.0]
    assert list(trends.partitions["train@0"].present) == [6]
    trends.see(status(), 4.0)
    assert trends.partitions == {}


def test_a_status_that_is_missing_is_a_gap_and_counts_in_the_time_of_the_next() -> None:
    trends = Trends()
    trends.see(status(partition(inserted=0, tasks=(task(delivered_per_second=2.5, consumed_count=2),))), 0.0)
    trends.miss()
    trends.see(status(partition(inserted=40, tasks=(task(delivered_per_second=3.5, consumed_count=8),))), 4.0)
    assert list(trends.curves["inserted"]) == [None, None, 10.0]
    assert list(trends.curves["used"]) == [100, None, 100]
    assert list(trends.curves["delivered"]) == [None, None, 1.5]
    assert list(trends.partitions["train@0"].delivered_per_second["update"]) == [2.5, None, 3.5]
    trends.see(status(storages=(storage(used_bytes=1), storage("s1", used_bytes=2))), 6.0)
    assert trends.curves["used"][-1] == 3


def test_what_was_delivered_counts_also_where_its_partition_is_cleared_next() -> None:
    trends = Trends()
    trends.see(status(partition("train@0", tasks=(task(consumed_count=4),))), 0.0)
    new = partition("train@1", incarnation=b"n" * 16, tasks=(task(consumed_count=3), task("reward", consumed_count=1)))
    trends.see(status(partition("train@0", tasks=(task(consumed_count=8),)), new), 2.0)
    trends.see(status(partition("train@1", incarnation=b"n" * 16, tasks=(task(consumed_count=1),))), 4.0)  # released
    reset = task(epoch=1, consumed_count=2)
    trends.see(status(partition("train@1", incarnation=b"n" * 16, tasks=(reset,))), 6.0)
    assert list(trends.curves["delivered"]) == [None, 4.0, 0.0, 1.0]


def test_curves_are_bounded() -> None:
    trends = Trends()
    for moment in range(POINT_COUNT + 20):
        trends.see(status(partition(inserted=moment)), float(moment))
    assert len(trends.curves["present"]) == POINT_COUNT
    assert len(trends.partitions["train@0"].present) == ROW_POINT_COUNT


def test_a_partition_has_changed_when_its_counts_have() -> None:
    trends = Trends()
    trends.see(status(partition(tasks=(task(),))), 0.0)
    trends.see(status(partition(tasks=(task(),))), 2.0)
    assert trends.partitions["train@0"].changed_at == 0.0
    trends.see(status(partition(tasks=(task(consumed_count=1),))), 4.0)
    assert trends.partitions["train@0"].changed_at == 4.0


def test_a_wait_lasts_from_the_first_status_that_has_it_without_a_gap() -> None:
    trends = Trends()
    first, second = wait(), wait(code="NO_SAMPLES")
    for moment, waits in enumerate([(first,), (first, second), (wait(text="1 sample is ready"),), (second,), (first,)]):
        trends.see(status(waits=waits), float(moment))
        if moment == 2:
            assert trends.waits_since(first) == 0.0  # the text tells another count of the same wait
    assert trends.waits_since(first) == 4.0
    with pytest.raises(KeyError):
        trends.waits_since(second)


def test_a_wait_of_a_task_that_goes_on_is_a_new_one_each_time() -> None:
    trends = Trends()
    for moment, consumed_count in enumerate((4, 4, 8, 8, 8)):
        one = partition(tasks=(task(consumed_count=consumed_count),))
        trends.see(status(one, waits=(wait(), wait(task_name="other"))), float(moment))
    assert trends.waits_since(wait()) == 2.0
    assert trends.waits_since(wait(task_name="other")) == 0.0


def test_batches_of_all_steps_of_a_task_are_in_one_row_also_once_their_partitions_are_cleared() -> None:
    trends = Trends()
    trends.see(status(partition("train@0", tasks=(task(recent_batches=(batch(0, 5, 5), batch(1, 6, 4))),))), 0.0)
    trends.see(status(partition("train@0", tasks=(task(recent_batches=(batch(1, 6, 4), batch(2, 7, 3))),))), 2.0)
    trends.see(status(partition("train@1", tasks=(task(recent_batches=(batch(0, 1, 9),)), task("other")))), 4.0)
    (balance,) = trends.balances.values()
    assert list(trends.balances) == [("train", "update")]
    assert [(name, one.batch_index) for name, one in balance] == [
        ("train@0", 0), ("train@0", 1), ("train@0", 2), ("train@1", 0),
    ]  # fmt: skip


def test_batches_of_another_epoch_or_incarnation_are_new() -> None:
    trends = Trends()
    for moment, (epoch, incarnation) in enumerate([(0, b"a" * 16), (1, b"a" * 16), (0, b"b" * 16), (0, b"b" * 16)]):
        one = task(epoch=epoch, recent_batches=(batch(0, 1, 1),))
        trends.see(status(partition(incarnation=incarnation, tasks=(one,))), float(moment))
    assert len(trends.balances["train", "update"]) == 3


def test_the_last_times_of_a_task_stay_also_once_their_partitions_are_cleared() -> None:
    trends = Trends()
    first, second = StepTimes(work_seconds=1.0, batch_count=1), StepTimes(work_seconds=2.0, batch_count=2)
    trends.see(status(partition("train@0", tasks=(task(step_times=first),))), 0.0)
    trends.see(status(partition("train@0", tasks=(task(step_times=first),)),
                      partition("train@1", tasks=(task(step_times=second), task("other")))), 2.0)  # fmt: skip
    trends.see(status(partition("train@2", tasks=(task(),))), 4.0)
    assert trends.steps == {("train", "update"): second}


def test_times_are_bounded() -> None:
    trends = Trends()
    for number in range(40):
        one = partition(f"run-{number}@0", tasks=(task(step_times=StepTimes(work_seconds=1.0)),))
        trends.see(status(one), float(number))
    assert list(trends.steps) == [(f"run-{number}", "update") for number in range(16, 40)]


def test_balances_are_bounded() -> None:
    trends = Trends()
    for number in range(40):
        one = partition(f"run-{number}@0", tasks=(task(recent_batches=(batch(0, 1),)),))
        trends.see(status(one), float(number))
    assert ("run-39", "update") in trends.balances
    assert ("run-0", "update") not in trends.balances
    assert len(trends.balances) == 24


def test_the_group_of_a_partition_is_its_name_up_to_the_step() -> None:
    assert [group_of(name) for name in ("train@3", "train", "a@b@c", "@x")] == ["train", "train", "a", ""]


def test_the_mean_of_a_curve_leaves_gaps_out() -> None:
    assert recent_mean([9.0, 1.0, None, 2.0, None, 3.0]) == 2.0
    assert recent_mean([None, None]) is None
