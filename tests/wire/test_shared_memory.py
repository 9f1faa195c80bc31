"""Sealed memory: what is written is what is read, and no process can change it for another."""

import fcntl
import gc
import mmap
import os
from pathlib import Path

import numpy as np
import pytest
from open_files import open_files

from tq_service.errors import InvalidArgumentError
from tq_service.wire import shared_memory
from tq_service.wire.encoding import encode_columns

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
    (fd,) = shared_memory.write_columns(columns)
    yield fd
    os.close(fd)


def test_columns_lie_one_after_the_other_each_aligned(columns, memory):
    starts, size = shared_memory.place_columns(column.value_bytes for column in columns)
    assert starts[0] == 0
    assert all(start % 64 == 0 for start in starts)
    shared_memory.check(memory, size)
    for start, column in zip(starts, columns, strict=True):
        expected = b"".join(bytes(chunk) for chunk in column.chunks)
        assert bytes(shared_memory.map_private([(memory, start, column.value_bytes)])) == expected
        target = np.empty(column.value_bytes, np.uint8)
        shared_memory.read_into(memory, target.data, start)
        assert bytes(target) == expected


def test_more_chunks_than_one_system_call_takes():
    rows = [np.full(3, row, np.int16) for row in range(5000)]
    column = encode_columns({"x": rows})
    (fd,) = shared_memory.write_columns(column)
    values = shared_memory.map_private([(fd, 0, 5000 * 6)]).view(np.int16)
    assert values.tolist() == np.repeat(np.arange(5000), 3).tolist()
    os.close(fd)


@pytest.fixture
def small_segments(monkeypatch):
    monkeypatch.setattr(shared_memory, "_SEGMENT_BYTES", 64 << 10)
    monkeypatch.setattr(shared_memory, "_GRAIN_BYTES", 4 << 10)


@pytest.mark.parametrize("thread_count", [1, 3])
def test_large_memory_is_in_several_memfds(columns, small_segments, monkeypatch, thread_count):
    monkeypatch.setattr(shared_memory, "_MOST_THREADS", thread_count)
    starts, size = shared_memory.place_columns(column.value_bytes for column in columns)
    sizes = shared_memory.segment_sizes(size)
    each = shared_memory.segment_bytes(size)
    assert len(sizes) == -(-size // each) > 10
    assert sum(sizes) == size
    fds = shared_memory.write_columns(columns)
    for fd, segment_size in zip(fds, sizes, strict=True):
        shared_memory.check(fd, segment_size)
    for start, column in zip(starts, columns, strict=True):
        pieces, at, end = [], start, start + column.value_bytes
        while at < end:
            number, inside = divmod(at, each)
            pieces.append((fds[number], inside, min(each - inside, end - at)))
            at += pieces[-1][2]
        mapped = shared_memory.map_private(pieces)
        assert bytes(mapped) == b"".join(bytes(chunk) for chunk in column.chunks)
        mapped[:] = 1
    for fd in fds:
        os.close(fd)


def test_the_number_of_memfds_is_bounded():
    for size in (1, 32 << 20, (32 << 20) + 1, 2 << 30, (2 << 30) + 1, 700 << 30):
        sizes = shared_memory.segment_sizes(size)
        assert sum(sizes) == size
        assert len(sizes) <= 64
        assert len(set(sizes[:-1])) <= 1
        assert len(sizes) == 1 or (sizes[0] % (2 << 20) == 0 and sizes[-1] <= sizes[0])
    assert len(shared_memory.segment_sizes(256 << 20)) == 8


def test_a_gap_at_the_end_of_a_memfd_is_filled(small_segments):
    columns = encode_columns({"a": np.ones((1, (64 << 10) - 10), np.uint8), "b": np.full((1, 64 << 10), 2, np.uint8)})
    fds = shared_memory.write_columns(columns)
    for fd, size in zip(fds, shared_memory.segment_sizes(128 << 10), strict=True):
        shared_memory.check(fd, size)
    assert set(shared_memory.map_private([(fds[1], 0, 64 << 10)]).tolist()) == {2}
    for fd in fds:
        os.close(fd)


def test_a_failed_mapping_leaves_nothing(memory):
    def mapped():
        return Path("/proc/self/maps").read_text().count("\n")

    gc.collect()  # what earlier tests left
    before = mapped()
    with pytest.raises(OSError, match="cannot be mapped"):
        shared_memory.map_private([(memory, 0, 4096), (-1, 0, 4096)])
    gc.collect()
    assert mapped() == before


def test_a_part_is_mapped_wherever_it_starts(memory):
    whole = np.empty(1001, np.uint8)
    shared_memory.read_into(memory, whole.data, 0)
    for start in (1, 63, 500, 1000):
        assert shared_memory.map_private([(memory, start, 1001 - start)]).tolist() == whole[start:].tolist()


def test_writing_to_a_mapping_changes_only_this_mapping(memory):
    mine, other = (shared_memory.map_private([(memory, 0, 1001)]) for _ in range(2))
    before = other.copy()
    mine[:] = 7
    assert mine.tolist() == [7] * 1001
    assert other.tolist() == before.tolist()
    assert shared_memory.map_private([(memory, 0, 1001)]).tolist() == before.tolist()


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
    (fd,) = shared_memory.write_columns(columns)
    array = shared_memory.map_private([(fd, 0, 1001)])
    os.close(fd)
    assert open_files() <= before
    gc.collect()
    assert array[:256].tolist() == list(range(256))


def test_the_memory_goes_with_the_last_view(columns):
    def mapped():
        return Path("/proc/self/maps").read_text().count("memfd:tq_service")

    (fd,) = shared_memory.write_columns(columns)
    before = mapped()
    array = shared_memory.map_private([(fd, 0, 1000)])
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
        (lambda _: holed(), "write all of it"),
        (a_file, "sealed against"),
        (lambda _: os.open("/dev/null", os.O_RDONLY), "sealed against"),
    ],
    ids=["unsealed", "writable", "shrinkable", "hole", "file", "device"],
)
def test_what_could_harm_a_reader_is_refused(make, reason, tmp_path):
    fd = make(tmp_path)
    try:
        with pytest.raises(InvalidArgumentError, match=reason):
            shared_memory.check(fd, SIZE)
    finally:
        os.close(fd)


def test_another_size_is_refused():
    fd = sealed(0xF)
    for size in (SIZE - 1, SIZE + 1):
        with pytest.raises(InvalidArgumentError, match=f"of {SIZE} bytes was sent; expected {size}"):
            shared_memory.check(fd, size)
    shared_memory.check(fd, SIZE)
    os.close(fd)


def test_a_failure_leaves_no_file_descriptor(columns, monkeypatch):
    def fail(*_):
        raise OSError("no memory")

    before = open_files()
    monkeypatch.setattr(os, "writev", fail)
    with pytest.raises(OSError, match="no memory"):
        shared_memory.write_columns(columns)
    assert open_files() <= before


def test_reading_behind_the_end_fails(memory):
    with pytest.raises(OSError, match="10 bytes before what was asked for"):
        shared_memory.read_into(memory, memoryview(bytearray(15)), os.fstat(memory).st_size - 5)
