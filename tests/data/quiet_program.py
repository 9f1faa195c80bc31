"""Puts, gets and loads as a user's first program does; says on stderr only what it logs itself."""

import logging
import sys

import torch

import tq_service as tq
from tq_service.data import StreamingDataLoader, StreamingDataset


def main(address: str, partition: str, num_workers: int) -> None:
    """Put jagged, dense and object columns, get them, and load them as micro-batches."""
    data = {
        "input_ids": [torch.arange(length) for length in (3, 1, 4)],
        "position_ids": [torch.arange(3 * length).reshape(3, length) for length in (3, 1, 4)],
        "reward": torch.ones(3),
        "text": ["a", "b", "c"],
    }
    with tq.Client(address) as client:
        meta = client.put(partition, data)
        client.get_data(meta)
        client.seal_partition(partition)
    dataset = StreamingDataset(
        address, batch_size=3, micro_batch_size=2, data_fields=list(data), partition_id=partition, task_name="quiet"
    )
    with StreamingDataLoader(dataset, num_workers) as loader:
        print([meta.size for _, meta in loader])
    logging.getLogger("torch.fx._symbolic_trace").warning("what the program logs itself")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
