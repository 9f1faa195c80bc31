"""Claims and plans: what consumers ask for, what a sampler is shown of it, and the plan that it returns.

The part down to `Sampler` is public API, exported by `tq_service.samplers`: samplers of users are subclasses of
`Sampler`. The rest is a claim: its conditions and order, its specification, which all ranks share, and the call.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import Any, ClassVar, Final, Protocol, cast

import numpy as np
from numpy.typing import NDArray

from tq_service.custom_meta import KIND_NAMES
from tq_service.errors import InvalidArgumentError
from tq_service.schema import (
    MOST_SAMPLES,
    Admission,
    Admit,
    BatchUnit,
    Blocks,
    FieldSpec,
    OnLost,
    Operator,
    Published,
    Scalar,
    Unmatched,
    check_id,
    check_name,
    check_range,
    check_unique,
)
from tq_service.state.policies import Policies

MAX_LEASE_SECONDS: Final = 86_400.0
MOST_RANKS: Final = 65_536
_MOST_BATCHES: Final = 64  # of one call

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


# Comparisons that come to hold for more samples as the version that they compare with grows, and for fewer.
_GROWING: Final = frozenset({"<", "<="})
_SHRINKING: Final = frozenset({">", ">="})


@dataclass(frozen=True, slots=True)
class Condition:
    """What a sample must satisfy; one without a value does not.

    Attributes:
        published: what is compared with instead of values: a version that is published when samples are looked at.

    Raises:
        InvalidArgumentError: something is missing, values are of several types, or more than the operator takes.
    """

    column: str
    operator: Operator
    values: tuple[Scalar, ...] = ()
    published: Published | None = None

    def __post_init__(self) -> None:
        if self.published is not None:
            self._check_published(self.published)
            return
        if not self.operator or not self.column:
            raise InvalidArgumentError(
                f"where: got column {self.column!r} and operator {self.operator!r}; give both", field="where"
            )
        given = [value for value in self.values if value is not None]
        if len(given) != len(self.values) or (self.operator != "in" and len(given) != 1):
            raise InvalidArgumentError(
                f"where: column {self.column!r} {self.operator} got {len(given)} values; give one, or any number with "
                f"'in'",
                field="where",
            )
        if len({isinstance(value, str) for value in given}) > 1:
            raise InvalidArgumentError(
                f"where: column {self.column!r} is compared with text and numbers; use one type", field="where"
            )

    def _check_published(self, published: Published) -> None:
        check_name("policy", published.policy)
        if self.values or not self.column or self.operator not in _GROWING | _SHRINKING:
            raise InvalidArgumentError(
                f"where: column {self.column!r} {self.operator} is compared with the published version of policy "
                f"{published.policy!r} and {len(self.values)} values; expected a column, one of <, <=, > and >=, and "
                f"the version alone",
                field="where",
            )

    def resolved(self, policies: Policies) -> Condition:
        """Return it with the version that is published now as its value; it never holds if nobody has published one."""
        if self.published is None:
            return self
        policy = policies.get(self.published.policy)
        version = math.nan if policy is None else policy.version + self.published.offset
        return Condition(self.column, self.operator, (version,))

    def may_hold_later(self, policies: Policies) -> bool:
        """Whether it may come to hold for a value for which it does not, since versions grow."""
        published = self.published
        return published is not None and (self.operator in _GROWING or published.policy not in policies)

    def holds(self, data: NDArray[Any]) -> NDArray[np.bool_]:
        """Return where the condition holds `(n,)`, for values that are present."""
        kind = data.dtype.kind
        for value in self.values:
            is_text = isinstance(value, str)
            if is_text != (kind == "O"):
                raise InvalidArgumentError(
                    f"where: column {self.column!r} holds {KIND_NAMES[kind]} values, got {value!r}; compare it with a "
                    f"{KIND_NAMES[kind]}",
                    field="where",
                )
        if kind == "O":
            if self.operator == "in":  # isin compares each text with each value
                return np.fromiter(map(frozenset(self.values).__contains__, data), np.bool_, data.size)
            # Texts are compared as they are: in an array of text, each would take the space of the longest.
            other = np.array(self.values[0], dtype=np.object_)
            return np.asarray(_COMPARE[self.operator](data, other), dtype=np.bool_)
        if kind == "b":
            data = data.astype(np.int64)
        bounds = [_neighbours(cast("float", value), kind) for value in self.values]
        if self.operator == "in":
            exact = [below for below, above in bounds if below == above and (kind == "f" or math.isfinite(below))]
            return np.isin(data, np.array(exact, np.float64 if kind == "f" else np.int64))
        below, above = bounds[0]
        if below != above and self.operator in {"==", "!="}:
            return np.full(data.size, self.operator == "!=")
        return np.asarray(_COMPARE[self.operator](data, above if self.operator in {"<", ">="} else below), np.bool_)


_INT64: Final = np.iinfo(np.int64)


def _neighbours(value: float, kind: str) -> tuple[float, float]:
    """Return the largest number of a kind that is at most a value, and the least one that is at least it.

    They are equal if the kind has the value. So integers and floats are compared as the numbers that they are, whereas
    numpy converts integers to floats, which do not have 2**53 + 1. Infinity stands for numbers that int64 does not
    have, and is compared as a float. Neither neighbour of NaN is a number.
    """
    if kind == "f":
        try:
            nearest = float(value)
        except OverflowError:  # an integer of more than 1,024 bits
            nearest = math.inf if value > 0 else -math.inf
        below = nearest if not nearest > value else math.nextafter(nearest, -math.inf)
        above = nearest if not nearest < value else math.nextafter(nearest, math.inf)
        return below, above
    if isinstance(value, float) and not math.isfinite(value):
        return value, value
    return _in_int64(math.floor(value)), _in_int64(math.ceil(value))


def _in_int64(value: int) -> float:
    if _INT64.min <= value <= _INT64.max:
        return value
    return math.inf if value > 0 else -math.inf


_COMPARE: dict[str, Any] = {
    "==": np.equal,
    "!=": np.not_equal,
    "<": np.less,
    "<=": np.less_equal,
    ">": np.greater,
    ">=": np.greater_equal,
}


@dataclass(frozen=True, slots=True)
class Order:
    """A column by which ready samples are ordered; samples without a value come last."""

    column: str
    descending: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Refill:
    """The task that makes evicted units again, from the samples of its partition that have their names as keys.

    Attributes:
        max_refills: how often a sample is made claimable again for it, in an epoch of the task.

    Raises:
        InvalidArgumentError: a name is none, or the number is less than 1.
    """

    partition_id: str
    task_name: str
    max_refills: int = 3

    def __post_init__(self) -> None:
        check_name("refill", self.partition_id)
        check_name("refill", self.task_name)
        check_range("max_refills", self.max_refills, 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchSpec:
    """What the first plan of a batch_index fixes for all ranks.

    Attributes, besides those that GetMeta says more about:
        max_uses: how often a sample is delivered before it counts as consumed.
        unmatched: what becomes of samples that `where` excludes: they wait, or they are evicted.
        least_members: a group with fewer members left is evicted; 0: no group is for that.
        refill: where evicted units are made again; None: nowhere.
        held: whether held samples are delivered, and no live ones.

    Raises:
        InvalidArgumentError: the micro-batches have no size, samples are never used, `order_by` does not name its
            columns each once, or a least number of members or a refill is given although nothing is evicted.
    """

    batch_size: int
    batch_unit: BatchUnit = "sample"
    micro_batch_size: int | None
    sampler: str = "sequential"
    sampler_config: str
    where: tuple[Condition, ...]
    order_by: tuple[Order, ...]
    data_fields: tuple[str, ...]
    drop_last: bool
    finite: bool
    max_uses: int = 1
    unmatched: Unmatched = "wait"
    least_members: int = 0
    refill: Refill | None = None
    held: bool = False

    def __post_init__(self) -> None:
        check_range("max_uses", self.max_uses, 1, hint=", or 0 for once")
        check_range("least_members", self.least_members, 0)
        for name, value in (("least_members", self.least_members), ("refill", self.refill)):
            if value and not self.evicts:
                raise InvalidArgumentError(
                    f"{name} is {shown(value)} and unmatched is {self.unmatched!r}, with which nothing is evicted; "
                    f"expected unmatched 'fail' or 'clear', which says what becomes of what is evicted",
                    field=name,
                )
        if self.micro_batch_size is not None:
            hint = ": a positive number, or 0 for the whole batch"
            check_range("micro_batch_size", self.micro_batch_size, 0, hint=hint)
        columns = [order.column for order in self.order_by]
        if "" in columns:
            raise InvalidArgumentError(
                f"order_by has an empty column, at position {columns.index('')}; name each column", field="order_by"
            )
        check_unique("order_by", columns)

    @property
    def evicts(self) -> bool:
        """Whether claims evict samples that they never get."""
        return self.unmatched != "wait"

    def disagreement(self, other: BatchSpec) -> tuple[str, object, object] | None:
        """Return the first argument that differs, with both values."""
        return None if self is other else next(differences(self, other), None)


def differences(one: Any, other: Any) -> Iterator[tuple[str, object, object]]:
    """Yield the fields in which two dataclasses differ, with both values."""
    for name in (each.name for each in fields(one)):
        if getattr(one, name) != getattr(other, name):
            yield name, getattr(one, name), getattr(other, name)


def shown(value: object) -> str:
    """Return an argument of a claim, or a setting, as errors have it, for clients in every language."""
    match value:
        case None:
            return "unset"
        case bool():
            return str(value).lower()
        case Condition():
            compared = value.values if value.published is None else value.published
            return f"{value.column} {value.operator} {shown(compared)}"
        case Published():
            return f"published({value.policy}) {value.offset:+d}"
        case Refill():
            return f"{value.task_name} of {value.partition_id}, at most {value.max_refills} times"
        case Order():
            return f"{value.column} descending" if value.descending else value.column
        case FieldSpec():
            return f"{value.name}: {value.describe()}{', write-once' if value.write_once else ''}"
        case Admission():
            place = f"{value.given_back} by {value.policy}" if value.given_back == "published" else value.given_back
            bound = "" if value.max_staleness is None else f", at most {value.max_staleness} versions late"
            running = f", at most {value.most_running} running" if value.most_running else ""
            return f"{value.task_name}: {value.most} {value.unit}s until {place}{bound}{running}"
        case tuple():
            return ", ".join(map(shown, value)) or "none"
    return str(value)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rank:
    """Which part of which batch a trainer rank asks for.

    Raises:
        InvalidArgumentError: a number is out of its range.
    """

    dp_rank: int
    dp_size: int
    batch_index: int

    def __post_init__(self) -> None:
        check_range("dp_size", self.dp_size, 1, MOST_RANKS)
        check_range("dp_rank", self.dp_rank, 0, self.dp_size - 1, hint=", less than dp_size")
        check_range("batch_index", self.batch_index, 0, hint="; count from 0")

    @classmethod
    def of(cls, **numbers: int | None) -> Rank | None:
        """Return the rank of these numbers, None where all are None.

        Raises:
            InvalidArgumentError: some are None, or one is out of its range.
        """
        given = {name: number for name, number in numbers.items() if number is not None}
        missing = [name for name in numbers if name not in given]
        if given and missing:
            raise InvalidArgumentError(
                f"got {' and '.join(given)} without {' and '.join(missing)}; give all three for a trainer rank, none "
                f"for a queue worker",
                field=missing[0],
            )
        return cls(**given) if given else None


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseTerms:
    """How samples are leased to a queue worker.

    Attributes:
        seconds: what is not acknowledged within so many seconds can be claimed by others.
        max_deliveries: a sample delivered so often without being acknowledged is dead-lettered; None: no bound.
        group_block_size: where the claim is of whole groups, which then are acknowledged, released and redelivered
            whole: 0 for named groups, else the length of the blocks of consecutive indexes that stand in for
            them; None: samples come and go one by one.
        blocks: where these begin: at multiples of their length, or anywhere.
        on_lost: of slots: what becomes of those that are still held when the lease runs out; those that are released
            without data are removed. None: the claim is of samples that were there before.
        shared_with: the partition in which a claim of the same task under the same request id shares the lease: of
            prompts that of their slots, and the other way round. Empty: the lease is of this claim alone.

    Raises:
        InvalidArgumentError: a number is out of its range.
    """

    seconds: float
    max_deliveries: int | None = None
    group_block_size: int | None = None
    blocks: Blocks = "aligned"
    on_lost: OnLost | None = None
    shared_with: str = ""

    def __post_init__(self) -> None:
        if not 0 < self.seconds <= MAX_LEASE_SECONDS:  # which NaN fails too
            raise InvalidArgumentError(
                f"lease is {self.seconds}; give a positive number of seconds, at most {MAX_LEASE_SECONDS:g} (a day), "
                f"and extend the lease where the work takes longer",
                field="lease",
            )
        if self.max_deliveries is not None:
            hint = ": a positive number, or 0 for no bound"
            check_range("max_deliveries", self.max_deliveries, 0, hint=hint)


@dataclass(frozen=True, slots=True, kw_only=True)
class LeasedClaim:
    """A claim with a lease, under which samples are changed.

    Raises:
        InvalidArgumentError: the name or the id is malformed.
    """

    task_name: str
    request_id: bytes

    def __post_init__(self) -> None:
        check_name("task_name", self.task_name)
        check_id("claim_request_id", self.request_id)


@dataclass(frozen=True, kw_only=True)
class ClaimSpec:
    """What all ranks of a task ask for alike, batch after batch. Calls with equal specs are served by the same plans.

    Attributes:
        data_fields: what the answer locates; `batch_spec.data_fields` has the same names in one order for all ranks.
        min_batch_size: the least a queue worker takes; 0 stands for the whole batch.
        dp_size: number of ranks, None for queue workers.
        admit: the slots that a rollout worker gets with its prompts; None: none.

    Raises:
        InvalidArgumentError: a size is out of its range, or fields are not named each once.
    """

    batch_spec: BatchSpec
    data_fields: tuple[str, ...] = field(compare=False)
    min_batch_size: int = 0
    dp_size: int | None = None
    admit: Admit | None = None

    def __post_init__(self) -> None:
        if self.data_fields or not self.batch_spec.held:
            check_data_fields(self.data_fields)
        batch_size, rank_count = self.batch_spec.batch_size, self.dp_size or 1
        if batch_size <= 0 or batch_size * rank_count > MOST_SAMPLES:
            raise InvalidArgumentError(
                f"batch_size is {batch_size} for {rank_count} ranks; give a positive number, at most {MOST_SAMPLES} "
                f"over all ranks",
                field="batch_size",
                metadata={"got": str(batch_size * rank_count), "expected": f"1 to {MOST_SAMPLES}"},
            )
        if self.dp_size is not None and self.min_batch_size:
            raise InvalidArgumentError(
                "min_batch_size is for queue workers; a rank's batch is short only at the end", field="min_batch_size"
            )
        object.__setattr__(self, "min_batch_size", self.min_batch_size or batch_size)
        check_range("min_batch_size", self.min_batch_size, 1, batch_size, hint=", the batch_size")

    @cached_property
    def plan_request(self) -> PlanRequest:
        """What the sampler is asked for: a whole batch of all ranks, or what a queue worker takes at least."""
        batch_spec, rank_count = self.batch_spec, self.dp_size or 1
        return PlanRequest(
            batch_size=batch_spec.batch_size,
            min_size=self.min_batch_size if self.dp_size is None else batch_spec.batch_size * rank_count,
            batch_unit=batch_spec.batch_unit,
            rank_count=rank_count,
            ranked=self.dp_size is not None,
            micro_batch_size=batch_spec.micro_batch_size,
            data_fields=self.data_fields,
        )

    @cached_property
    def _hash(self) -> int:  # `where` may list thousands of values
        return hash((self.batch_spec, self.min_batch_size, self.dp_size, self.admit))

    def __hash__(self) -> int:
        return self._hash


def check_data_fields(names: Sequence[str]) -> None:
    """Refuse fields that are not named, or not each once."""
    if not names:
        raise InvalidArgumentError("data_fields is empty; name at least one field", field="data_fields")
    if "" in names:
        raise InvalidArgumentError(f"data_fields is {list(names)}; name each field", field="data_fields")
    check_unique("data_fields", names)


@dataclass(frozen=True, slots=True, kw_only=True)
class NotBefore:
    """A version of a policy that must be published before a batch is planned."""

    policy: str
    version: int

    def __post_init__(self) -> None:
        check_name("policy", self.policy)
        check_range("not_before_version", self.version, 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class ClaimRequest:
    """What a GetMeta call asks for.

    Attributes:
        rank: the rank that asks, None for a queue worker; of the `dp_size` of `asked`.
        epoch: the epoch the caller means, None for whichever.
        lease: how a queue worker leases its samples, None where they are done once they are delivered.
        claim_name: of a queue worker's claim, which is the same whenever it is asked for by this name; empty: none.
        not_before: what must be published first; None: nothing.
        batch_count: the most batches that a rank takes, from that of `rank` on.
        make_slots: makes the slots of `spec.admit`, given the prompts of a plan, in the step in which they are claimed;
            if it raises, they are not.

    Raises:
        InvalidArgumentError: the id or a name is none, a rank asks for a lease, or for a claim by name, or a queue
            worker for several batches.
    """

    request_id: bytes
    task_name: str
    spec: ClaimSpec
    sampler: Sampler
    rank: Rank | None = None
    epoch: int | None = None
    lease: LeaseTerms | None = None
    claim_name: str = ""
    not_before: NotBefore | None = None
    batch_count: int = 1
    make_slots: Callable[[Indexes], None] | None = None

    def __post_init__(self) -> None:
        check_name("task_name", self.task_name)
        check_id("request_id", self.request_id)
        if self.batch_count != 1:
            check_range("batch_count", self.batch_count, 1, _MOST_BATCHES)
            if self.rank is None:
                raise InvalidArgumentError(
                    f"batch_count is {self.batch_count}, expected 1 for a queue worker, whose claims have a request_id "
                    "each. Make a call for each claim, or ask for a larger batch_size.",
                    field="batch_count",
                )
        if self.rank is not None and self.lease is not None:
            raise InvalidArgumentError(
                "lease is for queue workers; the batches of ranks are not leased, a rank that asks again gets the same",
                field="lease",
            )
        if self.batch_spec.held and self.lease is None:
            raise InvalidArgumentError(
                "held samples are claimed without a lease; give one, under which a rollout worker goes on with them",
                field="lease",
            )
        if self.spec.admit is not None:
            self._check_admit()
        if self.claim_name:
            check_name("claim_name", self.claim_name)
            if self.rank is not None:
                raise InvalidArgumentError(
                    f"claim_name is {self.claim_name!r}, which is for queue workers; a rank names its batch by dp_rank "
                    f"and batch_index",
                    field="claim_name",
                )

    def _check_admit(self) -> None:
        """Refuse slots for anything but prompts of a worker that leases them, each by itself and once."""
        spec = self.batch_spec
        for name, got, expected in (
            ("lease", "unset" if self.lease is None else "set", "set"),
            ("claim_name", self.claim_name, ""),
            ("batch_unit", spec.batch_unit, "sample"),
            ("max_uses", spec.max_uses, 1),
            ("held", spec.held, False),
        ):
            if got != expected:
                raise InvalidArgumentError(
                    f"{name} is {got!r} with admit, expected {expected!r}: slots are made for prompts that a rollout "
                    f"worker leases one by one",
                    field=name,
                )

    @property
    def batch_spec(self) -> BatchSpec:
        """What the first plan of a batch_index fixes."""
        return self.spec.batch_spec

    @property
    def policy(self) -> str | None:
        """The policy with whose version it compares samples, or else that it waits for; None: neither."""
        compared = (each.published.policy for each in self.batch_spec.where if each.published is not None)
        return next(compared, None if self.not_before is None else self.not_before.policy)

    @property
    def plan_request(self) -> PlanRequest:
        """What the sampler is asked for."""
        return self.spec.plan_request

    @property
    def batch_index(self) -> int:
        """The first batch that a rank asks for; -1: it is a queue worker."""
        return -1 if self.rank is None else self.rank.batch_index

    def following(self) -> Iterator[ClaimRequest]:
        """Return a request for each batch of a range but the first."""
        if self.rank is not None:
            for index in range(self.rank.batch_index + 1, self.rank.batch_index + self.batch_count):
                yield replace(self, rank=replace(self.rank, batch_index=index), batch_count=1)
