"""Large puts, gets and clears of samples leave the event loop of the service to other calls.

Counted, not timed: which thread did what, and how many rows the loop handled in one step.
"""

import asyncio
import threading

import numpy as np
import pytest

from tq_service.client import AsyncClient
from tq_service.config import ServeSettings
from tq_service.server import puts, storage_servicer
from tq_service.server.app import running
from tq_service.server.rpc import inbox
from tq_service.state.table import RowTable
from tq_service.storage.blobs import memory
from tq_service.storage.index import put, reading
from tq_service.storage.index.put import StoredPut
from tq_service.wire import columns

MANY = 200_000
TEXTS = [f"x{number % 1000}" for number in range(MANY)]
LOOP_BYTES = 512 << 10


@pytest.fixture(params=["auto", "off"], ids=["shared memory", "frames"])
async def service(request):
    settings = ServeSettings(host="127.0.0.1", port=0, max_bytes=256 << 20, shared_memory=request.param)
    async with running(settings) as app:
        yield app


@pytest.fixture
async def client(service):
    async with AsyncClient(f"127.0.0.1:{service.port}", timeout=60) as client:
        yield client


@pytest.fixture
def threads(monkeypatch):
    """Note the threads in which functions run; of the decoder of messages those of large ones but columns."""
    noted = {}

    def note(owner, name, is_noted=lambda *_: True):
        function = getattr(owner, name)

        def noting(*args, **arguments):
            if is_noted(*args):
                noted.setdefault(name, set()).add(threading.get_ident())
            return function(*args, **arguments)

        monkeypatch.setattr(owner, name, noting)

    note(inbox.Requests, "_decoded", _is_large)
    note(puts, "decode_headers")
    note(StoredPut, "fill_tables")
    note(reading, "_join_neighbours")
    note(storage_servicer, "encode_header")
    note(memory, "unmap")
    return noted


def _is_large(_, data):
    return data is not inbox._EOF and len(data) >= LOOP_BYTES and data[0] != columns._FRAME_TAG


async def test_threads_handle_what_is_large(service, client, threads):
    order = np.random.default_rng(0).permutation(MANY).tolist()
    await client.put("p", {"t": TEXTS, "x": np.zeros((MANY, 64), np.uint8)})
    back = await client.get_data("p", global_indexes=order, data_fields=["t"])
    assert list(back["t"]) == [TEXTS[index] for index in order]
    await client.clear_partition("p")
    service.storage.engine.trim()
    memory.BACKGROUND.submit(int).result()
    assert threads.keys() >= {"_decoded", "decode_headers", "fill_tables", "_join_neighbours", "encode_header"}
    for name, where in threads.items():
        assert threading.get_ident() not in where, name


async def test_a_few_rows_need_no_thread(client, threads):
    await client.put("p", {"t": TEXTS[:100]})
    await client.get_data("p", global_indexes=range(100), data_fields=["t"])
    assert set().union(*threads.values()) == {threading.get_ident()}


async def test_a_put_adds_its_rows_to_a_table_that_has_grown_in_steps(client, monkeypatch):
    grown, grow = [], RowTable._grow

    def growing(table, least):
        grown.append(least - table._capacity)
        grow(table, least)

    monkeypatch.setattr(RowTable, "_grow", growing)
    await client.put("p", {"x": np.arange(MANY)})
    assert len(grown) > 2
    assert max(grown) <= 1 << 16


async def test_a_put_that_goes_while_capacity_is_reserved_is_put_again(service, client, monkeypatch):
    """The last await before the commit is that for capacity: the put is looked for once more in the step of it."""
    engine, reserve, dropped = service.storage.engine, RowTable.reserve_capacity, []

    def dropping(table, *args):
        if not dropped:
            dropped.extend(engine.puts)
            for put_id in dropped:
                engine.delete_waiting(put_id)
        return reserve(table, *args)

    monkeypatch.setattr(RowTable, "reserve_capacity", dropping)
    meta = await client.put("p", {"x": np.arange(MANY)})
    assert len(dropped) == 1
    assert (await client.get_data(meta))["x"].tolist() == list(range(MANY))


async def test_a_put_that_is_given_up_while_capacity_is_reserved_leaves_nothing(service, client, monkeypatch):
    reserve, begun = RowTable.reserve_capacity, asyncio.Event()

    def endlessly(table, *args):
        begun.set()
        while True:
            yield

    monkeypatch.setattr(RowTable, "reserve_capacity", endlessly)
    put = asyncio.create_task(client.put("p", {"x": np.arange(MANY)}))
    await begun.wait()
    put.cancel()
    await asyncio.wait([put])
    while service.storage.engine.stat().put_count:
        await client.list_partitions()
    monkeypatch.setattr(RowTable, "reserve_capacity", reserve)
    assert await client.list_partitions() == []
    meta = await client.put("p", {"x": np.arange(MANY)})
    assert meta.global_indexes[0] == 0
    assert (await client.get_data(meta))["x"].tolist() == list(range(MANY))


async def test_pieces_of_text_that_are_checked_at_once_are_small(client, monkeypatch):
    sizes, look_at = [], put.TextCheck.look_at

    def looking(check, data, at):
        sizes.append(len(data))
        look_at(check, data, at)

    monkeypatch.setattr(put.TextCheck, "look_at", looking)
    await client.put("p", {"t": ["long text" * 1000] * 1000})
    assert sum(sizes) >= 9_000_000
    assert max(sizes) <= 2 << 20
