"""Deadlines, the pauses between tries, and the error of a call that ended badly."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

import grpc

from tq_service.errors import TqError, UnavailableError
from tq_service.wire.error_table import from_rpc_error, status_from_trailers

FIRST_PAUSE_SECONDS: Final = 0.05
LONGEST_PAUSE_SECONDS: Final = 2.0


@dataclass(frozen=True, slots=True)
class Deadline:
    """When a call must have ended, on the monotonic clock."""

    at: float
    timeout: float

    @classmethod
    def after(cls, timeout: float) -> Deadline:
        """Return the deadline `timeout` seconds from now."""
        return cls(time.monotonic() + timeout, timeout)

    def remaining(self) -> float:
        """Return the seconds left, 0 when it has passed."""
        return max(0.0, self.at - time.monotonic())


@dataclass(slots=True)
class Backoff:
    """The pauses between the tries of one call: doubled each time, with jitter, until the deadline."""

    deadline: Deadline
    draw: Callable[[], float] = field(default=random.random)
    tries: int = 0

    def pause(self) -> float:
        """Return the next pause in seconds: between half of its step and the whole."""
        step = min(LONGEST_PAUSE_SECONDS, FIRST_PAUSE_SECONDS * (1 << min(self.tries, 16)))
        self.tries += 1
        return step * (0.5 + self.draw() / 2)

    def after(self, failure: TqError) -> float:
        """Return how long to pause before the call is tried again.

        Raises:
            TqError: the failure itself where trying again is of no use, or the time left is too short for it.
        """
        if not isinstance(failure, UnavailableError):
            raise failure
        pause = self.pause()
        if pause >= self.deadline.remaining():
            raise UnavailableError(
                f"{failure.message}; tried {self.tries} times in the timeout of {self.deadline.timeout:g} s; is the "
                "service running at this address?",
                metadata=failure.metadata,
            )
        return pause


def error_of(error: grpc.RpcError, address: str) -> TqError:
    """Return the error that a failed call stands for; one of gRPC itself names the address."""
    status = status_from_trailers(error.trailing_metadata())
    failure = from_rpc_error(error.code(), error.details(), status)
    if status is None:
        failure.message = f"{failure.message} (calling {address})"
    return failure
