"""Bounded staleness: a rollout worker that is faster than the trainer has to wait for it.

Start a service with `tq-service serve`, then run `python examples/admission.py`; another address goes into TQ_ADDRESS.
"""

from __future__ import annotations

import threading

import torch

import tq_service as tq

PARTITION = "admission"
TASK = "update_actor"
POLICY = "admission"
BATCH_SIZE = 4
UPDATES = 6


def roll_out() -> None:
    """Put samples without a pause, each batch with the version of the weights that generated it."""
    with tq.Client() as client:
        for _ in range(UPDATES):
            version = client.get_version(policy=POLICY)
            client.put(
                {"response": torch.randint(1000, (BATCH_SIZE, 16))},
                partition_id=PARTITION,
                custom_meta=[{"version": version}] * BATCH_SIZE,
                timeout=20.0,  # longest wait for the trainer; then AdmissionLimitError names the limit
            )
        client.seal_partition(PARTITION)


def main() -> None:
    """Train on samples that a rollout worker generates concurrently, and print their staleness."""
    with tq.Client() as client:
        client.publish_version(0, policy=POLICY)
        # Two batches may be outstanding until the weights trained on them are published. A third one, already
        # generated, waits in its put. So no sample is trained on more than two updates late.
        admission = tq.Admission(TASK, most=2 * BATCH_SIZE, given_back="published", policy=POLICY)
        client.create_partition(PARTITION, admissions=[admission])
        worker = threading.Thread(target=roll_out)
        worker.start()
        staleness: list[int] = []
        for version in range(UPDATES + 1):
            meta = client.get_meta(
                partition_id=PARTITION, task_name=TASK, data_fields=["response"], batch_size=BATCH_SIZE,
                dp_rank=0, dp_size=1, batch_index=version, max_wait=30.0,
            )  # fmt: skip
            if meta.status == "end":
                break
            client.get_data(meta)  # the trainer would compute its loss and update the weights here
            staleness += [version - entry["version"] for entry in meta.custom_meta]
            client.clear_samples(meta)
            client.publish_version(version + 1, policy=POLICY, trained={(PARTITION, TASK): version})
        worker.join()
        client.clear_partition(PARTITION)
        client.remove_policy(POLICY)
    print(f"trained on {len(staleness)} samples, the most stale of them by {max(staleness)} updates")


if __name__ == "__main__":
    main()
