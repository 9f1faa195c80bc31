"""Converts Python arguments to requests, and responses to batches.

The service validates requests. This module checks only for arguments that a request cannot represent.
"""

from __future__ import annotations

import math
import secrets
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import cache, lru_cache, partial
from itertools import chain
from typing import Any, ClassVar, Final, Protocol, Required, TypeAlias, TypedDict, TypeVar, cast

import numpy as np
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message
from google.protobuf.struct_pb2 import Struct
from numpy.typing import NDArray

from tq_service.client.batch_meta import (
    NO_NAMESPACE,
    OWN_COLUMNS,
    BatchMeta,
    CellLocations,
    Namespace,
    check_is_batch,
    overwritten,
)
from tq_service.custom_meta import MetaColumn, MetaValue, concatenated
from tq_service.errors import InvalidArgumentError
from tq_service.results import WaitReason
from tq_service.schema import (
    DEFAULT_POLICY,
    Admission,
    Admit,
    BatchUnit,
    KeyMode,
    Published,
    Release,
    StateGiven,
    Unmatched,
    check_named_rows,
)
from tq_service.v1 import commit_pb2, metadata_pb2
from tq_service.v1 import controller_service_pb2 as pb
from tq_service.wire.columns import ColumnShape
from tq_service.wire.messages import read_seconds, to_duration
from tq_service.wire.metadata import (
    BATCH_UNITS,
    GIVEN_BACK,
    KEY_MODES,
    LATE,
    LAYOUTS,
    ON_LOST,
    OPERATORS,
    OVERFLOW,
    STATES,
    UNMATCHED,
    Indexes,
    encode_meta_columns,
    rows_to_meta_columns,
    values_to_meta_column,
)

_KNOWN: Final = ("fields", "locations", "produced_columns", *OWN_COLUMNS)

# Names are passed as a list or as an array of strings of shape `(n,)`.
Target: TypeAlias = str | BatchMeta
"""Target of a call: either a partition name or sample metadata."""

NameColumn: TypeAlias = "Sequence[str] | NDArray[np.str_]"
GroupColumn: TypeAlias = "Sequence[str | None] | NDArray[np.str_]"
# Either one mapping per sample, or one mapping of names to arrays, tensors or lists of `n` values.
MetaGiven: TypeAlias = "Sequence[Mapping[str, MetaValue]] | Mapping[str, Any]"
Request = TypeVar("Request", bound=Message)
Changed = TypeVar("Changed", pb.ClearSamplesRequest, pb.ClearFieldsRequest, pb.FailSamplesRequest)
Given = TypeVar("Given")
Converter = Callable[[Any], Any]


class ConfiguredSampler(Protocol):
    """A dataclass that represents a sampler and its options; see `tq_service.samplers` for examples.

    Attributes:
        name: the sampler's name in requests.
    """

    name: ClassVar[str]
    __dataclass_fields__: ClassVar[dict[str, Any]]


# A sampler is passed by name, or as an object that contains its options.
SamplerGiven: TypeAlias = str | ConfiguredSampler


def request_of(kind: type[Request], **arguments: Any) -> Request:
    """Create a request from its fields, with a new `request_id` if the request type has one.

    Args:
        kind: the request type.
        **arguments: values of the fields. An enum, list or optional field is left unset if its value is None.

    Raises:
        InvalidArgumentError: a value is not valid for its field.
    """
    rules = _rules(kind.DESCRIPTOR)
    for name, value in arguments.items():
        if (convert := rules.converters.get(name)) is not None:
            arguments[name] = convert(value)
        elif value is None and name in rules.required:  # protobuf would treat it as 0 or ""
            raise InvalidArgumentError(f"{name} is None; expected a value", field=name)
    if rules.has_request_id:
        arguments["request_id"] = new_id()
    try:
        return kind(**arguments)
    except (TypeError, ValueError) as error:  # protobuf does not name the field
        for name, value in arguments.items():
            _check(kind, name, value)
        raise InvalidArgumentError(f"could not encode the arguments as a request: {error}") from None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Rules:
    """How to convert a request's lists and enums, which fields it requires, and whether it has a request id."""

    converters: Mapping[str, Converter]
    required: Collection[str]
    has_request_id: bool


@cache
def _rules(descriptor: Descriptor) -> _Rules:
    converters: dict[str, Converter] = {}
    required = set()
    for field in descriptor.fields:
        if field.default_value == []:
            converters[field.name] = partial(listed, field.name)
        elif field.enum_type is not None and field.enum_type.name in _ENUMS:
            converters[field.name] = partial(_ENUMS[field.enum_type.name].encode, name=field.name)
        elif field.type in _EXPECTED and field.containing_oneof is None:
            required.add(field.name)
    has_request_id = "request_id" in descriptor.fields_by_name
    return _Rules(converters=converters, required=required, has_request_id=has_request_id)


_EXPECTED: Final = {
    FieldDescriptor.TYPE_STRING: "a string of valid Unicode",
    FieldDescriptor.TYPE_INT64: "a 64-bit integer",
    FieldDescriptor.TYPE_INT32: "a 32-bit integer",
}
_ENUMS: Final[Mapping[str, Any]] = {
    "BatchUnit": BATCH_UNITS, "GivenBack": GIVEN_BACK, "KeyMode": KEY_MODES, "Late": LATE, "Layout": LAYOUTS,
    "OnLost": ON_LOST, "Overflow": OVERFLOW, "SampleState": STATES,
    "Unmatched": UNMATCHED,
}  # fmt: skip


def _check(kind: type[Message], name: str, value: Any) -> None:
    """Raise InvalidArgumentError if an argument is not valid for its field."""
    places = [(f"{name}[{place}]", [one]) for place, one in enumerate(value)] if isinstance(value, list) else []
    for where, part in places or [(name, value)]:
        try:
            kind(**{name: part})
        except (TypeError, ValueError) as error:
            expected = _EXPECTED.get(kind.DESCRIPTOR.fields_by_name[name].type, "a different type")
            got = part[0] if places else part
            raise InvalidArgumentError(f"{where} is {got!r:.200}, expected {expected} ({error})", field=name) from None


def check_word(name: str, word: str | None, words: Sequence[str | None]) -> None:
    """Raise InvalidArgumentError if `word` is not one of `words`."""
    if word not in words:
        raise InvalidArgumentError(f"{name} is {word!r}, expected {' or '.join(map(repr, words))}", field=name)


def new_id() -> bytes:
    """Return a new request id or put id: 16 random bytes."""
    return secrets.token_bytes(16)


def seconds(name: str, value: float) -> float:
    """Convert a number of seconds to a float. Raise InvalidArgumentError if the number is negative or not finite."""
    try:
        span = float(value)
    except (TypeError, ValueError):
        span = math.nan
    if not (math.isfinite(span) and span >= 0):
        raise InvalidArgumentError(f"{name} is {value!r}, expected a finite number of seconds >= 0", field=name)
    return span


def all_of(kind: type[Given], name: str, values: Iterable[Given]) -> list[Given]:
    """Return the values as a list, after checking that all of them are of type `kind`.

    Raises:
        InvalidArgumentError: a value has a different type.
    """
    given = list(values)
    for value in given:
        if not isinstance(value, kind):
            raise InvalidArgumentError(
                f"{name}: got a value of type {type(value).__name__}, expected type {kind.__name__}", field=name
            )
    return given


def listed(name: str, values: Any) -> list[Any]:
    """Return the items of an iterable, array or tensor as a list, or an empty list for None.

    Raises:
        InvalidArgumentError: the value is a string, which is probably a mistake, or is not iterable.
    """
    if values is None or isinstance(values, list | tuple):
        return list(values or ())
    if isinstance(values, str | bytes) or not isinstance(values, Iterable):
        what = "list of strings" if isinstance(values, str) else "list"
        raise InvalidArgumentError(f"{name} is {values!r}, expected a {what} such as [{values!r}]", field=name)
    return cast("list[Any]", values.tolist()) if hasattr(values, "tolist") else list(values)


def named_samples(**names: Iterable[Any] | BatchMeta | None) -> tuple[str | None, Sequence[Any] | Indexes]:
    """Return the name and values of the only argument that is set. A batch is replaced by its global indexes."""
    given = [name for name, value in names.items() if value is not None]
    if len(given) > 1:
        raise InvalidArgumentError(
            f"got {' and '.join(given)}; expected only one of {', '.join(names)}", field=given[0]
        )
    if not given:
        return None, []
    named = names[given[0]]
    if isinstance(named, BatchMeta):
        check_is_batch(named)
        return "global_indexes", named.indexes
    return given[0], listed(given[0], named)


def partition_of(namespace: Namespace, target: Target) -> str:
    """Return the full name of a call's target partition. The target is a partition name or sample metadata."""
    if isinstance(target, BatchMeta):
        return target.full_partition_id
    if not isinstance(target, str):
        raise InvalidArgumentError(
            f"target is of type {type(target).__name__}, expected a partition name or sample metadata",
            field="partition_id",
        )
    return namespace.full_name(target)


def metadata_of(target: Target) -> BatchMeta | None:
    """Return the target if it is sample metadata, or None if it is a partition name."""
    return target if isinstance(target, BatchMeta) else None


def with_short_forms(
    admissions: Iterable[Admission],
    release: Release | None,
    *,
    clear_after: Iterable[str] | None,
    max_staleness: int | None,
    global_batch: int | None,
    batch_unit: BatchUnit,
) -> tuple[list[Admission], Release | None]:
    """Expand the shorthand arguments of `create_partition`, and return the resulting admissions and release.

    Raises:
        InvalidArgumentError: a shorthand argument is incomplete, a value has the wrong type, or both `release` and its
            shorthand are set.
    """
    found = all_of(Admission, "admissions", admissions)
    tasks = listed("clear_after", clear_after)
    if release is not None:
        all_of(Release, "release", [release])
    if clear_after is not None:
        if release is not None:
            raise InvalidArgumentError(
                "clear_after and release are both set; expected only one. Specify the tasks in the release",
                field="clear_after",
            )
        if not tasks:
            raise InvalidArgumentError(
                "clear_after is empty; expected at least one task. To keep samples until they are cleared, omit "
                "clear_after",
                field="clear_after",
            )
        release = Release("trained", tasks)
    if max_staleness is None:
        if global_batch is not None or batch_unit != "sample":
            name, value = ("batch_unit", batch_unit) if global_batch is None else ("global_batch", global_batch)
            raise InvalidArgumentError(
                f"{name} is {value!r} without max_staleness; expected both. Set max_staleness, or omit both",
                field=name,
            )
        return found, release
    if len(tasks) != 1:
        raise InvalidArgumentError(
            f"max_staleness is {max_staleness} and clear_after has {len(tasks)} tasks; expected exactly one task. Set "
            "clear_after to the task to limit, or add an Admission for this task to admissions",
            field="max_staleness",
        )
    bound = Admission(tasks[0], max_staleness=max_staleness, global_batch=global_batch or 0, unit=batch_unit)
    return [*found, bound], release


class ClaimOptions(TypedDict, total=False):
    """Type of a dict with options shared by several `Client.claim` calls, except `batch_count` and `timeout`.

        options: tq.types.ClaimOptions = {"batch_size": 8, "dp_rank": 0, "dp_size": 4}
        data, batch = client.get_batch("train", "update_actor", ["input_ids"], **options | {"batch_index": 0})

    To set an option that varies between calls, merge it into the dict as shown. Type checkers reject options that could
    be passed twice.
    """

    batch_size: Required[int]
    min_batch_size: int | None
    batch_unit: BatchUnit
    micro_batch_size: int | None
    sampler: SamplerGiven | None
    sampler_config: Mapping[str, Any] | None
    dp_rank: int | None
    dp_size: int | None
    batch_index: int | None
    drop_last: bool
    where: Iterable[tuple[str, str, Any]]
    order_by: Iterable[str]
    finite: bool
    incarnation: bytes
    epoch: int | None
    lease: float | None
    max_deliveries: int | None
    claim_name: str | None
    max_uses: int | None
    unmatched: Unmatched
    least_members: int | None
    refill: tuple[str, str] | None
    max_refills: int
    totals: Sequence[str]
    held: bool
    admit: Admit | None
    not_before_version: int | None
    policy: str
    max_wait: float
    explain: bool | None
    on_wait: Callable[[WaitReason], object] | None


def get_meta_request(
    *,
    data_fields: Sequence[str],
    sampler: SamplerGiven | None,
    sampler_config: Mapping[str, Any] | None,
    where: Iterable[tuple[str, str, Any]],
    order_by: Iterable[str],
    claim_name: str | None,
    dp_rank: int | None = None,
    batch_index: int | None = None,
    batch_count: int | None = None,
    not_before_version: int | None = None,
    policy: str = DEFAULT_POLICY,
    refill: tuple[str, str] | None = None,
    max_refills: int = 3,
    admit: Admit | None = None,
    namespace: Namespace = NO_NAMESPACE,
    **alike: Any,
) -> pb.GetMetaRequest:
    """Build the request for the arguments of `claim`. The caller must set `max_wait` before each call.

    Policy names, and partition names in `refill` and `admit`, are relative to `namespace`.
    """
    own: dict[str, Any] = {"dp_rank": dp_rank, "batch_index": batch_index}
    if not_before_version is not None:
        own |= {"not_before_version": not_before_version, "policy": namespace.full_name(policy)}
    if refill is not None:
        if not isinstance(refill, tuple) or len(refill) != 2:
            raise InvalidArgumentError(
                f"refill is {refill!r:.200}, expected (partition_id, task_name) such as ('prompts', 'rollout')",
                field="refill",
            )
        own["refill"] = request_of(
            pb.Refill,
            partition_id=namespace.full_name(refill[0]),
            task_name=refill[1],
            max_refills=not_zero("max_refills", max_refills),
        )
    if admit is not None:
        if not isinstance(admit, Admit):
            raise InvalidArgumentError(
                f"admit is {admit!r:.200}, expected Admit(partition_id, group_size=...)", field="admit"
            )
        own["admit"] = request_of(
            pb.Admit,
            partition_id=namespace.full_name(admit.partition_id),
            group_size=admit.slot_count,
            on_lost=admit.on_lost,
            policy="" if admit.policy is None else namespace.full_name(admit.policy),
        )
    if batch_count is not None:
        own["batch_count"] = not_zero("batch_count", batch_count)
    if claim_name is not None:
        own["claim_name"] = not_zero("claim_name", claim_name)
    if sampler is not None:
        sampler, sampler_config = name_and_options(sampler, sampler_config)
    if sampler_config:
        own["sampler_config"] = _struct("sampler_config", sampler_config)
    if conditions := condition_messages(where, namespace):
        own["where"] = conditions
    if columns := listed("order_by", order_by):
        own["order_by"] = [_order(*each) for each in enumerate(columns)]
    request = request_of(pb.GetMetaRequest, **own)
    alike |= {"sampler": sampler, "data_fields": tuple(listed("data_fields", data_fields))}
    try:
        request.MergeFromString(_serialized_claim(**alike))
    except TypeError:  # an argument is not hashable, so it cannot be cached
        request.MergeFromString(_serialized_claim.__wrapped__(**alike))
    return request


def name_and_options(
    sampler: SamplerGiven, sampler_config: Mapping[str, Any] | None
) -> tuple[str, Mapping[str, Any] | None]:
    """Return the name and options of a sampler passed by name or as an object.

    If the sampler is an object, options with default values are omitted. As a result, ranks send identical requests
    whether they pass an object or a name with options. In addition, an older service only needs to support the options
    that are used.

    Raises:
        InvalidArgumentError: `sampler` is neither a name nor a sampler, or `sampler` is an object and `sampler_config`
            is also set.
    """
    if isinstance(sampler, str):
        return sampler, sampler_config
    name = getattr(sampler, "name", None)
    if isinstance(sampler, type) or not is_dataclass(sampler) or not isinstance(name, str):
        raise InvalidArgumentError(
            f"sampler is {sampler!r:.200}; expected a name such as 'seqlen_balanced', or an object such as "
            "tq.samplers.SeqlenBalancedSampler()",
            field="sampler",
        )
    if sampler_config is not None:
        raise InvalidArgumentError(
            f"sampler_config is {sampler_config!r:.200} and sampler is {sampler!r:.200}; expected "
            f"sampler_config only with a sampler's name. Set the options in the object, or pass the name {name!r}",
            field="sampler_config",
        )
    options: dict[str, Any] = {}
    for option in fields(sampler):
        value = _plain(getattr(sampler, option.name))
        if option.init and value != option.default:
            options[option.name] = value
    return name, options


@lru_cache(maxsize=256, typed=True)
def _serialized_claim(**arguments: Any) -> bytes:
    """Serialize the part of a claim request that is the same for all batches of a rank."""
    for name in ("max_deliveries", "max_uses", "least_members"):
        not_zero(name, arguments[name])
    lease = arguments["lease"]
    arguments["lease"] = None if lease is None else lease_duration(lease)
    given = {name: value for name, value in arguments.items() if value is not None or name not in _MAY_BE_NONE}
    alike = request_of(pb.GetMetaRequest, **given)
    alike.ClearField("request_id")
    return alike.SerializeToString()


# Arguments of `claim` that may be None. None is not sent, because protobuf would represent it as 0 or "".
_MAY_BE_NONE: Final = {"min_batch_size", "micro_batch_size", "sampler", "max_deliveries", "max_uses", "least_members"}
_NOT_ZERO: Final = {
    "batch_count": "1 to 64",
    "max_deliveries": "at least 1",
    "max_uses": "at least 1",
    "least_members": "at least 1",
    "limit": "1 to 1,024",
    "max_refills": "at least 1",
    "claim_name": "1 to 512 printable characters",
    "lease": "a positive number of seconds",
}


def lease_duration(lease: float) -> Duration:
    """Convert a lease in seconds to a Duration. Raise InvalidArgumentError if the lease is not positive."""
    return to_duration(not_zero("lease", seconds("lease", lease)))


def not_zero(name: str, value: Given) -> Given:
    """Return the value. Raise InvalidArgumentError if the value is 0 or "", which a request treats as unset."""
    if value in (0, ""):
        raise InvalidArgumentError(f"{name} is {'empty' if value == '' else 0}, expected {_NOT_ZERO[name]}", field=name)
    return value


def check_leased(metadata: BatchMeta) -> None:
    """Raise InvalidArgumentError unless all samples of a batch belong to a single leased claim."""
    check_is_batch(metadata)
    if metadata.lease_seconds is None:
        raise InvalidArgumentError(
            "metadata does not come from a single leased claim; claim it with claim(lease=...). If a batch was "
            "concatenated from several claims, acknowledge and extend the parts separately",
            field="metadata",
        )


def held_samples(metadata: BatchMeta) -> pb.HeldSamples:
    """Convert a leased batch to a message that refers to the samples leased to a worker."""
    check_leased(metadata)
    return pb.HeldSamples(
        partition_id=metadata.full_partition_id,
        incarnation=metadata.incarnation,
        claim=metadata.leased_claim,
        global_indexes=metadata.global_indexes,
    )


def check_ack(metadata: BatchMeta | None, *, fenced: bool) -> None:
    """Raise InvalidArgumentError unless a put with `ack` is fenced and targets samples of a single leased claim."""
    if metadata is None:
        raise InvalidArgumentError(
            "ack is True, but the put targets a partition; expected samples of a leased claim. Pass the batch "
            "returned by claim(lease=...), or omit ack.",
            field="metadata",
        )
    check_leased(metadata)
    if not fenced:
        raise InvalidArgumentError(
            "fenced is False and ack is True, but only leased samples can be acknowledged; omit one of the two "
            "arguments",
            field="fenced",
        )


def check_rows(metadata: BatchMeta, columns: Iterable[ColumnShape]) -> None:
    """Raise InvalidArgumentError unless each column has exactly one row per sample of the batch."""
    for column in columns:
        if column.row_count != metadata.size:
            raise InvalidArgumentError(
                f"metadata has {metadata.size} samples, but field {column.spec.name!r} has {column.row_count} rows; "
                "provide one row per sample, or pass the metadata of the samples to which the rows belong",
                field="data",
            )


def check_group_rows(write: Write, columns: Iterable[ColumnShape]) -> None:
    """Raise InvalidArgumentError unless each column has exactly one row per group."""
    for column in columns:
        if column.row_count != len(write.group_column):
            raise InvalidArgumentError(
                f"groups has {len(write.group_column)} names, but field {column.spec.name!r} has {column.row_count} "
                f"rows; provide one row per group",
                field="groups",
            )


def row_lengths(name: str, values: Iterable[int], row_count: int) -> list[int]:
    """Return the lengths of cells as a list with one length per sample.

    Raises:
        InvalidArgumentError: the number of lengths differs from the number of samples, or a length is negative or not
            an integer.
    """
    lengths = listed(name, values)
    if len(lengths) != row_count:
        raise InvalidArgumentError(
            f"{name} has {len(lengths)} lengths, expected {row_count}, one per sample in metadata", field=name
        )
    for place, length in enumerate(lengths):
        if not isinstance(length, int) or isinstance(length, bool) or length < 0:
            raise InvalidArgumentError(f"{name}[{place}] is {length!r:.200}; expected an integer >= 0", field=name)
    return lengths


def _order(position: int, column: Any) -> pb.Order:
    if not isinstance(column, str):
        raise InvalidArgumentError(f"order_by[{position}] is {column!r}, expected a string", field="order_by")
    return request_of(pb.Order, column=column.removeprefix("-"), descending=column.startswith("-"))


def changed_samples(
    kind: type[Changed],
    namespace: Namespace,
    target: Target,
    *,
    keys: Iterable[str] | None,
    global_indexes: Iterable[int] | None,
    groups: Iterable[str] | None,
    rollouts: Iterable[str] | None,
    where: Iterable[tuple[str, str, Any]],
    task_name: str,
    fenced: bool,
    **others: Any,
) -> Changed | None:
    """Build a request to clear samples, fail samples or clear fields. Return None if no samples are selected.

    `others` sets additional fields of the request.

    If the caller names samples, even with an empty list, `where` and `task_name` only narrow the selection.
    """
    metadata = metadata_of(target)
    if metadata is not None:
        check_is_batch(metadata)
    request = request_of(
        kind,
        partition_id=partition_of(namespace, target),
        incarnation=b"" if metadata is None else metadata.incarnation,
        global_indexes=global_indexes if metadata is None else metadata.handled_indexes,
        keys=keys,
        groups=groups,
        rollouts=rollouts,
        where=condition_messages(where, namespace),
        claim=metadata.leased_claim if metadata is not None and fenced else None,
        task_name=task_name,
        **others,
    )
    is_named = any(names is not None for names in (metadata, keys, global_indexes, groups, rollouts))
    is_all = bool((request.where or task_name) and not is_named) or bool(others.get("skipped_by"))
    named = request.global_indexes or request.keys or request.groups or request.rollouts
    return request if named or is_all else None


def condition_messages(where: Iterable[tuple[str, str, Any]], namespace: Namespace) -> list[pb.Condition]:
    """Convert conditions on custom_meta to messages. Policy names in conditions are relative to the namespace."""
    conditions = enumerate(listed("where", where))
    return [_condition(position, condition, namespace) for position, condition in conditions]


def _condition(position: int, condition: Any, namespace: Namespace) -> pb.Condition:
    name = f"where[{position}]"
    if not isinstance(condition, tuple | list) or len(condition) != 3:
        raise InvalidArgumentError(
            f"{name} is {condition!r}, expected (column, operator, value) such as ('version', '>=', 3)", field="where"
        )
    column, comparison, value = condition
    if isinstance(value, Published):
        published = request_of(pb.PublishedVersion, policy=namespace.full_name(value.policy), offset=value.offset)
        return request_of(pb.Condition, column=column, operator=OPERATORS.encode(comparison, name), published=published)
    values = listed(f"{name} with 'in'", value) if comparison == "in" else [value]
    return request_of(
        pb.Condition,
        column=column,
        operator=OPERATORS.encode(comparison, name),
        values=[
            request_of(pb.MetaValue, **{_VALUE_FIELDS.get(type(plain), "string_value"): plain})
            for plain in map(_plain, values)
        ],
    )


_VALUE_FIELDS: Final[Mapping[type, str]] = {bool: "bool_value", int: "int64_value", float: "double_value"}


def _struct(name: str, mapping: Mapping[str, Any]) -> Struct:
    message = Struct()
    try:
        message.update({key: _plain(value) for key, value in mapping.items()})
    except (TypeError, ValueError, AttributeError) as error:
        raise InvalidArgumentError(
            f"could not encode {name} ({error}); expected a mapping of strings to JSON-like values", field=name
        ) from None
    return message


def _plain(value: Any) -> Any:
    """Recursively convert numpy and torch scalars to Python scalars, and convert tuples and arrays to lists."""
    if isinstance(value, Mapping):
        return {key: _plain(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value]
    return value.tolist() if hasattr(value, "tolist") else value


class PlacementGrant:
    """A time-limited grant to send up to a given number of bytes to a set of storage services in rotation.

    The grant ends early if one of the services fails, so that no more puts are sent to a lost or full service.
    Concurrent calls may share a grant. The bytes of concurrent calls are counted with a small delay.
    """

    def __init__(self) -> None:
        self._answer = pb.PlacePutResponse()
        self._until = 0.0
        self._used_bytes = 0
        self._turn = 0

    def place(self, size_bytes: int) -> pb.PlacePutResponse | None:
        """Return the placement to pass to `endpoint`, or None if the grant does not cover the put."""
        used_bytes = self._used_bytes + size_bytes
        if size_bytes > self._answer.max_granted_put_bytes or used_bytes > self._answer.grant_bytes:
            return None
        if time.monotonic() >= self._until:
            return None
        self._used_bytes = used_bytes
        self._turn += 1
        return self._answer

    def renew(self, answer: pb.PlacePutResponse) -> None:
        """Start a new grant. The put that requested the grant is sent to the first storage service in the grant."""
        self._answer = answer
        self._until = time.monotonic() + read_seconds("grant_duration", answer.grant_duration)
        self._used_bytes = self._turn = 0

    def endpoint(self, answer: pb.PlacePutResponse) -> metadata_pb2.StorageEndpoint:
        """Return the next storage service in turn."""
        return answer.storages[self._turn % len(answer.storages)]

    def end(self) -> None:
        """End the grant so that the controller places the next put."""
        self._until = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Write:
    """The samples written by one call, with all their attributes except columns; see `SampleWrite`.

    Attributes:
        partition_id: full name of the partition on the service.
        row_count: number of samples.
        metadata: the existing samples to write, or None to write new samples or the samples with the given keys.
        key_column: keys in the form used by `BatchMeta`, or () if no keys are passed.
        group_column: groups in the form used by `BatchMeta`, or () if no groups are passed.
        rollout_column: rollouts in the form used by `BatchMeta`, or () if no rollouts are passed.
        meta_columns: custom_meta columns in the form that `BatchMeta` uses, or () if the call passes no custom_meta.
        key_mode: whether keys must exist, must be new, or may be either.
        group_size: number of members in a complete group.
        ends_rollouts: whether to close the rollouts of the samples.
        state: new state of the samples.
        fenced: whether to reject the write if the samples come from a leased claim whose lease the worker no longer
            holds.
        ack: whether to acknowledge the samples atomically with the write.
        append_at: for an append, the previous lengths of the cells, or () if cells are replaced.
        of_groups: whether each row belongs to a group rather than to a sample.
    """

    partition_id: str
    row_count: int
    metadata: BatchMeta | None = None
    key_column: tuple[str, ...] = ()
    group_column: tuple[str, ...] = ()
    rollout_column: tuple[str, ...] = ()
    meta_columns: tuple[MetaColumn, ...] = ()
    key_mode: KeyMode | None = None
    group_size: int | None = None
    ends_rollouts: bool = False
    state: StateGiven | None = None
    fenced: bool = True
    ack: bool = False
    append_at: Sequence[int] = ()
    of_groups: bool = False

    @property
    def claim(self) -> metadata_pb2.LeasedClaim | None:
        """The claim whose lease the service checks before the write, or None if the service checks no lease."""
        return self.metadata.leased_claim if self.metadata is not None and self.fenced else None


def write_of(
    namespace: Namespace,
    *,
    target: Target,
    row_count: int | None,
    keys: NameColumn | None,
    groups: GroupColumn | None,
    custom_meta: MetaGiven | None,
    rollouts: GroupColumn | None = None,
    **others: Any,
) -> Write:
    """Build a `Write` from the Python arguments of a call.

    If `row_count` is None, it is derived from the metadata, `keys`, `custom_meta`, `groups` or `rollouts`, in that
    order of preference. `others` contains additional attributes of the write.
    """
    metadata = metadata_of(target)
    given_keys = None if keys is None else listed("keys", keys)
    given_groups, given_rollouts = _given_names("groups", groups), _given_names("rollouts", rollouts)
    if row_count is None and (metadata is not None or given_keys is not None):
        row_count = len(given_keys or ()) if metadata is None else metadata.size
    meta_columns, meta_count = ([], None) if custom_meta is None else meta_columns_of(custom_meta, row_count)
    counts = (row_count, meta_count, len(given_groups or given_rollouts or ()))
    rows = next(count for count in counts if count is not None)
    _check_names("keys", given_keys, rows)
    _check_names("groups", given_groups, rows)
    _check_names("rollouts", given_rollouts, rows)
    return Write(
        partition_id=partition_of(namespace, target),
        row_count=rows,
        metadata=metadata,
        key_column=tuple(given_keys or ()),
        group_column=tuple(given_groups or ()),
        rollout_column=tuple(given_rollouts or ()),
        meta_columns=tuple(meta_columns),
        **others,
    )


def write_message(writes: Sequence[Write], rows_per_put: int = 0) -> commit_pb2.SampleWrite:
    """Return the `SampleWrite` message for a single write, or for several writes combined in order."""
    first = writes[0]
    batches = [write.metadata for write in writes if write.metadata is not None]
    message = request_of(
        commit_pb2.SampleWrite,
        partition_id=first.partition_id,
        incarnation=batches[0].incarnation if batches else None,
        row_count=sum(write.row_count for write in writes),
        global_indexes=np.concatenate([batch.indexes for batch in batches]) if batches else None,
        claim=first.claim,
        ack=first.ack,
        keys=_names_of([write.key_column for write in writes]),
        key_mode=first.key_mode,
        groups=_names_of([write.group_column for write in writes]),
        group_size=first.group_size or 0,
        rollouts=_names_of([write.rollout_column for write in writes]),
        ends_rollouts=first.ends_rollouts,
        state=first.state,
        rows_per_put=rows_per_put,
        append_at=first.append_at,
        of_groups=first.of_groups,
    )
    if first.meta_columns:
        columns = zip(*(write.meta_columns for write in writes), strict=True)
        message.custom_meta.extend(
            encode_meta_columns([parts[0] if len(parts) == 1 else concatenated(parts) for parts in columns])
        )
    return message


def _names_of(columns: Sequence[Sequence[str]]) -> Sequence[str]:
    """Concatenate the names of several writes. If there is only one write, its names are returned without a copy."""
    return columns[0] if len(columns) == 1 else list(chain.from_iterable(columns))


def written_meta(answered: BatchMeta, known: BatchMeta | None, write: Write, indexes: Indexes) -> BatchMeta:
    """Return the metadata of the written samples.

    Args:
        answered: metadata in the response to the write. It contains the partition, its incarnation and the fields of
            the put, but not the written keys, groups, rollouts and custom_meta.
        known: the samples' complete metadata, as returned by the service, or None if it was not requested.
        write: the write that was sent.
        indexes: global indexes of the samples.
    """
    metadata = write.metadata
    if known is not None:
        return known if metadata is None else replace(metadata, **{name: getattr(known, name) for name in _KNOWN})
    if metadata is None:
        return BatchMeta(
            partition_id=answered.partition_id,
            namespace=answered.namespace,
            incarnation=answered.incarnation,
            indexes=indexes,
            fields=answered.fields,
            **{name: getattr(write, name) for name in OWN_COLUMNS},
        )
    fields = {spec.name: spec for spec in (*metadata.fields, *answered.fields)}
    return replace(
        metadata,
        fields=tuple(fields.values()),
        # The put changed the locations of some cells, so `get_data` must query the new locations.
        locations=CellLocations() if answered.fields else metadata.locations,
        produced_columns=(),
        **overwritten(metadata, write),
    )


def _given_names(name: str, names: GroupColumn | None) -> list[Any] | None:
    return None if names is None else ["" if each is None else each for each in listed(name, names)]


def _check_names(name: str, names: Sequence[Any] | None, row_count: int) -> None:
    """Raise InvalidArgumentError if there are too few or too many names, or a name is not a string."""
    if names is None:
        return
    check_named_rows(name, len(names))
    if {*map(type, names)} - {str}:  # protobuf would convert bytes to text
        for position, one in enumerate(names):
            if not isinstance(one, str):
                raise InvalidArgumentError(f"{name}[{position}] is {one!r:.200}, expected a string", field=name)
    if row_count and not names:
        raise InvalidArgumentError(
            f"{name} is empty, expected one name per sample ({row_count} in total). If the samples have no names, omit "
            f"{name}",
            field=name,
        )


def meta_columns_of(custom_meta: MetaGiven, row_count: int | None) -> tuple[list[MetaColumn], int | None]:
    """Convert custom_meta to columns. Return the columns and the number of samples, or None if there are no columns.

    Raises:
        InvalidArgumentError: a value is not a JSON value, columns differ in length, or `row_count` is set and differs
            from the number of samples.
    """
    if isinstance(custom_meta, Mapping):
        columns = [values_to_meta_column(name, values) for name, values in custom_meta.items()]
        count = columns[0].present.size if columns else None
    else:
        columns, count = rows_to_meta_columns(custom_meta), len(custom_meta)
    for column in columns:
        if column.present.size != count:
            raise InvalidArgumentError(
                f"custom_meta[{column.name!r}] has {column.present.size} values, but custom_meta[{columns[0].name!r}] "
                f"has {count}; provide one value per sample",
                field="custom_meta",
            )
    if count is not None and row_count is not None and count != row_count:
        raise InvalidArgumentError(
            f"custom_meta covers {count} sample(s), expected {row_count}; provide one mapping per sample, or columns "
            f"with one value per sample",
            field="custom_meta",
        )
    return columns, count
