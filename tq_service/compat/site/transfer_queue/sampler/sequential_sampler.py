"""Drop-in replacement for TransferQueue's `sampler.sequential_sampler` module."""

from transfer_queue.sampler import SequentialSampler

__all__ = ["SequentialSampler"]
