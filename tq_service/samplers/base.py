"""The base class of samplers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Awaitable
from typing import ClassVar

from tq_service.domain.plan import Groups, Indexes, LengthSource, Pack, Plan, PlanRequest, RankPlan, View

__all__ = ["Groups", "Indexes", "LengthSource", "Pack", "Plan", "PlanRequest", "RankPlan", "Sampler", "View"]


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
