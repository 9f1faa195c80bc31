"""The version names the commit: that of a clone, of a worktree, or of the wheel that was built."""

from __future__ import annotations

import subprocess
import zipfile
from pathlib import Path

import pytest
from hatchling import build

from tq_service.version import COMMIT, VERSION, _head_of

ROOT = Path(__file__).parents[1]


def git(directory: Path, *arguments: str) -> str:
    identity = ["-c", "user.name=t", "-c", "user.email=t@t"]
    run = subprocess.run(["git", "-C", directory, *identity, *arguments], capture_output=True, text=True, check=True)
    return run.stdout.strip()


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    git(tmp_path, "init", "--quiet", "--initial-branch", "main", "clone")
    git(tmp_path / "clone", "commit", "--quiet", "--allow-empty", "--message", "first")
    return tmp_path / "clone"


def test_the_commit_of_a_clone_is_found_however_git_stores_it(clone: Path, tmp_path: Path) -> None:
    commit = git(clone, "rev-parse", "HEAD")
    assert _head_of(clone) == commit
    git(clone, "pack-refs", "--all")
    assert _head_of(clone) == commit
    git(clone, "worktree", "add", "--quiet", "-b", "side", tmp_path / "side")
    git(tmp_path / "side", "commit", "--quiet", "--allow-empty", "--message", "second")
    assert _head_of(tmp_path / "side") == git(tmp_path / "side", "rev-parse", "HEAD") != commit
    git(clone, "checkout", "--quiet", "--detach")
    assert _head_of(clone) == commit


def test_what_is_not_a_clone_has_no_commit(tmp_path: Path) -> None:
    with pytest.raises(OSError):
        _head_of(tmp_path)


def test_this_tree_has_the_commit_that_git_shows() -> None:
    if not (ROOT / ".git").exists():
        pytest.skip("this tree is not a clone")
    assert git(ROOT, "rev-parse", "HEAD").startswith(COMMIT)
    assert COMMIT


def test_a_wheel_has_the_commit_it_was_built_from(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("TQ_COMMIT", "c0ffee")
    with zipfile.ZipFile(tmp_path / build.build_wheel(str(tmp_path))) as wheel:
        assert wheel.read("tq_service/COMMIT") == b"c0ffee\n"
        assert f"tq_service-{VERSION}.dist-info/METADATA" in wheel.namelist()
