"""A reward worker leases its samples; if it crashes, its successor gets them.

A leased sample that is not acknowledged in time is redelivered to another worker, and its deliveries are counted. After
`max_deliveries` deliveries it is dead-lettered, so a sample that crashes every worker cannot block the others forever.

Start a service with `tq-service serve`, then run `python examples/leased_worker.py`. To use another address, set
TQ_ADDRESS.
"""

from __future__ import annotations

import torch

import tq_service as tq

PARTITION = "lease_example"
POISON = "9 + "  # the answer on which every worker crashes
LEASE_SECONDS = 3.0  # after which another worker gets the samples of one that has crashed


def main() -> None:
    """Put answers, and restart the worker whenever it crashes, like a scheduler."""
    answers = [f"{a} + {a} = {2 * a}" for a in range(9)] + [POISON]
    with tq.Client() as client:
        client.put(PARTITION, {"answer": answers})
        client.seal_partition(PARTITION)

        while True:
            try:
                reward_worker()  # with a separate client, as in another process
                break
            except ValueError as error:
                print(f"a worker crashed: {error}")

        (task,) = client.describe_partition(PARTITION).tasks
        print(f"scored {task.consumed_count} of {len(answers)}; dead-lettered: {list(task.dead_lettered_indexes)}")
        client.clear_partition(PARTITION)


def reward_worker() -> None:
    """Score samples until the end. `put` also acknowledges the sample, and fails if the lease has expired."""
    with tq.Client() as client:
        # One sample per item, so a sample that crashes the worker does not affect others.
        work = client.work(PARTITION, "reward", ["answer"], batch_size=1, lease=LEASE_SECONDS, max_deliveries=2)
        for item in work:
            item.put({"reward": torch.tensor([score(answer) for answer in item.data["answer"]])})


def score(answer: str) -> float:
    """Return 1 for the right sum."""
    terms, _, total = answer.partition(" = ")
    left, _, right = terms.partition(" + ")
    return float(int(left) + int(right) == int(total))  # ValueError if a number is missing


if __name__ == "__main__":
    main()
