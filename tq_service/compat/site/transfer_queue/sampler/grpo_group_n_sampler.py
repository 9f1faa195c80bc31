"""Drop-in replacement for TransferQueue's `sampler.grpo_group_n_sampler` module."""

from transfer_queue.sampler import GRPOGroupNSampler

__all__ = ["GRPOGroupNSampler"]
