"""Replacement for TransferQueue's module with this name."""

from transfer_queue.sampler import SequentialSampler

__all__ = ["SequentialSampler"]
