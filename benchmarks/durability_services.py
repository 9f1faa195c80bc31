"""The services that `durability_cost` compares: a controller and a storage service each, with different durability."""

from __future__ import annotations

import tempfile
from collections.abc import Collection, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from benchmarks.engines import start_engines
from chaos.cluster import free_ports
from chaos.etcd import etcd_members
from tq_service.testing import ServiceProcess

MEMORY: Final = "memory"
CONTROL: Final = "control"
DURABILITIES: Final = ("process", "disk")
ETCD: Final = "etcd"
MIRROR: Final = "mirror"
BACKGROUND: Final = "background"
COLUMNS: Final = (CONTROL, *DURABILITIES, ETCD, MIRROR, BACKGROUND)
"""Columns to compare with memory: `mirror` is a column per object store, `background` one for one object store."""

ENGINE_KEYS: Final = {"file": "file", "valkey": "valkey", "s3": "s3_seaweedfs", "mooncake": "mooncake"}
"""Object stores by the name that a user gives, and their names in the contract suite."""

_BACKGROUND_ENGINE: Final = "valkey"  # if unavailable, the first available one
_MAX_BYTES: Final = "4GiB"


@dataclass(frozen=True, slots=True, kw_only=True)
class Service:
    """One of the compared services.

    Attributes:
        column: heading of its column.
        address: address of its controller.
        storage_address: address of its storage service.
        is_mirrored_afterwards: whether puts are complete before their copies are made.
    """

    column: str
    address: str
    storage_address: str
    is_mirrored_afterwards: bool = False


class Services:
    """Starts the compared services, which end with the stack.

    Attributes:
        running: the running services, memory first.
        missing: for each of the others, the reason why it is unavailable.
    """

    def __init__(self, stack: ExitStack, columns: Collection[str], engines: Sequence[str]) -> None:
        self._stack = stack
        self._directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="tq-durability-")))
        self.running: list[Service] = []
        self.missing: list[str] = []
        self._start(MEMORY)
        if CONTROL in columns:
            self._start(CONTROL)
        for durability in DURABILITIES:
            if durability in columns:
                self._start_durable(durability)
        if ETCD in columns:
            self._start_on_etcd()
        if MIRROR in columns or BACKGROUND in columns:
            self._start_mirrored(columns, engines)

    def _start(
        self,
        column: str,
        *,
        controller: Sequence[str] = (),
        storage: Sequence[str] = (),
        is_mirrored_afterwards: bool = False,
    ) -> None:
        """Start a controller and a storage service with additional flags for each."""
        number = len(self.running)
        common = ["--internal-secret-file", str(self._directory / f"secret-{number}"), "--grace-seconds", "2"]
        leading = self._stack.enter_context(ServiceProcess("--role", "controller", *common, *controller))
        flags = ["--role", "storage", "--controller", leading.address, "--storage-id", f"storage-{number}"]
        storing = self._stack.enter_context(ServiceProcess(*flags, "--max-bytes", _MAX_BYTES, *common, *storage))
        self.running.append(
            Service(
                column=column,
                address=leading.address,
                storage_address=storing.address,
                is_mirrored_afterwards=is_mirrored_afterwards,
            )
        )

    def _start_durable(self, durability: str) -> None:
        controller, storage = (
            ("--data-dir", str(self._directory / f"{durability}-{role}"), "--durability", durability)
            for role in ("controller", "storage")
        )
        self._start(durability, controller=controller, storage=storage)

    def _start_on_etcd(self) -> None:
        """Start a service with its journal in three members of etcd; bytes are in memory."""
        directory = self._directory / "etcd"
        directory.mkdir()
        ports = free_ports(6)
        try:
            members = etcd_members(list(zip(ports[:3], ports[3:], strict=True)), directory)
        except FileNotFoundError as reason:
            self.missing.append(f"{ETCD}: left out, {reason}")
            return
        for member in members.values():
            member.start()
            self._stack.callback(member.end)
        journal = "etcd://" + ",".join(f"127.0.0.1:{port}" for port in ports[:3])
        data_dir = str(self._directory / "etcd-controller")
        self._start(ETCD, controller=("--journal", journal, "--cluster", "bench", "--data-dir", data_dir))

    def _start_mirrored(self, columns: Collection[str], engines: Sequence[str]) -> None:
        """Start a service for each available object store; state of the controllers is in memory."""
        directory = self._directory / "engines"
        directory.mkdir()
        names = {ENGINE_KEYS[name]: name for name in engines}
        running, missing = start_engines(self._stack, directory, names)
        urls = {names[key]: engine.url for key, engine in running.items()}
        self.missing += [f"mirror in {names[key]}: left out, {reason}" for key, reason in missing.items()]
        if MIRROR in columns:
            for name, url in urls.items():
                self._start(f"mirror: {name}", storage=("--mirror", url, "--mirror-required", "1"))
        if BACKGROUND in columns and urls:
            name = _BACKGROUND_ENGINE if _BACKGROUND_ENGINE in urls else next(iter(urls))
            storage = ("--mirror", urls[name], "--mirror-required", "0")
            self._start(f"{name}, 0 required", storage=storage, is_mirrored_afterwards=True)
