"""Deadlines, the pauses between tries, and the error of a call that ended badly."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

import grpc

from tq_service.addresses import cause_of
from tq_service.errors import DeadlineError, TqError, UnavailableError
from tq_service.wire.error_table import from_rpc_error, status_from_trailers

FIRST_PAUSE_SECONDS: Final = 0.05
SHORTEST_TRY_SECONDS: Final = 0.02
LONGEST_PAUSE_SECONDS: Final = 0.5

_GRPC_MESSAGE: Final = "grpc_message"


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
    _last: UnavailableError | None = field(default=None, init=False)

    def pause(self) -> float:
        """Return the next pause in seconds: between half of its step and the whole."""
        step = min(LONGEST_PAUSE_SECONDS, FIRST_PAUSE_SECONDS * (1 << min(self.tries, 16)))
        self.tries += 1
        return step * (0.5 + self.draw() / 2)

    def after(self, failure: TqError) -> float:
        """Return how long to pause before the call is tried again.

        Raises:
            UnavailableError: the time left is too short for another try, or was too short for this one to be answered;
                with the last reason.
            TqError: the failure itself, where trying again is of no use.
        """
        if isinstance(failure, DeadlineError) and self._last is not None:
            raise self._given_up(self._last, ", and once more without an answer") from self._last
        if not isinstance(failure, UnavailableError):
            raise failure
        self._last = failure
        pause, remaining = self.pause(), self.deadline.remaining()
        if remaining < SHORTEST_TRY_SECONDS:
            raise self._given_up(failure) from failure
        return min(pause, remaining / 2)

    def _given_up(self, failure: UnavailableError, more: str = "") -> UnavailableError:
        times = "once" if self.tries == 1 else f"{self.tries} times"
        message = f"{failure.message}; tried for {self.deadline.timeout:g} s ({times}{more})"
        grpc_message = failure.metadata.get(_GRPC_MESSAGE)
        if grpc_message is not None:
            # gRPC's reason may be that of another address of the name, and seldom speaks of TLS.
            message += "; is the service running there, and do both sides agree on TLS and certificates?"
            message += f" (gRPC: {grpc_message})"
        return UnavailableError(message, metadata=failure.metadata)


def error_of(error: grpc.RpcError, address: str) -> TqError:
    """Return the error that a failed call stands for.

    One of gRPC itself names the address. Where that could not be reached, the error says why in plain words, and has
    gRPC's in its metadata.
    """
    status = status_from_trailers(error.trailing_metadata())
    failure = from_rpc_error(error.code(), error.details(), status)
    if status is not None:
        return failure
    if error.code() is grpc.StatusCode.UNAVAILABLE:
        metadata = {"address": address, _GRPC_MESSAGE: failure.message}
        return UnavailableError(f"cannot reach {address}: {cause_of(failure.message)}", metadata=metadata)
    failure.message = f"{failure.message} (calling {address})"
    return failure
