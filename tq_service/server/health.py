"""The standard gRPC health service, whose watches end when the server drains and so do not delay shutdown."""

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
    """Reports for each service of this process whether it accepts calls; "" stands for the process itself.

    All of them are NOT_SERVING from `add` until `serve`, and from `drain` on. A standby's process is SERVING even
    before `serve`.

    The servicer of `grpc_health` is unsuitable, because it locks all watchers while it writes to one. A client that
    does not read would thus delay the drain, which must be one step of the event loop. Its watches also end only when
    the server stops.

    Args:
        most_watches: maximum number of watches. Since they require no token, nothing else limits them.
    """

    def __init__(self, most_watches: int = 1024) -> None:
        self._watches = WaitingCalls(most_watches, limit_name="watches")
        self._statuses: dict[str, Any] = {}
        self._changed = asyncio.Event()
        self._is_draining = False

    def add(self, services: Iterable[str]) -> None:
        """Add services that do not accept calls yet."""
        self._statuses |= dict.fromkeys(services, _NOT_SERVING)

    def serve(self) -> None:
        """Report that all services accept calls, unless the server is draining."""
        self._set(process=_SERVING, services=_SERVING)

    def stand_by(self) -> None:
        """Report that the process is alive but its services accept no calls, because another controller leads."""
        self._set(process=_SERVING, services=_NOT_SERVING)

    def drain(self) -> None:
        """Report permanently that no service accepts calls; watches end once they have sent this."""
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
                f"service {request.service[:64]!r} does not exist here; {nearest(request.service, names)}",
                metadata={"service": request.service[:64]},
            )
        return health_pb2.HealthCheckResponse(status=status)

    async def Watch(  # noqa: N802  (the name of the rpc)
        self, request: health_pb2.HealthCheckRequest, context: Context
    ) -> AsyncIterator[health_pb2.HealthCheckResponse]:
        """Send the current status of a service, and each new status."""
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
                    return  # with OK, because gRPC drops unread answers of a call that ends with an error
                await changed.wait()
