"""What a write needs beside its calls: a grant of places for puts, checks, and the batch that it answers."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from tq_service.client.batch_meta import BatchMeta, joined
from tq_service.client.columns import merge_columns
from tq_service.client.namespace import Namespace
from tq_service.client.requests import listed, partition_of, request_of
from tq_service.custom_meta import MetaColumn, MetaValue
from tq_service.errors import InvalidArgumentError
from tq_service.schema import FieldSpec, check_named_rows
from tq_service.v1 import commit_pb2, metadata_pb2
from tq_service.v1.controller_service_pb2 import PlacePutResponse
from tq_service.wire.columns import Column
from tq_service.wire.messages import read_seconds
from tq_service.wire.metadata import encode_meta_columns, rows_to_meta_columns, values_to_meta_column

_KNOWN: Final = ("fields", "locations", "key_column", "group_column", "meta_columns", "produced_columns")

# A list, or an array of text `(n,)`.
NameColumn: TypeAlias = "Sequence[str] | NDArray[np.str_]"
GroupColumn: TypeAlias = "Sequence[str | None] | NDArray[np.str_]"
# A mapping for each sample, or for each name an array, a tensor or a list of `n` values.
MetaGiven: TypeAlias = "Sequence[Mapping[str, MetaValue]] | Mapping[str, Any]"


class PlacementGrant:
    """The storage services that may take further puts, in turn, for some bytes and some seconds.

    It ends early where one of them fails, so that a service that is gone or full is left at once. Calls may share it:
    the bytes of a few may be counted late.
    """

    def __init__(self) -> None:
        self._answer = PlacePutResponse()
        self._until = 0.0
        self._used_bytes = 0
        self._turn = 0

    def place(self, size_bytes: int) -> PlacePutResponse | None:
        """Return the answer with the grant, None where it does not go so far; `endpoint` follows."""
        used_bytes = self._used_bytes + size_bytes
        if size_bytes > self._answer.max_granted_put_bytes or used_bytes > self._answer.grant_bytes:
            return None
        if time.monotonic() >= self._until:
            return None
        self._used_bytes = used_bytes
        self._turn += 1
        return self._answer

    def renew(self, answer: PlacePutResponse) -> None:
        """Take a new grant, whose first storage service gets the put that was asked for."""
        self._answer = answer
        self._until = time.monotonic() + read_seconds("grant_duration", answer.grant_duration)
        self._used_bytes = self._turn = 0

    def endpoint(self, answer: PlacePutResponse) -> metadata_pb2.StorageEndpoint:
        """Return whose turn it is."""
        return answer.storages[self._turn % len(answer.storages)]

    def end(self) -> None:
        """Have the next put placed."""
        self._until = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class NamesGiven:
    """What a write says of its samples beside their data, which the service does not answer again.

    Attributes:
        keys: of the samples; empty: none were given.
        groups: "" for a sample without; empty: none has one.
        meta_columns: their custom_meta.
    """

    keys: tuple[str, ...] = ()
    groups: tuple[str, ...] = ()
    meta_columns: Sequence[MetaColumn] = ()


def written_meta(
    answer: metadata_pb2.BatchMeta,
    given: NamesGiven,
    metadata: BatchMeta | None,
    *,
    namespace: Namespace,
    all_meta: Sequence[metadata_pb2.BatchMeta] = (),
) -> BatchMeta:
    """Return the samples of a write.

    Args:
        answer: what the server said: partition, incarnation, indexes and the fields of the put.
        given: the keys, groups and custom_meta that were sent.
        metadata: the batch that was written to; None: new samples, or samples named by key.
        namespace: of the client.
        all_meta: what the server knows of the samples, in parts; empty: it was not asked.
    """
    if all_meta:
        known = joined([BatchMeta.from_proto(part, namespace) for part in all_meta])
        return known if metadata is None else replace(metadata, **{name: getattr(known, name) for name in _KNOWN})
    answered = BatchMeta.from_proto(answer, namespace)
    groups = given.groups if any(given.groups) else ()
    if metadata is None:
        return replace(
            answered,
            status="batch",
            key_column=answered.key_column or given.keys,
            group_column=answered.group_column or groups,
            meta_columns=answered.meta_columns or tuple(given.meta_columns),
        )
    fields = {spec.name: spec for spec in (*metadata.fields, *answered.fields)}
    return replace(
        metadata,
        fields=tuple(fields.values()),
        # The put has moved some cells; `get_data` asks where they are now.
        locations=None if answered.fields else metadata.locations,
        key_column=given.keys or metadata.key_column,
        group_column=groups or metadata.group_column,
        meta_columns=merge_columns(metadata.meta_columns, given.meta_columns),
        produced_columns=(),
    )


def fill_write(
    write: commit_pb2.SampleWrite,
    namespace: Namespace,
    *,
    partition_id: str | None,
    metadata: BatchMeta | None = None,
    row_count: int | None,
    keys: NameColumn | None,
    groups: GroupColumn | None,
    group_size: int | None,
    custom_meta: MetaGiven | None,
    **others: Any,
) -> NamesGiven:
    """Say in a write, which is empty, which samples are written; return what is said of them beside their data.

    `row_count` None stands for as many rows as `metadata`, else `keys`, `custom_meta` or `groups` have; `others` are
    fields of the write.
    """
    given_keys = None if keys is None else listed("keys", keys)
    given_groups = None if groups is None else ["" if group is None else group for group in listed("groups", groups)]
    meta_columns, meta_count = ([], None) if custom_meta is None else meta_columns_of(custom_meta)
    counts = (row_count, metadata, given_keys, meta_count, given_groups, ())
    rows = next(count if isinstance(count, int) else len(count) for count in counts if count is not None)
    if meta_count is not None:
        check_meta_count(meta_count, rows)
    _check_names("keys", given_keys, rows)
    _check_names("groups", given_groups, rows)
    write.MergeFrom(
        request_of(
            commit_pb2.SampleWrite,
            partition_id=partition_of(namespace, partition_id, metadata),
            incarnation=None if metadata is None else metadata.incarnation,
            row_count=rows,
            global_indexes=None if metadata is None else metadata.indexes,
            claim=None if metadata is None else metadata.leased_claim,
            keys=given_keys,
            groups=given_groups,
            group_size=group_size or 0,
            **others,
        )
    )
    write.custom_meta.extend(encode_meta_columns(meta_columns))
    return NamesGiven(keys=tuple(given_keys or ()), groups=tuple(given_groups or ()), meta_columns=meta_columns)


def _check_names(name: str, names: Sequence[Any] | None, row_count: int) -> None:
    """Refuse names that are too many, not text, or given and none: sent, these stand for such as are not given."""
    if names is None:
        return
    check_named_rows(name, len(names))
    for position, one in enumerate(names):
        if not isinstance(one, str):  # of bytes protobuf makes text
            raise InvalidArgumentError(f"{name}[{position}] is {one!r:.200}, expected a string", field=name)
    if row_count and not names:
        raise InvalidArgumentError(
            f"{name} is empty, expected one for each of {row_count} samples; leave it out where they have none",
            field=name,
        )


def meta_columns_of(custom_meta: MetaGiven) -> tuple[list[MetaColumn], int | None]:
    """Return custom_meta as columns, and of how many samples it is; None: it names no column.

    Raises:
        InvalidArgumentError: a value that JSON does not have, or columns of different sizes.
    """
    if not isinstance(custom_meta, Mapping):
        return rows_to_meta_columns(custom_meta), len(custom_meta)
    columns = [values_to_meta_column(name, values) for name, values in custom_meta.items()]
    for column in columns:
        if column.present.size != columns[0].present.size:
            raise InvalidArgumentError(
                f"custom_meta[{column.name!r}] has {column.present.size} values, custom_meta[{columns[0].name!r}] has "
                f"{columns[0].present.size}; give one for each sample",
                field="custom_meta",
            )
    return columns, columns[0].present.size if columns else None


def check_meta_count(meta_count: int, row_count: int) -> None:
    """Raise InvalidArgumentError where custom_meta is for another number of samples."""
    if meta_count != row_count:
        raise InvalidArgumentError(
            f"custom_meta is for {meta_count} samples, expected {row_count}: one mapping, or one value of each column, "
            f"for each sample",
            field="custom_meta",
        )


def check_row_counts(columns: Sequence[Column], metadata: BatchMeta) -> None:
    """Raise InvalidArgumentError where a column has more or fewer rows than there are samples to put it to."""
    for column in columns:
        if column.row_count != metadata.size:
            raise InvalidArgumentError(
                f"metadata has {metadata.size} samples, field {column.spec.name!r} has {column.row_count} rows; put "
                "one row for each sample, or give the metadata of the samples that the rows are for",
                field="data",
            )


def known_fields(metadata: BatchMeta | None) -> dict[str, FieldSpec]:
    """Return what is known of the fields of a batch."""
    return {} if metadata is None else {spec.name: spec for spec in metadata.fields}


def put_nothing(data: Any, metadata: BatchMeta) -> BatchMeta:
    """Return the empty batch of a rank, to which nothing can be put: without a call, so that all ranks run one program.

    Raises:
        InvalidArgumentError: there are rows to put.
    """
    if data is not None and any(len(column) for column in data.values()):
        raise InvalidArgumentError("data has rows, but metadata names no samples; put one row for each", field="data")
    return metadata
