"""Samples with fields of every kind that a pack holds, and what is expected of their packs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict

from tq_service.data import PackedSequences, PackOptions

TOKEN_DIMS = {"input_ids": 0, "labels": 0, "logprobs": 0, "hidden": 0, "rotary": 1}
OPTIONS: dict[str, Any] = {
    "repeat_fields": ("advantage", "flag"),
    "keep_fields": ("patches", "version"),
    "pad_token_id": 7,
    "pad_values": {"advantage": 2.0},
}
PADDING = {"input_ids": 7, "labels": -100, "logprobs": 0, "hidden": 0, "rotary": 0, "advantage": 2.0, "flag": False}


@dataclass(frozen=True)
class Samples:
    """Rows by field, and the batch of them."""

    rows: dict[str, list[torch.Tensor]]
    batch: TensorDict


def random_samples(lengths: list[int], seed: int = 0) -> Samples:
    """Return samples of random bits: NaNs, infinities and all."""
    generator = np.random.default_rng(seed)

    def bits(dtype: torch.dtype, *shape: int) -> torch.Tensor:
        tensor = torch.empty(shape, dtype=dtype)
        if tensor.numel():
            raw = generator.integers(0, 256, tensor.nbytes, np.uint8)
            tensor.view(-1).view(torch.uint8).copy_(torch.from_numpy(raw))
        return tensor

    patch_counts = [int(count) for count in generator.integers(0, 4, len(lengths))]
    rows = {
        "input_ids": [bits(torch.int64, length) for length in lengths],
        "labels": [bits(torch.int64, length) for length in lengths],
        "logprobs": [bits(torch.bfloat16, length) for length in lengths],
        "hidden": [bits(torch.float32, length, 2) for length in lengths],
        "rotary": [bits(torch.int32, 3, length) for length in lengths],
        "advantage": [bits(torch.float32) for _ in lengths],
        "flag": [torch.tensor([length % 2 == 0, True]) for length in lengths],
        "version": [bits(torch.uint16, 2) for _ in lengths],
        "patches": [bits(torch.uint8, count, 3) for count in patch_counts],
    }
    return Samples(rows=rows, batch=batch_of(rows))


def batch_of(rows: dict[str, list[torch.Tensor]]) -> TensorDict:
    """Return the batch, typed like any other also without rows."""
    count = len(rows["input_ids"])
    empty = random_samples([1]).rows if not count else rows
    fields: dict[str, Any] = {}
    for name, column in rows.items():
        if name in TOKEN_DIMS or name == "patches":
            fields[name] = jagged(column, TOKEN_DIMS.get(name, 0), empty[name][0])
        else:
            fields[name] = torch.stack(column) if column else empty[name][0].new_zeros(0, *empty[name][0].shape)
    return TensorDict(fields, batch_size=[count])


def jagged(rows: list[torch.Tensor], dim: int = 0, like: torch.Tensor | None = None) -> torch.Tensor:
    """Return a nested tensor of rows that differ in `dim`; without rows it is typed as `like` is."""
    like = rows[0] if like is None else like
    offsets = torch.tensor([0, *(row.shape[dim] for row in rows)]).cumsum(0)
    values = torch.cat([like.narrow(dim, 0, 0), *rows], dim=dim)
    bound = None if rows else 0
    return torch.nested.nested_tensor_from_jagged(
        values, offsets, jagged_dim=dim + 1, min_seqlen=bound, max_seqlen=bound
    )


def same_bits(got: torch.Tensor, expected: torch.Tensor) -> bool:
    """Whether two tensors are alike in dtype, shape and every bit."""
    if got.dtype is not expected.dtype or got.shape != expected.shape:
        return False
    raw = [tensor.reshape(-1).contiguous() for tensor in (got, expected)]
    return not got.numel() or torch.equal(raw[0].view(torch.uint8), raw[1].view(torch.uint8))


def check_layout(packed: PackedSequences, lengths: list[int], options: PackOptions) -> None:
    """Assert what holds for every pack, whatever its samples."""
    size, total, align = options.pack_max_length, sum(lengths), options.align
    aligned = [-(-length // align) * align for length in lengths]
    longest = -(-options.padding_sequence_length // align) * align
    assert packed.lengths == tuple(lengths)
    assert packed.num_padding == size - total == int(packed["padding_mask"].sum())
    assert packed["padding_mask"].dtype is torch.bool
    is_padding = [place >= length for length, end in zip(lengths, aligned, strict=True) for place in range(end)]
    assert packed["padding_mask"].tolist() == is_padding + [True] * (size - sum(aligned))
    bounds = packed["cu_seqlens"]
    assert bounds.dtype is torch.int32
    assert bounds[0] == 0
    assert bounds[-1] == size
    sequences = bounds.diff().tolist()
    assert min(sequences) >= 0
    assert sequences[: len(lengths)] == aligned
    assert all(0 < length <= longest for length in sequences[len(lengths) :])
    assert not any(length % align for length in sequences)
    assert len(sequences) - len(lengths) == -(-(size - sum(aligned)) // longest)
    assert packed.max_seqlen == max(sequences)
    assert packed["position_ids"].dtype is torch.int64
    assert packed["position_ids"].tolist() == [place for length in sequences for place in range(length)]


def check_fields(packed: PackedSequences, samples: Samples, positions: list[int]) -> None:
    """Assert that every value of the samples is in the pack, bit for bit, and padding where there is none."""
    lengths = list(packed.lengths)
    size = sum(lengths) + packed.num_padding
    for name, dim in TOKEN_DIMS.items():
        assert packed[name].shape[dim] == size
        parts = packed.split_tokens(packed[name], dim)
        for part, position, length in zip(parts, positions, lengths, strict=True):
            assert same_bits(part, samples.rows[name][position].narrow(dim, 0, length))
        assert bool((packed[name].movedim(dim, 0)[packed["padding_mask"]] == PADDING[name]).all())
    for name in ("advantage", "flag"):
        assert packed[name].shape[0] == size
        for part, position in zip(packed.split_tokens(packed[name]), positions, strict=True):
            assert all(same_bits(value, samples.rows[name][position]) for value in part)
        assert bool((packed[name][packed["padding_mask"]] == PADDING[name]).all())
    assert packed["version"].shape == (len(positions), 2)
    assert packed["patches"].layout is torch.jagged
    assert packed["patches"].shape[0] == len(positions)
