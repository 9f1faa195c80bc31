"""Clients of the server's host send memory and map it: the same results as over the wire, and no harm done."""

from __future__ import annotations

import asyncio
import gc
import multiprocessing
import os
import resource
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import grpc
import numpy as np
import pytest
import torch
from live_server import AnyClient, LiveServer, StartServer

import tq_service as tq
from tq_service.dataplane.receiving import AnswerSizes
from tq_service.dataplane.shared_memory import mapped
from tq_service.dataplane.shared_memory import server as server_side
from tq_service.dataplane.shared_memory.client import FdChannel
from tq_service.errors import UnavailableError
from tq_service.storage.blobs.memory import BACKGROUND
from tq_service.testing import ServiceProcess
from tq_service.v1.storage_service_pb2 import PutHeader, PutResponse, RegionOffer
from tq_service.wire import shared_memory
from tq_service.wire.columns import (
    REGION_KEY,
    SEND_AS_FD,
    SEND_AS_FRAMES,
    SEND_AS_KEY,
    SEND_AS_REGION,
    Column,
    encode_header,
    encode_part,
)
from tq_service.wire.encoding import encode_columns

pytestmark = pytest.mark.skipif(not shared_memory.is_supported(), reason="sealed memfds are there on Linux only")

ROWS = 512
DATA = {
    "tokens": [torch.arange(row, row + 300 + row % 50) for row in range(ROWS)],
    "logits": torch.randn(ROWS, 1024),
    "text": [f"sample {row} " * 20 for row in range(ROWS)],
    "reward": torch.randn(ROWS),
}


@pytest.fixture
def twin(client: AnyClient, server: LiveServer) -> AnyClient:
    """A second client, with channels and a session of its own."""
    return server.client(client.kind)


def shared_memory_count(client: AnyClient) -> int:
    count: int = client.storage_stat().shared_memory_count
    return count


def is_mapped(tensor: torch.Tensor) -> bool:
    """Whether a tensor's memory is a memfd."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        first, last = (int(part, 16) for part in line.split()[0].split("-"))
        if first <= tensor.data_ptr() < last:
            return "memfd:tq_service" in line
    raise AssertionError("the tensor has no memory")


def memory_in_use() -> set[int]:
    """Return the inodes of shared memory that this process, server and clients, has open or mapped."""
    gc.collect()
    maps = Path("/proc/self/maps").read_text().splitlines()
    inodes = {int(line.split()[4]) for line in maps if "memfd:tq_service" in line}
    for entry in Path("/proc/self/fd").iterdir():
        with suppress(OSError):  # closed meanwhile
            if str(entry.readlink()).startswith("/memfd:tq_service"):
                inodes.add(entry.stat().st_ino)
    return inodes


def given_back(*clients: Any) -> None:
    """Have clients end and what their service holds for reuse dropped."""
    *real, server = clients
    for client in real:
        client.close()
    gc.collect()
    server.settle()
    server.loop.run(_trim(server.app.storage.engine))


async def _trim(engine: Any) -> None:
    engine.regions.trim(1e9)
    await asyncio.to_thread(BACKGROUND.submit(int).result)


def assert_rows(batch: Any, rows: list[int]) -> None:
    assert torch.equal(batch["logits"], DATA["logits"][rows])  # type: ignore[index]
    assert torch.equal(batch["reward"], DATA["reward"][rows])  # type: ignore[index]
    assert batch["text"] == [DATA["text"][row] for row in rows]
    assert all(torch.equal(got, DATA["tokens"][row]) for got, row in zip(batch["tokens"].unbind(), rows, strict=True))


@pytest.fixture(autouse=True, params=["own user", pytest.param("another user", marks=pytest.mark.nightly)])
def user(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Of the clients, as the service sees it."""
    kind: str = request.param
    if kind == "another user":
        monkeypatch.setattr(server_side, "peer_uid", lambda _: os.geteuid() + 1)
    return kind


def test_a_put_is_mapped_by_all(client: AnyClient, twin: AnyClient) -> None:
    meta = client.put("p", DATA)
    assert shared_memory_count(client) == 1
    for reader in (client, twin):
        batch = reader.get_data(meta)
        assert_rows(batch, list(range(ROWS)))
        assert is_mapped(batch["logits"])
        assert is_mapped(batch["tokens"].values())
        assert batch["logits"].data_ptr() % 64 == 0


def test_a_part_of_it_is_mapped_too_and_scattered_rows_are_copied(client: AnyClient) -> None:
    meta = client.put("p", DATA)
    batch = client.get_data(meta.select_samples(list(range(100, 300))))
    assert_rows(batch, list(range(100, 300)))
    assert is_mapped(batch["logits"])
    rows = [7, 3, *range(200, 250), 511, 0]
    scattered = client.get_data(meta.select_samples(rows))
    assert_rows(scattered, rows)
    assert not is_mapped(scattered["logits"])


def test_rows_of_several_puts_some_of_them_sent(client: AnyClient) -> None:
    metas = [client.put("p", DATA) for _ in range(3)]
    metas.append(client.put("p", {name: values[:9] for name, values in DATA.items()}))
    assert shared_memory_count(client) == 3
    batch = client.get_data(metas[0].concat([metas[0], metas[2], metas[3], metas[1]]))
    assert_rows(batch, [*range(ROWS), *range(ROWS), *range(9), *range(ROWS)])
    batch = client.get_data(metas[0].concat([metas[2], metas[0]]))
    assert_rows(batch, [*range(ROWS), *range(ROWS)])


def test_an_operation_in_place_changes_nobody_elses_tensors(client: AnyClient, twin: AnyClient) -> None:
    meta = client.put("p", DATA)
    mine, other = client.get_data(meta), twin.get_data(meta)
    mine["logits"].zero_()
    mine["tokens"].values()[:1000] = -1
    assert_rows(other, list(range(ROWS)))
    assert_rows(client.get_data(meta), list(range(ROWS)))
    assert not mine["logits"].any()


def test_what_was_read_outlives_the_partition_and_is_not_counted(client: AnyClient) -> None:
    meta = client.put("p", DATA)
    batch = client.get_data(meta)
    client.clear_partition("p")
    stat = client.storage_stat()
    assert (stat.used_bytes, stat.put_count, stat.shared_memory_count) == (0, 0, 0)
    assert_rows(batch, list(range(ROWS)))


def test_nothing_is_left_open(client: AnyClient, twin: AnyClient, server: LiveServer) -> None:
    def once() -> None:
        meta = client.put("p", DATA)
        twin.get_data(meta)
        twin.get_data(meta.select_samples(list(range(0, ROWS, 7))))
        client.clear_partition("p")

    before = memory_in_use()
    for _ in range(5):
        once()
    given_back(client, twin, server)
    assert not memory_in_use() - before


def test_columns_for_existing_samples(client: AnyClient) -> None:
    meta = client.put("p", {"reward": DATA["reward"]})
    client.put(meta, {"logits": DATA["logits"]})
    assert shared_memory_count(client) == 1
    client.put(meta, {"logits": -DATA["logits"]})  # type: ignore[operator]
    assert shared_memory_count(client) == 1
    batch = client.get_data(meta, data_fields=["logits", "reward"])
    assert torch.equal(batch["logits"], -DATA["logits"])  # type: ignore[operator]
    assert torch.equal(batch["reward"], DATA["reward"])


def test_small_puts_are_sent(client: AnyClient) -> None:
    client.put("p", {"x": torch.zeros(1000, 100)})
    assert shared_memory_count(client) == 0


@pytest.mark.parametrize("off", ["server", "client"])
def test_it_can_be_switched_off(off: str, client_kind: Any, start_server: StartServer, monkeypatch: Any) -> None:
    server = start_server(shared_memory="off" if off == "server" else "on")
    if off == "client":
        monkeypatch.setenv("TQ_SHARED_MEMORY", "off")
    client = server.client(client_kind)
    batch = client.get_data(client.put("p", DATA))
    assert_rows(batch, list(range(ROWS)))
    assert shared_memory_count(client) == 0
    assert not is_mapped(batch["logits"])


def test_a_directory_that_cannot_be_used(start_server: StartServer, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    client = start_server(shared_memory_dir=str(tmp_path / "file")).client()  # auto: without
    client.put("p", DATA)
    assert shared_memory_count(client) == 0
    with pytest.raises(OSError, match="set shared_memory_dir to a directory"):
        start_server(shared_memory_dir=str(tmp_path / "file"), shared_memory="on")


def test_the_directory_may_be_mounted_elsewhere(
    client_kind: Any, start_server: StartServer, tmp_path: Path, monkeypatch: Any
) -> None:
    there, here, nowhere = (tmp_path / name for name in ("there", "here", "nowhere"))
    there.mkdir()
    here.symlink_to(there)
    server = start_server(shared_memory_dir=str(there), shared_memory="on")
    monkeypatch.setenv("TQ_SHARED_MEMORY_DIR", str(nowhere))
    stranger = server.client(client_kind)
    stranger.put("p", DATA)
    assert shared_memory_count(stranger) == 0
    monkeypatch.setenv("TQ_SHARED_MEMORY_DIR", str(here))
    client = server.client(client_kind)
    assert_rows(client.get_data(client.put("p", DATA)), list(range(ROWS)))
    assert shared_memory_count(client) == 1


def test_no_memory_is_taken_before_there_is_capacity(
    client_kind: Any, start_server: StartServer, monkeypatch: Any
) -> None:
    written: list[int] = []

    def noting(write: Any) -> Any:
        def note(*args: Any) -> Any:
            written.append(sum(column.value_bytes for column in args[-1]))
            return write(*args)

        return note

    for name in ("fill", "write"):
        monkeypatch.setattr(shared_memory, name, noting(getattr(shared_memory, name)))
    server = start_server(max_bytes=8 << 20)
    client, waiting = server.client(client_kind), server.client(client_kind)
    block = {"x": torch.zeros(5, 1 << 18)}
    client.put("p", block)
    with pytest.raises(tq.errors.QuotaExceededError):
        waiting.put("q", block, timeout=1.5)
    assert len(written) == 1
    thread = threading.Thread(target=waiting.put, args=("q", block))
    thread.start()
    client.clear_partition("p")
    thread.join()
    assert len(written) == 2
    assert client.check_production(partition_id="q", data_fields=["x"]).produced_count == 5


def test_without_memory_or_a_session_the_bytes_are_sent(client: AnyClient, monkeypatch: Any) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise OSError("no memory left")

    with monkeypatch.context() as patch:
        patch.setattr(shared_memory, "write", fail)
        meta = client.put("p", DATA)
    assert shared_memory_count(client) == 0
    assert_rows(client.get_data(meta), list(range(ROWS)))


def test_a_get_whose_memory_cannot_be_taken_is_sent(client: AnyClient, monkeypatch: Any) -> None:
    meta = client.put("p", DATA)

    def fail(*_: Any, **__: Any) -> None:
        raise OSError("too many open files")

    monkeypatch.setattr(mapped, "Mapping", fail)
    batch = client.get_data(meta)
    assert_rows(batch, list(range(ROWS)))
    assert not is_mapped(batch["logits"])


def test_file_descriptors_are_bounded_and_the_first_put_beyond_is_logged(
    client: AnyClient, server: LiveServer, caplog: pytest.LogCaptureFixture
) -> None:
    shared = server.app.storage.shared_memory
    assert shared is not None
    shared.most_memories = 2
    metas = [client.put("p", DATA) for _ in range(4)]
    assert shared_memory_count(client) == 2
    warnings = [each.getMessage() for each in caplog.records if "file descriptors" in each.getMessage()]
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    assert len(warnings) == 1
    assert f"memories=2 most_memories=2 file_limit={soft} hard_file_limit={hard}" in warnings[0]
    for meta in metas:
        assert_rows(client.get_data(meta), list(range(ROWS)))


def test_a_service_that_was_killed_and_started_again(client_kind: Any, loop_thread: Any) -> None:
    with ServiceProcess("--shared-memory", "on") as server:
        client = AnyClient(client_kind, server.address, loop_thread, timeout=30.0)
        kept = client.get_data(client.put("p", DATA))
        server.restart()
        assert_rows(kept, list(range(ROWS)))
        # The first put learns that the controller has forgotten all; it and others go over the wire for a few seconds.
        while shared_memory_count(client) == 0:
            meta = client.put("p", DATA)
        assert_rows(client.get_data(meta), list(range(ROWS)))
        client.close()


@pytest.mark.parametrize("user", ["own user"], indirect=True)
def test_regions_of_the_process_before_are_not_used_where_a_service_comes_back_in_its_boot(
    client_kind: Any, loop_thread: Any, tmp_path: Path
) -> None:
    with ServiceProcess("--shared-memory", "on", "--data-dir", str(tmp_path)) as server:
        client, idle = (AnyClient(client_kind, server.address, loop_thread, timeout=30.0) for _ in range(2))
        for each in (client, idle) * 2:  # both have region 1 mapped, to write to it and to read it
            meta = each.put("before", DATA)
            assert_rows(each.get_data(meta), list(range(ROWS)))
            assert shared_memory_count(each) == 1
            each.clear_partition("before")
            gc.collect()
        server.restart()
        while shared_memory_count(client) == 0:
            meta = client.put("p", DATA)
        later = {"logits": torch.randn(ROWS, 1024), "reward": torch.arange(ROWS)}
        for rows in (meta, client.put("later", later)):
            batch = client.get_data(rows)
            wanted = later if rows is not meta else {name: DATA[name] for name in later}
            assert all(torch.equal(batch[name], wanted[name]) for name in later)
        client.close()
        idle.close()


def test_a_storage_service_of_its_own(client_kind: Any, start_server: StartServer, tmp_path: Path) -> None:
    controller = start_server(role="controller")
    start_server(
        role="storage",
        storage_id="other",
        controller=controller.address,
        shared_memory_dir=str(tmp_path),
        shared_memory="on",
    )
    client = controller.client(client_kind)
    meta = client.put("p", DATA)
    batch = client.get_data(meta)
    assert_rows(batch, list(range(ROWS)))
    assert is_mapped(batch["logits"])


@pytest.mark.parametrize("gets", ["in one message", "streamed"])
def test_what_was_cleared_while_it_is_received_is_got_whole(
    gets: str, client: AnyClient, twin: AnyClient, monkeypatch: Any
) -> None:
    if gets == "streamed":
        monkeypatch.setattr(AnswerSizes, "expected_bytes", lambda *_: 1 << 40)
    meta = client.put("p", DATA)
    take = FdChannel.take

    def clear_first(self: FdChannel, offer_id: bytes, indexes: Any) -> list[int]:
        if threading.current_thread() is not threading.main_thread() or client.kind == "sync":
            tq.Client(twin.real.address).clear_partition("p")
        return take(self, offer_id, indexes)

    monkeypatch.setattr(FdChannel, "take", clear_first)
    assert_rows(client.get_data(meta), list(range(ROWS)))
    assert client.storage_stat().used_bytes == 0


# What follows speaks the protocol itself, to break its rules.


@pytest.fixture
def session(server: LiveServer) -> Iterator[FdChannel]:
    shared = server.app.storage.shared_memory
    assert shared is not None
    session = FdChannel(shared.path, server.app.storage.engine.boot_id)  # type: ignore[union-attr]
    yield session
    session.close()


def header_of(columns: list[Column], session_id: bytes) -> PutHeader:
    return PutHeader(
        put_id=os.urandom(16),
        row_count=columns[0].row_count,
        columns=[encode_header(column) for column in columns],
        size_bytes=sum(column.value_bytes for column in columns),
        shared_memory_session=session_id,
        partition_id="train",
    )


class RawPut:
    """A put stream, message by message."""

    def __init__(self, server: LiveServer, header: PutHeader) -> None:
        self._messages: SimpleQueue[Any] = SimpleQueue()
        self._put_id = header.put_id
        put = server.channel.stream_unary(
            "/tq_service.v1.StorageService/Put",
            request_serializer=encode_part,
            response_deserializer=PutResponse.FromString,
        )
        self._call = put.future(iter(self._messages.get, None), timeout=10)
        self.send(header)
        metadata = dict(self._call.initial_metadata())
        self.send_as = metadata.get(SEND_AS_KEY)
        self.region = RegionOffer.FromString(metadata[REGION_KEY]) if self.send_as == SEND_AS_REGION else None

    def share(self, session: FdChannel, columns: list[Column]) -> None:
        """Fill its region, or send sealed memory, as the service says."""
        if self.region is None:
            session.send_sealed(self._put_id, columns)
        else:
            session.fill(self.region, columns)

    def send(self, message: Any) -> None:
        self._messages.put(message)

    def end(self) -> PutResponse:
        self._messages.put(None)
        answer: PutResponse = self._call.result()
        return answer

    def cancel(self) -> None:
        self._messages.put(None)
        self._call.cancel()


COLUMNS = encode_columns({"x": np.arange(1 << 18)})


def used_bytes(server: LiveServer) -> int:
    server.settle()
    used: int = server.client().storage_stat().used_bytes
    return used


def test_a_put_that_ends_before_its_bytes_have_come(server: LiveServer, session: FdChannel, user: str) -> None:
    put = RawPut(server, header_of(COLUMNS, session.session_id))
    assert put.send_as == (SEND_AS_REGION if user == "own user" else SEND_AS_FD)
    with pytest.raises(grpc.RpcError) as failure:
        put.end()
    assert failure.value.code() is grpc.StatusCode.UNAVAILABLE
    assert used_bytes(server) == 0


@pytest.mark.parametrize("wrong", ["frames", "another size", "frames after them"])
def test_other_than_announced(wrong: str, server: LiveServer, session: FdChannel, user: str) -> None:
    if (wrong, user) == ("another size", "own user"):
        pytest.skip("the size of a region is the service's")
    header = header_of(COLUMNS, session.session_id)
    before = memory_in_use()
    put = RawPut(server, header)
    if wrong == "frames":
        put.send([bytes(100)])
    elif wrong == "another size":
        put.share(session, encode_columns({"x": np.arange(10)}))
    else:
        put.share(session, COLUMNS)
        put.send([bytes(100)])
    with pytest.raises(grpc.RpcError) as failure:
        put.end()
    assert failure.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert used_bytes(server) == 0
    session.close()
    session.regions = None  # type: ignore[assignment]
    given_back(server)
    assert not memory_in_use() - before


def test_fds_for_a_put_without_a_session_are_refused(server: LiveServer, session: FdChannel) -> None:
    header = header_of(COLUMNS, b"unknown session!")
    put = RawPut(server, header)
    assert put.send_as == SEND_AS_FRAMES
    with pytest.raises(UnavailableError, match="no put waits"):
        session.send_sealed(header.put_id, COLUMNS)
    with pytest.raises(grpc.RpcError) as failure:
        put.end()
    assert failure.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert used_bytes(server) == 0


@pytest.mark.parametrize("user", ["another user"], indirect=True)
def test_memory_that_its_client_could_change_is_refused(
    server: LiveServer, session: FdChannel, monkeypatch: Any
) -> None:
    monkeypatch.setattr(shared_memory, "_seal", lambda fd: None)
    header = header_of(COLUMNS, session.session_id)
    put = RawPut(server, header)
    put.share(session, COLUMNS)
    with pytest.raises(grpc.RpcError) as failure:
        put.end()
    assert failure.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "sealed" in str(failure.value.details())
    assert used_bytes(server) == 0


def test_a_client_that_leaves_before_its_fds_have_come(server: LiveServer, session: FdChannel) -> None:
    header = header_of(COLUMNS, session.session_id)
    before = memory_in_use()
    put = RawPut(server, header)
    assert used_bytes(server) > 0
    session.close()
    put.cancel()
    for _ in range(100):
        if used_bytes(server) == 0:
            break
    assert used_bytes(server) == 0
    given_back(server)
    assert not memory_in_use() - before


def _die_with_memory(address: str, path: str, *, after_sending: bool) -> None:
    def dying(original: Any) -> Any:
        def send_and_die(*args: Any) -> None:
            if after_sending:
                original(*args)
            os._exit(9)

        return send_and_die

    FdChannel.send_sealed = dying(FdChannel.send_sealed)  # type: ignore[method-assign]
    FdChannel.fill = dying(FdChannel.fill)  # type: ignore[method-assign]
    tq.Client(address).put(path, {"x": np.arange(1 << 18)})


@pytest.mark.parametrize("after_sending", [False, True])
def test_a_client_that_is_killed_leaves_all_of_a_put_or_nothing(server: LiveServer, after_sending: bool) -> None:
    assert used_bytes(server) == 0
    before = memory_in_use()
    kill = {"after_sending": after_sending}
    process = multiprocessing.get_context("forkserver").Process(
        target=_die_with_memory, args=(server.address, "p"), kwargs=kill
    )
    process.start()
    process.join(60)
    assert process.exitcode == 9
    process.close()
    client = server.client()
    for _ in range(100):
        if used_bytes(server) == 0 or client.list_partitions():
            break
    if after_sending and client.list_partitions():  # all of its bytes had come, as with the last frame of a stream
        got = client.get_data("p", global_indexes=range(1 << 18))
        assert torch.equal(got["x"], torch.arange(1 << 18))
        del got
        client.clear_partition("p")
    assert used_bytes(server) == 0
    assert [one.partition_id for one in client.list_partitions()] == []
    given_back(client, server)
    assert not memory_in_use() - before
