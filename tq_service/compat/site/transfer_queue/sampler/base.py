"""Drop-in replacement for TransferQueue's `sampler.base` module."""

from transfer_queue.sampler import BaseSampler

__all__ = ["BaseSampler"]
