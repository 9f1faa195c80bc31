"""The dataset and its loader: batches in micro-batches, to the end or for ever, again, and the next partition."""

import threading
from importlib.util import module_from_spec

import pytest
import torch
import transfer_queue as tq
from tensordict import TensorDict
from transfer_queue.dataloader import streaming_dataset
from transfer_queue.dataloader.streaming_dataloader import StreamingDataLoader
from transfer_queue.dataloader.streaming_dataset import StreamingDataset, chunk_batch_fn


@pytest.fixture
def begun(conf):
    conf["controller"]["sampler"] = "RankAwareSampler"
    tq.init(conf)
    yield conf
    tq.close()


def put(size, partition="p"):
    lengths = torch.nested.as_nested_tensor([torch.arange(n % 3 + 1) for n in range(size)], layout=torch.jagged)
    data = TensorDict({"x": torch.arange(size), "r": lengths}, batch_size=[size])
    return tq.get_client().put(data, partition_id=partition)


def dataset(conf, **more):
    given = {
        "batch_size": 4,
        "micro_batch_size": 2,
        "data_fields": ["x", "r"],
        "partition_id": "p",
        "task_name": "train",
    }
    return StreamingDataset(conf, **{**given, "dp_rank": 0, "should_check_consumption_status": True, **more})


def seen(micro_batches):
    return [(batch["x"].tolist(), meta.global_indexes) for batch, meta in micro_batches]


@pytest.mark.parametrize("workers", [0, 2])
def test_all_micro_batches_to_the_end(begun, workers):
    put(8)
    loader = StreamingDataLoader(dataset(begun), num_workers=workers)
    expected = [([n, n + 1], [n, n + 1]) for n in (0, 2, 4, 6)]
    assert seen(loader) == expected
    loader.reset()
    assert seen(loader) == expected
    assert [meta.size for _, meta in loader.get_buffer()] == [4, 4]
    put(4, "q")
    loader.step("q")
    assert seen(loader) == expected[:2]
    loader.close()


def test_ranks_share_a_partition_and_replicas_a_rank(begun):
    put(8)
    first = [seen(dataset(begun, dp_rank=rank, batch_size=4)) for rank in (0,)]
    assert [x for part in first for x, _ in part] == [[0, 1], [2, 3], [4, 5], [6, 7]]
    replica = dataset(begun, dp_rank=0)
    assert seen(replica) == first[0]
    assert len(replica.buffer) == 2


def spied(waits):
    """Return a fetch_batch_fn that notes how long each claim may wait at the service."""

    def fetch(*, tq_client, **named):
        get_meta = tq_client.sync_client.get_meta

        def noted(*, max_wait, **more):
            waits.append(max_wait)
            return get_meta(max_wait=max_wait, **more)

        tq_client.sync_client.get_meta = noted
        try:
            return streaming_dataset.default_fetch_batch_fn(tq_client, **named)
        finally:
            tq_client.sync_client.get_meta = get_meta

    return fetch


def test_a_pass_ends_without_a_wait(begun):
    put(8)
    put(4, "q")
    waits = []
    finite = dataset(begun, fetch_batch_fn=spied(waits))
    assert len(list(finite)) == 4
    assert waits == [0.0, 0.0, 0.0]
    finite.step("q")
    assert len(list(finite)) == 2
    assert waits == [0.0] * 5


def test_a_pass_waits_for_what_other_ranks_have_not_taken(begun):
    put(6)
    waits, fetch = [], None

    def take_the_rest(*, tq_client, **named):
        if len(waits) == 4:  # the other rank, which has a smaller batch
            asked = {name: named[name] for name in ("data_fields", "partition_id", "task_name")}
            taken = tq_client.get_meta(**asked, batch_size=2, sampling_config={"dp_rank": 1, "batch_index": 0})
            assert taken.size == 2
        return fetch(tq_client=tq_client, **named)

    fetch = spied(waits)
    assert len(list(dataset(begun, fetch_batch_fn=take_the_rest))) == 2
    assert waits[:4] == [0.0, 0.0, 0.01, 0.02]


def test_a_stream_waits_as_long_as_the_variable_says(begun, monkeypatch):
    monkeypatch.setattr(streaming_dataset, "TQ_STREAMING_DATASET_EMPTY_BATCH_SLEEP_INTERVAL", 0.125)
    put(4)
    waits = []
    micro_batches = iter(dataset(begun, fetch_batch_fn=spied(waits), should_check_consumption_status=False))
    assert [next(micro_batches)[0]["x"].tolist() for _ in range(2)] == [[0, 1], [2, 3]]
    assert waits == [0.125]


@pytest.mark.parametrize(("given", "seconds"), [(None, 1.0), ("0.25", 0.25)])
def test_the_variable_is_read_at_import(monkeypatch, given, seconds):
    if given is not None:
        monkeypatch.setenv("TQ_STREAMING_DATASET_EMPTY_BATCH_SLEEP_INTERVAL", given)
    again = module_from_spec(streaming_dataset.__spec__)
    streaming_dataset.__spec__.loader.exec_module(again)
    assert seconds == again.TQ_STREAMING_DATASET_EMPTY_BATCH_SLEEP_INTERVAL


def test_a_dataset_says_what_it_was_given(begun):
    given = dataset(begun)
    expected = {
        "config": begun, "batch_size": 4, "micro_batch_size": 2, "data_fields": ["x", "r"], "partition_id": "p",
        "task_name": "train", "dp_rank": 0, "should_check_consumption_status": True, "batch_index": 0, "buffer": [],
        "fetch_batch_fn": streaming_dataset.default_fetch_batch_fn, "process_batch_fn": chunk_batch_fn,
        "sampling_config": {"dp_rank": 0, "task_name": "train"},
    }  # fmt: skip
    assert {name: getattr(given, name) for name in expected} == expected
    with pytest.raises(ValueError, match="dp_rank is -1; expected at least 0"):
        dataset(begun, dp_rank=-1)


def test_micro_batches_of_users_may_be_made_of_the_default_ones(begun):
    put(4)

    def backwards(batch, meta, micro_batch_size):
        return chunk_batch_fn(batch, meta, micro_batch_size)[::-1]

    assert seen(dataset(begun, process_batch_fn=backwards)) == [([2, 3], [2, 3]), ([0, 1], [0, 1])]


def test_a_stream_waits_for_more(begun):
    put(4)
    micro_batches = iter(dataset(begun, should_check_consumption_status=False))
    assert next(micro_batches)[0]["x"].tolist() == [0, 1]
    next(micro_batches)
    producer = threading.Thread(target=put, args=(4,))
    producer.start()
    batch, meta = next(micro_batches)
    producer.join()
    assert (batch["x"].tolist(), meta.global_indexes) == ([0, 1], [4, 5])
    assert batch["r"].is_nested


def test_functions_of_users(begun):
    put(4)
    asked = []

    def fetch(*, tq_client, sampling_config, batch_index, **named):
        asked.append({**named, **sampling_config, "batch_index": batch_index})
        config = {**sampling_config, "batch_index": batch_index, "partition_id": named["partition_id"]}
        meta = tq_client.get_meta(**named, sampling_config=config)
        return (tq_client.get_data(meta), meta) if meta.size else (None, meta)

    def process(batch, meta, micro_batch_size):
        yield batch["x"].sum().item() + micro_batch_size

    assert list(dataset(begun, fetch_batch_fn=fetch, process_batch_fn=process)) == [8]
    named = {"data_fields": ["x", "r"], "batch_size": 4, "partition_id": "p", "task_name": "train"}
    assert asked[0] == {**named, "dp_rank": 0, "batch_index": 0}


def test_a_collate_function_makes_what_comes(begun):
    put(4)
    loader = StreamingDataLoader(dataset(begun), prefetch_factor=1, collate_fn=lambda both: both[0]["x"].tolist())
    assert list(loader) == [[0, 1], [2, 3]]


def test_a_batch_in_parts():
    data = TensorDict({"x": torch.arange(5)}, batch_size=[5])
    meta = tq.BatchMeta(range(5), ["p"] * 5)
    assert seen(chunk_batch_fn(data, meta, 2)) == [([0, 1], [0, 1]), ([2, 3], [2, 3]), ([4], [4])]
    for wrong in (0, 6):
        with pytest.raises(ValueError, match="expected 1 to 5"):
            list(chunk_batch_fn(data, meta, wrong))
