"""Every background task of a service is supervised: where one dies, the service ends, and says which."""

import asyncio
import contextlib

import numpy as np
import pytest

import tq_service as tq
from tq_service.config import ServeSettings
from tq_service.server import app as app_module
from tq_service.server.app import running
from tq_service.server.listener import Listener
from tq_service.server.remote_storage import RemoteStorage
from tq_service.storage.engine import StorageEngine
from tq_service.storage.index.put_table import PutJournal


def settings(**given):
    return ServeSettings(host="127.0.0.1", port=0, shared_memory="off", **given)


def storage_settings(controller, **given):
    return settings(role="storage", storage_id="s", controller=f"127.0.0.1:{controller.port}", **given)


async def fail(*_arguments, **_settings):
    raise ZeroDivisionError("a fault of the service")


@contextlib.asynccontextmanager
async def failing():
    """Catch the error with which a service ends by the death of a task."""
    with pytest.raises(tq.errors.ServiceFailedError) as caught:
        async with asyncio.timeout(60):
            yield caught


def reason_of(name):
    """Return why a service ends as one of its tasks dies."""
    return f"{name} ended by ZeroDivisionError: a fault of the service"


@pytest.mark.parametrize(
    ("owner", "method", "name"),
    [
        (Listener, "watch", "watching the certificate and token files"),
        (app_module, "regularly", "housekeeping"),
        (app_module, "collect_garbage", "collecting garbage"),
        (StorageEngine, "scrub", "checking recovered puts"),
    ],
)
async def test_the_death_of_a_task_is_the_end_of_the_service(tmp_path, monkeypatch, owner, method, name):
    monkeypatch.setattr(owner, method, fail)
    async with failing() as caught, running(settings(data_dir=tmp_path)):
        await asyncio.Event().wait()
    assert reason_of(name) in str(caught.value)


async def test_announcements_that_end_are_the_end_of_a_storage_service(monkeypatch):
    monkeypatch.setattr(app_module, "register_storage", fail)
    async with (
        running(settings(role="controller")) as controller,
        failing() as caught,
        running(storage_settings(controller)),
    ):
        await asyncio.Event().wait()
    assert reason_of("registering this storage service with its controller") in str(caught.value)


async def put_and_clear(port):
    async with tq.AsyncClient(f"127.0.0.1:{port}", timeout=60.0) as client:
        await client.put("train", {"x": np.zeros(4)})
        await client.clear_partition("train")


@pytest.mark.parametrize(
    ("method", "name"),
    [
        ("_reconcile_always", "reconciling storage s"),
        ("_deliver_all", "updating puts of storage s"),
    ],
)
async def test_what_a_controller_does_for_a_storage_service_is_supervised(monkeypatch, method, name):
    monkeypatch.setattr(RemoteStorage, method, fail)
    calls = None
    async with (
        failing() as caught,
        running(settings(role="controller")) as controller,
        running(storage_settings(controller)),
    ):
        calls = asyncio.ensure_future(put_and_clear(controller.port))
        await asyncio.Event().wait()
    assert reason_of(name) in str(caught.value)
    calls.cancel()
    await asyncio.wait([calls])


async def test_a_put_whose_move_cannot_be_written_down_is_the_end_of_the_service(tmp_path, monkeypatch):
    with pytest.raises(tq.errors.ServiceFailedError, match="could not persist a put that was moved") as caught:
        async with (
            asyncio.timeout(60),
            running(settings(data_dir=tmp_path)) as app,
            tq.AsyncClient(f"127.0.0.1:{app.port}", timeout=60.0) as client,
        ):
            await client.put("train", {"x": np.zeros((8, 1 << 20))})
            monkeypatch.setattr(PutJournal, "record", lambda *_: 1 // 0)
            await client.clear_samples("train", global_indexes=range(7))
            await asyncio.Event().wait()
    assert isinstance(caught.value.__cause__, ZeroDivisionError)


def own_tasks():
    """Return the tasks of this loop that run code of the package."""
    codes = {task: getattr(task.get_coro(), "cr_code", None) for task in asyncio.all_tasks()}
    return {task for task, code in codes.items() if code is not None and "/tq_service/" in code.co_filename}


async def test_no_task_of_a_service_at_rest_is_without_a_supervisor(tmp_path):
    async with (
        running(settings(role="controller", data_dir=tmp_path / "controller")) as controller,
        running(storage_settings(controller, data_dir=tmp_path / "storage")) as storage,
        running(settings(data_dir=tmp_path / "all")) as both,
    ):
        await put_and_clear(both.port)
        await put_and_clear(controller.port)
        while True:  # until what calls have begun has come to its end
            supervised = set().union(*(app.supervisor._tasks for app in (controller, storage, both)))
            names = {task.get_name() for task in supervised}
            if own_tasks() <= supervised and "updating puts of storage s" not in names:
                break
            await asyncio.sleep(0)
        assert names == {
            "watching the certificate and token files",
            "housekeeping",
            "collecting garbage",
            "releasing old samples",
            "ending slow streams and idle connections",
            "finding successors for lost storage services",
            "registering this storage service with its controller",
            "reconciling storage s",
        }
    assert own_tasks() == set()
