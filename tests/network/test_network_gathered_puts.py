"""Puts that were sent as one to a service that is killed: each caller's retry is answered, and nothing comes twice."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from live_server import LoopThread
from tcp_proxy import Network

import tq_service as tq
from tq_service.testing import ServiceProcess

TIMEOUT_SECONDS = 100.0
CALLERS = 24


@pytest.mark.parametrize("durability", [pytest.param("process", marks=pytest.mark.nightly), "disk"])
@pytest.mark.parametrize("kind", [pytest.param("sync", marks=pytest.mark.nightly), "async"])
def test_a_service_that_is_killed_between_commit_and_answer(kind: str, durability: str, tmp_path: Path) -> None:
    loop = LoopThread()
    flags = ("--durability", durability)
    with (
        ServiceProcess(*flags, data_dir=tmp_path) as service,
        Network(loop, service.address) as network,
        tq.Client(service.address, timeout=TIMEOUT_SECONDS) as observer,
        ThreadPoolExecutor(CALLERS) as pool,
    ):
        client = (tq.Client if kind == "sync" else tq.AsyncClient)(network.address, timeout=TIMEOUT_SECONDS)

        def put(number: int) -> tq.BatchMeta:
            call = client.put("p", {"x": [number]}, custom_meta=[{"number": number}])
            return call if kind == "sync" else loop.run(call)

        put(-1)
        network.hold_answers()
        calls = [pool.submit(put, number) for number in range(CALLERS)]
        while observer.describe_partition("p").summary.inserted_count < 3:  # by two calls, one of several puts
            assert not any(call.done() for call in calls)
        committed, _ = observer.lookup_samples("p")
        service.kill()
        network.cut()
        service.start()
        network.mend()

        metas = [call.result(TIMEOUT_SECONDS) for call in calls]
        found, _ = observer.lookup_samples("p")
        assert sorted(each["number"] for each in found.custom_meta) == list(range(-1, CALLERS))
        # Those that were committed before are the same ones still, and were not put again.
        assert found.custom_meta[: committed.size] == committed.custom_meta
        for number, meta in enumerate(metas):
            assert meta.custom_meta == [{"number": number}]
            assert observer.get_data(meta)["x"].tolist() == [number]
        if kind == "sync":
            client.close()
        else:
            loop.run(client.aclose())
    loop.stop()
