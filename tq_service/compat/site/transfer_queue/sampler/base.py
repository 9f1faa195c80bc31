"""TransferQueue's module of this name."""

from transfer_queue.sampler import BaseSampler

__all__ = ["BaseSampler"]
