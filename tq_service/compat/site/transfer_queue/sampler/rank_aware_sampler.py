"""TransferQueue's module of this name."""

from transfer_queue.sampler import RankAwareSampler

__all__ = ["RankAwareSampler"]
