"""A loader that is resumed from a saved state goes on with the next micro-batch, also in the middle of a batch."""

import json
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from fake_client import FIELDS, FakeService, SealedRows, token_rows
from service_rows import dataset_of as served_dataset
from service_rows import fill, taken
from torchdata.stateful_dataloader import StatefulDataLoader

import tq_service as tq
from tq_service.data import StreamingDataLoader, StreamingDataset, split_micro_batches

# 11 samples in batches of 4 and micro-batches of 2: the last one is short.
WHOLE = [[0, 1], [2, 3], [4, 5], [6, 7], [8, 9], [10]]


@pytest.fixture
def service() -> FakeService:
    service = FakeService()
    service.put("train@0", token_rows(11), seal=True)
    return service


def dataset_of(service: FakeService, **changes: Any) -> StreamingDataset:
    options: dict[str, Any] = {
        "batch_size": 4,
        "micro_batch_size": 2,
        "data_fields": FIELDS,
        "partition_id": "train@0",
        "task_name": "update_actor",
        "client_factory": service.connect,
        "max_wait": 0.2,
    }
    return StreamingDataset(None, **{**options, **changes})


def indexes(items: Any) -> list[list[int]]:
    return [micro_batch["index"].tolist() for micro_batch, _ in items]


def take(iterator: Iterator[Any], count: int) -> list[list[int]]:
    return indexes([next(iterator) for _ in range(count)])


def pairs(data: Any, meta: Any, micro_batch_size: int | None = None) -> Iterator[Any]:
    yield from split_micro_batches(data, meta, micro_batch_size)


@pytest.mark.parametrize("process", [None, pairs], ids=["plan", "process_batch_fn"])
@pytest.mark.parametrize("prefetch_factor", [0, 2])
@pytest.mark.parametrize("delivered", range(7))
def test_a_state_taken_anywhere_is_gone_on_from(
    service: FakeService, delivered: int, prefetch_factor: int, process: Any
) -> None:
    first = StreamingDataLoader(dataset_of(service, process_batch_fn=process), prefetch_factor=prefetch_factor)
    iterator = iter(first)
    before = take(iterator, delivered)
    state = json.loads(json.dumps(first.state_dict()))
    first.close()

    second = StreamingDataLoader(dataset_of(service, process_batch_fn=process), prefetch_factor=prefetch_factor)
    second.load_state_dict(state)
    assert second.state_dict() == state
    assert before + indexes(second) == WHOLE
    assert second.state_dict()["batch_index"] == 3


def test_a_batch_that_is_delivered_whole_is_not_asked_for_again(service: FakeService) -> None:
    first = dataset_of(service)
    take(iter(first), 2)
    state = first.state_dict()
    assert (state["batch_index"], state["micro_batch_index"]) == (1, 0)
    del service.partitions["train@0"].rows[0]  # whatever batch 0 was, it cannot be fetched any more
    service.partitions["train@0"].rows.insert(0, {})
    second = dataset_of(service)
    second.load_state_dict(state)
    assert indexes(second) == WHOLE[2:]


def test_a_live_iterator_follows_a_loaded_state(service: FakeService) -> None:
    loader = StreamingDataLoader(dataset_of(service))
    iterator = iter(loader)
    assert take(iterator, 1) == WHOLE[:1]
    state = loader.state_dict()
    assert take(iterator, 3) == WHOLE[1:4]
    loader.load_state_dict(state)
    assert indexes(iterator) == WHOLE[1:]
    loader.close()


def test_what_is_skipped_by_a_new_iterator_is_not_in_its_state(service: FakeService) -> None:
    dataset = dataset_of(service)
    take(iter(dataset), 1)
    iterator = iter(dataset)
    assert take(iterator, 1) == [[4, 5]]
    again = dataset_of(service)
    again.load_state_dict(dataset.state_dict())
    assert indexes(again) == WHOLE[3:]


def test_the_state_of_another_partition_leads_there(service: FakeService) -> None:
    service.put("train@1", token_rows(6), seal=True)
    first = dataset_of(service)
    first.step("train@1")
    take(iter(first), 1)
    second = dataset_of(service)
    second.load_state_dict(first.state_dict())
    assert second.partition_id == "train@1"
    assert indexes(second) == [[2, 3], [4, 5]]


def test_reset_and_step_begin_a_fresh_state(service: FakeService) -> None:
    dataset = dataset_of(service)
    fresh = dataset.state_dict()
    take(iter(dataset), 3)
    dataset.reset()
    assert dataset.state_dict() == {**fresh, "incarnation": dataset.state_dict()["incarnation"]}
    dataset.step("train@0")
    assert dataset.state_dict() == fresh


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"batch_size": 2}, "batch_size 4; expected 2"),
        ({"micro_batch_size": 1}, "micro_batch_size 2; expected 1"),
        ({"task_name": "critic"}, "task_name 'update_actor'; expected 'critic'"),
    ],
)
def test_a_state_of_other_batches_is_refused(service: FakeService, changes: dict[str, Any], field: str) -> None:
    first = dataset_of(service)
    take(iter(first), 3)
    second = dataset_of(service, **changes)
    untouched = second.state_dict()
    with pytest.raises(tq.errors.InvalidArgumentError, match=field):
        second.load_state_dict(first.state_dict())
    assert second.state_dict() == untouched


@pytest.mark.parametrize(
    "broken", [{"partition_id": None}, {"dp_size": None}, {"batch_index": -1}, {"incarnation": "xyz"}, {"epoch": "?"}]
)
def test_what_is_no_state_is_refused(service: FakeService, broken: dict[str, Any]) -> None:
    dataset = dataset_of(service)
    take(iter(dataset), 1)
    before = dataset.state_dict()
    state = {name: value for name, value in {**before, **broken}.items() if value is not None}
    with pytest.raises(tq.errors.InvalidArgumentError, match="state_dict"):
        dataset.load_state_dict(state)
    assert dataset.state_dict() == before


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")  # of torch, asked for by torchdata
def test_torchdatas_loader_keeps_the_state_of_the_dataset(service: FakeService) -> None:
    first = StatefulDataLoader(dataset_of(service), batch_size=None, collate_fn=lambda item: item)
    iterator = iter(first)
    before = take(iterator, 3)
    state = first.state_dict()
    second = StatefulDataLoader(dataset_of(service), batch_size=None, collate_fn=lambda item: item)
    second.load_state_dict(state)
    assert before + indexes(second) == WHOLE


@pytest.mark.parametrize(("saved_by", "num_workers"), [(0, 2), (2, 0), (2, 2)])
def test_workers_may_save_and_load(saved_by: int, num_workers: int) -> None:
    def loader_of(workers: int) -> StreamingDataLoader:
        dataset = dataset_of(FakeService(), client_factory=SealedRows(count=11))
        return StreamingDataLoader(dataset, num_workers=workers, multiprocessing_context="fork")

    with loader_of(saved_by) as first:
        before = take(iter(first), 3)
        state = first.state_dict()
    with loader_of(num_workers) as second:
        second.load_state_dict(state)
        assert before + indexes(second) == WHOLE


@pytest.mark.parametrize("num_workers", [0, 1])
def test_with_a_service(address: str, num_workers: int) -> None:
    partition = f"state {num_workers}"
    fill(address, partition, 42)
    options: dict[str, Any] = {"sampler": "seqlen_balanced"}
    unbroken = list(StreamingDataLoader(served_dataset(address, partition, **options)))
    assert sorted(taken(unbroken)) == list(range(42))
    with StreamingDataLoader(served_dataset(address, partition, **options), num_workers=num_workers) as first:
        iterator = iter(first)
        before = [next(iterator) for _ in range(5)]
        state = first.state_dict()
    with StreamingDataLoader(served_dataset(address, partition, **options), num_workers=num_workers) as second:
        second.load_state_dict(state)
        after = list(second)
    assert [meta.global_indexes for _, meta in before + after] == [meta.global_indexes for _, meta in unbroken]
    assert taken(before + after) == taken(unbroken)


def test_a_state_of_a_partition_that_was_cleared_is_stale(address: str) -> None:
    partition = "state of a cleared partition"
    fill(address, partition, 12)
    first = served_dataset(address, partition)
    next(iter(first))
    state = first.state_dict()
    with tq.Client(address) as client:
        client.clear_partition(partition)
    fill(address, partition, 12)
    second = served_dataset(address, partition)
    second.load_state_dict(state)
    with pytest.raises(tq.errors.StaleIncarnationError):
        next(iter(second))


def train(loaders: list[StreamingDataLoader], batches: int) -> list[int]:
    """Return the samples that all ranks train in so many batches, or up to the end."""
    trained: list[int] = []
    for loader in loaders:
        first = loader.dataset.batch_index
        for micro_batch, _ in loader:
            trained += micro_batch["index"].tolist()
            if loader.state_dict()["batch_index"] == first + batches:
                break
    return sorted(trained)


def test_a_state_is_gone_on_from_with_another_number_of_ranks(address: str) -> None:
    """What ranks had fetched ahead is trained by others; nothing is lost, and nothing trained twice."""
    partition = "other ranks"
    fill(address, partition, 40)

    def ranks(dp_size: int, batch_size: int) -> list[StreamingDataLoader]:
        return [
            StreamingDataLoader(
                served_dataset(
                    address, partition, batch_size=batch_size, micro_batch_size=2, dp_rank=rank, dp_size=dp_size
                ),
                prefetch_factor=3,
            )
            for rank in range(dp_size)
        ]

    before = ranks(2, 4)
    assert train(before, 2) == list(range(16))
    states = [loader.state_dict() for loader in before]
    assert states[0] == states[1]
    assert train(before, 1) == list(range(16, 24))  # and then they crash, some batches ahead
    for dp_size, batch_size in ((3, 4), (1, 8), (4, 2)):  # each crashes before it saves a state
        after = ranks(dp_size, batch_size)
        for loader in after:
            loader.load_state_dict(states[0])
        size = dp_size * batch_size
        assert train(after, 1) == list(range(16, 16 + size))
    assert after[0].state_dict()["epoch"] == 3
    with pytest.raises(tq.errors.StaleEpochError):
        next(iter(before[0]))
    assert train(after, 100) == list(range(24, 40))
    for loader in (*before, *after):
        loader.close()
    with tq.Client(address) as client:
        assert client.check_consumption(partition, "update_actor").complete
        client.clear_partition(partition)


def test_a_state_within_a_batch_has_other_ranks_begin_it_again(address: str, caplog: pytest.LogCaptureFixture) -> None:
    partition = "within a batch"
    fill(address, partition, 8)
    first = served_dataset(address, partition, batch_size=4, micro_batch_size=2)
    assert take(iter(first), 3) == [[0, 1], [2, 3], [4, 5]]
    second = served_dataset(address, partition, batch_size=2, micro_batch_size=2, dp_size=2)
    second.load_state_dict(first.state_dict())
    assert "was saved in the middle of batch 1. Because the ranks restart, this batch is planned again" in caplog.text
    assert take(iter(second), 1) == [[4, 5]]
    with tq.Client(address) as client:
        client.clear_partition(partition)
    third = served_dataset(address, partition, batch_size=4, micro_batch_size=2)
    untouched = third.state_dict()
    with pytest.raises(tq.errors.PartitionNotFoundError):
        third.load_state_dict(second.state_dict())
    assert third.state_dict() == untouched


@pytest.mark.parametrize("is_stored", [False, True])
def test_other_ranks_begin_a_partition_that_nobody_has_claimed(address: str, is_stored: bool) -> None:
    """A trainer saves its state between two partitions, before rollouts have made the next one or its ranks ask."""
    partition = f"not claimed, stored {is_stored}"
    first = served_dataset(address, partition, batch_size=4)
    if is_stored:
        fill(address, partition, 8)
    second = served_dataset(address, partition, batch_size=2, dp_size=2)
    second.load_state_dict(first.state_dict())
    if not is_stored:
        fill(address, partition, 8)
    assert taken(list(second)) == [0, 1, 4, 5]
    with tq.Client(address) as client:
        client.clear_partition(partition)


def test_an_old_state_says_what_is_trained_again_and_one_too_old_is_refused(
    address: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Samples are released as far as the oldest checkpoint covers them."""
    partition, states = "released", []
    with tq.Client(address) as client:
        fill(address, partition, 24, release=tq.Release("saved", ["update_actor"]))
        first = served_dataset(address, partition, batch_size=4, micro_batch_size=4)
        batches = iter(first)
        for index in range(4):
            take(batches, 1)
            states.append(first.state_dict())
            client.advance(partition, "update_actor", trained=index)
        client.advance(partition, "update_actor", saved=1)
        assert client.describe_partition(partition).released_count == 8
        other = served_dataset(address, partition, batch_size=2, micro_batch_size=2, dp_size=2)
        with pytest.raises(tq.errors.SamplesClearedError, match="batch_index is 1; expected 2 or more"):
            other.load_state_dict(states[0])
        same = served_dataset(address, partition, batch_size=4, micro_batch_size=4)
        same.load_state_dict(states[0])
        with pytest.raises(tq.errors.SamplesClearedError, match="batch_index is 1; expected 2 or more"):
            next(iter(same))
        same.load_state_dict(states[1])
        assert take(iter(same), 2) == [[8, 9, 10, 11], [12, 13, 14, 15]]
        other.load_state_dict(states[1])
        assert "8 samples of batches 2 to 3 are used for training again" in caplog.text
        assert take(iter(other), 1) == [[8, 9]]
        client.clear_partition(partition)


def test_ranks_resume_from_the_same_state_again_and_again(address: str) -> None:
    """With a bound on staleness, in the same number, and each time from before what was trained."""
    partition, policy = "again", "again"
    admission = tq.Admission("update_actor", max_staleness=3, global_batch=2, policy=policy)
    with tq.Client(address) as client:
        client.publish_version(0, policy=policy)
        client.create_partition(partition, admissions=[admission], release=tq.Release("saved", ["update_actor"]))
        slots = client.acquire(partition, "rollout", count=8, lease=60.0)
        client.put(slots, {"index": torch.arange(8)}, ack=True)

        def ranks() -> list[StreamingDataset]:
            return [
                served_dataset(
                    address, partition, batch_size=1, micro_batch_size=1, dp_rank=rank, dp_size=2,
                    data_fields=["index"],
                )
                for rank in range(2)
            ]  # fmt: skip

        def trained(datasets: list[StreamingDataset], first: int, count: int) -> list[list[list[int]]]:
            batches, found = [iter(each) for each in datasets], []
            for index in range(first, first + count):
                found += [[take(each, 1)[0] for each in batches]]
                client.publish_version(index + 1, policy=policy, trained={(partition, "update_actor"): index})
            return found

        first = ranks()
        assert trained(first, 0, 1) == [[[0], [1]]]
        state = first[0].state_dict()
        client.advance(partition, "update_actor", saved=0)
        assert trained(ranks_of(first, state), 1, 2) == [[[2], [3]], [[4], [5]]]
        for epoch in (1, 2, 3):
            again = ranks_of(ranks(), state, restart=True)
            assert {each.state_dict()["epoch"] for each in again} == {epoch}
            client.publish_version(1, policy=policy, rewind=True)
            assert trained(again, 1, 2) == [[[2], [3]], [[4], [5]]]
        client.clear_partition(partition)
        client.remove_policy(policy)


def ranks_of(datasets: list[StreamingDataset], state: dict[str, Any], **how: bool) -> list[StreamingDataset]:
    for dataset in datasets:
        dataset.load_state_dict(state, **how)
    return datasets
