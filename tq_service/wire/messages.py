"""Conversion between protobuf messages and Python objects, such as dataclasses, based on field names.

Durations are seconds as floats in Python objects, and `google.protobuf.Duration` in messages.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import MISSING, fields, is_dataclass
from functools import cache, partial
from types import NoneType
from typing import Any, Final, TypeVar, get_args, get_origin, get_type_hints

from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

from tq_service.errors import InvalidArgumentError
from tq_service.schema import (
    BatchUnit,
    EvictionReason,
    FieldSpec,
    GivenBack,
    Late,
    Layout,
    OnLost,
    Operator,
    Overflow,
    Published,
    RefillOutcome,
    ReleaseWhen,
    Scalar,
    Unmatched,
)
from tq_service.wire.metadata import (
    BATCH_UNITS,
    EVICTION_REASONS,
    GIVEN_BACK,
    LATE,
    LAYOUTS,
    ON_LOST,
    OPERATORS,
    OVERFLOW,
    REFILL_OUTCOMES,
    RELEASE_WHEN,
    UNMATCHED,
    EnumWords,
    decode_spec,
    decode_value,
    encode_spec,
)

Result = TypeVar("Result")
Sent = TypeVar("Sent", bound=Message)
_SECONDS: Final = "_seconds"
# Types whose fields differ from the fields of their messages.
_READERS: Final[Mapping[Any, Callable[[Any], Any]]] = {
    FieldSpec: decode_spec,
    Scalar: decode_value,
    Published: lambda message: Published(message.policy, message.offset),  # keeps an empty policy
}
_WORDS: Final[Mapping[Any, EnumWords[Any]]] = {
    BatchUnit: BATCH_UNITS,
    EvictionReason: EVICTION_REASONS,
    GivenBack: GIVEN_BACK,
    Late: LATE,
    Layout: LAYOUTS,
    OnLost: ON_LOST,
    Overflow: OVERFLOW,
    Operator: OPERATORS,
    RefillOutcome: REFILL_OUTCOMES,
    ReleaseWhen: RELEASE_WHEN,
    Unmatched: UNMATCHED,
}
_ENUMS: Final[Mapping[str, EnumWords[Any]]] = {
    "BatchUnit": BATCH_UNITS,
    "EvictionReason": EVICTION_REASONS,
    "Late": LATE,
    "GivenBack": GIVEN_BACK,
    "Overflow": OVERFLOW,
    "RefillOutcome": REFILL_OUTCOMES,
    "ReleaseWhen": RELEASE_WHEN,
}


def read_message(kind: type[Result], message: Message, **given: Any) -> Result:
    """Create a dataclass instance from the message fields with the same names.

    An optional field becomes None if it is unset, or if it has no presence and is empty. Repeated fields become tuples,
    submessages become dataclasses of the annotated types, and a Duration `x` becomes the float `x_seconds`. If a
    message field is empty and the dataclass field has a default, the instance uses the default.

    Args:
        kind: dataclass to instantiate.
        message: message whose fields are read.
        **given: values of dataclass fields that are not read from the message.
    """
    any_kind: Any = kind
    values = {
        name: read(message)
        for name, read, has_default in _fields(any_kind)
        if name not in given and not (has_default and not getattr(message, name))
    }
    return kind(**values, **given)


def to_message(kind: type[Sent], source: object, **given: Any) -> Sent:
    """Create a message from the object attributes with the same names.

    Args:
        kind: message class to instantiate.
        source: object whose attributes are read. An attribute is None for an unset field, an object for a submessage, a
            word for an enum, and a number `x_seconds` for a Duration `x`.
        **given: values to use for message fields instead of the source's attributes.
    """
    values = {
        field.name: _sent(getattr(source, field.name + _SECONDS * (field.message_type is Duration.DESCRIPTOR)), field)
        for field in kind.DESCRIPTOR.fields
        if field.name not in given
    }
    return kind(**values, **given)


@cache
def _fields(kind: Any) -> list[tuple[str, Callable[[Message], Any], bool]]:
    """For each dataclass field, return its name, its reader, and whether it has a default other than None.

    A duration field counts as having no default, because an unset Duration means 0 seconds.
    """
    hints = get_type_hints(kind)
    return [
        (
            field.name,
            _reader(field.name, hints[field.name]),
            field.default not in {MISSING, None} and not field.name.endswith(_SECONDS),
        )
        for field in fields(kind)
    ]


def _reader(name: str, hint: Any) -> Callable[[Message], Any]:
    """Return a function that reads a dataclass field from a message."""
    read, is_optional, is_tuple = _parts(name, hint)
    if name.endswith(_SECONDS):
        name = name.removesuffix(_SECONDS)
        read = partial(read_seconds, name)
    return partial(_value, name, read, is_optional, is_tuple)


def _parts(name: str, hint: Any) -> tuple[Callable[[Any], Any] | None, bool, bool]:
    """Return the reader for a type (or a tuple's items), whether None is allowed, and whether the type is a tuple."""
    is_optional = NoneType in get_args(hint)
    if is_optional:
        (hint,) = (each for each in get_args(hint) if each is not NoneType)
    is_tuple = get_origin(hint) is tuple
    if is_tuple:
        hint = get_args(hint)[0]
    read = partial(_WORDS[hint].decode, name=name) if hint in _WORDS else _READERS.get(hint)
    if read is None and is_dataclass(hint):
        kind: Any = hint
        read = partial(read_message, kind)
    return read, is_optional, is_tuple


def _value(name: str, read: Callable[[Any], Any] | None, is_optional: bool, is_tuple: bool, message: Message) -> Any:
    value = getattr(message, name)
    if is_optional:
        has_presence = message.DESCRIPTOR.fields_by_name[name].has_presence
        if not (message.HasField(name) if has_presence else value):
            return None
    if is_tuple:
        return tuple(value if read is None else map(read, value))
    return value if read is None else read(value)


def _sent(value: Any, field: Any) -> Any:
    """Convert an attribute's value to a message field's value."""
    described = field.message_type
    if value is None or (described is None and field.enum_type is None):
        return value
    if isinstance(value, tuple):
        return [_sent(each, field) for each in value]
    if described is None:
        return _ENUMS[field.enum_type.name].encode(value) if isinstance(value, str) else value
    if described is Duration.DESCRIPTOR:
        return to_duration(value)
    return encode_spec(value) if isinstance(value, FieldSpec) else to_message(GetMessageClass(described), value)


MOST_SECONDS: Final = 315_576_000_000
"""Maximum number of seconds that a Duration can represent, which is about 10,000 years."""
_NANOS: Final = 10**9


def to_duration(seconds: float) -> Duration:
    """Convert seconds to a Duration, rounded to nanoseconds and clipped to the representable range.

    Raises:
        ValueError: `seconds` is NaN.
    """
    seconds = max(min(seconds, MOST_SECONDS), -MOST_SECONDS)  # this argument order preserves NaN
    whole = int(seconds)  # rounded towards 0, so both parts have the same sign
    nanos = round((seconds - whole) * _NANOS)
    if abs(nanos) == _NANOS:
        whole, nanos = whole + (1 if nanos > 0 else -1), 0
    return Duration(seconds=whole, nanos=nanos)


def read_seconds(field: str, span: Duration) -> float:
    """Convert the Duration in a field to seconds. An unset Duration means 0 seconds.

    Raises:
        InvalidArgumentError: the Duration exceeds the maximum, or its parts are inconsistent.
    """
    seconds, nanos = span.seconds, span.nanos
    if abs(seconds) > MOST_SECONDS or abs(nanos) >= _NANOS or seconds * nanos < 0:
        raise InvalidArgumentError(
            f"{field} has {seconds} seconds and {nanos} nanos; expected at most {MOST_SECONDS} seconds and fewer than "
            f"{_NANOS} nanos, both with the same sign",
            field=field,
        )
    return seconds + nanos / _NANOS
