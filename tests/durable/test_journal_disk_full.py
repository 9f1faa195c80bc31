"""A disk that is full or fails: nothing is lost, what waits is told, and the service goes on when there is space."""

import asyncio
import errno
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from journal_support import commit_each, copy, opened, read, replayed, wait_for_worker, written

from tq_service.durable.state_store import Stream
from tq_service.errors import DiskFullError, UnavailableError
from tq_service.journal import files
from tq_service.journal.files import RESERVE_BYTES, EmergencyDiskReserve, FileBackend, RecordWriter
from tq_service.journal.log import Log

MODES = pytest.mark.parametrize("sync", [False, True], ids=["process", "disk"])


class Disk:
    """Stands between a journal and the system.

    Attributes:
        code: of the error that writing fails with, once `partial_bytes` were written; None: it does not fail.
        sync_code: of the error that syncing fails with.
        attempts: how often something was to be written.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.code: int | None = None
        self.sync_code: int | None = None
        self.partial_bytes = 7
        self.attempts = 0
        pwritev, pwrite, fsync = os.pwritev, os.pwrite, os.fsync

        def write_parts(descriptor: int, parts: list[bytes], at: int) -> int:
            self.attempts += 1
            if self.code is None:
                return pwritev(descriptor, parts, at)
            if not self.partial_bytes:
                raise OSError(self.code, os.strerror(self.code))
            return pwrite(descriptor, b"".join(parts)[: self.partial_bytes], at)

        def write(descriptor: int, data: bytes, at: int) -> int:
            if self.code is not None:
                raise OSError(self.code, os.strerror(self.code))
            return pwrite(descriptor, data, at)

        def sync(descriptor: int) -> None:
            if self.sync_code is not None:
                raise OSError(self.sync_code, os.strerror(self.sync_code))
            fsync(descriptor)

        monkeypatch.setattr(os, "pwritev", write_parts)
        monkeypatch.setattr(os, "pwrite", write)
        monkeypatch.setattr(os, "fsync", sync)


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Disk:
    return Disk(monkeypatch)


@MODES
async def test_what_cannot_be_written_waits_and_is_written_when_there_is_space(
    tmp_path: Path, disk: Disk, sync: bool
) -> None:
    with opened(tmp_path, sync=sync) as journal:
        commit_each(journal, [b"before"])
        disk.code = errno.ENOSPC
        for number in range(5):
            journal.append(Stream.CHANGES, b"%d" % number)
            with pytest.raises(
                DiskFullError, match=r"is full: .*lost\. Free some space so that the service can resume"
            ) as caught:
                await journal.wait_durable()
            assert caught.value.retry_after_seconds == 1.0
            assert journal.has_unflushed
        told: list[str] = []
        journal.after_durable(lambda: told.append("durable"))
        disk.code = None
        await journal.wait_durable()
        assert not journal.has_unflushed
        assert told == ["durable"]
    assert read(tmp_path) == [b"before", *(b"%d" % number for number in range(5))]


@MODES
async def test_nobody_tries_until_somebody_asks(tmp_path: Path, disk: Disk, sync: bool) -> None:
    with opened(tmp_path, sync=sync) as journal:
        journal.backend._reserve.release()
        disk.code = errno.ENOSPC
        journal.append(Stream.CHANGES, b"record")
        for asked in range(1, 4):
            before = disk.attempts
            with pytest.raises(DiskFullError):
                await journal.wait_durable()
            await asyncio.sleep(0.02)
            assert disk.attempts == before + 1, asked
        disk.code = None


@MODES
def test_a_quota_counts_as_a_full_disk(tmp_path: Path, disk: Disk, sync: bool) -> None:
    with opened(tmp_path, sync=sync) as journal:
        disk.code = errno.EDQUOT
        journal.append(Stream.CHANGES, b"record")
        with pytest.raises(DiskFullError, match="does not accept writes"):
            journal.flush()
        disk.code = None
    assert read(tmp_path) == [b"record"]


@MODES
@pytest.mark.parametrize("partial_bytes", [0, 1, 24, 40])
def test_what_does_not_fit_is_cut_off_again(tmp_path: Path, disk: Disk, sync: bool, partial_bytes: int) -> None:
    with opened(tmp_path / "journal", sync=sync) as journal:
        commit_each(journal, [b"before"])
        size = written(tmp_path / "journal").stat().st_size
        disk.code, disk.partial_bytes = errno.ENOSPC, partial_bytes
        journal.append(Stream.CHANGES, b"a record of more than that")
        with pytest.raises(DiskFullError):
            journal.flush()
        assert written(tmp_path / "journal").stat().st_size == size
        copy(tmp_path / "journal", tmp_path / "image", journal)
        disk.code = None
    assert read(tmp_path / "image") == [b"before"]
    assert read(tmp_path / "journal") == [b"before", b"a record of more than that"]


def is_disk_failed(error):
    return error.reason == "DISK_FAILED"


async def test_after_a_failed_fsync_nothing_is_acknowledged_again(tmp_path: Path, disk: Disk) -> None:
    (tmp_path / "journal").mkdir()
    journal = Log(FileBackend(tmp_path / "journal", sync=True))
    assert replayed(journal) == []
    commit_each(journal, [b"before"])
    disk.sync_code = errno.EIO
    journal.append(Stream.CHANGES, b"unknown")
    with pytest.raises(UnavailableError, check=is_disk_failed, match="failed to sync journal-000000000001"):
        await journal.wait_durable()
    disk.sync_code = None  # a second fsync would succeed without having written anything
    journal.append(Stream.CHANGES, b"later")
    for _ in range(2):
        with pytest.raises(UnavailableError, check=is_disk_failed):
            await journal.wait_durable()
    copy(tmp_path / "journal", tmp_path / "image", journal)
    with pytest.raises(UnavailableError, check=is_disk_failed):
        journal.close()
    assert read(tmp_path / "image") == [b"before", b"unknown"]


@MODES
async def test_a_segment_that_cannot_begin_keeps_what_comes_after_it_in_order(
    tmp_path: Path, disk: Disk, sync: bool
) -> None:
    with opened(tmp_path, sync=sync) as journal:
        commit_each(journal, [b"1"])
        journal.append(Stream.CHANGES, b"2")
        disk.code = errno.ENOSPC
        number = journal.rotate()
        journal.append(Stream.CHANGES, b"3")
        for _ in range(2):
            with pytest.raises(DiskFullError, match="Free some space"):
                await journal.wait_durable()
        disk.code = None
        await journal.wait_durable()
        commit_each(journal, [b"4"])
    assert read(tmp_path, 0) == [b"1", b"2", b"3", b"4"]
    assert read(tmp_path, number) == [b"3", b"4"]


@MODES
def test_a_segment_whose_closing_does_not_fit_is_not_left_without_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, disk: Disk, sync: bool
) -> None:
    with opened(tmp_path, sync=sync) as journal:
        commit_each(journal, [b"1"])
        number = journal.rotate()
        writes = os.pwritev

        def only_openings(descriptor: int, parts: list[bytes], at: int) -> int:
            if at:
                raise OSError(errno.ENOSPC, "No space left on device")
            return writes(descriptor, parts, at)

        with monkeypatch.context() as full:
            full.setattr(os, "pwritev", only_openings)
            with pytest.raises(DiskFullError):
                journal.flush()
            assert written(tmp_path).name == "journal-000000000001.tqj"
        commit_each(journal, [b"2"])
    assert read(tmp_path, 0) == [b"1", b"2"]
    assert read(tmp_path, number) == [b"2"]


def test_a_disk_that_stays_full_fails_the_close_and_loses_what_was_durable_never(tmp_path: Path, disk: Disk) -> None:
    for sync in (False, True):
        journal = Log(FileBackend(tmp_path, sync=sync))
        list(journal.read(0))
        commit_each(journal, [b"durable"])
        disk.code = errno.ENOSPC
        journal.append(Stream.CHANGES, b"refused")
        with pytest.raises(DiskFullError):
            journal.close()
        disk.code = None
    assert read(tmp_path) == [b"durable", b"durable"]


def test_reserved_space_is_released_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, disk: Disk, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(files, "_LOOK_SECONDS", 0.0)
    reserve = tmp_path / "reserve"
    release = EmergencyDiskReserve.release

    def freed(one: EmergencyDiskReserve) -> bool:
        disk.code = None
        return release(one)

    monkeypatch.setattr(EmergencyDiskReserve, "release", freed)
    with opened(tmp_path) as journal:
        assert reserve.stat().st_size == RESERVE_BYTES
        assert reserve.stat().st_blocks * 512 >= RESERVE_BYTES
        assert not journal.backend.is_disk_low
        with monkeypatch.context() as full:
            full.setattr(files.os, "statvfs", no_space)
            disk.code = errno.ENOSPC
            commit_each(journal, [b"a clear"])
            assert not reserve.exists()
            assert journal.backend.is_disk_low
            assert "released_mib=4" in caplog.text
        assert journal.backend.is_disk_low  # this has a thread look
        wait_for_worker(journal)
        assert not journal.backend.is_disk_low
        assert reserve.stat().st_size == RESERVE_BYTES
    assert read(tmp_path) == [b"a clear"]


def no_space(_: Path) -> os.statvfs_result:
    return os.statvfs_result((4096, 4096, 10, 0, 0, 0, 0, 0, 0, 255))


def test_a_reserve_that_does_not_fit_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(files.os, "posix_fallocate", refuse)
    reserve = EmergencyDiskReserve(tmp_path / "reserve")
    reserve.fill()
    assert not reserve.is_filled
    assert not (tmp_path / "reserve").exists()
    assert not reserve.release()


LIMITED = """
import resource, sys
from pathlib import Path
from tq_service.durable.state_store import Stream
from tq_service.journal.files import FileBackend
from tq_service.journal.log import Log
from tq_service.errors import DiskFullError

directory, sync = Path(sys.argv[1]), sys.argv[2] == "disk"
journal = Log(FileBackend(directory, sync=sync))
assert not list(journal.read(0))
soft = 600_000
resource.setrlimit(resource.RLIMIT_FSIZE, (soft, resource.RLIM_INFINITY))
number = refused = 0
while refused < 3:
    journal.append(Stream.CHANGES, b"%d" % number + bytes(5000))
    number += 1
    try:
        journal.flush()
    except DiskFullError:
        refused += 1
assert number > 20, number
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
journal.flush()
journal.close()
print(number)
"""


@MODES
def test_a_file_that_the_system_lets_grow_no_further(tmp_path: Path, sync: bool) -> None:
    command = [sys.executable, "-c", LIMITED, str(tmp_path), "disk" if sync else "process"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert read(tmp_path) == [b"%d" % number + bytes(5000) for number in range(int(done.stdout))]


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 12 MiB, where this user may mount one."""
    directory = tmp_path / "disk"
    directory.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=12m", "tmpfs", str(directory)], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip("this user may not mount a file system")
    yield directory
    subprocess.run(["umount", str(directory)], check=True)


@MODES
async def test_a_disk_that_is_full_and_has_space_again(
    small_disk: Path, monkeypatch: pytest.MonkeyPatch, sync: bool
) -> None:
    monkeypatch.setattr(files, "_LOOK_SECONDS", 0.0)
    ballast = small_disk / "ballast"
    with opened(small_disk / "journal", sync=sync) as journal:
        assert not journal.backend.is_disk_low
        with ballast.open("wb") as file:
            os.posix_fallocate(file.fileno(), 0, 6 << 20)
        count = refused = 0
        while refused < 3:
            journal.append(Stream.CHANGES, b"%d" % count + bytes(5000))
            count += 1
            try:
                await journal.wait_durable()
            except DiskFullError:
                refused += 1
        assert journal.backend.is_disk_low
        assert not (small_disk / "journal" / "reserve").exists()
        ballast.unlink()
        await journal.wait_durable()
    assert read(small_disk / "journal") == [b"%d" % number + bytes(5000) for number in range(count)]


@MODES
def test_a_service_that_is_started_on_a_full_disk_can_free_space(small_disk: Path, sync: bool) -> None:
    with opened(small_disk / "journal", sync=sync) as journal:
        commit_each(journal, [b"a put"])
    fill(small_disk / "ballast")
    with opened(small_disk / "journal", sync=sync) as journal:
        assert replayed(journal) == [b"a put"]
        assert journal.backend.is_disk_low
        commit_each(journal, [b"a clear"])
    assert read(small_disk / "journal") == [b"a put", b"a clear"]


@pytest.mark.parametrize("accept_loss", [False, True])
def test_a_start_that_has_no_space_for_a_segment_loses_nothing(small_disk: Path, accept_loss: bool) -> None:
    directory, ballast = small_disk / "journal", small_disk / "ballast"
    with opened(directory) as journal:
        commit_each(journal, [b"a put"])
    (directory / "reserve").unlink()
    fill(ballast)
    with pytest.raises(DiskFullError, match=r"is full: journal-000000000003.* cannot grow\. No acknowledged"):
        read(directory, accept_loss=accept_loss)
    ballast.unlink()
    assert read(directory) == [b"a put"]


@pytest.mark.parametrize("accept_loss", [False, True])
def test_a_journal_that_cannot_be_read_for_lack_of_files_is_not_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, accept_loss: bool
) -> None:
    with opened(tmp_path) as journal:
        commit_each(journal, [b"a put"])
    real = Path.open

    def refused(path: Path, *rest: str) -> object:
        if path.suffix == ".tqj":
            raise OSError(errno.EMFILE, "Too many open files", str(path))
        return real(path, *rest)

    with monkeypatch.context() as short:
        short.setattr(Path, "open", refused)
        with pytest.raises(DiskFullError, match=r"journal-000000000001.* could not be read .*No data is lost"):
            read(tmp_path, accept_loss=accept_loss)
    assert read(tmp_path) == [b"a put"]


def fill(ballast: Path) -> None:
    with ballast.open("wb", buffering=0) as file, suppress(OSError):
        while file.write(bytes(4096)) == 4096:
            pass
    assert os.statvfs(ballast.parent).f_bavail == 0


def test_a_snapshot_leaves_space_for_what_goes_on_beside_it(small_disk: Path) -> None:
    path = small_disk / "snapshot"
    with opened(small_disk / "journal") as journal:
        least_free = free_bytes(small_disk)
        with pytest.raises(OSError, match="must stay free") as caught, RecordWriter(path) as writer:
            for _ in range(20):
                writer.write(bytes(1 << 19))
                least_free = min(least_free, free_bytes(small_disk))
        assert caught.value.errno == errno.ENOSPC
        assert least_free > RESERVE_BYTES
        assert not list(small_disk.glob("snapshot*"))
        commit_each(journal, [b"a clear"])
        assert not journal.backend.is_disk_low


def free_bytes(directory: Path) -> int:
    free = os.statvfs(directory)
    return free.f_bavail * free.f_frsize
