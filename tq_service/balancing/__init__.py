"""Balancing and packing of samples by their lengths: pure functions on numpy."""

from tq_service.balancing.bin_packing import best_fit_decreasing
from tq_service.balancing.costs import AttentionCost, Cost, get_costs
from tq_service.balancing.karmarkar_karp import (
    get_even_partitions,
    get_free_partitions,
    get_seqlen_balanced_partitions,
    karmarkar_karp,
)
from tq_service.balancing.pack_plan import PackPlan
from tq_service.balancing.plan_packs import Overlong, plan_packs
from tq_service.balancing.refine import refine_partitions

__all__ = [
    "AttentionCost",
    "Cost",
    "Overlong",
    "PackPlan",
    "best_fit_decreasing",
    "get_costs",
    "get_even_partitions",
    "get_free_partitions",
    "get_seqlen_balanced_partitions",
    "karmarkar_karp",
    "plan_packs",
    "refine_partitions",
]
