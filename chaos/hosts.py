"""Hosts on one network, simulated with network namespaces. The path between two hosts can be cut silently.

A program that uses them runs in separate namespaces (`in_own_network`), so everything ends with the program.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

_INSIDE: Final = "TQ_CHAOS_NETWORK"
_PREFIX: Final = "10.98.0"
_BRIDGE: Final = "tq-chaos"
_NOWHERE: Final = "02:00:00:00:00:ff"  # a link address of no host: packets to it are dropped silently


def why_not() -> str:
    """Return the reason why this system cannot create such a network; empty if it can."""
    missing = [name for name in ("unshare", "nsenter", "ip") if shutil.which(name) is None]
    if missing:
        return f"needs {', '.join(missing)}"
    tried = subprocess.run(
        ["unshare", "-Urn", "ip", "link", "add", "one", "type", "bridge"], capture_output=True, text=True, check=False
    )
    return f"users cannot create network namespaces: {tried.stderr.strip()}" if tried.returncode else ""


def in_own_network(module: str, arguments: Sequence[str]) -> None:
    """Restart this program in its own namespaces unless it already runs there. Return only inside the namespaces.

    Raises:
        OSError: the system does not allow users to create namespaces.
    """
    if os.environ.get(_INSIDE):
        return
    if reason := why_not():
        raise OSError(f"could not create hosts on a separate network: {reason}")
    os.environ[_INSIDE] = "1"
    os.execvp("unshare", ["unshare", "-Urn", sys.executable, "-m", module, *arguments])


@dataclass(frozen=True, slots=True)
class Host:
    """One host.

    Attributes:
        ip: its address.
        enter: prefix of a command that runs on the host; empty for the host of this program.
        device: its network device.
    """

    ip: str
    enter: tuple[str, ...]
    device: str

    def run(self, *command: str) -> None:
        """Run a command on the host."""
        subprocess.run([*self.enter, *command], check=True, timeout=20, capture_output=True)


class Network:
    """The hosts, including that of this program, which has the first address.

    Use a network in a `with` block. Its hosts end when the block ends or when this program is killed.
    """

    def __init__(self) -> None:
        self.here = Host(f"{_PREFIX}.1", (), _BRIDGE)
        self._holders: list[subprocess.Popen[bytes]] = []
        self.here.run("ip", "link", "set", "lo", "up")
        self.here.run("ip", "link", "add", _BRIDGE, "type", "bridge")
        self.here.run("ip", "addr", "add", f"{self.here.ip}/24", "dev", _BRIDGE)
        self.here.run("ip", "link", "set", _BRIDGE, "up")

    def __enter__(self) -> Network:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def add(self) -> Host:
        """Add a host to the network and return it."""
        number = len(self._holders) + 2
        # The process reads until this program ends, however it ends, and keeps none of this program's files open.
        holder = subprocess.Popen(
            ["unshare", "-n", "cat"], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        self._holders.append(holder)
        _wait_for_namespace(holder.pid)
        host = Host(f"{_PREFIX}.{number}", ("nsenter", "-t", str(holder.pid), "-n"), "eth0")
        end = f"host{number}"
        self.here.run("ip", "link", "add", end, "type", "veth", "peer", "name", "eth0", "netns", str(holder.pid))
        self.here.run("ip", "link", "set", end, "master", _BRIDGE, "up")
        for command in ("link set lo up", f"addr add {host.ip}/24 dev eth0", "link set eth0 up"):
            host.run("ip", *command.split())
        return host

    def cut(self, host: Host, others: Iterable[Host]) -> None:
        """Drop all packets between a host and other hosts from now on, including packets on open connections."""
        for other in others:
            for one, far in ((host, other), (other, host)):
                one.run("ip", "neigh", "replace", far.ip, "lladdr", _NOWHERE, "nud", "permanent", "dev", one.device)

    def mend(self, host: Host, others: Iterable[Host]) -> None:
        """Reconnect a host to others."""
        for other in others:
            for one, far in ((host, other), (other, host)):
                one.run("ip", "neigh", "del", far.ip, "dev", one.device)

    def close(self) -> None:
        """End the hosts; the rest of the network ends with the namespaces of this program."""
        for holder in self._holders:
            holder.kill()
            holder.communicate()


def _wait_for_namespace(pid: int) -> None:
    """Wait until a process started by unshare has its own network."""
    mine = Path("/proc/self/ns/net").readlink()
    while Path(f"/proc/{pid}/ns/net").readlink() == mine or Path(f"/proc/{pid}/comm").read_text() != "cat\n":
        pass
