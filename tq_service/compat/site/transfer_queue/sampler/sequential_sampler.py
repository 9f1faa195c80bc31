"""TransferQueue's module of the same name."""

from transfer_queue.sampler import SequentialSampler

__all__ = ["SequentialSampler"]
