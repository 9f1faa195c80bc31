"""A real server for tests, in this process on a thread; and one face for both clients."""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections.abc import Callable, Coroutine
from contextlib import AbstractAsyncContextManager
from functools import cached_property
from typing import Any, Literal, TypeVar

import grpc

import tq_service as tq
from tq_service.config import load_settings
from tq_service.internal.v1.storage_control_pb2_grpc import StorageControlServiceStub
from tq_service.internal.v1.storage_registry_pb2_grpc import StorageRegistryServiceStub
from tq_service.server.app import App, running
from tq_service.v1.controller_service_pb2_grpc import ControllerServiceStub
from tq_service.v1.storage_service_pb2_grpc import StorageServiceStub

T = TypeVar("T")
ClientKind = Literal["sync", "async"]
CLIENT_KINDS: tuple[ClientKind, ...] = ("sync", "async")


class LoopThread:
    """One event loop on a thread, for servers and async clients: gRPC's asyncio wants one loop in a process."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, name="test-loop", daemon=True)
        self._thread.start()

    def start(self, coroutine: Coroutine[Any, Any, T]) -> Any:
        """Return a concurrent future of the coroutine."""
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop)

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Return what the coroutine returns."""
        result: T = self.start(coroutine).result(timeout=110)
        return result

    def stop(self) -> None:
        """End the thread."""
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join()
        self.loop.close()


class AnyClient:
    """A client of either kind with the calls of `tq.Client`: what returns an awaitable is awaited on the loop."""

    def __init__(self, kind: ClientKind, address: str, loop: LoopThread, **options: Any) -> None:
        self.kind = kind
        self._loop = loop
        self.real: Any = (tq.Client if kind == "sync" else tq.AsyncClient)(address, **options)

    def __getattr__(self, name: str) -> Callable[..., Any]:
        method = getattr(self.real, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            if inspect.iscoroutinefunction(method):
                return self._loop.run(method(*args, **kwargs))
            return method(*args, **kwargs)

        return call

    def close(self) -> None:
        """Close the client."""
        if self.kind == "sync":
            self.real.close()
        else:
            self._loop.run(self.real.aclose())


class LiveServer:
    """A server of this process, its address, and clients of it."""

    def __init__(self, loop: LoopThread, **flags: Any) -> None:
        settings = load_settings({"port": 0, "storage_id": "test-storage", **flags}).settings
        self.loop = loop
        self._running: AbstractAsyncContextManager[App] | None = running(settings)
        self.app = loop.run(self._running.__aenter__())  # type: ignore[arg-type]
        self.address = f"127.0.0.1:{self.app.port}"
        self._clients: list[AnyClient] = []

    def __enter__(self) -> LiveServer:
        return self

    def __exit__(self, *exception: object) -> None:
        for client in self._clients:
            client.close()
        if "channel" in vars(self):
            self.channel.close()
        self.stop()

    @cached_property
    def channel(self) -> grpc.Channel:
        """A channel of its own; most tests have clients instead, and do not open it."""
        return grpc.insecure_channel(self.address, options=[("grpc.use_local_subchannel_pool", 1)])

    # The calls of the services, to clients and to each other.
    controller = cached_property(lambda self: ControllerServiceStub(self.channel))
    storage = cached_property(lambda self: StorageServiceStub(self.channel))
    registry = cached_property(lambda self: StorageRegistryServiceStub(self.channel))
    control = cached_property(lambda self: StorageControlServiceStub(self.channel))

    @property
    def as_service(self) -> Any:
        """Metadata with which another service of the deployment makes its calls."""
        return self.app.listener.credentials.metadata()

    def stop(self) -> None:
        """Stop the server; its clients stay."""
        if self._running is not None:
            self.loop.run(self._running.__aexit__(None, None, None))  # type: ignore[arg-type]
            self._running = None

    def client(self, kind: ClientKind = "sync", **options: Any) -> AnyClient:
        """Return a client that is closed with the server."""
        client = AnyClient(kind, self.address, self.loop, **{"timeout": 20.0, **options})
        self._clients.append(client)
        return client

    def settle(self) -> None:
        """Let everything that is due on the server's loop happen."""

        async def turns() -> None:
            for _ in range(5):
                await asyncio.sleep(0)

        self.loop.run(turns())


StartServer = Callable[..., LiveServer]
