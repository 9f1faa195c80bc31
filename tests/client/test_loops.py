"""One AsyncClient used by several event loops of a process: one after the other, and at the same time in threads."""

import asyncio
import gc
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from open_files import open_files

import tq_service as tq
from tq_service.client._async.calls import AsyncCalls
from tq_service.wire.connection import Credentials

QUEUE = {"partition_id": "later", "task_name": "t", "data_fields": ["x"], "batch_size": 1}


async def use(client, partition_id, count=1, size=4):
    """Put and get samples, and check them."""
    for number in range(count):
        values = np.full((4, size), number)
        meta = await client.put(partition_id, {"x": values})
        assert (await client.get_data(meta))["x"].tolist() == values.tolist()
    return threading.get_ident()


async def in_thread(call):
    """Run a call in an event loop of its own in another thread."""
    return await asyncio.to_thread(asyncio.run, call)


async def test_each_loop_has_channels_of_its_own(service):
    async with tq.AsyncClient(service, timeout=20) as client:
        for number in range(3):
            await use(client, "here")
            await in_thread(use(client, f"loop {number}"))
        await use(client, "here")
        names = {each.partition_id for each in await client.list_partitions()}
    assert names == {"here", "loop 0", "loop 1", "loop 2"}


@pytest.mark.parametrize(("count", "size"), [(20, 4), (4, 1 << 15)], ids=["small", "through shared memory"])
async def test_loops_of_several_threads_use_it_at_the_same_time(service, count, size):
    barrier = threading.Barrier(4)

    def run(number):
        barrier.wait(60)
        return asyncio.run(use(client, f"p{number}", count=count, size=size))

    async with tq.AsyncClient(service, timeout=60) as client:
        loop = asyncio.get_running_loop()
        with ThreadPoolExecutor(4) as pool:
            calls = [loop.run_in_executor(pool, run, number) for number in range(4)]
            await use(client, "here", count=count, size=size)
            threads = await asyncio.gather(*calls)
        counts = {each.partition_id: each.inserted_count for each in await client.list_partitions()}
    assert len(set(threads)) == 4
    assert counts == dict.fromkeys(["here", "p0", "p1", "p2", "p3"], 4 * count)


async def test_closed_loops_leave_no_channels(service):
    async with tq.AsyncClient(service, timeout=20) as client:
        channels = []

        async def used():
            await use(client, "p", size=1 << 15)
            await client.clear_partition("p")  # whose memory has a file descriptor in this process
            channels.append(weakref.ref(client._calls.endpoint().channel))

        async def open_after(count):
            """Return what is open once so many loops were used and closed: most of that is of the last one."""
            for _ in range(count):
                await in_thread(used())
                assert len(client._calls._channels) <= 2  # this loop's, and those of the last one
            gc.collect()
            assert sum(channel() is not None for channel in channels) <= 1
            return open_files()

        few = len(await open_after(3))
        many = len(await open_after(20))
        for _ in range(200):  # gRPC closes a connection some time after its channel is gone
            if many <= few + 4:
                break
            await asyncio.sleep(0.05)
            many = len(open_files())
        assert many <= few + 4


async def test_calls_of_all_loops_end_when_it_is_closed_in_one(service):
    client = tq.AsyncClient(service, timeout=600)
    waiting = threading.Semaphore(0)

    async def wait():
        call = asyncio.ensure_future(client.get_meta(**QUEUE, max_wait=600.0))
        await client.list_partitions()
        waiting.release()
        with pytest.raises((tq.errors.CallCancelledError, tq.errors.PreconditionError)) as caught:
            await call
        return str(caught.value)

    calls = [asyncio.ensure_future(in_thread(wait())) for _ in range(3)]
    calls.append(asyncio.ensure_future(wait()))
    for _ in calls:
        await asyncio.to_thread(waiting.acquire)
    await client.aclose()
    said = await asyncio.wait_for(asyncio.gather(*calls), 60)
    assert all("closed" in each for each in said)
    with pytest.raises(tq.errors.PreconditionError, match="closed"):
        await in_thread(client.list_partitions())
    assert client._calls._channels == {}


async def test_it_is_closed_by_a_loop_that_has_not_used_it(service):
    client = tq.AsyncClient(service, timeout=20)
    await use(client, "p")
    await in_thread(client.aclose())
    assert client._calls._channels == {}
    with pytest.raises(tq.errors.PreconditionError, match="closed"):
        await client.list_partitions()
    await client.aclose()


def test_a_loop_that_stands_still_is_left_when_it_is_closed(loop_service):
    """Its channels have no loop to be closed by; a program that runs its loop again makes another client."""
    client = tq.AsyncClient(loop_service, timeout=20)
    loop = asyncio.new_event_loop()
    loop.run_until_complete(use(client, "p"))
    asyncio.run(client.aclose())
    with pytest.raises(tq.errors.PreconditionError, match="closed"):
        loop.run_until_complete(client.list_partitions())
    loop.close()


def test_a_claim_is_released_by_the_loop_that_gave_it_up(loop_service):
    client = tq.AsyncClient(loop_service, timeout=20)

    async def give_up():
        call = asyncio.ensure_future(client.get_meta(**QUEUE, max_wait=60.0))
        await asyncio.sleep(0.05)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        await client._background_calls.drain()

    async def claim():
        await client.put("later", {"x": np.arange(1)})
        meta = await client.get_meta(**QUEUE, max_wait=30.0)
        await client.aclose()
        return meta.size

    for _ in range(3):
        asyncio.run(give_up())
    assert asyncio.run(claim()) == 1


async def test_loops_that_race_for_their_first_channel_do_not_close_that_of_another():
    """A loop that comes while another is closed leaves the channels of the closed one only."""
    calls = AsyncCalls("127.0.0.1:1", Credentials())
    mine = calls.endpoint()
    barrier = threading.Barrier(8)

    async def first():
        return calls.endpoint(), calls.endpoint()

    def run():
        barrier.wait(60)
        one, two = asyncio.run(first())
        assert one is two
        return id(one)

    with ThreadPoolExecutor(8) as pool:
        loop = asyncio.get_running_loop()
        await asyncio.gather(*(loop.run_in_executor(pool, run) for _ in range(8)))
    assert calls.endpoint() is mine
    await calls.aclose()


@pytest.fixture
def loop_service(server):
    return server.address
