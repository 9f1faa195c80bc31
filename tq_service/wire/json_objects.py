"""JSON objects as text, which the service keeps for its clients and does not look into."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final, NoReturn

from tq_service.errors import InvalidArgumentError

MOST_BYTES: Final = 262_144


def encode_object(name: str, value: Mapping[str, Any] | None) -> str:
    """Return a mapping as text; None is one without members.

    Raises:
        InvalidArgumentError: it has something that JSON has not, or is too large.
    """
    try:
        _check_keys(value)
        text = json.dumps(dict(value or {}), ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidArgumentError(
            f"{name} cannot be sent ({error}); it takes a mapping of strings to what JSON has: text, finite numbers, "
            f"True, False, None, lists and such mappings",
            field=name,
        ) from None
    check_object(name, text)
    return text


def _check_keys(value: Any) -> None:
    """Refuse keys that JSON would have as text."""
    if isinstance(value, Mapping):
        for key in value:
            if not isinstance(key, str):
                raise TypeError(f"a key is {key!r}, expected a string")
        value = value.values()
    elif not isinstance(value, list | tuple):
        return
    for each in value:
        _check_keys(each)


def decode_object(text: str) -> dict[str, Any]:
    """Return the mapping of a text; an empty one has no members."""
    value: dict[str, Any] = json.loads(text) if text else {}
    return value


def check_object(name: str, text: str) -> None:
    """Refuse what is no JSON object, or is too large.

    Raises:
        InvalidArgumentError: it is.
    """
    if (size := len(text.encode())) > MOST_BYTES:
        raise InvalidArgumentError(f"{name} has {size} bytes, at most {MOST_BYTES} expected", field=name)
    try:
        value = json.loads(text, parse_constant=_no_number) if text else {}
    except (ValueError, RecursionError) as error:
        raise InvalidArgumentError(f"{name} is no JSON ({error}); send a JSON object", field=name) from None
    if not isinstance(value, dict):
        raise InvalidArgumentError(f"{name} is a JSON {type(value).__name__}, expected an object", field=name)


def _no_number(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is no number of JSON")
