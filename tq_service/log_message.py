"""Structured log messages of services and clients, such as `storage lost puts storage=s count=3`."""

from __future__ import annotations

import json
import re
from typing import Any

_PLAIN = re.compile(r"[\w./:@+*-]+", re.ASCII)


class LogMessage:
    """The message of a log line: an event, then facts as key=value.

    It works with any formatter, since it is rendered when a handler writes it. `tq-service serve --log-format json`
    writes each field under its name. Values that are not a single plain word are written as JSON strings, so names
    chosen by callers cannot forge fields or lines.

    Args:
        text: the event, the same for all lines of this kind, which makes it searchable.
        fields: facts by name, such as `partition`, `storage`, `put_id`, `request_id`, `error`. Bytes are ids and
            written in hex; fields that are None are omitted.
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
