"""The audit log: a line for each call that is refused and for each administrative call, never a secret or a payload."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from typing import Final, Literal
from urllib.parse import unquote

LOGGER_NAME: Final = "tq_service.audit"
_LONGEST_TEXT: Final = 200
_MOST_KINDS: Final = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditLine:
    """One line. What callers chose, such as names, is escaped and cut when it is written.

    Attributes:
        decision: what became of the call.
        method: its full name.
        peer: the address that it came from.
        certificate: the common name of the caller's certificate, "" without one.
        token: the name of its token, "" without one that is known.
        partition: the partition that decided, or the first that was named; "" where none was.
        reason: why it was refused.
        repeats: how many more such calls the line stands for.
    """

    decision: Literal["refused", "allowed"]
    method: str
    peer: str = ""
    certificate: str = ""
    token: str = ""
    partition: str = ""
    reason: str = ""
    repeats: int = 0

    def shown(self) -> Iterator[tuple[str, str | int]]:
        """Yield what is known, by name."""
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, str):
                value = value[:_LONGEST_TEXT]
            if value:
                yield field.name, value

    def __str__(self) -> str:
        # JSON escapes line ends, control and all other unusual characters: a name cannot forge a line.
        return " ".join(
            value if name == "decision" else f"{name}={json.dumps(value)}"  # type: ignore[misc]  # that one is a text
            for name, value in self.shown()
        )


class Audit:
    """Writes the audit log.

    Args:
        repeat_seconds: refusals of one kind (token, method, host and reason the same) that come within this time of the
            first are counted, and logged in one line with the next; 0: each has its line.
        clock: monotonic, in seconds.
    """

    def __init__(self, repeat_seconds: float = 0.0, clock: Callable[[], float] = time.monotonic) -> None:
        self._log = logging.getLogger(LOGGER_NAME)
        self._repeat_seconds = repeat_seconds
        self._clock = clock
        self._kinds: dict[tuple[str, ...], _Kind] = {}

    def note(self, line: AuditLine) -> None:
        """Write a line, or count it."""
        if line.decision == "allowed" or self._repeat_seconds <= 0:
            self._write(line)
            return
        self.flush()
        # The partition is left out: callers choose it, and could make each refusal one of its own kind.
        kind = (line.token, line.method, _host(line.peer), line.reason)
        known = self._kinds.get(kind)
        if known is not None:
            known.repeats += 1
            known.last = line
            return
        if len(self._kinds) < _MOST_KINDS:
            self._kinds[kind] = _Kind(until=self._clock() + self._repeat_seconds, last=line)
        self._write(line)

    def flush(self, *, everything: bool = False) -> None:
        """Write what was counted, where its time is over."""
        now = self._clock()
        # Kinds are in the order of their ends, since all have the same time.
        while self._kinds:
            kind, known = next(iter(self._kinds.items()))
            if known.until > now and not everything:
                return
            del self._kinds[kind]
            if known.repeats:
                self._write(known.summary())

    def _write(self, line: AuditLine) -> None:
        self._log.info("%s", line, extra={"audit": line})


@dataclass(slots=True)
class _Kind:
    """Refusals of one kind since the first, which was written."""

    until: float
    last: AuditLine
    repeats: int = 0

    def summary(self) -> AuditLine:
        """Return the line for those that were counted."""
        return replace(self.last, peer=_host(self.last.peer), repeats=self.repeats)


def shown_peer(peer: str) -> str:
    """Return a peer as gRPC names it in a form for reading."""
    return unquote(peer)


def _host(peer: str) -> str:
    return peer.rpartition(":")[0] or peer
