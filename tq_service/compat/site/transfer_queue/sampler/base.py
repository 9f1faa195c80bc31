"""TransferQueue's module of the same name."""

from transfer_queue.sampler import BaseSampler

__all__ = ["BaseSampler"]
