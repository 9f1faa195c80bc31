"""How consumers ask for batches: what they ask for alike, and what is of one call."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import Final

from tq_service.errors import InvalidArgumentError
from tq_service.schema import MOST_SAMPLES, BatchUnit, Blocks, check_id, check_name, check_range, check_unique
from tq_service.state.meta import Condition, Order
from tq_service.state.plan import PlanRequest, Sampler

MAX_LEASE_SECONDS: Final = 86_400.0
_MOST_RANKS: Final = 65_536


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchSpec:
    """What the first plan of a batch_index fixes for all ranks.

    Attributes, besides those that GetMeta says more about:
        max_uses: how often a sample is delivered before it counts as consumed.

    Raises:
        InvalidArgumentError: the micro-batches have no size, samples are never used, or `order_by` does not name its
            columns each once.
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

    def __post_init__(self) -> None:
        check_range("max_uses", self.max_uses, 1, hint=", or 0 for once")
        if self.micro_batch_size is not None:
            hint = ": a positive number, or 0 for the whole batch"
            check_range("micro_batch_size", self.micro_batch_size, 0, hint=hint)
        columns = [order.column for order in self.order_by]
        if "" in columns:
            raise InvalidArgumentError(
                f"order_by has an empty column, at position {columns.index('')}; name each column", field="order_by"
            )
        check_unique("order_by", columns)

    def disagreement(self, other: BatchSpec) -> tuple[str, object, object] | None:
        """Return the first argument that differs, with both values."""
        if self is other or self == other:
            return None
        names = (each.name for each in fields(self))
        return next((n, getattr(self, n), getattr(other, n)) for n in names if getattr(self, n) != getattr(other, n))


def shown(value: object) -> str:
    """Return an argument of a claim as errors have it, for clients in every language."""
    match value:
        case None:
            return "unset"
        case bool():
            return str(value).lower()
        case Condition():
            return f"{value.column} {value.operator} {shown(value.values)}"
        case Order():
            return f"{value.column} descending" if value.descending else value.column
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
        check_range("dp_size", self.dp_size, 1, _MOST_RANKS)
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

    Raises:
        InvalidArgumentError: a number is out of its range.
    """

    seconds: float
    max_deliveries: int | None = None
    group_block_size: int | None = None
    blocks: Blocks = "aligned"

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

    Raises:
        InvalidArgumentError: a size is out of its range, or fields are not named each once.
    """

    batch_spec: BatchSpec
    data_fields: tuple[str, ...] = field(compare=False)
    min_batch_size: int = 0
    dp_size: int | None = None

    def __post_init__(self) -> None:
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
        return hash((self.batch_spec, self.min_batch_size, self.dp_size))

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
class ClaimRequest:
    """What a GetMeta call asks for.

    Attributes:
        rank: the rank that asks, None for a queue worker; of the `dp_size` of `asked`.
        epoch: the epoch the caller means, None for whichever.
        lease: how a queue worker leases its samples, None where they are done once they are delivered.
        claim_name: of a queue worker's claim, which is the same whenever it is asked for by this name; empty: none.

    Raises:
        InvalidArgumentError: the id or a name is none, or a rank asks for a lease, or for a claim by name.
    """

    request_id: bytes
    task_name: str
    spec: ClaimSpec
    sampler: Sampler
    rank: Rank | None = None
    epoch: int | None = None
    lease: LeaseTerms | None = None
    claim_name: str = ""

    def __post_init__(self) -> None:
        check_name("task_name", self.task_name)
        check_id("request_id", self.request_id)
        if self.rank is not None and self.lease is not None:
            raise InvalidArgumentError(
                "lease is for queue workers; the batches of ranks are not leased, a rank that asks again gets the same",
                field="lease",
            )
        if self.claim_name:
            check_name("claim_name", self.claim_name)
            if self.rank is not None:
                raise InvalidArgumentError(
                    f"claim_name is {self.claim_name!r}, which is for queue workers; a rank names its batch by dp_rank "
                    f"and batch_index",
                    field="claim_name",
                )

    @property
    def batch_spec(self) -> BatchSpec:
        """What the first plan of a batch_index fixes."""
        return self.spec.batch_spec

    @property
    def plan_request(self) -> PlanRequest:
        """What the sampler is asked for."""
        return self.spec.plan_request
