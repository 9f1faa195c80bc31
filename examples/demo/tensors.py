"""Conversion of jagged columns to lists of rows, and of rows to padded batches."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence


def rows_of(column: Tensor | Sequence[Tensor]) -> list[Tensor]:
    """Return the rows of a jagged column, whether it is a nested tensor or a list."""
    return list(column.unbind()) if isinstance(column, Tensor) else list(column)


def padded(rows: Sequence[Tensor]) -> Tensor:
    """Return rows `(length,)` as one tensor `(n, longest)`, padded with zeros."""
    return pad_sequence(list(rows), batch_first=True) if rows else torch.zeros(0, 0)
