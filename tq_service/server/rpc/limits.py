"""How many calls there may be at once, and how many of them may wait; what was refused for a limit is counted."""

from __future__ import annotations

import contextlib
import logging
import sys
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any, Final

import grpc

from tq_service.errors import LimitExceededError, ResourceExhaustedError
from tq_service.log_message import LogMessage
from tq_service.server.rpc.method_table import Method
from tq_service.server.rpc.middleware import Behavior, Caller, Context, Middleware, Refusal

_log = logging.getLogger(__name__)
RETRY_AFTER_SECONDS = 1.0


_ROUNDED_SHARE: Final = 0.035
"""gRPC rounds timeouts up on the way, and sends one of up to 3.3 % more if it has just sent that (both measured)."""


def wait_until(context: Context) -> float | None:
    """Return until when a call may wait, by `time.monotonic`, so that a refusal still arrives before its deadline."""
    remaining = context.time_remaining()
    if remaining is None:
        return None
    return time.monotonic() + remaining * (1 - _ROUNDED_SHARE) - min(1.0, remaining / 4)


class WaitingCalls:
    """Counts calls that wait, such as for samples or capacity, and rejects those beyond a limit.

    A client is a connection.

    Args:
        most: calls that may wait.
        most_of_one: of them, calls of one client.
        limit_name: of `most`.

    Attributes:
        count: calls that wait.
    """

    def __init__(
        self, most: int = sys.maxsize, most_of_one: int = sys.maxsize, limit_name: str = "max_waiting_calls"
    ) -> None:
        self._limit_name = limit_name
        self._most = most
        self._most_of_one = most_of_one
        self._by_client: Counter[str] = Counter()
        self.count = 0

    @contextlib.contextmanager
    def one(self, context: Context) -> Iterator[None]:
        """Count a call for the time of a `with`.

        Raises:
            LimitExceededError: it is one too many.
        """
        counts, client = self._by_client, context.peer()
        if counts[client] >= self._most_of_one:
            raise _too_many(f"{self._limit_name}_per_client", counts[client] + 1, self._most_of_one, "of this client ")
        if self.count >= self._most:
            raise _too_many(self._limit_name, self.count + 1, self._most, "")
        self.count += 1
        counts[client] += 1
        try:
            yield
        finally:
            self.count -= 1
            counts[client] -= 1
            if not counts[client]:
                del counts[client]


class AdmittedPeers(Middleware):
    """Knows the connections of which a call was admitted: of a caller with a valid token if the service has tokens.

    Args:
        has_tokens: whether it has; a probe, which needs none, does not count then.

    Attributes:
        since: when each was first admitted by `time.monotonic`, by peer; who follows the connections removes them.
    """

    def __init__(self, *, has_tokens: bool) -> None:
        self._has_tokens = has_tokens
        self.since: dict[str, float] = {}

    def wrap(self, method: Method, caller: Caller, behavior: Behavior) -> Behavior:
        """Return what notes the peer of a call that is not refused."""
        if (method.is_open and self._has_tokens) or caller.refusal is not None:
            return behavior
        since = self.since

        async def call(request: Any, context: Context) -> Any:
            peer = context.peer()
            if peer not in since:
                since[peer] = time.monotonic()
            return await behavior(request, context)

        return call


class RunningCalls(Middleware):
    """Counts the calls that are being answered, and rejects those beyond a limit before anything of them is read.

    Probes are not counted: they need no token, so they must not be able to take the place of others.

    Args:
        most: calls there may be.

    Attributes:
        count: calls there are.
        rejected: calls that were rejected since the last report, by the limit or quota for which they were.
    """

    def __init__(self, most: int = sys.maxsize) -> None:
        self._most = most
        self._one_too_many = Caller(
            refusal=Refusal(make_error=lambda: _too_many("max_calls", self.count + 1, self._most, ""))
        )
        self.count = 0
        self.rejected: Counter[str] = Counter()

    def admit(self, method: Method, details: grpc.HandlerCallDetails) -> Caller | None:
        """Refuse a call that is one too many."""
        is_one_too_many = self.count >= self._most and not _is_exempt(method)
        return self._one_too_many if is_one_too_many else None

    def wrap(self, method: Method, caller: Caller, behavior: Behavior) -> Behavior:
        """Return what counts the calls of a method, and those that are rejected for a limit or a quota."""
        weight = 0 if _is_exempt(method) or caller is self._one_too_many else 1

        async def call(request: Any, context: Context) -> Any:
            self.count += weight
            try:
                return await behavior(request, context)
            except ResourceExhaustedError as error:
                self.rejected[error.metadata.get("limit_name", error.reason)] += 1
                raise
            finally:
                self.count -= weight

        return call

    def report(self) -> None:
        """Log what was rejected since the last report."""
        if self.rejected:
            _log.warning(LogMessage("rejected calls beyond a limit or quota", **dict(self.rejected.most_common())))
            self.rejected.clear()


def _is_exempt(method: Method) -> bool:
    """Return whether a call does not count: a probe, or one of a service: refused heartbeats look like a lost one."""
    return method.is_open or method.is_internal


def _too_many(limit_name: str, got: int, limit: int, whose: str) -> LimitExceededError:
    return LimitExceededError(
        f"there would be {got} such calls {whose}at once, at most {limit} expected ({limit_name}); make fewer at once, "
        "or try again later",
        retry_after_seconds=RETRY_AFTER_SECONDS,
        metadata={"limit_name": limit_name, "got": str(got), "limit": str(limit)},
    )
