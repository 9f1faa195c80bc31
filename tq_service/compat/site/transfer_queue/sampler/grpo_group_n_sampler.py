"""TransferQueue's module of this name."""

from transfer_queue.sampler import GRPOGroupNSampler

__all__ = ["GRPOGroupNSampler"]
