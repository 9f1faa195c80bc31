"""Two trainer ranks get their batches: complete groups, and about equally many tokens per rank."""

import torch

import tq_service as tq
from tq_service.testing import ServiceProcess

tokens = [torch.arange(length) for length in (90, 60, 10, 40, 30, 50, 70, 50)]

with ServiceProcess() as service, tq.Client(service.address) as client:
    client.put("train", {"tokens": tokens}, groups=list("aabbccdd"), group_size=2)
    for rank in range(2):  # usually a process each
        # Job: get the part of one rank. Replicas and retries get the same one.
        data, batch = client.get_batch(
            "train", "update_actor", ["tokens"], batch_size=4, sampler=tq.samplers.SeqlenBalancedSampler(),
            dp_rank=rank, dp_size=2, batch_index=0,
        )  # fmt: skip

        if data is not None:  # else there is no batch yet, or no more
            print(f"rank {rank}: groups {batch.groups}, {len(data['tokens'].values())} tokens")
