"""Starts, monitors and ends the processes of a run together."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType

from tq_service.errors import TqError
from tq_service.testing import ServiceProcess

_ROOT = Path(__file__).parents[2]
_STOP_SECONDS = 5.0
_TAIL_LINES = 25


class ProcessFailedError(TqError, RuntimeError):
    """A process of the run ended with an error; the message contains the end of its log."""

    reason = "PROCESS_FAILED"


class ProcessGroup:
    """The processes of one run; leaving the context ends all remaining ones.

    The output of each process goes to `<logs>/<name>.log`. Each process has its own session, so Ctrl-C reaches only the
    demo. The demo then ends the processes in order: workers first, the service last.

    Args:
        logs: directory of the logs.
        env: environment of the workers, or None for the environment of this process.
    """

    def __init__(self, logs: Path, env: Mapping[str, str] | None = None) -> None:
        self._logs = logs
        self._env = env
        self._service: ServiceProcess | None = None
        self._workers: dict[str, subprocess.Popen[bytes]] = {}
        logs.mkdir(parents=True, exist_ok=True)
        for log in logs.glob("*.log"):
            log.unlink()

    def __enter__(self) -> ProcessGroup:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop()

    def start_service(self, data_dir: Path, record: Path | None = None) -> str:
        """Start a service on a free port of this host, and return its address.

        Args:
            data_dir: directory of the service's durable state.
            record: directory for recorded batches of the trainer ranks, or None to record nothing.

        Raises:
            UnavailableError: the service ended before it listened, or did not listen in time.
        """
        flags = () if record is None else ("--record", str(record))
        self._service = ServiceProcess(
            *flags, data_dir=data_dir, log=self._log("service"), start_new_session=True, stop_timeout=_STOP_SECONDS
        )
        self._service.start()
        return self._service.address

    @property
    def has_service(self) -> bool:
        """Whether the service is one of these processes."""
        return self._service is not None

    def kill_service(self) -> None:
        """Kill the service (SIGKILL)."""
        if self._service is not None:
            self._service.kill()

    def restart_service(self) -> None:
        """Restart the killed service on the same port, with the same directory."""
        if self._service is not None:
            self._service.start()

    def kill_role(self, role: str, index: int) -> None:
        """Kill a worker (SIGKILL); `start_role` starts a replacement."""
        worker = self._workers.pop(f"{role}_{index}")
        worker.kill()
        worker.wait()
        if worker.stdin:
            worker.stdin.close()

    def pause_role(self, role: str, index: int) -> None:
        """Pause a worker (SIGSTOP) until `resume_role` or `kill_role`; returns when it has stopped."""
        worker = self._workers[f"{role}_{index}"]
        worker.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, worker.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)

    def resume_role(self, role: str, index: int) -> None:
        """Resume a paused worker."""
        self._workers[f"{role}_{index}"].send_signal(signal.SIGCONT)

    def start_role(self, role: str, index: int, settings_file: Path) -> None:
        """Start `python -m examples.demo.<role>` under the name `<role>_<index>`."""
        name = f"{role}_{index}"
        with self._log(name).open("ab") as log:
            self._workers[name] = subprocess.Popen(
                [sys.executable, "-m", f"examples.demo.{role}", str(settings_file), str(index)],
                cwd=_ROOT,
                env=self._env,
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def check(self) -> None:
        """Raise ProcessFailedError if processes failed or the service ended."""
        codes = {name: worker.poll() for name, worker in self._workers.items()}
        failed = {name: code for name, code in codes.items() if code}
        if self._service is not None and self._service.exit_code is not None:
            failed["service"] = self._service.exit_code
        if failed:
            raise ProcessFailedError("\n".join(self._describe(name, code) for name, code in failed.items()))

    def running(self, role: str) -> bool:
        """Whether a process of the role is still running."""
        return any(worker.poll() is None for name, worker in self._workers.items() if name.startswith(f"{role}_"))

    def wait_for_workers(self, seconds: float) -> None:
        """Wait up to `seconds` until the workers have ended."""
        give_up = time.monotonic() + seconds
        for worker in self._workers.values():
            try:
                worker.wait(max(0.0, give_up - time.monotonic()))
            except subprocess.TimeoutExpired:
                return

    def stop(self) -> None:
        """End all processes, workers first, the service last; kill those that do not end in time."""
        _end(list(self._workers.values()))
        self._workers.clear()
        if self._service is not None:
            self._service.stop()
            self._service = None

    def _log(self, name: str) -> Path:
        return self._logs / f"{name}.log"

    def _describe(self, name: str, code: int) -> str:
        lines = self._log(name).read_text(encoding="utf-8", errors="replace").splitlines()
        end = "\n".join(f"  | {line}" for line in lines[-_TAIL_LINES:]) or "  | (it printed nothing)"
        return f"{name} ended with exit code {code}; {self._log(name)} ends with:\n{end}"


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
