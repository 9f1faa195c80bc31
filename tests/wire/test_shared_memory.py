"""Shared memory: what is written is what is read; of sealed memory no process can change it for another."""

import fcntl
import gc
import mmap
import os
import signal
from pathlib import Path

import numpy as np
import pytest
from open_files import open_files

from tq_service.errors import InvalidArgumentError
from tq_service.wire import device, shared_memory
from tq_service.wire import mapping as mappings
from tq_service.wire.encoding import encode_columns
from tq_service.wire.host_memory import place_columns
from tq_service.wire.mapping import PAGE_BYTES, Mapping

pytestmark = pytest.mark.skipif(not shared_memory.is_supported(), reason="sealed memfds are there on Linux only")

SIZE = 1 << 20
WRITE_SEAL = 0x0008


@pytest.fixture
def columns():
    return encode_columns(
        {
            "odd": np.arange(1001, dtype=np.uint8),
            "jagged": [np.arange(count, dtype=np.int64) for count in [2000, 0, *[1] * 999]],
            "wide": np.arange(1001 * 300, dtype=np.float32).reshape(1001, 300),
        }
    )


@pytest.fixture
def memory(columns):
    fd = shared_memory.write_sealed(columns)
    yield fd
    os.close(fd)


def private(fd):
    """Return an array on all of a memfd, in a mapping of its own."""
    mapping = Mapping(fd, is_shared=False)
    return mapping.array(0, mapping.size)


def bytes_of(column):
    return b"".join(bytes(chunk) for chunk in column.chunks)


def test_columns_lie_one_after_the_other_each_aligned(columns, memory):
    starts, size = place_columns(column.value_bytes for column in columns)
    assert starts[0] == 0
    assert all(start % 64 == 0 for start in starts)
    shared_memory.check_sealed(memory, size)
    shared_memory.check_sealed(memory)
    mapping = Mapping(memory, is_shared=False)
    for start, column in zip(starts, columns, strict=True):
        assert bytes(mapping.array(start, column.value_bytes)) == bytes_of(column)
        target = np.empty(column.value_bytes, np.uint8)
        shared_memory.read_into(memory, target.data, start)
        assert bytes(target) == bytes_of(column)


def test_more_chunks_than_one_system_call_takes():
    rows = [np.full(3, row, np.int16) for row in range(5000)]
    fd = shared_memory.write_sealed(encode_columns({"x": rows}))
    values = private(fd)[: 5000 * 6].view(np.int16)
    assert values.tolist() == np.repeat(np.arange(5000), 3).tolist()
    os.close(fd)


@pytest.mark.parametrize("thread_count", [1, 3])
def test_a_region_is_filled_in_pieces_and_nothing_older_is_left_between_columns(columns, monkeypatch, thread_count):
    monkeypatch.setattr(shared_memory, "_PIECE_BYTES", 64 << 10)
    monkeypatch.setattr(device, "_LARGE_CHUNK_BYTES", 1 << 10)
    monkeypatch.setattr(shared_memory, "_MOST_THREADS", thread_count)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(8))
    starts, size = place_columns(column.value_bytes for column in columns)
    target = np.full(size + 100, 7, np.uint8)
    shared_memory.fill(target, columns)
    expected = bytearray(size)
    for start, column in zip(starts, columns, strict=True):
        expected[start : start + column.value_bytes] = bytes_of(column)
    assert bytes(target) == bytes(expected) + bytes([7] * 100)


def mapped():
    return Path("/proc/self/maps").read_text().count("memfd:tq_service")


def test_a_file_that_cannot_be_mapped_leaves_nothing(tmp_path):
    gc.collect()  # what earlier tests left
    before = Path("/proc/self/maps").read_text().count("\n")
    (tmp_path / "empty").write_bytes(b"")
    fd = os.open(tmp_path / "empty", os.O_RDONLY)
    with pytest.raises(OSError, match="could not map"):
        Mapping(fd, is_shared=False)
    os.close(fd)
    gc.collect()
    assert Path("/proc/self/maps").read_text().count("\n") == before


def test_a_part_is_mapped_wherever_it_starts(memory):
    whole = np.empty(1001, np.uint8)
    shared_memory.read_into(memory, whole.data, 0)
    mapping = Mapping(memory, is_shared=False)
    for start in (1, 63, 500, 1000):
        assert mapping.array(start, 1001 - start).tolist() == whole[start:].tolist()


def test_writing_to_a_private_mapping_changes_only_this_mapping(memory):
    mine, other = private(memory), private(memory)
    before = other.copy()
    mine[:] = 7
    assert set(mine.tolist()) == {7}
    assert other.tolist() == before.tolist()
    assert private(memory).tolist() == before.tolist()


@pytest.fixture
def region():
    fd = shared_memory.new_region(64 * PAGE_BYTES)
    yield fd
    os.close(fd)


def test_what_is_written_to_a_shared_mapping_is_seen_by_private_ones(region):
    writer, reader = Mapping(region, is_shared=True), Mapping(region, is_shared=False)
    for value in (1, 2):
        writer.array(0, writer.size)[:] = value
        assert set(reader.array(0, reader.size).tolist()) == {value}


@pytest.mark.parametrize("has_pagemap", [True, False])
def test_changes_of_a_range_are_discarded_and_those_beside_it_stay(region, has_pagemap, monkeypatch):
    if not has_pagemap:
        monkeypatch.setattr(mappings, "_changed_pages", lambda *_: None)
    writer, reader = Mapping(region, is_shared=True), Mapping(region, is_shared=False)
    written, read = writer.array(0, writer.size), reader.array(0, reader.size).reshape(64, PAGE_BYTES)
    written[:] = 1
    assert read.sum() == writer.size
    changed = [3, 10, 11, 12, 20, 21, 40]
    read[changed] = 9
    reader.discard_changes(10, 30)
    assert [page for page in range(64) if read[page, 0] == 9] == [3, 40]
    assert set(read[10:30].ravel().tolist()) == {1}
    written[:] = 2
    assert set(read[10:30].ravel().tolist()) == {2}  # as it is now, and not as it was
    assert set(read[changed[0]].tolist()) == {9}


def test_only_pages_that_were_changed_are_dropped(region):
    reader = Mapping(region, is_shared=False)
    array = reader.array(0, reader.size).reshape(64, PAGE_BYTES)
    array.sum()
    array[[5, 7, 8], 100] = 1
    page = reader.address // PAGE_BYTES
    assert mappings._changed_pages(page, 64).tolist() == [5, 7, 8]
    reader.discard_changes(0, 64)
    assert mappings._changed_pages(page, 64).tolist() == []


def test_a_region_is_whole_of_one_size_and_its_users_alone(region):
    status = os.fstat(region)
    assert status.st_blocks * 512 >= status.st_size == 64 * PAGE_BYTES
    assert status.st_mode & 0o777 == 0o600
    for size in (0, PAGE_BYTES, 65 * PAGE_BYTES):
        with pytest.raises(PermissionError):
            os.ftruncate(region, size)
    with pytest.raises(PermissionError):
        fcntl.fcntl(region, fcntl.F_ADD_SEALS, WRITE_SEAL)


def test_pages_of_a_region_are_given_back_although_others_map_it(region):
    other = Mapping(region, is_shared=False)
    assert other.array(0, other.size).sum() == 0
    with mmap.mmap(-1, 64 * PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as memory:
        shared_memory.map_over(memory, region, 64 * PAGE_BYTES, is_writable=True)
        memory[:5] = b"bytes"
        assert bytes(other.array(0, 5)) == b"bytes"
        shared_memory.free_pages(memory)
        assert os.fstat(region).st_blocks == 0
        assert bytes(other.array(0, 5)) == bytes(5)


def test_a_forked_child_has_private_mappings_and_no_shared_ones(region):
    writer, reader = Mapping(region, is_shared=True, is_inherited=False), Mapping(region, is_shared=False)
    writer.array(0, 4)[:] = 5
    kinds = []
    for mapping in (writer, reader):
        child = os.fork()
        if not child:
            signal.signal(signal.SIGSEGV, signal.SIG_DFL)
            os._exit(0 if mapping.array(0, 4)[0] == 5 else 1)
        kinds.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    assert kinds == [-signal.SIGSEGV, 0]


def test_nobody_can_change_the_memory(memory):
    size = os.fstat(memory).st_size
    with pytest.raises(PermissionError):
        os.pwrite(memory, b"x", 0)
    for changed in (0, size // 2, size * 2):
        with pytest.raises(PermissionError):
            os.ftruncate(memory, changed)
    with pytest.raises(PermissionError):
        mmap.mmap(memory, size, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ | mmap.PROT_WRITE)
    with pytest.raises(PermissionError):
        fcntl.fcntl(memory, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SEAL)
    again = os.open(f"/proc/self/fd/{memory}", os.O_RDWR)
    with pytest.raises(PermissionError):
        os.pwrite(again, b"x", 0)
    os.close(again)


def test_a_mapping_outlives_its_file_descriptor_and_needs_none(columns):
    before = open_files()
    fd = shared_memory.write_sealed(columns)
    array = private(fd)
    os.close(fd)
    assert open_files() <= before
    gc.collect()
    assert array[:256].tolist() == list(range(256))


def test_the_memory_goes_with_the_last_view(columns):
    fd = shared_memory.write_sealed(columns)
    before = mapped()
    array = private(fd)
    view = array[10:20].view(np.int16)
    os.close(fd)
    assert mapped() == before + 1
    del array
    gc.collect()
    assert mapped() == before + 1
    assert view[0] == 10 + 256 * 11
    del view
    gc.collect()
    assert mapped() == before


def unsealed():
    fd = os.memfd_create("test", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.write(fd, bytes(SIZE))
    return fd


def sealed(seals):
    fd = unsealed()
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
    return fd


def holed():
    fd = os.memfd_create("test", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, SIZE)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, 0xF)
    return fd


def a_file(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(bytes(SIZE))
    return os.open(path, os.O_RDONLY)


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda _: unsealed(), "sealed against"),
        (lambda _: sealed(fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL), "sealed against"),
        (lambda _: sealed(WRITE_SEAL | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL), "sealed against"),
        (lambda _: holed(), "Write all bytes before"),
        (a_file, "sealed against"),
        (lambda _: os.open("/dev/null", os.O_RDONLY), "sealed against"),
    ],
    ids=["unsealed", "writable", "shrinkable", "hole", "file", "device"],
)
def test_what_could_harm_a_reader_is_refused(make, reason, tmp_path):
    fd = make(tmp_path)
    try:
        with pytest.raises(InvalidArgumentError, match=reason):
            shared_memory.check_sealed(fd, SIZE)
    finally:
        os.close(fd)


def test_another_size_is_refused():
    fd = sealed(0xF)
    for size in (SIZE - 1, SIZE + 1):
        with pytest.raises(InvalidArgumentError, match=f"of {SIZE} bytes; expected {size}"):
            shared_memory.check_sealed(fd, size)
    shared_memory.check_sealed(fd, SIZE)
    os.close(fd)


def test_a_failure_leaves_no_file_descriptor(columns, monkeypatch):
    def fail(*_):
        raise OSError("no memory")

    before = open_files()
    monkeypatch.setattr(os, "pwritev", fail)
    with pytest.raises(OSError, match="no memory"):
        shared_memory.write_sealed(columns)
    assert open_files() <= before


def test_reading_behind_the_end_fails(memory):
    with pytest.raises(OSError, match="10 bytes before the requested end"):
        shared_memory.read_into(memory, memoryview(bytearray(15)), os.fstat(memory).st_size - 5)
