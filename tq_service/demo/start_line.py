"""The start of a replay: requests arrive from the moment on that every trainer rank is ready, not before.

One row for each rank in a partition of its own; every replay worker is a task that waits for all of them.
"""

from __future__ import annotations

import torch

import tq_service as tq
from tq_service.demo.settings import START_PARTITION, TRAINER_RANKS

FIELD = "rank"


def report_ready(client: tq.Client, rank: int) -> None:
    """Say that this rank is ready."""
    client.put({FIELD: torch.tensor([rank])}, partition_id=START_PARTITION, keys=[f"rank_{rank}"])


def wait_for_ranks(client: tq.Client, worker: int) -> None:
    """Wait until all ranks are ready; the demo ends this process if one of them fails before."""
    status = "not_yet"
    while status == "not_yet":
        status = client.get_meta(
            partition_id=START_PARTITION,
            task_name=f"replay_{worker}",
            data_fields=[FIELD],
            batch_size=TRAINER_RANKS,
            min_batch_size=TRAINER_RANKS,
            max_wait=10.0,
        ).status
