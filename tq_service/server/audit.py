"""The audit log, which has a line for each refused call and each administrative call.

The log contains no secrets or payloads.
"""

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
    """A line of the audit log. Text supplied by callers, such as names, is escaped and truncated in the output.

    Attributes:
        decision: whether the call was refused or allowed.
        method: full name of the method.
        peer: address of the caller.
        certificate: common name of the caller's TLS certificate, or "" without a certificate.
        token: name of the caller's token, or "" if the token is missing or unknown.
        partition: partition that caused the refusal, the first partition named in the request, or "" if the request
            names none.
        reason: reason for the refusal, or "" if the call was allowed.
        repeats: number of similar refusals summarized by this line. The first refusal is logged separately.
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
        """Return the non-empty fields as a mapping from names to values."""
        known = {
            name: value[:_LONGEST_TEXT] if isinstance(value, str) else value for name, value in asdict(self).items()
        }
        return {name: value for name, value in known.items() if value}

    def __str__(self) -> str:
        # JSON escapes line breaks and control characters, so a name cannot forge a log line.
        others = [f"{name}={json.dumps(value)}" for name, value in self.shown().items() if name != "decision"]
        return " ".join([self.decision, *others])


class Audit:
    """Writes the audit log.

    Args:
        repeat_seconds: period after a refusal during which further refusals with the same token, method, host and
            reason are only counted. After this period, their count is logged in a single line. If 0, every refusal is
            logged immediately.
        clock: monotonic clock that returns seconds.
    """

    def __init__(self, repeat_seconds: float = 0.0, clock: Callable[[], float] = time.monotonic) -> None:
        self._log = logging.getLogger(LOGGER_NAME)
        self._repeat_seconds = repeat_seconds
        self._clock = clock
        # By kind: the time until which refusals are counted, and the line that summarizes them. The first refusal of a
        # kind is logged immediately.
        self._kinds: dict[tuple[str, ...], tuple[float, AuditLine]] = {}

    def note(self, line: AuditLine) -> None:
        """Write a line. If the line repeats a recent refusal, only count it."""
        if line.decision == "allowed" or self._repeat_seconds <= 0:
            self._write(line)
            return
        self.flush()
        # The kind excludes the partition, because callers could make each refusal a new kind by varying the partition.
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
        """Log the counts of refusals whose counting period has ended or, with `everything`, of all refusals."""
        now = self._clock()
        # Kinds are sorted by end time, because the counting time is equal for all kinds.
        while self._kinds:
            kind, (until, line) = next(iter(self._kinds.items()))
            if until > now and not everything:
                return
            del self._kinds[kind]
            if line.repeats:
                self._write(line)

    def _write(self, line: AuditLine) -> None:
        self._log.info("%s", line, extra={"audit": line})
