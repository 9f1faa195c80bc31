import gc
import threading
import weakref
from typing import Any

import pytest
import torch
from fake_client import FIELDS, FakeService, batch_of, token_rows

from tq_service.client.batch_meta import BatchMeta
from tq_service.data import StreamingDataLoader, StreamingDataset, fetch_batch, take_rows
from tq_service.data.columns import flatten
from tq_service.errors import InvalidArgumentError, StaleEpochError, StaleIncarnationError
from tq_service.samplers import SeqlenBalancedSampler


@pytest.fixture
def service() -> FakeService:
    return FakeService()


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


def indexes(iterable: Any) -> list[list[int]]:
    return [micro_batch["index"].tolist() for micro_batch, _ in iterable]


LOADERS = {
    "inline": lambda dataset: dataset,
    "loader without thread": lambda dataset: StreamingDataLoader(dataset, prefetch_factor=0),
    "thread": StreamingDataLoader,
    "thread bounded by bytes": lambda dataset: StreamingDataLoader(dataset, prefetch_factor=8, prefetch_bytes=1),
}


@pytest.fixture(params=LOADERS)
def loader_of(request: pytest.FixtureRequest, service: FakeService) -> Any:
    yield LOADERS[request.param]
    assert service.open_client_count == 0


def test_what_fetches_is_told_a_layout_only_where_one_is_given(service: FakeService) -> None:
    service.put("train@0", token_rows(4), seal=True)
    asked: list[dict[str, Any]] = []

    def fetch(*, client: Any, layout: str | None = None, **claim: Any) -> Any:
        asked.append({} if layout is None else {"layout": layout})
        return fetch_batch(client=client, layout=layout, **claim)

    for layout in (None, "jagged"):
        list(dataset_of(service, fetch_batch_fn=fetch, layout=layout))
    assert asked == [{}] * 2 + [{"layout": "jagged"}] * 2
    assert service.layouts == {None, "jagged"}


def test_yields_all_micro_batches_with_a_short_last_batch(service: FakeService, loader_of: Any) -> None:
    service.put("train@0", token_rows(11), seal=True)
    seen = list(loader_of(dataset_of(service)))
    assert [meta.global_indexes for _, meta in seen] == [[0, 1], [2, 3], [4, 5], [6, 7], [8, 9], [10]]
    for micro_batch, meta in seen:
        assert micro_batch["index"].tolist() == meta.global_indexes
        assert micro_batch["input_ids"].layout is torch.jagged
        assert micro_batch["input_ids"].offsets() is micro_batch["logprobs"].offsets()
        assert list(micro_batch["text"]) == [f"sample {index}" for index in meta.global_indexes]


def test_rows_of_equal_length_stay_jagged(service: FakeService, loader_of: Any) -> None:
    service.put("train@0", token_rows(8, lambda index: 3), seal=True)
    micro_batches = [micro_batch for micro_batch, _ in loader_of(dataset_of(service))]
    assert len(micro_batches) == 4
    for micro_batch in micro_batches:
        assert micro_batch["input_ids"].layout is torch.jagged
        assert micro_batch["input_ids"].offsets().tolist() == [0, 3, 6]


@pytest.mark.parametrize("row_count", [1, 5, 8, 9, 17])
def test_every_rank_yields_the_same_number_typed_alike(service: FakeService, row_count: int) -> None:
    service.put("train@0", token_rows(row_count), seal=True)
    ranks = [list(StreamingDataLoader(dataset_of(service, dp_rank=rank, dp_size=3))) for rank in range(3)]
    assert len({len(rank) for rank in ranks}) == 1
    assert sorted(index for rank in ranks for _, meta in rank for index in meta.global_indexes) == list(
        range(row_count)
    )
    assert any(meta.size == 0 for rank in ranks for _, meta in rank)
    for micro_batch, meta in (item for rank in ranks for item in rank):
        assert micro_batch.batch_size == torch.Size([meta.size])
        assert micro_batch["input_ids"].layout is torch.jagged
        assert micro_batch["logprobs"].dtype is torch.bfloat16
        assert set(micro_batch.keys()) == set(FIELDS)


def test_partition_smaller_than_a_batch(service: FakeService, loader_of: Any) -> None:
    service.put("train@0", token_rows(3), seal=True)
    assert indexes(loader_of(dataset_of(service, batch_size=64, micro_batch_size=None))) == [[0, 1, 2]]


def test_drop_last_leaves_the_short_batch_out(service: FakeService) -> None:
    service.put("train@0", token_rows(7), seal=True)
    assert indexes(dataset_of(service, drop_last=True)) == [[0, 1], [2, 3]]


def test_consumer_may_start_before_the_producer(service: FakeService, loader_of: Any) -> None:
    def produce() -> None:
        assert service.waiting.wait(10)
        for start in range(0, 10, 3):
            service.put("train@0", token_rows(10)[start : start + 3], seal=start == 9)

    producer = threading.Thread(target=produce)
    producer.start()
    seen = indexes(loader_of(dataset_of(service, max_wait=0.01)))
    producer.join()
    assert seen == [[0, 1], [2, 3], [4, 5], [6, 7], [8, 9]]


def test_finite_mode_ends_without_a_seal(service: FakeService, loader_of: Any) -> None:
    service.put("train@0", token_rows(6))
    assert indexes(loader_of(dataset_of(service, finite=True))) == [[0, 1], [2, 3], [4, 5]]


def test_restart_in_the_middle(service: FakeService, loader_of: Any) -> None:
    service.put("train@0", token_rows(16), seal=True)
    before = StreamingDataLoader(dataset_of(service))
    for micro_batch, _ in before:
        if 6 in micro_batch["index"].tolist():
            break
    assert before.batch_index == 2
    assert indexes(loader_of(dataset_of(service, start_batch_index=before.batch_index))) == [
        [8, 9],
        [10, 11],
        [12, 13],
        [14, 15],
    ]


def test_a_new_iterator_goes_on_after_the_last_batch_given_out(service: FakeService, loader_of: Any) -> None:
    service.put("train@0", token_rows(12), seal=True)
    loader = loader_of(dataset_of(service))
    for _ in loader:
        break
    assert indexes(loader) == [[4, 5], [6, 7], [8, 9], [10, 11]]
    assert indexes(loader) == []


def batch_bytes(first: int) -> int:
    """Return the bytes of a batch of four of `token_rows`."""
    return flatten(batch_of(token_rows(first + 4)[first:])).size_bytes


@pytest.mark.parametrize("kept", [0, 1, 2, 3])
@pytest.mark.parametrize("too_few", [0, 1])
def test_reset_gives_the_same_batches_again(service: FakeService, loader_of: Any, kept: int, too_few: int) -> None:
    service.put("train@0", token_rows(12), seal=True)
    size_bytes = max(0, sum(map(batch_bytes, range(0, 4 * kept, 4))) - too_few)
    loader = loader_of(dataset_of(service, replay_buffer_bytes=size_bytes))
    first = indexes(loader)
    assert len(loader.get_buffer()) == max(0, kept - too_few)
    loader.reset()
    assert indexes(loader) == first
    loader.reset()
    assert indexes(loader) == first


def test_no_batch_is_kept_unless_asked_for(service: FakeService, loader_of: Any) -> None:
    service.put("train@0", token_rows(12), seal=True)
    kept: list[weakref.ref[Any]] = []

    def process(data: Any, meta: Any, micro_batch_size: int) -> Any:
        kept.append(weakref.ref(data))
        yield take_rows(data, [0]), meta

    loader = loader_of(dataset_of(service, process_batch_fn=process))
    assert len(list(loader)) == 3
    gc.collect()
    assert [batch() for batch in kept] == [None] * 3
    assert loader.get_buffer() == []


def test_batches_after_one_that_does_not_fit_are_not_kept(service: FakeService) -> None:
    long_second = token_rows(12, length=lambda index: 1000 if index == 4 else 1)
    service.put("train@0", long_second, seal=True)
    dataset = dataset_of(service, replay_buffer_bytes=1000)
    list(dataset)
    assert [meta.global_indexes for _, meta in dataset.get_buffer()] == [[0, 1, 2, 3]]


def test_reset_out_of_the_buffer_asks_for_the_end_only(service: FakeService) -> None:
    service.put("train@0", token_rows(12), seal=True)
    dataset = dataset_of(service, replay_buffer_bytes=1 << 20)
    indexes(dataset)
    asked = len(service.claims)
    dataset.reset()
    assert len(indexes(dataset)) == 6
    assert len(service.claims) == asked + 1


def test_the_buffer_is_not_changed_by_the_trainer(service: FakeService, loader_of: Any) -> None:
    service.put("train@0", token_rows(8), seal=True)
    loader = loader_of(dataset_of(service, replay_buffer_bytes=1 << 20))
    for micro_batch, _ in loader:
        micro_batch["index"].fill_(-1)
    loader.reset()
    assert indexes(loader) == [[0, 1], [2, 3], [4, 5], [6, 7]]
    data, meta = loader.get_buffer()[1]
    assert data["index"].tolist() == meta.global_indexes == [4, 5, 6, 7]


def test_a_live_iterator_follows_reset_and_step(service: FakeService, loader_of: Any) -> None:
    service.put("train@0", token_rows(8), seal=True)
    service.put("train@1", token_rows(20)[12:16], seal=True)
    loader = loader_of(dataset_of(service, replay_buffer_bytes=1 << 20))
    iterator = iter(loader)
    assert next(iterator)[1].global_indexes == [0, 1]
    loader.reset()
    assert next(iterator)[1].global_indexes == [0, 1]
    assert next(iterator)[1].global_indexes == [2, 3]
    loader.step("train@1")
    assert loader.get_buffer() == []
    assert indexes(iterator) == [[12, 13], [14, 15]]


def test_step_starts_afresh(service: FakeService, loader_of: Any) -> None:
    service.put("train@0", token_rows(8), seal=True)
    service.put("train@1", token_rows(4), seal=True)
    service.partitions["train@1"].incarnation = b"incarnation 1"
    loader = loader_of(dataset_of(service))
    assert len(indexes(loader)) == 4
    loader.step("train@1")
    assert indexes(loader) == [[0, 1], [2, 3]]


@pytest.mark.parametrize(
    ("name", "value", "error"),
    [("incarnation", b"incarnation 1", StaleIncarnationError), ("epoch", 1, StaleEpochError)],
)
def test_another_incarnation_of_the_partition_is_not_mixed_in(
    service: FakeService, loader_of: Any, name: str, value: object, error: type[Exception]
) -> None:
    service.put("train@0", token_rows(4))
    loader = loader_of(dataset_of(service, max_wait=0.01))
    iterator = iter(loader)
    next(iterator), next(iterator)
    with service.changed:
        setattr(service.partitions["train@0"], name, value)
    service.put("train@0", token_rows(8)[4:], seal=True)
    with pytest.raises(error, match="step"):
        list(iterator)


def test_micro_batches_follow_the_packs_of_all_steps(service: FakeService, loader_of: Any) -> None:
    service.cuts = lambda count, _: [[3, 0], [], [2, 1]] if count == 4 else [[], [], []]
    service.put("train@0", token_rows(8), seal=True)
    seen = list(loader_of(dataset_of(service)))
    assert indexes(seen) == [[3, 0], [], [2, 1], [7, 4], [], [6, 5]]
    assert [meta.micro_batches for _, meta in seen] == [[[0, 1]], [[]], [[0, 1]]] * 2


@pytest.mark.parametrize(
    "sampler",
    [
        {"sampler": "seqlen_balanced", "sampler_config": {"n_samples_per_prompt": 2}},
        {"sampler": SeqlenBalancedSampler(n_samples_per_prompt=2)},
    ],
    ids=["name", "object"],
)
def test_a_custom_fetch_function_is_called_with_keywords(
    service: FakeService, loader_of: Any, sampler: dict[str, Any]
) -> None:
    service.put("train@0", token_rows(8), seal=True)
    calls: list[dict[str, Any]] = []

    def fetch(*args: Any, **keywords: Any) -> Any:
        assert not args
        calls.append(keywords)
        if len(calls) == 1:
            return None, None
        data, meta = fetch_batch(**keywords)
        if data is not None:
            data["doubled"] = data["index"] * 2
        return data, meta

    dataset = dataset_of(
        service, fetch_batch_fn=fetch, **sampler, where=[("version", ">=", 3)], order_by=["version"],
    )  # fmt: skip
    seen = [micro_batch["doubled"].tolist() for micro_batch, _ in loader_of(dataset)]
    assert seen == [[0, 2], [4, 6], [8, 10], [12, 14]]
    expected = {
        "partition_id": "train@0", "task_name": "update_actor", "data_fields": FIELDS, "batch_size": 4,
        "micro_batch_size": 2, "dp_rank": 0, "dp_size": 1, "sampler": "seqlen_balanced",
        "sampler_config": {"n_samples_per_prompt": 2}, "where": [("version", ">=", 3)], "order_by": ["version"],
        "drop_last": False, "batch_unit": "sample", "finite": False,
    }  # fmt: skip
    assert {name: calls[0][name] for name in expected} == expected
    assert [call["batch_index"] for call in calls] == [0, 0, 1, 2]
    assert calls[2]["incarnation"] == b"incarnation 0"
    assert (calls[0]["incarnation"], calls[0]["epoch"]) == (b"", None)


def test_a_fetch_function_that_swallows_an_empty_batch_is_told(service: FakeService) -> None:
    dataset = dataset_of(service, fetch_batch_fn=lambda **keywords: (None, BatchMeta(status="batch")))
    with pytest.raises(TypeError, match="even if the batch is empty"):
        next(iter(dataset))


def test_a_process_function_takes_the_place_of_splitting(service: FakeService, loader_of: Any) -> None:
    service.put("train@0", token_rows(8), seal=True)

    def halves(data: Any, meta: Any, micro_batch_size: int) -> Any:
        assert micro_batch_size == 2
        yield from ((take_rows(data, at), at) for at in ([0, 3], [1, 2]))

    seen = [(part["index"].tolist(), at) for part, at in loader_of(dataset_of(service, process_batch_fn=halves))]
    assert seen == [([0, 3], [0, 3]), ([1, 2], [1, 2]), ([4, 7], [0, 3]), ([5, 6], [1, 2])]


def test_a_batch_that_fails_to_split_is_not_given_out(service: FakeService, loader_of: Any) -> None:
    service.put("train@0", token_rows(8), seal=True)
    broken = True

    def process(data: Any, meta: Any, micro_batch_size: int) -> Any:
        if broken:
            raise ZeroDivisionError
        return [(data, meta)]

    loader = loader_of(dataset_of(service, process_batch_fn=process))
    with pytest.raises(ZeroDivisionError):
        list(loader)
    broken = False
    assert indexes(loader) == [[0, 1, 2, 3], [4, 5, 6, 7]]


def test_an_error_of_fetching_keeps_its_type_and_the_batch_is_asked_for_again(
    service: FakeService, loader_of: Any
) -> None:
    service.put("train@0", token_rows(12), seal=True)
    failed: list[int] = []

    def fetch(**keywords: Any) -> Any:
        if keywords["batch_index"] == 1 and not failed:
            failed.append(1)
            raise ZeroDivisionError("by design")
        return fetch_batch(**keywords)

    loader = loader_of(dataset_of(service, fetch_batch_fn=fetch))
    seen: list[list[int]] = []
    with pytest.raises(ZeroDivisionError, match="by design"):
        for micro_batch, _ in loader:
            seen.append(micro_batch["index"].tolist())
    assert seen == [[0, 1], [2, 3]]
    assert indexes(loader) == [[4, 5], [6, 7], [8, 9], [10, 11]]


def test_data_that_does_not_fit_its_meta_is_told(service: FakeService) -> None:
    service.put("train@0", token_rows(8), seal=True)

    def fetch(**keywords: Any) -> Any:
        data, meta = fetch_batch(**keywords)
        return take_rows(data, [0]), meta

    with pytest.raises(ValueError, match="1 rows, but its meta has 4"):
        next(iter(dataset_of(service, fetch_batch_fn=fetch)))


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"batch_size": 0}, "batch_size"),
        ({"micro_batch_size": 0}, "micro_batch_size"),
        ({"data_fields": []}, "data_fields"),
        ({"data_fields": "index"}, "data_fields"),
        ({"data_fields": ["a", "a"]}, "data_fields"),
        ({"dp_rank": 2, "dp_size": 2}, "dp_rank"),
        ({"dp_rank": -1}, "dp_rank"),
        ({"dp_size": 0}, "dp_size"),
        ({"start_batch_index": -1}, "start_batch_index"),
        ({"replay_buffer_bytes": -1}, "replay_buffer_bytes"),
        ({"max_wait": 0}, "max_wait"),
        ({"timeout": 0}, "timeout"),
        ({"layout": "object"}, "layout"),
    ],
)
def test_arguments_that_cannot_be_right(service: FakeService, changes: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        dataset_of(service, **changes)
    assert caught.value.field == field
