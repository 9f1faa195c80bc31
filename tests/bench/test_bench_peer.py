from __future__ import annotations

from pathlib import Path

import psutil
import pytest

from benchmarks.harness import Options
from benchmarks.peer import peer, program
from benchmarks.peer_environment import PeerEnvironment

PROGRAM = """
import os
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from pathlib import Path
from benchmarks.peer_program import serve

def linger():
    threading.Thread(target=time.sleep, args=(600,)).start()
    return subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]).pid

def fail():
    raise ValueError("no such thing")

@contextmanager
def started():
    print("starting")
    yield {
        "double": lambda number: 2 * number,
        "variable": lambda: os.environ["COLOUR"],
        "chat": lambda: print("not an answer"),
        "fail": fail,
        "linger": linger,
        "leave": lambda: os._exit(3),
        "versions": lambda: {"numpy": "1.0"},
    }
    Path(os.environ["STOPPED"]).write_text("in good order")

serve(started())
"""


@pytest.fixture
def variables(tmp_path: Path) -> dict[str, str]:
    (tmp_path / "little_program.py").write_text(PROGRAM)
    return {"PYTHONPATH": str(tmp_path), "COLOUR": "red", "STOPPED": str(tmp_path / "stopped")}


class FakeEnvironment(PeerEnvironment):
    def python(self) -> Path:
        raise RuntimeError("no index can be reached")


def test_a_program_answers_and_leaves_in_good_order(variables: dict[str, str]) -> None:
    with program("little_program", variables=variables) as running:
        assert running.ask("double", number=21) == 42
        assert running.ask("variable") == "red"
    assert Path(variables["STOPPED"]).read_text() == "in good order"


def test_what_a_program_prints_is_not_taken_for_an_answer(variables: dict[str, str]) -> None:
    with program("little_program", variables=variables) as running:
        assert running.ask("chat") is None
        assert running.ask("double", number=1) == 2


def test_an_error_of_a_command_is_raised_here_and_the_program_goes_on(variables: dict[str, str]) -> None:
    with program("little_program", variables=variables) as running:
        with pytest.raises(RuntimeError, match="no such thing"):
            running.ask("fail")
        assert running.ask("double", number=2) == 4


def test_a_program_that_ends_is_told(variables: dict[str, str]) -> None:
    with program("little_program", variables=variables) as running:
        with pytest.raises(RuntimeError, match="exit code 3"):
            running.ask("leave")
        with pytest.raises(RuntimeError, match="exit code 3"):
            running.ask("double", number=2)


def test_a_program_that_does_not_stop_is_killed_with_all_it_started(
    variables: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("benchmarks.peer._STOP_SECONDS", 0.5)
    with program("little_program", variables=variables) as running:
        child = psutil.Process(running.ask("linger"))
        program_itself = child.parent()
    assert program_itself is not None
    assert not program_itself.is_running()
    child.wait(timeout=10)


def test_a_peer_that_cannot_be_installed_is_absent_and_told(capsys: pytest.CaptureFixture[str]) -> None:
    with peer(FakeEnvironment(name="Ray", requirements=()), "little_program", Options()) as absent:
        assert not absent.is_there
        assert absent.absent == ["Ray"]
        assert absent.notes == ["Ray was left out or could not be installed: not measured"]
        with pytest.raises(RuntimeError, match="Ray is not available"):
            absent.ask("versions")
    assert "without Ray: no index can be reached" in capsys.readouterr().err


def test_a_peer_that_is_left_out_is_not_installed(capsys: pytest.CaptureFixture[str]) -> None:
    options = Options(without=frozenset({"Ray"}))
    with peer(FakeEnvironment(name="Ray", requirements=()), "little_program", options) as absent:
        assert absent.absent == ["Ray"]
    assert capsys.readouterr().err == ""
