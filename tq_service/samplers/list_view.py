"""An in-memory `View` of samples, defined by their token counts, for testing samplers without a service."""

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
    """A view of in-memory samples, numbered from 0. As in a service, produced samples stay ready until consumed."""

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
            group_size: number of consecutive samples in each named group. The last group may be smaller. None: no
                groups.
            meta: a mapping of custom_meta columns to their values, one per sample.
            unproduced: indexes of the samples that become ready only when they are passed to `produce`.

        Raises:
            ValueError: `group_size` is less than 1, or a column in `meta` does not contain one value per sample.
            IndexError: an index in `unproduced` is out of range.
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
                raise ValueError(f"meta: got {len(column)} values for column {name!r}; expected {count}")
            partition.meta.write([column_of(name, count, range(count), column)], rows)
        self._task = partition.open_task("list")
        self._cells = partition.cells.declare(FieldSpec("produced")).cell
        self.produce(np.delete(np.arange(count), np.asarray(unproduced, np.int64)))
        ready = Readiness(partition, self._task, _SPEC, None)
        super().__init__(partial(Scan, ready, ScanStarts(partition, "list"), watch=ScanWatch()))

    def consume(self, rows: Indexes) -> None:
        """Mark rows as consumed, as if a client had claimed and acknowledged them."""
        self._task.claim.write(rows, CONSUMED_EARLIER)

    def record(self, plan: Plan, *, max_uses: int = 1) -> None:
        """Apply a plan as a service does: count deliveries, drop the plan's dropped rows, and consume used-up rows.

        As with `claim(max_uses=)`, a row is used up after `max_uses` deliveries.
        """
        recorded = self._task.using_up(RecordedPlan.of(plan), max_uses)
        self._task.deliver(recorded, recorded.named, batch_spec=_SPEC)
        self.plan_count += 1

    def produce(self, rows: Indexes) -> None:
        """Mark rows as produced, so that they become ready."""
        self._cells.write(rows, 0)

    def rollout_names(self, rows: Indexes) -> list[str | None]:
        """Return None for each row, because this view has no rollouts."""
        return [None] * len(rows)

    def lengths(self, rows: Indexes) -> Indexes:
        """Return the token counts of the rows."""
        return self._lengths[rows]

    def field_lengths(self, field: str, rows: Indexes) -> Indexes:
        """Return the token counts of the rows, regardless of the field."""
        return self._lengths[rows]
