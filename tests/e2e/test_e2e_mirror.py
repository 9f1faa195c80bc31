"""Storage services that are killed and stay away: nothing acknowledged is lost, bit for bit."""

from __future__ import annotations

import signal
import statistics
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch

import tq_service as tq
from tq_service.testing import ServiceProcess

_ROWS = 4
_TIMEOUT_SECONDS = 60.0


@dataclass(kw_only=True)
class Cluster:
    """A controller and storage services with one mirror, each a process, and what was put."""

    stack: ExitStack
    directory: Path
    controller: ServiceProcess
    storages: dict[str, ServiceProcess] = field(default_factory=dict)

    def add_storage(self, name: str, *settings: str) -> ServiceProcess:
        """Start a storage service."""
        storage = self.stack.enter_context(
            ServiceProcess("--role", "storage", "--controller", self.controller.address, "--storage-id", name,
                           "--mirror", f"file://{self.directory}/mirror", "--max-bytes", "256MiB", *settings,
                           log=self.directory / f"{name}.log")
        )  # fmt: skip
        self.storages[name] = storage
        return storage

    def client(self) -> tq.Client:
        """Return a client, closed with the cluster."""
        return self.stack.enter_context(tq.Client(self.controller.address, timeout=_TIMEOUT_SECONDS))


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    with ExitStack() as stack:
        controller = stack.enter_context(ServiceProcess("--role", "controller", "--data-dir", str(tmp_path / "data")))
        yield Cluster(stack=stack, directory=tmp_path, controller=controller)


def rows_of(first: int) -> dict[str, object]:
    """Return rows, of which every other put is too large to be gathered with others."""
    generator = torch.Generator().manual_seed(first)
    width = 100_000 if (first // _ROWS) % 2 else 10
    return {
        "x": torch.randint(0, 1 << 40, (_ROWS, width), generator=generator),
        "text": [f"{'t' * (index % 7)}{index}" for index in range(first, first + _ROWS)],
    }


def put(client: tq.Client, first: int) -> None:
    """Put rows under their names."""
    client.put("train", rows_of(first), keys=[f"k{index}" for index in range(first, first + _ROWS)])


def check(client: tq.Client, first: int, skipped: int = 0) -> None:
    """Read rows back, but for some, and compare them bit for bit."""
    keys = [f"k{index}" for index in range(first + skipped, first + _ROWS)]
    back = client.get_data("train", keys=keys, data_fields=["x", "text"], layout="dense")
    expected = rows_of(first)
    assert torch.equal(back["x"], expected["x"][skipped:])
    assert list(back["text"]) == expected["text"][skipped:]


def holder(cluster: Cluster, client: tq.Client) -> str:
    """Return the name of the storage service, alive under its own name, that holds the most puts."""
    storages = [each for each in client.status(explain=False).storages if not each.is_adopted and not each.is_silent]
    return max(storages, key=lambda each: each.put_count).storage_id


class Load:
    """A producer and a reader that never stop; what was acknowledged is `firsts`."""

    def __init__(self, cluster: Cluster, firsts: list[int]) -> None:
        self.firsts = firsts
        self.errors: list[BaseException] = []
        self.read_seconds: list[float] = []
        self._stop = threading.Event()
        self._threads = [
            threading.Thread(target=self._run, args=(work, cluster.client())) for work in (self._produce, self._read)
        ]

    def __enter__(self) -> Load:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()

    def _run(self, work: object, client: tq.Client) -> None:
        try:
            while not self._stop.is_set():
                work(client)  # type: ignore[operator]
        except BaseException as error:
            self.errors.append(error)

    def _produce(self, client: tq.Client) -> None:
        first = self.firsts[-1] + _ROWS
        put(client, first)
        self.firsts.append(first)
        self._stop.wait(0.1)  # one service must have capacity for all that comes until the last one is taken over

    def _read(self, client: tq.Client) -> None:
        began = time.monotonic()
        check(client, self.firsts[int(began * 1000) % len(self.firsts)])
        self.read_seconds.append(time.monotonic() - began)


def wait_for_adoption(client: tq.Client, count: int) -> None:
    """Wait until so many storage services were taken over, and are alive."""
    until = time.monotonic() + _TIMEOUT_SECONDS
    while time.monotonic() < until:
        storages = client.status(explain=False).storages
        if sum(each.is_adopted and not each.is_silent for each in storages) >= count:
            return
        threading.Event().wait(0.05)
    raise AssertionError(f"not taken over: {client.status(explain=False).storages}")


@pytest.mark.nightly
def test_killed_storage_services_lose_nothing_that_was_acknowledged(
    cluster: Cluster, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("one", "two", "three"):
        cluster.add_storage(name)
    client = cluster.client()
    firsts = [0]
    put(client, 0)
    with Load(cluster, firsts) as load:
        for count in (1, 2):  # the second one may be the successor of the first
            target = len(firsts) + 20
            while len(firsts) < target and not load.errors:
                threading.Event().wait(0.01)
            cluster.storages[holder(cluster, client)].kill()
            wait_for_adoption(client, count)
    assert load.errors == []
    for first in firsts:
        check(client, first)
    with capsys.disabled():
        print(
            f"\nreads while 2 of 3 storage services were killed: {len(load.read_seconds)}, median "
            f"{statistics.median(load.read_seconds) * 1000:.1f} ms, longest {max(load.read_seconds):.2f} s"
        )
    client.clear_partition("train")


def test_a_controller_that_starts_in_the_middle_has_the_puts_taken_over(cluster: Cluster) -> None:
    cluster.add_storage("one")
    client = cluster.client()
    firsts = list(range(0, 10 * _ROWS, _ROWS))
    for first in firsts:
        put(client, first)
    successor = cluster.add_storage("two")
    cluster.storages["one"].kill()
    cluster.controller.kill()
    cluster.controller.restart()
    for first in firsts:
        check(client, first)
    client.clear_samples("train", keys=[f"k{index}" for index in range(2)])
    cluster.controller.kill()
    cluster.controller.restart()
    for first in firsts:
        check(client, first, skipped=2 if first == 0 else 0)
    assert successor.exit_code is None


def test_a_service_that_comes_back_empty_takes_its_own_puts_over(cluster: Cluster) -> None:
    one = cluster.add_storage("one")
    client = cluster.client()
    put(client, 0)
    one.kill()
    one.restart()
    check(client, 0)
    put(client, _ROWS)
    check(client, _ROWS)


def test_a_service_that_was_only_stopped_ends_once_its_puts_were_taken_over(cluster: Cluster) -> None:
    one = cluster.add_storage("one")
    client = cluster.client()
    put(client, 0)
    cluster.add_storage("two")
    one.send_signal(signal.SIGSTOP)
    wait_for_adoption(client, 1)
    check(client, 0)
    one.send_signal(signal.SIGCONT)
    assert one.wait(timeout=_TIMEOUT_SECONDS) == 70
    assert "taken over its puts" in one.read_log()
    check(client, 0)
