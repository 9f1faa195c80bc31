"""Puts samples and reads them with workers, without a guard of its main module: ADDRESS PARTITION CONTEXT [main]."""

import sys
from typing import Any

import torch

import tq_service as tq
from tq_service.data import StreamingDataLoader, StreamingDataset, fetch_batch


def fetch_by_main(**keywords: Any) -> Any:
    """Fetch as always; a function of the main module needs that module in the workers."""
    return fetch_batch(**keywords)


address, partition, context = sys.argv[1:4]
with tq.Client(address) as client:
    client.put(partition, {"index": torch.arange(8)})
dataset = StreamingDataset(
    address, batch_size=4, data_fields=["index"], partition_id=partition, task_name="update_actor",
    fetch_batch_fn=fetch_by_main if "main" in sys.argv else None,
)  # fmt: skip
with StreamingDataLoader(dataset, 2, multiprocessing_context=context) as loader:
    iterator = iter(loader)
    print([meta.size for _, meta in (next(iterator), next(iterator))])
