"""Deadlines, the pauses between tries, the error of a call that ended badly, and outages: logged while they last."""

from __future__ import annotations

import logging
import random
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

import grpc

from tq_service.addresses import cause_of
from tq_service.client.connection_check import ConnectionCheck
from tq_service.errors import DeadlineError, NotLeaderError, TqError, UnavailableError
from tq_service.log_message import LogMessage
from tq_service.wire.connection import TOKEN_FILE_VARIABLE, TOKEN_VARIABLE, Tls
from tq_service.wire.error_table import from_rpc_error, status_from_trailers

_log = logging.getLogger(__name__)

_WARN_AFTER_SECONDS: Final = 5.0
_WARN_EVERY_SECONDS: Final = 60.0

FIRST_PAUSE_SECONDS: Final = 0.05
SHORTEST_TRY_SECONDS: Final = 0.02
_LONGEST_TRY_SECONDS: Final = 1e9  # gRPC takes a deadline that 64 bits of nanoseconds cannot hold for one long past
LONGEST_PAUSE_SECONDS: Final = 0.5
LONGEST_CLUSTER_PAUSE_SECONDS: Final = 0.2
"""Shorter, since a try asks the next controller: with three, the one that leads now may be the third that is asked."""

_GRPC_MESSAGE: Final = "grpc_message"
_FINDING: Final = "finding"


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
        """Return the seconds left, 0 when it has passed; of very many no more than gRPC can count."""
        return min(max(0.0, self.at - time.monotonic()), _LONGEST_TRY_SECONDS)


@dataclass(slots=True)
class Backoff:
    """The pauses between the tries of one call: doubled each time, with jitter, until the deadline.

    There is none before the controller is asked that another one names as the leader, but after each such try there is:
    both may be wrong.
    """

    deadline: Deadline
    draw: Callable[[], float] = field(default=random.random)
    tries: int = 0
    _last: UnavailableError | None = field(default=None, init=False)
    _longest: float = field(default=LONGEST_PAUSE_SECONDS, init=False)
    _has_followed: bool = field(default=False, init=False)

    def pause(self) -> float:
        """Return the next pause in seconds: between half of its step and the whole."""
        step = min(self._longest, FIRST_PAUSE_SECONDS * (1 << min(self.tries, 16)))
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
        names_leader = False
        if isinstance(failure, NotLeaderError):
            self._longest = LONGEST_CLUSTER_PAUSE_SECONDS
            names_leader = bool(failure.metadata.get("leader_address"))
        if self._last is None or isinstance(self._last, NotLeaderError) or not names_leader:
            self._last = failure  # else it is what the leader itself answered, or why it cannot be reached
        pause, remaining = self.pause(), self.deadline.remaining()
        if remaining < SHORTEST_TRY_SECONDS:
            raise self._given_up(self._last) from failure
        self._has_followed = names_leader and not self._has_followed
        return 0.0 if self._has_followed else min(pause, remaining / 2)

    def _given_up(self, failure: UnavailableError, more: str = "") -> UnavailableError:
        times = "once" if self.tries == 1 else f"{self.tries} times"
        message = f"{failure.message}; tried for {self.deadline.timeout:g} s ({times}{more})"
        grpc_message = failure.metadata.get(_GRPC_MESSAGE)
        if grpc_message is not None:
            if _FINDING not in failure.metadata:
                # gRPC's reason may be that of another address of the name, and seldom speaks of TLS.
                message += "; is the service running there, and do both sides agree on TLS and certificates?"
            message += f" (gRPC: {grpc_message})"
        return UnavailableError(message, metadata=failure.metadata)


# What the service says, which names things as the protos have them, and what they are here.
_IN_PYTHON: Final = {
    "with skip_missing": "missing='skip'",
    "with skip_missing_fields": "missing_fields='skip'",
    "as authorization metadata": f"set {TOKEN_VARIABLE} or {TOKEN_FILE_VARIABLE}",
}


def error_of(error: grpc.RpcError, address: str, finding: str | None = None) -> TqError:
    """Return the error that a failed call stands for.

    One of gRPC itself names the address. Where that could not be reached, the error says why in plain words, and has
    gRPC's in its metadata.

    Args:
        error: what the call raised.
        address: what was called.
        finding: what `Outage` has found out about the address.
    """
    status = status_from_trailers(error.trailing_metadata())
    failure = from_rpc_error(error.code(), error.details(), status)
    if status is not None:
        if hints := [hint for words, hint in _IN_PYTHON.items() if words in failure.message]:
            failure.message += f" (in Python: {', '.join(hints)})"
        return failure
    if error.code() is grpc.StatusCode.UNAVAILABLE:
        metadata = {"address": address, _GRPC_MESSAGE: failure.message}
        if finding is not None:
            metadata[_FINDING] = finding
        cause = finding or cause_of(failure.message)
        return UnavailableError(f"cannot reach {address}: {cause}", metadata=metadata)
    failure.message = f"{failure.message} (calling {address})"
    failure.metadata.setdefault("address", address)
    return failure


class Outage:
    """What the calls on one channel know together about whether its service is reached. May be used by several threads.

    Args:
        address: of the service.
        tls: with which it is reached, None for plaintext.
    """

    def __init__(self, address: str, tls: Tls | None = None) -> None:
        self._address = address
        self._check = ConnectionCheck(address, tls)
        self._lock = threading.Lock()
        self._began: float | None = None
        self._warn_at = 0.0
        self._warning_count = 0

    @property
    def finding(self) -> str | None:
        """What is wrong at the address, where that has been found out and gRPC does not say it."""
        return self._check.finding

    def lasts(self, began: float, failure: UnavailableError, remaining_seconds: float) -> None:
        """Note that a try failed, and log it: after five seconds, or once the cause was found out, then each minute.

        Args:
            began: when the try began, on the monotonic clock.
            failure: why it failed.
            remaining_seconds: for how long the call will be tried again.
        """
        if _GRPC_MESSAGE in failure.metadata:
            self._check.begin()
        now = time.monotonic()
        with self._lock:
            if self._began is None:
                self._began, self._warn_at, self._warning_count = began, began + _WARN_AFTER_SECONDS, 0
            is_news = _FINDING in failure.metadata and not self._warning_count  # seldom passes by itself
            if now < self._warn_at and not is_news:
                return
            self._warning_count += 1
            self._warn_at = now + _WARN_EVERY_SECONDS
        _log.warning(
            LogMessage(
                "the service is unavailable; retrying",
                address=self._address,
                retry_seconds=round(remaining_seconds),
                error=failure.message,
            )
        )

    def is_over(self) -> None:
        """Note that the service has answered."""
        if self._began is None:  # which is so for nearly all calls, and needs no lock
            return
        self._check.clear()
        with self._lock:
            began, self._began = self._began, None
            is_logged = self._warning_count > 0
        if began is not None and is_logged:
            seconds = round(time.monotonic() - began)
            _log.info(LogMessage("the service is available again", address=self._address, after_seconds=seconds))
