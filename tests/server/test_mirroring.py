"""The mirror of a storage service's process, from an engine that is not there yet on."""

import asyncio
import logging
import socket

import pytest
from memory_pool import MemoryPool, PoolObjects

from tq_service.config import ServeSettings
from tq_service.errors import InvalidArgumentError, UnavailableError
from tq_service.server import mirroring
from tq_service.server.app import _node_of
from tq_service.server.mirroring import Mirroring, Registration
from tq_service.server.supervisor import Supervisor
from tq_service.storage.engine import StorageEngine
from tq_service.storage.index.put_table import PutStored, encode_put
from tq_service.storage.mirror.layout import pack_puts


def mirroring_of(pool):
    return Mirroring(
        PoolObjects(pool), url="memory://pool", node="here", copies=1, required=1, offered_bytes=0,
        supervisor=Supervisor(),
    )  # fmt: skip


@pytest.mark.parametrize("storage_id", ["a/b", "", "x" * 129])
def test_a_name_that_objects_may_not_have_is_refused_at_the_start(storage_id):
    with pytest.raises(InvalidArgumentError, match=r"storage_id is .*; expected 1 to 128 letters, digits"):
        mirroring_of(MemoryPool({})).mirror_of(storage_id, b"b" * 16, Registration())


async def test_an_engine_that_cannot_be_reached_yet_is_shown_so_until_it_answers(monkeypatch, caplog):
    monkeypatch.setattr(mirroring, "_RETRY_SECONDS", 0.0)
    pool = MemoryPool({"other": 1 << 20})
    pool.refusal = UnavailableError("connection refused")
    its = mirroring_of(pool)
    mirror, writer = its.mirror_of("s", b"b" * 16, Registration())
    assert mirror.stat().is_reachable is None
    with caplog.at_level(logging.INFO):
        running = asyncio.create_task(its.run(mirror, lambda _: asyncio.sleep(0)))
        for _ in range(50):
            await asyncio.sleep(0)
        assert mirror.stat().is_reachable is False
        assert writer.error == "connection refused"
        pool.refusal = None
        while not mirror.stat().is_reachable:  # noqa: ASYNC110  (what is waited for has no event)
            await asyncio.sleep(0)
    assert [record.levelname for record in caplog.records] == ["WARNING", "INFO"]  # once each, however often it tried
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    await its.close()


async def test_what_was_taken_over_for_another_controller_is_looked_up_again():
    pool = MemoryPool({"one": 1 << 20, "two": 1 << 20})
    lost, successor = mirroring_of(pool), mirroring_of(pool)
    mirror, writer = lost.mirror_of("s", b"b" * 16, Registration())
    own = StorageEngine(max_bytes=None, storage_id="successor", put_ttl_seconds=7.0)
    running = [
        asyncio.create_task(lost.run(mirror, lambda _: asyncio.sleep(0))),
        asyncio.create_task(
            successor.run(successor.mirror_of("successor", b"h" * 16, Registration())[0], lambda _: asyncio.sleep(3600))
        ),
    ]
    put = PutStored(
        put_id=b"p" * 16, partition_id="train", row_count=1, columns=(), row_sets=(), size_bytes=0, owner=b"o" * 16
    )
    while not mirror.stat().is_reachable or not successor._opened.is_set():  # noqa: ASYNC110  (there is no event)
        await asyncio.sleep(0)
    first = await successor.take_over("s", b"b" * 16, own, b"1" * 16)
    assert await successor.take_over("s", b"b" * 16, own, b"1" * 16) is first  # a call that is repeated
    assert (first.engine.stat().put_count, first.engine.put_ttl_seconds) == (0, 7.0)
    await writer.write(b"o" * 16, "train", [b"p" * 16], pack_puts([(encode_put(put), [])]))
    pool.gate = asyncio.Event()
    late = asyncio.create_task(successor.take_over("s", b"b" * 16, own, b"2" * 16))
    await asyncio.sleep(0)
    asking = asyncio.create_task(
        successor.take_over("s", b"b" * 16, own, b"3" * 16)
    )  # while that one looks into the mirror
    await asyncio.sleep(0)
    pool.gate.set()
    with pytest.raises(UnavailableError, match="was lost again"):
        await late
    again = await asking
    assert again.engine.run_id == b"3" * 16
    assert again.engine.stat().put_count == 1
    assert successor.adopted == {b"b" * 16: again}
    for task in running:
        task.cancel()
    await asyncio.gather(*running, return_exceptions=True)
    await successor.leave(again)
    await asyncio.gather(successor.close(), lost.close())


@pytest.mark.parametrize(
    ("given", "node"),
    [
        ({"advertise": "tq-storage-0.tq.svc:50051"}, "tq-storage-0.tq.svc"),
        ({"advertise": "10.0.0.7"}, "10.0.0.7"),
        ({"host": "127.0.0.1"}, "127.0.0.1"),
        ({"host": "0.0.0.0"}, socket.gethostname()),
    ],
)
def test_the_node_of_a_storage_service_is_a_host_without_its_port(given, node):
    settings = ServeSettings(role="storage", controller="c:50051", mirror="memory://pool", insecure=True, **given)
    assert _node_of(settings, 50051) == node
