"""Totals of a batch over all ranks for each optimizer step: samples, tokens, and sums of custom_meta columns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate

import numpy as np

from tq_service.errors import InvalidArgumentError
from tq_service.state.ledger import RecordedPlan
from tq_service.state.partition import Partition
from tq_service.state.plan import Indexes, Pack, TotalsOfStep


def with_totals(
    plan: RecordedPlan, partition: Partition, positions: Indexes, lengths: Indexes | None, summed: tuple[str, ...]
) -> RecordedPlan:
    """Return a plan that also contains totals for each step.

    Args:
        plan: plan without totals.
        partition: partition that contains the plan's samples.
        positions: table positions of the rows in `plan.rows`.
        lengths: token counts of the rows in `plan.rows`, or None if any count is unknown.
        summed: names of the custom_meta columns to sum.

    Raises:
        InvalidArgumentError: a sample has no number in one of the summed columns.
    """
    columns = [_numbers(partition, name, positions) for name in summed]
    totals: list[TotalsOfStep] = []
    for packs, places in _steps(plan):
        delivered = positions[places]
        counted = np.unique(delivered) if plan.is_reusing else delivered
        tokens = None if lengths is None else int(lengths[places].sum())
        if packs and all(pack.lengths is not None for pack in packs):  # not `lengths`, because samples may be truncated
            tokens = sum(int(pack.lengths.sum()) for pack in packs if pack.lengths is not None)
        totals.append(
            (
                delivered.size,
                partition.groups.count_units(counted, "rollout"),
                partition.groups.count_units(counted, "group"),
                tokens,
                tuple(float(column[places].sum()) for column in columns),
            )
        )
    return replace(plan, totals=tuple(totals), summed=summed)


def _steps(plan: RecordedPlan) -> Sequence[tuple[Sequence[Pack], slice | Indexes]]:
    """For each step, return the packs of all ranks and the positions of the packed samples in `plan.rows`."""
    if not plan.steps:
        return [((), slice(None))]
    starts, found = [0, *accumulate(plan.sizes)], list[tuple[Sequence[Pack], slice | Indexes]]()
    for of_ranks in zip(*plan.steps, strict=True):
        places = [start + pack.positions for start, packs in zip(starts, of_ranks, strict=False) for pack in packs]
        found.append(([pack for packs in of_ranks for pack in packs], np.concatenate([np.zeros(0, np.int64), *places])))
    return found


def _numbers(partition: Partition, name: str, positions: Indexes) -> np.ndarray[tuple[int], np.dtype[np.generic]]:
    """Return the values of a custom_meta column. Raise an error if any value is not a number."""
    values, present = partition.meta.typed(name, positions)
    is_number = present & (values.dtype.kind != "O")
    if not is_number.all():
        index = int(partition.table.index[positions[int(np.argmin(is_number))]])
        raise InvalidArgumentError(
            f"custom_meta column {name!r} of sample {index} of partition {partition.partition_id!r} is not a number "
            f"({np.count_nonzero(~is_number)} of {is_number.size} samples in the batch have no number); expected a "
            f"number, because totals sums the column. Put or set the value, clear the sample, or omit the column.",
            field="totals",
            metadata={"column": name},
        )
    return values
