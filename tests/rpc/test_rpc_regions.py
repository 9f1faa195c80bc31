"""Regions as clients of the service's user see them: warm, private to their readers, whole whatever dies or is late."""

from __future__ import annotations

import asyncio
import gc
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from live_server import AnyClient, LiveServer, StartServer

import tq_service as tq
from tq_service.dataplane.shared_memory import server as server_side
from tq_service.dataplane.shared_memory.client import FdChannel
from tq_service.storage.blobs.memory import BACKGROUND
from tq_service.storage.blobs.shared import RegionBlobs
from tq_service.testing import ServiceProcess
from tq_service.wire import shared_memory

pytestmark = pytest.mark.skipif(not shared_memory.is_supported(), reason="sealed memfds are there on Linux only")

ROWS, LENGTH = 8, 1 << 16


def data(value: int) -> dict[str, torch.Tensor]:
    """Return 4 MiB, all of one value."""
    return {"x": torch.full((ROWS, LENGTH), value, dtype=torch.int64)}


def values(batch: Any) -> set[int]:
    return set(torch.unique(batch["x"]).tolist())


def regions(server: LiveServer) -> RegionBlobs:
    found: RegionBlobs = server.app.storage.engine.regions  # type: ignore[union-attr]
    return found


def made_count(server: LiveServer) -> int:
    """Return how many regions there were so far."""
    return int(repr(regions(server)._numbers)[len("count(") : -1]) - 1


def mapping_count() -> int:
    return Path("/proc/self/maps").read_text().count("memfd:tq_service")


def turns_until(server: LiveServer, condition: Any) -> None:
    """Let the server have its turns until something is so."""

    async def turns() -> None:
        while not condition():  # noqa: ASYNC110  (what is waited for has no event)
            await asyncio.sleep(0.001)

    server.loop.run(turns())


@pytest.fixture
def reader(client: AnyClient, server: LiveServer) -> AnyClient:
    """A second client, with channels and a session of its own."""
    return server.client(client.kind)


def test_puts_of_like_size_take_turns_in_the_same_regions(
    client: AnyClient, reader: AnyClient, server: LiveServer
) -> None:
    gc.collect()
    before = mapping_count()
    for value in range(10):
        meta = client.put("p", {"x": data(value)["x"][:, : LENGTH - 1000 * (value % 3)]})
        batch = reader.get_data(meta)
        assert values(batch) == {value}
        del batch
        gc.collect()
        client.clear_partition("p")
        turns_until(server, lambda: not regions(server).used_bytes)
    assert made_count(server) == 1
    assert mapping_count() - before == 3  # of the service, the writer and the reader


def test_clients_of_one_process_share_the_mappings(client: AnyClient, reader: AnyClient, server: LiveServer) -> None:
    meta = client.put("p", data(1))
    assert values(reader.get_data(meta)) == {1}
    gc.collect()
    count = mapping_count()
    for _ in range(3):
        assert values(server.client(client.kind).get_data(meta)) == {1}
        gc.collect()
    assert mapping_count() == count
    reader.close()
    assert values(client.get_data(meta)) == {1}


def test_a_tensor_changed_in_place_changes_for_no_other_get_before_or_after_it(
    client: AnyClient, reader: AnyClient, server: LiveServer
) -> None:
    meta = client.put("p", data(1))
    before = reader.get_data(meta)
    mine = reader.get_data(meta)
    mine["x"][2:5] = 9
    assert values(before) == {1}
    assert values(reader.get_data(meta)) == {1}
    assert values(client.get_data(meta)) == {1}
    count = mapping_count()
    del mine, before
    gc.collect()
    for _ in range(3):
        batch = reader.get_data(meta)  # where the changed one was
        assert values(batch) == {1}
        batch["x"].zero_()
        del batch
    assert mapping_count() <= count
    assert made_count(server) == 1


def test_gets_of_parts_of_a_region_are_on_ranges_of_their_own(client: AnyClient, reader: AnyClient) -> None:
    meta = client.put("p", {"x": torch.arange(ROWS * LENGTH).reshape(ROWS, LENGTH)})
    parts = [reader.get_data(meta.select_samples([row, row + 1])) for row in range(0, ROWS, 2)]
    again = reader.get_data(meta.select_samples([1, 2]))
    for part in parts[1:]:
        part["x"].zero_()
    assert torch.equal(again["x"], torch.arange(LENGTH, 3 * LENGTH).reshape(2, LENGTH))
    assert torch.equal(parts[0]["x"], torch.arange(2 * LENGTH).reshape(2, LENGTH))
    del parts
    gc.collect()
    whole = reader.get_data(meta)
    assert torch.equal(whole["x"], torch.arange(ROWS * LENGTH).reshape(ROWS, LENGTH))


def test_what_a_reader_keeps_is_not_used_again_until_it_is_gone(
    client: AnyClient, reader: AnyClient, server: LiveServer
) -> None:
    kept = reader.get_data(client.put("p", data(1)))
    view = kept["x"][3:]
    client.clear_partition("p")
    assert client.storage_stat().used_bytes == 0
    for value in range(2, 6):
        assert values(reader.get_data(client.put("p", data(value)))) == {value}
        gc.collect()
        client.clear_partition("p")
    assert values(kept) == {1}
    del kept
    gc.collect()
    assert set(view.flatten().tolist()) == {1}
    assert made_count(server) <= 3
    used = regions(server).used_bytes
    del view
    gc.collect()
    turns_until(server, lambda: regions(server).used_bytes == used - (4 << 20))


def test_readers_that_keep_tensors_starve_no_puts(client_kind: Any, start_server: StartServer) -> None:
    gc.collect()
    before = mapping_count()
    server = start_server(max_bytes=24 << 20, shared_memory="on")
    client, reader = server.client(client_kind), server.client(client_kind)
    kept = []
    for value in range(20):
        kept.append(reader.get_data(client.put("p", data(value), timeout=20.0)))
        client.clear_partition("p")
        assert regions(server).used_bytes + regions(server).pooled_bytes <= 24 << 20
    assert [values(batch) for batch in kept] == [{value} for value in range(20)]
    kept.clear()
    gc.collect()
    sessions = server.app.storage.shared_memory._sessions.values()  # type: ignore[union-attr]
    turns_until(server, lambda: not any(session._leases for session in sessions))
    BACKGROUND.submit(int).result()
    reader.get_data(client.put("p", data(1)))  # and both hear of the regions that were dropped
    assert mapping_count() - before <= 3 * regions(server).fd_count


def test_arrays_outlive_their_client(client_kind: Any, start_server: StartServer) -> None:
    server = start_server(shared_memory="on")
    client = server.client(client_kind)
    reader = server.client(client_kind)
    kept = reader.get_data(client.put("p", data(1)))
    reader.close()
    turns_until(server, lambda: len(server.app.storage.shared_memory._sessions) == 1)  # type: ignore[union-attr]
    client.clear_partition("p")
    for value in range(2, 5):
        client.put("p", data(value))
        client.clear_partition("p")
    assert values(kept) == {1}


def test_scattered_rows_are_copies_that_hold_no_region(
    client: AnyClient, reader: AnyClient, server: LiveServer
) -> None:
    meta = client.put("p", {"x": torch.arange(512 * 2048).reshape(512, 2048)})
    rows = [int(row) for row in np.random.default_rng(0).permutation(512)[:200]]
    batch = reader.get_data(meta.select_samples(rows))
    client.clear_partition("p")
    turns_until(server, lambda: not regions(server).used_bytes)
    client.put("p", {"x": torch.zeros(512, 2048, dtype=torch.int64)})
    assert torch.equal(batch["x"], torch.arange(512 * 2048).reshape(512, 2048)[rows])


def test_another_user_gets_what_is_in_regions_over_the_wire(
    client: AnyClient, server: LiveServer, monkeypatch: Any
) -> None:
    meta = client.put("p", data(1))
    monkeypatch.setattr(server_side, "peer_uid", lambda _: os.geteuid() + 1)
    stranger = server.client(client.kind)
    count = mapping_count()
    assert values(stranger.get_data(meta)) == {1}
    assert mapping_count() == count
    theirs = stranger.put("q", data(2))
    assert values(client.get_data(theirs)) == values(stranger.get_data(theirs)) == {2}
    engine = server.app.storage.engine  # type: ignore[union-attr]
    assert (engine.regions.blob_count, engine.memfds.blob_count) == (1, 1)


class SlowFill:
    """Copies that wait in the middle until they may go on."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.has_begun, self.may_end = threading.Event(), threading.Event()
        write = shared_memory.write

        def slow(fd: int, columns: Any) -> None:
            self.has_begun.set()
            assert self.may_end.wait(60)
            write(fd, columns)

        monkeypatch.setattr(shared_memory, "write", slow)
        self._patch = monkeypatch
        self._write = write

    def others_are_quick(self) -> None:
        self._patch.setattr(shared_memory, "write", self._write)


def test_a_region_is_not_used_again_while_a_writer_whose_call_was_cancelled_may_write(
    server: LiveServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = SlowFill(monkeypatch)

    async def cancelled() -> None:
        async with tq.AsyncClient(server.address) as writer:
            put = asyncio.create_task(writer.put("p", data(1)))
            await asyncio.to_thread(slow.has_begun.wait)
            put.cancel()
            await asyncio.gather(put, return_exceptions=True)
            slow.others_are_quick()
            await asyncio.to_thread(others)
            slow.may_end.set()
            await asyncio.to_thread(turns_until, server, lambda: regions(server).pooled_bytes)
            assert values(await writer.get_data(meta)) == {2}

    client = server.client()

    def others() -> None:
        nonlocal meta
        turns_until(server, lambda: not regions(server).blob_count)
        assert client.storage_stat().used_bytes == 0
        assert regions(server).used_bytes == 4 << 20  # of the writer
        meta = client.put("p", data(2))
        assert made_count(server) == 2

    meta: Any = None
    asyncio.run(cancelled())
    assert regions(server).pooled_bytes == 4 << 20


def test_a_retry_fills_a_region_of_its_own(
    client: AnyClient, server: LiveServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill, seen = FdChannel.fill, []

    def broken_once(self: FdChannel, offer: Any, columns: Any) -> None:
        seen.append(offer.region)
        if len(seen) == 1:
            self.take(offer.offer_id, [])  # and never says that it is filled
            raise tq.errors.UnavailableError("the writer hangs")
        fill(self, offer, columns)

    monkeypatch.setattr(FdChannel, "fill", broken_once)
    meta = client.put("p", data(3))
    assert values(client.get_data(meta)) == {3}
    turns_until(server, lambda: regions(server).used_bytes <= 4 << 20)
    assert client.storage_stat().put_count == 1


# With processes that are killed.


@pytest.fixture(scope="module")
def service() -> Iterator[ServiceProcess]:
    with ServiceProcess("--shared-memory", "on", "--max-bytes", "256MiB") as service:
        yield service


def _read_and_wait(address: str, meta_of: str, ready: Any) -> None:
    with tq.Client(address) as client:
        batch = client.get_data(meta_of, global_indexes=range(ROWS))
        ready.send(sorted(values(batch)))
        threading.Event().wait()


def _die_in_the_middle(address: str) -> None:
    def half(target: Any, columns: Any) -> None:
        target[: len(target) // 2] = 9
        os.kill(os.getpid(), signal.SIGKILL)

    shared_memory.fill = half
    client = tq.Client(address)
    client.put("dying", data(1))  # which the next one finds warm
    client.clear_partition("dying")
    client.put("dying", data(1))


def spawned(target: Any, *args: Any) -> Any:
    process = multiprocessing.get_context("forkserver").Process(target=target, args=args)
    process.start()
    return process


def wait_for(condition: Any) -> None:
    for _ in range(2000):
        if condition():
            return
        threading.Event().wait(0.01)
    raise AssertionError("it did not come to that")


def memory_of(service: ServiceProcess) -> int:
    """Return how many memfds a service has open."""
    count = 0
    for entry in Path(f"/proc/{service.pid}/fd").iterdir():
        with suppress(FileNotFoundError):  # closed meanwhile
            count += "memfd:tq_service" in str(entry.readlink())
    return count


def test_a_reader_that_is_killed_gives_its_leases_back(service: ServiceProcess) -> None:
    receiving, sending = multiprocessing.Pipe(duplex=False)
    with tq.Client(service.address) as client:
        client.put("read", data(5))
        reader = spawned(_read_and_wait, service.address, "read", sending)
        assert receiving.recv() == [5]
        client.clear_partition("read")
        assert client.storage_stat().used_bytes == 0
        assert memory_of(service) == 1  # it is leased
        reader.kill()
        reader.join()
        reader.close()
        wait_for(lambda: memory_of(service) == 0)
        meta = client.put("read", data(6))
        assert values(client.get_data(meta)) == {6}
        client.clear_partition("read")


def test_a_writer_that_is_killed_in_the_middle_leaves_nothing(service: ServiceProcess) -> None:
    with tq.Client(service.address) as client:
        wait_for(lambda: client.storage_stat().used_bytes == 0)
        writer = spawned(_die_in_the_middle, service.address)
        writer.join(60)
        assert writer.exitcode == -signal.SIGKILL
        writer.close()
        wait_for(lambda: client.storage_stat().used_bytes == 0)
        assert "dying" not in [each.partition_id for each in client.list_partitions()]
        meta = client.put("after", data(2))
        assert values(client.get_data(meta)) == {2}
        client.clear_partition("after")


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_keeps_what_its_parent_has_given_up(service: ServiceProcess) -> None:
    may_look, look = os.pipe()
    with tq.Client(service.address) as client:
        batch = client.get_data(client.put("forked", data(7)))
        child = os.fork()
        if not child:
            os.read(may_look, 1)
            os._exit(0 if values(batch) == {7} else 1)
        del batch
        gc.collect()
        client.clear_partition("forked")
        for value in range(3):
            assert values(client.get_data(client.put("forked", data(value)))) == {value}
            client.clear_partition("forked")
        os.write(look, b"!")
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    os.close(may_look)
    os.close(look)


def test_a_service_that_is_killed_and_back_has_new_regions_and_the_old_ones_go_with_their_arrays() -> None:
    gc.collect()
    before = mapping_count()
    with ServiceProcess("--shared-memory", "on") as service, tq.Client(service.address, timeout=60.0) as client:
        kept = client.get_data(client.put("p", data(1)))
        service.restart()
        while client.storage_stat().shared_memory_count == 0:
            meta = client.put("p", data(2))
        assert values(client.get_data(meta)) == {2}
        assert values(kept) == {1}
    del kept
    gc.collect()
    assert mapping_count() == before


@pytest.mark.nightly
def test_memory_and_mappings_stay_flat_over_puts_of_changing_size(service: ServiceProcess) -> None:
    process, own = psutil.Process(service.pid), psutil.Process()
    sizes = np.random.default_rng(0).integers(256, 1024, 400)
    resident, mapped = [], []
    gc.collect()
    before = mapping_count()  # of tests before, in the same process
    with tq.Client(service.address) as client, tq.Client(service.address) as reader:
        for number, size in enumerate(sizes.tolist()):
            meta = client.put("changing", {"x": torch.full((8, size * 128), number)})
            batch = reader.get_data(meta)
            assert int(batch["x"][7, -1]) == number
            if number % 5 == 0:
                batch["x"].zero_()
            del batch
            client.clear_partition("changing")
            resident.append((process.memory_info().rss + own.memory_info().rss) >> 20)
            mapped.append(mapping_count())
        assert max(mapped) < 100
        assert max(resident[200:]) - max(resident[:200]) < 64
    deadline = time.monotonic() + 20  # the threads of clients end by themselves
    while mapping_count() >= before + 5 and time.monotonic() < deadline:
        gc.collect()
        time.sleep(0.01)
    assert mapping_count() < before + 5


_SMALL_SHM = """
mount -t tmpfs -o size={size} tmpfs /dev/shm && exec "$0" -c '
import torch
import tq_service as tq
from tq_service.testing import ServiceProcess
with ServiceProcess("--shared-memory", "on") as service, tq.Client(service.address) as client:
    meta = client.put("p", dict(x=torch.arange(1 << 22)))
    assert torch.equal(client.get_data(meta)["x"], torch.arange(1 << 22))
    print("shared", client.storage_stat().shared_memory_count)
'
"""


def test_a_small_dev_shm_does_not_matter() -> None:
    unshare = shutil.which("unshare")
    namespace = [unshare or "unshare", "--user", "--map-root-user", "--mount"]
    if unshare is None or subprocess.run([*namespace, "true"], capture_output=True, check=False).returncode:
        pytest.skip("this system gives no namespaces")
    script = _SMALL_SHM.format(size="1m")
    ran = subprocess.run(
        [*namespace, "sh", "-c", script, sys.executable], capture_output=True, text=True, check=False, timeout=100
    )
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.split() == ["shared", "1"]


_OTHER_USER = """
import os, sys
import torch
import tq_service as tq
with tq.Client(sys.argv[1]) as client:  # imports what another user may not read
    client.get_data(client.put("small", dict(x=torch.ones(2))))
os.setgid(65534)
os.setuid(65534)
with tq.Client(sys.argv[1]) as client:
    first, _ = client.lookup_samples("own")
    assert client.get_data(first)["x"].sum() == 1 << 20
    mine = client.put("other", dict(x=torch.full((1 << 20,), 2)))
    assert client.get_data(mine)["x"].sum() == 2 << 20
    print("shared", client.storage_stat().shared_memory_count)
print("mapped", *[line.split()[1] for line in open("/proc/self/maps") if "memfd:tq_service" in line])
"""


@pytest.mark.nightly
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_a_process_of_another_user_shares_sealed_memory_and_no_region() -> None:
    with tempfile.TemporaryDirectory(dir="/tmp") as directory:  # where another user may look
        Path(directory).chmod(0o755)
        with (
            ServiceProcess("--shared-memory", "on", "--shared-memory-dir", directory) as service,
            tq.Client(service.address) as client,
        ):
            client.put("own", {"x": torch.full((1 << 20,), 1)})
            command = [sys.executable, "-c", _OTHER_USER, service.address]
            ran = subprocess.run(command, capture_output=True, text=True, check=False, timeout=100)
            assert ran.returncode == 0, ran.stderr
            assert ran.stdout.split() == ["shared", "2", "mapped"]
            other, _ = client.lookup_samples("other")
            assert int(client.get_data(other)["x"].sum()) == 2 << 20


def test_all_memory_is_given_back(client: AnyClient, reader: AnyClient, server: LiveServer) -> None:
    gc.collect()
    before = mapping_count()
    for value in range(3):
        reader.get_data(client.put("p", data(value)))
        client.clear_partition("p")
    gc.collect()
    turns_until(server, lambda: not regions(server).used_bytes)

    async def trim() -> None:
        regions(server).trim(1e9)
        await asyncio.to_thread(BACKGROUND.submit(int).result)

    server.loop.run(trim())
    stat = client.storage_stat()
    assert (stat.used_bytes, stat.pooled_bytes, stat.shared_memory_count) == (0, 0, 0)
    assert regions(server).fd_count == 0
    reader.get_data(client.put("p", data(5)))  # and clients hear of it
    gc.collect()
    assert mapping_count() - before == 2  # the writer has not mapped the new one yet
