"""The processes of a run: started together, watched together, ended together."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

from tq_service.errors import TqError, UnavailableError

_LISTENING = re.compile(r"listening on (\S+)")
_START_SECONDS = 30.0
_STOP_SECONDS = 5.0
_POLL_SECONDS = 0.05
_TAIL_LINES = 25
_SERVICE = "service"


class ProcessFailedError(TqError, RuntimeError):
    """A process of the run ended with an error; the message has the end of its log."""

    reason = "PROCESS_FAILED"


class Crew:
    """The processes of one run; leaving the context ends all that are left.

    Each writes what it prints to `<logs>/<name>.log`. They are in sessions of their own, so that Ctrl-C reaches the
    demo only, which ends them in order: workers first, the service last.
    """

    def __init__(self, logs: Path) -> None:
        self._logs = logs
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        logs.mkdir(parents=True, exist_ok=True)

    def __enter__(self) -> Crew:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop()

    def start_service(self) -> str:
        """Start a service on a free port of this host, and return its address.

        Raises:
            ProcessFailedError: it ended before it listened.
            UnavailableError: it did not listen in time.
        """
        self._start(
            _SERVICE, ["tq_service.cli", "serve", "--host", "127.0.0.1", "--port", "0", "--log-level", "warning"]
        )
        give_up = time.monotonic() + _START_SECONDS
        while time.monotonic() < give_up:
            if match := _LISTENING.search(self._log(_SERVICE).read_text(encoding="utf-8")):
                return match[1]
            self.check()
            time.sleep(_POLL_SECONDS)
        raise UnavailableError(f"the service did not listen within {_START_SECONDS:g} s; see {self._log(_SERVICE)}")

    def start_role(self, role: str, index: int, settings_file: Path) -> None:
        """Start `python -m tq_service.demo.<role>` under the name `<role>_<index>`."""
        self._start(f"{role}_{index}", [f"tq_service.demo.{role}", str(settings_file), str(index)])

    def check(self) -> None:
        """Raise ProcessFailedError for processes that failed, and for a service that is gone."""
        failed = [
            name
            for name, process in self._processes.items()
            if process.poll() not in (None, 0) or (name == _SERVICE and process.poll() is not None)
        ]
        if failed:
            raise ProcessFailedError("\n".join(self._describe(name) for name in failed))

    def running(self, role: str) -> bool:
        """Whether a process of the role is still at work."""
        return any(process.poll() is None for name, process in self._processes.items() if name.startswith(f"{role}_"))

    def wait_for_workers(self, seconds: float) -> None:
        """Let the workers, all but the service, end by themselves; stop waiting after `seconds`."""
        give_up = time.monotonic() + seconds
        for name, process in self._processes.items():
            if name != _SERVICE:
                try:
                    process.wait(max(0.0, give_up - time.monotonic()))
                except subprocess.TimeoutExpired:
                    return

    def stop(self) -> None:
        """End all processes: workers first, the service last; those that do not end are killed."""
        workers = [process for name, process in self._processes.items() if name != _SERVICE]
        services = [process for name, process in self._processes.items() if name == _SERVICE]
        for processes in (workers, services):
            _end(processes)
        self._processes.clear()

    def _start(self, name: str, module_and_arguments: Sequence[str]) -> None:
        with self._log(name).open("wb") as log:
            self._processes[name] = subprocess.Popen(
                [sys.executable, "-m", *module_and_arguments],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def _log(self, name: str) -> Path:
        return self._logs / f"{name}.log"

    def _describe(self, name: str) -> str:
        lines = self._log(name).read_text(encoding="utf-8", errors="replace").splitlines()
        end = "\n".join(f"  | {line}" for line in lines[-_TAIL_LINES:]) or "  | (it printed nothing)"
        return f"{name} ended with exit code {self._processes[name].returncode}; {self._log(name)} ends with:\n{end}"


def _end(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    for process in processes:
        process.terminate()
    give_up = time.monotonic() + _STOP_SECONDS
    for process in processes:
        try:
            process.wait(max(0.0, give_up - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        if process.stdin:
            process.stdin.close()
