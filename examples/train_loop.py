"""A trainer loop over several steps, while a producer fills the next partitions.

Start a service with `tq-service serve`, then run `python examples/train_loop.py`; `--address` selects another service.
A tiny model learns to count: in each rollout every token is one more than the previous token.
"""

from __future__ import annotations

import argparse
import random
import threading
import uuid

import torch
from torch import nn

import tq_service as tq
from tq_service.data import StreamingDataLoader, StreamingDataset

VOCABULARY_SIZE = 32
SAMPLES_PER_STEP = 64
RUN = uuid.uuid4().hex[:8]  # separates this run from leftovers of aborted ones


def partition_of(step: int) -> str:
    """Return the partition that holds the samples of a step."""
    return f"train_loop_{RUN}@{step}"


def produce(address: str | None, steps: int) -> None:
    """Put the samples of each step in small parts, as rollout workers would, and seal its partition."""
    choose = random.Random(0)
    with tq.Client(address) as client:
        for step in range(steps):
            for _ in range(SAMPLES_PER_STEP // 8):
                rollouts = [count_from(choose.randrange(VOCABULARY_SIZE), choose.randint(2, 12)) for _ in range(8)]
                client.put(
                    partition_of(step),
                    {"input_ids": rollouts},
                    custom_meta=[{"total_lengths": len(rollout)} for rollout in rollouts],
                )
            client.seal_partition(partition_of(step))


def count_from(first: int, length: int) -> torch.Tensor:
    """Return `length` tokens, each one more than the previous."""
    return (first + torch.arange(length)) % VOCABULARY_SIZE


def next_token_loss(model: nn.Module, rollouts: torch.Tensor) -> torch.Tensor:
    """Return the summed loss of predicting each token of jagged rollouts from the previous one."""
    values, offsets = rollouts.values(), rollouts.offsets()
    is_first = torch.zeros(len(values), dtype=torch.bool)
    is_first[offsets[:-1]] = True
    inputs, targets = values[:-1], values[1:]
    losses = nn.functional.cross_entropy(model(inputs), targets, reduction="none")
    return losses[~is_first[1:]].sum()


def train(address: str | None, steps: int, num_workers: int) -> list[float]:
    """Train and return the loss per token of each step."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(VOCABULARY_SIZE, 32), nn.Linear(32, VOCABULARY_SIZE))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    dataset = StreamingDataset(
        address,
        batch_size=32,
        micro_batch_size=8,
        data_fields=["input_ids"],
        partition_id=partition_of(0),
        task_name="update_actor",
        dp_rank=0,
        dp_size=1,
        sampler="seqlen_balanced",
        layout="jagged",  # even if all rollouts of a batch have the same length
    )
    losses = []
    with tq.Client(address) as client, StreamingDataLoader(dataset, num_workers) as loader:
        for step in range(steps):
            if step:
                loader.step(partition_of(step))
            total, tokens = 0.0, 0
            for micro_batch, meta in loader:  # ends when the partition is sealed and all is delivered
                loss = next_token_loss(model, micro_batch["input_ids"])
                (loss / 256).backward()
                total += loss.item()
                tokens += sum(row["total_lengths"] - 1 for row in meta.custom_meta)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(total / tokens)
            print(f"step {step}: {tokens} tokens, loss {losses[-1]:.3f}", flush=True)
            client.clear_partition(partition_of(step))
    return losses


def main() -> None:
    """Run the producer and the trainer against one service."""
    parser = argparse.ArgumentParser(description="Train a tiny model on samples that arrive while it trains.")
    parser.add_argument("--address", default=None, help="service address; default: TQ_ADDRESS, then localhost:50051")
    parser.add_argument("--steps", type=int, default=10, help="optimizer steps, one partition each")
    parser.add_argument("--num-workers", type=int, default=0, help="worker processes for prefetching")
    arguments = parser.parse_args()
    producer = threading.Thread(target=produce, args=(arguments.address, arguments.steps), daemon=True)
    producer.start()
    losses = train(arguments.address, arguments.steps, arguments.num_workers)
    producer.join()
    print(f"loss per token went from {losses[0]:.3f} to {losses[-1]:.3f}")


if __name__ == "__main__":
    main()
