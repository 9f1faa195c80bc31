"""Puts that were gathered, and a service that is killed: what was answered is there, and retries are answered alike."""

import asyncio
import sys
from pathlib import Path

import numpy as np
from client_support import make_client
from gathered_puts import COUNT, REFUSALS, assert_alike, at_once, outcomes_of, values_of

import tq_service as tq
from tq_service.testing import ServiceProcess


async def test_neighbours_of_a_refused_put_are_as_durable_as_alone(kind, tmp_path):
    outcomes = {}
    with ServiceProcess("--durability", "process", data_dir=tmp_path) as server:
        client = make_client(kind, server.address, timeout=60)
        for number, name in enumerate(REFUSALS):
            for gathers in (True, False):
                partition = f"{number}-{gathers}"
                outcomes[partition] = await outcomes_of(client, name, partition, "written", gathers=gathers)
        await asyncio.to_thread(server.restart)
        for number in range(len(REFUSALS)):
            gathered, alone = outcomes[f"{number}-True"], outcomes[f"{number}-False"]
            assert_alike(gathered, alone)
            assert await values_of(client, gathered) == await values_of(client, alone)
            counts = [
                (await client.describe_partition(f"{number}-{gathers}")).summary.inserted_count
                for gathers in (True, False)
            ]
            assert counts[0] == counts[1]
        await client.aclose()


async def test_callers_of_a_put_that_was_durable_but_not_answered_get_the_answer_of_it(kind, tmp_path):
    marker = tmp_path / "marker"
    marker.touch()
    command = (sys.executable, str(Path(__file__).with_name("service_killed_before_answering.py")), str(marker))
    with ServiceProcess("--durability", "process", data_dir=tmp_path / "data", command=command) as server:
        client = make_client(kind, server.address, timeout=60)
        calls = [{"data": {"x": np.array([number])}, "target": "p"} for number in range(COUNT)]
        putting = asyncio.ensure_future(at_once(client, calls))
        await asyncio.to_thread(server.wait, 60)
        assert not marker.exists()
        with tq.Client(server.address, timeout=60) as other:
            await asyncio.to_thread(server.start)
            _, metas = await putting
            for number, meta in enumerate(metas):
                assert other.get_data(meta)["x"].tolist() == [number]
            assert len({meta.global_indexes[0] for meta in metas}) == COUNT
            assert other.describe_partition("p").summary.inserted_count == COUNT
        await client.aclose()
