"""Replacement for TransferQueue's module with this name."""

from tq_service.balancing import get_seqlen_balanced_partitions, karmarkar_karp
from transfer_queue.sampler import SeqlenBalancedSampler

__all__ = ["SeqlenBalancedSampler", "get_seqlen_balanced_partitions", "karmarkar_karp"]
