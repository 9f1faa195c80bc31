"""Structured log messages of services and clients, such as `storage lost puts storage=s count=3`."""

from __future__ import annotations

import json
import re
from typing import Any

_PLAIN = re.compile(r"[\w./:@+*-]+", re.ASCII)


class LogMessage:
    """A log message that consists of an event and fields in the form key=value.

    A handler renders the message when it writes the line, so the message works with any formatter. `tq-service serve
    --log-format json` writes each field under its name. A value that is not a single plain word is written as a JSON
    string. Names chosen by clients therefore cannot forge fields or lines.

    Args:
        text: description of the event. The description is the same in every log line for this event, so one search
            finds them all.
        fields: details of the event, by name, such as `partition`, `storage`, `put_id`, `request_id` or `error`. Values
            of type bytes are ids, and are written in hexadecimal. Fields whose value is None are omitted.
    """

    __slots__ = ("fields", "text")

    def __init__(self, text: str, /, **fields: Any) -> None:
        self.text = text
        self.fields = {name: _shown(value) for name, value in fields.items() if value is not None}

    def __str__(self) -> str:
        return " ".join([self.text, *(f"{name}={_quoted(value)}" for name, value in self.fields.items())])


def _shown(value: Any) -> str | int | float | bool:
    if isinstance(value, bytes):
        return value.hex()
    return value if isinstance(value, int | float) else str(value)


def _quoted(value: str | float) -> str:
    text = f"{value:.6g}" if isinstance(value, float) else str(value)
    return text if _PLAIN.fullmatch(text) else json.dumps(text)
