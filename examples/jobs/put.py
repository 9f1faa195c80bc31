"""A rollout worker puts its responses: four to each prompt, which trainers get together or not at all."""

import torch

import tq_service as tq
from tq_service.testing import ServiceProcess

prompts = ["2 + 3", "4 + 4"]
responses = [torch.randint(100, (length,)) for length in (5, 3, 8, 2, 4, 4, 9, 1)]

with ServiceProcess() as service, tq.Client(service.address) as client:
    # Job: put responses of different lengths.
    groups = [prompt for prompt in prompts for _ in range(4)]
    meta = client.put("train", {"response": responses}, groups=groups, group_size=4)

    found = client.describe_partition("train")
    print(f"samples {meta.global_indexes} in {found.group_count} groups")
