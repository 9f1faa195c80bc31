"""TransferQueue's module of the same name."""

from transfer_queue.sampler import GRPOGroupNSampler

__all__ = ["GRPOGroupNSampler"]
