import gc
import queue
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tq_service.client.batch_meta import BatchMeta
from tq_service.data.source import FetchedBatch, MicroBatchPrefetcher


class Numbers:
    """A stream of batches, each the list of its micro-batches; one that is an exception is raised."""

    def __init__(self, *batches: Any, endless: bool = False) -> None:
        self._batches = list(batches)
        self._endless = endless
        self._closed = threading.Event()
        self.next_index = 0
        self.consumed: list[int] = []

    @property
    def closed(self) -> bool:
        return self._closed.is_set()

    def read(self) -> FetchedBatch | None:
        if self.next_index == len(self._batches):
            if self._endless:
                self._closed.wait()
            return None
        index = self.next_index
        if isinstance(self._batches[index], Exception):
            raise self._batches[index]
        self.next_index += 1
        return FetchedBatch(
            index=index, data=self._batches[index], meta=BatchMeta(), on_consumed=lambda: self.consumed.append(index)
        )

    def close(self) -> None:
        self._closed.set()


class Splitter:
    """Splits batches, and records the micro-batches it has made."""

    def __init__(self) -> None:
        self.made: queue.Queue[Any] = queue.Queue()

    def __call__(self, batch: FetchedBatch) -> Iterator[Any]:
        for item in batch.data:
            if isinstance(item, Exception):
                raise item
            self.made.put(item)
            yield item

    def wait_for(self, *items: Any) -> bool:
        return [self.made.get(timeout=10) for _ in items] == list(items)


def split_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "tq-split-ahead"]


@pytest.fixture
def opened() -> Iterator[Callable[..., tuple[MicroBatchPrefetcher, Numbers, Splitter]]]:
    streams = []

    def open_stream(*batches: Any, endless: bool = False) -> tuple[MicroBatchPrefetcher, Numbers, Splitter]:
        inner, splitter = Numbers(*batches, endless=endless), Splitter()
        stream = MicroBatchPrefetcher(inner, splitter)
        streams.append(stream)
        return stream, inner, splitter

    yield open_stream
    for stream in streams:
        stream.close()
    streams.clear()
    assert split_threads() == []


def read_all(stream: MicroBatchPrefetcher) -> list[tuple[int, list[Any]]]:
    batches = []
    while (batch := stream.read()) is not None:
        assert batch.on_consumed is not None
        assert batch.micro_batches is not None
        batch.on_consumed()
        batches.append((batch.index, list(batch.micro_batches)))
        assert stream.next_index == batch.index + 1
    return batches


def test_gives_all_batches_with_their_items(opened: Any) -> None:
    stream, inner, _ = opened([1, 2, 3], [], [4], [], [5, 6])
    assert stream.next_index == 0
    assert read_all(stream) == [(0, [1, 2, 3]), (1, []), (2, [4]), (3, []), (4, [5, 6])]
    assert inner.consumed == [0, 1, 2, 3, 4]
    assert stream.read() is None


def test_two_items_are_split_ahead_over_the_end_of_a_batch_and_no_more(opened: Any) -> None:
    stream, inner, splitter = opened([1, 2, 3], [4, 5, 6], endless=True)
    assert splitter.wait_for(1, 2)
    assert inner.consumed == []
    batch = stream.read()
    batch.on_consumed()
    assert splitter.wait_for(3)
    items = batch.micro_batches
    for taken, made in ((1, None), (2, 4), (3, 5)):
        assert next(items) == taken
        if made is not None:
            assert splitter.wait_for(made)
        for thread in split_threads():
            thread.join(0.05)
        assert splitter.made.empty()
    assert inner.consumed == [0]


def test_what_is_left_of_a_batch_is_left_out(opened: Any) -> None:
    stream, _, _ = opened([1, 2, 3, 4, 5], [6])
    batch = stream.read()
    batch.on_consumed()
    assert next(batch.micro_batches) == 1
    assert read_all(stream) == [(1, [6])]


def test_an_error_of_the_stream_inner_comes_after_what_was_read(opened: Any) -> None:
    stream, _, _ = opened([1, 2], ZeroDivisionError("by design"))
    batch = stream.read()
    batch.on_consumed()
    items = batch.micro_batches
    assert [next(items), next(items)] == [1, 2]
    with pytest.raises(ZeroDivisionError, match="by design"):
        next(items)


def test_an_error_of_the_first_split_comes_before_its_batch(opened: Any) -> None:
    stream, inner, _ = opened([ZeroDivisionError("by design")])
    with pytest.raises(ZeroDivisionError, match="by design"):
        stream.read()
    assert inner.consumed == []


def test_an_error_of_a_later_split_comes_in_its_place(opened: Any) -> None:
    stream, _, _ = opened([1, ZeroDivisionError("by design"), 3])
    items = stream.read().micro_batches
    assert next(items) == 1
    with pytest.raises(ZeroDivisionError, match="by design"):
        next(items)


def test_closing_ends_a_wait_for_the_next_batch(opened: Any) -> None:
    stream, inner, splitter = opened([1], endless=True)
    assert splitter.wait_for(1)
    reader_got: list[Any] = []
    reader = threading.Thread(target=lambda: reader_got.extend(read_all(stream)))
    reader.start()
    while not inner.consumed:
        reader.join(0.01)
    stream.close()
    reader.join(10)
    assert not reader.is_alive()
    assert reader_got == [(0, [1])]
    assert (stream.closed, inner.closed) == (True, True)


def test_a_stream_that_is_garbage_ends_its_thread() -> None:
    inner = Numbers([1, 2, 3, 4], endless=True)
    stream = MicroBatchPrefetcher(inner, Splitter())
    stream.read()
    del stream
    gc.collect()
    for thread in split_threads():
        thread.join(10)
    assert split_threads() == []
    assert inner.closed
