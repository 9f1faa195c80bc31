"""A data directory belongs to one process, keeps its identity, and says what is wrong with it."""

import itertools
import json
import os
import stat
from dataclasses import replace
from pathlib import Path

import pytest
from journal_support import commit_each, replayed
from open_files import open_files

from tq_service.durable.data_dir import FORMAT_VERSION, DataDir, new_identity, read_identity, write_identity
from tq_service.errors import DataDirError
from tq_service.journal.files import FileBackend, quarantine, segment_numbers, snapshot_numbers, snapshot_path
from tq_service.journal.log import Log


def test_the_identity_stays(tmp_path: Path) -> None:
    first = DataDir.open(tmp_path / "data")
    first.close()
    again = DataDir.open(tmp_path / "data")
    again.close()
    other = DataDir.open(tmp_path / "other")
    other.close()
    assert again.identity == first.identity
    assert len({first.identity.controller_boot_id, first.identity.storage_boot_id, other.identity.storage_boot_id}) == 3
    assert {len(first.identity.controller_boot_id), len(first.identity.storage_boot_id)} == {16}


def test_a_new_directory_is_for_its_owner_alone(tmp_path: Path) -> None:
    data_dir = DataDir.open(tmp_path / "some" / "data")
    assert stat.S_IMODE((tmp_path / "some" / "data").stat().st_mode) == 0o700
    assert data_dir.segments_path.is_dir()
    assert snapshot_path(data_dir.path, 12) == tmp_path / "some" / "data" / "snapshot-000000000012.tqs"
    data_dir.close()


def test_the_name_of_a_new_directory_survives_a_loss_of_power(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[Path] = []
    fsync = os.fsync

    def noted(descriptor: int) -> None:
        synced.append(Path(f"/proc/self/fd/{descriptor}").readlink())
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", noted)
    DataDir.open(tmp_path / "some" / "data").close()
    assert {tmp_path, tmp_path / "some", tmp_path / "some" / "data"} <= set(synced)


def test_its_journal_is_found_again(tmp_path: Path) -> None:
    for expected in ([], [b"record"]):
        data_dir = DataDir.open(tmp_path)
        journal = Log(FileBackend(tmp_path, sync=False))
        assert replayed(journal) == expected
        commit_each(journal, [b"record"])
        journal.close()
        data_dir.close()


def test_a_snapshot_that_was_being_written_is_removed(tmp_path: Path) -> None:
    unfinished = tmp_path / "snapshot-000000000002.tqs.partial"
    unfinished.write_bytes(bytes(1000))
    DataDir.open(tmp_path).close()
    assert not unfinished.exists()


def test_what_no_start_needs_is_removed(tmp_path: Path) -> None:
    data_dir = DataDir.open(tmp_path)
    journal = Log(FileBackend(tmp_path, sync=False))
    assert replayed(journal) == []
    numbers = []
    for number in range(3):
        commit_each(journal, [b"%d" % number])
        numbers.append(journal.rotate())
        journal.flush()
        snapshot_path(tmp_path, numbers[-1]).touch()
        data_dir.remove_unneeded(journal.backend, numbers[-1])
    assert snapshot_numbers(tmp_path) == numbers[-2:]
    assert segment_numbers(tmp_path) == numbers[-2:]
    quarantine(snapshot_path(tmp_path, numbers[-1]), ".damaged")
    assert snapshot_numbers(tmp_path) == numbers[-2:-1]
    journal.close()
    data_dir.close()


def test_a_second_opening_is_refused_until_the_first_is_closed(tmp_path: Path) -> None:
    before = open_files()
    data_dir = DataDir.open(tmp_path)
    for _ in range(2):
        with pytest.raises(
            DataDirError, match=rf"{tmp_path} is in use by process {os.getpid()} on .*\. Stop that process first"
        ):
            DataDir.open(tmp_path)
    data_dir.close()
    data_dir.close()
    DataDir.open(tmp_path).close()
    assert open_files() <= before


def test_a_later_format_is_refused_with_both_versions(tmp_path: Path) -> None:
    DataDir.open(tmp_path).close()
    path = tmp_path / "identity.json"
    values = json.loads(path.read_text())
    path.write_text(json.dumps({**values, "format_version": FORMAT_VERSION + 1}))
    with pytest.raises(DataDirError, match=f"has format {FORMAT_VERSION + 1}, .* formats up to {FORMAT_VERSION}"):
        DataDir.open(tmp_path)
    path.write_text(json.dumps(values))
    DataDir.open(tmp_path).close()  # the refused one has let go of the lock


def test_an_earlier_format_is_refused_and_not_taken_for_an_empty_directory(tmp_path: Path) -> None:
    DataDir.open(tmp_path).close()
    path = tmp_path / "identity.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "format_version": FORMAT_VERSION - 1}))
    with pytest.raises(DataDirError, match=f"has format {FORMAT_VERSION - 1}, which this version .* longer supports"):
        DataDir.open(tmp_path)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "null",
        "{}",
        '{"format_version": "one"}',
        '{"format_version": 4, "controller_boot_id": "00", "storage_boot_id": "00"}',
        '{"format_version": 4, "controller_boot_id": 7, "storage_boot_id": "00"}',
        '{"format_version": 4, "controller_boot_id": "no hex", "storage_boot_id": "00"}',
        b"\xff\xfe",
    ],
)
def test_a_damaged_identity_is_refused(tmp_path: Path, text: str | bytes) -> None:
    path = tmp_path / "identity.json"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(DataDirError, match=r"could not read .*identity\.json: "):
        DataDir.open(tmp_path)


def test_an_identity_with_a_flipped_bit_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "identity.json"
    write_identity(path, replace(new_identity(), storage_id="storage-0"))
    identity, whole = read_identity(path), path.read_bytes()
    for place, bit in itertools.product(range(len(whole)), range(8)):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 1 << bit]) + whole[place + 1 :])
        try:
            assert read_identity(path) == identity  # of letters that say nothing, such as a blank that became a tab
        except DataDirError:
            continue


def test_a_lost_identity_is_not_made_up(tmp_path: Path) -> None:
    data_dir = DataDir.open(tmp_path)
    journal = Log(FileBackend(tmp_path, sync=False))
    assert replayed(journal) == []
    journal.close()
    data_dir.close()
    (tmp_path / "identity.json").unlink()
    with pytest.raises(DataDirError, match=r"contains a journal or snapshots, but not identity\.json"):
        DataDir.open(tmp_path)


def test_an_identity_is_replaced_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "identity.json"
    first, second = new_identity(), new_identity()
    write_identity(path, first)

    def fail(_: int) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched, pytest.raises(OSError, match="No space"):
        patched.setattr("tq_service.durable.data_dir.os.fsync", fail)
        write_identity(path, second)
    assert read_identity(path) == first
    write_identity(path, second)
    assert read_identity(path) == second


def test_a_place_that_cannot_be_written_to_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(DataDirError, match=r"could not use .*: .* Use a directory that this user can write to"):
        DataDir.open(tmp_path / "file")
    with pytest.raises(DataDirError, match=r"could not use .*: Not a directory"):
        DataDir.open(tmp_path / "file" / "data")
