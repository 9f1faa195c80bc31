"""Pure numpy functions that balance samples across ranks by length and combine samples into fixed-size packs."""

from tq_service.balancing.packs import Overlong, PackPlan, best_fit_decreasing, plan_packs
from tq_service.balancing.partitions import (
    AttentionCost,
    Cost,
    get_costs,
    get_even_partitions,
    get_free_partitions,
    get_seqlen_balanced_partitions,
    karmarkar_karp,
    refine_partitions,
)

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
