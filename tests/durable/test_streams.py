"""Changes and puts have one order: what a change names is there before it, what it frees goes after it."""

from __future__ import annotations

import asyncio
import errno
import os
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent.parent / "core"))

from domain_support import new_write
from journal_support import copy, opened, read
from live_server import LiveServer, StartServer

import tq_service as tq
from tq_service.durable.data_dir import DataDir
from tq_service.durable.state_store import StateStore, Stream
from tq_service.errors import DiskFullError, NewerVersionError, ServiceFailedError, UnavailableError
from tq_service.journal import codec
from tq_service.journal.files import FileBackend, SegmentWriter
from tq_service.journal.log import Log, Record
from tq_service.machine.state_machine import decode_group, encode_group
from tq_service.samplers import PlanRunner
from tq_service.serving.catalog import Catalog
from tq_service.storage.index.put_table import (
    ColumnRecord,
    PutDropped,
    PutStored,
    decode_put,
    encode_put,
    left_puts,
)

MODES = pytest.mark.parametrize("sync", [False, True], ids=["process", "disk"])
ROWS = 4
MARK = 0x5EED5EED5EED5EED  # a value that is looked for among the bytes of records


# The log


def test_both_streams_come_back_in_one_order(tmp_path: Path) -> None:
    expected = []
    with opened(tmp_path) as log:
        for number in range(40):
            stream = Stream.PUTS if number % 3 else Stream.CHANGES
            expected.append(Record(log.append(stream, b"head %d" % number, bytearray(number)), stream, b""))
            if number % 7 == 0:
                log.flush()
            if number == 20:
                log.rotate()
    with opened(tmp_path) as log:
        found = list(log.read(0))
    assert [record._replace(data=b"") for record in found] == expected
    assert [record.data for record in found] == [b"head %d" % number + bytes(number) for number in range(40)]


@MODES
def test_a_stream_that_is_not_known_was_written_by_a_newer_version(tmp_path: Path, sync: bool) -> None:
    DataDir.open(tmp_path).close()
    with opened(tmp_path, sync=sync) as log:
        log.append(9, b"of another kind")
    for accept_loss in (False, True):  # nor is it cut off as damage
        store = StateStore.open(tmp_path, sync=sync, accept_loss=accept_loss)
        with pytest.raises(NewerVersionError, match=r"unknown stream 9.*Install that version"):
            store.recover(catalog=Catalog(PlanRunner()))
        asyncio.run(store.close())


# Records


PUT = PutStored(
    put_id=b"p" * 16,
    partition_id="train@0",
    row_count=6,
    columns=(ColumnRecord("x", "int64", "dense", (2,), "", 48, 0), ColumnRecord("o", "", "object", (), "text", 30, 1)),
    row_sets=(np.array([0, 2, 5]), None),
    size_bytes=126,
    segment=7,
    checksum=2**64 - 1,
    freed_names=("gone",),
    for_existing_rows=True,
)


@pytest.mark.parametrize("values", [b"", b"x", bytes(range(256)) * 300])
def test_the_record_of_a_put_comes_back_with_its_values(values: bytes) -> None:
    head = encode_put(PUT)
    found, (again, rest) = decode_put(head + values)
    assert (again, rest) == (head, values)
    assert isinstance(found, PutStored)
    for name in PutStored.__slots__:
        if name != "row_sets":
            assert getattr(found, name) == getattr(PUT, name)
    assert [rows if rows is None else rows.tolist() for rows in found.row_sets] == [[0, 2, 5], None]
    dropped, _ = decode_put(encode_put(PutDropped(put_id=b"q" * 16)))
    assert dropped == PutDropped(put_id=b"q" * 16)


def test_what_became_of_a_put_that_is_not_known_was_written_by_a_newer_version() -> None:
    unknown = codec.encode(("PutMirrored", {"put_id": b"p" * 16}))
    with pytest.raises(NewerVersionError, match=r"'PutMirrored'.*install that version"):
        decode_put(len(unknown).to_bytes(4, "little") + unknown)


def test_a_large_group_is_records_below_1_mib_but_for_a_change_that_is_larger_alone(tmp_path: Path) -> None:
    changes = [codec.encode(bytes(size)) for size in (400_000, 400_000, 400_000, 2 << 20, 10, 20)]
    records = encode_group(7.5, changes)
    assert [len(record) for record in records if len(record) >= 1 << 20] == [len(changes[3]) + 8]
    assert len(records) == 4
    assert b"".join(record[8:] for record in records) == b"".join(changes)
    assert len({record[:8] for record in records}) == 1
    assert len(encode_group(7.5, changes[:2])) == 1


@MODES
def test_a_group_of_several_records_is_never_parted(tmp_path: Path, sync: bool) -> None:
    with opened(tmp_path / "log", sync=sync) as log:
        log.append(Stream.CHANGES, b"before")
        log.flush()
        before = sum(path.stat().st_size for path in (tmp_path / "log").glob("*.tqj"))
        for part in range(3):
            log.append(Stream.CHANGES, bytes([part]) * 600_000)
        log.flush()
        copy(tmp_path / "log", tmp_path / "image", log)
    (path,) = (tmp_path / "image").glob("*.tqj")
    data = path.read_bytes()
    for size in range(before, len(data), 99_991):
        path.write_bytes(data[:size])
        assert read(tmp_path / "image") == [b"before"]
        for each in (tmp_path / "image").glob("*.tqj"):
            each.unlink()
    path.write_bytes(data)
    assert len(read(tmp_path / "image")) == 4


# A log that refuses what it had taken


async def test_a_log_that_refuses_what_it_had_taken_is_fatal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store, catalog, reasons = StateStore.open(tmp_path, sync=True), Catalog(PlanRunner()), []

    def fatal(reason: str, cause: BaseException) -> None:
        reasons.append((reason, cause))
        store.abandon(ServiceFailedError(f"the service has failed: {reason}"))

    store.fatal = fatal
    store.recover(catalog=catalog)
    catalog.write("before", b"", new_write(1))
    await store.wait_durable()

    def broken(_: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as failing:
        failing.setattr(os, "fsync", broken)
        catalog.write("refused", b"", new_write(1))
        with pytest.raises(UnavailableError, check=lambda error: error.reason == "DISK_FAILED"):
            await store.wait_durable()
    ((reason, cause),) = reasons
    assert reason == "could not write to the journal"
    assert isinstance(cause, UnavailableError)
    assert cause.reason == "DISK_FAILED"
    with pytest.raises(ServiceFailedError):
        await store.wait_durable()
    with pytest.raises(ServiceFailedError):
        catalog.write("later", b"", new_write(1))
    assert len(reasons) == 1
    await store.close()


@MODES
async def test_a_fault_of_the_log_is_fatal_and_its_cause_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sync: bool
) -> None:
    store, catalog, causes = StateStore.open(tmp_path, sync=sync), Catalog(PlanRunner()), []

    def fatal(_: str, cause: BaseException) -> None:
        causes.append(cause)
        store.abandon(ServiceFailedError("the service has failed"))

    def faulty(*_: object) -> None:
        raise ZeroDivisionError("a fault of the log")

    store.fatal = fatal
    store.recover(catalog=catalog)
    with monkeypatch.context() as failing:
        failing.setattr(SegmentWriter, "append", faulty)
        catalog.write("refused", b"", new_write(1))
        with pytest.raises(ZeroDivisionError):
            await store.wait_durable()
    assert [type(cause) for cause in causes] == [ZeroDivisionError]
    with pytest.raises(ServiceFailedError):
        await store.wait_durable()
    await store.close()


# A controller and a storage service in one process and one directory


def put(client: Any, number: int, rows: int = ROWS) -> Any:
    return client.put("train", {"x": torch.full((rows, 3), MARK) + number})


def live(client: Any) -> None:
    """Put, overwrite and clear, so that puts come and go."""
    metas = [put(client, number) for number in range(6)]
    client.put(metas[0], {"y": torch.arange(ROWS)})
    client.put(metas[1], {"x": torch.full((ROWS, 3), MARK)})  # its first put is free
    client.clear_samples(metas[2])
    client.clear_samples(metas[3].select_samples([0]))
    put(client, 6, rows=3000)  # of a segment
    client.put("other", {"x": torch.full((2, 3), MARK)})
    client.clear_partition("other")


def named_puts(catalog: Catalog) -> set[bytes]:
    return {
        put.put_id
        for cells in catalog.snapshot_cells()
        for put, count in zip(cells.puts.columns["put"].values(), cells.puts.columns["cells"].values(), strict=True)
        if count
    }


def records_of(path: Path) -> list[Record]:
    data_dir = DataDir.open(path)
    log = Log(FileBackend(path, sync=False))
    try:
        return list(log.read(0))
    finally:
        log.close()
        data_dir.close()


@pytest.mark.parametrize("durability", ["process", "disk"])
def test_after_each_record_all_puts_are_there_that_samples_have(
    start_server: StartServer, tmp_path: Path, durability: str
) -> None:
    """Whichever frame a crash tears: what is before it in the log is a state that can be served."""
    server = start_server(data_dir=tmp_path, durability=durability)
    live(server.client())
    server.stop()
    catalog, puts, most = Catalog(PlanRunner()), [], 0
    for record in records_of(tmp_path):
        if record.stream == Stream.PUTS:
            puts.append(record.data)
        else:
            at_seconds, changes = decode_group(record.data)
            for change in changes:
                catalog.machine.replay(change, at_seconds)
            assert MARK.to_bytes(8, "little") not in record.data  # no values of samples
            assert len(record.data) < 1 << 20
        there = set(left_puts(puts))
        named = named_puts(catalog)
        assert named <= there
        most = max(most, len(named))
    assert most == 8
    assert len(there) == 7  # what was freed is gone in the end


# A controller and a storage service with a directory each


@pytest.fixture
def split(start_server: StartServer, tmp_path: Path) -> Iterator[tuple[LiveServer, LiveServer]]:
    controller = start_server(role="controller", data_dir=tmp_path / "controller", durability="process")
    storage = start_server(
        role="storage",
        controller=controller.address,
        data_dir=tmp_path / "storage",
        durability="process",
        shared_memory="off",
    )
    put(controller.client(timeout=60.0), 0)  # once it has registered
    yield controller, storage


def full(*_: object) -> None:
    raise DiskFullError("no space", retry_after_seconds=0.1)


def put_count(storage: LiveServer) -> int:
    count: int = storage.client().storage_stat(storage.address).put_count
    return count


def records_now(server: LiveServer, image: Path, stream: Stream) -> list[bytes]:
    """Return what would be found if the process were killed now."""
    store = server.app.state_store
    assert store is not None
    copy(store.data_dir.path, image)
    return [record.data for record in records_of(image) if record.stream == stream]


def test_a_change_that_names_a_put_comes_after_the_put_is_durable_elsewhere(
    split: tuple[LiveServer, LiveServer], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    controller, storage = split
    before = len(records_now(controller, tmp_path / "before", Stream.CHANGES))
    with monkeypatch.context() as failing:
        failing.setattr(storage.app.state_store._log.backend, "write", full)  # type: ignore[union-attr]
        with pytest.raises(tq.TqError):
            put(controller.client(timeout=1.0), 1)
        assert len(records_now(controller, tmp_path / "meanwhile", Stream.CHANGES)) == before
    put(controller.client(), 2)
    assert len(records_now(controller, tmp_path / "after", Stream.CHANGES)) == before + 1
    assert len(left_puts(records_now(storage, tmp_path / "there", Stream.PUTS))) >= 2


def test_a_put_goes_after_the_change_that_frees_it_is_durable_elsewhere(
    split: tuple[LiveServer, LiveServer], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    controller, storage = split
    with monkeypatch.context() as failing, ThreadPoolExecutor(1) as executor:
        failing.setattr(controller.app.state_store._log.backend, "write", full)  # type: ignore[union-attr]
        clearing = executor.submit(controller.client(timeout=1.0).clear_partition, "train")
        with pytest.raises(tq.TqError):
            clearing.result()
        assert not controller.app.controller.catalog.names()  # type: ignore[union-attr]
        controller.settle()
        assert put_count(storage) == 1
        assert len(left_puts(records_now(storage, tmp_path / "meanwhile", Stream.PUTS))) == 1
    put(controller.client(), 3)  # what is durable after it is so too
    deadline = time.monotonic() + 60
    while put_count(storage) != 1:
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_a_controller_that_stops_before_all_is_free_elsewhere_ends_well(
    split: tuple[LiveServer, LiveServer], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """What became durable by its end is told to the storage service by the next one."""
    controller, _ = split
    with monkeypatch.context() as failing:
        failing.setattr(controller.app.state_store._log.backend, "write", full)  # type: ignore[union-attr]
        with pytest.raises(tq.TqError):
            controller.client(timeout=1.0).clear_partition("train")
    controller.stop()
    assert "has failed and is stopping" not in caplog.text
