"""A view of samples of known lengths, to try samplers without a service."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from tq_service.planning.grouping import groups_in_runs
from tq_service.schema import BatchUnit, Blocks
from tq_service.state.plan import Groups, Indexes, Plan


class ListView:
    """Implements `View` over samples 0, 1, ... in memory, which are ready once they are produced, until consumed."""

    def __init__(
        self,
        lengths: Sequence[int] | Indexes,
        *,
        group_size: int | None = None,
        meta: Mapping[str, Sequence[object]] | None = None,
        unproduced: Sequence[int] | Indexes = (),
    ) -> None:
        """Make a view.

        Args:
            lengths: token count of each sample.
            group_size: neighbours that form an explicit group, the last of which may be smaller; None: no groups.
            meta: custom_meta columns, one value a sample.
            unproduced: samples that lack a field, see `produce`.

        Raises:
            ValueError: `group_size` is below 1, or a column of `meta` has not one value a sample.
            IndexError: one of `unproduced` is no sample.
        """
        self._lengths = np.asarray(lengths, np.int64)
        self._produced = np.ones(self._lengths.size, np.bool_)
        self._produced[np.asarray(unproduced, np.int64)] = False
        self._left = np.ones(self._lengths.size, np.bool_)
        self._uses = np.zeros(self._lengths.size, np.int64)
        self.plan_count = 0
        self._group_size = group_size
        self._meta = {name: np.asarray(column) for name, column in (meta or {}).items()}
        if group_size is not None and group_size < 1:
            raise ValueError(f"group_size: got {group_size}, expected at least 1")
        for name, column in self._meta.items():
            if column.shape != self._lengths.shape:
                raise ValueError(
                    f"got meta {name!r} of shape {column.shape}, expected one value for each of "
                    f"{self._lengths.size} samples"
                )

    def consume(self, rows: Indexes) -> None:
        """Let these rows be left no longer, as if they had been delivered and acknowledged."""
        self._left[rows] = False

    def record(self, plan: Plan, *, max_uses: int = 1) -> None:
        """Consume and drop rows, and count deliveries, as the service does with `get_meta(max_uses=)`."""
        rows = np.concatenate([part.rows for part in plan.ranks])
        np.add.at(self._uses, rows, 1)
        self.plan_count += 1
        if plan.consumed is not None:
            self.consume(plan.consumed)
        if plan.consumed is None or max_uses > 1:
            self.consume(rows[self._uses[rows] >= max_uses])
        self.consume(np.concatenate([part.dropped for part in plan.ranks]))

    def use_counts(self, rows: Indexes) -> Indexes:
        """Return how often each row was delivered by plans that were recorded `(n,)`."""
        return self._uses[rows]

    def produce(self, rows: Indexes) -> None:
        """Let these rows have all their fields."""
        self._produced[rows] = True

    def ready(self, limit: int | None = None) -> Indexes:
        """Return up to `limit` samples that are produced and not consumed, in order."""
        return np.flatnonzero(self._produced & self._left)[:limit]

    def ready_groups(
        self,
        limit: int | None = None,
        *,
        unit: BatchUnit = "sample",
        block_size: int | None = None,
        take_incomplete: bool = False,
        blocks: Blocks = "aligned",
    ) -> Groups:
        """Return whole groups as `View.ready_groups` does; none is incomplete, as no sample of a list fails."""
        rows = self.rows()
        size = self._group_size or block_size or 1
        starts = rows[::size]
        if self._group_size is None and blocks == "anywhere":
            starts = np.unique(groups_in_runs(self.ready(), size))
            starts = starts[starts >= 0]
        elif self._group_size is None:  # a block is complete with its last sample, an explicit group as it is
            starts = starts[starts + size <= rows.size]
        is_ready = self._produced & self._left
        starts = np.array([start for start in starts if is_ready[start : start + size].all()], np.int64)
        sizes = np.minimum(starts + size, rows.size) - starts
        if limit is not None:
            used = np.arange(1, sizes.size + 1) if unit == "group" else np.cumsum(sizes)
            sizes = sizes[used <= limit]
        members = [rows[start : start + size] for start in starts[: sizes.size]]
        return Groups(rows=np.concatenate([rows[:0], *members]), sizes=sizes)

    def left(self, limit: int | None = None) -> Indexes:
        """Return up to `limit` samples that are not consumed, produced or not, in order."""
        return np.flatnonzero(self._left)[:limit]

    def lengths(self, rows: Indexes) -> Indexes:
        """Return token counts `(n,)`."""
        return self._lengths[rows]

    def field_lengths(self, field: str, rows: Indexes) -> Indexes:
        """Return the token counts `(n,)`, whatever the field."""
        return self._lengths[rows]

    def values(self, column: str, rows: Indexes) -> tuple[NDArray[np.generic], NDArray[np.bool_]]:
        """Return a column of `meta` `(n,)` and where it has a value `(n,)`; an unknown column has none."""
        if column not in self._meta:
            return np.zeros(rows.size), np.zeros(rows.size, np.bool_)
        return self._meta[column][rows], np.ones(rows.size, np.bool_)

    def group_names(self, rows: Indexes) -> list[str | None]:
        """Return the number of each sample's group as its name; None without groups."""
        return [None if self._group_size is None else str(row // self._group_size) for row in rows.tolist()]

    def states(self, rows: Indexes) -> list[str]:
        """Return "live" for each row."""
        return ["live"] * rows.size

    def rows(self) -> Indexes:
        """Return all samples, consumed or not."""
        return np.arange(self._lengths.size)
