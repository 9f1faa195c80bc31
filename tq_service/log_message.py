"""Log messages with fields: `storage lost puts storage=s count=3`, one form for services and clients."""

from __future__ import annotations

import json
import re
from typing import Any

_PLAIN = re.compile(r"[\w./:@+*-]+", re.ASCII)


class LogMessage:
    """The message of a log line: what happened, then the facts as key=value.

    It is formatted when a handler writes it, by any formatter; `tq-service serve --log-format json` writes the fields
    by name. A value that is not one plain word is written as a JSON string, so that a name which a caller chose can
    forge neither a field nor a line.

    Args:
        text: what happened, the same for all lines of this kind, so that one can search for it.
        fields: facts by name, such as `partition`, `storage`, `put_id`, `request_id`, `error`. Bytes are ids, written
            in hex; None leaves a field out.
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
