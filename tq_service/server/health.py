"""The standard gRPC health service. Watch calls end when the server drains so that they do not delay its shutdown."""

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


class Health(health_pb2_grpc.HealthServicer):  # type: ignore[misc]  # the package has no types
    """Reports whether each service in this process accepts calls. The name "" refers to the process itself.

    Services are NOT_SERVING until `serve` is called, and again after `drain` is called. On a standby, the process is
    SERVING, but its services are NOT_SERVING.

    The servicer in the `grpc_health` package is unsuitable, because it locks out all watchers while it writes to any
    one of them. A client that does not read could therefore delay `drain`, which must finish in a single event-loop
    iteration. In addition, Watch calls to the `grpc_health` servicer end only when the server stops.

    Args:
        most_watches: maximum number of concurrent Watch calls. No other limit applies to Watch calls, because they need
            no token.
    """

    def __init__(self, most_watches: int = 1024) -> None:
        self._watches = WaitingCalls(most_watches, limit_name="watches")
        self._statuses: dict[str, Any] = {}
        self._changed = asyncio.Event()
        self._is_draining = False

    def add(self, services: Iterable[str]) -> None:
        """Add services with the status NOT_SERVING."""
        self._statuses |= dict.fromkeys(services, _NOT_SERVING)

    def serve(self) -> None:
        """Report that all services accept calls. This method has no effect while the server is draining."""
        self._set(process=_SERVING, services=_SERVING)

    def stand_by(self) -> None:
        """Report that the process is alive but that its services reject calls because another controller leads."""
        self._set(process=_SERVING, services=_NOT_SERVING)

    def drain(self) -> None:
        """From now on, report that no service accepts calls. Each Watch call sends this final status and ends."""
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
        """Return the status of a service."""
        status = self._statuses.get(request.service)
        if status is None:
            names = [name for name in self._statuses if name]
            raise NotFoundError(
                f"this process has no service {request.service[:64]!r}; {nearest(request.service, names)}",
                metadata={"service": request.service[:64]},
            )
        return health_pb2.HealthCheckResponse(status=status)

    async def Watch(  # noqa: N802  (the name of the rpc)
        self, request: health_pb2.HealthCheckRequest, context: Context
    ) -> AsyncIterator[health_pb2.HealthCheckResponse]:
        """Send a service's current status, followed by each later change."""
        sent = None
        with self._watches.one(context):
            while True:
                changed = self._changed
                status = self._statuses.get(request.service, health_pb2.HealthCheckResponse.SERVICE_UNKNOWN)
                if status != sent:
                    sent = status
                    yield health_pb2.HealthCheckResponse(status=status)
                    continue  # the status may have changed while it was being sent
                if self._is_draining:
                    return  # end with OK, because gRPC drops unread responses if a call ends with an error
                await changed.wait()
