"""TransferQueue's module of this name."""

from transfer_queue.sampler import SeqlenBalancedSampler

__all__ = ["SeqlenBalancedSampler"]
