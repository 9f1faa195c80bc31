"""A sampler that draws delivered samples again, by priority, for off-policy methods."""

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
    """Takes a share of fresh samples, which were never delivered, and draws the rest of a batch by priority.

    Draws are with replacement, with probability p**exponent / Σ p**exponent, as in prioritized experience replay (T.
    Schaul, J. Quan, I. Antonoglou, D. Silver, "Prioritized Experience Replay", ICLR 2016). With `batch_unit="group"`
    entire named groups are delivered, with the mean priority of their members; likewise rollouts with "rollout". The
    draws of a batch depend on the seed, the number of earlier plans, and the samples.

    Attributes:
        fresh: share of fresh samples in a batch, oldest first; 0: all samples are drawn, delivered before or not.
        priority_key: custom_meta column with the priority of a sample, at least 0; null: all priorities are equal. A
            sample without a value has priority 0.
        exponent: exponent of the priorities; 0: all samples with a nonzero priority are equally likely.
        seed: seed of the draws.
        max_uses: number of deliveries after which a sample is consumed; null: never.
    """

    name: ClassVar[str] = "replay"

    fresh: float = 0.5
    priority_key: str | None = None
    exponent: float = 1.0
    seed: int = 0
    max_uses: int | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.fresh <= 1:
            raise ValueError(f"fresh: got {self.fresh}, expected a share of 0 to 1")
        if not 0 <= self.exponent < math.inf:
            raise ValueError(f"exponent: got {self.exponent}, expected a finite number of at least 0")
        if self.seed < 0:
            raise ValueError(f"seed: got {self.seed}, expected at least 0")
        if self.max_uses is not None and self.max_uses < 1:
            raise ValueError(f"max_uses: got {self.max_uses}, expected at least 1")
        if self.priority_key == "":
            raise ValueError("priority_key: got an empty name, expected a custom_meta column")

    def plan(self, view: View, request: PlanRequest) -> Plan | None:
        """Return fresh and drawn samples, distributed round-robin to the ranks, or None if too few are fresh.

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
        """Return up to `count` units drawn with replacement; fewer if all units are used up."""
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
        # Draws of a unit beyond its last use are repeated, which is equivalent to drawing one by one without the unit.
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
        """Return the priority of each unit, relative to the largest priority of a sample."""
        if self.priority_key is None:
            return np.ones(len(units))
        values, present = view.values(self.priority_key, units.rows)
        is_number = values.dtype.kind in "bif"
        priorities = np.where(present, values, 0).astype(np.float64) if is_number else np.zeros(present.size)
        is_bad = ~np.isfinite(priorities) | (priorities < 0) if is_number else present
        if is_bad.any():
            at = int(is_bad.argmax())
            raise InvalidArgumentError(
                f"{self.priority_key}: got {values[at]!r:.80} for sample {units.rows[at]}, expected a priority, a "
                "finite number of at least 0; fix it with SetCustomMeta",
                field="sampler_config",
                metadata={"column": self.priority_key},
            )
        return np.asarray(np.add.reduceat(priorities / (priorities.max() or 1.0), units.starts) / units.sizes)


def _units(view: View, request: PlanRequest) -> Groups:
    """Return the units of delivery: ready named groups or rollouts, or single ready samples."""
    if request.batch_unit != "sample":
        return view.ready_groups(unit=request.batch_unit)
    rows = view.ready()
    return Groups(rows=rows, sizes=np.ones(rows.size, np.int64))


def _rows(units: Groups, ids: Indexes) -> Indexes:
    """Return the rows of the units, in the order of `ids`."""
    starts, sizes = units.starts[ids], units.sizes[ids]
    firsts = np.repeat(starts - np.cumsum(sizes) + sizes, sizes)
    return units.rows[firsts + np.arange(firsts.size)]


def _occurrence(values: Indexes) -> Indexes:
    """Return the number of earlier occurrences of each value `(n,)`."""
    order = np.argsort(values, kind="stable")
    ordered = values[order]
    result = np.empty_like(values)
    result[order] = np.arange(values.size) - ordered.searchsorted(ordered)
    return result
