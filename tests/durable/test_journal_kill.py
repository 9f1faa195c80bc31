"""A process is killed at any moment: what it said to be durable is there, in order, and nothing that it never wrote."""

import random
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from journal_support import copy, read
from journal_writer import record

from tq_service.durable.data_dir import DataDir
from tq_service.errors import DataDirError

WRITER = Path(__file__).with_name("journal_writer.py")
ROUNDS = 4


def start(directory: Path, mode: str, first: int) -> subprocess.Popen[str]:
    command = [sys.executable, str(WRITER), str(directory), mode, str(first), "200000"]
    writer = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert line_of(writer) == "ready\n"
    return writer


def line_of(writer: subprocess.Popen[str]) -> str:
    assert writer.stdout is not None
    return writer.stdout.readline()


def kill(writer: subprocess.Popen[str], acknowledged: int) -> int:
    """Kill the writer; return the last of what it has acknowledged."""
    writer.kill()
    assert writer.stdout is not None
    for line in writer.stdout:
        if line.endswith("\n"):
            acknowledged = int(line)
    writer.stdout.close()
    writer.wait()
    return acknowledged


@pytest.mark.parametrize("mode", ["process", "disk"])
def test_what_was_acknowledged_survives_a_kill_at_any_moment(tmp_path: Path, mode: str) -> None:
    rng = random.Random(mode)
    there = 0
    for _ in range(ROUNDS):
        writer = start(tmp_path / "data", mode, there)
        acknowledged = there
        for _ in range(rng.randrange(120)):
            acknowledged = int(line_of(writer))
        acknowledged = kill(writer, acknowledged)
        copy(tmp_path / "data", tmp_path / "image")
        found = read(tmp_path / "image", 0)
        assert len(found) >= acknowledged
        assert found == [record(number) for number in range(len(found))]
        shutil.rmtree(tmp_path / "image")
        there = len(found)
    assert there > 0
    assert len(list((tmp_path / "data").glob("journal-*.tqj"))) > ROUNDS  # segments became full in between


def test_a_running_service_has_its_directory_for_itself(tmp_path: Path) -> None:
    writer = start(tmp_path, "process", 0)
    try:
        with pytest.raises(DataDirError, match=rf"{tmp_path} is in use by process {writer.pid} on "):
            DataDir.open(tmp_path)
    finally:
        kill(writer, 0)
    data_dir = DataDir.open(tmp_path)
    data_dir.close()
