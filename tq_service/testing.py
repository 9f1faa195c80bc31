"""Services as processes of their own: for tests, and for programs that need a service for a while."""

from __future__ import annotations

import os
import re
import selectors
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Final, Self

from tq_service.errors import UnavailableError

COMMAND: Final = (sys.executable, "-m", "tq_service.cli")
"""Runs the command line `tq-service` of this environment."""

_LISTENING: Final = re.compile(rb"listening on (\S+)\s")
_READ_BYTES: Final = 4096
_TAIL_LINES: Final = 25
_STOP_SECONDS: Final = 30.0  # longer than the 15 s that a service gives its calls to finish


class ListeningProcess:
    """A program that prints a line with "listening on host:port" once it can be reached.

    A `with` block starts it, waits for that line, and stops it at the end of the block:

        start ... stop | kill -> start ...

    Not for several threads at once. A thread of its own reads and drops the rest of the program's stdout, so that a
    program that prints more than a pipe holds does not stop.

    Args:
        command: the program and its arguments.
        env: its environment; None: that of this process.
        cwd: the directory it runs in; None: that of this process.
        log: file to which its stderr is appended; None: it goes to the stderr of this process.
        start_new_session: whether signals of the terminal, such as that of Ctrl-C, are to reach this process only,
            which then decides when the other one ends.
        start_seconds: how long it may take to listen.
        stop_seconds: how long it may take to end after SIGTERM before it is killed.
    """

    _stdin: int = subprocess.DEVNULL

    def __init__(
        self,
        command: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        cwd: Path | None = None,
        log: Path | None = None,
        start_new_session: bool = False,
        start_seconds: float = 60.0,
        stop_seconds: float = _STOP_SECONDS,
    ) -> None:
        self.command = tuple(command)
        self._env = env
        self._cwd = cwd
        self._log = log
        self._start_new_session = start_new_session
        self._start_seconds = start_seconds
        self._stop_seconds = stop_seconds
        self._process: subprocess.Popen[bytes] | None = None
        self._address = ""

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._process is not None:
            self.stop()

    def start(self) -> None:
        """Start the program and wait until it listens.

        Raises:
            RuntimeError: it runs already.
            UnavailableError: it has ended, or does not listen in time; it is not left behind.
        """
        if self._process is not None and self.exit_code is None:
            raise RuntimeError(f"process {self.pid} runs already; stop or kill it before it is started again")
        log = None if self._log is None else self._log.open("ab")
        try:
            self._process = subprocess.Popen(
                self.command,
                stdin=self._stdin,
                stdout=subprocess.PIPE,
                stderr=log,
                env=self._env,
                cwd=self._cwd,
                start_new_session=self._start_new_session,
            )
        finally:
            if log is not None:
                log.close()
        try:
            self._address = self._wait_until_listening(self._process)
        except BaseException:
            self.kill()
            if self._process.stdout is not None:
                self._process.stdout.close()
            raise
        threading.Thread(target=_drain, args=(self._process,), daemon=True).start()

    def _wait_until_listening(self, process: subprocess.Popen[bytes]) -> str:
        assert process.stdout is not None  # noqa: S101  (Popen was asked to make it)
        give_up_at, said = time.monotonic() + self._start_seconds, b""
        with selectors.DefaultSelector() as selector:
            selector.register(process.stdout, selectors.EVENT_READ)
            while (match := _LISTENING.search(said)) is None:
                if not selector.select(max(0.0, give_up_at - time.monotonic())):
                    raise self._unavailable(f"does not listen after {self._start_seconds:g} s")
                part = os.read(process.stdout.fileno(), _READ_BYTES)
                if not part:
                    raise self._unavailable(f"ended with exit code {process.wait()} before it listened")
                said += part
        return match[1].decode()

    def _unavailable(self, what: str) -> UnavailableError:
        log = "its log is above"
        if self._log is not None:
            lines = self.read_log().splitlines()[-_TAIL_LINES:]
            log = "\n".join([f"{self._log} ends with:", *(f"  | {line}" for line in lines)])
        return UnavailableError(f"{' '.join(self.command)} {what}; {log}")

    @property
    def address(self) -> str:
        """Where it listens, "host:port"; "" before the first start."""
        return self._address

    @property
    def port(self) -> int:
        """The port it listens on."""
        return int(self._address.rpartition(":")[2])

    @property
    def process(self) -> subprocess.Popen[bytes]:
        """The process that was started last.

        Raises:
            RuntimeError: none was started.
        """
        if self._process is None:
            raise RuntimeError("it has not been started; use it in a `with` statement, or call start() first")
        return self._process

    @property
    def pid(self) -> int:
        """The id of the process that was started last."""
        return self.process.pid

    @property
    def exit_code(self) -> int | None:
        """The code with which it ended, the negative number of the signal that killed it, None while it runs."""
        return self.process.poll()

    def read_log(self) -> str:
        """Return what it has written to its log so far.

        Raises:
            ValueError: it has no log of its own.
        """
        if self._log is None:
            raise ValueError("got no log, expected the path of a file; give log=")
        return self._log.read_text(encoding="utf-8", errors="replace")

    def send_signal(self, number: signal.Signals) -> None:
        """Send it a signal, unless it has ended."""
        self.process.send_signal(number)

    def wait(self, timeout: float | None = None) -> int:
        """Wait until it has ended and return its exit code.

        Args:
            timeout: seconds to wait at most; None: for ever.

        Raises:
            subprocess.TimeoutExpired: it still runs.
        """
        code = self.process.wait(timeout)
        if self.process.stdin is not None:
            self.process.stdin.close()
        return code

    def stop(self) -> int:
        """End it by SIGTERM, and by SIGKILL where that takes too long; return its exit code."""
        self.send_signal(signal.SIGTERM)
        try:
            return self.wait(self._stop_seconds)
        except subprocess.TimeoutExpired:
            return self.kill()

    def kill(self) -> int:
        """Kill it, unless it has ended; return its exit code."""
        self.send_signal(signal.SIGKILL)
        return self.wait()


def _drain(process: subprocess.Popen[bytes]) -> None:
    """Read and drop what a program prints, until it and whatever has its stdout have ended."""
    assert process.stdout is not None  # noqa: S101  (Popen was asked to make it)
    with process.stdout as stdout:
        while os.read(stdout.fileno(), _READ_BYTES):
            pass


class ServiceProcess(ListeningProcess):
    """`tq-service serve` as a process of its own, on a free port of this machine's loopback address.

        with ServiceProcess("--max-bytes", "1GiB") as service, tq.Client(service.address) as client:
            ...

    It keeps its port when it is started again, and ends with this process, however that ends. It ignores settings in
    the environment (`TQ_*`).

    Args:
        *flags: of `tq-service serve`.
        data_dir: directory in which the service keeps its state; None: it is gone when the service ends.
        env: variables that are added to its environment.
        command: what runs the command line.
        cwd: the directory it runs in; None: that of this process.
        log: file to which its log is appended; None: it goes to the stderr of this process.
        start_new_session: see `ListeningProcess`.
        start_seconds: how long it may take to listen.
        stop_seconds: how long it may take to end after SIGTERM before it is killed.
    """

    # It reads its end of this pipe. The other end closes with this process, also if that is killed.
    _stdin = subprocess.PIPE

    def __init__(
        self,
        *flags: str,
        data_dir: Path | None = None,
        env: Mapping[str, str] | None = None,
        command: Sequence[str] = COMMAND,
        cwd: Path | None = None,
        log: Path | None = None,
        start_new_session: bool = False,
        start_seconds: float = 60.0,
        stop_seconds: float = _STOP_SECONDS,
    ) -> None:
        where = ["--host", "127.0.0.1", "--port", "0"]
        kept = [] if data_dir is None else ["--data-dir", str(data_dir)]
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("TQ_")}
        super().__init__(
            [*command, "serve", "--stop-with-stdin", *where, "--log-level", "warning", *kept, *flags],
            env={**inherited, **(env or {})},
            cwd=cwd,
            log=log,
            start_new_session=start_new_session,
            start_seconds=start_seconds,
            stop_seconds=stop_seconds,
        )

    def start(self) -> None:
        """Start the service and wait until it listens; after the first time on the same port.

        Raises:
            RuntimeError: it runs already.
            UnavailableError: it has ended, or does not listen in time; it is not left behind.
        """
        is_first = not self.address
        super().start()
        if is_first:
            self.command = (*self.command, "--port", str(self.port))

    def restart(self) -> None:
        """Kill it, unless it has ended, and start it again."""
        self.kill()
        self.start()
