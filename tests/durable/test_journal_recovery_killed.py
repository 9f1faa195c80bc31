"""A recovery that is itself killed, at any step that changes files: the next one comes to the same."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from journal_support import commit_each, copy, opened, read, replayed, started_again, write

from tq_service.journal.files import segment_path, snapshot_path


@contextmanager
def copied_at_each_step(directory: Path, images: list[Path]) -> Iterator[None]:
    """Have the directory copied, as a kill would leave it, before all that is done to its files, and in between."""

    def watched(step: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if not is_copying:
                is_copying.append(True)
                images.append(directory.with_name(f"{directory.name}-step-{len(images)}"))
                copy(directory, images[-1])
                is_copying.clear()
            return step(*args, **kwargs)

        return call

    def in_pieces(descriptor: int, parts: list[bytes], at: int) -> int:
        data = b"".join(parts)
        for piece in (data[:5], data[5:-1], data[-1:]):
            at += os.pwrite(descriptor, piece, at)
        return len(data)

    is_copying: list[bool] = []
    with pytest.MonkeyPatch.context() as patched:
        for owner, name in ((Path, "unlink"), (Path, "rename"), (os, "ftruncate"), (os, "pwrite"), (os, "fsync")):
            patched.setattr(owner, name, watched(getattr(owner, name)))
        patched.setattr(os, "pwritev", in_pieces)
        yield


def recovered_and_killed(directory: Path, expected: list[bytes]) -> list[Path]:
    """Recover a journal; return what kills at each step would have left of it."""
    images: list[Path] = []
    with opened(directory) as journal, copied_at_each_step(directory, images):
        assert replayed(journal) == expected
    assert len(images) > 5
    return images


def check_each_kill(image: Path, expected: list[bytes]) -> None:
    for killed in recovered_and_killed(image, expected):
        again = recovered_and_killed(killed, expected)
        for twice in again:
            assert read(twice) == expected
        write(killed, [b"later"])
        assert read(killed) == [*expected, b"later"]


def journal_with_a_snapshot(directory: Path) -> tuple[Path, int, int]:
    """Return a directory with a snapshot, its number, and how much of its segment comes before its last record."""
    with opened(directory / "journal") as journal:
        commit_each(journal, [b"1"])
        number = journal.rotate()
        commit_each(journal, [b"2"])
        size = segment_path(directory / "journal", number).stat().st_size
        commit_each(journal, [b"3" * 5000])
        journal.rotate()
        commit_each(journal, [b"4"])
        copy(directory / "journal", directory / "image", journal)
    snapshot_path(directory / "image", number).touch()
    return directory / "image", number, size


def test_where_nothing_was_lost(tmp_path: Path) -> None:
    image, _, _ = journal_with_a_snapshot(tmp_path)
    check_each_kill(image, [b"2", b"3" * 5000, b"4"])


def test_of_a_new_journal(tmp_path: Path) -> None:
    (tmp_path / "image").mkdir()
    images: list[Path] = []
    with copied_at_each_step(tmp_path / "image", images), opened(tmp_path / "image"):
        pass
    assert len(images) > 5
    for killed in images:
        write(killed, [b"later"])
        assert read(killed) == [b"later"]


def test_where_the_last_record_was_torn(tmp_path: Path) -> None:
    image, number, size = journal_with_a_snapshot(tmp_path)
    for path in sorted(image.glob("journal-*"))[2:]:
        path.unlink()
    with segment_path(image, number).open("r+b") as file:
        file.truncate(size + 100)
    check_each_kill(image, [b"2"])


@pytest.mark.parametrize("end", [0, 100])
def test_where_a_loss_of_power_took_the_end_of_a_segment_that_another_follows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, end: int
) -> None:
    image, number, size = journal_with_a_snapshot(tmp_path)
    with segment_path(image, number).open("r+b") as file:
        file.truncate(size + end)
    started_again(monkeypatch)
    check_each_kill(image, [b"2"])
