"""Drop-in replacement for TransferQueue's `sampler.rank_aware_sampler` module."""

from transfer_queue.sampler import RankAwareSampler

__all__ = ["RankAwareSampler"]
