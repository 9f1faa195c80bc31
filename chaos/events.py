"""The requests and answers of an actor, one line each in the actor's own file. The model is built from them.

Each line is passed to the operating system before the actor continues, so the line survives the actor's process.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

Event = dict[str, Any]


class EventLog:
    """The log file of one actor, which the actor's successor reopens."""

    def __init__(self, path: Path) -> None:
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def write(self, what: str, **details: Any) -> None:
        """Append an event; `details` must be JSON."""
        line = json.dumps({"what": what, "at": time.monotonic(), **details}) + "\n"
        os.write(self._fd, line.encode())


def read_events(path: Path) -> list[Event]:
    """Return the events of one actor, or an empty list if it has not started."""
    if not path.exists():
        return []
    lines = path.read_text().split("\n")
    return [json.loads(line) for line in lines[:-1]]  # the last line may be incomplete


def all_events(directory: Path, kind: str) -> Iterator[tuple[str, list[Event]]]:
    """Yield the name and the events of each actor of a kind."""
    for path in sorted(directory.glob(f"{kind}-*.jsonl")):
        yield path.stem, read_events(path)
