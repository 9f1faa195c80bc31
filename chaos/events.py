"""What an actor asked for and got, one line each in a file of its own: what the model is made from.

A line is in the system's hands before the actor goes on, so that it outlives the actor's process.
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
    """The file of one actor; opened again by its successor."""

    def __init__(self, path: Path) -> None:
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def write(self, what: str, **details: Any) -> None:
        """Append an event; `details` must be JSON."""
        line = json.dumps({"what": what, "at": time.monotonic(), **details}) + "\n"
        os.write(self._fd, line.encode())


def read_events(path: Path) -> list[Event]:
    """Return the events of one actor, none where it has not begun."""
    if not path.exists():
        return []
    lines = path.read_text().split("\n")
    return [json.loads(line) for line in lines[:-1]]  # what follows the last line end was being written


def all_events(directory: Path, kind: str) -> Iterator[tuple[str, list[Event]]]:
    """Yield name and events of each actor of a kind."""
    for path in sorted(directory.glob(f"{kind}-*.jsonl")):
        yield path.stem, read_events(path)
