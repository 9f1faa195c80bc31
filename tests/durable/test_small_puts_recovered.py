"""Small puts that were compacted, of which the values are in the journal."""

import asyncio

import torch

import tq_service as tq
from tq_service.config import ServeSettings
from tq_service.server.app import running


async def test_the_rows_that_are_left_of_a_small_put_are_read_after_starts(tmp_path):
    settings = ServeSettings(host="127.0.0.1", port=0, data_dir=tmp_path / "data")
    async with running(settings) as app, tq.AsyncClient(f"127.0.0.1:{app.port}") as client:
        await client.put("p", {"x": torch.arange(64), "y": torch.arange(64)})
        whole = app.storage.engine.stat().used_bytes
        await client.clear_samples("p", global_indexes=list(range(1, 63)))
        async with asyncio.timeout(20):
            while app.storage.engine.stat().used_bytes == whole:  # noqa: ASYNC110  (a compaction, which tells nobody)
                await asyncio.sleep(0.01)
    for _ in range(2):  # out of the journal, then as the first start has written it
        async with running(settings) as app, tq.AsyncClient(f"127.0.0.1:{app.port}") as client:
            found = await client.get_data("p", global_indexes=[0, 63], data_fields=["x", "y"])
            assert (found["x"].tolist(), found["y"].tolist()) == ([0, 63], [0, 63])
