"""A cluster of a kept release is upgraded process by process, and goes on; the older controller can lead again."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[1] / "cluster"))

from cluster_support import running_etcd
from releases import RELEASES, Release

import tq_service as tq
from tq_service.testing import ServiceProcess

TREE = Release(path=Path(__file__).parents[2])
NEWEST = max(RELEASES.iterdir())


@pytest.fixture(params=["stand-in", pytest.param("etcd", marks=pytest.mark.nightly)])
def etcd(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    with running_etcd(request.param, tmp_path / "etcd") as addresses:
        yield f"etcd://{','.join(addresses)}"


def wait_for(condition: Callable[[], bool]) -> None:
    give_up_at = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < give_up_at
        time.sleep(0.1)


def follows(client: tq.Client, count: int) -> bool:
    """Return whether so many controllers have applied the whole journal."""
    controllers = client.status().controllers
    return len(controllers) == count and not any(controller.lag_count for controller in controllers)


@pytest.mark.timeout(400)  # on a busy machine; a quiet one takes 20 s
def test_a_cluster_is_upgraded_process_by_process_and_back(etcd: str, tmp_path: Path) -> None:
    older = Release.unpacked(NEWEST, tmp_path / "unpacked")
    secret = ("--internal-secret-file", str(tmp_path / "secret"))
    journal = ("--journal", etcd, "--cluster", "c", "--lease-seconds", "3", "--checkpoint-dir", str(tmp_path / "all"))

    def controller(release: Release, name: str) -> ServiceProcess:
        return release.service("--role", "controller", *journal, *secret, data_dir=tmp_path / name)

    first, second = controller(older, "first"), controller(TREE, "second")
    addresses = ",".join(address_of(each) for each in (first, second))

    def storage(release: Release) -> ServiceProcess:
        flags = ("--role", "storage", "--controller", addresses, "--storage-id", "s", *secret)
        return release.service(*flags, data_dir=tmp_path / "storage")

    with ExitStack() as stack:
        client = stack.enter_context(tq.Client(addresses, timeout=60.0))
        stack.enter_context(first)
        older_storage = stack.enter_context(storage(older))
        older.run("write", addresses)
        data = stored(client)

        stack.enter_context(second)  # the newer controller follows, and takes over
        wait_for(lambda: follows(client, 2))
        first.stop()
        assert json.loads(older.run("read", addresses)) == json.loads((NEWEST / "expected.json").read_text())

        older_storage.stop()  # the newer storage service has the older one's data
        stack.enter_context(storage(TREE))
        assert stored(client) == data

        first.start()  # the older controller follows the newer one's journal, and takes over
        wait_for(lambda: follows(client, 2))
        before = consumed(client)
        client.put("of_the_newer", {"x": [1, 2]})
        second.stop()
        assert client.lookup_samples("of_the_newer")[0].global_indexes == [0, 1]
        assert consumed(client) == before
        assert stored(client) == data


def consumed(client: tq.Client) -> dict[str, int]:
    return {task.task_name: task.consumed_count for task in client.describe_partition("train").tasks}


def stored(client: tq.Client) -> list[int]:
    """Return a column whose bytes the storage service has."""
    found, _ = client.lookup_samples("tiled")
    column: list[int] = client.get_data(found)["x"].flatten().tolist()
    return column


def address_of(process: ServiceProcess) -> str:
    """Return the address of a service that is not started yet."""
    return f"127.0.0.1:{process.command[process.command.index('--port') + 1]}"
