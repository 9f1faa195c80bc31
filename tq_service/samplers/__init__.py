"""Samplers: which ready samples form a batch, and how they are spread over the ranks."""

from tq_service.samplers.chosen import ChosenSampler
from tq_service.samplers.grpo_group_n import GRPOGroupNSampler
from tq_service.samplers.list_view import ListView
from tq_service.samplers.options import SamplerInfo
from tq_service.samplers.packed import PackedSampler
from tq_service.samplers.plan_runner import PlanRunner
from tq_service.samplers.rank_aware import RankAwareSampler
from tq_service.samplers.registry import SamplerRegistry
from tq_service.samplers.seqlen_balanced import SeqlenBalancedSampler
from tq_service.samplers.sequential import SequentialSampler
from tq_service.samplers.token_budget import TokenBudgetSampler
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
    "Sampler",
    "SamplerInfo",
    "SamplerRegistry",
    "SeqlenBalancedSampler",
    "SequentialSampler",
    "TokenBudgetSampler",
    "View",
]
