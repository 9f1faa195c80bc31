"""Messages as dataclasses, and objects as messages: what has the same name is the same."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import MISSING, fields
from functools import cache
from types import NoneType
from typing import Any, Final, TypeVar, get_args, get_origin, get_type_hints

from google.protobuf.message import Message

from tq_service.schema import FieldSpec
from tq_service.wire.metadata import decode_spec

Result = TypeVar("Result")
Sent = TypeVar("Sent", bound=Message)
# Dataclasses whose fields are not those of their messages.
_READERS: Final[Mapping[Any, Callable[[Any], Any]]] = {FieldSpec: decode_spec}


def read_message(kind: type[Result], message: Message, **given: Any) -> Result:
    """Return a dataclass whose fields are the fields of the same names of a message.

    What is optional and not set becomes None, what is repeated a tuple, messages become the dataclasses of the fields'
    types. What is empty has the default of the dataclass, where there is one.

    Args:
        kind: the dataclass.
        message: the message.
        **given: fields of the dataclass that are not as in the message.
    """
    values = {
        name: _value(message, name, hint)
        for name, hint, has_default in _fields(kind)
        if name not in given and not (has_default and not getattr(message, name))
    }
    return kind(**values, **given)


def to_message(kind: type[Sent], source: object, **given: Any) -> Sent:
    """Return a message whose fields are the attributes of the same names of an object.

    Args:
        kind: the message.
        source: has the attributes; None stands for an optional field that is not set.
        **given: fields of the message that are no attributes, or others.
    """
    names = [field.name for field in kind.DESCRIPTOR.fields if field.name not in given]
    return kind(**{name: getattr(source, name) for name in names}, **given)


def _fields_of(kind: Any) -> list[tuple[str, Any, bool]]:
    """Return of each field its name, its type and whether it has a default but None."""
    hints = get_type_hints(kind)
    return [(field.name, hints[field.name], field.default not in {MISSING, None}) for field in fields(kind)]


_fields: Callable[[Any], list[tuple[str, Any, bool]]] = cache(_fields_of)


def _value(message: Message, name: str, hint: Any) -> Any:
    if NoneType in get_args(hint) and not message.HasField(name):
        return None
    value = getattr(message, name)
    if get_origin(hint) is tuple:
        element = get_args(hint)[0]
        return tuple(_read(each, element) for each in value)
    return _read(value, hint)


def _read(value: Any, hint: Any) -> Any:
    if not isinstance(value, Message):
        return value
    reader = _READERS.get(hint)
    return read_message(hint, value) if reader is None else reader(value)
