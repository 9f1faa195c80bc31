"""How consumers ask for batches: what they ask for alike, and what is of one call."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from functools import cached_property

from tq_service.domain.plan import PlanRequest, Sampler
from tq_service.domain.tables.meta import Condition, Order
from tq_service.schema import BatchUnit


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchSpec:
    """What the first plan of a batch_index fixes for all ranks."""

    batch_size: int
    batch_unit: BatchUnit
    micro_batch_size: int | None
    sampler: str
    sampler_config: str
    where: tuple[Condition, ...]
    order_by: tuple[Order, ...]
    data_fields: tuple[str, ...]
    drop_last: bool
    finite: bool

    def disagreement(self, other: BatchSpec) -> tuple[str, object, object] | None:
        """Return the first argument that differs, with both values."""
        if self is other or self == other:
            return None
        names = (each.name for each in fields(self))
        return next((n, getattr(self, n), getattr(other, n)) for n in names if getattr(self, n) != getattr(other, n))


@dataclass(frozen=True, slots=True, kw_only=True)
class Rank:
    """Which part of which batch a trainer rank asks for."""

    dp_rank: int
    dp_size: int
    batch_index: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseTerms:
    """How samples are leased to a queue worker.

    Attributes:
        seconds: what is not acknowledged within so many seconds can be claimed by others.
        max_deliveries: a sample delivered so often without being acknowledged is dead-lettered; None: no bound.
        group_block_size: where the claim is of whole groups, which then are acknowledged, released and redelivered
            whole: 0 for named groups, else the length of the blocks of consecutive indexes that stand in for
            them; None: samples come and go one by one.
    """

    seconds: float
    max_deliveries: int | None = None
    group_block_size: int | None = None


@dataclass(frozen=True, kw_only=True)
class ClaimSpec:
    """What all ranks of a task ask for alike, batch after batch. Calls with equal specs are served by the same plans.

    Attributes:
        data_fields: what the answer locates; `batch_spec.data_fields` has the same names in one order for all ranks.
        min_batch_size: the least a queue worker takes.
        dp_size: number of ranks, None for queue workers.
    """

    batch_spec: BatchSpec
    data_fields: tuple[str, ...] = field(compare=False)
    min_batch_size: int
    dp_size: int | None = None

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


@dataclass(frozen=True, slots=True, kw_only=True)
class ClaimRequest:
    """A GetMeta call, validated.

    Attributes:
        rank: the rank that asks, None for a queue worker; of the `dp_size` of `asked`.
        epoch: the epoch the caller means, None for whichever.
        lease: how a queue worker leases its samples, None where they are done once they are delivered.
    """

    request_id: bytes
    task_name: str
    spec: ClaimSpec
    sampler: Sampler
    rank: Rank | None = None
    epoch: int | None = None
    lease: LeaseTerms | None = None

    @property
    def batch_spec(self) -> BatchSpec:
        """What the first plan of a batch_index fixes."""
        return self.spec.batch_spec

    @property
    def plan_request(self) -> PlanRequest:
        """What the sampler is asked for."""
        return self.spec.plan_request
