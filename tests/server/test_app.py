"""A service inside another program: one that cannot start leaves nothing behind, one that cannot go on says so."""

import asyncio
import threading

import numpy as np
import pytest
from grpc_health.v1 import health_pb2

import tq_service as tq
from tq_service.config import ServeSettings
from tq_service.errors import JournalDamagedError, JournalUnreachableError
from tq_service.server import app, converters
from tq_service.server.app import running


async def test_a_service_that_cannot_start_gives_back_its_data_directory_and_its_threads(tmp_path):
    settings = ServeSettings(host="127.0.0.1", port=0, shared_memory="off", data_dir=tmp_path / "data")
    async with running(settings):
        pass
    damaged = tmp_path / "data" / "journal-000000000002.tqj"
    damaged.write_bytes(b"damaged")
    before = {thread.name for thread in threading.enumerate()}
    with pytest.raises(JournalDamagedError, match="journal-000000000002"):
        async with running(settings):
            raise AssertionError("it started")
    assert {thread.name for thread in threading.enumerate()} <= before
    damaged.unlink()
    async with running(settings) as app:
        assert app.port > 0


def no_answer(*_arguments):
    raise ZeroDivisionError("a fault of the service")


@pytest.mark.parametrize("durability", ["process", "disk"])
async def test_a_service_that_cannot_go_on_raises_in_its_owner_and_keeps_what_was_answered(
    tmp_path, monkeypatch, durability
):
    settings = ServeSettings(
        host="127.0.0.1", port=0, shared_memory="off", data_dir=tmp_path / "data", durability=durability
    )
    outcomes = []

    async def write(app):
        async with tq.AsyncClient(f"127.0.0.1:{app.port}", timeout=2.0) as client:
            await client.put("train", {"x": np.ones((2, 1))})
            monkeypatch.setattr(converters, "written_meta", no_answer)  # after the samples were written
            try:
                await client.put("train", {"x": np.ones((1, 1))})
            except tq.TqError as error:
                outcomes.append(error)
            else:
                outcomes.append("answered")

    with pytest.raises(tq.errors.ServiceFailedError, match="failed after one of its changes") as caught:
        async with running(settings) as app:
            writing = asyncio.ensure_future(write(app))
            await asyncio.Event().wait()
    assert isinstance(caught.value.__cause__, ZeroDivisionError)
    await writing
    assert len(outcomes) == 1
    assert isinstance(outcomes[0], tq.TqError)
    monkeypatch.undo()
    async with running(settings) as app, tq.AsyncClient(f"127.0.0.1:{app.port}", timeout=20.0) as client:
        (partition,) = await client.list_partitions()
        assert partition.inserted_count == 2
        await client.put("train", {"x": np.ones((1, 1))})


async def test_health_says_so_from_that_moment():
    settings = ServeSettings(host="127.0.0.1", port=0, shared_memory="off")
    statuses = []
    with pytest.raises(tq.errors.ServiceFailedError, match="over"):
        async with running(settings) as app:
            app.supervisor.on_fatal(lambda _failure: statuses.append(app.health._statuses[""]))
            app.supervisor.fatal("over")
    assert statuses == [health_pb2.HealthCheckResponse.NOT_SERVING]


async def test_a_controller_waits_for_its_etcd_and_stops_while_it_does(monkeypatch, caplog):
    starts = []

    async def start(settings, supervisor):
        starts.append(supervisor)
        if len(starts) < 3:
            raise JournalUnreachableError("etcd does not answer")
        return "app"

    monkeypatch.setattr(app.App, "start", start)
    monkeypatch.setattr(app, "_ETCD_RETRY_SECONDS", 0.01)
    stopping = asyncio.Event()
    assert await app._started(ServeSettings(insecure=True), stopping) == "app"
    assert len(set(map(id, starts))) == 3
    assert caplog.text.count("waiting for etcd") == 2
    starts.clear()
    monkeypatch.setattr(app, "_ETCD_RETRY_SECONDS", 60.0)
    asyncio.get_running_loop().call_later(0.05, stopping.set)
    async with asyncio.timeout(10.0):
        assert await app._started(ServeSettings(insecure=True), stopping) is None
    assert len(starts) == 1
