import gc
import threading
import weakref
from typing import Any

import pytest
from fake_client import FIELDS, FakeService, token_rows

from tq_service.data import StreamingDataLoader, StreamingDataset, fetch_batch
from tq_service.errors import InvalidArgumentError


class Counted:
    """A fetch function that counts, and can be waited for."""

    def __init__(self) -> None:
        self.fetched: list[int] = []
        self.arrived = threading.Condition()

    def __call__(self, **keywords: Any) -> Any:
        answer = fetch_batch(**keywords)
        with self.arrived:
            self.fetched.append(keywords["batch_index"])
            self.arrived.notify_all()
        return answer

    def wait_for(self, count: int) -> bool:
        with self.arrived:
            return self.arrived.wait_for(lambda: len(self.fetched) >= count, timeout=10)


def loader_of(
    service: FakeService,
    fetch: Any = fetch_batch,
    max_wait: float = 0.2,
    version_lag: int | None = None,
    **options: Any,
) -> StreamingDataLoader:
    dataset = StreamingDataset(
        batch_size=4, data_fields=FIELDS, partition_id="train@0", task_name="t", client_factory=service.connect,
        fetch_batch_fn=fetch, max_wait=max_wait, version_lag=version_lag,
    )  # fmt: skip
    return StreamingDataLoader(dataset, **options)


def prefetch_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "tq-prefetch"]


def filled(row_count: int, *, seal: bool = True) -> FakeService:
    service = FakeService()
    service.put("train@0", token_rows(row_count), seal=seal)
    return service


def test_fetches_ahead_as_many_batches_as_asked_and_no_more() -> None:
    fetch = Counted()
    loader = loader_of(filled(80), fetch, prefetch_factor=3)
    iterator = iter(loader)
    next(iterator)
    assert fetch.wait_for(4)
    for thread in prefetch_threads():
        thread.join(0.05)
    assert fetch.fetched == [0, 1, 2, 3]
    next(iterator)
    assert fetch.wait_for(5)
    loader.close()


def test_fetches_nothing_ahead_beyond_the_bytes() -> None:
    fetch = Counted()
    loader = loader_of(filled(80), fetch, prefetch_factor=10, prefetch_bytes=1)
    iterator = iter(loader)
    next(iterator)
    assert fetch.wait_for(2)
    for thread in prefetch_threads():
        thread.join(0.05)
    assert fetch.fetched == [0, 1]
    loader.close()


def test_batches_that_may_be_fetched_ahead_are_claimed_together() -> None:
    service = filled(80)
    loader = loader_of(service, prefetch_factor=6)
    iterator = iter(loader)
    items = [next(iterator)]
    for thread in prefetch_threads():
        thread.join(0.05)
    # The size of the first batch says how many are admitted: six ahead, and the one in use.
    assert service.claims[:2] == [(0, 1), (1, 5)] or service.claims[:2] == [(0, 1), (1, 6)]
    assert max(first + count for first, count in service.claims) <= 1 + 6
    items += iterator
    assert [item[0]["index"].tolist() for item in items] == [list(range(at, at + 4)) for at in range(0, 80, 4)]
    loader.close()


def test_batches_that_wait_for_versions_of_their_own_are_claimed_one_by_one() -> None:
    service = filled(40)
    items = list(loader_of(service, version_lag=1, prefetch_factor=6))
    assert len(items) == 10
    assert {count for _, count in service.claims} == {1}


def test_the_end_of_a_range_is_the_end() -> None:
    service = filled(10)
    assert [len(data) for data, _ in loader_of(service, prefetch_factor=6)] == [4, 4, 2]
    assert service.claims[0] == (0, 1)
    assert sum(first > 0 for first, _ in service.claims) == 1


def test_a_loader_that_was_closed_with_batches_claimed_ahead_continues_with_them() -> None:
    service = filled(40)
    first = loader_of(service, prefetch_factor=6)
    got = [next(iter(first))[0]["index"].tolist()]
    state = first.state_dict()
    first.close()
    second = loader_of(service, prefetch_factor=6)
    second.load_state_dict(state)
    got += [data["index"].tolist() for data, _ in second]
    assert got == [list(range(at, at + 4)) for at in range(0, 40, 4)]


@pytest.mark.parametrize("how", ["end", "break", "close", "with", "exception", "garbage", "garbage while waiting"])
def test_the_thread_ends(how: str) -> None:
    service = filled(40, seal=how == "end")
    loader: StreamingDataLoader | None = loader_of(service)
    if how == "end":
        assert len(list(loader)) == 10
    elif how == "break":
        for _ in loader:
            break
    elif how == "close":
        iterator = iter(loader)
        next(iterator)
        loader.close()
    elif how == "with":
        with loader:
            iterator = iter(loader)
            next(iterator)
    elif how == "exception":
        with pytest.raises(ZeroDivisionError):
            for _ in loader:
                raise ZeroDivisionError
    elif how == "garbage":
        iterator = iter(loader)
        next(iterator)
        gone = weakref.ref(loader)
        del iterator, loader
        gc.collect()
        assert gone() is None
    else:
        iterator = iter(loader)
        for _ in range(10):
            next(iterator)
        assert service.waiting.wait(10)
        del iterator, loader
        gc.collect()
    for thread in prefetch_threads():
        thread.join(10)
    assert prefetch_threads() == []
    assert service.open_client_count == 0


def test_a_call_that_waits_ends_when_the_loader_is_closed() -> None:
    service = filled(4, seal=False)
    loader = loader_of(service, max_wait=3600.0)
    iterator = iter(loader)
    next(iterator)
    assert service.waiting.wait(60)
    loader.close()
    assert prefetch_threads() == []
    assert service.open_client_count == 0


def test_two_iterators_share_the_batches() -> None:
    loader = loader_of(filled(16))
    first, second = iter(loader), iter(loader)
    taken = [next(source)[1].global_indexes[0] for source in (first, second, first, second)]
    assert taken == [0, 4, 8, 12]
    assert list(first) == list(second) == []


def test_there_is_no_length() -> None:
    with pytest.raises(TypeError):
        len(loader_of(filled(4)))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "options",
    [{"num_workers": -1}, {"prefetch_factor": -1}, {"num_workers": 1, "prefetch_factor": 0}, {"prefetch_bytes": 0}],
)
def test_arguments_that_cannot_be_right(options: dict[str, int]) -> None:
    with pytest.raises(InvalidArgumentError):
        loader_of(filled(4), **options)
