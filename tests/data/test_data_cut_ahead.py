import gc
import queue
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tq_service.client.batch_meta import BatchMeta
from tq_service.data.batch import Batch
from tq_service.data.cut_ahead import CutAheadStream


class Numbers:
    """A stream of batches, each the list of its micro-batches; one that is an exception is raised."""

    def __init__(self, *batches: Any, endless: bool = False) -> None:
        self._batches = list(batches)
        self._endless = endless
        self._closed = threading.Event()
        self.next_index = 0
        self.taken: list[int] = []

    @property
    def closed(self) -> bool:
        return self._closed.is_set()

    def read(self) -> Batch | None:
        if self.next_index == len(self._batches):
            if self._endless:
                self._closed.wait()
            return None
        index = self.next_index
        if isinstance(self._batches[index], Exception):
            raise self._batches[index]
        self.next_index += 1
        return Batch(index=index, data=self._batches[index], meta=BatchMeta(), taken=lambda: self.taken.append(index))

    def close(self) -> None:
        self._closed.set()


class Cuts:
    """Cuts batches and tells what it has cut."""

    def __init__(self) -> None:
        self.made: queue.Queue[Any] = queue.Queue()

    def __call__(self, batch: Batch) -> Iterator[Any]:
        for item in batch.data:
            if isinstance(item, Exception):
                raise item
            self.made.put(item)
            yield item

    def wait_for(self, *items: Any) -> bool:
        return [self.made.get(timeout=10) for _ in items] == list(items)


def cut_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "tq-cut-ahead"]


@pytest.fixture
def opened() -> Iterator[Callable[..., tuple[CutAheadStream, Numbers, Cuts]]]:
    streams = []

    def open_stream(*batches: Any, endless: bool = False) -> tuple[CutAheadStream, Numbers, Cuts]:
        below, cuts = Numbers(*batches, endless=endless), Cuts()
        stream = CutAheadStream(below, cuts)
        streams.append(stream)
        return stream, below, cuts

    yield open_stream
    for stream in streams:
        stream.close()
    streams.clear()
    assert cut_threads() == []


def read_all(stream: CutAheadStream) -> list[tuple[int, list[Any]]]:
    batches = []
    while (batch := stream.read()) is not None:
        assert batch.taken is not None
        assert batch.items is not None
        batch.taken()
        batches.append((batch.index, list(batch.items)))
        assert stream.next_index == batch.index + 1
    return batches


def test_gives_all_batches_with_their_items(opened: Any) -> None:
    stream, below, _ = opened([1, 2, 3], [], [4], [], [5, 6])
    assert stream.next_index == 0
    assert read_all(stream) == [(0, [1, 2, 3]), (1, []), (2, [4]), (3, []), (4, [5, 6])]
    assert below.taken == [0, 1, 2, 3, 4]
    assert stream.read() is None


def test_two_items_are_cut_ahead_over_the_end_of_a_batch_and_no_more(opened: Any) -> None:
    stream, below, cuts = opened([1, 2, 3], [4, 5, 6], endless=True)
    assert cuts.wait_for(1, 2)
    assert below.taken == []
    batch = stream.read()
    batch.taken()
    assert cuts.wait_for(3)
    items = batch.items
    for taken, cut in ((1, None), (2, 4), (3, 5)):
        assert next(items) == taken
        if cut is not None:
            assert cuts.wait_for(cut)
        for thread in cut_threads():
            thread.join(0.05)
        assert cuts.made.empty()
    assert below.taken == [0]


def test_what_is_left_of_a_batch_is_left_out(opened: Any) -> None:
    stream, _, _ = opened([1, 2, 3, 4, 5], [6])
    batch = stream.read()
    batch.taken()
    assert next(batch.items) == 1
    assert read_all(stream) == [(1, [6])]


def test_an_error_of_the_stream_below_comes_after_what_was_read(opened: Any) -> None:
    stream, _, _ = opened([1, 2], ZeroDivisionError("by design"))
    batch = stream.read()
    batch.taken()
    items = batch.items
    assert [next(items), next(items)] == [1, 2]
    with pytest.raises(ZeroDivisionError, match="by design"):
        next(items)


def test_an_error_of_the_first_cut_comes_before_its_batch(opened: Any) -> None:
    stream, below, _ = opened([ZeroDivisionError("by design")])
    with pytest.raises(ZeroDivisionError, match="by design"):
        stream.read()
    assert below.taken == []


def test_an_error_of_a_later_cut_comes_in_its_place(opened: Any) -> None:
    stream, _, _ = opened([1, ZeroDivisionError("by design"), 3])
    items = stream.read().items
    assert next(items) == 1
    with pytest.raises(ZeroDivisionError, match="by design"):
        next(items)


def test_closing_ends_a_wait_for_the_next_batch(opened: Any) -> None:
    stream, below, cuts = opened([1], endless=True)
    assert cuts.wait_for(1)
    reader_got: list[Any] = []
    reader = threading.Thread(target=lambda: reader_got.extend(read_all(stream)))
    reader.start()
    while not below.taken:
        reader.join(0.01)
    stream.close()
    reader.join(10)
    assert not reader.is_alive()
    assert reader_got == [(0, [1])]
    assert (stream.closed, below.closed) == (True, True)


def test_a_stream_that_is_garbage_ends_its_thread() -> None:
    below = Numbers([1, 2, 3, 4], endless=True)
    stream = CutAheadStream(below, Cuts())
    stream.read()
    del stream
    gc.collect()
    for thread in cut_threads():
        thread.join(10)
    assert cut_threads() == []
    assert below.closed
