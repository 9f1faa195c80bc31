"""What a loader says at the end of a partition: nothing, a warning, or that nothing was delivered."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch

import tq_service as tq
from tq_service.data import StreamingDataLoader, StreamingDataset, fetch_batch

GROUPS_OF_4 = {"sampler": "grpo_group_n", "sampler_config": {"n_samples_per_prompt": 4}}


@pytest.fixture
def partition(request: pytest.FixtureRequest, address: str) -> Iterator[str]:
    name = request.node.name
    yield name
    with tq.Client(address) as client:
        client.clear_partition(name)


@pytest.fixture
def client(address: str) -> Iterator[tq.Client]:
    with tq.Client(address) as client:
        yield client


def put(client: tq.Client, partition: str, count: int, **options: Any) -> tq.BatchMeta:
    return client.put(partition, {"index": torch.arange(count)}, **options)


def loader_of(address: str, partition: str, num_workers: int = 0, rank: int = 0, **changes: Any) -> StreamingDataLoader:
    options: dict[str, Any] = {
        "batch_size": 4, "data_fields": ["index"], "partition_id": partition, "task_name": "update_actor",
        "max_wait": 0.5, "dp_rank": rank,
    }  # fmt: skip
    return StreamingDataLoader(StreamingDataset(address, **{**options, **changes}), num_workers)


def sizes(loader: StreamingDataLoader) -> list[int]:
    with loader:
        return [meta.size for _, meta in loader]


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name.startswith("tq_service.data")]


def skip_in_groups(client: tq.Client, partition: str) -> dict[str, Any]:
    """Three groups of which none is whole: one is short, one has a failed and one a cleared member."""
    put(client, partition, 3, groups=["short"] * 3, group_size=4)
    meta = put(client, partition, 8, groups=["failed"] * 4 + ["cleared"] * 4, group_size=4)
    client.put(meta.select_samples([0]), state="failed")
    client.clear_samples(meta.select_samples([4]))
    return GROUPS_OF_4


def skip_by_where(client: tq.Client, partition: str) -> dict[str, Any]:
    put(client, partition, 6, custom_meta=[{"version": 1}] * 6)
    return {"where": [("version", ">=", 2)]}


def skip_by_drop_last(client: tq.Client, partition: str) -> dict[str, Any]:
    put(client, partition, 7)
    return {"drop_last": True}


def skip_failed_and_cleared(client: tq.Client, partition: str) -> dict[str, Any]:
    meta = put(client, partition, 6)
    client.put(meta.select_samples([0, 1]), state="failed")
    client.clear_samples(meta.select_samples([2, 3, 4, 5]))
    return {}


SKIPPING = {
    skip_in_groups: (
        {"failed_count": "1", "cleared_count": "1", "in_incomplete_groups_count": "9"},
        "9 in incomplete groups",
    ),
    skip_by_where: ({"excluded_count": "6"}, r"6 excluded by where=\[\('version', '>=', 2\)\]"),
    skip_by_drop_last: ({"left_over_count": "7"}, "7 left over by drop_last, .* has 8 samples"),
    skip_failed_and_cleared: ({"failed_count": "2", "cleared_count": "4"}, "2 failed; 4 cleared before"),
}


@pytest.mark.parametrize("finite", [False, True])
@pytest.mark.parametrize("skip", SKIPPING)
def test_an_end_without_a_micro_batch_is_an_error_on_all_ranks(
    client: tq.Client, address: str, partition: str, skip: Any, finite: bool
) -> None:
    options = {**skip(client, partition), "finite": finite}
    if not finite:
        client.seal_partition(partition)
    facts, message = SKIPPING[skip]
    errors = []
    for rank in (0, 1):
        with pytest.raises(tq.errors.NothingDeliveredError, match=message) as caught:
            sizes(loader_of(address, partition, rank=rank, dp_size=2, **options))
        errors.append((caught.value.message, caught.value.metadata))
    assert errors[0] == errors[1]
    named = {"partition_id": partition, "task_name": "update_actor"}
    assert errors[0][1] == {**named, **facts}
    assert partition in errors[0][0]


@pytest.mark.parametrize("num_workers", [1, 2])
def test_workers_say_it_too(client: tq.Client, address: str, partition: str, num_workers: int) -> None:
    options = skip_by_where(client, partition)
    client.seal_partition(partition)
    loader = loader_of(address, partition, num_workers, **options)
    for _ in range(2):
        with pytest.raises(tq.errors.NothingDeliveredError, match="6 excluded"):
            sizes(loader)


def test_a_partition_without_samples_is_no_error(client: tq.Client, address: str, partition: str) -> None:
    client.create_partition(partition)
    client.seal_partition(partition)
    assert sizes(loader_of(address, partition)) == []


@pytest.mark.parametrize("num_workers", [0, 2])
def test_what_was_skipped_is_warned_of_once(
    client: tq.Client, address: str, partition: str, num_workers: int, caplog: pytest.LogCaptureFixture
) -> None:
    skip_in_groups(client, partition)
    put(client, partition, 8, groups=["a"] * 4 + ["b"] * 4, group_size=4)
    client.seal_partition(partition)
    loader = loader_of(address, partition, num_workers, **GROUPS_OF_4)
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            assert sizes(loader) == [4, 4]
            assert sizes(loader) == []
            loader.reset()
    (warning,) = warnings_of(caplog)
    assert "8 samples were consumed, 11 were skipped: 9 in incomplete groups" in warning
    assert warning.endswith("; 1 failed; 1 cleared before they were delivered to the task")


def test_an_end_that_skips_nothing_says_nothing(
    client: tq.Client, address: str, partition: str, caplog: pytest.LogCaptureFixture
) -> None:
    put(client, partition, 10)
    client.seal_partition(partition)
    with caplog.at_level(logging.WARNING):
        assert sizes(loader_of(address, partition)) == [4, 4, 2]
    assert warnings_of(caplog) == []


def test_what_was_cleared_before_a_late_task_is_nothing_to_warn_of(
    client: tq.Client, address: str, partition: str, caplog: pytest.LogCaptureFixture
) -> None:
    client.clear_samples(put(client, partition, 100))
    put(client, partition, 4)
    client.seal_partition(partition)
    with caplog.at_level(logging.WARNING):
        assert sizes(loader_of(address, partition)) == [4]
    assert warnings_of(caplog) == []


@pytest.mark.parametrize("cleared", [False, True])
@pytest.mark.parametrize("start_batch_index", [2, 3, 9])
def test_a_restart_behind_the_last_batch_is_no_error(
    client: tq.Client, address: str, partition: str, start_batch_index: int, cleared: bool
) -> None:
    """Also with samples skipped: the task was given others before, so nothing says that this rank should get any."""
    meta = put(client, partition, 8)
    client.put(put(client, partition, 3), state="failed")
    client.seal_partition(partition)
    assert sizes(loader_of(address, partition)) == [4, 4]
    if cleared:
        client.clear_samples(meta)
    assert sizes(loader_of(address, partition, start_batch_index=start_batch_index)) == []


def test_an_epoch_that_keeps_what_was_consumed_is_no_error(client: tq.Client, address: str, partition: str) -> None:
    put(client, partition, 8)
    client.seal_partition(partition)
    assert sizes(loader_of(address, partition)) == [4, 4]
    client.reset_consumption(partition, "update_actor", 0, keep_consumed=True)
    assert sizes(loader_of(address, partition)) == []


def leased_batch(
    *, client: tq.Client, partition_id: str, task_name: str, data_fields: list[str], max_wait: float, **others: Any
) -> tuple[Any, tq.BatchMeta]:
    meta = client.get_meta(
        partition_id=partition_id, task_name=task_name, data_fields=data_fields, batch_size=4, max_wait=max_wait,
        min_batch_size=1, lease=0.5, max_deliveries=1,
    )  # fmt: skip
    return (client.get_data(meta) if meta.status == "batch" else None), meta


def test_a_queue_worker_whose_samples_were_all_dead_lettered_is_warned(
    client: tq.Client, address: str, partition: str, caplog: pytest.LogCaptureFixture
) -> None:
    put(client, partition, 8)
    client.seal_partition(partition)
    with caplog.at_level(logging.WARNING):
        assert sizes(loader_of(address, partition, fetch_batch_fn=leased_batch)) == [4, 4]
    (warning,) = warnings_of(caplog)
    assert "0 samples were consumed, 8 were skipped: 8 delivered too often" in warning


def test_an_end_of_a_fetch_function_that_counts_nothing(address: str, partition: str, client: tq.Client) -> None:
    put(client, partition, 1)
    nothing = partial(_nothing, tq.BatchMeta(status="end"))
    assert sizes(loader_of(address, partition, fetch_batch_fn=nothing)) == []


def _nothing(meta: tq.BatchMeta, **claim: Any) -> tuple[None, tq.BatchMeta]:
    return None, meta


def put_lengths(client: tq.Client, partition: str, lengths: list[int]) -> None:
    put(client, partition, len(lengths), custom_meta=[{"total_lengths": length} for length in lengths])
    client.seal_partition(partition)


DROPPING = {
    "packed": {"optimizer_steps": 1, "pack_max_length": 100, "overlong": "drop"},
    "token_budget": {"tokens_per_rank": 100, "overlong": "drop"},
}


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("sampler", DROPPING)
def test_dropped_samples_are_named_counted_and_cleared_with_the_rest(
    client: tq.Client, address: str, partition: str, *, sampler: str, num_workers: int, caplog: pytest.LogCaptureFixture
) -> None:
    put_lengths(client, partition, [10, 10, 200, 10, 10, 300, 10, 10])
    loader = loader_of(address, partition, num_workers, sampler=sampler, sampler_config=DROPPING[sampler])
    delivered, dropped = set(), set()
    with loader, caplog.at_level(logging.WARNING):
        for data, meta in loader:
            assert data["index"].tolist() == meta.global_indexes
            delivered.update(meta.global_indexes)
            dropped.update(meta.dropped_indexes.tolist())
            client.clear_samples(meta)
    assert (delivered, dropped) == ({0, 1, 3, 4, 6, 7}, {2, 5})
    first, last = warnings_of(caplog)
    assert f"batch 0 of partition {partition!r} drops 1 samples that are too long" in first
    assert "6 samples were consumed, 2 were skipped: 2 longer than the sampler's token limit" in last
    state = client.describe_partition(partition)
    assert (state.live_count, state.used_bytes) == (0, 0)
    consumed = client.check_consumption(partition, "update_actor")
    assert (consumed.consumed_count, consumed.skipped_count, consumed.complete) == (6, 2, True)


@pytest.mark.parametrize("sampler", DROPPING)
def test_a_partition_of_dropped_samples_is_an_error_on_all_ranks(
    client: tq.Client, address: str, partition: str, sampler: str
) -> None:
    put_lengths(client, partition, [200] * 8)
    options = {"sampler": sampler, "sampler_config": DROPPING[sampler], "dp_size": 2}
    for rank in (0, 1):
        with pytest.raises(tq.errors.NothingDeliveredError, match="8 longer than the sampler's token limit") as caught:
            sizes(loader_of(address, partition, rank=rank, **options))
        assert caught.value.metadata["overlong_count"] == "8"
    assert client.clear_samples(partition, skipped_by="update_actor") == 8


def test_samples_kept_from_an_earlier_epoch_are_warned_of(
    client: tq.Client, address: str, partition: str, caplog: pytest.LogCaptureFixture
) -> None:
    put(client, partition, 12)
    client.seal_partition(partition)
    asked = AskedFor(3)
    dataset = loader_of(address, partition, fetch_batch_fn=asked).dataset
    with StreamingDataLoader(dataset, prefetch_factor=4) as loader:
        iterator = iter(loader)
        next(iterator)
        assert asked.event.wait(60)
    client.reset_consumption(partition, "update_actor", keep_consumed=True)
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        assert sizes(loader_of(address, partition)) == []
    (warning,) = warnings_of(caplog)
    assert "12 samples were consumed, 12 of them in earlier epochs" in warning


def test_a_loader_that_is_closed_warns_of_batches_that_it_has_not_handed_out(
    client: tq.Client, address: str, partition: str, caplog: pytest.LogCaptureFixture
) -> None:
    put(client, partition, 12)
    client.seal_partition(partition)
    asked = AskedFor(3)
    loader = StreamingDataLoader(loader_of(address, partition, fetch_batch_fn=asked).dataset, prefetch_factor=4)
    with caplog.at_level(logging.WARNING):
        iterator = iter(loader)
        next(iterator)
        assert asked.event.wait(60)
        loader.close()
        loader.close()
    (warning,) = warnings_of(caplog)
    assert "closed before it delivered 2 prefetched batches, starting with batch 1" in warning


class AskedFor:
    """A fetch_batch_fn that tells when a batch is asked for, so that those before it were fetched."""

    def __init__(self, batch_index: int) -> None:
        self._batch_index = batch_index
        self.event = threading.Event()

    def __call__(self, **keywords: Any) -> Any:
        if keywords["batch_index"] == self._batch_index:
            self.event.set()
        return fetch_batch(**keywords)


def test_a_where_of_fetch_batch_fn_is_not_shown_as_none(client: tq.Client, address: str, partition: str) -> None:
    skip_by_where(client, partition)
    client.seal_partition(partition)
    match = r"6 excluded by the conditions \(where\) of fetch_batch_fn"
    with pytest.raises(tq.errors.NothingDeliveredError, match=match):
        sizes(loader_of(address, partition, fetch_batch_fn=fetch_new_versions))


def fetch_new_versions(**keywords: Any) -> Any:
    return fetch_batch(**{**keywords, "where": [("version", ">=", 2)]})
