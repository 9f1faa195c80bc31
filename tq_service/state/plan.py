"""Claims and plans: a consumer's request, the view that a sampler reads, and the plan that the sampler returns.

`Sampler` and all definitions above it are public. `tq_service.samplers` exports these definitions so that users can
write their own subclasses of `Sampler`. The remaining definitions describe a claim: its conditions, its order, the
arguments that all ranks must agree on, and the call itself.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import Any, ClassVar, Final, Protocol, TypeAlias, cast

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
    Release,
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
TOTAL_LENGTHS: Final = "total_lengths"
"""Default custom_meta column for the token counts of samples. A sampler can use a different column."""
_MOST_BATCHES: Final = 64  # maximum number of batches per call
_MOST_SUMS: Final = 4  # maximum number of summed columns in the totals of a batch

Indexes = NDArray[np.int64]
TotalsOfStep: TypeAlias = tuple[int, int, int, int | None, tuple[float, ...]]
"""Totals of a step: the numbers of samples, rollouts, groups and tokens, and the column sums (see `StepTotals`)."""

_NO_ROWS = np.zeros(0, np.int64)


@dataclass(frozen=True, slots=True, kw_only=True)
class LengthSource:
    """The source of a sample's token count: a custom_meta column or the length of a row.

    Attributes:
        key: custom_meta column that contains the token count. None means `total_lengths`.
        field: field whose row length is used if the column has no value for the sample. If neither `field` nor `key` is
            set, the length of the sample's longest sequence in the requested fields is used. If only `key` is set, the
            custom_meta column is the only source. A sequence is a one-dimensional row of a field that is not declared
            as dense.
    """

    key: str | None = None
    field: str | None = None

    @property
    def column(self) -> str:
        """Name of the custom_meta column that contains the token count."""
        return TOTAL_LENGTHS if self.key is None else self.key

    @property
    def is_longest_sequence(self) -> bool:
        """Whether a sample's longest sequence determines its token count if the column has no value for the sample."""
        return self.key is None and self.field is None


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanRequest:
    """A request for one plan, as passed to a sampler.

    Attributes:
        batch_size: number of units (samples, rollouts or groups; see `batch_unit`) per rank.
        min_size: minimum number of units, summed over all ranks. If fewer units are ready, the sampler returns None.
            When no more units can become ready, the planner lowers this value to 1. Samplers therefore need no special
            case for the end of the data.
        batch_unit: unit in which `batch_size` and `min_size` are counted.
        rank_count: number of ranks, or 1 for a queue worker.
        ranked: whether the request comes from trainer ranks rather than from a queue worker.
        micro_batch_size: number of samples per micro-batch, or None. If the sampler returns no steps, the planner
            splits the batch into micro-batches of this size or, if None, into one micro-batch per rank.
        data_fields: names of the requested fields.
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
        """Maximum number of units in a plan, across all ranks."""
        return self.batch_size * self.rank_count


@dataclass(frozen=True, slots=True, kw_only=True)
class Groups:
    """Samples in groups. `rows` lists the members group by group, and `sizes` contains the size of each group."""

    rows: Indexes
    sizes: Indexes

    @property
    def starts(self) -> Indexes:
        """Position of each group's first member in `rows`."""
        return np.concatenate([np.zeros(1, np.int64), np.cumsum(self.sizes)[:-1]]) if self.sizes.size else self.sizes

    def __len__(self) -> int:
        return int(self.sizes.size)


@dataclass(frozen=True, slots=True, kw_only=True)
class Pack:
    """The samples of one forward/backward pass.

    Attributes:
        positions: positions of the samples in `RankPlan.rows`.
        lengths: token counts of the samples, or None if the sampler did not determine them.
        padding_tokens: number of padding tokens added to the pack.
    """

    positions: Indexes
    lengths: Indexes | None = None
    padding_tokens: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class RankPlan:
    """One rank's part of a plan.

    Attributes:
        rows: global indexes of the samples, in batch order.
        steps: packs, grouped by optimizer step. If `steps` is empty, the planner creates a single step that consists of
            micro-batches.
        dropped: global indexes of ready rows that the batch permanently excludes, such as overlong rows. Dropped rows
            must not occur in `rows`. The task never receives these rows, and `EndCounts.overlong_count` includes them.
        totals: each step's totals, summed over all ranks. Set by the service.
        summed: names of the custom_meta columns that are summed in `totals`.
    """

    rows: Indexes
    steps: tuple[tuple[Pack, ...], ...] = ()
    dropped: Indexes = field(default_factory=_NO_ROWS.copy)
    totals: tuple[TotalsOfStep, ...] = ()
    summed: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The plan that a sampler returns for one batch, with one part per rank.

    Attributes:
        ranks: each rank's part of the plan.
        consumed: rows that the batch consumes, without duplicates. If None, each row must be delivered exactly once,
            and all delivered rows are consumed. If `consumed` is set, a row may be delivered more than once. Rows that
            are delivered but not consumed stay ready for later batches (sampling with replacement). Rows that are
            consumed but not delivered are discarded.
    """

    ranks: tuple[RankPlan, ...]
    consumed: Indexes | None = None

    @classmethod
    def of(cls, parts: Sequence[Indexes], consumed: Indexes | None = None) -> Plan:
        """Create a plan without steps that assigns the rows `parts[rank]` to each rank."""
        return cls(
            ranks=tuple(RankPlan(rows=np.asarray(part, dtype=np.int64)) for part in parts),
            consumed=None if consumed is None else np.asarray(consumed, dtype=np.int64),
        )


class View(Protocol):
    """The view of a partition that a sampler reads on behalf of one task.

    Rows are identified by global index. A row is ready if all of the following are true:

    - The row is live and has all requested fields.
    - The task has not consumed the row.
    - The row satisfies the request's `where` condition.
    - The row's length is known, or the sampler does not need lengths.

    A sampler may read the view on its own thread while the partition changes. If rows in the resulting plan have been
    cleared in the meantime, the batch is planned again.

    Attributes:
        plan_count: number of plans recorded for the task so far, in all epochs. Use this number as a random seed,
            because everything else in the view may be identical for two batches.
    """

    @property
    def plan_count(self) -> int:
        """Number of plans recorded for the task so far, in all epochs."""
        ...

    def ready(self, limit: int | None = None) -> Indexes:
        """Return up to `limit` ready rows, in index order or in the order specified by the request's `order_by`."""
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
        """Return the groups whose members are all ready, in the order of their first members.

        Args:
            limit: maximum number of units. The first group that would exceed the limit is omitted, along with all later
                groups. None means no limit.
            unit: unit in which `limit` is counted. With "rollout", each rollout counts as a group, and so does each
                sample without a rollout.
            block_size: size at which a group without a declared size is complete. If the partition has no named groups,
                each block of `block_size` consecutive indexes is a group. If `block_size` is None, each sample is a
                group.
            take_incomplete: whether to return the remaining members of a group after other members have failed or been
                cleared. If false, incomplete groups are skipped.
            blocks: "aligned" if blocks must begin at multiples of `block_size`, or "anywhere" otherwise. With
                "anywhere", any `block_size` ready rows with consecutive indexes form a group; the earliest rows are
                grouped first.

        Raises:
            InvalidArgumentError: blocks are aligned, and the number of rows in a put is not a multiple of `block_size`.
        """
        ...

    def left(self, limit: int | None = None) -> Indexes:
        """Return up to `limit` rows that the task can still consume, in index order. The rows need not be ready.

        The rows are live or held, neither consumed nor leased, and not excluded by the `where` condition of the
        request.
        """
        ...

    def lengths(self, rows: Indexes) -> Indexes:
        """Return an `(n,)` array of token counts from the sampler's `length` source, with -1 for an unknown count."""
        ...

    def field_lengths(self, field: str, rows: Indexes) -> Indexes:
        """Return an `(n,)` array with each row's length in a field, or -1 for missing cells, scalars and objects.

        The length of a row is its size in the first dimension that varies between rows, or in dimension 0 if all rows
        have equal shapes.
        """
        ...

    def values(self, column: str, rows: Indexes) -> tuple[NDArray[np.generic], NDArray[np.bool_]]:
        """Return an `(n,)` array of a custom_meta column's values, and a mask of the rows that have a value.

        If the column does not exist, the mask is False for all rows.
        """
        ...

    def group_names(self, rows: Indexes) -> list[str | None]:
        """Return the name of each row's group, or None for a row without a named group."""
        ...

    def rollout_names(self, rows: Indexes) -> list[str | None]:
        """Return the name of each row's rollout, or None for a row without a rollout."""
        ...

    def use_counts(self, rows: Indexes) -> Indexes:
        """Return an `(n,)` array with the number of times each row was delivered without being consumed.

        See `claim(max_uses=)`.
        """
        ...

    def states(self, rows: Indexes) -> list[str]:
        """Return the state of each row, or "cleared" if the row no longer exists."""
        ...

    def rows(self) -> Indexes:
        """Return all rows of the partition that have not been cleared, whether or not they are ready."""
        ...


class MustBeAwaited(BaseException):
    """Raised if a plan must be awaited because its sampler is asynchronous or runs in a thread.

    If a scan would block the event loop for too long, the view raises this exception, which propagates through the
    sampler. The exception is not a subclass of `Exception`, so samplers do not catch it by mistake.
    """


class Sampler(ABC):
    """Base class of samplers. A sampler selects the ready samples of a batch and distributes them over the ranks.

    A sampler's only state is its options, which are the keyword arguments of its constructor. A frozen dataclass works
    well as a sampler. The constructor raises ValueError for invalid options. For equal views and requests, a sampler
    must return equal plans.
    """

    name: ClassVar[str] = ""
    plans_below_min_size: ClassVar[bool] = False
    """Whether `plan` may return fewer than `request.min_size` units even if more units could become ready.

    Samplers that set `plans_below_min_size` are called after each change to the partition. Other samplers are called
    only when enough rows are ready.
    """

    def __init_subclass__(cls, **kwargs: object) -> None:
        """Use the class name as the default for `name`, which appears in messages."""
        super().__init_subclass__(**kwargs)
        if not cls.name:
            cls.name = cls.__name__

    @property
    def length(self) -> LengthSource | None:
        """Source of the sample lengths, or None if the sampler needs no lengths.

        If a source is set, only samples with a known length can be ready.
        """
        return None

    def check(self, request: PlanRequest) -> None:  # noqa: B027  (optional hook)
        """Raise InvalidArgumentError if the sampler's options do not suit the request."""

    def runs_inline(self, request: PlanRequest) -> bool:
        """Return whether `plan` is fast enough to run on the event loop (well under 1 ms) rather than in a thread."""
        return False

    @abstractmethod
    def plan(self, view: View, request: PlanRequest) -> Plan | Awaitable[Plan | None] | None:
        """Return the plan for one batch, or None if fewer than `request.min_size` units are ready."""


# When the published version increases, more samples satisfy the first set of comparisons, and fewer the second.
_GROWING: Final = frozenset({"<", "<="})
_SHRINKING: Final = frozenset({">", ">="})


@dataclass(frozen=True, slots=True)
class Condition:
    """A condition on a custom_meta column. Samples without a value in the column do not satisfy the condition.

    Attributes:
        published: policy whose published version is compared with the column, in place of `values`. The version is read
            each time samples are examined.

    Raises:
        InvalidArgumentError: an argument is missing, the values have different types, or the operator requires a
            different number of values.
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
                f"where: column is {self.column!r} and operator is {self.operator!r}; expected both to be set",
                field="where",
            )
        given = [value for value in self.values if value is not None]
        if len(given) != len(self.values) or (self.operator != "in" and len(given) != 1):
            raise InvalidArgumentError(
                f"where: operator {self.operator!r} on column {self.column!r} got {len(given)} values; expected "
                f"exactly one. Use 'in' to compare with any number of values.",
                field="where",
            )
        if len({isinstance(value, str) for value in given}) > 1:
            raise InvalidArgumentError(
                f"where: column {self.column!r} is compared with both text and numbers. Use one type.", field="where"
            )

    def _check_published(self, published: Published) -> None:
        check_name("policy", published.policy)
        if self.values or not self.column or self.operator not in _GROWING | _SHRINKING:
            raise InvalidArgumentError(
                f"where: got column {self.column!r}, operator {self.operator!r} and {len(self.values)} values for a "
                f"comparison with the published version of policy {published.policy!r}; expected a column, one of the "
                "operators <, <=, > and >=, and no values",
                field="where",
            )

    def resolved(self, policies: Policies) -> Condition:
        """Return the condition with the published version, plus the offset, as its value.

        If the policy has no published version, no value satisfies the returned condition.
        """
        if self.published is None:
            return self
        policy = policies.get(self.published.policy)
        version = math.nan if policy is None else policy.version + self.published.offset
        return Condition(self.column, self.operator, (version,))

    def may_hold_later(self, policies: Policies) -> bool:
        """Return whether a later publication may make the condition true for values that do not satisfy it now."""
        published = self.published
        return published is not None and (self.operator in _GROWING or published.policy not in policies)

    def holds(self, data: NDArray[Any]) -> NDArray[np.bool_]:
        """Return a mask of the values in `data` that satisfy the condition. `data` must not contain missing values."""
        kind = data.dtype.kind
        for value in self.values:
            is_text = isinstance(value, str)
            if is_text != (kind == "O"):
                raise InvalidArgumentError(
                    f"where: column {self.column!r} contains {KIND_NAMES[kind]} values, got {value!r}; compare it with "
                    f"{KIND_NAMES[kind]} values",
                    field="where",
                )
        if kind == "O":
            if self.operator == "in":  # np.isin would compare each string with each value
                return np.fromiter(map(frozenset(self.values).__contains__, data), np.bool_, data.size)
            # Compare strings as objects. A string dtype would pad each string to the length of the longest string.
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
    """Return the nearest number of the given kind at or below `value`, and the nearest at or above it.

    The two numbers are equal if the kind can represent `value` itself. With these two numbers, integers and floats can
    be compared exactly. NumPy alone would convert integers to floats, which cannot represent 2**53 + 1. An integer
    result outside the int64 range becomes infinity, which is compared as a float. If `value` is NaN, both results are
    NaN.
    """
    if kind == "f":
        try:
            nearest = float(value)
        except OverflowError:  # an integer with more than 1,024 bits
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
    """A custom_meta column used to sort ready samples. Samples without a value come last."""

    column: str
    descending: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Refill:
    """The task that regenerates evicted units. In that task's partition, each sample's key is the name of a unit.

    Attributes:
        max_refills: maximum number of times that a sample can be made claimable again in an epoch.

    Raises:
        InvalidArgumentError: a name is invalid, or `max_refills` is less than 1.
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
    """The claim arguments that must be the same on all ranks of a batch.

    The arguments are fixed when the batch is first planned.

    See GetMeta for the attributes that are not listed here.

    Attributes:
        max_uses: number of deliveries after which a sample is consumed.
        unmatched: whether samples that `where` excludes stay claimable or are evicted.
        least_members: minimum number of remaining members in a group. Smaller groups are evicted. 0 means no minimum.
        refill: task that regenerates evicted units, or None if they are not regenerated.
        held: whether to deliver held samples instead of live samples.
        totals: custom_meta columns to sum. Each rank receives the sums as part of the totals.

    Raises:
        InvalidArgumentError: the micro-batch size or `max_uses` is out of range, or `order_by` or `totals` contains an
            empty or repeated column name. This error is also raised if `least_members` or `refill` is set, but
            `unmatched` rules out evictions.
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
    totals: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        check_range("max_uses", self.max_uses, 1, hint=", or 0 for a single use")
        check_range("least_members", self.least_members, 0)
        for name, value in (("least_members", self.least_members), ("refill", self.refill)):
            if value and not self.evicts:
                raise InvalidArgumentError(
                    f"{name} is {shown(value)}, but unmatched is {self.unmatched!r}, so nothing is evicted. Set "
                    f"unmatched to 'fail' or 'clear'",
                    field=name,
                )
        if self.micro_batch_size is not None:
            hint = ": a positive number, or 0 for the whole batch"
            check_range("micro_batch_size", self.micro_batch_size, 0, hint=hint)
        for name, columns in (("order_by", [order.column for order in self.order_by]), ("totals", list(self.totals))):
            if "" in columns:
                raise InvalidArgumentError(
                    f"{name} has an empty column name at position {columns.index('')}; name each column", field=name
                )
            check_unique(name, columns)
        if len(self.totals) > _MOST_SUMS:
            raise InvalidArgumentError(
                f"totals names {len(self.totals)} columns; expected at most {_MOST_SUMS}. Compute other sums from "
                f"the samples.",
                field="totals",
            )

    @property
    def evicts(self) -> bool:
        """Whether claims evict samples that the task can never consume."""
        return self.unmatched != "wait"

    def disagreement(self, other: BatchSpec) -> tuple[str, object, object] | None:
        """Return the name and both values of the first argument that differs, or None if all arguments are equal."""
        return None if self is other else next(differences(self, other), None)


def differences(one: Any, other: Any) -> Iterator[tuple[str, object, object]]:
    """Yield the name and both values of each field that differs between two instances of a dataclass."""
    for name in (each.name for each in fields(one)):
        if getattr(one, name) != getattr(other, name):
            yield name, getattr(one, name), getattr(other, name)


def shown(value: object) -> str:
    """Format a claim argument or a setting for an error message, without language-specific syntax."""
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
            of_groups = ", one per group" if value.scope == "group" else ""
            return f"{value.name}: {value.describe()}{', write-once' if value.write_once else ''}{of_groups}"
        case Admission():
            place = f"{value.given_back} by {value.policy}" if value.given_back == "published" else value.given_back
            bound = "" if value.max_staleness is None else f", at most {value.max_staleness} versions late"
            running = f", at most {value.most_running} running" if value.most_running else ""
            drops = f", dropping the lowest {value.priority_key or 'age'}" if value.overflow == "drop_lowest" else ""
            ratio = ""
            if value.samples_per_insert:
                ratio = (
                    f", {value.samples_per_insert:g} deliveries per insert after {value.min_size_to_sample}, "
                    f"plus or minus {value.error_buffer}"
                )
            return f"{value.task_name}: {value.most} {value.unit}s until {place}{bound}{running}{drops}{ratio}"
        case Release():
            age = None if value.ttl_seconds is None else f"{value.ttl_seconds:g} s old"
            done = None if value.when is None else f"{value.when} by {shown(tuple(value.tasks))}"
            return " or ".join(filter(None, (done, age)))
        case tuple():
            return ", ".join(map(shown, value)) or "none"
    return str(value)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rank:
    """A trainer rank's request for its part of a batch.

    Raises:
        InvalidArgumentError: a number is out of range.
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
        """Create a rank from `dp_rank`, `dp_size` and `batch_index`. Return None if all of them are None.

        Raises:
            InvalidArgumentError: some but not all of the numbers are None, or a number is out of range.
        """
        given = {name: number for name, number in numbers.items() if number is not None}
        missing = [name for name in numbers if name not in given]
        if given and missing:
            raise InvalidArgumentError(
                f"got {' and '.join(given)} without {' and '.join(missing)}; pass all three for a trainer rank, or "
                f"none for a queue worker",
                field=missing[0],
            )
        return cls(**given) if given else None


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseTerms:
    """The terms of a queue worker's lease on samples.

    Attributes:
        seconds: lease duration in seconds. After this time, other workers can claim the samples that have not been
            acknowledged.
        max_deliveries: number of unacknowledged deliveries after which a sample is dead-lettered. None means no limit.
        group_block_size: kind of groups whose samples are acknowledged, released and redelivered together. 0 means
            named groups, `KEPT_ROLLOUTS` means rollouts, and a positive number means blocks of that many consecutive
            indexes. None means that samples are handled individually.
        blocks: whether blocks of consecutive indexes must begin at multiples of their length, or may begin at any
            index.
        on_lost: what happens to slots that are still held when the lease on them expires. Slots without data are
            removed when they are released. The value is None for a claim on existing samples.
        shared_with: partition of the second claim that shares this lease. The two claims that share a lease have the
            same task name and request id. A claim on prompts names the partition of the slots, and a claim on slots
            names the partition of the prompts. The partition name is empty if the lease is not shared.

    Raises:
        InvalidArgumentError: a number is out of range.
    """

    seconds: float
    max_deliveries: int | None = None
    group_block_size: int | None = None
    blocks: Blocks = "aligned"
    on_lost: OnLost | None = None
    shared_with: str = ""

    def __post_init__(self) -> None:
        if not 0 < self.seconds <= MAX_LEASE_SECONDS:  # also rejects NaN
            raise InvalidArgumentError(
                f"lease is {self.seconds}; expected a positive number of seconds, at most {MAX_LEASE_SECONDS:g} (a "
                f"day). Extend the lease if the work takes longer",
                field="lease",
            )
        if self.max_deliveries is not None:
            hint = ": a positive number, or 0 for no limit"
            check_range("max_deliveries", self.max_deliveries, 0, hint=hint)


@dataclass(frozen=True, slots=True, kw_only=True)
class LeasedClaim:
    """The identity of a claim. To change the claim's samples, a caller must still hold a lease on them.

    Raises:
        InvalidArgumentError: the task name or the request id is malformed.
    """

    task_name: str
    request_id: bytes

    def __post_init__(self) -> None:
        check_name("task_name", self.task_name)
        check_id("claim_request_id", self.request_id)


@dataclass(frozen=True, kw_only=True)
class ClaimSpec:
    """The claim arguments that are the same for all ranks and all batches of a task.

    Calls with equal specs share plans.

    Attributes:
        data_fields: fields whose cell locations are returned. `batch_spec.data_fields` contains the names in an order
            that is the same for all ranks.
        min_batch_size: minimum batch size of a queue worker. 0 means `batch_size`.
        dp_size: number of ranks, or None for queue workers.
        admit: slots that a rollout worker receives along with its prompts, or None for a claim without slots.

    Raises:
        InvalidArgumentError: a size is out of range, or a field name is empty or repeated.
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
                f"batch_size is {batch_size} for {rank_count} ranks; expected a positive number, and at most "
                f"{MOST_SAMPLES} samples for all ranks together",
                field="batch_size",
                metadata={"got": str(batch_size * rank_count), "expected": f"1 to {MOST_SAMPLES}"},
            )
        if self.dp_size is not None and self.min_batch_size:
            raise InvalidArgumentError(
                "min_batch_size is only for queue workers. Omit it for ranks, whose batches are short only at the end "
                "of the data.",
                field="min_batch_size",
            )
        object.__setattr__(self, "min_batch_size", self.min_batch_size or batch_size)
        check_range("min_batch_size", self.min_batch_size, 1, batch_size, hint=", the batch_size")

    @cached_property
    def plan_request(self) -> PlanRequest:
        """Request for the sampler.

        `min_size` is the full batch size for ranks, or `min_batch_size` for queue workers.
        """
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
    def _hash(self) -> int:  # cached because `where` may contain thousands of values
        return hash((self.batch_spec, self.min_batch_size, self.dp_size, self.admit))

    def __hash__(self) -> int:
        return self._hash


def check_data_fields(names: Sequence[str]) -> None:
    """Raise InvalidArgumentError if `names` is empty or contains an empty or repeated name."""
    if not names:
        raise InvalidArgumentError("data_fields is empty; specify at least one field", field="data_fields")
    if "" in names:
        raise InvalidArgumentError(f"data_fields is {list(names)}; name each field", field="data_fields")
    check_unique("data_fields", names)


@dataclass(frozen=True, slots=True, kw_only=True)
class NotBefore:
    """The policy version that must be published before a batch is planned."""

    policy: str
    version: int

    def __post_init__(self) -> None:
        check_name("policy", self.policy)
        check_range("not_before_version", self.version, 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class ClaimRequest:
    """The arguments of a GetMeta call.

    Attributes:
        rank: rank that makes the request, or None for a queue worker. The rank's `dp_size` equals `spec.dp_size`.
        epoch: epoch that the caller expects, or None to accept any epoch.
        lease: lease terms of a queue worker. None means that the delivery requires no acknowledgement.
        claim_name: name of a queue worker's claim. Later calls with this name return the existing claim. The name is
            empty for an unnamed claim.
        not_before: policy version that must be published before the batch is planned, or None if the batch does not
            wait for a version.
        batch_count: maximum number of batches to return to a rank, starting with `rank.batch_index`.
        make_slots: function that creates the slots in `spec.admit` for a plan's prompts. The slots are created and the
            prompts are claimed atomically. If the function raises an exception, the prompts are not claimed.

    Raises:
        InvalidArgumentError: the request id or a name is invalid, a rank requests a lease or a named claim, or a queue
            worker requests several batches.
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
                    f"batch_count is {self.batch_count}; expected 1 for a queue worker, since each of its claims "
                    "needs its own request_id. Make one call per claim, or request a larger batch_size",
                    field="batch_count",
                )
        if self.rank is None and self.batch_spec.totals:
            raise InvalidArgumentError(
                f"totals is {shown(self.batch_spec.totals)}, but only ranks receive totals. Omit totals; a queue "
                f"worker receives all samples of its batch.",
                field="totals",
            )
        if self.rank is not None and self.lease is not None:
            raise InvalidArgumentError(
                "lease is only for queue workers. Omit it for ranks, whose retries return the same batch even without "
                "a lease.",
                field="lease",
            )
        if self.batch_spec.held and self.lease is None:
            raise InvalidArgumentError(
                "lease is unset, but a claim of held samples needs a lease. Set lease.",
                field="lease",
            )
        if self.spec.admit is not None:
            self._check_admit()
        if self.claim_name:
            check_name("claim_name", self.claim_name)
            if self.rank is not None:
                raise InvalidArgumentError(
                    f"claim_name is {self.claim_name!r}, but claim names are only for queue workers. Omit "
                    f"claim_name for a rank, which identifies its batch by dp_rank and batch_index.",
                    field="claim_name",
                )

    def _check_admit(self) -> None:
        """Raise InvalidArgumentError unless the claim leases live prompts individually, each for a single use."""
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
                    f"with admit, {name} is {got!r}; expected {expected!r}, because slots are created for prompts that "
                    "a rollout worker leases one by one",
                    field=name,
                )

    @property
    def batch_spec(self) -> BatchSpec:
        """Arguments that must be the same in the requests of all ranks for a batch."""
        return self.spec.batch_spec

    @property
    def policy(self) -> str | None:
        """Policy to which `where` or `not_before` refers, or None. The policy in `where` takes precedence."""
        compared = (each.published.policy for each in self.batch_spec.where if each.published is not None)
        return next(compared, None if self.not_before is None else self.not_before.policy)

    @property
    def plan_request(self) -> PlanRequest:
        """Request for one plan, as passed to the sampler."""
        return self.spec.plan_request

    @property
    def batch_index(self) -> int:
        """Index of the first batch that the rank requests, or -1 for a queue worker."""
        return -1 if self.rank is None else self.rank.batch_index

    def following(self) -> Iterator[ClaimRequest]:
        """Yield a single-batch request for each requested batch after the first."""
        if self.rank is not None:
            for index in range(self.rank.batch_index + 1, self.rank.batch_index + self.batch_count):
                yield replace(self, rank=replace(self.rank, batch_index=index), batch_count=1)
