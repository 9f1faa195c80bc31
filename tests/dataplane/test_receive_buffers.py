"""Memory of gets: used again when nothing is left that looks at it, and never before."""

import threading

import numpy as np
import pytest
import torch

from tq_service.dataplane.receiving import ReceiveBuffers

SIZE = 8 << 20


def unused_bytes(buffers):
    return sum(len(block) for _, block in list(buffers._unused))


def address(array):
    return array.__array_interface__["data"][0]


def test_memory_is_reused_when_the_array_is_gone():
    buffers = ReceiveBuffers()
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
    buffers = ReceiveBuffers()
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
    buffers = ReceiveBuffers()
    array = buffers.take(1000)
    assert array.size == 1000
    del array
    assert unused_bytes(buffers) == 0
    assert buffers.take(0).size == 0


def test_a_block_much_too_large_is_not_used():
    buffers = ReceiveBuffers()
    large = buffers.take(8 * SIZE)
    del large
    small = buffers.take(SIZE)
    assert unused_bytes(buffers) == 8 * SIZE
    del small
    assert unused_bytes(buffers) == 9 * SIZE


def test_no_more_is_kept_than_allowed_and_the_latest_first():
    buffers = ReceiveBuffers(kept_bytes=2 * SIZE)
    arrays = [buffers.take(SIZE) for _ in range(4)]
    latest = {address(array) for array in arrays[2:]}
    while arrays:
        del arrays[0]
    assert unused_bytes(buffers) == 2 * SIZE
    assert {address(buffers.take(SIZE)) for _ in range(2)} <= latest


def test_what_is_unused_for_long_goes_back_to_the_system():
    buffers = ReceiveBuffers(kept_seconds=-1.0)
    array = buffers.take(SIZE)
    del array
    assert unused_bytes(buffers) == 0


def test_threads_never_share_memory():
    buffers = ReceiveBuffers()
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
