"""Samplers as a planner sees them: their base class, and what passes between the two: request, view and plan.

This is public API, exported by `tq_service.samplers`: samplers of users are subclasses of `Sampler`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Protocol

import numpy as np
from numpy.typing import NDArray

from tq_service.schema import BatchUnit, Blocks

Indexes = NDArray[np.int64]

_NO_ROWS = np.zeros(0, np.int64)


@dataclass(frozen=True, slots=True, kw_only=True)
class LengthSource:
    """Where the token count of a sample comes from.

    Attributes:
        key: custom_meta column that holds it.
        field: field whose row length stands in where the column has no value; None: no stand-in.
    """

    key: str = "total_lengths"
    field: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanRequest:
    """What a plan is asked for.

    Attributes:
        batch_size: samples or groups (`batch_unit`) for each rank.
        min_size: the least units over all ranks together that make a plan; with fewer ready, return None. The planner
            lowers it to 1 when nothing more can come, so a sampler never has to know about the end.
        batch_unit: what the two count.
        rank_count: number of ranks; 1 for a queue worker.
        ranked: whether trainer ranks ask, as opposed to a queue worker.
        micro_batch_size: samples a micro-batch, or None. A sampler that returns no steps gets its batches cut by it.
        data_fields: the fields asked for.
    """

    batch_size: int
    min_size: int
    batch_unit: BatchUnit = "sample"
    rank_count: int = 1
    ranked: bool = True
    micro_batch_size: int | None = None
    data_fields: tuple[str, ...] = ()

    @property
    def total_size(self) -> int:
        """The most units, over all ranks together, that a plan may take."""
        return self.batch_size * self.rank_count


@dataclass(frozen=True, slots=True, kw_only=True)
class Groups:
    """Samples in groups: `rows` has the members of group 0, then of group 1, ...; `sizes` counts them."""

    rows: Indexes
    sizes: Indexes

    @property
    def starts(self) -> Indexes:
        """Position in `rows` of each group's first member."""
        return np.concatenate([np.zeros(1, np.int64), np.cumsum(self.sizes)[:-1]]) if self.sizes.size else self.sizes

    def __len__(self) -> int:
        return int(self.sizes.size)


@dataclass(frozen=True, slots=True, kw_only=True)
class Pack:
    """What one forward/backward pass takes.

    Attributes:
        positions: positions in the rank's `rows`.
        lengths: token counts of these samples, or None where the sampler does not know them.
        padding_tokens: tokens that fill the pack up.
    """

    positions: Indexes
    lengths: Indexes | None = None
    padding_tokens: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class RankPlan:
    """The part of one rank.

    Attributes:
        rows: global indexes, in the order of the batch.
        steps: packs by optimizer step; empty: the planner cuts micro-batches and makes one step of them.
        dropped: global indexes of ready rows that the batch leaves out, such as too long ones, none of which is in
            `rows`. The task never gets them; they count as skipped (`EndCounts.overlong_count`).
    """

    rows: Indexes
    steps: tuple[tuple[Pack, ...], ...] = ()
    dropped: Indexes = field(default_factory=_NO_ROWS.copy)


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What a sampler decides for one batch: one part for each rank.

    Attributes:
        ranks: what each rank gets.
        consumed: the rows that the batch consumes, each once. None: all that it delivers, each of which it delivers
            once. Where given, a row may be delivered more than once, delivered rows that are not consumed stay ready
            for later batches (sampling with replacement), and rows that are not delivered are dropped.
    """

    ranks: tuple[RankPlan, ...]
    consumed: Indexes | None = None

    @classmethod
    def of(cls, parts: Sequence[Indexes], consumed: Indexes | None = None) -> Plan:
        """Return the plan that gives `parts[rank]` to each rank, as plain micro-batches."""
        return cls(
            ranks=tuple(RankPlan(rows=np.asarray(part, dtype=np.int64)) for part in parts),
            consumed=None if consumed is None else np.asarray(consumed, dtype=np.int64),
        )


class View(Protocol):
    """What a sampler sees of a partition, as one task sees it.

    Rows are global indexes throughout. Ready means: live, all data fields produced, not consumed by the task, passing
    the request's `where`, having the length the sampler declares. A view may be read from the sampler's thread while
    the partition goes on changing; a plan whose rows are gone by then is planned again.

    Attributes:
        plan_count: how many plans of the task were recorded before, in all epochs: the seed of what is drawn at random,
            since for two batches all else may be the same.
    """

    @property
    def plan_count(self) -> int:
        """See the class."""
        ...

    def ready(self, limit: int | None = None) -> Indexes:
        """Return up to `limit` ready rows in index order, or in the request's `order_by`."""
        ...

    def ready_groups(
        self,
        limit: int | None = None,
        *,
        unit: BatchUnit = "sample",
        block_size: int | None = None,
        take_incomplete: bool = False,
        blocks: Blocks = "aligned",
    ) -> Groups:
        """Return whole groups whose members are all ready, in the order of their first member.

        Args:
            limit: stop once another group would exceed so many units; None: all there are.
            unit: what `limit` counts.
            block_size: size of the groups: the number of members that completes a group which declared no size, and
                where the partition has no explicit groups the length of the blocks of consecutive indexes that stand
                in for them. None without explicit groups: each sample is a group of one.
            take_incomplete: deliver the rest of a group of which members failed or were cleared, instead of
                skipping it.
            blocks: where such blocks begin: at multiples of `block_size`, or anywhere: any `block_size` ready rows
                whose indexes follow each other are a group then, the earliest first.

        Raises:
            InvalidArgumentError: aligned blocks are asked for and some put of new rows was not a multiple of
                `block_size`.
        """
        ...

    def left(self, limit: int | None = None) -> Indexes:
        """Return up to `limit` rows that are left for the task, ready or not, in index order.

        These are live or held, not consumed, not leased, and not ruled out by the request's `where`.
        """
        ...

    def lengths(self, rows: Indexes) -> Indexes:
        """Return token counts `(n,)` by the sampler's `length` source; -1 where unknown."""
        ...

    def field_lengths(self, field: str, rows: Indexes) -> Indexes:
        """Return the row lengths `(n,)` of a field; -1 where there is none, or rows are scalars or objects.

        It is the size of a row in the first dimension in which rows differ, or in the first one where all are alike.
        """
        ...

    def values(self, column: str, rows: Indexes) -> tuple[NDArray[np.generic], NDArray[np.bool_]]:
        """Return a custom_meta column `(n,)` and where it has a value `(n,)`; an unknown column has none."""
        ...

    def group_names(self, rows: Indexes) -> list[str | None]:
        """Return the explicit group of each row."""
        ...

    def use_counts(self, rows: Indexes) -> Indexes:
        """Return how often the task was delivered each row and did not consume it `(n,)`; see `get_meta(max_uses=)`."""
        ...

    def states(self, rows: Indexes) -> list[str]:
        """Return the state of each row; "cleared" for one that is gone."""
        ...

    def rows(self) -> Indexes:
        """Return all rows of the partition that are not cleared, ready or not."""
        ...


class MustBeAwaited(BaseException):
    """A plan cannot be had at once: its sampler is a coroutine function, or does not run on the event loop.

    A view raises it too, through the sampler that reads it, where more must be looked at than the event loop has time
    for. Nothing has gone wrong, so it is none of the exceptions that samplers catch.
    """


class Sampler(ABC):
    """Decides which ready samples form a batch and how they are spread over the ranks.

    A sampler has no state beyond its options, which are the keyword arguments of its constructor (a frozen dataclass
    serves well); the constructor raises ValueError for bad values. The same view and request give the same plan.
    """

    name: ClassVar[str] = ""
    plans_below_min_size: ClassVar[bool] = False
    """Whether `plan` may make a batch of fewer than `request.min_size` units although more can come.

    Such a sampler is asked after each change; others once so many rows are ready that they may have a plan.
    """

    def __init_subclass__(cls, **kwargs: object) -> None:
        """Name a sampler by its class where it says no name itself, so that messages can name it."""
        super().__init_subclass__(**kwargs)
        if not cls.name:
            cls.name = cls.__name__

    @property
    def length(self) -> LengthSource | None:
        """The length that a sample must have to be ready; None: needs none."""
        return None

    def check(self, request: PlanRequest) -> None:  # noqa: B027  (optional hook)
        """Raise InvalidArgumentError where the request does not fit the sampler's options."""

    def runs_inline(self, request: PlanRequest) -> bool:
        """Whether `plan` takes well under a millisecond and may run on the event loop; else it gets a thread."""
        return False

    @abstractmethod
    def plan(self, view: View, request: PlanRequest) -> Plan | Awaitable[Plan | None] | None:
        """Return the plan of one batch, or None where fewer than `request.min_size` units are ready."""
