"""Put samples, claim a batch, fetch it, and clear the partition, with the sync client.

Start a service with `tq-service serve`, then run `python examples/quickstart.py`; another address goes into TQ_ADDRESS.
"""

from __future__ import annotations

import torch

import tq_service as tq

PARTITION = "quickstart"


def main() -> None:
    """Run all steps and print their results."""
    with tq.Client() as client:
        # Two prompts with four responses each. Responses differ in length, so the column is jagged: a list of rows.
        responses = [torch.arange(length) for length in (5, 3, 8, 2, 4, 4, 9, 1)]
        meta = client.put(
            {"input_ids": responses},
            partition_id=PARTITION,
            keys=[f"sample_{i}" for i in range(8)],
            groups=["prompt_a"] * 4 + ["prompt_b"] * 4,
            group_size=4,
        )
        print(f"put samples {meta.global_indexes}")

        # A reward is one more column of the same samples.
        client.put({"reward": torch.linspace(0.0, 1.0, 8)}, metadata=meta)
        client.seal_partition(PARTITION)  # no new samples will come: "not yet" can become "end"

        # Two trainer ranks request their first batch; each gets one complete group, and the same one on a retry.
        for dp_rank in range(2):
            batch_meta = client.get_meta(
                partition_id=PARTITION,
                task_name="update_actor",
                data_fields=["input_ids", "reward"],
                batch_size=4,
                sampler=tq.samplers.SeqlenBalancedSampler(n_samples_per_prompt=4),
                dp_rank=dp_rank,
                dp_size=2,
                batch_index=0,
                max_wait=10.0,
            )
            batch = client.get_data(batch_meta)
            lengths = [len(row) for row in batch["input_ids"].unbind()]
            print(f"rank {dp_rank}: {batch_meta.groups[0]}, lengths {lengths}, rewards {batch['reward'].tolist()}")

        progress = client.check_consumption(partition_id=PARTITION, task_name="update_actor")
        print(f"consumed {progress.consumed_count} of {progress.total_count}, complete: {progress.complete}")
        client.clear_partition(PARTITION)


if __name__ == "__main__":
    main()
