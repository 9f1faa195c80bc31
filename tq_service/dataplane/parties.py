"""What the data plane needs of its callers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, TypeAlias

from tq_service.wire.columns import Bytes, ColumnShape

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
