"""What the data plane needs of its callers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Protocol, TypeAlias

from tq_service.wire.columns import ColumnShape
from tq_service.wire.dtypes import Bytes

GRPC_KIND: Final = "grpc"
"""A storage service of tq_service, at an address."""

CONTROLLER_KIND: Final = "controller"
"""The storage service in the process of the controller, reached where the controller is."""

Received: TypeAlias = tuple[ColumnShape, Bytes]
"""A column that was got, and its bytes."""


class Deadline(Protocol):
    """When a call must have ended."""

    def remaining(self) -> float:
        """Return the seconds left, 0 when it has passed."""
        ...


@dataclass(frozen=True, slots=True)
class Seconds:
    """A deadline that begins with each call."""

    seconds: float

    def remaining(self) -> float:
        """Return the seconds that each call has."""
        return self.seconds


class Place(Protocol):
    """One storage service, as messages and clients describe it."""

    @property
    def storage_id(self) -> str:
        """Its name."""
        ...

    @property
    def boot_id(self) -> bytes:
        """Names the instance that holds the puts."""
        ...

    @property
    def kind(self) -> str:
        """Which driver reaches it, see `tq_service.dataplane._async.drivers`."""
        ...

    @property
    def address(self) -> str:
        """Where it is, for kinds that have an address."""
        ...

    @property
    def params(self) -> Mapping[str, str]:
        """What else its driver needs."""
        ...
