"""Balancing of samples by their lengths: pure functions on numpy."""

from tq_service.balancing.karmarkar_karp import (
    get_even_partitions,
    get_seqlen_balanced_partitions,
    karmarkar_karp,
)
from tq_service.balancing.refine import refine_partitions

__all__ = ["get_even_partitions", "get_seqlen_balanced_partitions", "karmarkar_karp", "refine_partitions"]
