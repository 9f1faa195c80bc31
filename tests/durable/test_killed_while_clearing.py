"""A service that is killed while it gives back the puts of a partition that was cleared."""

import asyncio
import shutil

import numpy as np

import tq_service as tq
from tq_service.config import ServeSettings
from tq_service.server.app import running

PUT_COUNT = 300
VALUES = {"x": np.arange(64, dtype=np.uint8).reshape(1, 64)}


async def durable(app):
    """Wait until everything so far would outlive the process."""
    flushed = asyncio.Event()
    app.state_store.after_durable(flushed.set)
    await flushed.wait()


async def test_what_was_not_given_back_goes_after_the_restart_and_what_is_kept_stays(tmp_path):
    killed = tmp_path / "killed"
    settings = ServeSettings(port=0, host="127.0.0.1", data_dir=tmp_path / "data")
    async with asyncio.timeout(60), running(settings) as app:
        async with tq.AsyncClient(f"127.0.0.1:{app.port}") as client:
            for _ in range(PUT_COUNT):
                await client.put("cleared", VALUES)
            kept = await client.put("kept", VALUES)
        app.controller.catalog.remove("cleared", b"")
        app.controller.storages.puts._freeing.cancel()  # as if it had died between two steps
        await durable(app)
        left_count = app.storage.engine.stat().put_count - 1
        assert 0 < left_count < PUT_COUNT
        shutil.copytree(tmp_path / "data", killed)
    settings = ServeSettings(port=0, host="127.0.0.1", data_dir=killed, put_ttl_seconds=0.01)
    async with asyncio.timeout(60), running(settings) as app:
        engine = app.storage.engine
        assert engine.stat().put_count == left_count + 1
        assert engine.stat().uncommitted_put_count == left_count
        while engine.stat().uncommitted_put_count:
            sum(app.controller.storages.expire())
            await asyncio.sleep(0)
        await durable(app)
        assert (engine.stat().put_count, engine.stat().used_bytes) == (1, 64)
        async with tq.AsyncClient(f"127.0.0.1:{app.port}") as client:
            assert [each.partition_id for each in await client.list_partitions()] == ["kept"]
            np.testing.assert_array_equal((await client.get_data(kept))["x"], VALUES["x"])


async def test_what_was_not_given_back_goes_when_the_service_stops(tmp_path):
    settings = ServeSettings(port=0, host="127.0.0.1", data_dir=tmp_path / "data")
    async with asyncio.timeout(60), running(settings) as app:
        async with tq.AsyncClient(f"127.0.0.1:{app.port}") as client:
            for _ in range(PUT_COUNT):
                await client.put("cleared", VALUES)
        app.controller.catalog.remove("cleared", b"")
        assert app.storage.engine.stat().put_count > 0
    async with asyncio.timeout(60), running(settings) as app:
        assert (app.storage.engine.stat().put_count, app.storage.engine.stat().used_bytes) == (0, 0)
