"""Services that run in separate processes, for tests and for programs that need a temporary service."""

from __future__ import annotations

import os
import re
import selectors
import signal
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Final, Self

from tq_service.errors import UnavailableError

COMMAND: Final = (sys.executable, "-m", "tq_service.cli")
"""Command that runs `tq-service` in the current Python environment."""

_LISTENING: Final = re.compile(rb"listening on (\S+)\s")
_READ_BYTES: Final = 4096
_TAIL_LINES: Final = 25
_STOP_SECONDS: Final = 30.0  # longer than the 15 s for which a service waits until its calls have finished


class ListeningProcess:
    """A program that prints a line containing "listening on host:port" as soon as it accepts connections.

    On entry, a `with` block starts the program and waits for this line. On exit, the block stops the program:

        start ... stop | kill -> start ...

    Not thread-safe. A separate thread reads and discards the rest of the program's stdout, so a full pipe never blocks
    the program.

    Args:
        command: path or name of the program, followed by its arguments.
        env: environment of the program. If None, the program inherits the environment of this process.
        cwd: working directory of the program. If None, the working directory of this process is used.
        log: file to which the program's stderr is appended. If None, the stderr of this process is used.
        start_new_session: whether to start the program in a new session. Terminal signals, such as Ctrl-C, then reach
            only this process, which decides when the program stops.
        start_timeout: maximum time in seconds for the program to start listening.
        stop_timeout: time in seconds between SIGTERM and SIGKILL.
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
        start_timeout: float = 60.0,
        stop_timeout: float = _STOP_SECONDS,
    ) -> None:
        self.command = tuple(command)
        self._env = env
        self._cwd = cwd
        self._log = log
        self._start_new_session = start_new_session
        self._start_timeout = start_timeout
        self._stop_timeout = stop_timeout
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
        """Start the program, and wait until it listens on its port.

        Raises:
            RuntimeError: the program is already running.
            UnavailableError: the program exited, or was killed because it did not start listening in time.
        """
        if self._process is not None and self.exit_code is None:
            raise RuntimeError(f"process {self.pid} is already running; stop or kill it before starting it again")
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
        assert process.stdout is not None  # noqa: S101  (Popen created the pipe)
        give_up_at, said = time.monotonic() + self._start_timeout, b""
        with selectors.DefaultSelector() as selector:
            selector.register(process.stdout, selectors.EVENT_READ)
            while (match := _LISTENING.search(said)) is None:
                if not selector.select(max(0.0, give_up_at - time.monotonic())):
                    raise self._unavailable(f"did not start listening within {self._start_timeout:g} s")
                part = os.read(process.stdout.fileno(), _READ_BYTES)
                if not part:
                    raise self._unavailable(f"exited with code {process.wait()} before it started listening")
                said += part
        return match[1].decode()

    def _unavailable(self, what: str) -> UnavailableError:
        log = "see its log above"
        if self._log is not None:
            lines = self.read_log().splitlines()[-_TAIL_LINES:]
            log = "\n".join([f"{self._log} ends with:", *(f"  | {line}" for line in lines)])
        return UnavailableError(f"{' '.join(self.command)} {what}; {log}")

    @property
    def address(self) -> str:
        """The address on which the program listens, as "host:port". The address is empty before the first start."""
        return self._address

    @property
    def port(self) -> int:
        """The port on which the program listens."""
        return int(self._address.rpartition(":")[2])

    @property
    def process(self) -> subprocess.Popen[bytes]:
        """The most recently started process.

        Raises:
            RuntimeError: the program has never been started.
        """
        if self._process is None:
            raise RuntimeError(
                "the program has not been started; use the object in a `with` statement, or call start() first"
            )
        return self._process

    @property
    def pid(self) -> int:
        """The id of the most recently started process."""
        return self.process.pid

    @property
    def exit_code(self) -> int | None:
        """The program's exit code, or the negated signal number if a signal killed the program.

        The code is None while the program is running.
        """
        return self.process.poll()

    def read_log(self) -> str:
        """Return the contents of the program's log file.

        Raises:
            ValueError: the program's log is not written to a file, because `log` is None.
        """
        if self._log is None:
            raise ValueError("the program has no separate log file; set log to a file path")
        return self._log.read_text(encoding="utf-8", errors="replace")

    def send_signal(self, number: signal.Signals) -> None:
        """Send a signal to the program if it is running."""
        self.process.send_signal(number)

    def wait(self, timeout: float | None = None) -> int:
        """Wait until the program exits, and return its exit code.

        Args:
            timeout: maximum number of seconds to wait, or None to wait indefinitely.
        """
        code = self.process.wait(timeout)
        if self.process.stdin is not None:
            self.process.stdin.close()
        return code

    def stop(self) -> int:
        """Stop the program with SIGTERM, or with SIGKILL after `stop_timeout`, and return its exit code."""
        self.send_signal(signal.SIGTERM)
        try:
            return self.wait(self._stop_timeout)
        except subprocess.TimeoutExpired:
            return self.kill()

    def kill(self) -> int:
        """Kill the program if it is running, and return its exit code."""
        self.send_signal(signal.SIGKILL)
        return self.wait()


def _drain(process: subprocess.Popen[bytes]) -> None:
    """Read and discard a program's output until every process with access to its stdout has exited."""
    assert process.stdout is not None  # noqa: S101  (Popen created the pipe)
    with process.stdout as stdout:
        while os.read(stdout.fileno(), _READ_BYTES):
            pass


class ServiceProcess(ListeningProcess):
    """A process that runs `tq-service serve` on a free port of the loopback address.

        with ServiceProcess("--max-bytes", "1GiB") as service, tq.Client(service.address) as client:
            ...

    The service keeps its port across restarts, and stops when this process ends for any reason. The service does not
    inherit settings from environment variables (`TQ_*`).

    Args:
        *flags: command-line flags for `tq-service serve`.
        data_dir: data directory of the service. If None, the state is lost when the service stops.
        env: additional environment variables for the service.
        command: command that runs `tq-service`.
        cwd: working directory of the service. If None, the working directory of this process is used.
        log: file to which the service's log is appended. If None, the stderr of this process is used.
        start_new_session: see `ListeningProcess`.
        start_timeout: maximum time in seconds for the service to start listening.
        stop_timeout: time in seconds between SIGTERM and SIGKILL.
    """

    # The service reads from this pipe. This process holds the write end, which is closed when the process ends, even if
    # it is killed.
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
        start_timeout: float = 60.0,
        stop_timeout: float = _STOP_SECONDS,
    ) -> None:
        # Reserve the port while this object exists. No other program can then bind the port while the service is down.
        reserved = socket.socket()
        weakref.finalize(self, reserved.close)
        reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        reserved.bind(("127.0.0.1", 0))
        where = ["--host", "127.0.0.1", "--port", str(reserved.getsockname()[1])]
        kept = [] if data_dir is None else ["--data-dir", str(data_dir)]
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("TQ_")}
        super().__init__(
            [*command, "serve", "--stop-with-stdin", *where, "--log-level", "warning", *kept, *flags],
            env={**inherited, **(env or {})},
            cwd=cwd,
            log=log,
            start_new_session=start_new_session,
            start_timeout=start_timeout,
            stop_timeout=stop_timeout,
        )

    def restart(self) -> None:
        """Kill the service if it is running, then start it again."""
        self.kill()
        self.start()
