"""Logs in etcd for tests, and controllers that lead them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from etcd_stand_in import EtcdMembers, EtcdStandIn

from tq_service.cluster.election import Election, Lease
from tq_service.cluster.etcd import ClusterKeys, Etcd
from tq_service.cluster.etcd_backend import EtcdBackend
from tq_service.journal.log import Log, Record

LEASE_SECONDS = 2.0
KEYS = ClusterKeys("test")


class Member:
    """A controller as far as its log goes: it stands by until `lead`."""

    def __init__(self, addresses: list[str], directory: Path, name: str = "a", *, accept_loss: bool = False) -> None:
        directory.mkdir(exist_ok=True)
        self.etcd = Etcd(tuple(addresses))
        self.backend = EtcdBackend(self.etcd, KEYS, member_id=name, directory=directory, accept_loss=accept_loss)
        self.log = Log(self.backend)
        self.election = Election(self.etcd, KEYS, name, f"{name}:50051")
        self.lease: Lease | None = None
        self.lost = False

    def lead(self) -> None:
        """Lead, once no other member does."""
        self.lease = Lease(self.etcd, LEASE_SECONDS, self._lose)
        self.backend.leadership = self.election.campaign(self.lease, lambda leader: None)

    def _lose(self) -> None:
        self.lost = True

    def open(self, number: int = 0) -> list[Record]:
        """Lead, and return what is there; the log takes records then."""
        self.lead()
        return list(self.log.read(number))

    def close(self) -> None:
        try:
            self.log.close()
        finally:
            if self.lease is not None:
                self.lease.close()
            self.election.close()
            self.etcd.close()

    def vanish(self) -> None:
        """End as a process that is killed: what it leads stays until the lease ends."""
        if self.lease is not None:
            self.lease._closed.set()
        self.election.close()
        self.etcd.close()


@contextmanager
def members(etcd: list[str], directory: Path, *names: str) -> Iterator[list[Member]]:
    with ExitStack() as stack:
        found = [Member(etcd, directory / name, name) for name in names]
        for member in found:
            stack.callback(member.close)
        yield found


@contextmanager
def running_etcd(kind: str, directory: Path) -> Iterator[list[str]]:
    """Yield the addresses of the members of an etcd: the stand-in, or a real one."""
    if kind == "stand-in":
        stand_in = EtcdStandIn()
        try:
            yield [stand_in.address]
        finally:
            stand_in.stop()
    else:
        directory.mkdir(exist_ok=True)
        real = EtcdMembers(directory)
        try:
            yield real.addresses
        finally:
            real.stop()
