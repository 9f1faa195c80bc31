"""Packs: samples as one sequence of a fixed number of tokens, the options for that, and a batch split into packs.

Padding tokens are laid out as short separate sequences: attention costs the square of a sequence's length, so one
long padding sequence would cost as much as a long sample.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, Final, Literal, Self, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from tensordict import TensorDict

from tq_service.client.batch_meta import BatchMeta, Pack
from tq_service.client.reads import RowPattern
from tq_service.data.columns import (
    FieldKey,
    FlatBatch,
    FlatColumn,
    JaggedColumn,
    Positions,
    build,
    check_positions,
    flatten,
    part_of,
    select_rows,
    steps_of,
)
from tq_service.errors import InvalidArgumentError
from tq_service.wire.columns import offsets_of

PADDING_SEQUENCE_LENGTH: Final = 1024
LABEL_PADDING: Final = -100
"""What loss functions leave out: the default `ignore_index` of torch's cross entropy."""
POSITIONS: Final = "position_ids"
_MADE: Final = ("cu_seqlens", "padding_mask", "max_seqlen", "num_padding")
Lengths = NDArray[np.int64]
Overlong = Literal["error", "truncate"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PackOptions:
    """How the samples of a pack become one sequence.

    Fields with a value for each token are concatenated, others are kept, one row a sample. These are per token:
    `input_field`, `token_fields` and `position_ids`; any other jagged field; and, where the input field
    is dense, since samples of one length only were put, any other dense field with one dimension of that size. Others
    are per sample, and so are `repeat_fields` and `keep_fields` in any case. Where that leaves a doubt it is an error,
    which `token_fields` or `keep_fields` settles.

    Attributes:
        pack_max_length: tokens of every pack; the `pack_max_length` of the sampler `packed`.
        input_field: the field whose rows are the tokens of the samples.
        pad_token_id: what `input_field` is padded with.
        label_fields: per-token fields padded with -100, where the data has them.
        token_fields: fields that have a value for each token, also where their rows happen to be alike.
        repeat_fields: dense fields whose value is repeated over the tokens of its sample, such as an advantage.
        keep_fields: fields that have no value for each token, such as prompts, the patches of images or an embedding;
            they stay as they are, one row a sample.
        pad_values: by field, what other per-token and repeated fields are padded with; 0 (False) where not given.
        padding_sequence_length: padding tokens are laid out as sequences of at most so many tokens.
        overlong: what to do with a sample of more than `pack_max_length` tokens: "error", or "truncate" it to its first
            ones, as the sampler's `overlong="truncate"` plans it.

    Raises:
        InvalidArgumentError: an option cannot be right.
    """

    pack_max_length: int
    input_field: str = "input_ids"
    pad_token_id: int = 0
    label_fields: tuple[str, ...] = ("labels",)
    token_fields: tuple[str, ...] = ()
    repeat_fields: tuple[str, ...] = ()
    keep_fields: tuple[str, ...] = ()
    pad_values: Mapping[str, bool | int | float] = field(default_factory=dict)
    padding_sequence_length: int = PADDING_SEQUENCE_LENGTH
    overlong: Overlong = "error"

    def __post_init__(self) -> None:
        for name in ("pack_max_length", "padding_sequence_length"):
            if getattr(self, name) < 1:
                raise _invalid(name, getattr(self, name), "at least 1")
        if self.overlong not in get_args(Overlong):
            raise _invalid("overlong", repr(self.overlong), "'error' or 'truncate'")
        for name in ("label_fields", "token_fields", "repeat_fields", "keep_fields"):
            names: Iterable[str] = getattr(self, name)
            if isinstance(names, str):
                raise _invalid(name, repr(names), "a list of field names")
            object.__setattr__(self, name, tuple(names))
        twice = {self.input_field} & {*self.label_fields, *self.repeat_fields, *self.keep_fields}
        twice |= set(self.repeat_fields) & set(self.keep_fields)
        twice |= {*self.label_fields, *self.token_fields} & {*self.repeat_fields, *self.keep_fields}
        if twice:
            raise _invalid(
                "input_field, label_fields, token_fields, repeat_fields and keep_fields",
                f"{sorted(twice)[0]!r} twice",
                "it once",
            )

    def pad_value(self, name: object) -> bool | int | float:
        """Return what a per-token or repeated field is padded with."""
        if name == self.input_field:
            return self.pad_token_id
        if isinstance(name, str) and name in self.pad_values:
            return self.pad_values[name]
        return LABEL_PADDING if name in self.label_fields else 0


def _invalid(name: str, got: object, expected: str) -> InvalidArgumentError:
    return InvalidArgumentError(f"{name}: got {got}; expected {expected}", field=name)


@dataclass(frozen=True, slots=True)
class FieldUse:
    """What became of a field: concatenated along `token_dim`, repeated over the tokens, or kept per sample."""

    kind: Literal["token", "repeated", "sample"]
    token_dim: int = 0


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
    packing = _Packing(data, options)
    rows = np.arange(packing.row_count) if positions is None else positions
    chosen = np.asarray(rows, dtype=np.int64)
    planned = None if lengths is None else np.asarray(lengths, dtype=np.int64)
    return packing.pack(chosen, packing.lengths(chosen, planned))


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
    packing = _Packing(data, options)
    if packing.row_count != meta.size:
        raise ValueError(
            f"the batch has {packing.row_count} rows and its meta {meta.size} samples; fetch_batch_fn returns both "
            "alike"
        )
    steps = steps_of(meta, micro_batch_size)
    for step_index, step in enumerate(steps):
        positions = [np.asarray(pack.positions, dtype=np.int64) for pack in step.packs]
        planned = [None if pack.lengths is None else np.asarray(pack.lengths, dtype=np.int64) for pack in step.packs]
        lengths = list(map(packing.lengths, positions, planned))
        step_token_count = sum(int(taken.sum()) for taken in lengths)
        for index, pack in enumerate(step.packs):
            _check_padding(pack, lengths[index], options)
            packed = packing.pack(positions[index], lengths[index])
            yield PackedMicroBatch(
                **{field.name: getattr(packed, field.name) for field in fields(packed)},
                meta=part_of(meta, pack),
                step=step_index,
                step_count=len(steps),
                pack=index,
                pack_count=len(step.packs),
                step_token_count=step_token_count,
            )


def _check_padding(pack: Pack, lengths: NDArray[np.int64], options: PackOptions) -> None:
    tokens = int(lengths.sum())
    expected = options.pack_max_length - tokens
    # 0 is also what samplers say that plan no padding.
    if pack.padding_tokens not in (0, expected):
        raise ValueError(
            f"the plan has a pack of {tokens} tokens and {pack.padding_tokens} of padding; expected {expected}, up to "
            f"pack_max_length = {options.pack_max_length}; give the sampler and PackOptions the same pack_max_length"
        )


class _Packing:
    """A batch whose samples are laid out as packs, with what all of its packs share.

    Raises:
        ValueError: a field holds objects, is of the wrong layout, or is missing; it may be per token or per sample, or
            is named as per token and is not.
    """

    def __init__(self, data: TensorDict, options: PackOptions) -> None:
        flat = flatten(data)
        self.row_count = flat.row_count
        self._options = options
        tokens = flat.columns.get(options.input_field)
        self._is_dense = isinstance(tokens, torch.Tensor)
        # Tokens of every sample, None where they differ or there are none.
        self._length: int | None = None
        if isinstance(tokens, torch.Tensor) and tokens.ndim > 1:
            self._length = tokens.shape[1]
        elif isinstance(tokens, JaggedColumn) and self.row_count:
            self._length = _common_length(tokens.pattern)
        made: dict[int, RowPattern] = {}
        self._columns = {key: self._token_column(key, column, made) for key, column in flat.columns.items()}
        self._uses = {key: self._use(key, column) for key, column in self._columns.items()}
        self._check_names()

    def _token_column(self, key: FieldKey, column: FlatColumn, made: dict[int, RowPattern]) -> FlatColumn:
        """Return a column jagged where it has a value for each token, also if all rows are alike.

        Args:
            key: its name.
            column: the column.
            made: the patterns that were made of rows of one size, by this size.
        """
        rows: torch.Tensor | None = None
        if isinstance(column, torch.Tensor):
            rows = column if column.ndim > 1 else None
        elif isinstance(column, JaggedColumn) and column.ragged_dim == 1 and self.row_count:
            length = _common_length(column.pattern)
            rows = None if length is None else column.values.reshape(self.row_count, length, *column.values.shape[1:])
        dim = None if rows is None else self._token_dim(key, tuple(rows.shape[1:]), isinstance(column, JaggedColumn))
        if rows is None or dim is None:
            return column
        size = rows.shape[dim + 1]
        if size not in made:
            made[size] = RowPattern.of_lengths(np.full(self.row_count, size, np.int64))
        return JaggedColumn(rows.movedim(0, dim).flatten(dim, dim + 1), made[size], dim + 1)

    def _token_dim(self, key: FieldKey, row: tuple[int, ...], is_jagged: bool) -> int | None:
        """Return the dimension of the tokens in rows of one shape; None: it is per sample, or jagged as it is.

        Raises:
            ValueError: that cannot be told.
        """
        options, length = self._options, self._length
        dims = [dim for dim, size in enumerate(row) if size == length]
        if is_jagged:
            # torch takes the first dimension of equal rows for the ragged one, whichever differs in other batches.
            if key in (options.input_field, *options.keep_fields) or not dims:
                return None
            return dims[-1] if key == POSITIONS or len(dims) == 1 else None
        if key in options.keep_fields or key in options.repeat_fields:
            return None
        if key == options.input_field:
            return 0
        is_named = key == POSITIONS or key in options.token_fields
        if len(dims) == 1 and (self._is_dense or is_named):
            return dims[0]
        if is_named and length is None and (len(row) == 1 or not self.row_count):
            return len(row) - 1 if key == POSITIONS else 0  # `lengths` compares the sizes, where there are samples
        if is_named and not dims:
            raise ValueError(
                f"field {key!r} has a row of shape {row} in every sample; expected one dimension with a value for "
                f"each of the {'' if length is None else f'{length} '}tokens of {options.input_field!r}; name it in "
                "keep_fields if it has none, or declare it with layout='jagged'"
            )
        if dims:
            raise ValueError(
                f"field {key!r} has a row of shape {row} in every sample, and each sample of the batch has {length} "
                f"tokens, so that it may have a value for each token{', in several dimensions' if dims[1:] else ''}; "
                "name it in keep_fields if it has none, else in token_fields, or declare which dimension has the "
                "tokens, such as FieldSpec(name, layout='jagged', row_shape=(3, -1))"
            )
        return None

    def _use(self, key: FieldKey, column: FlatColumn) -> FieldUse:
        options = self._options
        if isinstance(column, list):
            if column and all(isinstance(row, torch.Tensor) for row in column):
                raise ValueError(
                    f"field {key!r} has rows that differ in several dimensions, or did so in some put; expected one "
                    "ragged dimension: declare it before the first put, such as FieldSpec(name, layout='jagged', "
                    "row_shape=(3, -1))"
                )
            raise ValueError(
                f"field {key!r} holds objects, which no pack can hold; leave it out of data_fields, and fetch it by "
                "the pack's meta where it is needed"
            )
        if isinstance(column, JaggedColumn):
            if key in options.repeat_fields:
                raise ValueError(
                    f"field {key!r} of repeat_fields is jagged; expected a dense one, of one value a sample"
                )
            return FieldUse("sample" if key in options.keep_fields else "token", column.ragged_dim - 1)
        if key in (options.input_field, POSITIONS, *options.token_fields):
            raise ValueError(
                f"field {key!r} has rows of shape {tuple(column.shape[1:])}; expected a value for each token, "
                "in rows of one or more dimensions"
            )
        return FieldUse("repeated" if key in options.repeat_fields else "sample")

    def _check_names(self) -> None:
        options, uses = self._options, self._uses
        for name in (options.input_field, *options.token_fields, *options.repeat_fields, *options.keep_fields):
            if name not in uses:
                raise ValueError(
                    f"the samples have no field {name!r}, only {', '.join(map(repr, uses))}; name it in data_fields"
                )
        for name in _MADE:
            if name in uses:
                raise ValueError(
                    f"the samples have a field {name!r}, which packing makes itself; leave it out of data_fields"
                )
        if POSITIONS in options.keep_fields:
            raise ValueError(
                f"keep_fields has {POSITIONS!r}, which has a value for each token; leave it out of keep_fields"
            )

    def lengths(self, positions: Positions, planned: Lengths | None) -> Lengths:
        """Return the tokens to take of each sample, `(m,)`, after a look at all fields that must have them.

        Args:
            positions: the rows `(m,)` that make the pack.
            planned: the tokens `(m,)` that the plan counted on; None: those that the rows have.

        Raises:
            ValueError: the rows have other lengths than the plan counted on, or than those of the input field.
            IndexError: a position is outside the batch.
        """
        check_positions(self.row_count, positions)
        options = self._options
        row_lengths = {
            key: np.diff(column.pattern.bounds)[positions]
            for key, column in self._columns.items()
            if isinstance(column, JaggedColumn) and key not in options.keep_fields
        }
        lengths = row_lengths[options.input_field]
        for key, got in row_lengths.items():
            if (wrong := np.flatnonzero(got != lengths)).size:
                at = wrong[0]
                raise ValueError(
                    f"field {key!r} has {got[at]} values in sample {at} of the pack; expected {lengths[at]}, as many "
                    f"as {options.input_field!r}; name it in keep_fields if it has no value for each token, or declare "
                    "its row_shape if another dimension has the tokens"
                )
        expected = np.minimum(lengths, options.pack_max_length) if options.overlong == "truncate" else lengths
        if planned is None:
            return expected
        if planned.shape != expected.shape:
            raise ValueError(f"got {planned.size} lengths; expected {expected.size}, one for each sample of the pack")
        if (wrong := np.flatnonzero(planned != expected)).size:
            at = wrong[0]
            raise ValueError(
                f"got length {planned[at]} of sample {at} of the pack; expected {expected[at]}, as "
                f"{options.input_field!r} has {lengths[at]} tokens; plan with the lengths that the rows have, and "
                'where the sampler truncates, pack with overlong="truncate" too'
            )
        return planned

    def pack(self, positions: Positions, lengths: Lengths) -> PackedSequences:
        """Return the pack of some rows `(m,)` and as many tokens of each.

        Raises:
            ValueError: the samples do not fit into the pack, or a field cannot hold its padding.
        """
        options, token_count = self._options, int(lengths.sum())
        padding_tokens = options.pack_max_length - token_count
        if padding_tokens < 0:
            raise ValueError(
                f"got {token_count} tokens in {lengths.size} samples; expected at most pack_max_length = "
                f"{options.pack_max_length}; give fewer samples, or plan with the sampler 'packed' and this "
                "pack_max_length"
            )
        padding = padding_sequences(padding_tokens, options.padding_sequence_length)
        sequences = np.concatenate([lengths, np.array(padding, np.int64)])
        bounds = offsets_of(sequences)
        places = torch.from_numpy(np.arange(options.pack_max_length) - np.repeat(bounds[:-1], sequences))
        kept = {key: column for key, column in self._columns.items() if self._uses[key].kind == "sample"}
        rows = build(select_rows(FlatBatch(self.row_count, kept), positions))
        tensors: dict[FieldKey, Any] = {key: rows.get(key) for key in kept}
        # By index: repeat_interleave lacks the unsigned dtypes.
        row_of_token = torch.from_numpy(np.repeat(positions, lengths))
        for key, column in self._columns.items():
            if isinstance(column, JaggedColumn) and key not in kept:
                tensors[key] = self._concatenated(key, column, positions, lengths, places[token_count:])
            elif isinstance(column, torch.Tensor) and key not in kept:
                values = column[row_of_token.to(column.device)]
                shape = [padding_tokens, *column.shape[1:]]
                tensors[key] = torch.cat([values, _filled(values, shape, options.pad_value(key), key)])
        made = {
            POSITIONS: places,
            "cu_seqlens": torch.from_numpy(bounds.astype(np.int32)),
            "padding_mask": torch.arange(options.pack_max_length) >= token_count,
        }
        device = tensors[options.input_field].device
        tensors |= {name: tensor.to(device) for name, tensor in made.items() if name not in tensors}
        return PackedSequences(
            tensors=TensorDict(tensors, batch_size=[]),
            lengths=tuple(lengths.tolist()),
            max_seqlen=int(sequences.max(initial=0)),
            num_padding=padding_tokens,
            uses=self._uses,
        )

    def _concatenated(
        self, key: FieldKey, column: JaggedColumn, positions: Positions, lengths: Lengths, places: torch.Tensor
    ) -> torch.Tensor:
        """Return the tokens of samples and then the padding, of position ids the `places` of the padding tokens."""
        dim, values = column.ragged_dim - 1, column.values
        shape = list(values.shape)
        shape[dim] = places.numel()
        if key == POSITIONS:
            places = places.to(device=values.device, dtype=values.dtype)
            padding = places.view([-1 if at == dim else 1 for at in range(values.ndim)]).expand(shape)
        else:
            padding = _filled(values, shape, self._options.pad_value(key), key)
        starts = column.pattern.bounds[positions]
        samples = map(values.narrow, [dim] * lengths.size, starts.tolist(), lengths.tolist())
        return torch.cat([*samples, padding], dim=dim)


def _common_length(pattern: RowPattern) -> int | None:
    return pattern.max_length if pattern.min_length == pattern.max_length else None


def padding_sequences(padding_tokens: int, sequence_length: int = PADDING_SEQUENCE_LENGTH) -> list[int]:
    """Return the lengths of the sequences that padding tokens are laid out as; all but the last are of full length."""
    full, rest = divmod(padding_tokens, sequence_length)
    return [sequence_length] * full + [rest] * (rest > 0)


def _filled(like: torch.Tensor, shape: list[int], value: bool | int | float, name: object) -> torch.Tensor:
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


def unpack_sequences(packed: PackedSequences) -> TensorDict:
    """Return the samples of a pack as they were before, one row each, without padding.

    Per-token fields are jagged, others as they were, bit for bit; truncated samples have the tokens that were left.
    `position_ids` are returned only where the samples brought them.

    Raises:
        ValueError: a sample without tokens has left no value of a repeated field.
    """
    lengths = np.asarray(packed.lengths, dtype=np.int64)
    starts = offsets_of(lengths)
    if 0 in packed.lengths and any(use.kind == "repeated" for use in packed.uses.values()):
        raise ValueError(
            f"got sample {packed.lengths.index(0)} without tokens, over which nothing is repeated; expected at least "
            "one token in each sample, or no repeat_fields"
        )
    pattern = RowPattern.of_lengths(lengths, beside=packed["cu_seqlens"])
    columns: dict[FieldKey, FlatColumn] = {}
    for key, use in packed.uses.items():
        values = packed.tensors.get(key)
        if use.kind == "token":
            samples = values.narrow(use.token_dim, 0, int(starts[-1])).clone(memory_format=torch.contiguous_format)
            columns[key] = JaggedColumn(samples, pattern, use.token_dim + 1)
        elif use.kind == "repeated":
            columns[key] = values[torch.from_numpy(starts[:-1]).to(values.device)]
        else:
            columns[key] = values
    return build(FlatBatch(packed.sample_count, columns))
