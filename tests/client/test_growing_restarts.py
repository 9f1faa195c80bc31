"""Appends and a service that is killed: what was durable and not answered is answered to the retry, and made once."""

import asyncio
import sys
from pathlib import Path

from client_support import make_client

from tq_service.testing import ServiceProcess


async def test_an_append_that_was_durable_but_not_answered_is_made_once(kind, tmp_path):
    marker = tmp_path / "marker"
    command = (sys.executable, str(Path(__file__).with_name("service_killed_before_answering.py")), str(marker))
    with ServiceProcess("--durability", "process", data_dir=tmp_path / "data", command=command) as server:
        client = make_client(kind, server.address, timeout=60)
        await client.create_partition("p")
        slots = await client.acquire("p", "rollout", count=2, lease=600.0)
        slots = await client.append(slots, {"tokens": [[1], [2]]}, at=[0, 0])
        marker.touch()
        appending = asyncio.ensure_future(client.append(slots, {"tokens": [[3], [4]]}, at=[1, 1]))
        await asyncio.to_thread(server.wait, 60)
        assert not marker.exists()
        await asyncio.to_thread(server.start)
        meta = await appending
        assert [row.tolist() for row in (await client.get_data(meta))["tokens"].unbind()] == [[1, 3], [2, 4]]
        meta = await client.append(meta, {"tokens": [[5], []]}, at=[2, 2])
        await asyncio.to_thread(server.restart)
        assert [row.tolist() for row in (await client.get_data(meta))["tokens"].unbind()] == [[1, 3, 5], [2, 4]]
        await client.aclose()
