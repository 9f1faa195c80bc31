"""Answers of mutating requests, kept so that a retry has no second effect and gets the same answer."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, TypeVar

from tq_service.domain.aging_log import AgingLog, FrozenLog
from tq_service.errors import InvalidArgumentError

Answer = TypeVar("Answer")


class RequestLog:
    """Recorded answers by request_id, forgotten once no client can still be retrying.

    Refused requests are not recorded: they changed nothing, and may be right the next time.
    """

    def __init__(
        self,
        keep_seconds: float,
        *,
        pack: Callable[[Any], Any] = lambda answer: answer,
        unpack: Callable[[Any], Any] = lambda packed: packed,
    ) -> None:
        """Make an empty log.

        Args:
            keep_seconds: how long an answer is kept.
            pack: makes of an answer what is kept, which should be small: there may be a million of them.
            unpack: makes the answer of it again.
        """
        self._keep_seconds = keep_seconds
        self._pack = pack
        self._unpack = unpack
        self._answers: AgingLog[Any] = AgingLog()
        self.tell: Callable[[bytes, Any], None] | None = None  # told of each answer as it is kept, once it is recorded

    def __len__(self) -> int:
        return len(self._answers)

    def once(self, request_id: bytes, change: Callable[[], Answer]) -> Answer:
        """Return the recorded answer, or make the change and record its answer; there is no await in between."""
        if len(request_id) != 16:
            raise InvalidArgumentError(
                f"request_id has {len(request_id)} bytes; send 16 random bytes, the same over retries",
                field="request_id",
            )
        now = time.monotonic()
        self._answers.drop_before(now - self._keep_seconds)
        known = self._answers.get(request_id)
        if known is not None:
            recorded: Answer = self._unpack(known.value)
            return recorded
        answer = change()
        packed = self._pack(answer)
        self._answers.add(request_id, now, packed)
        if self.tell is not None:
            self.tell(request_id, packed)
        return answer

    def restore(self, request_id: bytes, packed: Any) -> None:
        """Record an answer that was told of before, as if it were given now."""
        self._answers.add(request_id, time.monotonic(), packed)

    def freeze(self) -> FrozenLog:
        """Return the answers as they are now, packed."""
        return self._answers.freeze()

    def thaw(self, answers: FrozenLog) -> None:
        """Record answers that were frozen, each as old as it was then; for a log that is empty."""
        self._answers.thaw(answers)

    def recorded(self, request_id: bytes) -> Any | None:
        """Return the recorded answer, None where there is none."""
        known = self._answers.get(request_id)
        return None if known is None else self._unpack(known.value)
