"""Lays samples out as one sequence of a fixed number of tokens, and takes such a sequence apart again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from tensordict import TensorDict

from tq_service.data.columns import DenseColumn, FieldKey, FlatBatch, FlatColumn, JaggedColumn, build
from tq_service.data.micro_batches import Positions, select_rows
from tq_service.data.pack_fields import POSITIONS, FieldUse, field_uses, flatten_tokens, sample_lengths
from tq_service.data.pack_options import PackOptions
from tq_service.data.padding import SequenceLayout, filled
from tq_service.wire.decoding import RowPattern


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PackedSequences:
    """Samples as one sequence of `pack_max_length` tokens; `pack["input_ids"]` gives a tensor of it.

    Attributes:
        tensors: a TensorDict without batch dimensions. The input field, labels and other per-token fields
            `(pack_max_length, ...)`, or `(..., pack_max_length)` where the rows differ in their last dimension;
            `position_ids` likewise; `cu_seqlens` `(sequences + 1,)` int32, the samples and then the padding sequences;
            `padding_mask` `(pack_max_length,)` bool, true at padding; fields kept per sample `(n, ...)`.
        lengths: tokens of each sample.
        max_seqlen: tokens of the longest sequence, padding included.
        num_padding: padding tokens, which are the last ones.
        uses: what became of each field of the samples.
    """

    tensors: TensorDict
    lengths: tuple[int, ...]
    max_seqlen: int
    num_padding: int
    uses: Mapping[FieldKey, FieldUse]

    def __getitem__(self, name: FieldKey) -> Any:
        return self.tensors[name]

    @property
    def sample_count(self) -> int:
        """Number of samples; 0 for a pack of padding only."""
        return len(self.lengths)

    @property
    def token_count(self) -> int:
        """Tokens of the samples, without padding."""
        return sum(self.lengths)

    def to(self, device: torch.device | str, *, non_blocking: bool = False) -> Self:
        """Return the pack with its tensors on a device."""
        return replace(self, tensors=self.tensors.to(device, non_blocking=non_blocking))

    def as_dict(self) -> dict[str, Any]:
        """Return the tensors, `max_seqlen` and `num_padding` by name, for `model(**pack.as_dict())`."""
        return {**dict(self.tensors.items()), "max_seqlen": self.max_seqlen, "num_padding": self.num_padding}

    def split_tokens(self, values: torch.Tensor, dim: int = 0) -> list[torch.Tensor]:
        """Return the part of each sample of a tensor with a value for each token, such as log-probs of a model.

        Args:
            values: of size `pack_max_length` in `dim`; the parts share its memory.
            dim: dimension of the tokens.

        Raises:
            ValueError: the tensor has another size.
        """
        expected = self.token_count + self.num_padding
        if values.shape[dim] != expected:
            raise ValueError(
                f"got {values.shape[dim]} values in dimension {dim}; expected {expected}, one for each token"
            )
        return list(torch.split(values, [*self.lengths, self.num_padding], dim=dim))[:-1]


def pack_sequences(
    data: TensorDict,
    lengths: Sequence[int] | None,
    options: PackOptions,
    *,
    positions: Sequence[int] | Positions | None = None,
) -> PackedSequences:
    """Lay samples out as one sequence of exactly `options.pack_max_length` tokens.

    Field by field, bit for bit: fields with a value for each token (see `PackOptions`) are concatenated, sample after
    sample, and padded; others are kept per sample or repeated. `position_ids` restart at each sample and each padding
    sequence; where the data has a field of that name, such as the three rows of vision-language models, it is
    concatenated instead. Rows `(3, length)` become `(3, pack_max_length)`, rows `(length, 3)` become
    `(pack_max_length, 3)`: the ragged dimension tells, or the one of the size of the samples where all are of one size.
    All tensors are copies.

    Args:
        data: a batch as `get_data` and the loader give it.
        lengths: the tokens of each sample that the plan counted on; None: those that the rows have.
        options: what becomes of which field.
        positions: the rows of `data` that make the pack, in order; None: all of them. None at all make a pack of
            padding only, typed like the others.

    Raises:
        ValueError: the samples do not fit into the pack, `lengths` are not those of the rows, a field has other row
            lengths than the input field, or may have a value for each token or not, a named field is missing or of the
            wrong layout, or holds objects.
        IndexError: a position is outside the batch.
    """
    return pack_rows(
        flatten_tokens(data, options),
        None if lengths is None else np.asarray(lengths, dtype=np.int64),
        options,
        _rows(data, positions),
    )


def pack_rows(
    flat: FlatBatch, lengths: NDArray[np.int64] | None, options: PackOptions, positions: Positions
) -> PackedSequences:
    """Do what `pack_sequences` does, for a batch of `flatten_tokens`, which is made once for all of its packs."""
    uses = field_uses(flat, options)
    taken = sample_lengths(flat, positions, lengths, options)
    padding_tokens = options.pack_max_length - int(taken.sum())
    if padding_tokens < 0:
        raise ValueError(
            f"got {int(taken.sum())} tokens in {taken.size} samples; expected at most pack_max_length = "
            f"{options.pack_max_length}; give fewer samples, or plan with the sampler 'packed' and this pack_max_length"
        )
    layout = SequenceLayout.of(taken, padding_tokens, options.padding_sequence_length)
    fields: dict[FieldKey, Any] = {}
    for key, use in uses.items():
        column = flat.columns[key]
        if use.kind == "token" and isinstance(column, JaggedColumn):
            starts = _bounds(flat, column)[:-1][positions]
            fields[key] = _concatenated(key, column, starts, layout, options)
        elif use.kind == "repeated" and isinstance(column, DenseColumn):
            fields[key] = _repeated(key, column.values[torch.from_numpy(positions)], layout, options)
    fields |= _kept(flat, uses, positions)
    made = {
        POSITIONS: layout.position_ids(),
        "cu_seqlens": layout.cu_seqlens(),
        "padding_mask": layout.padding_mask(),
    }
    device = fields[options.input_field].device
    fields |= {name: tensor.to(device) for name, tensor in made.items() if name not in fields}
    return PackedSequences(
        tensors=TensorDict(fields, batch_size=[]),
        lengths=tuple(taken.tolist()),
        max_seqlen=layout.max_seqlen,
        num_padding=padding_tokens,
        uses=uses,
    )


def unpack_sequences(packed: PackedSequences) -> TensorDict:
    """Return the samples of a pack as they were before, one row each, without padding.

    Per-token fields are jagged, others as they were, bit for bit; truncated samples have the tokens that were left.
    `position_ids` are returned only where the samples brought them.

    Raises:
        ValueError: a sample without tokens has left no value of a repeated field.
    """
    starts = np.concatenate([np.zeros(1, np.int64), np.cumsum(packed.lengths, dtype=np.int64)])
    if 0 in packed.lengths and any(use.kind == "repeated" for use in packed.uses.values()):
        raise ValueError(
            f"got sample {packed.lengths.index(0)} without tokens, over which nothing is repeated; expected at least "
            "one token in each sample, or no repeat_fields"
        )
    columns: dict[FieldKey, FlatColumn] = {}
    kept: dict[FieldKey, Any] = {}
    for key, use in packed.uses.items():
        values = packed.tensors.get(key)
        if use.kind == "token":
            samples = values.narrow(use.token_dim, 0, int(starts[-1])).clone(memory_format=torch.contiguous_format)
            columns[key] = JaggedColumn(values=samples, pattern=0, ragged_dim=use.token_dim + 1)
        elif use.kind == "repeated":
            columns[key] = DenseColumn(values=values[torch.from_numpy(starts[:-1]).to(values.device)])
        else:
            kept[key] = values
    lengths = np.asarray(packed.lengths, dtype=np.int64)
    pattern = RowPattern.of_lengths(lengths, device=packed["cu_seqlens"].device)
    rows = build(FlatBatch(row_count=packed.sample_count, columns=columns, patterns=(pattern,)))
    for key, values in kept.items():
        rows.set(key, values)
    return rows


def _rows(data: TensorDict, positions: Sequence[int] | Positions | None) -> Positions:
    if positions is None:
        return np.arange(data.batch_size[0], dtype=np.int64)
    return np.asarray(positions, dtype=np.int64)


def _concatenated(
    key: FieldKey, column: JaggedColumn, starts: NDArray[np.int64], layout: SequenceLayout, options: PackOptions
) -> torch.Tensor:
    dim, values = column.ragged_dim - 1, column.values
    shape = list(values.shape)
    shape[dim] = layout.padding_tokens
    if key == POSITIONS:
        places = layout.padding_position_ids().to(device=values.device, dtype=values.dtype)
        padding = places.view([-1 if at == dim else 1 for at in range(values.ndim)]).expand(shape)
    else:
        padding = filled(values, shape, options.pad_value(key), key)
    samples = [
        values.narrow(dim, start, length)
        for start, length in zip(starts.tolist(), layout.samples.tolist(), strict=True)
    ]
    return torch.cat([*samples, padding], dim=dim)


def _repeated(key: FieldKey, values: torch.Tensor, layout: SequenceLayout, options: PackOptions) -> torch.Tensor:
    # By index: repeat_interleave lacks the unsigned dtypes.
    sample_of_token = torch.from_numpy(np.repeat(np.arange(layout.sample_count), layout.samples)).to(values.device)
    padding = filled(values, [layout.padding_tokens, *values.shape[1:]], options.pad_value(key), key)
    return torch.cat([values[sample_of_token], padding])


def _kept(flat: FlatBatch, uses: Mapping[FieldKey, FieldUse], positions: Positions) -> dict[FieldKey, Any]:
    columns = {key: column for key, column in flat.columns.items() if uses[key].kind == "sample"}
    if not columns:
        return {}
    rows = build(select_rows(replace(flat, columns=columns), positions))
    return {key: rows.get(key) for key in columns}


def _bounds(flat: FlatBatch, column: JaggedColumn) -> NDArray[np.int64]:
    offsets: NDArray[np.int64] = (
        flat.patterns[column.pattern].offsets.detach().cpu().numpy().astype(np.int64, copy=False)
    )
    return offsets
