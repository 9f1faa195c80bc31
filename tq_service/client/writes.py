"""What a write needs beside its calls: a grant of places for puts, checks, and the batch that it answers."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Final

from tq_service.client.batch_meta import BatchMeta, joined
from tq_service.client.columns import merge_columns
from tq_service.client.namespace import Namespace
from tq_service.custom_meta import MetaColumn
from tq_service.errors import InvalidArgumentError
from tq_service.schema import Layout
from tq_service.v1 import metadata_pb2
from tq_service.v1.commit_pb2 import SampleWrite
from tq_service.v1.controller_service_pb2 import PlacePutResponse
from tq_service.wire.columns import Column
from tq_service.wire.durations import read_seconds

_KNOWN: Final = ("fields", "locations", "key_column", "group_column", "meta_columns", "produced_columns")


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


def written_meta(
    answer: metadata_pb2.BatchMeta,
    write: SampleWrite,
    metadata: BatchMeta | None,
    meta_columns: Sequence[MetaColumn],
    *,
    namespace: Namespace,
    all_meta: Sequence[metadata_pb2.BatchMeta] = (),
) -> BatchMeta:
    """Return the samples of a write.

    Args:
        answer: what the server said: partition, incarnation, indexes and the fields of the put.
        write: what was sent.
        metadata: the batch that was written to; None: new samples, or samples named by key.
        meta_columns: the custom_meta that was sent.
        namespace: of the client.
        all_meta: what the server knows of the samples, in parts; empty: it was not asked.
    """
    if all_meta:
        known = joined([BatchMeta.from_proto(part, namespace) for part in all_meta])
        return known if metadata is None else replace(metadata, **{name: getattr(known, name) for name in _KNOWN})
    answered = BatchMeta.from_proto(answer, namespace)
    keys = tuple(write.keys)
    groups = tuple(write.groups)
    groups = groups if any(groups) else ()
    if metadata is None:
        return replace(
            answered,
            status="batch",
            key_column=answered.key_column or keys,
            group_column=answered.group_column or groups,
            meta_columns=answered.meta_columns or tuple(meta_columns),
        )
    fields = {spec.name: spec for spec in (*metadata.fields, *answered.fields)}
    return replace(
        metadata,
        fields=tuple(fields.values()),
        # The put has moved some cells; `get_data` asks where they are now.
        locations=None if answered.fields else metadata.locations,
        key_column=keys or metadata.key_column,
        group_column=groups or metadata.group_column,
        meta_columns=merge_columns(metadata.meta_columns, meta_columns),
        produced_columns=(),
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


def declared_layouts(metadata: BatchMeta | None) -> dict[str, Layout]:
    """Return the layouts that are known of the fields of a batch."""
    specs = () if metadata is None else metadata.fields
    return {spec.name: spec.layout for spec in specs if spec.layout is not None}


def put_nothing(data: Any, metadata: BatchMeta) -> BatchMeta:
    """Return the empty batch of a rank, to which nothing can be put: without a call, so that all ranks run one program.

    Raises:
        InvalidArgumentError: there are rows to put.
    """
    if data is not None and any(len(column) for column in data.values()):
        raise InvalidArgumentError("data has rows, but metadata names no samples; put one row for each", field="data")
    return metadata
