"""Memory of puts and gets: used again when nothing is left that looks at it, and never before; pinned up to a limit."""

import gc
import mmap
import os
import threading

import numpy as np
import pytest
import torch
from stand_in_device import standing_in

from tq_service.wire import host_memory
from tq_service.wire.host_memory import Blocks
from tq_service.wire.mapping import Mapping

SIZE = 8 << 20


def unused_bytes(buffers):
    return sum(block.size for _, block in list(buffers._unused))


def address(array):
    return array.__array_interface__["data"][0]


def test_memory_is_reused_when_the_array_is_gone():
    buffers = Blocks()
    array = buffers.take(SIZE)
    assert array.size == SIZE
    assert array.flags.writeable
    assert address(array) % 64 == 0
    was = address(array)
    del array
    assert unused_bytes(buffers) == SIZE
    again = buffers.take(SIZE - 1000)
    assert address(again) == was
    assert unused_bytes(buffers) == 0


@pytest.mark.parametrize(
    "look",
    [
        lambda array: array[1000:].view(np.int64),
        lambda array: torch.from_numpy(array).view(torch.float32).reshape(2, -1)[1],
        lambda array: memoryview(array)[4:],
        lambda array: torch.from_dlpack(torch.from_numpy(array)),
    ],
    ids=["view", "tensor", "memoryview", "dlpack"],
)
def test_memory_is_not_reused_while_something_looks_at_it(look):
    buffers = Blocks()
    array = buffers.take(SIZE)
    array[:] = 7
    seen = look(array)
    del array
    other = buffers.take(SIZE)
    other[:] = 0
    assert unused_bytes(buffers) == 0
    assert bytes(memoryview(np.asarray(seen))[:1].tobytes())[:1] == b"\x07"
    del seen
    assert unused_bytes(buffers) == SIZE


def test_small_arrays_are_left_to_malloc():
    buffers = Blocks()
    array = buffers.take(1000)
    assert array.size == 1000
    del array
    assert unused_bytes(buffers) == 0
    assert buffers.take(0).size == 0


def test_a_block_much_too_large_is_not_used():
    buffers = Blocks()
    large = buffers.take(8 * SIZE)
    del large
    small = buffers.take(SIZE)
    assert unused_bytes(buffers) == 8 * SIZE
    del small
    assert unused_bytes(buffers) == 9 * SIZE


def test_no_more_is_kept_than_allowed_and_the_latest_first():
    buffers = Blocks(kept_bytes=2 * SIZE)
    arrays = [buffers.take(SIZE) for _ in range(4)]
    latest = {address(array) for array in arrays[2:]}
    while arrays:
        del arrays[0]
    assert unused_bytes(buffers) == 2 * SIZE
    assert {address(buffers.take(SIZE)) for _ in range(2)} <= latest


def test_what_is_unused_for_long_goes_back_to_the_system():
    buffers = Blocks(kept_seconds=-1.0)
    array = buffers.take(SIZE)
    del array
    assert unused_bytes(buffers) == 0


def test_threads_never_share_memory():
    buffers = Blocks()
    mixed = []

    def work(number):
        for _ in range(50):
            array = buffers.take(SIZE)
            array[:: 1 << 16] = number
            if (array[:: 1 << 16] != number).any():
                mixed.append(number)
            del array

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not mixed
    assert unused_bytes(buffers) <= 4 * SIZE


# Pinned memory

HERE = torch.device("cpu")


@pytest.fixture
def stand_in(monkeypatch):
    with standing_in(monkeypatch, limit_bytes=3 * SIZE) as stand_in:
        yield stand_in


def pinned():
    return host_memory.PINNED


def copy_under_way(stand_in, array):
    """Begin to copy an array up, and keep it until that is done."""
    stream = stand_in.new_stream(HERE)
    stand_in.copy(stand_in.put(torch.zeros(array.size, dtype=torch.uint8)), torch.from_numpy(array), stream)
    event = stand_in.record(stream)
    pinned().keep(event, array)
    return event


def test_blocks_for_a_device_are_pinned_once(stand_in):
    for _ in range(3):
        array = host_memory.BLOCKS.take(SIZE, HERE)
        assert pinned().find(array[5:]) is not None
        del array
    assert host_memory.BLOCKS.take(SIZE).flags.writeable  # not one that children lack
    assert stand_in.pin_count == 1
    assert pinned().find(np.empty(3, np.uint8)) is None


def test_what_is_not_in_use_makes_way_and_the_least_recently_used_first(stand_in):
    mappings = [Mapping.anonymous(SIZE, is_inherited=False) for _ in range(4)]
    for mapping in mappings[:3]:
        assert pinned().pin(mapping, HERE) is not None
    pin = pinned().pin(mappings[0], HERE)
    assert pinned().pin(mappings[3], HERE) is not None
    assert stand_in.pinned.keys() == {mappings[number].address for number in (0, 2, 3)}
    others = [pinned().pin(mapping, HERE) for mapping in mappings[2:]]
    assert pinned().pin(mappings[1], HERE) is None  # all are in use
    del pin
    assert pinned().pin(mappings[1], HERE) is not None
    del others


def test_pinning_waits_for_copies_whose_memory_can_make_way(stand_in):
    events = [copy_under_way(stand_in, host_memory.BLOCKS.take(SIZE, HERE)) for _ in range(3)]
    mapping = Mapping.anonymous(SIZE, is_inherited=False)
    assert pinned().pin(mapping, HERE) is not None
    assert events[0].query()
    assert not pinned().pin(Mapping.anonymous(4 * SIZE, is_inherited=False), HERE)  # more than may be pinned


def test_memory_is_unpinned_before_it_is_unmapped_and_after_its_copies(stand_in):
    mapping = Mapping.anonymous(SIZE, is_inherited=False)
    array = mapping.array(0, SIZE, pinned().pin(mapping, HERE))
    event = copy_under_way(stand_in, array)
    del mapping, array
    gc.collect()
    assert len(stand_in.pinned) == len(stand_in.under_way) == 1
    event.synchronize()
    assert pinned().pinned_bytes == 0
    assert stand_in.pinned == {}


def test_a_block_is_not_used_again_before_its_copy_is_done(stand_in):
    array = host_memory.BLOCKS.take(SIZE, HERE)
    was = address(array)
    event = copy_under_way(stand_in, array)
    del array
    # Each look does one piece of work.
    assert address(host_memory.BLOCKS.take(SIZE, HERE)) != was or not stand_in.under_way
    event.synchronize()
    pinned().tidy()
    assert was in {address(array) for array in [host_memory.BLOCKS.take(SIZE, HERE) for _ in range(2)]}


def test_a_child_neither_uses_nor_unmaps_what_it_did_not_inherit(stand_in):
    block = host_memory.BLOCKS.take(SIZE, HERE)
    del block
    mapping = Mapping.anonymous(SIZE, is_inherited=False)
    pin = pinned().pin(mapping, HERE)
    child = os.fork()
    if not child:
        here = mmap.mmap(-1, SIZE)  # where a mapping of the parent was
        del pin, mapping
        gc.collect()
        here[:] = bytes(SIZE)
        os._exit(0 if len(stand_in.pinned) == 2 and host_memory.BLOCKS._take_all() == [] else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert pin is not None


@pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="memfds are there on Linux only")
def test_what_is_refused_for_shared_memory_is_granted_for_blocks(stand_in, caplog):
    fd = os.memfd_create("refused")
    os.ftruncate(fd, SIZE)
    mapping = Mapping(fd, is_shared=True)
    os.close(fd)
    stand_in.refuses = True
    assert pinned().pin(mapping, HERE) is None
    stand_in.refuses = False
    assert pinned().pin(mapping, HERE) is None
    assert pinned().find(host_memory.BLOCKS.take(SIZE, HERE)) is not None
    assert len(caplog.messages) == 1
