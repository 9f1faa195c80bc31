"""Arguments of Python as requests, and what a write answers as a batch. Refused here is only what cannot be sent."""

from __future__ import annotations

import math
import secrets
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, lru_cache, partial
from itertools import chain
from typing import Any, Final, TypeAlias, TypeVar, cast

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
from tq_service.schema import DEFAULT_POLICY, Admit, KeyMode, Published, SampleState, check_named_rows
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
    STATES,
    UNMATCHED,
    Indexes,
    encode_meta_columns,
    rows_to_meta_columns,
    values_to_meta_column,
)

_KNOWN: Final = ("fields", "locations", "produced_columns", *OWN_COLUMNS)

# A list, or an array of text `(n,)`.
NameColumn: TypeAlias = "Sequence[str] | NDArray[np.str_]"
GroupColumn: TypeAlias = "Sequence[str | None] | NDArray[np.str_]"
# A mapping for each sample, or for each name an array, a tensor or a list of `n` values.
MetaGiven: TypeAlias = "Sequence[Mapping[str, MetaValue]] | Mapping[str, Any]"
Request = TypeVar("Request", bound=Message)
Changed = TypeVar("Changed", pb.ClearSamplesRequest, pb.FailSamplesRequest)
Given = TypeVar("Given")
Converter = Callable[[Any], Any]


def request_of(kind: type[Request], **arguments: Any) -> Request:
    """Return a request of arguments named as its fields; it has a new `request_id`, if it has one at all.

    Args:
        kind: the request.
        **arguments: its fields; None stands for an enum, a list or an optional field that is not given.

    Raises:
        InvalidArgumentError: an argument cannot be what its field holds.
    """
    rules = _rules(kind.DESCRIPTOR)
    for name, value in arguments.items():
        if (convert := rules.converters.get(name)) is not None:
            arguments[name] = convert(value)
        elif value is None and name in rules.required:  # which protobuf takes for 0 or ""
            raise InvalidArgumentError(f"{name} is None, which it cannot be", field=name)
    if rules.has_request_id:
        arguments["request_id"] = new_id()
    try:
        return kind(**arguments)
    except (TypeError, ValueError) as error:  # protobuf does not say of which field
        for name, value in arguments.items():
            _check(kind, name, value)
        raise InvalidArgumentError(f"the arguments cannot be sent: {error}") from None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Rules:
    """What makes lists and enums of arguments, which other fields must be given, and whether there is a request id."""

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
    FieldDescriptor.TYPE_STRING: "a string, in valid Unicode",
    FieldDescriptor.TYPE_INT64: "an integer of 64 bits",
    FieldDescriptor.TYPE_INT32: "an integer of 32 bits",
}
_ENUMS: Final[Mapping[str, Any]] = {
    "BatchUnit": BATCH_UNITS, "GivenBack": GIVEN_BACK, "KeyMode": KEY_MODES, "Late": LATE, "Layout": LAYOUTS,
    "OnLost": ON_LOST, "SampleState": STATES,
    "Unmatched": UNMATCHED,
}  # fmt: skip


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


def check_word(name: str, word: str | None, words: Sequence[str | None]) -> None:
    """Refuse a word that is none of some."""
    if word not in words:
        raise InvalidArgumentError(f"{name} is {word!r}, expected {' or '.join(map(repr, words))}", field=name)


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


def all_of(kind: type[Given], name: str, values: Iterable[Given]) -> list[Given]:
    """Return a list of objects of one kind.

    Raises:
        InvalidArgumentError: one is of another kind.
    """
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
    if values is None or isinstance(values, list | tuple):
        return list(values or ())
    if isinstance(values, str | bytes) or not isinstance(values, Iterable):
        what = "list of strings" if isinstance(values, str) else "list"
        raise InvalidArgumentError(f"{name} is {values!r}, expected a {what} such as [{values!r}]", field=name)
    return cast("list[Any]", values.tolist()) if hasattr(values, "tolist") else list(values)


def named_samples(**names: Iterable[Any] | BatchMeta | None) -> tuple[str | None, Sequence[Any] | Indexes]:
    """Return by what samples are named, None where by nothing, and these names; a batch names them by index."""
    given = [name for name, value in names.items() if value is not None]
    if len(given) > 1:
        raise InvalidArgumentError(
            f"samples are named by {' and by '.join(given)}; give one of {', '.join(names)}", field=given[0]
        )
    if not given:
        return None, []
    named = names[given[0]]
    if isinstance(named, BatchMeta):
        check_is_batch(named)
        return "global_indexes", named.indexes
    return given[0], listed(given[0], named)


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
    data_fields: Sequence[str],
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
    """Return the request for a batch, of the arguments of `get_meta`; `max_wait` is set at each poll.

    Policies, and the partitions of `refill` and `admit`, are named in `namespace`.
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
    if sampler_config:
        own["sampler_config"] = _struct("sampler_config", sampler_config)
    if conditions := condition_messages(where, namespace):
        own["where"] = conditions
    if columns := listed("order_by", order_by):
        own["order_by"] = [_order(*each) for each in enumerate(columns)]
    request = request_of(pb.GetMetaRequest, **own)
    alike["data_fields"] = tuple(listed("data_fields", data_fields))
    try:
        request.MergeFromString(_serialized_claim(**alike))
    except TypeError:  # an argument is of a type that cannot be remembered, as are most wrong ones
        request.MergeFromString(_serialized_claim.__wrapped__(**alike))
    return request


@lru_cache(maxsize=256, typed=True)
def _serialized_claim(**arguments: Any) -> bytes:
    """Return what requests for batches have in common, serialized; a rank asks alike for each of its batches."""
    for name in ("max_deliveries", "max_uses", "least_members"):
        not_zero(name, arguments[name])
    lease = arguments["lease"]
    arguments["lease"] = None if lease is None else lease_duration(lease)
    given = {name: value for name, value in arguments.items() if value is not None or name not in _MAY_BE_NONE}
    alike = request_of(pb.GetMetaRequest, **given)
    alike.ClearField("request_id")
    return alike.SerializeToString()


# Arguments of `get_meta` that may be None, which the request has as 0 or "": so they are not sent.
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
    """Return the span of a lease of some seconds."""
    return to_duration(not_zero("lease", seconds("lease", lease)))


def not_zero(name: str, value: Given) -> Given:
    """Return a value; refuse one that would stand for none in the request."""
    if value in (0, ""):
        raise InvalidArgumentError(f"{name} is {'empty' if value == '' else 0}, expected {_NOT_ZERO[name]}", field=name)
    return value


def check_leased(metadata: BatchMeta) -> None:
    """Refuse batches that are not of one leased claim."""
    check_is_batch(metadata)
    if metadata.lease_seconds is None:
        raise InvalidArgumentError(
            "metadata is of no leased claim: ask for it with get_meta(lease=...); batches of several claims that were "
            "put together with concat are acknowledged and extended one by one",
            field="metadata",
        )


def check_ack(metadata: BatchMeta | None, *, fenced: bool) -> None:
    """Refuse a put with `ack` that is not to the samples of one leased claim, or not fenced."""
    if metadata is None:
        raise InvalidArgumentError(
            "ack is True and metadata is None; expected the samples of a leased claim. Give the batch that "
            "get_meta(lease=...) answered, or leave ack out.",
            field="metadata",
        )
    check_leased(metadata)
    if not fenced:
        raise InvalidArgumentError(
            "fenced is False and ack is True, but samples can only be acknowledged while they are leased; leave out "
            "one of the two",
            field="fenced",
        )


def check_rows(metadata: BatchMeta, columns: Iterable[ColumnShape]) -> None:
    """Refuse columns that do not have a row for each sample of a batch."""
    for column in columns:
        if column.row_count != metadata.size:
            raise InvalidArgumentError(
                f"metadata has {metadata.size} samples, field {column.spec.name!r} has {column.row_count} rows; put "
                "one row for each sample, or give the metadata of the samples that the rows are for",
                field="data",
            )


def row_lengths(name: str, values: Iterable[int], row_count: int) -> list[int]:
    """Return lengths of the cells of some samples, one for each.

    Raises:
        InvalidArgumentError: they are of another number of samples, or negative.
    """
    lengths = listed(name, values)
    if len(lengths) != row_count:
        raise InvalidArgumentError(
            f"{name} has {len(lengths)} lengths, expected {row_count}: one for each sample of metadata", field=name
        )
    for place, length in enumerate(lengths):
        if not isinstance(length, int) or isinstance(length, bool) or length < 0:
            raise InvalidArgumentError(f"{name}[{place}] is {length!r:.200}, expected a length, 0 or more", field=name)
    return lengths


def _order(position: int, column: Any) -> pb.Order:
    if not isinstance(column, str):
        raise InvalidArgumentError(f"order_by[{position}] is {column!r}, expected a string", field="order_by")
    return request_of(pb.Order, column=column.removeprefix("-"), descending=column.startswith("-"))


def changed_samples(
    kind: type[Changed],
    namespace: Namespace,
    metadata: BatchMeta | None,
    *,
    partition_id: str | None,
    keys: Iterable[str] | None,
    global_indexes: Iterable[int] | None,
    groups: Iterable[str] | None,
    where: Iterable[tuple[str, str, Any]],
    task_name: str,
    fenced: bool,
    **others: Any,
) -> Changed | None:
    """Return the request to clear samples, or to have them fail; None if no sample is meant. `others` are its fields.

    Where samples are named, be it none of them, conditions and tasks do not mean all others.
    """
    if metadata is not None:
        check_is_batch(metadata)
    request = request_of(
        kind,
        partition_id=partition_of(namespace, partition_id, metadata),
        incarnation=b"" if metadata is None else metadata.incarnation,
        global_indexes=global_indexes if metadata is None else metadata.handled_indexes,
        keys=keys,
        groups=groups,
        where=condition_messages(where, namespace),
        claim=metadata.leased_claim if metadata is not None and fenced else None,
        task_name=task_name,
        **others,
    )
    is_named = any(names is not None for names in (metadata, keys, global_indexes, groups))
    is_all = bool((request.where or task_name) and not is_named) or bool(others.get("skipped_by"))
    return request if request.global_indexes or request.keys or request.groups or is_all else None


def condition_messages(where: Iterable[tuple[str, str, Any]], namespace: Namespace) -> list[pb.Condition]:
    """Return conditions on custom_meta as messages; policies are named in a namespace."""
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


class PlacementGrant:
    """The storage services that may take further puts, in turn, for some bytes and some seconds.

    It ends early where one of them fails, so that a service that is gone or full is left at once. Calls may share it:
    the bytes of a few may be counted late.
    """

    def __init__(self) -> None:
        self._answer = pb.PlacePutResponse()
        self._until = 0.0
        self._used_bytes = 0
        self._turn = 0

    def place(self, size_bytes: int) -> pb.PlacePutResponse | None:
        """Return the answer with the grant, None where it does not go so far; `endpoint` follows."""
        used_bytes = self._used_bytes + size_bytes
        if size_bytes > self._answer.max_granted_put_bytes or used_bytes > self._answer.grant_bytes:
            return None
        if time.monotonic() >= self._until:
            return None
        self._used_bytes = used_bytes
        self._turn += 1
        return self._answer

    def renew(self, answer: pb.PlacePutResponse) -> None:
        """Take a new grant, whose first storage service gets the put that was asked for."""
        self._answer = answer
        self._until = time.monotonic() + read_seconds("grant_duration", answer.grant_duration)
        self._used_bytes = self._turn = 0

    def endpoint(self, answer: pb.PlacePutResponse) -> metadata_pb2.StorageEndpoint:
        """Return whose turn it is."""
        return answer.storages[self._turn % len(answer.storages)]

    def end(self) -> None:
        """Have the next put placed."""
        self._until = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Write:
    """Which samples one call writes, and what it says of them beside their columns, as `SampleWrite` has it.

    Attributes:
        partition_id: the service's name of the partition.
        row_count: number of samples.
        metadata: existing samples; None: new ones, or those of the keys.
        key_column: keys, as `BatchMeta` has them; () where none are given.
        group_column: groups, likewise.
        meta_columns: custom_meta, likewise.
        key_mode: what to do with keys that are known, or not.
        group_size: number of members that completes each group.
        state: that the samples get.
        fenced: whether it is refused once samples of a leased claim are no longer the worker's.
        ack: whether they are acknowledged, too.
        append_at: lengths of the cells that the columns are added to; (): they replace cells.
    """

    partition_id: str
    row_count: int
    metadata: BatchMeta | None = None
    key_column: tuple[str, ...] = ()
    group_column: tuple[str, ...] = ()
    meta_columns: tuple[MetaColumn, ...] = ()
    key_mode: KeyMode | None = None
    group_size: int | None = None
    state: SampleState | str | None = None
    fenced: bool = True
    ack: bool = False
    append_at: Sequence[int] = ()

    @property
    def claim(self) -> metadata_pb2.LeasedClaim | None:
        """The leased claim that it is checked against; None: it is not."""
        return self.metadata.leased_claim if self.metadata is not None and self.fenced else None


def write_of(
    namespace: Namespace,
    *,
    partition_id: str | None,
    metadata: BatchMeta | None = None,
    row_count: int | None,
    keys: NameColumn | None,
    groups: GroupColumn | None,
    custom_meta: MetaGiven | None,
    **others: Any,
) -> Write:
    """Return a write of arguments of Python.

    `row_count` None stands for as many rows as `metadata`, else `keys`, `custom_meta` or `groups` have; `others` are
    attributes of the write.
    """
    given_keys = None if keys is None else listed("keys", keys)
    given_groups = None if groups is None else ["" if group is None else group for group in listed("groups", groups)]
    if row_count is None and (metadata is not None or given_keys is not None):
        row_count = len(given_keys or ()) if metadata is None else metadata.size
    meta_columns, meta_count = ([], None) if custom_meta is None else meta_columns_of(custom_meta, row_count)
    counts = (row_count, meta_count, len(given_groups or ()))
    rows = next(count for count in counts if count is not None)
    _check_names("keys", given_keys, rows)
    _check_names("groups", given_groups, rows)
    return Write(
        partition_id=partition_of(namespace, partition_id, metadata),
        row_count=rows,
        metadata=metadata,
        key_column=tuple(given_keys or ()),
        group_column=tuple(given_groups or ()),
        meta_columns=tuple(meta_columns),
        **others,
    )


def write_message(writes: Sequence[Write], rows_per_put: int = 0) -> commit_pb2.SampleWrite:
    """Return the message of a write, or of several that are alike, one after the other; see `SampleWrite`."""
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
        state=first.state,
        rows_per_put=rows_per_put,
        append_at=first.append_at,
    )
    if first.meta_columns:
        columns = zip(*(write.meta_columns for write in writes), strict=True)
        message.custom_meta.extend(
            encode_meta_columns([parts[0] if len(parts) == 1 else concatenated(parts) for parts in columns])
        )
    return message


def _names_of(columns: Sequence[Sequence[str]]) -> Sequence[str]:
    """Return the keys or groups of several writes, one after the other; many are not copied if they are of one."""
    return columns[0] if len(columns) == 1 else list(chain.from_iterable(columns))


def written_meta(answered: BatchMeta, known: BatchMeta | None, write: Write, indexes: Indexes) -> BatchMeta:
    """Return the samples of a write.

    Args:
        answered: what the server said: partition, incarnation, and the fields of the put. The keys, groups and
            custom_meta of the write are not among it.
        known: what the server knows of the samples; None: it was not asked.
        write: what was sent.
        indexes: of the samples.
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
        # The put has moved some cells; `get_data` asks where they are now.
        locations=CellLocations() if answered.fields else metadata.locations,
        produced_columns=(),
        **overwritten(metadata, write),
    )


def _check_names(name: str, names: Sequence[Any] | None, row_count: int) -> None:
    """Refuse names that are too many, not text, or given and none: sent, these stand for such as are not given."""
    if names is None:
        return
    check_named_rows(name, len(names))
    if {*map(type, names)} - {str}:  # of bytes protobuf makes text
        for position, one in enumerate(names):
            if not isinstance(one, str):
                raise InvalidArgumentError(f"{name}[{position}] is {one!r:.200}, expected a string", field=name)
    if row_count and not names:
        raise InvalidArgumentError(
            f"{name} is empty, expected one for each of {row_count} samples; leave it out where they have none",
            field=name,
        )


def meta_columns_of(custom_meta: MetaGiven, row_count: int | None) -> tuple[list[MetaColumn], int | None]:
    """Return custom_meta as columns, and of how many samples it is; None: it names no column.

    Raises:
        InvalidArgumentError: a value that JSON does not have, columns of different sizes, or of another number of
            samples than `row_count`, where that is known.
    """
    if isinstance(custom_meta, Mapping):
        columns = [values_to_meta_column(name, values) for name, values in custom_meta.items()]
        count = columns[0].present.size if columns else None
    else:
        columns, count = rows_to_meta_columns(custom_meta), len(custom_meta)
    for column in columns:
        if column.present.size != count:
            raise InvalidArgumentError(
                f"custom_meta[{column.name!r}] has {column.present.size} values, custom_meta[{columns[0].name!r}] has "
                f"{count}; give one for each sample",
                field="custom_meta",
            )
    if count is not None and row_count is not None and count != row_count:
        raise InvalidArgumentError(
            f"custom_meta is for {count} samples, expected {row_count}: one mapping, or one value of each column, "
            f"for each sample",
            field="custom_meta",
        )
    return columns, count
