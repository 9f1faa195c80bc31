"""What a crash leaves is cut; what only damage explains is an error that says where."""

import itertools
import logging
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from journal_support import (
    commit_each,
    copy,
    crashed,
    flip,
    opened,
    read,
    replayed,
    started_again,
    write,
    written,
)
from property_settings import examples

from tq_service.errors import JournalDamagedError
from tq_service.journal.files import FileBackend, segment_numbers, segment_path
from tq_service.journal.log import Log

RECORDS = [b"%03d " % number + b"x" * size for number, size in enumerate((10, 9000, 10, 20_000, 300, 300, 5))]
SMALL = [b"first", b"", b"the third", b"4"]
ENDS: list[int] = []
"""How long the segment is before the first of the records, and after each."""
MODES = pytest.mark.parametrize("sync", [False, True], ids=["process", "disk"])


@pytest.fixture(autouse=True)
def without_syncs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing here has to be on the disk, and a start syncs, of which there are thousands here."""
    monkeypatch.setattr(os, "fsync", lambda _: None)


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What a kill leaves of a journal."""
    directory = tmp_path_factory.mktemp("crash") / "journal"
    with opened(directory) as journal:
        ENDS[:] = [written(directory).stat().st_size]
        for record in RECORDS:
            commit_each(journal, [record])
            ENDS.append(written(directory).stat().st_size)
        copy(directory, directory.with_name("image"), journal)
    return directory.with_name("image")


@pytest.fixture
def killed(image: Path, tmp_path: Path) -> Path:
    """A copy of it."""
    copy(image, tmp_path / "killed")
    return tmp_path / "killed"


@pytest.fixture
def reboot(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Let the machine be restarted since the journal was written."""
    return lambda: started_again(monkeypatch)


def is_prefix(some: list[bytes], of: list[bytes]) -> bool:
    return some == of[: len(some)]


def truncate(path: Path, size: int) -> None:
    with path.open("r+b") as file:
        file.truncate(size)


def frame_ends(directory: Path, records: list[bytes]) -> list[int]:
    """Return how long the segment is before the first of some records, and after each, and write them."""
    with opened(directory) as journal:
        ends = [written(directory).stat().st_size]
        for record in records:
            commit_each(journal, [record])
            ends.append(written(directory).stat().st_size)
    return ends


def test_a_kill_loses_nothing(killed: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert written(killed).stat().st_size > 29_000
    assert read(killed) == RECORDS
    assert not caplog.records


@examples(20)
@given(data=st.data())
def test_a_segment_cut_anywhere_leaves_a_beginning(
    image: Path, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    directory = tmp_path_factory.mktemp("cut") / "journal"
    copy(image, directory)
    size_bytes = data.draw(st.integers(ENDS[0], ENDS[-1]), label="size")
    truncate(written(directory), size_bytes)
    with opened(directory) as journal:
        found = replayed(journal)
        assert found == RECORDS[: sum(size_bytes >= end for end in ENDS[1:])]
        commit_each(journal, [b"later"])
    assert read(directory) == [*found, b"later"]


def test_a_first_segment_whose_opening_was_not_written_is_begun_again(
    killed: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for size in range(ENDS[0]):
        directory = tmp_path / f"{size}"
        copy(killed, directory)
        truncate(written(directory), size)
        caplog.clear()
        write(directory, [b"again"])
        assert "removed a segment without records" in caplog.text
        assert read(directory) == [b"again"]


@MODES
def test_a_next_segment_whose_opening_was_not_written_is_begun_again(tmp_path: Path, sync: bool) -> None:
    write(tmp_path / "journal", [b"1"], sync=sync)
    copy(tmp_path / "journal", tmp_path / "before")
    write(tmp_path / "journal", [b"2"], sync=sync)
    second = written(tmp_path / "journal")
    opening = frame_ends(tmp_path / "measured", [])[0]
    for size in range(opening):
        directory = tmp_path / f"{size}"
        copy(tmp_path / "before", directory)  # whose segment is not closed yet
        (directory / second.name).write_bytes(second.read_bytes()[:size])
        write(directory, [b"3"])
        assert read(directory) == [b"1", b"3"]


def test_what_is_cut_is_logged(killed: Path, caplog: pytest.LogCaptureFixture) -> None:
    segment = written(killed)
    truncate(segment, ENDS[-1] - 2)
    assert read(killed) == RECORDS[:-1]
    assert f"file={segment.name} bytes={ENDS[-1] - 2 - ENDS[-2]} after_record=7" in caplog.text
    caplog.clear()
    assert read(killed) == RECORDS[:-1]
    assert not caplog.records


@MODES
def test_a_flipped_bit_at_any_byte_after_a_kill_is_damage(tmp_path: Path, sync: bool) -> None:
    image = crashed(tmp_path / "journal", SMALL, sync=sync)
    whole = written(image).read_bytes()
    for offset in range(len(whole)):
        flip(written(image), offset, bit=offset % 8)
        before = written(image).read_bytes()
        for _ in range(2):  # the refused start leaves what it found
            with pytest.raises(JournalDamagedError, match=r"journal-000000000001\.tqj.* --accept-journal-loss"):
                read(image)
            assert written(image).read_bytes() == before
        written(image).write_bytes(whole)
    assert read(image) == SMALL


def test_an_accepted_loss_is_of_what_follows_the_damage_and_a_copy_is_kept(tmp_path: Path) -> None:
    image = crashed(tmp_path / "journal", SMALL)
    for offset in range(len(written(image).read_bytes())):
        directory = tmp_path / f"{offset}"
        copy(image, directory)
        flip(written(directory), offset)
        damaged = written(directory).read_bytes()
        found = read(directory, accept_loss=True)
        assert is_prefix(found, SMALL)
        assert [path.read_bytes() for path in directory.glob("*.lost")] == [damaged]
        write(directory, [b"later"])
        assert read(directory) == [*found, b"later"]


@MODES
def test_a_flipped_bit_at_any_byte_of_a_segment_that_another_follows_is_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, sync: bool
) -> None:
    write(tmp_path / "journal", SMALL, sync=sync)
    write(tmp_path / "journal", [b"in the next"], sync=sync)
    first, *_ = segment_numbers(tmp_path / "journal")
    path = segment_path(tmp_path / "journal", first)
    whole = path.read_bytes()
    closing = len(whole) - 24
    for offset in range(len(whole)):
        flip(path, offset, bit=offset % 8)
        if offset < closing:
            with pytest.raises(JournalDamagedError, match=path.name):
                read(tmp_path / "journal")
        else:  # it holds nothing, and the next segment is there
            caplog.clear()
            assert read(tmp_path / "journal") == [*SMALL, b"in the next"]
            assert "bytes=24" in caplog.text
        path.write_bytes(whole)


def test_a_loss_of_power_may_take_what_was_not_synced(
    killed: Path, reboot: Callable[[], None], caplog: pytest.LogCaptureFixture
) -> None:
    reboot()
    flip(written(killed), ENDS[3] + 50)  # as a page that was not written before the power went
    assert read(killed) == RECORDS[:3]
    assert "truncated" in caplog.text
    caplog.clear()
    assert read(killed) == RECORDS[:3]
    assert not caplog.records


def test_a_loss_of_power_takes_at_most_the_last_of_synced_commits(tmp_path: Path, reboot: Callable[[], None]) -> None:
    killed = crashed(tmp_path / "journal", SMALL, sync=True)
    whole = written(killed).read_bytes()
    *_, last_begins, ends = frame_ends(tmp_path / "measured", SMALL)
    assert ends == len(whole)
    reboot()
    for offset in range(len(whole)):
        directory = tmp_path / f"{offset}"
        copy(killed, directory)
        flip(written(directory), offset, bit=offset % 8)
        if offset >= last_begins:
            assert read(directory) == SMALL[:-1]
            continue
        with pytest.raises(JournalDamagedError, match=written(killed).name):
            read(directory)


def test_zeros_where_the_power_went_are_cut(tmp_path: Path, reboot: Callable[[], None]) -> None:
    for sync in (False, True):
        killed = crashed(tmp_path / f"{sync}", SMALL, sync=sync)
        with written(killed).open("ab") as file:
            file.write(bytes(10_000))
        shutil.copytree(killed, tmp_path / f"{sync}-same")
        with pytest.raises(JournalDamagedError, match="does not match its checksum"):
            read(tmp_path / f"{sync}-same")
    reboot()
    for sync in (False, True):
        assert read(tmp_path / f"{sync}-image") == SMALL


def test_nothing_behind_a_lost_tail_is_taken(
    tmp_path: Path, reboot: Callable[[], None], caplog: pytest.LogCaptureFixture
) -> None:
    image = tmp_path / "image"
    with opened(tmp_path / "journal") as journal:
        commit_each(journal, RECORDS[:3])
        journal.rotate()
        commit_each(journal, RECORDS[3:])
        copy(tmp_path / "journal", image, journal)
    first = segment_path(image, 1)
    truncate(first, first.stat().st_size - 24 - 1)  # the second one is written back, the end of the first is not
    reboot()
    assert read(image) == RECORDS[:2]
    assert "quarantined a segment that follows lost records" in caplog.text
    assert [path.name for path in image.glob("*.lost")] == ["journal-000000000005.tqj.lost"]
    write(image, [b"later"])
    assert read(image) == [*RECORDS[:2], b"later"]


def test_a_segment_that_a_loss_of_power_took_whole(tmp_path: Path, reboot: Callable[[], None]) -> None:
    for end in (0, 3, None):
        image = tmp_path / f"image-{end}"
        with opened(tmp_path / f"journal-{end}") as journal:
            commit_each(journal, [b"1"])
            journal.rotate()
            commit_each(journal, [b"2"])
            copy(tmp_path / f"journal-{end}", image, journal)
        if end is None:
            written(image).unlink()
        else:
            truncate(written(image), end)
        shutil.copytree(image, tmp_path / f"same-{end}")
        with pytest.raises(JournalDamagedError, match="journal-000000000003"):
            read(tmp_path / f"same-{end}")
    reboot()
    for end in (0, 3, None):
        assert read(tmp_path / f"image-{end}") == [b"1"]


def test_a_record_of_a_later_run_of_the_machine_is_not_given_up_for_a_gap(
    tmp_path: Path, reboot: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path, SMALL)
    with monkeypatch.context() as later:
        started_again(later)
        write(tmp_path, [b"of a later run"])
    first = segment_path(tmp_path, 1)
    truncate(first, first.stat().st_size - 24 - 3)
    reboot()
    with pytest.raises(JournalDamagedError, match="but the next file begins with number 6"):
        read(tmp_path)


def test_a_damaged_record_is_named(tmp_path: Path) -> None:
    ends = frame_ends(tmp_path, RECORDS)
    path = written(tmp_path)
    flip(path, ends[4] + 100)
    with pytest.raises(
        JournalDamagedError, match=rf"{path}, byte {ends[4]}, has a frame that does not match"
    ) as caught:
        read(tmp_path)
    assert caught.value.metadata == {"file": path.name, "byte": str(ends[4]), "after_record": "5"}
    assert read(tmp_path, accept_loss=True) == RECORDS[:4]
    write(tmp_path, [b"later"])
    assert read(tmp_path) == [*RECORDS[:4], b"later"]


def test_frames_that_changed_places_are_missing_or_repeated_are_damage(tmp_path: Path) -> None:
    ends = frame_ends(tmp_path, SMALL)
    path = written(tmp_path)
    whole = path.read_bytes()
    head = whole[: ends[0]]
    frames = [whole[begin:end] for begin, end in itertools.pairwise(ends)]
    for order in itertools.product(range(len(frames)), repeat=len(frames)):
        if order == (0, 1, 2, 3):
            continue
        path.write_bytes(head + b"".join(frames[each] for each in order))
        with pytest.raises(JournalDamagedError, match=r"has record \d where record \d was expected"):
            read(tmp_path)
    for count in (1, 2, 3):
        path.write_bytes(head + b"".join(frames[count:]))
        with pytest.raises(JournalDamagedError, match=rf"has record {2 + count} where record 2 was expected"):
            read(tmp_path)
    path.write_bytes(whole)
    assert read(tmp_path) == SMALL


def several(directory: Path) -> list[int]:
    for number in range(4):
        write(directory, [b"%d" % number])
    return segment_numbers(directory)


def test_a_missing_segment_is_damage(tmp_path: Path) -> None:
    numbers = several(tmp_path / "journal")
    for missing, number in enumerate(numbers):
        directory = tmp_path / f"without-{number}"
        copy(tmp_path / "journal", directory)
        segment_path(directory, number).unlink()
        with pytest.raises(JournalDamagedError, match=r"next file begins|no snapshot contains the|announces it"):
            read(directory)
        assert read(directory, accept_loss=True) == [b"%d" % each for each in range(missing)]
        assert read(directory) == [b"%d" % each for each in range(missing)]


def test_segments_that_changed_places_are_damage(tmp_path: Path) -> None:
    numbers = several(tmp_path / "journal")
    for one, other in itertools.combinations(numbers, 2):
        directory = tmp_path / f"{one}-{other}"
        copy(tmp_path / "journal", directory)
        here, there = segment_path(directory, one), segment_path(directory, other)
        here.rename(directory / "between")
        there.rename(here)
        (directory / "between").rename(there)
        with pytest.raises(
            JournalDamagedError, match=rf"{one:012d}.tqj has record {other} where record {one} was expected"
        ):
            read(directory)


def test_a_segment_that_ends_early_is_damage_where_another_follows(tmp_path: Path) -> None:
    several(tmp_path)
    path = segment_path(tmp_path, 1)
    whole = path.read_bytes()
    for size in range(len(whole) - 24):
        path.write_bytes(whole[:size])
        with pytest.raises(JournalDamagedError, match=path.name):
            read(tmp_path)


def test_what_follows_a_closing_takes_nothing_away_and_is_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    several(tmp_path)
    with segment_path(tmp_path, 1).open("ab") as file:
        file.write(b"more")
    assert read(tmp_path) == [b"0", b"1", b"2", b"3"]
    assert "file=journal-000000000001.tqj bytes=28 after_record=2" in caplog.text


def test_a_missing_beginning_is_damage(tmp_path: Path) -> None:
    write(tmp_path, [b"0"])
    write(tmp_path, [b"1"])
    segment_path(tmp_path, 1).unlink()
    with pytest.raises(JournalDamagedError, match="no snapshot contains the earlier records"):
        read(tmp_path)


def test_a_file_that_is_no_segment_is_damage(tmp_path: Path) -> None:
    write(tmp_path, RECORDS)
    path = segment_path(tmp_path, 1)
    path.write_bytes(b"no segment at all" * 1000)
    with pytest.raises(JournalDamagedError, match="does not begin with the signature of a journal file"):
        read(tmp_path)
    assert read(tmp_path, accept_loss=True) == []
    assert path.with_name(path.name + ".lost").exists()
    write(tmp_path, [b"again"])
    assert read(tmp_path) == [b"again"]


def test_what_the_disk_cannot_read_is_damage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, RECORDS)
    real = Path.open

    class Unreadable:
        def __enter__(self) -> "Unreadable":
            return self

        def __exit__(self, *_: object) -> None:
            pass

        def seek(self, _: int) -> None:
            pass

        def read(self, _: int) -> bytes:
            raise OSError(5, "Input/output error")

    with monkeypatch.context() as failing:
        failing.setattr(Path, "open", lambda path, *rest: Unreadable() if path.suffix == ".tqj" else real(path, *rest))
        with pytest.raises(JournalDamagedError, match=r"cannot be read .*Input/output error"):
            read(tmp_path)
    assert read(tmp_path) == RECORDS


def test_a_kill_during_recovery_changes_nothing(killed: Path, tmp_path: Path) -> None:
    journal = Log(FileBackend(killed, sync=False))
    records = journal.read(0)
    assert next(records).data == RECORDS[0]
    copy(killed, tmp_path / "again", journal)
    assert [record.data for record in records] == RECORDS[1:]
    journal.close()
    assert read(tmp_path / "again") == RECORDS


def test_a_loss_of_power_is_logged_once_and_what_is_found_then_stays(
    killed: Path, reboot: Callable[[], None], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    reboot()
    truncate(written(killed), ENDS[5] + 7)
    write(killed, [b"later"])
    assert len(caplog.records) == 1
    assert read(killed) == [*RECORDS[:5], b"later"]
    assert len(caplog.records) == 1
