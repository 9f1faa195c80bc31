"""Samplers, which decide which ready samples form a batch and how the batch is divided among the ranks.

To use a sampler, create it with its options and pass it as `sampler=` when claiming. The service runs the sampler's
`plan` method.
"""

from tq_service.samplers.by_length import PackedSampler, SeqlenBalancedSampler, TokenBudgetSampler
from tq_service.samplers.by_order import ChosenSampler, GRPOGroupNSampler, RankAwareSampler, SequentialSampler
from tq_service.samplers.list_view import ListView
from tq_service.samplers.replay import ReplaySampler
from tq_service.samplers.service import PlanRunner, SamplerRegistry
from tq_service.state.plan import (
    Groups,
    Indexes,
    LengthSource,
    Pack,
    Plan,
    PlanRequest,
    RankPlan,
    Sampler,
    View,
)

__all__ = [
    "ChosenSampler",
    "GRPOGroupNSampler",
    "Groups",
    "Indexes",
    "LengthSource",
    "ListView",
    "Pack",
    "PackedSampler",
    "Plan",
    "PlanRequest",
    "PlanRunner",
    "RankAwareSampler",
    "RankPlan",
    "ReplaySampler",
    "Sampler",
    "SamplerRegistry",
    "SeqlenBalancedSampler",
    "SequentialSampler",
    "TokenBudgetSampler",
    "View",
]
