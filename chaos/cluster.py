"""The processes of a service on this machine. They use fixed ports, and can be killed and restarted."""

from __future__ import annotations

import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Literal

from tq_service.testing import COMMAND

Topology = Literal["embedded", "split"]
Durability = Literal["memory", "process", "disk"]

# Below the range for outgoing connections, which might take a port while its service is dead.
_PORTS: Final = range(20_000, 30_000)
_START_SECONDS: Final = 60.0
_END_SECONDS: Final = 30.0
_QUOTA: Final = "1GiB"
_STORAGE_NAMES: Final = ("one", "two")


def without_torch() -> None:
    """Keep torch out of this process, which then reads arrays and starts ten times as fast."""
    sys.modules["torch"] = None  # type: ignore[assignment]
    sys.modules["tensordict"] = None  # type: ignore[assignment]


@dataclass(slots=True)
class Process:
    """A process that can be restarted with the same command; its output goes to a file."""

    name: str
    command: Sequence[str]
    log: Path
    running: subprocess.Popen[bytes] | None = field(default=None, init=False)

    def start(self) -> None:
        """Start it."""
        with self.log.open("ab") as log:
            self.running = subprocess.Popen(self.command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)

    def send(self, number: signal.Signals) -> None:
        """Send a signal to the process."""
        if self.running is not None:
            self.running.send_signal(number)

    def exit_code(self, timeout_seconds: float = _END_SECONDS) -> int | None:
        """Wait for the process to end, and return its exit code. Return None on timeout, or if it was never started."""
        if self.running is None:
            return None
        try:
            return self.running.wait(timeout_seconds)
        except subprocess.TimeoutExpired:
            return None

    def end(self) -> int | None:
        """Kill the process. Return its exit code if it had already ended; None if it was running or never started."""
        if self.running is None:
            return None
        code = self.running.poll()
        self.running.kill()
        self.running.wait()
        return code


class Cluster:
    """A service as one process, or as a controller and two storage services.

    Args:
        topology: one process, or a controller and two storage services.
        durability: how the service keeps its state; with "memory", a killed process also loses its state.
        directory: directory for data and logs.
    """

    def __init__(self, topology: Topology, durability: Durability, directory: Path) -> None:
        self._durability = durability
        self._directory = directory
        names = ("service",) if topology == "embedded" else ("controller", *_STORAGE_NAMES)
        self._ports = dict(zip(names, free_ports(len(names)), strict=True))
        self.address = f"127.0.0.1:{self._ports[names[0]]}"
        self.controller_name = names[0]
        self.storage_names = names if topology == "embedded" else _STORAGE_NAMES
        self.processes = {name: self._process(name, topology) for name in names}

    def _process(self, name: str, topology: Topology) -> Process:
        flags = ["--port", str(self._ports[name]), "--grace-seconds", "2", "--log-level", "warning"]
        if name in self.storage_names:
            flags += ["--max-bytes", _QUOTA, "--storage-id", name, "--put-ttl-seconds", "5"]
        if topology == "split":
            flags += ["--role", "storage" if name in self.storage_names else "controller"]
            flags += ["--controller", self.address] if name in self.storage_names else []
        if self._durability != "memory":
            flags += ["--data-dir", str(self._directory / f"data-{name}"), "--durability", self._durability]
        return Process(name, [*COMMAND, "serve", *flags], self._directory / f"{name}.log")

    def storage_address(self, name: str) -> str:
        """Return the address of a storage service."""
        return f"127.0.0.1:{self._ports[name]}"

    def start(self) -> None:
        """Start all processes."""
        for process in self.processes.values():
            process.start()

    def inject_fault(self, names: Sequence[str], number: signal.Signals) -> list[str]:
        """End processes with a signal, and restart them immediately.

        Returns:
            A line for each process that ended in an unexpected way.
        """
        for name in names:
            self.processes[name].send(number)
        wrong = []
        for name in names:
            code = self.processes[name].exit_code()
            if code != (0 if number == signal.SIGTERM else -number):
                wrong.append(f"{name} ended with {code} after {number.name}")
                self.processes[name].end()
            self.processes[name].start()
        return wrong

    def dead(self) -> list[str]:
        """Return the processes that have ended without a fault injected."""
        return [
            name
            for name, process in self.processes.items()
            if process.running is not None and process.running.poll() is not None
        ]

    def failures(self) -> list[str]:
        """Return the log lines that report failures."""
        marks = ("Traceback", " failed", "Fatal", "CRITICAL")
        return [
            f"{name}: {line}"
            for name, process in self.processes.items()
            if process.log.exists()
            for line in process.log.read_text(errors="replace").splitlines()
            if any(mark in line for mark in marks)
        ]

    def close(self) -> None:
        """Kill the running processes."""
        for process in self.processes.values():
            process.end()


def wait_until(condition: Callable[[], bool], timeout_seconds: float, pause_seconds: float = 0.02) -> bool:
    """Call `condition` until it is true; return whether it was true in time."""
    deadline = time.monotonic() + timeout_seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(pause_seconds)
    return True


def free_ports(count: int) -> list[int]:
    """Return free ports outside the range for outgoing connections.

    Concurrent runs with the same seed get different ports.
    """
    rng = random.SystemRandom()
    found: list[int] = []
    while len(found) < count:
        port = rng.choice(_PORTS)
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
        if port not in found:
            found.append(port)
    return found
