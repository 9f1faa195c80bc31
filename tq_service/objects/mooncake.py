"""Storage of objects in the memory of other nodes through Mooncake Store (extra `mooncake`), over TCP or RDMA.

The URL is `mooncake://MASTER:50051?host=ADDRESS`. This module works around the following pitfalls of Mooncake, which
were observed in tests:

- A put may return 0 (success) after making fewer copies than requested. A put also returns 0 if a killed writer left
  the name without a copy, or if the name still refers to an old value. Before each put, this module checks that the
  name does not exist. After each put, the module counts the copies on each node.
- Copies requested with `replica_num` may be placed in the writer's own memory. This module prefers segments on other
  nodes, and does not count copies on the writer's own node.
- After a forced removal, a reader may receive a mix of two objects. This module never forces a removal. Instead, it
  returns the names of the objects that are still leased.
- Checksums do not cover partial reads. After a partial read, this module checks that the object still exists. If it
  does, its memory was not reused.
- Calls block for several seconds if no master is available. This module therefore runs calls in threads. The module
  also reuses registered memory.
"""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import random
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from http.client import HTTPException
from typing import Any, Final
from urllib.request import ProxyHandler, build_opener

from tq_service.errors import AlreadyExistsError, TqError, UnavailableError
from tq_service.objects.base import (
    HEADER_BYTES,
    LARGEST_OBJECT_BYTES,
    Abilities,
    BlockingObjectStore,
    EngineUrl,
    Landing,
    ObjectMissingError,
    fill,
)

# The library reads these variables when it is loaded. By default, it opens a connection for each transfer, which takes
# longer than a small transfer itself.
for _variable, _value in {"MC_TCP_ENABLE_CONNECTION_POOL": "1", "GLOG_minloglevel": "2"}.items():
    os.environ.setdefault(_variable, _value)

from mooncake.store import MooncakeDistributedStore, ReplicateConfig  # noqa: E402  (after its environment is set)

_DEFAULT_PORT: Final = 50051
_DEFAULT_ADMIN_PORT: Final = 9003
_LOCAL_BUFFER_BYTES: Final = 16 << 20
"""Size of the client's own buffer in bytes. Object data does not pass through this buffer."""

# mooncake-store/include/types.h, ErrorCode
_NO_MEMORY: Final = -200
_TOO_SMALL: Final = -600
_NOT_READY: Final = -703
_NOT_FOUND: Final = -704
_LEASE_EXPIRED: Final = -707
_NO_ANSWER: Final = (-900, -901)
_READS: Final = 3
_MEANINGS: Final = {
    -10: "a shard is locked",
    _NO_MEMORY: "out of memory",
    _NOT_READY: "it is only partially written",
    _NOT_FOUND: "it does not exist",
    -706: "a reader has a lease on it",
    _LEASE_EXPIRED: "it was not read within its lease; raise the master's default_kv_lease_ttl",
    -800: "the transfer failed; a node may be lost",
    -900: "the master does not respond",
    -901: "the master did not respond in time",
}


class MooncakeObjects(BlockingObjectStore):
    """An object store backed by Mooncake Store.

    The URL contains the address of the master. If the masters are highly available, the URL contains the addresses of
    etcd: `mooncake://etcd:HOST:2379,HOST:2379`.
    """

    engine = "Mooncake"

    def __init__(self, url: EngineUrl) -> None:
        super().__init__(url, threads=4)
        is_etcd = url.host.startswith("etcd:")
        port = 2379 if is_etcd else _DEFAULT_PORT
        given = url.host.removeprefix("etcd:").split(",")
        hosts = [each if ":" in each else f"{each}:{port}" for each in given]
        self._master = f"etcd://{';'.join(hosts)}" if is_etcd else hosts[0]
        admin = url.text("admin", f"{host_of(hosts[0])}:{_DEFAULT_ADMIN_PORT}")
        self._admin = MooncakeAdmin(admin.split(","), timeout_seconds=min(5.0, self.timeout_seconds / 2))
        self._host = url.text("host", "")
        self._protocol = url.choice("protocol", "tcp", ("tcp", "rdma"))
        self._devices = url.text("devices", "")
        self._staged: list[_Staging] = []  # registered memory that no call is using
        self._store: Any = MooncakeDistributedStore()

    @property
    def abilities(self) -> Abilities:
        return Abilities(survives="node")

    def _connect(self, node: str, offered_bytes: int) -> None:
        self._host = self._host or node
        self._admin.segments()
        code = self._store.setup(
            self._host,
            "P2PHANDSHAKE",
            offered_bytes,
            _LOCAL_BUFFER_BYTES,
            self._protocol,
            self._devices,
            self._master,
        )
        if code:
            raise self._failed("setup", code)

    def _close(self) -> None:
        self._store.close()

    def _put(self, name: str, sealed: Sequence[memoryview], copies: int) -> int:
        if self._exists([name])[0]:
            raise AlreadyExistsError(f"{self.place}: object {name} already exists; retry under a new name")
        config = ReplicateConfig()
        config.replica_num = copies
        config.with_hard_pin = True
        others = [name for name in self._admin.segments() if host_of(name) != self._host]
        random.shuffle(others)  # distribute objects, because Mooncake fills the first segments first
        config.preferred_segments = others
        size = sum(map(len, sealed))
        with self._staging(size) as buffer:
            fill(buffer.view, sealed)
            code = self._store.put_from(name, buffer.address, size, config)
        if code == _NO_MEMORY or not others:
            raise self._full(f"no other node has enough memory for object {name}")
        if code:
            raise self._failed(name, code)
        made = len(self._nodes([name])[name] - {self._host})
        if not made:
            raise UnavailableError(
                f"{self.place}: object {name} was acknowledged, but no other node stores it. Put the object again"
            )
        return made

    def _read(self, name: str, landing: Landing) -> None:
        with self._staging(HEADER_BYTES + len(landing)) as buffer:
            size = self._fetch(name, buffer, HEADER_BYTES + len(landing))
            landing.write(buffer.view[: min(size, HEADER_BYTES)], buffer.view[HEADER_BYTES : max(size, HEADER_BYTES)])

    def _fetch(self, name: str, buffer: _Staging, size: int) -> int:
        """Read up to `size` bytes from the start of a sealed object into `buffer`. Return the number of bytes read."""
        for _ in range(_READS):
            code = self._store.get_into(name, buffer.address, size)
            if code == _TOO_SMALL:
                code = self._fetch_range(name, buffer, size)
            if code != _LEASE_EXPIRED:
                break
        if code < 0:
            raise self._failed(name, code)
        return int(code)

    def _fetch_range(self, name: str, buffer: _Staging, size: int) -> int:
        """Read the first `size` bytes of a longer object. Return `size`, or a negative error code."""
        codes = self._store.get_into_ranges([buffer.address], [[name]], [[[0]]], [[[0]]], [[[size]]])[0][0]
        if min(codes) < 0:
            return int(min(codes))
        if not self._exists([name])[0]:
            raise ObjectMissingError(f"{self.place}: object {name} was removed while it was being read")
        return size

    def _size(self, name: str) -> int:
        size = self._store.get_size(name)
        if size < 0:
            raise self._failed(name, size)
        return int(size) - HEADER_BYTES

    def _copies(self, names: Sequence[str]) -> list[int]:
        nodes = self._nodes(names)
        return [len(nodes[name]) for name in names]

    def _nodes(self, names: Sequence[str]) -> dict[str, set[str]]:
        """For each object, return the hosts that store a complete copy."""
        # The master omits names without replicas from its result. An empty result may mean that the master did not
        # respond.
        existing = [name for name, exists in zip(names, self._exists(names), strict=True) if exists]
        replicas = self._store.batch_get_replica_desc(existing) if existing else {}
        if existing and not replicas:
            self._exists(existing)
        return {name: _hosts_of(replicas.get(name, ())) for name in names}

    def _exists(self, names: Sequence[str]) -> list[bool]:
        codes = self._store.batch_is_exist(list(names))
        if any(code < 0 for code in codes):
            raise self._failed(names[0], min(codes))
        return [code == 1 for code in codes]

    def _remove(self, names: Sequence[str]) -> list[str]:
        codes = self._store.batch_remove(list(names), False)
        if all(code in _NO_ANSWER for code in codes):
            raise self._failed(names[0], codes[0])
        return [name for name, code in zip(names, codes, strict=True) if code not in (0, _NOT_FOUND)]

    def _failed(self, name: str, code: int) -> TqError:
        meaning = _MEANINGS.get(code, "see ErrorCode in its types.h")
        message = f"{self.place}: {name}: Mooncake returned {code} ({meaning})"
        return ObjectMissingError(message) if code in (_NOT_READY, _NOT_FOUND) else UnavailableError(message)

    @contextmanager
    def _staging(self, size: int) -> Iterator[_Staging]:
        """Provide registered memory for a call made in a `with` block. If the call hangs, its memory remains in use."""
        buffer = self._staged.pop() if self._staged else None
        if buffer is None or len(buffer.view) < size:
            if buffer is not None:
                self._store.unregister_buffer(buffer.address)
            buffer = _Staging(min(1 << max(size - 1, 1 << 20).bit_length(), _MOST_STAGED_BYTES))
            code = self._store.register_buffer(buffer.address, len(buffer.view))
            if code:
                raise self._failed("register_buffer", code)
        try:
            yield buffer
        finally:
            self._staged.append(buffer)


def _hosts_of(replicas: Sequence[Any]) -> set[str]:
    return {
        host_of(replica.get_memory_descriptor().buffer_descriptor.transport_endpoint)
        for replica in replicas
        if replica.is_memory_replica() and replica.status.name == "COMPLETE"
    }


_MOST_STAGED_BYTES: Final = LARGEST_OBJECT_BYTES + HEADER_BYTES


class _Staging:
    """A block of memory that Mooncake's transfer engine uses for transfers."""

    def __init__(self, size: int) -> None:
        memory = mmap.mmap(-1, size)
        self.view = memoryview(memory)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(memory))


_KEPT_SECONDS: Final = 2.0
_WITHOUT_PROXY: Final = build_opener(ProxyHandler({}))


class MooncakeAdmin:
    """A client that queries the leading master. Calls block, and may be made from any thread."""

    def __init__(self, addresses: Sequence[str], *, timeout_seconds: float) -> None:
        self._addresses = tuple(addresses)
        self._timeout_seconds = timeout_seconds
        self._segments: tuple[float, list[str]] = (float("-inf"), [])

    def segments(self) -> list[str]:
        """Return the memory segments that processes offer, each as `HOST:PORT`. The list may be several seconds old.

        Raises:
            UnavailableError: no master responded.
        """
        asked, segments = self._segments
        if time.monotonic() - asked > _KEPT_SECONDS:
            found = json.loads(self._get("/get_segments_detail"))["segments"]
            segments = [each["segment_name"] for each in found if each.get("status", "OK") == "OK"]
            self._segments = (time.monotonic(), segments)
        return segments

    def _get(self, path: str) -> str:
        failures = []
        for address in self._addresses:
            try:
                if len(self._addresses) == 1 or self._ask(address, "/role").strip() == "leader":
                    return self._ask(address, path)
                failures.append(f"{address} is not the leader")
            except (OSError, HTTPException) as error:
                failures.append(f"{address}: {error}")
        raise UnavailableError(
            f"no Mooncake master responds on its metrics_port ({'; '.join(failures)}). Set the address of this port "
            "with admin=HOST:PORT"
        )

    def _ask(self, address: str, path: str) -> str:
        with _WITHOUT_PROXY.open(f"http://{address}{path}", timeout=self._timeout_seconds) as answer:
            text: str = answer.read().decode()
        return text


def host_of(endpoint: str) -> str:
    """Return the host of `HOST:PORT`, including the brackets of an IPv6 address."""
    return endpoint.rpartition(":")[0] if ":" in endpoint else endpoint
