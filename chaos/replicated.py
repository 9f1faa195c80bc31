"""Three etcd members, three controllers and three storage services with a mirror, each on a separate host."""

from __future__ import annotations

import contextlib
import secrets
import signal
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import grpc

from chaos.cluster import Cluster, Process
from chaos.etcd import etcd_members
from chaos.hosts import Host, Network
from tq_service.testing import COMMAND
from tq_service.v1.controller_service_pb2 import ListPartitionsRequest
from tq_service.v1.controller_service_pb2_grpc import ControllerServiceStub

CONTROLLERS: Final = ("controller-0", "controller-1", "controller-2")
STORAGES: Final = ("one", "two", "three")
FAILED_EXIT_CODE: Final = 70
"""Exit code of a superseded controller, and of a storage service whose puts were taken over."""

_ETCD_PORTS: Final = (2379, 2380)
_PORT: Final = 50051
_ANSWER_SECONDS: Final = 0.5
_TAKEN_OVER: Final = (
    "the puts of a lost storage service were taken over",
    "could not recover the puts of a lost storage service",
)


class ReplicatedCluster(Cluster):
    """The processes and the network between them.

    Controllers and storage services that end are restarted at once, as a supervisor would, unless they are held.

    Args:
        network: network to which the hosts are added. The network's owner ends the hosts.
        directory: directory for data and logs.
        lease_seconds: lease of the leader.
        mirror: URL of the object store that mirrors puts, or None for a directory that the storage services share.

    Attributes:
        held: names of processes that are not restarted; changed by the owner of a fault.
        ended: name and exit code of each process that has ended.
    """

    def __init__(self, network: Network, directory: Path, lease_seconds: float, mirror: str | None) -> None:
        self._network = network
        self._directory = directory
        etcd_hosts = [network.add() for _ in CONTROLLERS]
        self.processes = etcd_members([_ETCD_PORTS] * len(etcd_hosts), directory, etcd_hosts)
        self.etcd_names = tuple(self.processes)
        self._hosts = dict(zip(self.etcd_names, etcd_hosts, strict=True))
        self._hosts |= {name: network.add() for name in (*CONTROLLERS, *STORAGES)}
        self.addresses = {name: f"{self._hosts[name].ip}:{_PORT}" for name in CONTROLLERS}
        self.address = ",".join(self.addresses.values())
        self.controller_name = CONTROLLERS[0]
        self.storage_names = STORAGES
        self._secret = directory / "secret"  # written before any process starts
        self._secret.touch(0o600)
        self._secret.write_text(secrets.token_hex(32) + "\n")
        journal = "etcd://" + ",".join(f"{host.ip}:{_ETCD_PORTS[0]}" for host in etcd_hosts)
        for name in CONTROLLERS:
            flags = {
                "role": "controller",
                "journal": journal,
                "cluster": "chaos",
                "data-dir": f"{directory}/data-{name}",
            }
            self.processes[name] = self._serve(name, flags | {"lease-seconds": f"{lease_seconds:g}"})
        if mirror is None:
            (directory / "mirror").mkdir()
            mirror = f"file://{directory / 'mirror'}"
        for name in STORAGES:
            flags = {"role": "storage", "controller": self.address, "storage-id": name, "max-bytes": "1GiB"}
            self.processes[name] = self._serve(
                name, flags | {"put-ttl-seconds": "5", "mirror": mirror, "mirror-required": "1"}
            )
        self.held: set[str] = set()
        self.ended: list[tuple[str, int]] = []
        self._is_closing = threading.Event()
        self._restarting = threading.Thread(target=self._start_again, daemon=True)

    def _serve(self, name: str, flags: dict[str, str]) -> Process:
        host = self._hosts[name]
        flags |= {"host": host.ip, "port": str(_PORT), "grace-seconds": "2", "log-level": "info"}
        flags |= {"internal-secret-file": str(self._secret)}
        arguments = [part for flag, value in flags.items() for part in (f"--{flag}", value)]
        return Process(
            name, [*host.enter, *COMMAND, "serve", "--insecure", *arguments], self._directory / f"{name}.log"
        )

    def start(self) -> None:
        """Start all processes, etcd first, and the thread that restarts them."""
        super().start()
        self._restarting.start()

    def _start_again(self) -> None:
        while not self._is_closing.wait(0.05):
            for name in (*CONTROLLERS, *STORAGES):
                process = self.processes[name]
                code = None if process.running is None else process.running.poll()
                if code is not None and name not in self.held:
                    self.ended.append((name, code))
                    process.start()

    def storage_address(self, name: str) -> str:
        """Return the address of a storage service."""
        return f"{self._hosts[name].ip}:{_PORT}"

    def leader(self) -> str | None:
        """Return the name of the leading controller, or None. Held controllers do not count."""
        for name, address in self.addresses.items():
            if name not in self.held and answers(address):
                return name
        return None

    def cut(self, name: str, others: Sequence[str]) -> None:
        """Drop packets between a process's host and the hosts of others. An empty name is this program's host."""
        self._network.cut(self._host(name), map(self._host, others))

    def mend(self, name: str, others: Sequence[str]) -> None:
        """Let packets through again."""
        self._network.mend(self._host(name), map(self._host, others))

    def _host(self, name: str) -> Host:
        return self._hosts[name] if name else self._network.here

    def taken_over_count(self, name: str) -> int:
        """Return the number of takeovers of a storage service in the controllers' logs."""
        return sum(
            f"storage={name} " in f"{line} " and any(text in line for text in _TAKEN_OVER)
            for controller in CONTROLLERS
            if self.processes[controller].log.exists()
            for line in self.processes[controller].log.read_text(errors="replace").splitlines()
        )

    def dead(self) -> list[str]:
        """Return the ended processes that are never restarted; there must be none."""
        return [name for name in super().dead() if name in self.etcd_names]

    def failures(self) -> list[str]:
        """Return log lines about faults of the program itself; those about outages are expected."""
        return [line for line in super().failures() if "Traceback" in line or "Fatal" in line]

    def wrong_ends(self) -> list[str]:
        """Return processes that ended for a reason other than being killed, superseded or taken over."""
        expected = (FAILED_EXIT_CODE, -signal.SIGKILL)
        return [f"{name} ended with {code}" for name, code in self.ended if code not in expected]

    def close(self) -> None:
        """Kill the processes."""
        self._is_closing.set()
        if self._restarting.is_alive():
            self._restarting.join()
        for process in self.processes.values():
            process.send(signal.SIGCONT)
            process.end()


def answers(address: str, timeout_seconds: float = _ANSWER_SECONDS) -> bool:
    """Whether a controller answers as the leader."""
    with grpc.insecure_channel(address) as channel, contextlib.suppress(grpc.RpcError):
        ControllerServiceStub(channel).ListPartitions(ListPartitionsRequest(), timeout=timeout_seconds)
        return True
    return False
