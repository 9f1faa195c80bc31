"""Drop-in replacement for TransferQueue's `sampler.seqlen_balanced_sampler` module."""

from tq_service.balancing import get_seqlen_balanced_partitions, karmarkar_karp
from transfer_queue.sampler import SeqlenBalancedSampler

__all__ = ["SeqlenBalancedSampler", "get_seqlen_balanced_partitions", "karmarkar_karp"]
