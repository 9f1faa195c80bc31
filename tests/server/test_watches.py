"""Calls that watch, as the service sees them: random changes, connections that break, and clients that do not read."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from typing import Any

import grpc
import numpy as np
import pytest

import tq_service as tq
from tq_service.client import AsyncWatch
from tq_service.config import ServeSettings
from tq_service.server.app import App, running
from tq_service.v1 import controller_service_pb2 as pb
from tq_service.v1.controller_service_pb2_grpc import ControllerServiceStub

NAMES = ("train", "val")


def settings(**options: Any) -> ServeSettings:
    return ServeSettings(host="127.0.0.1", port=0, max_bytes=256 << 20, **options)


@pytest.fixture
async def app() -> AsyncIterator[App]:
    async with running(settings(stall_seconds=0.5)) as app:
        yield app


@pytest.fixture
async def client(app: App) -> AsyncIterator[tq.AsyncClient]:
    async with tq.AsyncClient(f"127.0.0.1:{app.port}", timeout=20) as client:
        yield client


async def until(is_so: Any) -> None:
    async with asyncio.timeout(30):
        while not is_so():  # noqa: ASYNC110  (what the service has inside tells of no event)
            await asyncio.sleep(0.01)


class Follower:
    """Samples and consumed counts by partition, as a watch leaves them."""

    def __init__(self, client: tq.AsyncClient) -> None:
        self.client = client
        self.watch: AsyncWatch = client.watch(progress_interval=0.2)
        self.state: dict[str, dict[Any, Any]] = {}

    async def read(self) -> None:
        update = await anext(self.watch)
        if update.is_reset:
            self.state.clear()
        for each in update.partitions:
            if each.cleared:
                self.state.pop(each.partition_id, None)
                continue
            rows = self.state.setdefault(each.partition_id, {})
            for index in each.cleared_indexes.tolist():
                rows.pop(index, None)
            if each.samples is not None:
                rows.update(zip(each.samples.global_indexes, each.samples.custom_meta, strict=True))
            rows.update((task.task_name, task.consumed_count) for task in each.tasks)

    async def follow(self, number: int) -> None:
        while self.watch.revision is None or self.watch.revision.number < number:
            await self.read()

    async def break_off(self) -> None:
        """Go on in another watch from the last revision."""
        revision = self.watch.revision
        await self.watch.aclose()
        self.watch = self.client.watch(revision=revision, progress_interval=0.2)


async def change(client: tq.AsyncClient, rng: random.Random) -> None:
    name = rng.choice(NAMES)
    keys = [f"k{rng.randrange(30)}" for _ in range(3)]
    await rng.choice(
        [
            lambda: client.put(name, keys=sorted(set(keys)), custom_meta=[{"s": rng.random()}] * len({*keys})),
            lambda: client.put(name, {"x": np.arange(2)}),
            lambda: client.clear_samples(name, keys=keys, missing_ok=True),
            lambda: client.get_meta(partition_id=name, task_name="t", data_fields=["x"], batch_size=1, max_wait=0.0),
            lambda: client.clear_partition(name, missing_ok=True) if rng.random() < 0.2 else asyncio.sleep(0),
        ]
    )()


async def test_watchers_of_all_kinds_have_in_the_end_what_is_listed(client: tq.AsyncClient) -> None:
    rng = random.Random(7)
    quick, broken, slow = (Follower(client) for _ in range(3))
    await slow.read()
    await broken.follow(1)
    for number in range(150):
        await change(client, rng)
        if number % 10 == 0:
            await quick.read()
        if number % 30 == 29:
            await broken.read()
            await broken.break_off()
    listed = await client.list_partitions()
    assert listed.revision is not None
    expected: dict[str, dict[Any, Any]] = {}
    for summary in listed:
        meta, _ = await client.lookup_samples(summary.partition_id)
        rows = expected[summary.partition_id] = dict(zip(meta.global_indexes, meta.custom_meta, strict=True))
        for task in (await client.describe_partition(summary.partition_id)).tasks:
            rows[task.task_name] = task.consumed_count
    for each in (quick, broken, slow):
        await each.follow(listed.revision.number)
        assert each.state == expected
        await each.watch.aclose()


async def test_a_client_that_does_not_read_is_dropped_and_holds_nothing_up(app: App, client: tq.AsyncClient) -> None:
    assert app.controller is not None
    calls = app.controller.watches.calls
    keys = np.array([f"{number:0400}" for number in range(60_000)])
    for some in np.array_split(keys, 4):
        await client.put("train", {"x": np.arange(some.size)}, keys=some)
    async with grpc.aio.insecure_channel(f"127.0.0.1:{app.port}") as channel:
        watch = ControllerServiceStub(channel).Watch(pb.WatchRequest())
        await until(lambda: calls.count)
        for number in range(50):  # others go on
            await client.put("train", keys=[f"{number:0400}"], custom_meta=[{"s": 1}])
        await until(lambda: not calls.count)
        with pytest.raises(grpc.aio.AioRpcError) as error:
            while await watch.read() is not grpc.aio.EOF:
                pass
        assert error.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        assert "an answer was not read within 0.5 s" in str(error.value.details())


async def test_a_reader_that_comes_late_goes_on(app: App, client: tq.AsyncClient) -> None:
    assert app.controller is not None
    calls = app.controller.watches.calls
    keys = np.array([f"{number:0400}" for number in range(60_000)])
    for some in np.array_split(keys, 4):
        await client.put("train", {"x": np.arange(some.size)}, keys=some)
    async with client.watch() as watch:
        assert (await anext(watch)).revision is None
        await until(lambda: calls.count)
        await until(lambda: not calls.count)  # it was not read for too long
        count = 0
        while watch.revision is None:
            update = await anext(watch)
            count = 0 if update.is_reset else count
            count += sum(each.samples.size for each in update.partitions if each.samples is not None)
        assert count == keys.size


async def test_a_client_that_does_not_read_does_not_hold_up_the_end() -> None:
    async with running(settings()) as app, tq.AsyncClient(f"127.0.0.1:{app.port}", timeout=20) as client:
        assert app.controller is not None
        keys = np.array([f"{number:0400}" for number in range(60_000)])
        for some in np.array_split(keys, 4):
            await client.put("train", {"x": np.arange(some.size)}, keys=some)
        async with grpc.aio.insecure_channel(f"127.0.0.1:{app.port}") as channel:
            watch = ControllerServiceStub(channel).Watch(pb.WatchRequest())
            await watch.read()
            await until(lambda: app.controller.watches._ends)
            await asyncio.sleep(0.5)  # until nothing more fits between the two
            await asyncio.wait_for(app.stop(grace_seconds=60), 30)
            assert not app.controller.watches._ends


async def test_watchers_of_the_same_are_sent_what_is_made_once(
    app: App, client: tq.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert app.controller is not None
    watches = app.controller.watches
    following = [client.watch() for _ in range(20)]
    for watch in following:
        await anext(watch)
    await until(lambda: len(watches._waiting) == len(following))
    made, make = [], watches._messages
    monkeypatch.setattr(watches, "_messages", lambda *changes: made.append(changes) or make(*changes))
    await client.put("train", {"x": np.arange(3)}, keys=["a", "b", "c"])
    for watch in following:
        (changed,) = (await anext(watch)).partitions
        assert changed.samples is not None and changed.samples.keys == ["a", "b", "c"]
        await watch.aclose()
    assert len(made) == 1


async def test_a_watch_that_has_lasted_is_ended_and_goes_on(
    app: App, client: tq.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert app.controller is not None
    monkeypatch.setattr("tq_service.server.watches._LONGEST_SECONDS", 0.2)
    opened: list[Any] = []
    serve = app.controller.watches.serve
    monkeypatch.setattr(
        app.controller.watches, "serve", lambda request, context: opened.append(request) or serve(request, context)
    )
    async with client.watch() as watch:
        assert (await anext(watch)).is_reset
        while len(opened) < 3:
            await client.put("train", {"x": np.arange(1)})
            assert not (await anext(watch)).is_reset
        assert [request.HasField("revision") for request in opened] == [False, True, True]
