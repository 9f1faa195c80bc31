"""Health checks one after the other while something else goes on: how long does the server's event loop keep others?"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

_PAUSE_SECONDS = 0.002
_TIMEOUT_SECONDS = 60.0


class HealthProbe:
    """Checks from a thread, on a connection of its own."""

    def __init__(self, address: str) -> None:
        self._channel = grpc.insecure_channel(address, options=[("grpc.use_local_subchannel_pool", 1)])
        self._stub = health_pb2_grpc.HealthStub(self._channel)
        self._check()

    def close(self) -> None:
        """Close the connection."""
        self._channel.close()

    @contextmanager
    def running(self) -> Iterator[list[float]]:
        """Check until the block ends; the list has the seconds of each check then."""
        seconds: list[float] = []
        stopping = threading.Event()

        def probe() -> None:
            while not stopping.wait(_PAUSE_SECONDS):
                seconds.append(self._check())

        thread = threading.Thread(target=probe, name="health-probe")
        thread.start()
        try:
            yield seconds
        finally:
            stopping.set()
            thread.join()

    def _check(self) -> float:
        started = time.perf_counter()
        self._stub.Check(health_pb2.HealthCheckRequest(), timeout=_TIMEOUT_SECONDS)
        return time.perf_counter() - started
