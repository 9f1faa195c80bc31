"""A trainer with two DP ranks and packed samples: sequences of 256 tokens, each made of several samples.

Start a service with `tq-service serve`, then run `python examples/train_with_packs.py`; `--address` selects another
service. A model with one attention layer learns to recall the first token of its sample at any position in a pack. The
model can learn this only if samples do not see each other.
"""

from __future__ import annotations

import argparse
import random
import uuid

import torch
from torch import nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention

import tq_service as tq
from tq_service.data import PackedMicroBatch, PackOptions, StreamingDataLoader, StreamingDataset

VOCABULARY_SIZE = 16
PACK_MAX_LENGTH = 256
DP_SIZE = 2
SAMPLES_PER_BATCH = 128  # for each rank
STEPS_PER_BATCH = 2
PARTITION = f"train_with_packs_{uuid.uuid4().hex[:8]}"


def produce(client: tq.Client, batches: int) -> None:
    """Put samples of very different lengths, and seal the partition."""
    choose, generator = random.Random(0), torch.Generator().manual_seed(0)
    for _ in range(batches):
        lengths = [min(int(choose.lognormvariate(2.5, 0.8)) + 2, 120) for _ in range(DP_SIZE * SAMPLES_PER_BATCH)]
        samples = [torch.randint(VOCABULARY_SIZE, (length,), generator=generator) for length in lengths]
        client.put(
            PARTITION,
            {"input_ids": samples, "labels": [sample[:1].repeat(len(sample)) for sample in samples]},
        )
    client.seal_partition(PARTITION)


class RecallModel(nn.Module):
    """Token and position embeddings, one causal attention layer over the samples of a pack, and a head."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY_SIZE, width)
        self.positions = nn.Embedding(PACK_MAX_LENGTH, width)
        self.projections = nn.Linear(width, 3 * width)
        self.head = nn.Linear(width, VOCABULARY_SIZE)

    def forward(self, pack: PackedMicroBatch) -> torch.Tensor:
        """Return the logits `(pack_max_length, vocabulary)`."""
        hidden = self.tokens(pack["input_ids"]) + self.positions(pack["position_ids"])
        query, key, value = self.projections(hidden)[None].chunk(3, dim=-1)
        # On a GPU: flash_attn_varlen_func(query, key, value, cu_seqlens, cu_seqlens, max_seqlen, max_seqlen, ...).
        attended = scaled_dot_product_attention(query, key, value, attn_mask=block_diagonal(pack["cu_seqlens"]))
        return self.head(hidden + attended[0])


def block_diagonal(cu_seqlens: torch.Tensor) -> torch.Tensor:
    """Return the attention mask `(tokens, tokens)`: each token sees itself and earlier tokens of its sequence."""
    sequence_of = torch.repeat_interleave(torch.arange(len(cu_seqlens) - 1), cu_seqlens.diff())
    return (sequence_of[:, None] == sequence_of[None, :]).tril()


def loader_of(address: str | None, dp_rank: int) -> StreamingDataLoader[PackedMicroBatch]:
    """Return the packs of one rank."""
    return StreamingDataLoader(
        StreamingDataset(
            address,
            batch_size=SAMPLES_PER_BATCH,
            data_fields=["input_ids", "labels"],
            partition_id=PARTITION,
            task_name="update_actor",
            dp_rank=dp_rank,
            dp_size=DP_SIZE,
            sampler=tq.samplers.PackedSampler(optimizer_steps=STEPS_PER_BATCH, pack_max_length=PACK_MAX_LENGTH),
            pack=PackOptions(pack_max_length=PACK_MAX_LENGTH),
        )
    )


def train(address: str | None) -> list[float]:
    """Train on the packs of all ranks in step, as processes would; return the loss per token of each step."""
    torch.manual_seed(0)
    model = RecallModel()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    losses, loss_sum, padding, total = [], 0.0, 0, 0
    loaders = [loader_of(address, rank) for rank in range(DP_SIZE)]
    # strict: all ranks have the same number of packs, so with processes every all-reduce would find its peers.
    for packs in zip(*loaders, strict=True):
        step_tokens = sum(pack.step_token_count for pack in packs)
        for pack in packs:
            loss = cross_entropy(model(pack), pack["labels"], ignore_index=-100, reduction="sum")
            (loss / step_tokens).backward()  # gradients of the ranks are summed, as by an all-reduce
            loss_sum += loss.item()
            padding += pack.num_padding
            total += PACK_MAX_LENGTH
        if packs[0].ends_step:
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss_sum / step_tokens)
            loss_sum = 0.0
            if len(losses) % (4 * STEPS_PER_BATCH) == 0:
                print(f"step {len(losses)}: {step_tokens} tokens, loss {losses[-1]:.3f}", flush=True)
    print(f"{total // PACK_MAX_LENGTH} packs, {padding / total:.1%} of their tokens are padding")
    return losses


def main() -> None:
    """Fill a partition, then train on it."""
    parser = argparse.ArgumentParser(description="Train a tiny model on packed samples.")
    parser.add_argument("--address", default=None, help="service address; default: TQ_ADDRESS, then localhost:50051")
    parser.add_argument("--batches", type=int, default=16, help=f"batches, of {STEPS_PER_BATCH} optimizer steps each")
    arguments = parser.parse_args()
    with tq.Client(arguments.address) as client:
        produce(client, arguments.batches)
        losses = train(arguments.address)
        client.clear_partition(PARTITION)
    print(f"{len(losses)} optimizer steps; loss per token went from {losses[0]:.3f} to {losses[-1]:.3f}")


if __name__ == "__main__":
    main()
