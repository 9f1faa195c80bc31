"""A sampler for off-policy methods: it delivers samples repeatedly and draws them at random by priority."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from tq_service.errors import InvalidArgumentError
from tq_service.state.plan import Groups, Indexes, Plan, PlanRequest, Sampler, View

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplaySampler(Sampler):
    """Fills part of each batch with fresh (never delivered) samples, and draws the rest at random by priority.

    Samples are drawn with replacement. A sample with priority p is drawn with probability p**exponent / Σ p**exponent,
    as proposed by Schaul, Quan, Antonoglou and Silver in "Prioritized Experience Replay" (ICLR 2016). With
    `batch_unit="group"`, entire named groups are delivered. The priority of a group is the mean priority of its
    samples. With `batch_unit="rollout"`, entire rollouts are delivered in the same way. Draws depend only on the seed,
    the number of earlier plans, and the ready samples.

    Attributes:
        fresh: fraction of each batch that is reserved for fresh samples, oldest first. If 0, the entire batch is drawn
            by priority.
        priority_key: custom_meta column that contains each sample's non-negative priority. Samples without a value have
            priority 0. null: all samples have equal priority.
        exponent: exponent applied to priorities. With 0, all samples with a nonzero priority are equally likely.
        seed: seed for the random draws.
        max_uses: number of deliveries after which a sample is consumed. null: samples are never consumed.
    """

    name: ClassVar[str] = "replay"

    fresh: float = 0.5
    priority_key: str | None = None
    exponent: float = 1.0
    seed: int = 0
    max_uses: int | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.fresh <= 1:
            raise ValueError(f"fresh: got {self.fresh}, expected a fraction from 0 to 1")
        if not 0 <= self.exponent < math.inf:
            raise ValueError(f"exponent: got {self.exponent}, expected a finite number of at least 0")
        if self.seed < 0:
            raise ValueError(f"seed: got {self.seed}, expected at least 0")
        if self.max_uses is not None and self.max_uses < 1:
            raise ValueError(f"max_uses: got {self.max_uses}, expected at least 1")
        if self.priority_key == "":
            raise ValueError("priority_key: got an empty name, expected the name of a custom_meta column")

    def plan(self, view: View, request: PlanRequest) -> Plan | None:
        """Assign fresh and drawn samples to ranks round-robin. Return None if there are too few samples for a batch.

        Raises:
            InvalidArgumentError: a priority is negative or not a finite number.
        """
        units, total = _units(view, request), request.total_size
        uses = np.maximum.reduceat(view.use_counts(units.rows), units.starts) if len(units) else units.sizes
        fresh_ids = np.flatnonzero(uses == 0) if self.fresh else uses[:0]
        most_fresh = max(1, round(self.fresh * total)) if self.fresh else 0
        fresh_count = min(fresh_ids.size, most_fresh)
        draw_count = (total - most_fresh) * fresh_count // most_fresh if most_fresh else total
        drawn = self._draw(view, units, uses, draw_count)
        taken = np.concatenate([fresh_ids[: fresh_count + draw_count - drawn.size], drawn])
        if taken.size < max(request.min_size, 1):
            return None
        consumed = taken[:0]
        if self.max_uses is not None:
            ids, counts = np.unique(taken, return_counts=True)
            consumed = ids[uses[ids] + counts >= self.max_uses]
        ranks = [_rows(units, taken[rank :: request.rank_count]) for rank in range(request.rank_count)]
        return Plan.of(ranks, consumed=_rows(units, consumed))

    def _draw(self, view: View, units: Groups, uses: Indexes, count: int) -> Indexes:
        """Draw up to `count` units with replacement, and return their ids.

        If all units reach `max_uses`, fewer units are drawn.
        """
        may_be_drawn = uses > 0 if self.fresh else np.ones(uses.size, np.bool_)
        drawn, ids = uses[:0], np.flatnonzero(may_be_drawn)
        if not count or not ids.size:
            return drawn
        priorities = self._priorities(view, units)[ids]
        if not priorities.any():
            priorities = np.ones(ids.size)
        ids, priorities = ids[priorities > 0], priorities[priorities > 0]
        weights = (priorities / priorities.max()) ** self.exponent
        rng = np.random.default_rng((self.seed, view.plan_count))
        # If a unit is drawn more often than `max_uses` permits, the excess draws are repeated among the remaining
        # units. The result has the same distribution as drawing units one by one and removing used-up units.
        while drawn.size < count and ids.size:
            ends = np.cumsum(weights)
            places = ends.searchsorted(rng.random(count - drawn.size) * ends[-1], side="right")
            drawn = np.concatenate([drawn, ids[places.clip(max=ids.size - 1)]])
            if self.max_uses is None:
                break
            drawn = drawn[_occurrence(drawn) < self.max_uses - uses[drawn]]
            is_left = np.bincount(drawn, minlength=uses.size)[ids] < self.max_uses - uses[ids]
            ids, weights = ids[is_left], weights[is_left]
        return drawn

    def _priorities(self, view: View, units: Groups) -> Floats:
        """Return the priority of each unit, divided by the highest priority of any sample."""
        if self.priority_key is None:
            return np.ones(len(units))
        values, present = view.values(self.priority_key, units.rows)
        is_number = values.dtype.kind in "bif"
        priorities = np.where(present, values, 0).astype(np.float64) if is_number else np.zeros(present.size)
        is_bad = ~np.isfinite(priorities) | (priorities < 0) if is_number else present
        if is_bad.any():
            at = int(is_bad.argmax())
            (bad,) = values[at : at + 1].tolist()
            raise InvalidArgumentError(
                f"{self.priority_key}: got {bad!r:.80} for sample {units.rows[at]}; expected a finite number "
                "of at least 0. Correct the priority with SetCustomMeta",
                field="sampler_config",
                metadata={"column": self.priority_key},
            )
        return np.asarray(np.add.reduceat(priorities / (priorities.max() or 1.0), units.starts) / units.sizes)


def _units(view: View, request: PlanRequest) -> Groups:
    """Return the units that can be delivered: ready named groups, ready rollouts, or individual ready samples."""
    if request.batch_unit != "sample":
        return view.ready_groups(unit=request.batch_unit)
    rows = view.ready()
    return Groups(rows=rows, sizes=np.ones(rows.size, np.int64))


def _rows(units: Groups, ids: Indexes) -> Indexes:
    """Return the rows of the units in `ids`, in the same order."""
    starts, sizes = units.starts[ids], units.sizes[ids]
    firsts = np.repeat(starts - np.cumsum(sizes) + sizes, sizes)
    return units.rows[firsts + np.arange(firsts.size)]


def _occurrence(values: Indexes) -> Indexes:
    """For each value, return the number of its earlier occurrences in the array."""
    order = np.argsort(values, kind="stable")
    ordered = values[order]
    result = np.empty_like(values)
    result[order] = np.arange(values.size) - ordered.searchsorted(ordered)
    return result
