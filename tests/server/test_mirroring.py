"""The mirror of a storage service's process, from an engine that is not there yet on."""

import asyncio
import logging

import pytest

from tq_service.errors import InvalidArgumentError, UnavailableError
from tq_service.objects.memory import MemoryObjects, MemoryPool
from tq_service.server import mirroring
from tq_service.server.mirroring import Mirroring, Registration
from tq_service.server.supervisor import Supervisor


def mirroring_of(pool):
    return Mirroring(
        MemoryObjects(pool), url="memory://pool", node="here", copies=1, required=1, offered_bytes=0,
        supervisor=Supervisor(),
    )  # fmt: skip


@pytest.mark.parametrize("storage_id", ["a/b", "", "x" * 129])
def test_a_name_that_objects_may_not_have_is_refused_at_the_start(storage_id):
    with pytest.raises(InvalidArgumentError, match=r"storage_id: got .* expected 1 to 128 letters, digits"):
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
