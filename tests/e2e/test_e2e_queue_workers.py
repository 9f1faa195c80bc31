"""Queue workers: many at once, and those that give up."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import grpc
import numpy as np
import torch
from live_server import AnyClient, LiveServer

import tq_service as tq
from tq_service.testing import ServiceProcess
from tq_service.v1 import controller_service_pb2 as pb

ASKS = {"partition_id": "train", "task_name": "reward", "data_fields": ["x"]}

LEAVER = """
import os, sys, threading
import grpc
from tq_service.v1 import controller_service_pb2 as pb
from tq_service.v1.controller_service_pb2_grpc import ControllerServiceStub

def wait(stub):
    stub.GetMeta(pb.GetMetaRequest(request_id=os.urandom(16), partition_id="train", task_name="reward",
                                   data_fields=["x"], batch_size=1, max_wait={"seconds": 60}), timeout=90)

for _ in range(8):
    channel = grpc.insecure_channel(sys.argv[1], options=[("grpc.use_local_subchannel_pool", 1)])
    threading.Thread(target=wait, args=(ControllerServiceStub(channel),)).start()
"""


def test_32_workers_on_20000_samples_take_each_once() -> None:
    def work(address: str) -> list[int]:
        mine: list[int] = []
        with tq.Client(address) as client:
            while (meta := client.get_meta(**ASKS, batch_size=48, min_batch_size=1, max_wait=60.0)).status != "end":
                assert meta.status == "batch"
                if len(mine) % 5 == 0:
                    assert client.get_data(meta)["x"].tolist() == [3 * index for index in meta.global_indexes]
                mine += meta.global_indexes
        return mine

    def produce(address: str) -> None:
        with tq.Client(address) as client:
            for start in range(0, 20_000, 400):
                client.put("train", {"x": torch.arange(start, start + 400) * 3})
            client.seal_partition("train")

    with ServiceProcess() as server, ThreadPoolExecutor(33) as pool:
        workers = [pool.submit(work, server.address) for _ in range(32)]
        pool.submit(produce, server.address).result()
        taken = np.concatenate([np.array(worker.result(), np.int64) for worker in workers])
        assert taken.size == 20_000
        assert np.unique(taken).size == 20_000
        with tq.Client(server.address) as client:
            status = client.check_consumption("train", "reward")
            assert (status.consumed_count, status.complete) == (20_000, True)


def wait_until_waiting(client: AnyClient, count: int) -> None:
    """Wait until exactly so many calls wait for the task."""
    while [task.waiting_count for task in client.describe_partition("train").tasks] != [count]:
        pass


def test_50_clients_that_give_up_leave_nothing_claimed(server: LiveServer) -> None:
    """18 are cancelled, 16 run into their deadline, 16 are of processes that are killed."""
    client = server.client()
    client.create_partition("train")
    leavers = [subprocess.Popen([sys.executable, "-c", LEAVER, server.address]) for _ in range(2)]

    async def wait() -> None:
        async with tq.AsyncClient(server.address) as waiting:
            await waiting.get_meta(**ASKS, batch_size=1, max_wait=60.0)

    cancelled = [server.loop.start(wait()) for _ in range(18)]
    wait_until_waiting(client, 18 + 16)
    late = [
        server.controller.GetMeta.future(
            pb.GetMetaRequest(**ASKS, request_id=os.urandom(16), batch_size=1, max_wait={"seconds": 60}), timeout=0.05
        )
        for _ in range(16)
    ]
    for call in late:
        assert call.code() == grpc.StatusCode.DEADLINE_EXCEEDED
    for future in cancelled:
        assert future.cancel()
    for leaver in leavers:
        leaver.send_signal(signal.SIGKILL)
        leaver.wait()
    wait_until_waiting(client, 0)
    client.put("train", {"x": torch.arange(40)})
    assert client.check_consumption("train", "reward").consumed_count == 0
    assert client.get_meta(**ASKS, batch_size=40, max_wait=0).size == 40


def test_those_that_leave_in_the_moment_of_a_commit_lose_nothing(server: LiveServer) -> None:
    """Each sample is in the hands of a client that got it, or claimable: none twice, none lost."""
    client = server.client()

    async def race(round_: int) -> list[int]:
        waiting = tq.AsyncClient(server.address)
        claims = [asyncio.ensure_future(waiting.get_meta(**ASKS, batch_size=1, max_wait=60.0)) for _ in range(50)]
        putting = asyncio.ensure_future(waiting.put("train", {"x": torch.arange(30)}))
        await asyncio.wait(claims, return_when=asyncio.FIRST_COMPLETED)
        for _ in range(round_):  # the later, the more have their answer
            await asyncio.sleep(0)
        for claim in claims:
            claim.cancel()
        got = await asyncio.gather(*claims, return_exceptions=True)
        await putting
        await waiting.aclose()  # makes the releases that are due
        return [index for one in got if isinstance(one, tq.BatchMeta) for index in one.global_indexes]

    for round_ in range(8):
        handed_out = server.loop.run(race(round_))
        wait_until_waiting(client, 0)
        total = 30 * (round_ + 1)
        rest = client.get_meta(**ASKS, batch_size=total, min_batch_size=1, max_wait=0).global_indexes
        now = Counter(handed_out + rest)
        assert set(now.values()) == {1}
        assert sorted(now) == list(range(total - 30, total))


def test_a_sync_client_that_is_interrupted_releases_its_claim(server: LiveServer) -> None:
    """Ctrl-C while a worker waits: what it may have got is claimable again."""
    client = server.client()
    client.create_partition("train")
    program = f"""
import signal
import tq_service as tq
# Started from a script in the background, all of its programs ignore SIGINT until they say otherwise.
signal.signal(signal.SIGINT, signal.default_int_handler)
with tq.Client({server.address!r}) as client:
    try:
        client.get_meta(partition_id="train", task_name="reward", data_fields=["x"], batch_size=1, max_wait=60.0)
    except KeyboardInterrupt:
        print("interrupted")
"""
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as worker:
        wait_until_waiting(client, 1)
        worker.send_signal(signal.SIGINT)
        assert worker.communicate(timeout=60)[0] == "interrupted\n"
    wait_until_waiting(client, 0)
    client.put("train", {"x": torch.arange(1)})
    assert client.get_meta(**ASKS, batch_size=1, max_wait=0).size == 1
