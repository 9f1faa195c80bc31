"""A program in another process that makes a load and times it, for benchmarks that alternate between systems."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil

from benchmarks.harness import ROOT, Options, run_async, running
from benchmarks.peer_environment import TRANSFER_QUEUE, PeerEnvironment
from benchmarks.report import Report
from tq_service.testing import ServiceProcess

_STOP_SECONDS = 30.0
_IDLE_SECONDS = 2.0


class Program:
    """A running program that answers requests; see `benchmarks.peer_program`."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def ask(self, command: str, **arguments: object) -> Any:
        """Return the result of a command of the program.

        Raises:
            RuntimeError: the command raised, or the program has ended.
        """
        if self._process.stdin is None or self._process.stdout is None:
            raise RuntimeError(f"{self._process.args!r} was started without pipes")
        with suppress(BrokenPipeError):  # it has ended; the missing answer shows this
            self._process.stdin.write(json.dumps({"command": command, **arguments}) + "\n")
            self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"{self._process.args!r} ended with exit code {self._process.wait()}; its log is above")
        answer = json.loads(line)
        if "error" in answer:
            raise RuntimeError(f"{command} of {self._process.args!r} failed:\n{answer['error']}")
        return answer["result"]

    def idle_cores(self) -> float:
        """Measure how many cores the program and its child processes use while idle, over some seconds."""
        started, before = time.monotonic(), self._cpu_seconds()
        time.sleep(_IDLE_SECONDS)
        return (self._cpu_seconds() - before) / (time.monotonic() - started)

    def _cpu_seconds(self) -> float:
        seconds = 0.0
        for process in _family(self._process.pid):
            with suppress(psutil.NoSuchProcess):
                times = process.cpu_times()
                seconds += times.user + times.system
        return seconds


def _family(pid: int) -> list[psutil.Process]:
    """Return a process and all its descendants."""
    root = psutil.Process(pid)
    return [root, *root.children(recursive=True)]


@contextmanager
def program(
    module: str, *, python: str = sys.executable, variables: Mapping[str, str] | None = None, directory: Path = ROOT
) -> Iterator[Program]:
    """Run `python -m module` in a directory until the block ends.

    It stops when its stdin ends; otherwise it is killed with all its descendants.
    """
    command, pipe, environment = [python, "-m", module], subprocess.PIPE, {**os.environ, **(variables or {})}
    with subprocess.Popen(command, cwd=directory, env=environment, stdin=pipe, stdout=pipe, text=True) as process:
        try:
            yield Program(process)
        finally:
            if process.stdin is not None:
                with suppress(BrokenPipeError):  # it has ended before it read everything
                    process.stdin.close()
            try:
                process.wait(_STOP_SECONDS)
            except subprocess.TimeoutExpired:
                for running in _family(process.pid):
                    with suppress(psutil.NoSuchProcess):
                        running.kill()


class Peer:
    """A peer in its own environment, which may be unavailable.

    Attributes:
        name: name of the peer.
        notes: notes for the report: its versions and its idle cost, or that it was not measured.
    """

    def __init__(self, name: str, running: Program | None, notes: Sequence[str]) -> None:
        self.name = name
        self.notes = list(notes)
        self._running = running

    @property
    def is_there(self) -> bool:
        """Whether the peer is available."""
        return self._running is not None

    @property
    def absent(self) -> list[str]:
        """Its name if it is unavailable, for `Report.without`."""
        return [] if self.is_there else [self.name]

    def ask(self, command: str, **arguments: object) -> Any:
        """Run a command of its program and return the result; see `Program.ask`."""
        if self._running is None:
            raise RuntimeError(f"{self.name} is not available; check is_there first")
        return self._running.ask(command, **arguments)


@contextmanager
def peer(environment: PeerEnvironment, module: str, options: Options) -> Iterator[Peer]:
    """Run a peer's program in its environment until the block ends.

    If it cannot be installed or started, or `options` leave it out, a message is printed on stderr, the report notes
    it, and the benchmark continues without the peer.
    """
    with ExitStack() as stack:
        running, notes = None, [f"{environment.name} was left out or could not be installed: not measured"]
        if environment.name not in options.without:
            try:
                python = str(environment.python())
                running = stack.enter_context(program(module, python=python, variables=environment.variables))
                notes = _notes(running)
            except RuntimeError as error:
                print(f"without {environment.name}: {error}", file=sys.stderr, flush=True)
                running = None
        yield Peer(environment.name, running, notes)


def run_beside_transfer_queue(
    measure: Callable[[Options, str, str, Peer], Coroutine[Any, Any, Report]], options: Options
) -> Report:
    """Measure with a service, an echo server and TransferQueue; `measure` gets the addresses of the first two."""
    with (
        ServiceProcess() as server,
        running("benchmarks.echo_server") as echo,
        peer(TRANSFER_QUEUE, "benchmarks.transfer_queue_peer", options) as transfer_queue,
    ):
        return run_async(measure(options, server.address, echo.address, transfer_queue))


def _notes(running: Program) -> list[str]:
    versions = ", ".join(f"{package} {version}" for package, version in running.ask("versions").items())
    cores = running.idle_cores()
    return [f"peer: {versions}; while others are measured, its processes use {100 * cores:.1f} % of a core"]
