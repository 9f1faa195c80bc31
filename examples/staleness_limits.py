"""A rollout worker that is faster than the trainer waits for it, so that no sample is too stale when it is trained on.

Start a service with `tq-service serve`, then run `python examples/staleness_limits.py`; another address goes into
TQ_ADDRESS.
"""

from __future__ import annotations

import threading

import torch

import tq_service as tq

PARTITION = "staleness"
TASK = "update_actor"
BATCH_SIZE = 4
UPDATES = 6


def roll_out(weights: dict[str, int]) -> None:
    """Put samples without a pause, each batch with the version of the weights that made it."""
    with tq.Client() as client:
        for _ in range(UPDATES):
            version = weights["version"]
            client.put(
                {"response": torch.randint(1000, (BATCH_SIZE, 16))},
                partition_id=PARTITION,
                custom_meta=[{"version": version}] * BATCH_SIZE,
                timeout=20.0,  # waits for the trainer up to so long, then StalenessLimitError says by which bound
            )
        client.seal_partition(PARTITION)


def main() -> None:
    """Train on what a rollout worker makes meanwhile, and print how stale it was."""
    weights = {"version": 0}
    with tq.Client() as client:
        # At most two batches are pending (max_samples), one is in use, and one that is made already waits to be put. So
        # no sample is trained on more than three updates late. max_versions alone would not bound that: it only keeps
        # new samples out while one that is more than two versions older is pending.
        limit = tq.StalenessLimit(task_name=TASK, max_samples=2 * BATCH_SIZE, max_versions=2)
        client.create_partition(PARTITION, staleness_limits=[limit])
        worker = threading.Thread(target=roll_out, args=(weights,))
        worker.start()
        staleness = []
        while True:
            meta = client.get_meta(
                partition_id=PARTITION, task_name=TASK, data_fields=["response"], batch_size=BATCH_SIZE,
                order_by=["version"], max_wait=30.0,
            )  # fmt: skip
            if meta.status == "end":
                break
            client.get_data(meta)  # and here the trainer would compute its loss and make its step
            staleness += [weights["version"] - entry["version"] for entry in meta.custom_meta]
            client.clear_samples(meta)
            weights["version"] += 1
        worker.join()
        client.clear_partition(PARTITION)
    print(f"trained on {len(staleness)} samples, the most stale of them by {max(staleness)} updates")


if __name__ == "__main__":
    main()
