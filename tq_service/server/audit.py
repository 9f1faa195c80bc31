"""The audit log: a line for each call that is refused and for each administrative call, never a secret or a payload."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Final, Literal

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

    def shown(self) -> dict[str, str | int]:
        """Return what is known, by name."""
        known = {
            name: value[:_LONGEST_TEXT] if isinstance(value, str) else value for name, value in asdict(self).items()
        }
        return {name: value for name, value in known.items() if value}

    def __str__(self) -> str:
        # JSON escapes line ends, control and all other unusual characters: a name cannot forge a line.
        others = [f"{name}={json.dumps(value)}" for name, value in self.shown().items() if name != "decision"]
        return " ".join([self.decision, *others])


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
        # Until when refusals of a kind are counted, and the line for those since the first, which was written.
        self._kinds: dict[tuple[str, ...], tuple[float, AuditLine]] = {}

    def note(self, line: AuditLine) -> None:
        """Write a line, or count it."""
        if line.decision == "allowed" or self._repeat_seconds <= 0:
            self._write(line)
            return
        self.flush()
        # The partition is left out: callers choose it, and could make each refusal one of its own kind.
        host = line.peer.rpartition(":")[0] or line.peer
        kind = (line.token, line.method, host, line.reason)
        if kind in self._kinds:
            until, known = self._kinds[kind]
            self._kinds[kind] = until, replace(line, peer=host, repeats=known.repeats + 1)
            return
        if len(self._kinds) < _MOST_KINDS:
            self._kinds[kind] = self._clock() + self._repeat_seconds, line
        self._write(line)

    def flush(self, *, everything: bool = False) -> None:
        """Write what was counted, where its time is over."""
        now = self._clock()
        # Kinds are in the order of their ends, since all have the same time.
        while self._kinds:
            kind, (until, line) = next(iter(self._kinds.items()))
            if until > now and not everything:
                return
            del self._kinds[kind]
            if line.repeats:
                self._write(line)

    def _write(self, line: AuditLine) -> None:
        self._log.info("%s", line, extra={"audit": line})
