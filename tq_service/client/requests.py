"""Arguments of Python as messages. Refused here is only what cannot be sent; the server judges the rest."""

from __future__ import annotations

import math
import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from functools import cache, partial
from importlib.util import find_spec
from typing import Any, Final, TypeVar, cast

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message
from google.protobuf.struct_pb2 import Struct

from tq_service.client.batch_meta import NAMED_AT_ONCE, BatchMeta
from tq_service.client.namespace import Namespace
from tq_service.errors import InvalidArgumentError
from tq_service.schema import FieldSpec, StalenessLimit
from tq_service.v1 import controller_service_pb2 as pb
from tq_service.wire.messages import to_duration
from tq_service.wire.metadata import (
    BATCH_UNITS,
    KEY_MODES,
    LAYOUTS,
    OPERATORS,
    STATES,
    EnumWords,
    encode_spec,
)

Request = TypeVar("Request", bound=Message)
Bound = TypeVar("Bound", int, float, int | None)
Given = TypeVar("Given")
Converter = Callable[[str, Any], Any]


def request_of(kind: type[Request], **arguments: Any) -> Request:
    """Return a request of arguments named as its fields; it has a new `request_id`, if it has one at all.

    Args:
        kind: the request.
        **arguments: its fields; None stands for an enum, a list or an optional field that is not given.

    Raises:
        InvalidArgumentError: an argument cannot be what its field holds.
    """
    converters, required = _rules(kind)
    for name, convert in converters.items():
        if name in arguments:
            arguments[name] = convert(name, arguments[name])
    for name in required:
        if arguments.get(name, "") is None:  # which protobuf takes for 0 or ""
            raise InvalidArgumentError(f"{name} is None, which it cannot be", field=name)
    if "request_id" in kind.DESCRIPTOR.fields_by_name:
        arguments["request_id"] = new_id()
    try:
        return kind(**arguments)
    except (TypeError, ValueError) as error:  # protobuf does not say of which field
        for name, value in arguments.items():
            _check(kind, name, value)
        raise InvalidArgumentError(f"the arguments cannot be sent: {error}") from None


def _rules_of(kind: Any) -> tuple[dict[str, Converter], list[str]]:
    """Return what makes lists and enums of arguments, and which other fields must be given."""
    converters: dict[str, Converter] = {}
    required = []
    for field in kind.DESCRIPTOR.fields:
        if field.default_value == []:
            converters[field.name] = listed
        elif field.enum_type is not None and field.enum_type.name in _ENUMS:
            converters[field.name] = partial(_encode_word, _ENUMS[field.enum_type.name])
        elif field.type in _EXPECTED and field.containing_oneof is None:
            required.append(field.name)
    return converters, required


_rules: Final[Callable[[Any], tuple[dict[str, Converter], list[str]]]] = cache(_rules_of)
_EXPECTED: Final = {
    FieldDescriptor.TYPE_STRING: "a string, in valid Unicode",
    FieldDescriptor.TYPE_INT64: "an integer of 64 bits",
    FieldDescriptor.TYPE_INT32: "an integer of 32 bits",
}
_ENUMS: Final[Mapping[str, Any]] = {
    "BatchUnit": BATCH_UNITS, "KeyMode": KEY_MODES, "Layout": LAYOUTS, "SampleState": STATES,
}  # fmt: skip


def _encode_word(words: EnumWords[Any], name: str, value: Any) -> Any:
    return words.encode(value, name)


def _check(kind: type[Message], name: str, value: Any) -> None:
    """Refuse an argument that its field does not take."""
    places = [(f"{name}[{place}]", [one]) for place, one in enumerate(value)] if isinstance(value, list) else []
    for where, part in places or [(name, value)]:
        try:
            kind(**{name: part})
        except (TypeError, ValueError) as error:
            expected = _EXPECTED.get(kind.DESCRIPTOR.fields_by_name[name].type, "another type")
            got = part[0] if places else part
            raise InvalidArgumentError(f"{where} is {got!r:.200}, expected {expected} ({error})", field=name) from None


def new_id() -> bytes:
    """Return a request or put id: 16 random bytes."""
    return secrets.token_bytes(16)


def seconds(name: str, value: float) -> float:
    """Return a time span that is sane: finite and not negative."""
    try:
        span = float(value)
    except (TypeError, ValueError):
        span = math.nan
    if not (math.isfinite(span) and span >= 0):
        raise InvalidArgumentError(f"{name} is {value!r}, expected a finite number of seconds, 0 or more", field=name)
    return span


def field_specs(fields: Iterable[FieldSpec]) -> list[Any]:
    """Return field specs as messages."""
    return [encode_spec(spec) for spec in _all_of(FieldSpec, "fields", fields)]


def staleness_limit_messages(limits: Iterable[StalenessLimit]) -> list[pb.StalenessLimit]:
    """Return staleness limits as messages."""
    given = _all_of(StalenessLimit, "staleness_limits", limits)
    return [request_of(pb.StalenessLimit, **asdict(limit)) for limit in given]


def _all_of(kind: type[Given], name: str, values: Iterable[Given]) -> list[Given]:
    given = list(values)
    for value in given:
        if not isinstance(value, kind):
            raise InvalidArgumentError(f"{name} has a {type(value).__name__}, expected {kind.__name__}", field=name)
    return given


def listed(name: str, values: Any) -> list[Any]:
    """Return a list of what an iterable, an array or a tensor has; None has nothing.

    Raises:
        InvalidArgumentError: it is none, or a single string, whose letters are hardly meant.
    """
    if values is None or isinstance(values, list):
        return list(values or ())
    if isinstance(values, str | bytes) or not isinstance(values, Iterable):
        what = "list of strings" if isinstance(values, str) else "list"
        raise InvalidArgumentError(f"{name} is {values!r}, expected a {what} such as [{values!r}]", field=name)
    return cast("list[Any]", values.tolist()) if hasattr(values, "tolist") else list(values)


def named_samples(**names: Iterable[Any] | None) -> tuple[str | None, list[Any]]:
    """Return by what samples are named, None where by nothing, and these names."""
    given = [name for name, values in names.items() if values is not None]
    if len(given) > 1:
        raise InvalidArgumentError(
            f"samples are named by {' and by '.join(given)}; give one of {', '.join(names)}", field=given[0]
        )
    return (given[0], listed(given[0], names[given[0]])) if given else (None, [])


def check_waits(wait_seconds: float, named: Sequence[Any]) -> None:
    """Refuse to wait for more samples than one call names."""
    if wait_seconds and len(named) > NAMED_AT_ONCE:
        raise InvalidArgumentError(
            f"max_wait is given for {len(named)} names, at most {NAMED_AT_ONCE} expected; wait for a condition on "
            f"custom_meta instead",
            field="max_wait",
        )


def partition_of(namespace: Namespace, partition_id: str | None, metadata: BatchMeta | None) -> str:
    """Return the service's name of the partition that is meant, by its name in a namespace or by a batch of it."""
    if metadata is None:
        if partition_id is None:
            raise InvalidArgumentError("neither partition_id nor metadata is given; give one", field="partition_id")
        return namespace.full_name(partition_id)
    full_name = metadata.full_partition_id
    if partition_id is not None and namespace.full_name(partition_id) != full_name:
        raise InvalidArgumentError(
            f"partition_id is {partition_id!r}, but metadata is of {namespace.own_name(full_name)!r}; leave "
            "partition_id out",
            field="partition_id",
        )
    return full_name


def get_meta_request(
    *,
    min_batch_size: int | None,
    micro_batch_size: int | None,
    sampler: str | None,
    sampler_config: Mapping[str, Any] | None,
    where: Iterable[tuple[str, str, Any]],
    order_by: Iterable[str],
    lease: float | None,
    max_deliveries: int | None,
    claim_name: str | None,
    max_uses: int | None,
    **others: Any,
) -> pb.GetMetaRequest:
    """Return the request for a batch, of which `others` are fields; `max_wait` is set at each poll."""
    return request_of(
        pb.GetMetaRequest,
        min_batch_size=min_batch_size or 0,
        micro_batch_size=micro_batch_size or 0,
        sampler=sampler or "",
        sampler_config=_struct("sampler_config", sampler_config) if sampler_config else None,
        where=condition_messages(where),
        order_by=[_order(position, column) for position, column in enumerate(listed("order_by", order_by))],
        lease=None if lease is None else lease_duration(lease),
        max_deliveries=_not_zero("max_deliveries", max_deliveries, "at least 1") or 0,
        max_uses=_not_zero("max_uses", max_uses, "at least 1") or 0,
        claim_name=_not_empty("claim_name", claim_name) or "",
        **others,
    )


def lease_duration(lease: float) -> Duration:
    """Return the span of a lease of some seconds."""
    return to_duration(_not_zero("lease", seconds("lease", lease), "a positive number of seconds"))


def _not_zero(name: str, value: Bound, expected: str) -> Bound:
    if value == 0:  # which would stand for none
        raise InvalidArgumentError(f"{name} is 0, expected {expected}", field=name)
    return value


def _not_empty(name: str, value: str | None) -> str | None:
    if value == "":  # which would stand for none
        raise InvalidArgumentError(f"{name} is empty, expected 1 to 512 printable characters", field=name)
    return value


def check_leased(metadata: BatchMeta) -> None:
    """Refuse batches that are not of one leased claim."""
    if metadata.lease_seconds is None:
        raise InvalidArgumentError(
            "metadata is of no leased claim: ask for it with get_meta(lease=...); batches of several claims that were "
            "put together with concat are acknowledged and extended one by one",
            field="metadata",
        )


def _order(position: int, column: Any) -> pb.Order:
    if not isinstance(column, str):
        raise InvalidArgumentError(f"order_by[{position}] is {column!r}, expected a string", field="order_by")
    return request_of(pb.Order, column=column.removeprefix("-"), descending=column.startswith("-"))


def condition_messages(where: Iterable[tuple[str, str, Any]]) -> list[pb.Condition]:
    """Return conditions on custom_meta as messages."""
    return [_condition(position, condition) for position, condition in enumerate(listed("where", where))]


def _condition(position: int, condition: Any) -> pb.Condition:
    name = f"where[{position}]"
    if not isinstance(condition, tuple | list) or len(condition) != 3:
        raise InvalidArgumentError(
            f"{name} is {condition!r}, expected (column, operator, value) such as ('version', '>=', 3)", field="where"
        )
    column, comparison, value = condition
    values = listed(f"{name} with 'in'", value) if comparison == "in" else [value]
    return request_of(
        pb.Condition,
        column=column,
        operator=OPERATORS.encode(comparison, name),
        values=[_meta_value(_plain(one)) for one in values],
    )


def _meta_value(value: Any) -> pb.MetaValue:
    kinds = {bool: "bool_value", int: "int64_value", float: "double_value"}
    return request_of(pb.MetaValue, **{kinds.get(type(value), "string_value"): value})


def _struct(name: str, mapping: Mapping[str, Any]) -> Struct:
    message = Struct()
    try:
        message.update({key: _plain(value) for key, value in mapping.items()})
    except (TypeError, ValueError, AttributeError) as error:
        raise InvalidArgumentError(
            f"{name} cannot be sent ({error}); it takes a mapping of strings to JSON-like values", field=name
        ) from None
    return message


def _plain(value: Any) -> Any:
    """Return scalars of numpy and torch as Python's, tuples and arrays as lists, to any depth."""
    if isinstance(value, Mapping):
        return {key: _plain(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value]
    return value.tolist() if hasattr(value, "tolist") else value


def has_tensordict() -> bool:
    """Whether batches that are read are TensorDicts."""
    return find_spec("torch") is not None and find_spec("tensordict") is not None


def import_tensordict() -> None:
    """Import what `get_data` needs, which takes seconds, before a lease or another deadline runs."""
    if has_tensordict():
        import tensordict  # noqa: F401, PLC0415  (optional, slow to import)
