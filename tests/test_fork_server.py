"""A forked program behaves as if the interpreter had been started for it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import fork_server
import pytest
from fork_server import ForkedPopen

from tq_service.testing import COMMAND

pytestmark = pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="programs are forked where there are pidfds")
SHOWN = """
import json, os, sys
print(json.dumps({
    "argv": sys.argv, "path": sys.path[0], "name": __name__, "file": globals().get("__file__"), "cwd": os.getcwd(),
    "variable": os.environ.get("TQ_FORKED"), "leads": os.getsid(0) == os.getpid(), "read": sys.stdin.read(),
}))
print("to stderr", file=sys.stderr)
raise SystemExit(3)
"""


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setitem(fork_server._DIRECTORIES, tmp_path, "service")
    path = tmp_path / "program.py"
    path.write_text(SHOWN, encoding="utf-8")
    return path


@pytest.mark.parametrize("leads", [False, True])
def test_it_sees_what_a_program_of_its_own_interpreter_sees(program: Path, tmp_path: Path, leads: bool) -> None:
    seen = []
    for popen in (ForkedPopen, fork_server._Popen):
        process = popen(
            [sys.executable, str(program), "one", "--two"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            cwd=tmp_path, env={**os.environ, "TQ_FORKED": "yes"}, start_new_session=leads,
        )  # fmt: skip
        shown, errors = process.communicate("some input", timeout=60)
        seen.append((json.loads(shown), errors, process.returncode))
        assert (popen is ForkedPopen) == (getattr(process, "_server", None) is not None)
    assert seen[0] == seen[1]
    assert seen[0][1:] == ("to stderr\n", 3)


def test_a_signal_ends_it_and_the_status_names_the_signal() -> None:
    with ForkedPopen([*COMMAND, "serve", "--port", "0"], stdout=subprocess.PIPE) as process:
        assert process._server is not None
        assert process.stdout is not None
        assert b"listening on" in process.stdout.readline()
        assert process.poll() is None
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(0.05)
        process.send_signal(signal.SIGKILL)
        assert process.wait(20) == -signal.SIGKILL
        assert process.poll() == -signal.SIGKILL
    with ForkedPopen([*COMMAND, "serve", "--port", "0"], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        process.terminate()
        assert process.wait(20) == 0


def test_an_error_has_its_traceback_and_code(program: Path) -> None:
    program.write_text("raise RuntimeError('no such luck')", encoding="utf-8")
    with ForkedPopen([sys.executable, str(program)], stderr=subprocess.PIPE, text=True) as process:
        _, errors = process.communicate(timeout=60)
    assert process.returncode == 1
    assert errors.splitlines()[-1] == "RuntimeError: no such luck"


@pytest.mark.parametrize(
    ("command", "environment"),
    [
        ((sys.executable, "-X", "utf8", "-m", "tq_service.cli"), {}),  # flags of the interpreter
        ((sys.executable, "-m", "tq_service.cli"), {"PYTHONHASHSEED": "1"}),
        ((sys.executable, "-c", "import tq_service"), {}),
        ((sys.executable, "-c", "import sys\nimport torch\nprint(sys.modules)"), {}),  # looks at what was imported
        (("true",), {}),
    ],
)
def test_what_only_a_new_interpreter_can_do_is_not_forked(
    command: tuple[str, ...], environment: dict[str, str]
) -> None:
    assert fork_server._server_of(command, {**os.environ, **environment}) is None
    assert fork_server._server_of(COMMAND, None) is not None
