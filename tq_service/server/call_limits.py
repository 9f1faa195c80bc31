"""How many calls there may be at once, and how many of them may wait; what was refused for a limit is counted."""

from __future__ import annotations

import contextlib
import logging
import sys
from collections import Counter
from collections.abc import Iterator
from typing import Any, TypeAlias

import grpc

from tq_service.errors import LimitExceededError, ResourceExhaustedError

_log = logging.getLogger(__name__)
Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"
RETRY_AFTER_SECONDS = 1.0


class WaitingCalls:
    """Counts the calls that wait for samples or room, and refuses those beyond a limit; a client is a connection.

    Args:
        most: calls that may wait.
        most_of_one: of them, calls of one client.

    Attributes:
        count: calls that wait.
    """

    def __init__(self, most: int = sys.maxsize, most_of_one: int = sys.maxsize) -> None:
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
            raise _too_many("max_waiting_calls_per_client", counts[client] + 1, self._most_of_one, "of this client ")
        if self.count >= self._most:
            raise _too_many("max_waiting_calls", self.count + 1, self._most, "")
        self.count += 1
        counts[client] += 1
        try:
            yield
        finally:
            self.count -= 1
            counts[client] -= 1
            if not counts[client]:
                del counts[client]


class RunningCalls:
    """Counts the calls that are being answered, and refuses those beyond a limit before anything of them is read.

    Args:
        most: calls there may be.

    Attributes:
        count: calls there are.
        refused: calls that were refused since the last report, by the limit or quota for which they were.
    """

    def __init__(self, most: int = sys.maxsize) -> None:
        self._most = most
        self.count = 0
        self.refused: Counter[str] = Counter()

    @property
    def is_full(self) -> bool:
        """Whether one more is too many."""
        return self.count >= self._most

    def refusal(self) -> LimitExceededError:
        """Return the error of a call that is one too many."""
        return _too_many("max_calls", self.count + 1, self._most, "")

    def count_refusal(self, error: ResourceExhaustedError) -> None:
        """Count a call that was refused for a limit or a quota."""
        self.refused[error.metadata.get("limit_name") or error.metadata.get("bound") or error.reason] += 1

    def report(self) -> None:
        """Log what was refused since the last report."""
        if self.refused:
            counts = ", ".join(f"{count} for {name}" for name, count in self.refused.most_common())
            _log.warning("calls refused: %s", counts)
            self.refused.clear()


def _too_many(limit_name: str, got: int, limit: int, whose: str) -> LimitExceededError:
    return LimitExceededError(
        f"there would be {got} such calls {whose}at once, at most {limit} expected ({limit_name}); make fewer at once, "
        "or try again later",
        retry_after_seconds=RETRY_AFTER_SECONDS,
        metadata={"limit_name": limit_name, "got": str(got), "limit": str(limit)},
    )
