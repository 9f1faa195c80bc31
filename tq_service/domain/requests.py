"""Answers of mutating requests, kept so that a retry has no second effect and gets the same answer."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar

from tq_service.domain.aging_log import AgingLog, LogSnapshot, merged
from tq_service.errors import InvalidArgumentError

Answer = TypeVar("Answer")
_ENTRY_BYTES = 256  # of an id, a time, and what holds them together


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
        max_bytes: int | None = None,
        weigh: Callable[[Any], int] = lambda packed: 0,
    ) -> None:
        """Make an empty log.

        Args:
            keep_seconds: how long an answer is kept.
            pack: makes of an answer what is kept, which should be small: there may be a million of them.
            unpack: makes the answer of it again.
            max_bytes: what the log may take; the oldest answers are forgotten sooner then. None: no bound.
            weigh: returns the bytes of what is kept of an answer.
        """
        self._keep_seconds = keep_seconds
        self._pack = pack
        self._unpack = unpack
        self._max_bytes = max_bytes
        self._weigh = weigh
        self._used_bytes = 0
        self._answers: AgingLog[Any] = AgingLog()
        self.tell: Callable[[bytes, Any], None] | None = None  # writes down each answer as it is kept
        # What a change and its answer are made in: a fault after something was written down is the end of the service.
        self.one_step: Callable[[], AbstractContextManager[object]] = nullcontext

    def __len__(self) -> int:
        return len(self._answers)

    def once(self, request_id: bytes, change: Callable[[], Answer], kind: type[object] = object) -> Answer:
        """Return the recorded answer, or make the change and record its answer; there is no await in between.

        Raises:
            InvalidArgumentError: the id has not 16 bytes, or the recorded answer is not of this kind: it is that of
                another method, to which the caller gave the same id.
        """
        if len(request_id) != 16:
            raise InvalidArgumentError(
                f"request_id has {len(request_id)} bytes; send 16 random bytes, the same over retries",
                field="request_id",
            )
        now = time.monotonic()
        self._forget_old(now)
        recorded: Answer | None = self.recorded(request_id, kind)
        if recorded is not None:
            return recorded
        with self.one_step():
            answer = change()
            packed = self._pack(answer)
            if self.tell is not None:
                self.tell(request_id, packed)
            self._keep(request_id, now, packed)
        return answer

    def record(self, request_id: bytes, packed: Any) -> None:
        """Record an answer that was told of before, as if it were given now."""
        self._keep(request_id, time.monotonic(), packed)

    def _keep(self, request_id: bytes, now: float, packed: Any) -> None:
        self._answers.add(request_id, now, packed)
        self._used_bytes += _ENTRY_BYTES + self._weigh(packed)

    def _forget_old(self, now: float) -> None:
        while (oldest := self._answers.oldest) is not None:
            is_too_much = self._max_bytes is not None and self._used_bytes > self._max_bytes
            if not is_too_much and oldest.seconds >= now - self._keep_seconds:
                break
            self._used_bytes -= _ENTRY_BYTES + self._weigh(oldest.value)
            self._answers.drop_oldest()

    @property
    def used_bytes(self) -> int:
        """About how much memory the answers take."""
        return self._used_bytes

    def snapshot(self) -> LogSnapshot:
        """Return the answers as they are now, packed."""
        return self._answers.snapshot()

    def restore(self, answers: LogSnapshot) -> None:
        """Record the answers of a snapshot, each as old as it was then, besides those that are here."""
        if len(self._answers):
            answers = merged(answers, self.snapshot())
            self._answers = AgingLog()
        self._answers.restore(answers)
        entries = [entry for request_id in self._answers if (entry := self._answers.get(request_id)) is not None]
        self._used_bytes = sum(_ENTRY_BYTES + self._weigh(entry.value) for entry in entries)

    def recorded(self, request_id: bytes, kind: type[object] = object) -> Any | None:
        """Return the recorded answer, None where there is none.

        Raises:
            InvalidArgumentError: it is not of this kind.
        """
        known = self._answers.get(request_id)
        if known is None:
            return None
        recorded = self._unpack(known.value)
        if not isinstance(recorded, kind):
            raise InvalidArgumentError(
                f"request_id {request_id.hex()} is that of another call, which was answered with a "
                f"{type(recorded).__name__}; make a new one for each call, the same over its retries",
                field="request_id",
            )
        return recorded
