"""Jagged columns of every shape, and what padding them must give: made here row by row, without torch's padding."""

from __future__ import annotations

from typing import Any, Final

import torch

LENGTHS: Final = {
    "rows of all lengths": [3, 11, 0, 5, 1, 11, 7],
    "one row": [6],
    "equal rows": [4, 4, 4],
    "rows without elements": [0, 0],
}
PADDING: Final = -7


def columns_of(lengths: list[int], first: int = 0) -> dict[str, Any]:
    """Return nested tensors `(n, L)`, `(n, L, 2)`, `(n, 3, L)` and `(n, 3, L, 2)`, told apart by `first`."""
    return {
        "tokens": nested([made(first + row, (length,)) for row, length in enumerate(lengths)], 0),
        "features": nested([made(first + row, (length, 2)) for row, length in enumerate(lengths)], 0),
        "position_ids": nested([made(first + row, (3, length)) for row, length in enumerate(lengths)], 1),
        "deep": nested([made(first + row, (3, length, 2)) for row, length in enumerate(lengths)], 1),
    }


def made(row: int, shape: tuple[int, ...]) -> torch.Tensor:
    """Return a row whose elements are all different, and different from those of other rows."""
    return torch.arange(torch.Size(shape).numel()).reshape(shape) + 1000 * row


def nested(rows: list[torch.Tensor], ragged_dim: int) -> torch.Tensor:
    """Return rows that differ in `ragged_dim` as a jagged nested tensor, as torch makes it."""
    offsets = torch.tensor([0, *(row.shape[ragged_dim] for row in rows)]).cumsum(0)
    longest = max(row.shape[ragged_dim] for row in rows)
    return torch.nested.nested_tensor_from_jagged(
        torch.cat(rows, dim=ragged_dim), offsets, jagged_dim=ragged_dim + 1, min_seqlen=0, max_seqlen=longest
    )


def padded(rows: list[torch.Tensor]) -> torch.Tensor:
    """Return some rows, each of its own shape, padded to the largest."""
    shape = torch.tensor([row.shape for row in rows]).amax(0).tolist()
    result = torch.full((len(rows), *shape), PADDING, dtype=rows[0].dtype)
    for place, row in zip(result, rows, strict=True):
        place[tuple(slice(size) for size in row.shape)] = row
    return result


def assert_pads_like(got: Any, rows: list[torch.Tensor]) -> None:
    """Assert that a nested tensor is of these rows, and is padded to the longest of them."""
    assert got.layout is torch.jagged
    assert torch.equal(got.to_padded_tensor(PADDING), padded(rows))
