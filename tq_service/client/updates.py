"""Updates of a watch: the latest state of everything that has changed."""

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
    """Current state of the changed parts of a partition. Apply it as state, not as a difference: it may be repeated.

    Attributes:
        partition_id: its name.
        incarnation: 16 random bytes; if they differ from before, the partition was cleared and created again.
        cleared: whether this incarnation was removed, or is sent anew; nothing else is set then.
        summary: summary of the partition; None if unchanged since the previous update.
        samples: samples that were inserted or written to, with keys, groups, all of their custom_meta, `fields` and
            `produced`, as from `lookup_samples`; None: none. `get_data` accepts them.
        cleared_indexes: `(n,)` global indexes of removed samples.
        cleared_keys: `(n,)` their keys, None for samples without one; empty if none had one.
        tasks: status of the tasks that have advanced.
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
    """One update of a watch.

    Attributes:
        partitions: changes, in the order to apply them. Empty: a periodic update without changes.
        revision: all changes up to this revision have been yielded, and a watch can resume from it; None: more parts of
            this update follow.
        is_reset: whether to drop all known state first: this update and those up to the next revision are the complete
            state. Set on the first update of a watch without a revision, and after missed changes.
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
