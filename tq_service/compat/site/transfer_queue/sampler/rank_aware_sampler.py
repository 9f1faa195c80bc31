"""Replacement for TransferQueue's module with this name."""

from transfer_queue.sampler import RankAwareSampler

__all__ = ["RankAwareSampler"]
