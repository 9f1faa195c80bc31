"""Splits a batch into packs, each with its place in the steps of the plan."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields

import numpy as np
from numpy.typing import NDArray
from tensordict import TensorDict

from tq_service.client.batch_meta import BatchMeta, Pack
from tq_service.data.columns import FlatBatch
from tq_service.data.micro_batches import part_of, steps_of
from tq_service.data.pack_fields import field_uses, flatten_tokens, sample_lengths
from tq_service.data.pack_options import PackOptions
from tq_service.data.packs import PackedSequences, pack_rows


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PackedMicroBatch(PackedSequences):
    """One forward and backward pass of a batch, and its place in the optimizer steps.

    All ranks of a batch have the same steps and the same number of packs in each, so that collectives of one pass, and
    of one optimizer step, meet.

    Attributes:
        meta: the samples of the pack, for `client.put(new_columns, metadata=pack.meta)`; its size may be 0.
        step: the optimizer step in the batch, from 0.
        step_count: optimizer steps of the batch.
        pack: the pack in the step, from 0.
        pack_count: packs of the step.
        step_token_count: tokens of the samples of this rank in the step, without padding.
    """

    meta: BatchMeta
    step: int
    step_count: int
    pack: int
    pack_count: int
    step_token_count: int

    @property
    def ends_step(self) -> bool:
        """Whether the optimizer step is due once the gradients of this pack are there."""
        return self.pack == self.pack_count - 1


def split_packs(
    data: TensorDict, meta: BatchMeta, options: PackOptions, *, micro_batch_size: int | None = None
) -> Iterator[PackedMicroBatch]:
    """Yield the packs of a batch as tensors, step after step.

    Args:
        data: the batch, `meta.size` rows.
        meta: the samples of `data`. Its packs need not come from the sampler `packed`, as long as their samples fit.
        options: how samples become one sequence.
        micro_batch_size: samples of a pack where the meta has no steps; None: the batch is one pack.

    Raises:
        ValueError: the batch has another number of rows than the meta, or the plan was made for packs of another
            length; otherwise as `pack_sequences`.
    """
    flat = flatten_tokens(data, options)
    if flat.row_count != meta.size:
        raise ValueError(
            f"the batch has {flat.row_count} rows and its meta {meta.size} samples; fetch_batch_fn returns both alike"
        )
    field_uses(flat, options)  # before the lengths: these need the input field
    steps = steps_of(meta, micro_batch_size)
    for step_index, step in enumerate(steps):
        lengths = [_lengths(flat, pack, options) for pack in step.packs]
        step_token_count = sum(int(taken.sum()) for taken in lengths)
        for index, (pack, taken) in enumerate(zip(step.packs, lengths, strict=True)):
            _check_padding(pack, taken, options)
            packed = pack_rows(flat, taken, options, np.asarray(pack.positions, dtype=np.int64))
            yield PackedMicroBatch(
                **{field.name: getattr(packed, field.name) for field in fields(packed)},
                meta=part_of(meta, pack),
                step=step_index,
                step_count=len(steps),
                pack=index,
                pack_count=len(step.packs),
                step_token_count=step_token_count,
            )


def _lengths(flat: FlatBatch, pack: Pack, options: PackOptions) -> NDArray[np.int64]:
    planned = None if pack.lengths is None else np.asarray(pack.lengths, dtype=np.int64)
    return sample_lengths(flat, np.asarray(pack.positions, dtype=np.int64), planned, options)


def _check_padding(pack: Pack, lengths: NDArray[np.int64], options: PackOptions) -> None:
    tokens = int(lengths.sum())
    expected = options.pack_max_length - tokens
    # 0 is also what samplers say that plan no padding.
    if pack.padding_tokens not in (0, expected):
        raise ValueError(
            f"the plan has a pack of {tokens} tokens and {pack.padding_tokens} of padding; expected {expected}, up to "
            f"pack_max_length = {options.pack_max_length}; give the sampler and PackOptions the same pack_max_length"
        )


class PackBatches:
    """A `process_batch_fn` that makes packs."""

    def __init__(self, options: PackOptions) -> None:
        self._options = options

    def __call__(
        self, data: TensorDict, meta: BatchMeta, micro_batch_size: int | None = None
    ) -> Iterator[PackedMicroBatch]:
        """Yield the packs of a batch."""
        return split_packs(data, meta, self._options, micro_batch_size=micro_batch_size)
