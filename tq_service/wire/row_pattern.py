"""How jagged columns are cut into rows, and the nested tensors made of them."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from tq_service.wire.columns import offsets_of

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

_built = False


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RowPattern:
    """The row lengths of jagged columns; fields with the same lengths share one.

    Attributes:
        offsets: `(n + 1,)`, where rows begin and end; nested tensors of one pattern share this tensor.
        min_length: length of the shortest row, 0 where there are no rows.
        max_length: length of the longest row, 0 where there are no rows. Padding goes by it: of a nested tensor that
            does not know it, torch pads all rows to the size of dimension 0 of its values.
    """

    offsets: torch.Tensor
    min_length: int
    max_length: int

    @classmethod
    def of_offsets(cls, offsets: torch.Tensor) -> RowPattern:
        """Return the pattern of an offsets tensor; one on another device than the CPU is waited for."""
        return cls._of(offsets, np.diff(offsets.detach().cpu().numpy()))

    @classmethod
    def of_lengths(
        cls, lengths: NDArray[np.int64], *, dtype: torch.dtype | None = None, device: torch.device | None = None
    ) -> RowPattern:
        """Return the pattern of rows of these lengths `(n,)`; its offsets are int64 on the CPU by default."""
        import torch  # noqa: PLC0415  (torch is optional and slow to import)

        return cls._of(torch.from_numpy(offsets_of(lengths)).to(device=device, dtype=dtype), lengths)

    @classmethod
    def _of(cls, offsets: torch.Tensor, lengths: NDArray[np.int64]) -> RowPattern:
        if not lengths.size:
            return cls(offsets=offsets, min_length=0, max_length=0)
        return cls(offsets=offsets, min_length=int(lengths.min()), max_length=int(lengths.max()))

    def map_offsets(self, function: Callable[[torch.Tensor], torch.Tensor]) -> RowPattern:
        """Return the same pattern with `function` applied to its offsets."""
        return replace(self, offsets=function(self.offsets))

    def nested(self, values: torch.Tensor, ragged_dim: int) -> torch.Tensor:
        """Return the nested tensor of some rows, which can be padded.

        Args:
            values: the rows one after the other along dimension `ragged_dim - 1`.
            ragged_dim: the ragged dimension of the nested tensor, from 1.
        """
        import torch  # noqa: PLC0415  (torch is optional and slow to import)

        with _without_torch_notice():
            return torch.nested.nested_tensor_from_jagged(
                values, self.offsets, jagged_dim=ragged_dim, min_seqlen=self.min_length, max_seqlen=self.max_length
            )


@contextmanager
def _without_torch_notice() -> Iterator[None]:
    """Drop what torch logs when it makes the first nested tensor of a process: advice to its own developers.

    Torch logs it once, so that nothing is done for later nested tensors. Other messages pass. Threads that build their
    first ones at the same time have a filter each, and no lock, which a fork could leave locked.
    """
    global _built  # noqa: PLW0603  (torch logs once in a process)
    if _built:
        yield
        return

    def is_worth_showing(record: logging.LogRecord) -> bool:
        return not str(record.msg).startswith("is_fx_tracing will return true")

    logger = logging.getLogger("torch.fx._symbolic_trace")
    logger.addFilter(is_worth_showing)
    try:
        yield
    finally:
        logger.removeFilter(is_worth_showing)
    _built = True
