"""What a watch yields: the latest state of what has changed."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from tq_service.client.batch_meta import BatchMeta, Namespace
from tq_service.results import PartitionSummary, Revision, TaskStatus
from tq_service.v1 import controller_service_pb2 as pb
from tq_service.wire.messages import read_message
from tq_service.wire.metadata import decode_integers, expand_runs

_NO_INDEXES = np.zeros(0, np.int64)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PartitionUpdate:
    """What has changed in a partition, as it is now: apply it as the state, since it may come again.

    Attributes:
        partition_id: its name.
        incarnation: 16 random bytes; others than before: it was cleared and made again.
        cleared: whether this incarnation is gone with all that was in it, or comes anew; there is nothing else then.
        summary: the partition in short; None where it has not changed since the update before.
        samples: samples that were inserted or written to, with keys, groups, all of their custom_meta, `fields` and
            `produced`, as `lookup_samples` has them; None: none. `get_data` takes them.
        cleared_indexes: `(n,)` global indexes of samples that are gone.
        cleared_keys: `(n,)` the key of each, None for one without; empty where none had one.
        tasks: status of the tasks that went on.
    """

    partition_id: str
    incarnation: bytes
    cleared: bool = False
    summary: PartitionSummary | None = None
    samples: BatchMeta | None = None
    cleared_indexes: NDArray[np.int64] = field(default_factory=_NO_INDEXES.copy)
    cleared_keys: tuple[str | None, ...] = ()
    tasks: tuple[TaskStatus, ...] = ()

    @classmethod
    def from_proto(cls, message: pb.PartitionChange, namespace: Namespace) -> PartitionUpdate:
        """Return the update of a message."""
        name, ranges = namespace.own_name(message.partition_id), message.cleared_samples.index_ranges
        summary = read_message(PartitionSummary, message.summary, partition_id=name)
        return read_message(
            cls,
            message,
            partition_id=name,
            summary=summary if message.HasField("summary") else None,
            samples=BatchMeta.from_proto(message.samples, namespace) if message.HasField("samples") else None,
            cleared_indexes=expand_runs(decode_integers(ranges.first_indexes), decode_integers(ranges.index_counts)),
            cleared_keys=tuple(key or None for key in message.cleared_samples.keys),
        )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class WatchUpdate:
    """An answer of a watch.

    Attributes:
        partitions: what has changed, in the order in which it is to be applied. Empty: nothing, which is said now and
            then.
        revision: all changes up to here have been yielded, and a watch goes on from here; None: more that belongs to
            this update follows.
        is_reset: whether all that is known is to be dropped first: this update and those up to the next revision are
            the whole state. So the first one of a watch without a revision, and that after changes were missed.
    """

    partitions: tuple[PartitionUpdate, ...]
    revision: Revision | None
    is_reset: bool = False

    @classmethod
    def from_proto(cls, message: pb.WatchResponse, namespace: Namespace, *, is_reset: bool) -> WatchUpdate:
        """Return the update of a message."""
        return cls(
            partitions=tuple(PartitionUpdate.from_proto(each, namespace) for each in message.partitions),
            revision=read_message(Revision, message.revision) if message.HasField("revision") else None,
            is_reset=is_reset,
        )
