"""Updates returned by a watch, with the latest state of everything that changed."""

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
    """The current state of the changed parts of a partition.

    An update may repeat changes from a previous update, so do not apply updates as differences.

    Attributes:
        partition_id: name of the partition.
        incarnation: incarnation of the partition, as 16 random bytes. The value changes if the partition is cleared and
            created again.
        cleared: whether to drop all known state of this incarnation. This is the case if the incarnation was cleared or
            will be sent again in full. If True, no other attribute is set.
        summary: summary of the partition, or None if the summary has not changed since the previous update.
        samples: samples that were inserted or written to, or None if there are none. As with `lookup_samples`, they
            include keys, groups, all custom_meta, `fields` and `produced`. To read the data, pass the batch to
            `get_data`.
        cleared_indexes: global indexes of the removed samples, as an array of shape `(n,)`.
        cleared_keys: `n` keys of the removed samples, with None for a sample without a key. Empty if no removed sample
            had a key.
        tasks: status of the tasks that have made progress.
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
        """Decode an update from its message."""
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
    """An update returned by a watch.

    Attributes:
        partitions: changed partitions; apply the changes in this order. Empty if this is a periodic update without
            changes.
        revision: revision from which a watch can resume. All changes up to this revision have been yielded. None if
            more parts of this update follow.
        is_reset: whether to drop all known state before applying the update. This update and the following updates, up
            to the next one with a revision, together form the complete state. The attribute is True for a watch's first
            update if the watch has no start revision, and for the update that follows missed changes.
    """

    partitions: tuple[PartitionUpdate, ...]
    revision: Revision | None
    is_reset: bool = False

    @classmethod
    def from_proto(cls, message: pb.WatchResponse, namespace: Namespace, *, is_reset: bool) -> WatchUpdate:
        """Decode an update from its message."""
        return cls(
            partitions=tuple(PartitionUpdate.from_proto(each, namespace) for each in message.partitions),
            revision=read_message(Revision, message.revision) if message.HasField("revision") else None,
            is_reset=is_reset,
        )
