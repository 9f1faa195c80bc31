"""A trainer rank iterates over micro-batches. A thread fetches them ahead."""

import torch

import tq_service as tq
from tq_service.data import StreamingDataLoader, StreamingDataset
from tq_service.testing import ServiceProcess

with ServiceProcess() as service, tq.Client(service.address) as client:
    client.put("train", {"tokens": [torch.arange(length) for length in range(1, 9)]})
    client.seal_partition("train")  # no more samples: the loop ends

    # Job: train on all samples. The rank and the number of ranks are those of torch.distributed.
    dataset = StreamingDataset(
        service.address, partition_id="train", task_name="update_actor", data_fields=["tokens"], batch_size=4
    )
    for micro_batch, meta in StreamingDataLoader(dataset):
        print(f"samples {meta.global_indexes}, {len(micro_batch['tokens'].values())} tokens")
