"""How a pack is laid out: its samples, then its padding tokens as short sequences of their own.

Attention costs the square of a sequence's length, so one long padding sequence would cost as much as a long sample.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

PADDING_SEQUENCE_LENGTH = 1024


def padding_sequences(padding_tokens: int, sequence_length: int = PADDING_SEQUENCE_LENGTH) -> list[int]:
    """Return the lengths of the sequences that padding tokens are laid out as; all but the last are of full length."""
    full, rest = divmod(padding_tokens, sequence_length)
    return [sequence_length] * full + [rest] * (rest > 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceLayout:
    """The sequences of a pack, samples first.

    Attributes:
        sample_count: how many of the sequences are samples.
        lengths: `(sequences,)` token counts of the samples and of the padding sequences.
    """

    sample_count: int
    lengths: NDArray[np.int64]

    @classmethod
    def of(cls, samples: NDArray[np.int64], padding_tokens: int, sequence_length: int) -> SequenceLayout:
        """Return the layout of samples of some lengths `(n,)`, and of padding tokens behind them."""
        padding = np.array(padding_sequences(padding_tokens, sequence_length), dtype=np.int64)
        return cls(sample_count=int(samples.size), lengths=np.concatenate([samples, padding]))

    @property
    def samples(self) -> NDArray[np.int64]:
        """Token counts `(n,)` of the samples."""
        return self.lengths[: self.sample_count]

    @property
    def padding_tokens(self) -> int:
        """Tokens of the padding sequences."""
        return int(self.lengths[self.sample_count :].sum())

    @property
    def max_seqlen(self) -> int:
        """Tokens of the longest sequence, padding included."""
        return int(self.lengths.max(initial=0))

    def cu_seqlens(self) -> torch.Tensor:
        """Return where sequences start and end, `(sequences + 1,)` int32: the form of variable-length attention."""
        return torch.from_numpy(np.concatenate([np.zeros(1, np.int64), np.cumsum(self.lengths)]).astype(np.int32))

    def position_ids(self) -> torch.Tensor:
        """Return the place of each token in its sequence, `(tokens,)` int64."""
        return torch.from_numpy(_places(self.lengths))

    def padding_position_ids(self) -> torch.Tensor:
        """Return the place of each padding token in its sequence, `(padding_tokens,)` int64."""
        return torch.from_numpy(_places(self.lengths[self.sample_count :]))

    def padding_mask(self) -> torch.Tensor:
        """Return where the padding is, `(tokens,)` bool."""
        total = int(self.lengths.sum())
        return torch.arange(total) >= total - self.padding_tokens


def _places(lengths: NDArray[np.int64]) -> NDArray[np.int64]:
    starts = np.cumsum(lengths) - lengths
    return np.arange(int(lengths.sum())) - np.repeat(starts, lengths)


def filled(like: torch.Tensor, shape: list[int], value: bool | int | float, name: object) -> torch.Tensor:
    """Return a tensor of the dtype and device of `like` that holds one value everywhere.

    Raises:
        ValueError: the dtype cannot hold the value.
    """
    if not value:
        return like.new_zeros(shape)
    try:
        scalar = torch.tensor(value, dtype=like.dtype)
        exact = scalar.item() == value
    except (OverflowError, RuntimeError, TypeError):
        exact = False
    if not exact and not (like.is_floating_point() and isinstance(value, float)):
        raise ValueError(
            f"field {name!r} is {like.dtype} and cannot hold the padding value {value}; put it with another dtype, or "
            "give it another value in pad_values"
        )
    return scalar.to(like.device).expand(shape)
