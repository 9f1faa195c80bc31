"""Replacement for TransferQueue's module with this name."""

from transfer_queue.sampler import BaseSampler

__all__ = ["BaseSampler"]
