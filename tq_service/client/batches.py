"""What `get_data` returns, and the errors of bytes that are lost or out of reach."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any, Final

from tq_service.client.batch_meta import BatchMeta
from tq_service.client.locations import Indexes, StorageRef
from tq_service.client.reads import Received, StorageRead
from tq_service.client.retry import Deadline
from tq_service.errors import DataLossError, DeadlineError, UnavailableError
from tq_service.wire.layouts import decode_columns, to_tensordict

_MOST_NAMED: Final = 20


def to_batch(received: Sequence[Received], row_count: int) -> Any:
    """Return received columns as a TensorDict `[row_count]`, or as a dict where torch or tensordict is missing.

    Without torch, columns are numpy arrays and lists of them.
    """
    data = decode_columns([column for column, _ in received], [buffer for _, buffer in received])
    if find_spec("torch") is None or find_spec("tensordict") is None:
        return data
    return to_tensordict(data, row_count)


def lost_samples(metadata: BatchMeta, positions: Indexes, error: DataLossError) -> DataLossError:
    """Return the error of a storage service that lost its bytes, naming the samples of the batch that it held."""
    part = metadata.select_samples(positions)
    names = [
        f"{index} ({key})" if key else str(index)
        for index, key in zip(part.global_indexes[:_MOST_NAMED], part.keys, strict=False)
    ]
    more = f" and {part.size - len(names)} more" if part.size > len(names) else ""
    keys = [key for key in part.keys if key]
    facts = {"global_indexes": ",".join(map(str, part.global_indexes))} | ({"keys": ",".join(keys)} if keys else {})
    return DataLossError(
        f"samples {', '.join(names)}{more} of partition {metadata.partition_id!r} are lost: {error.message}",
        metadata={**error.metadata, **facts},
    )


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
        storage: it, as the controller last told of it.
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
