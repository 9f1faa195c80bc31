"""Rollouts and training overlap. Samples are at most one version late, and are cleared after training."""

from concurrent.futures import ThreadPoolExecutor

import tq_service as tq
from tq_service.testing import ServiceProcess


def roll_out() -> None:
    """Generate responses until the partition is sealed."""
    # Job of a rollout worker: wait for slots, and fill them.
    while (slots := client.acquire("train", "rollout", count=4, lease=60.0)).status == "batch":
        client.put(slots, {"response": ["an answer"] * slots.size}, ack=True)


with ServiceProcess() as service, tq.Client(service.address) as client, ThreadPoolExecutor() as pool:
    # Job of the trainer: bound the staleness of samples, train them, and publish the new weights.
    client.create_partition("train", max_staleness=1, global_batch=4, clear_after=["actor"])
    client.publish_version(0)

    pool.submit(roll_out)  # usually another process
    # Job of the trainer
    for step in range(10):
        data, _ = client.get_batch("train", "actor", ["response"], batch_size=4, batch_index=step, dp_rank=0, dp_size=1)
        client.publish_version(step + 1, trained={("train", "actor"): step})

    client.seal_partition("train")
    found = client.describe_partition("train")
    late = max(batch.staleness or 0 for task in found.tasks for batch in task.recent_batches)
    print(f"10 batches, samples at most {late} versions late; {found.released_count} samples cleared")
