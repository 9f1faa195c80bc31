"""Which driver reaches a storage service: chosen by the kind that the controller says it is of.

Another place for bytes is one more driver, and a line here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, Protocol

from tq_service.dataplane.parties import CONTROLLER_KIND, GRPC_KIND, Deadline, Place, Received
from tq_service.errors import PreconditionError
from tq_service.v1.storage_service_pb2 import GetRequest, PutHeader, PutResponse
from tq_service.wire.columns import Column


class AsyncDriver(Protocol):
    """Puts bytes at one place, and gets them back."""

    async def put(self, header: PutHeader, columns: Sequence[Column], deadline: Deadline) -> PutResponse:
        """Store a put, which is to be committed. Idempotent under the put_id of the header.

        Args:
            header: describes the columns.
            columns: with their bytes.
            deadline: until when it may wait for capacity and take.

        Raises:
            InvalidArgumentError: header and columns do not agree.
            QuotaExceededError: there is no capacity.
            UnavailableError: it cannot be reached, or was broken off; it may be tried again.
        """
        ...

    async def get(
        self, request: GetRequest, row_count: int, deadline: Deadline, size_bytes: int | None = None
    ) -> list[Received]:
        """Return columns with their bytes, in memory that is the caller's, in the order of the request.

        Args:
            request: the cells.
            row_count: rows asked for of each column.
            deadline: until when it may take.
            size_bytes: of all values; None where that is not known.

        Raises:
            DataLossError: another boot of the service took the puts.
            PutNotFoundError: a put, or a cell of it, is not there.
            UnavailableError: it cannot be reached, or was broken off; it may be tried again.
        """
        ...


class AsyncConnections(Protocol):
    """What a caller has for drivers to use."""

    def over_grpc(self, address: str) -> AsyncDriver:
        """Return the driver of the storage service at an address; an empty one is that of the caller's controller."""
        ...


DRIVERS: Final[dict[str, Callable[[Place, AsyncConnections], AsyncDriver]]] = {
    GRPC_KIND: lambda place, connections: connections.over_grpc(place.address),
    CONTROLLER_KIND: lambda _, connections: connections.over_grpc(""),
}


def async_driver(place: Place, connections: AsyncConnections) -> AsyncDriver:
    """Return what reaches a storage service.

    Raises:
        PreconditionError: it is of a kind that this version does not know.
    """
    make = DRIVERS.get(place.kind)
    if make is None:
        raise PreconditionError(
            f"storage service {place.storage_id!r} is of kind {place.kind!r}, and this tq-service knows "
            f"{', '.join(DRIVERS)}; use the version of the controller here, too"
        )
    return make(place, connections)
