"""The standard health service; its watches end when the server drains, so that none of them holds up the end."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable
from typing import Any

from grpc_health.v1 import health_pb2, health_pb2_grpc

from tq_service.errors import NotFoundError, nearest
from tq_service.server.rpc.inbox import WaitingCalls
from tq_service.server.rpc.methods import Context

_SERVING: Any = health_pb2.HealthCheckResponse.SERVING
_NOT_SERVING: Any = health_pb2.HealthCheckResponse.NOT_SERVING


class Health(health_pb2_grpc.HealthServicer):  # type: ignore[misc]  # comes without types
    """Says of each service of this process whether it takes calls; "" is the process as a whole.

    Each is NOT_SERVING from `add` to `serve`, and from `drain` to the end; the process of a standby is SERVING before.

    The servicer of `grpc_health` holds a lock of all watchers while it writes to one of them, so one that does not read
    would hold up the drain, which must be one step of the loop; and its watches end with the server only.

    Args:
        most_watches: how many watches there may be: they need no token, so nothing else bounds them.
    """

    def __init__(self, most_watches: int = 1024) -> None:
        self._watches = WaitingCalls(most_watches, limit_name="watches")
        self._statuses: dict[str, Any] = {}
        self._changed = asyncio.Event()
        self._is_draining = False

    def add(self, services: Iterable[str]) -> None:
        """Know services that do not take calls yet."""
        self._statuses |= dict.fromkeys(services, _NOT_SERVING)

    def serve(self) -> None:
        """Say that all services take calls, unless they are about to end."""
        self._set(process=_SERVING, services=_SERVING)

    def stand_by(self) -> None:
        """Say that the process lives, and that none of its services takes calls: those of the leader do."""
        self._set(process=_SERVING, services=_NOT_SERVING)

    def drain(self) -> None:
        """Say for good that no service takes calls, and end the watches once they have said so."""
        self._set(process=_NOT_SERVING, services=_NOT_SERVING)
        self._is_draining = True

    def _set(self, *, process: Any, services: Any) -> None:
        if self._is_draining:
            return
        self._statuses = dict.fromkeys(self._statuses, services) | {"": process}
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    async def Check(  # noqa: N802  (the name of the rpc)
        self, request: health_pb2.HealthCheckRequest, context: Context
    ) -> health_pb2.HealthCheckResponse:
        """Answer the status of a service."""
        status = self._statuses.get(request.service)
        if status is None:
            names = [name for name in self._statuses if name]
            raise NotFoundError(
                f"there is no service {request.service[:64]!r} here; {nearest(request.service, names)}",
                metadata={"service": request.service[:64]},
            )
        return health_pb2.HealthCheckResponse(status=status)

    async def Watch(  # noqa: N802  (the name of the rpc)
        self, request: health_pb2.HealthCheckRequest, context: Context
    ) -> AsyncIterator[health_pb2.HealthCheckResponse]:
        """Answer the status of a service now, and whenever it changes."""
        sent = None
        with self._watches.one(context):
            while True:
                changed = self._changed
                status = self._statuses.get(request.service, health_pb2.HealthCheckResponse.SERVICE_UNKNOWN)
                if status != sent:
                    sent = status
                    yield health_pb2.HealthCheckResponse(status=status)
                    continue  # it may have changed while it was sent
                if self._is_draining:
                    return  # with OK: gRPC drops what a client has not read yet when a call ends with an error
                await changed.wait()
