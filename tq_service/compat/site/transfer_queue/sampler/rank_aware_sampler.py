"""TransferQueue's module of the same name."""

from transfer_queue.sampler import RankAwareSampler

__all__ = ["RankAwareSampler"]
