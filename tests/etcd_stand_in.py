"""One member of etcd as far as the service uses it, in this process, with faults; and a real one, where it is there."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from concurrent import futures
from pathlib import Path
from typing import Any

import grpc
import pytest

from tq_service.cluster.etcd import Etcd
from tq_service.internal.v1 import etcd_pb2 as pb
from tq_service.wire.connection import Tls

MOST_REQUEST_BYTES = 1536 * 1024
ROOT = Path(__file__).parents[1]


class EtcdStandIn:
    """Answers as etcd does, from memory: transactions, ranges, leases, compaction, and tokens of users.

    Attributes:
        address: where it listens.
        revision: of the store.
        kvs: the keys.
        compacted: the oldest revision there is.
        is_silent: whether calls wait until it is unset: a member that is cut off.
        refusals: how many of the next writes are refused, undone.
        lost_answers: how many of the next writes are done, and their answers lost.
        users: passwords by name; empty: no token is asked for.
        write_count: transactions that wrote.
    """

    def __init__(self, tls: Tls | None = None) -> None:
        self.revision = 1
        self.kvs: dict[bytes, pb.EtcdKeyValue] = {}
        self.compacted = 0
        self.is_silent = False
        self.refusals = self.lost_answers = self.write_count = 0
        self.users: dict[str, str] = {}
        self.tokens: set[str] = set()
        self.token_refusal = grpc.StatusCode.UNAUTHENTICATED, "etcdserver: invalid auth token"
        self._changed = threading.Condition()
        self._leases: dict[int, tuple[float, int]] = {}  # when each ends, and its seconds
        self._is_stopped = False
        self._server = grpc.server(
            futures.ThreadPoolExecutor(64),
            options=[("grpc.so_reuseport", 0), ("grpc.max_receive_message_length", -1)],
        )
        unary = {
            "KV": {
                "Range": (self._range, pb.EtcdRangeRequest),
                "Txn": (self._txn, pb.EtcdTxnRequest),
                "Compact": (self._compact, pb.EtcdCompactionRequest),
            },
            "Lease": {
                "LeaseGrant": (self._grant, pb.EtcdLeaseGrantRequest),
                "LeaseRevoke": (self._revoke, pb.EtcdLeaseRevokeRequest),
            },
            "Auth": {"Authenticate": (self._authenticate, pb.EtcdAuthenticateRequest)},
            "Maintenance": {"Status": (self._status, pb.EtcdStatusRequest)},
        }
        streams = {
            "Lease": {"LeaseKeepAlive": (self._keep_alive, pb.EtcdLeaseKeepAliveRequest)},
        }
        for service in {*unary, *streams}:
            handlers: dict[str, Any] = {}
            for name, (handle, kind) in unary.get(service, {}).items():
                handlers[name] = grpc.unary_unary_rpc_method_handler(
                    self._guarded(handle), kind.FromString, lambda answer: answer.SerializeToString()
                )
            for name, (handle, kind) in streams.get(service, {}).items():
                handlers[name] = grpc.stream_stream_rpc_method_handler(
                    handle, kind.FromString, lambda answer: answer.SerializeToString()
                )
            self._server.add_generic_rpc_handlers(
                (grpc.method_handlers_generic_handler(f"etcdserverpb.{service}", handlers),)
            )
        if tls is None:
            port = self._server.add_insecure_port("127.0.0.1:0")
        else:
            ca, cert, key = (Path(str(path)).read_bytes() for path in (tls.ca, tls.cert, tls.key))
            mutual = grpc.ssl_server_credentials([(key, cert)], ca, require_client_auth=True)
            port = self._server.add_secure_port("127.0.0.1:0", mutual)
        self.address = f"127.0.0.1:{port}"
        self._server.start()
        self._ending = threading.Thread(target=self._end_leases, daemon=True)
        self._ending.start()

    def stop(self) -> None:
        with self._changed:
            self._is_stopped = True
            self._changed.notify_all()
        self._server.stop(0).wait()
        self._ending.join()

    def keys(self, prefix: bytes = b"") -> list[bytes]:
        with self._changed:
            return sorted(key for key in self.kvs if key.startswith(prefix))

    def end_leases(self, lease_id: int | None = None) -> None:
        """Let a lease end now, or all of them, as when nothing kept them alive."""
        with self._changed:
            for each in list(self._leases):
                if lease_id in (None, each):
                    self._end_lease(each)

    def backup(self) -> tuple[int, dict[bytes, pb.EtcdKeyValue]]:
        """Return all that is there."""
        with self._changed:
            return self.revision, dict(self.kvs)

    def restore(self, backup: tuple[int, dict[bytes, pb.EtcdKeyValue]]) -> None:
        """Be as a backup, without leases, as etcd is after a restore."""
        with self._changed:
            self.revision, self.kvs = backup[0] + 1, {key: kv for key, kv in backup[1].items() if not kv.lease}
            self._leases.clear()
            self._changed.notify_all()

    # Handlers

    def _guarded(self, handle: Any) -> Any:
        def guarded(request: Any, context: Any) -> Any:
            self._wait_silence(context)
            if request.ByteSize() > MOST_REQUEST_BYTES:
                context.abort(grpc.StatusCode.INVALID_ARGUMENT, "etcdserver: request is too large")
            if self.users and not isinstance(request, pb.EtcdAuthenticateRequest):
                self._check_token(context)
            return handle(request, context)

        return guarded

    def _wait_silence(self, context: Any) -> None:
        while self.is_silent:
            if not context.is_active() or self._is_stopped:
                context.abort(grpc.StatusCode.UNAVAILABLE, "etcdserver: no leader")
            time.sleep(0.01)

    def _check_token(self, context: Any) -> None:
        if dict(context.invocation_metadata()).get("token") not in self.tokens:
            context.abort(*self.token_refusal)

    def _header(self) -> pb.EtcdHeader:
        return pb.EtcdHeader(cluster_id=7, member_id=1, revision=self.revision, raft_term=2)

    def _range(self, request: pb.EtcdRangeRequest, context: Any) -> pb.EtcdRangeResponse:
        with self._changed:
            return self._ranged(request)

    def _found(self, key: bytes, end: bytes) -> list[bytes]:
        if not end:
            return [key] if key in self.kvs else []
        return sorted(each for each in self.kvs if key <= each < end)

    def _ranged(self, request: pb.EtcdRangeRequest) -> pb.EtcdRangeResponse:
        keys = self._found(request.key, request.range_end)
        if request.sort_order == 2:
            keys.reverse()
        answer = pb.EtcdRangeResponse(header=self._header(), count=len(keys))
        if request.limit and len(keys) > request.limit:
            keys, answer.more = keys[: request.limit], True
        for key in () if request.count_only else keys:
            answer.kvs.add().CopyFrom(self.kvs[key])
            if request.keys_only:
                answer.kvs[-1].ClearField("value")
        return answer

    def _holds(self, compare: pb.EtcdCompare) -> bool:
        found = self.kvs.get(compare.key, pb.EtcdKeyValue())
        name = ("version", "create_revision", "mod_revision", "value")[compare.target]
        if name == "value" and compare.key not in self.kvs:
            return False
        got, expected = getattr(found, name), getattr(compare, name)
        return bool([got == expected, got > expected, got < expected, got != expected][compare.result])

    def _txn(self, request: pb.EtcdTxnRequest, context: Any) -> pb.EtcdTxnResponse:
        with self._changed:
            succeeded = all(map(self._holds, request.compare))
            operations = request.success if succeeded else request.failure
            writes = any(each.WhichOneof("request") != "request_range" for each in operations)
            if writes and self.refusals:
                self.refusals -= 1
                context.abort(grpc.StatusCode.UNAVAILABLE, "etcdserver: leader changed")
            answer = pb.EtcdTxnResponse(succeeded=succeeded)
            if writes:
                self.revision += 1
                self.write_count += 1
            for operation in operations:
                self._do(operation, answer.responses.add())
            answer.header.CopyFrom(self._header())
            self._changed.notify_all()
            if writes and self.lost_answers:
                self.lost_answers -= 1
                context.abort(grpc.StatusCode.UNAVAILABLE, "transport is closing")
            return answer

    def _do(self, operation: pb.EtcdRequestOp, answer: pb.EtcdResponseOp) -> None:
        match operation.WhichOneof("request"):
            case "request_range":
                answer.response_range.CopyFrom(self._ranged(operation.request_range))
            case "request_put":
                self._put(operation.request_put)
                answer.response_put.header.CopyFrom(self._header())
            case _:
                request = operation.request_delete_range
                keys = self._found(request.key, request.range_end)
                for key in keys:
                    self._delete(key)
                answer.response_delete_range.deleted = len(keys)

    def _put(self, request: pb.EtcdPutRequest) -> None:
        old = self.kvs.get(request.key)
        self.kvs[request.key] = pb.EtcdKeyValue(
            key=request.key,
            value=request.value,
            lease=request.lease,
            mod_revision=self.revision,
            create_revision=self.revision if old is None else old.create_revision,
            version=1 if old is None else old.version + 1,
        )

    def _delete(self, key: bytes) -> None:
        del self.kvs[key]

    def _compact(self, request: pb.EtcdCompactionRequest, context: Any) -> pb.EtcdCompactionResponse:
        with self._changed:
            if request.revision <= self.compacted:
                context.abort(grpc.StatusCode.OUT_OF_RANGE, "etcdserver: mvcc: required revision has been compacted")
            self.compacted = request.revision
            return pb.EtcdCompactionResponse(header=self._header())

    # Leases

    def _grant(self, request: pb.EtcdLeaseGrantRequest, context: Any) -> pb.EtcdLeaseGrantResponse:
        with self._changed:
            lease_id = len(self._leases) + self.revision * 1000 + 1
            self._leases[lease_id] = time.monotonic() + request.ttl, request.ttl
            return pb.EtcdLeaseGrantResponse(header=self._header(), id=lease_id, ttl=request.ttl)

    def _revoke(self, request: pb.EtcdLeaseRevokeRequest, context: Any) -> pb.EtcdLeaseRevokeResponse:
        with self._changed:
            if request.id not in self._leases:
                context.abort(grpc.StatusCode.NOT_FOUND, "etcdserver: requested lease not found")
            self._end_lease(request.id)
            return pb.EtcdLeaseRevokeResponse(header=self._header())

    def _end_lease(self, lease_id: int) -> None:
        del self._leases[lease_id]
        self.revision += 1
        for key in [key for key, kv in self.kvs.items() if kv.lease == lease_id]:
            self._delete(key)
        self._changed.notify_all()

    def _end_leases(self) -> None:
        with self._changed:
            while not self._is_stopped:
                for lease_id, (ends_at, _) in list(self._leases.items()):
                    if time.monotonic() >= ends_at:
                        self._end_lease(lease_id)
                self._changed.wait(0.02)

    def _keep_alive(self, requests: Iterator[pb.EtcdLeaseKeepAliveRequest], context: Any) -> Iterator[Any]:
        for request in requests:
            self._wait_silence(context)
            with self._changed:
                seconds = self._leases.get(request.id, (0.0, 0))[1]
                if seconds:
                    self._leases[request.id] = time.monotonic() + seconds, seconds
                answer = pb.EtcdLeaseKeepAliveResponse(header=self._header(), id=request.id, ttl=seconds)
            yield answer

    # Users

    def _authenticate(self, request: pb.EtcdAuthenticateRequest, context: Any) -> pb.EtcdAuthenticateResponse:
        if self.users.get(request.name) != request.password:
            context.abort(
                grpc.StatusCode.INVALID_ARGUMENT, "etcdserver: authentication failed, invalid user ID or password"
            )
        token = f"token-{len(self.tokens)}"
        self.tokens.add(token)
        return pb.EtcdAuthenticateResponse(header=self._header(), token=token)

    def _status(self, request: pb.EtcdStatusRequest, context: Any) -> pb.EtcdStatusResponse:
        size = sum(len(kv.value) for kv in self.kvs.values())
        return pb.EtcdStatusResponse(header=self._header(), version="0.0.0", db_size=size, db_size_in_use=size)


def etcd_program() -> str | None:
    """Return the program etcd: of the system, or the one that `make install` brought."""
    brought = ROOT / ".venv" / "etcd" / "usr" / "bin" / "etcd"
    return shutil.which("etcd") or (str(brought) if brought.is_file() else None)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


class EtcdMembers:
    """Members of a real etcd on loopback, each a process."""

    def __init__(self, directory: Path, count: int = 1) -> None:
        program = etcd_program()
        if program is None:
            pytest.skip("no etcd here: `make install` brings it where there is apt-get (package etcd-server)")
        ports = [(free_port(), free_port()) for _ in range(count)]
        cluster = ",".join(f"m{number}=http://127.0.0.1:{peer}" for number, (_, peer) in enumerate(ports))
        self.addresses = [f"127.0.0.1:{client}" for client, _ in ports]
        self._directory = directory
        self._commands = [
            [
                program,
                *("--name", f"m{number}", "--data-dir", str(directory / f"m{number}")),
                *("--listen-client-urls", f"http://127.0.0.1:{client}"),
                *("--advertise-client-urls", f"http://127.0.0.1:{client}"),
                *("--listen-peer-urls", f"http://127.0.0.1:{peer}"),
                *("--initial-advertise-peer-urls", f"http://127.0.0.1:{peer}"),
                *("--initial-cluster", cluster, "--initial-cluster-state", "new"),
                *("--heartbeat-interval", "100", "--election-timeout", "1000"),
            ]
            for number, (client, peer) in enumerate(ports)
        ]
        self.processes: list[subprocess.Popen[bytes]] = [self._process(number) for number in range(count)]
        etcd = Etcd(tuple(self.addresses))
        try:
            etcd.ask(pb.EtcdRangeRequest(key=b"/"), 60)
        except BaseException:
            self.stop()
            raise
        finally:
            etcd.close()

    def _process(self, number: int) -> subprocess.Popen[bytes]:
        with (self._directory / f"m{number}.log").open("ab") as log:
            return subprocess.Popen(
                self._commands[number], stdout=log, stderr=log, env={**os.environ, "ETCD_UNSUPPORTED_ARCH": "arm64"}
            )

    def restart(self, number: int) -> None:
        self.processes[number] = self._process(number)

    def stop(self) -> None:
        for process in self.processes:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            process.wait()
