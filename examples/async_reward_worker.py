"""Two reward workers share the samples of a partition: queue consumers with the async client.

Each takes the next ready samples, so a slow worker takes fewer, and no sample is delivered to both. Putting the
`reward` column wakes a trainer that waits for it.

Start a service with `tq-service serve`, then run `python examples/async_reward_worker.py`; another address goes into
TQ_ADDRESS.
"""

from __future__ import annotations

import asyncio

import torch

import tq_service as tq

PARTITION = "reward_example"
QUESTIONS = [f"{a} + {b}" for a in range(6) for b in range(6)]


async def main() -> None:
    """Put answers, let two workers score them, and print the number of scored samples per worker."""
    async with tq.AsyncClient() as client:
        async with asyncio.TaskGroup() as group:
            workers = [group.create_task(reward_worker(client, f"worker {i}")) for i in range(2)]
            group.create_task(generate(client))
        print(f"scored by each worker: {[worker.result() for worker in workers]}")

        produced = await client.check_production(partition_id=PARTITION, data_fields=["reward"])
        print(f"rewards of {produced.produced_count} of {produced.total_count} samples")
        await client.clear_partition(PARTITION)


async def generate(client: tq.AsyncClient) -> None:
    """Put the answers in pieces, as a rollout worker would; the last one seals the partition."""
    await client.create_partition(PARTITION, expected_samples=len(QUESTIONS))
    for start in range(0, len(QUESTIONS), 9):
        questions = QUESTIONS[start : start + 9]
        answers = [str(len(question)) for question in questions]  # a poor model: it always answers 5
        await client.put({"question": questions, "answer": answers}, partition_id=PARTITION)


async def reward_worker(client: tq.AsyncClient, name: str) -> int:
    """Add the reward column to samples as they arrive, until the end; return how many this worker scored."""
    scored = 0
    # The task is the same for both workers, so they share its samples.
    async for item in client.work(PARTITION, "reward", ["question", "answer"], batch_size=8):
        pairs = zip(item.data["question"], item.data["answer"], strict=True)
        await item.put({"reward": torch.tensor([score(question, answer) for question, answer in pairs])})
        scored += item.meta.size
        print(f"{name} scored {item.meta.size}")
    return scored


def score(question: str, answer: str) -> float:
    """Return 1 for the right sum."""
    left, _, right = question.partition(" + ")
    return float(int(left) + int(right) == int(answer))


if __name__ == "__main__":
    asyncio.run(main())
