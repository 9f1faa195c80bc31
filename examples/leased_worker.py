"""A reward worker leases its samples; when it crashes, its successor gets what it held.

A sample that a worker leased and did not acknowledge in time goes to another one, with a count of its deliveries. One
that was delivered `max_deliveries` times is dead-lettered: a sample that crashes every worker stops no one for good.

Start a service with `tq-service serve`, then run `python examples/leased_worker.py`; another address goes into
TQ_ADDRESS.
"""

from __future__ import annotations

import torch

import tq_service as tq

PARTITION = "lease_example"
POISON = "9 + "  # the answer on which every worker crashes
LEASE_SECONDS = 3.0  # longer than a batch takes


def main() -> None:
    """Put answers, and start the worker again whenever it crashes, as a scheduler does."""
    answers = [f"{a} + {a} = {2 * a}" for a in range(9)] + [POISON]
    with tq.Client() as client:
        client.put({"answer": answers}, partition_id=PARTITION)
        client.seal_partition(PARTITION)

        while True:
            try:
                reward_worker()  # with a client of its own, as in another process
                break
            except ValueError as error:
                print(f"a worker crashed: {error}")

        (task,) = client.describe_partition(PARTITION).tasks
        print(f"scored {task.consumed_count} of {len(answers)}; dead-lettered: {list(task.dead_lettered_indexes)}")
        client.clear_partition(PARTITION)


def reward_worker() -> None:
    """Score samples until the end; put each reward, and acknowledge its sample."""
    with tq.Client() as client:
        while True:
            meta = client.get_meta(
                partition_id=PARTITION,
                task_name="reward",
                data_fields=["answer"],
                batch_size=4,
                min_batch_size=1,
                lease=LEASE_SECONDS,
                max_deliveries=2,
            )
            if meta.status == "end":
                return
            if meta.status == "not_yet":
                continue
            for position, answer in enumerate(client.get_data(meta)["answer"]):
                sample = meta.select_samples([position])
                reward = torch.tensor([score(answer)])
                try:
                    client.put({"reward": reward}, metadata=sample, ack=True)  # or the whole batch at once
                except tq.LeaseExpiredError as error:  # slower than the lease: another worker has it now
                    print(f"too late: {error}")


def score(answer: str) -> float:
    """Return 1 for the right sum."""
    terms, _, total = answer.partition(" = ")
    left, _, right = terms.partition(" + ")
    return float(int(left) + int(right) == int(total))  # ValueError where there is no number


if __name__ == "__main__":
    main()
