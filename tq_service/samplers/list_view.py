"""A view of samples with given lengths, to test samplers without a service."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

import numpy as np

from tq_service.custom_meta import column_of
from tq_service.planning.view import PartitionView, Readiness, Scan, ScanStarts, ScanWatch
from tq_service.schema import FieldSpec
from tq_service.state.ledger import RecordedPlan
from tq_service.state.partition import Partition, PartitionSettings
from tq_service.state.plan import BatchSpec, Indexes, Plan
from tq_service.state.table import CONSUMED_EARLIER

_SPEC = BatchSpec(
    batch_size=1,
    micro_batch_size=None,
    sampler_config="{}",
    where=(),
    order_by=(),
    data_fields=("produced",),
    drop_last=False,
    finite=False,
)


class ListView(PartitionView):
    """In-memory samples 0, 1, ..., shown as the service shows a partition: ready once produced, until consumed."""

    def __init__(
        self,
        lengths: Sequence[int] | Indexes,
        *,
        group_size: int | None = None,
        meta: Mapping[str, Sequence[object]] | None = None,
        unproduced: Sequence[int] | Indexes = (),
    ) -> None:
        """Create a view.

        Args:
            lengths: token count of each sample.
            group_size: number of neighbours per explicit group; the last group may be smaller. None: no groups.
            meta: custom_meta columns, one value per sample.
            unproduced: samples that lack a field; see `produce`.

        Raises:
            ValueError: `group_size` is below 1, or a column of `meta` does not have one value per sample.
            IndexError: an element of `unproduced` is not a sample.
        """
        if group_size is not None and group_size < 1:
            raise ValueError(f"group_size: got {group_size}, expected at least 1")
        self._lengths = np.asarray(lengths, np.int64)
        count = self._lengths.size
        partition = Partition("list", PartitionSettings())
        rows = partition.table.append(count)
        partition.count_states(rows, 1)
        if group_size is not None:
            groups = partition.groups
            groups.add(groups.check([str(row // group_size) for row in range(count)], 0), 0, rows)
            groups.close(np.arange(groups.slots.count))
        for name, column in (meta or {}).items():
            if len(column) != count:
                raise ValueError(f"got meta {name!r} of {len(column)} values, expected {count}, one value per sample")
            partition.meta.write([column_of(name, count, range(count), column)], rows)
        self._task = partition.open_task("list")
        self._cells = partition.cells.declare(FieldSpec("produced")).cell
        self.produce(np.delete(np.arange(count), np.asarray(unproduced, np.int64)))
        ready = Readiness(partition, self._task, _SPEC, None)
        super().__init__(partial(Scan, ready, ScanStarts(partition, "list"), watch=ScanWatch()))

    def consume(self, rows: Indexes) -> None:
        """Mark rows as consumed, as if they had been delivered and acknowledged."""
        self._task.claim.write(rows, CONSUMED_EARLIER)

    def record(self, plan: Plan, *, max_uses: int = 1) -> None:
        """Consume and drop rows and count deliveries, as the service does with `get_meta(max_uses=)`."""
        recorded = self._task.using_up(RecordedPlan.of(plan), max_uses)
        self._task.deliver(recorded, recorded.named, batch_spec=_SPEC)
        self.plan_count += 1

    def produce(self, rows: Indexes) -> None:
        """Mark rows as having all their fields."""
        self._cells.write(rows, 0)

    def rollout_names(self, rows: Indexes) -> list[str | None]:
        """Return None for each row, since this view does not have rollouts."""
        return [None] * len(rows)

    def lengths(self, rows: Indexes) -> Indexes:
        """Return token counts `(n,)`."""
        return self._lengths[rows]

    def field_lengths(self, field: str, rows: Indexes) -> Indexes:
        """Return the token counts `(n,)` for any field."""
        return self._lengths[rows]
