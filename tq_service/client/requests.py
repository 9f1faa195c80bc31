"""Arguments of Python as messages. Refused here is only what cannot be sent; the server judges the rest."""

from __future__ import annotations

import math
import operator
import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from typing import Any, Final, TypeVar, cast

import numpy as np
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message
from google.protobuf.struct_pb2 import Struct

from tq_service.client.batch_meta import BatchMeta
from tq_service.errors import InvalidArgumentError
from tq_service.schema import FieldSpec, MetaColumn, MetaValue, StalenessLimit
from tq_service.v1 import controller_service_pb2 as pb
from tq_service.wire.enums import BATCH_UNITS, KEY_MODES, LAYOUTS, OPERATORS, STATES
from tq_service.wire.mapper import to_message
from tq_service.wire.metadata import encode_meta_columns, encode_spec, rows_to_meta_columns

Request = TypeVar("Request", bound=Message)
Check = Callable[[str, Any], Any]


def request_of(kind: type[Request], **arguments: Any) -> Request:
    """Return a request of arguments named as its fields; it has a new `request_id`, if it has one at all.

    Args:
        kind: the request.
        **arguments: its fields; None stands for an enum, a list or an optional field that is not given.

    Raises:
        InvalidArgumentError: an argument cannot be what its field holds.
    """
    checks = _checks(kind)
    values = {
        name: value if (check := checks[name]) is None else check(name, value) for name, value in arguments.items()
    }
    if "request_id" in checks:
        values["request_id"] = new_id()
    return kind(**values)


def _checks_of(kind: Any) -> dict[str, Check | None]:
    """Return by the name of each field what checks an argument and makes the value of it."""
    return {field.name: _check_of(field) for field in kind.DESCRIPTOR.fields}


_checks: Final[Callable[[Any], dict[str, Check | None]]] = cache(_checks_of)


def _check_of(field: FieldDescriptor) -> Check | None:
    is_list = field.default_value == []
    if field.enum_type is not None:
        encode = _ENUMS[field.enum_type.name].encode
        return lambda name, value: encode(value, name)
    if field.type == FieldDescriptor.TYPE_STRING:
        return texts if is_list else text
    if field.type == FieldDescriptor.TYPE_BOOL:
        return lambda _name, value: bool(value)
    bits = _BITS.get(field.type)
    if bits is None:  # bytes and messages, which the client makes itself
        return None
    if is_list:
        return integers
    if field.containing_oneof is None:
        return lambda name, value: integer(name, value, bits)
    return lambda name, value: None if value is None else integer(name, value, bits)


_BITS: Final[Mapping[int, int]] = {FieldDescriptor.TYPE_INT64: 64, FieldDescriptor.TYPE_INT32: 32}
_ENUMS: Final[Mapping[str, Any]] = {
    "BatchUnit": BATCH_UNITS, "KeyMode": KEY_MODES, "Layout": LAYOUTS, "SampleState": STATES,
}  # fmt: skip


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


def integer(name: str, value: Any, bits: int = 64) -> int:
    """Return an integer that fits into `bits`."""
    try:
        number = operator.index(value)
    except TypeError:
        raise InvalidArgumentError(f"{name} is {value!r}, expected an integer", field=name) from None
    if not -(1 << bits - 1) <= number < 1 << bits - 1:
        raise InvalidArgumentError(f"{name} is {number}, expected an integer of {bits} bits", field=name)
    return number


def integers(name: str, values: Any) -> list[int]:
    """Return a list of integers, also of an array or tensor; None is none."""
    if values is None:
        return []
    if isinstance(values, np.ndarray) and values.dtype == np.int64 and values.ndim == 1:  # such as those of a batch
        return cast("list[int]", values.tolist())
    plain = values.tolist() if hasattr(values, "tolist") else values
    if isinstance(plain, str | bytes) or not isinstance(plain, Iterable):
        raise InvalidArgumentError(f"{name} is {type(values).__name__}, expected a list of integers", field=name)
    return [integer(name, value) for value in plain]


def text(name: str, value: Any) -> str:
    """Return a string that can be sent."""
    if not isinstance(value, str):
        raise InvalidArgumentError(f"{name} is {type(value).__name__}, expected a string", field=name)
    try:
        value.encode()
    except UnicodeEncodeError:
        raise InvalidArgumentError(f"{name} is {value!r}, which is not valid Unicode", field=name) from None
    return str(value)


def texts(name: str, values: Iterable[str] | None) -> list[str]:
    """Return a list of strings; a single string is refused, since its letters are hardly meant."""
    if isinstance(values, str | bytes) or not (values is None or isinstance(values, Iterable)):
        raise InvalidArgumentError(f"{name} is {values!r}, expected a list of strings such as [{values!r}]", field=name)
    strings = list(values or ())
    try:
        "".join(strings).encode()  # all together; below says which one cannot be sent
    except (TypeError, UnicodeEncodeError):
        pass
    else:
        return strings
    return [text(f"{name}[{position}]", value) for position, value in enumerate(strings)]


def field_specs(fields: Iterable[FieldSpec]) -> list[Any]:
    """Return field specs as messages."""
    specs = list(fields)
    for spec in specs:
        if not isinstance(spec, FieldSpec):
            raise InvalidArgumentError(f"fields has a {type(spec).__name__}, expected FieldSpec", field="fields")
    return [encode_spec(spec) for spec in specs]


def staleness_limit_messages(limits: Iterable[StalenessLimit]) -> list[pb.StalenessLimit]:
    """Return staleness limits as messages."""
    given = list(limits)
    for limit in given:
        if not isinstance(limit, StalenessLimit):
            raise InvalidArgumentError(
                f"staleness_limits has a {type(limit).__name__}, expected StalenessLimit", field="staleness_limits"
            )
        text("task_name", limit.task_name)
        for bound in (limit.max_samples, limit.max_versions):
            integer("staleness_limits", 0 if bound is None else bound)
    return [to_message(pb.StalenessLimit, limit) for limit in given]


def sample_write(
    *,
    partition_id: str | None,
    metadata: BatchMeta | None = None,
    row_count: int | None,
    keys: Sequence[str] | None,
    groups: Sequence[str | None] | None,
    group_size: int | None,
    custom_meta: Sequence[Mapping[str, MetaValue]] | None,
    **others: Any,
) -> tuple[pb.SampleWrite, list[MetaColumn]]:
    """Return which samples are written and their metadata, and custom_meta in columns.

    `row_count` None stands for as many rows as `metadata`, else `keys`, `custom_meta` or `groups` have; `others` are
    fields of the write.
    """
    meta_columns = rows_to_meta_columns(custom_meta or ())
    counts = (row_count, metadata, keys, custom_meta, groups, ())
    rows = next(count if isinstance(count, int) else len(count) for count in counts if count is not None)
    if custom_meta is not None:
        check_meta_count(len(custom_meta), rows)
    write = request_of(
        pb.SampleWrite,
        partition_id=partition_of(partition_id, metadata),
        incarnation=None if metadata is None else metadata.incarnation,
        row_count=rows,
        global_indexes=None if metadata is None else metadata.indexes,
        keys=keys,
        groups=None if groups is None else [group or "" for group in groups],
        group_size=group_size or 0,
        custom_meta=encode_meta_columns(meta_columns),
        **others,
    )
    return write, meta_columns


def check_meta_count(meta_count: int, row_count: int) -> None:
    """Raise InvalidArgumentError where custom_meta is for another number of samples."""
    if meta_count != row_count:
        raise InvalidArgumentError(
            f"custom_meta is for {meta_count} samples, expected {row_count}: one mapping for each sample",
            field="custom_meta",
        )


def partition_of(partition_id: str | None, metadata: BatchMeta | None) -> str:
    """Return the partition that is meant, by name or by a batch of it."""
    if metadata is None:
        if partition_id is None:
            raise InvalidArgumentError("neither partition_id nor metadata is given; give one", field="partition_id")
        return text("partition_id", partition_id)
    if partition_id is not None and partition_id != metadata.partition_id:
        raise InvalidArgumentError(
            f"partition_id is {partition_id!r}, but metadata is of {metadata.partition_id!r}; leave partition_id out",
            field="partition_id",
        )
    return metadata.partition_id


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
    **others: Any,
) -> pb.GetMetaRequest:
    """Return the request for a batch, of which `others` are fields; `max_wait_seconds` is set at each poll."""
    return request_of(
        pb.GetMetaRequest,
        min_batch_size=min_batch_size or 0,
        micro_batch_size=micro_batch_size or 0,
        sampler=sampler or "",
        sampler_config=_struct("sampler_config", sampler_config) if sampler_config else None,
        where=[_condition(position, condition) for position, condition in enumerate(where)],
        order_by=[
            pb.Order(column=column.removeprefix("-"), descending=column.startswith("-"))
            for column in texts("order_by", order_by)
        ],
        lease_seconds=None if lease is None else lease_span(lease),
        max_deliveries=0 if max_deliveries is None else _deliveries(max_deliveries),
        **others,
    )


def lease_span(lease: float) -> float:
    """Return the seconds of a lease; 0 would stand for none."""
    span = seconds("lease", lease)
    if not span:
        raise InvalidArgumentError("lease is 0, expected a positive number of seconds", field="lease")
    return span


def _deliveries(count: int) -> int:
    """Return a bound of deliveries; 0 would stand for none."""
    if integer("max_deliveries", count, 32) < 1:
        raise InvalidArgumentError(f"max_deliveries is {count}, expected at least 1", field="max_deliveries")
    return count


def check_leased(metadata: BatchMeta) -> None:
    """Refuse batches that are not of one leased claim."""
    if metadata.lease_seconds is None:
        raise InvalidArgumentError(
            "metadata is of no leased claim: ask for it with get_meta(lease=...); batches of several claims that were "
            "put together with concat are acknowledged and extended one by one",
            field="metadata",
        )


def _condition(position: int, condition: Any) -> pb.Condition:
    name = f"where[{position}]"
    if not isinstance(condition, tuple | list) or len(condition) != 3:
        raise InvalidArgumentError(
            f"{name} is {condition!r}, expected (column, operator, value) such as ('version', '>=', 3)", field="where"
        )
    column, comparison, value = condition
    values = value if comparison == "in" else [value]
    if isinstance(values, str) or not isinstance(values, Iterable):
        raise InvalidArgumentError(f"{name}: 'in' takes a list of values, got {value!r}", field="where")
    return pb.Condition(
        column=text(name, column),
        operator=OPERATORS.encode(comparison, name),
        values=[_meta_value(name, one) for one in values],
    )


def _meta_value(name: str, value: Any) -> pb.MetaValue:
    plain = _plain(value)
    if isinstance(plain, bool):
        return pb.MetaValue(bool_value=plain)
    if isinstance(plain, int):
        return pb.MetaValue(int64_value=integer(name, plain))
    if isinstance(plain, float):
        return pb.MetaValue(double_value=plain)
    return pb.MetaValue(string_value=text(name, plain))


def _struct(name: str, mapping: Mapping[str, Any]) -> Struct:
    message = Struct()
    try:
        message.update({text(name, key): _plain(value) for key, value in mapping.items()})
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
