"""TransferQueue's module of this name."""

from transfer_queue.sampler import SequentialSampler

__all__ = ["SequentialSampler"]
