"""Feeds trainer ranks: `StreamingDataset` and `StreamingDataLoader`, for torch."""

from tq_service.data.dataset import StreamingDataset
from tq_service.data.loader import StreamingDataLoader
from tq_service.data.micro_batches import split_micro_batches, take_rows
from tq_service.data.source import fetch_batch

__all__ = ["StreamingDataLoader", "StreamingDataset", "fetch_batch", "split_micro_batches", "take_rows"]
