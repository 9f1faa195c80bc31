"""What `get_data` returns, and the errors of bytes that are lost or out of reach."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any, Final

import numpy as np

from tq_service.client.batch_meta import BatchMeta
from tq_service.client.locations import Indexes, StorageRef
from tq_service.client.reads import StorageRead
from tq_service.client.retry import Deadline
from tq_service.dataplane.parties import Received
from tq_service.errors import DataLossError, DeadlineError, UnavailableError
from tq_service.wire.decoding import decode_columns, to_tensordict

_MOST_NAMED: Final = 20


def to_batch(received: Sequence[Received], row_count: int) -> Any:
    """Return received columns as a TensorDict `[row_count]`, or as a dict where torch or tensordict is missing.

    Without torch, columns are numpy arrays and lists of them.
    """
    data = decode_columns([column for column, _ in received], [buffer for _, buffer in received])
    if find_spec("torch") is None or find_spec("tensordict") is None:
        return data
    return to_tensordict(data, row_count)


def lost_samples(metadata: BatchMeta, read: StorageRead, error: DataLossError) -> DataLossError:
    """Return the error of a storage service that lost bytes, naming samples of the batch, and fields.

    Where the service says which puts it lost, these are the samples in them; else all that it was asked for.
    """
    positions, fields = _lost_cells(read, error.metadata.get("put_ids", ""))
    part = metadata.select_samples(positions)
    names = [
        f"{index} ({key})" if key else str(index)
        for index, key in zip(part.global_indexes[:_MOST_NAMED], part.keys, strict=False)
    ]
    more = f" and {part.size - len(names)} more" if part.size > len(names) else ""
    keys = [key for key in part.keys if key]
    facts = {"global_indexes": ",".join(map(str, part.global_indexes))} | ({"keys": ",".join(keys)} if keys else {})
    return DataLossError(
        f"{', '.join(map(repr, fields))} of samples {', '.join(names)}{more} of partition {metadata.partition_id!r} "
        f"are lost: {error.message}",
        metadata={**error.metadata, **facts, "partition_id": metadata.partition_id, "data_fields": ",".join(fields)},
    )


def _lost_cells(read: StorageRead, put_ids: str) -> tuple[Indexes, list[str]]:
    """Return the positions in the batch of samples that have cells in some puts, and the fields of those cells."""
    named = set(put_ids.split(",")) if put_ids else {put_id.hex() for put_id in read.request.put_ids}
    is_lost = np.array([put_id.hex() in named for put_id in read.request.put_ids], np.bool_)
    lost = np.zeros(read.positions.size, np.bool_)
    fields: list[str] = []
    for runs in read.request.runs:
        of_row = np.repeat(is_lost[np.array(runs.put_indexes, np.int64)], np.array(runs.row_counts, np.int64))
        if of_row.any():
            lost |= of_row
            fields += runs.field_names
    return read.positions[lost], fields


def unread_samples(
    metadata: BatchMeta,
    read: StorageRead,
    storage: StorageRef,
    deadline: Deadline,
    error: DeadlineError | UnavailableError,
) -> DeadlineError | UnavailableError:
    """Return the error of a storage service that did not answer, saying what of the batch lies there.

    Args:
        metadata: the batch.
        read: what was asked of the storage service.
        storage: it, as the controller last located it.
        deadline: until when it was tried.
        error: why it was not read.
    """
    reason = error.__cause__ if isinstance(error.__cause__, UnavailableError) else error
    place = f" at {storage.address}" if storage.address else ""
    fields = ", ".join(repr(name) for name in read.field_names)
    return type(error)(
        f"storage service {storage.storage_id!r}{place} did not answer within {deadline.timeout:g} s; it "
        f"holds {fields} of {read.positions.size} of the {metadata.size} samples of partition "
        f"{metadata.partition_id!r}: {reason.message}",
        metadata={
            **error.metadata,
            "storage_id": storage.storage_id,
            "address": storage.address,
            "sample_count": str(read.positions.size),
            "data_fields": ",".join(read.field_names),
        },
    )
