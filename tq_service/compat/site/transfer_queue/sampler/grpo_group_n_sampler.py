"""Replacement for TransferQueue's module with this name."""

from transfer_queue.sampler import GRPOGroupNSampler

__all__ = ["GRPOGroupNSampler"]
