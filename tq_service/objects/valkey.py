"""Storage of objects as values in Valkey or Redis (extra `valkey`), on either a server with replicas or a cluster.

The URL is `valkey://HOST:PORT`, or `valkeys://` with TLS. For a cluster, add `?cluster=true`. An object is written with
a single SET, which fails if the name already exists. WAIT returns the number of replicas that store the object. The
server must have `maxmemory` set and use the eviction policy `noeviction`. `open` rejects all other eviction policies,
because they allow the server to evict acknowledged objects.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Sequence
from typing import Any, Final, cast

import redis
from redis.backoff import NoBackoff
from redis.cluster import RedisCluster
from redis.retry import Retry

from tq_service.errors import AlreadyExistsError, InvalidArgumentError, TqError
from tq_service.objects.base import (
    HEADER_BYTES,
    Abilities,
    BlockingObjectStore,
    EngineUrl,
    Landing,
    Survives,
    joined,
    size_of,
)

_DEFAULT_PORT: Final = 6379
_NAMES_PER_CALL: Final = 500
_PROBE: Final = "!probe-"  # object names cannot contain this text


class ValkeyObjects(BlockingObjectStore):
    """An object store backed by Valkey or Redis.

    The password is read from the URL, from `password_file` or from VALKEY_PASSWORD, in this order.
    """

    engine = "Valkey"

    def __init__(self, url: EngineUrl) -> None:
        super().__init__(url, timeout_seconds=10.0)
        self._url = url
        self._is_cluster = url.flag("cluster", default=False)
        self._checks_policy = url.flag("check_policy", default=True)
        self._survives = cast("Survives", url.choice("survives", "node", ("node", "power")))
        self._wait_ms = url.count("wait_ms", 500)
        self._prefix = f"{url.text('prefix', 'tq')}/"
        self._settings: dict[str, Any] = {
            "host": url.host.partition(":")[0] or "127.0.0.1",
            "port": int(url.host.partition(":")[2] or _DEFAULT_PORT),
            "username": url.username or url.text("username", "") or None,
            "password": url.password or url.secret("password", "VALKEY_PASSWORD"),
            "socket_timeout": self.timeout_seconds / 2,
            "socket_connect_timeout": min(5.0, self.timeout_seconds / 2),
            "retry": Retry(NoBackoff(), 1),
        }
        ca_file = url.text("ca_file", "")
        if url.scheme in ("valkeys", "rediss"):
            self._settings |= {"ssl": True, "ssl_cert_reqs": "required", "ssl_ca_certs": ca_file or None}
        self._client: Any = None

    @property
    def abilities(self) -> Abilities:
        return Abilities(survives=self._survives)

    def _connect(self, node: str, offered_bytes: int) -> None:
        make = RedisCluster if self._is_cluster else redis.Redis
        self._client = make(**self._settings)
        try:
            if self._is_cluster:
                infos = list(self._client.info("memory", target_nodes=RedisCluster.PRIMARIES).values())
            else:
                infos = [self._client.info("memory")]
            policies = {info.get("maxmemory_policy", "noeviction") for info in infos}
        except redis.AuthenticationError as error:
            raise InvalidArgumentError(
                f"{self.place} rejected the user name and password ({error}). Correct them in the URL, in "
                "password_file or in VALKEY_PASSWORD"
            ) from error
        if self._checks_policy and policies != {"noeviction"}:
            raise InvalidArgumentError(
                f"{self.place} has maxmemory-policy {', '.join(sorted(policies))}; expected noeviction, because other "
                "policies may evict acknowledged objects"
            )

    def _close(self) -> None:
        self._client.close()

    def _put(self, name: str, sealed: Sequence[memoryview], copies: int) -> int:
        server = self._server(name)
        replica_count = min(copies - 1, _replica_count(server))
        pipeline = server.pipeline(transaction=False)  # WAIT covers only writes on the same connection
        pipeline.set(self._prefix + name, joined(sealed), nx=True)
        if replica_count > 0:
            pipeline.wait(replica_count, self._wait_ms)
        is_new, *acknowledged = pipeline.execute()
        if not is_new:
            raise AlreadyExistsError(f"{self.place}: object {name} already exists; retry under a new name")
        return 1 + int(sum(acknowledged))

    def _read(self, name: str, landing: Landing) -> None:
        key = self._prefix + name
        data = memoryview(self._server(name).getrange(key, 0, HEADER_BYTES + len(landing) - 1))
        landing.write(data[:HEADER_BYTES], data[HEADER_BYTES:])

    def _size(self, name: str) -> int:
        header: bytes = self._server(name).getrange(self._prefix + name, 0, HEADER_BYTES - 1)
        return size_of(name, header)

    def _copies(self, names: Sequence[str]) -> list[int]:
        found: dict[str, int] = {}
        for server, some in self._by_server(names):
            replica_count = _replica_count(server)
            pipeline = server.pipeline(transaction=False)
            for name in some:
                pipeline.exists(self._prefix + name)
            if replica_count:
                # If a replica has acknowledged this write, it has also received all earlier writes.
                pipeline.set(_probe_beside(self._prefix + some[0]), b"", px=1000)
                pipeline.wait(replica_count, self._wait_ms)
            answers = pipeline.execute()
            copies = 1 + (answers[-1] if replica_count else 0)
            found |= {name: copies * is_there for name, is_there in zip(some, answers, strict=False)}
        return [found[name] for name in names]

    def _remove(self, names: Sequence[str]) -> list[str]:
        for server, some in self._by_server(names):
            pipeline = server.pipeline(transaction=False)
            for name in some:
                pipeline.unlink(self._prefix + name)
            pipeline.execute()
        return []

    def _error(self, error: Exception) -> TqError:
        if isinstance(error, redis.OutOfMemoryError) or str(error).startswith("OOM "):
            return self._full(f"{str(error)[:100]}; increase maxmemory")
        if isinstance(error, redis.exceptions.MovedError) and self._is_cluster:
            self._client.nodes_manager.initialize()  # so that the next attempt reaches the right server
        return super()._error(error)

    def _server(self, name: str) -> Any:
        """Return the client for the server that stores the object with a given name."""
        if not self._is_cluster:
            return self._client
        node = self._client.get_node_from_key(self._prefix + name)
        return self._client.get_redis_connection(node)

    def _by_server(self, names: Sequence[str]) -> Iterator[tuple[Any, list[str]]]:
        grouped: dict[int, tuple[Any, list[str]]] = {}
        for name in names:
            server = self._server(name)
            grouped.setdefault(id(server), (server, []))[1].append(name)
        for server, some in grouped.values():
            for first in range(0, len(some), _NAMES_PER_CALL):
                yield server, some[first : first + _NAMES_PER_CALL]


def _probe_beside(key: str) -> str:
    """Return a probe key in the same slot as `key`. Keys in other slots may be stored on other servers."""
    tagged = key if "{" in key else f"{{{key}}}"
    return f"{tagged}{_PROBE}{secrets.token_hex(8)}"


def _replica_count(server: Any) -> int:
    """Return the number of connected replicas. A WAIT command that asks for more replicas would always time out."""
    return int(server.info("replication").get("connected_slaves", 0))
