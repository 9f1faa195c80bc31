"""Pack samples into sequences with a fixed number of tokens, and split batches into packs.

    | sample 0 | its padding to a multiple of `align` | sample 1 | ... | padding sequence | padding sequence |

Padding tokens form separate, short sequences. Attention cost is quadratic in the sequence length, so a single long
padding sequence would cost as much as a long sample.

On a context-parallel rank, the pack contains the rank's chunks of every sequence, concatenated in order. A pack has the
same size and the same `cu_seqlens` on all ranks of the context-parallel group.
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
from tq_service.client.slices import RowSlice
from tq_service.data.columns import (
    FieldKey,
    FlatBatch,
    FlatColumn,
    ItemOptions,
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
from tq_service.wire.metadata import expand_runs

PADDING_SEQUENCE_LENGTH: Final = 1024
LABEL_PADDING: Final = -100
"""Label ignored by loss functions, equal to the default `ignore_index` of torch's cross-entropy loss."""
POSITIONS: Final = "position_ids"
_MADE: Final = ("cu_seqlens", "padding_mask", "max_seqlen", "num_padding")
Lengths = NDArray[np.int64]
Overlong = Literal["error", "truncate"]
_WHOLE: Final = RowSlice(chunks=(0,), chunk_count=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class PackOptions(ItemOptions["PackedMicroBatch"]):
    """Options for combining the samples of a pack into one sequence.

    Per-token fields are concatenated, and all other fields have one row per sample. The per-token fields are:

    - `input_field`, `token_fields` and `position_ids`;
    - all other jagged fields;
    - if the input field is dense because all samples have the same length, each dense field in which exactly one
      dimension equals this length.

    Fields in `repeat_fields` and `keep_fields` are never per-token fields. An ambiguous field raises an error unless it
    is listed in `token_fields` or `keep_fields`.

    Attributes:
        pack_max_length: number of tokens per pack, which must equal the `pack_max_length` of the `packed` sampler.
        input_field: field that contains the tokens of each sample.
        pad_token_id: padding value of `input_field`.
        label_fields: per-token fields that are padded with -100. Fields missing from the data are ignored.
        token_fields: fields that have one value per token even if all their rows have the same shape.
        repeat_fields: dense fields whose value is repeated for each token of the sample, such as an advantage.
        keep_fields: fields that do not have one value per token, such as prompts, image patches or embeddings. These
            fields are kept unchanged, with one row per sample.
        pad_values: padding values of other per-token fields and of repeated fields, by field name; 0 (or False) by
            default.
        padding_sequence_length: maximum number of tokens per padding sequence, rounded up to a multiple of `align`.
        align: each sample is padded to a multiple of this number of tokens, so all `cu_seqlens` are multiples of it.
            This number must equal the sampler's `align` and divide `pack_max_length`.
        overlong: how to treat a sample with more than `pack_max_length` tokens. "error" raises an error. "truncate"
            keeps the first tokens, as planned by a sampler with `overlong="truncate"`.

    Raises:
        InvalidArgumentError: an option is invalid.
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
    align: int = 1
    overlong: Overlong = "error"

    def __post_init__(self) -> None:
        for name in ("pack_max_length", "padding_sequence_length", "align"):
            if getattr(self, name) < 1:
                raise _invalid(name, getattr(self, name), "at least 1")
        if self.pack_max_length % self.align:
            raise _invalid("pack_max_length", self.pack_max_length, f"a multiple of align, which is {self.align}")
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
                "each field in only one place",
            )

    def pad_value(self, name: object) -> bool | int | float:
        """Return the padding value of a per-token or repeated field."""
        if name == self.input_field:
            return self.pad_token_id
        if isinstance(name, str) and name in self.pad_values:
            return self.pad_values[name]
        return LABEL_PADDING if name in self.label_fields else 0


def _invalid(name: str, got: object, expected: str) -> InvalidArgumentError:
    return InvalidArgumentError(f"{name}: got {got}; expected {expected}", field=name)


@dataclass(frozen=True, slots=True)
class FieldUse:
    """How a field was packed: concatenated along `token_dim`, repeated for each token, or kept per sample."""

    kind: Literal["token", "repeated", "sample"]
    token_dim: int = 0


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PackedSequences:
    """Samples packed into one sequence of `pack_max_length` tokens. `pack["input_ids"]` returns a tensor by name.

    On a context-parallel rank, the pack contains the rank's shares of all sequences, with `pack_max_length / cp_size`
    tokens in total. Only `cu_seqlens`, `max_seqlen` and `position_ids` refer to the full sequences.

    Attributes:
        tensors: a TensorDict without batch dimensions. Per-token fields, such as the input field, labels and
            `position_ids`, have shape `(pack_max_length, ...)`. If a field's rows differ in their last dimension, its
            shape is `(..., pack_max_length)`. `cu_seqlens` (int32, shape `(sequences + 1,)`) contains the bounds of the
            samples with their alignment padding, followed by the bounds of the padding sequences. `padding_mask` (bool,
            shape `(pack_max_length,)`) is true for padding tokens. Fields kept per sample have shape `(n, ...)`.
        lengths: number of tokens of each sample, without padding.
        starts: position of each sample's first token in the pack.
        max_seqlen: number of tokens in the longest sequence, including padding.
        num_padding: total number of padding tokens, including alignment padding.
        uses: how each field was packed, by field name.
    """

    tensors: TensorDict
    lengths: tuple[int, ...]
    starts: tuple[int, ...]
    max_seqlen: int
    num_padding: int
    uses: Mapping[FieldKey, FieldUse]

    def __getitem__(self, name: FieldKey) -> Any:
        return self.tensors[name]

    @property
    def sample_count(self) -> int:
        """Number of samples in the pack, which is 0 if the pack contains only padding."""
        return len(self.lengths)

    @property
    def token_count(self) -> int:
        """Total number of tokens in the pack's samples, without padding."""
        return sum(self.lengths)

    def to(self, device: torch.device | str, *, non_blocking: bool = False) -> Self:
        """Return a copy of the pack with all tensors on `device`."""
        return replace(self, tensors=self.tensors.to(device, non_blocking=non_blocking))

    def as_dict(self) -> dict[str, Any]:
        """Return the tensors, `max_seqlen` and `num_padding` as a dictionary, for `model(**pack.as_dict())`."""
        return {**dict(self.tensors.items()), "max_seqlen": self.max_seqlen, "num_padding": self.num_padding}

    def split_tokens(self, values: torch.Tensor, dim: int = 0) -> list[torch.Tensor]:
        """Split a tensor with one value per token, such as a model's log-probs, into one tensor per sample.

        Args:
            values: tensor with one value along `dim` for each token of the pack. The returned tensors are views of
                `values`.
            dim: token dimension of `values`.

        Raises:
            ValueError: the size of `values` in `dim` differs from the number of tokens in the pack.
        """
        expected = self.token_count + self.num_padding
        if values.shape[dim] != expected:
            raise ValueError(
                f"got {values.shape[dim]} values in dimension {dim}; expected {expected}, one per token of the pack"
            )
        return list(map(values.narrow, [dim] * self.sample_count, self.starts, self.lengths))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PackedMicroBatch(PackedSequences):
    """A pack for one forward and backward pass, with its position among the batch's optimizer steps.

    All ranks have the same number of steps per batch and the same number of packs per step. As a result, the ranks'
    collectives match in each pass and each optimizer step.

    Attributes:
        meta: metadata of the pack's samples, for `client.put(pack.meta, new_columns)`. If the pack has no samples, the
            size of this meta is 0.
        step: index of the optimizer step within the batch.
        step_count: number of optimizer steps in the batch.
        pack: index of the pack within the step.
        pack_count: number of packs in the step.
        step_token_count: number of tokens in all of this DP rank's samples in the step, excluding padding.
    """

    meta: BatchMeta
    step: int
    step_count: int
    pack: int
    pack_count: int
    step_token_count: int

    @property
    def ends_step(self) -> bool:
        """Whether this is the last pack of the step. Run the optimizer after the backward pass of this pack."""
        return self.pack == self.pack_count - 1


def pack_sequences(
    data: TensorDict,
    lengths: Sequence[int] | None,
    options: PackOptions,
    *,
    positions: Sequence[int] | Positions | None = None,
    share: RowSlice | None = None,
) -> PackedSequences:
    """Pack samples into one sequence of exactly `options.pack_max_length` tokens.

    Per-token fields (see `PackOptions`) are concatenated bit for bit in sample order, and padded. Each of the other
    fields is either repeated for each token or kept with one row per sample. All returned tensors are copies.

    `position_ids` restart at each sample and each padding sequence, and continue through a sample's alignment padding.
    If the data already has a `position_ids` field, such as the three-row positions of vision-language models, that
    field is concatenated instead. Rows of shape `(3, length)` become `(3, pack_max_length)`, and rows of shape
    `(length, 3)` become `(pack_max_length, 3)`. The token dimension is the ragged dimension. If all samples have the
    same length, the token dimension is the dimension of that size.

    Args:
        data: a batch from `get_data` or the loader.
        lengths: planned number of tokens of each sample. Defaults to the row lengths.
        options: packing options.
        positions: positions of the rows to pack, in order. Defaults to all rows. If empty, the pack contains only
            padding, with the same fields and dtypes.
        share: the `RowSlice.share(..., fill=)` with which a context-parallel rank fetched the per-token fields. With a
            share, `options.align` must equal `share.chunk_count * share.align`, and `lengths` must be the lengths of
            the full rows. By default, `data` contains full rows.

    Raises:
        ValueError: the samples do not fit into the pack; `lengths` differ from the row lengths, or are missing although
            shares are given; or a field cannot be packed. A field cannot be packed if it is ambiguous, contains
            objects, or has row lengths that differ from those of the input field. A listed field must also exist and
            have the right layout.
        InvalidArgumentError: `share` and `options` contradict each other.
        IndexError: a position is outside the batch.
    """
    packing = _Packing(data, options, share)
    rows = np.arange(packing.row_count) if positions is None else positions
    chosen = np.asarray(rows, dtype=np.int64)
    planned = None if lengths is None else np.asarray(lengths, dtype=np.int64)
    return packing.pack(chosen, packing.lengths(chosen, planned))


def split_packs(
    data: TensorDict,
    meta: BatchMeta,
    options: PackOptions,
    *,
    share: RowSlice | None = None,
    micro_batch_size: int | None = None,
) -> Iterator[PackedMicroBatch]:
    """Yield the packs of a batch, ordered by optimizer step.

    Args:
        data: the batch, with `meta.size` rows.
        meta: metadata of the samples in `data`. Any sampler may have planned the packs, provided that the samples fit.
        options: packing options.
        share: share of a context-parallel rank; see `pack_sequences`. A share requires a plan that contains the sample
            lengths.
        micro_batch_size: number of samples per pack if the meta has no steps. By default, such a batch is a single
            pack.

    Raises:
        ValueError: the batch and the meta differ in size, the plan is for packs of a different length, or
            `pack_sequences` would raise this error.
        InvalidArgumentError: `share` and `options` contradict each other.
    """
    packing = _Packing(data, options, share)
    if packing.row_count != meta.size:
        raise ValueError(
            f"the batch has {packing.row_count} rows, but its meta has {meta.size} samples; fetch_batch_fn must return "
            "the data and meta of the same samples"
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
                meta=part_of(meta, pack, step_index),
                step=step_index,
                step_count=len(steps),
                pack=index,
                pack_count=len(step.packs),
                step_token_count=step_token_count,
            )


def _check_padding(pack: Pack, lengths: NDArray[np.int64], options: PackOptions) -> None:
    tokens = int(lengths.sum())
    expected = options.pack_max_length - tokens
    # `padding_tokens` is also 0 if the sampler does not plan padding.
    if pack.padding_tokens not in (0, expected):
        raise ValueError(
            f"the plan has a pack of {tokens} tokens and {pack.padding_tokens} padding tokens; expected {expected} "
            f"padding tokens, to fill pack_max_length = {options.pack_max_length}. Set the same pack_max_length in the "
            "sampler and in PackOptions"
        )


class _Packing:
    """Packs the samples of a batch, and holds the state that all packs of the batch share.

    Raises:
        ValueError: a field is missing or ambiguous, contains objects, or has the wrong layout, or a listed per-token
            field does not have one value per token.
        InvalidArgumentError: the share and the options contradict each other.
    """

    def __init__(self, data: TensorDict, options: PackOptions, share: RowSlice | None) -> None:
        flat = flatten(data)
        self.row_count = flat.row_count
        self._options, self._is_shared, self._share = options, share is not None, share or _WHOLE
        if share is not None:
            _check_share(share, options)
        tokens = flat.columns.get(options.input_field)
        self._is_dense = isinstance(tokens, torch.Tensor)
        # Number of tokens per sample. None if the samples differ in length or the batch is empty.
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
        """Convert a per-token column with rows of equal shape to a jagged column, and return other columns unchanged.

        Args:
            key: name of the column.
            column: the column.
            made: cache of patterns for rows of equal length, by row length.
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
        """Return the token dimension of equally shaped rows, or None if values are per sample or need no conversion.

        Raises:
            ValueError: the field is ambiguous.
        """
        options, length = self._options, self._length
        dims = [dim for dim, size in enumerate(row) if size == length]
        if is_jagged:
            # If all rows are equal in shape, torch marks the first dimension as ragged, even if rows of other batches
            # vary in another dimension.
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
            # If there are samples, `lengths` checks their sizes later.
            return len(row) - 1 if key == POSITIONS else 0
        if is_named and not dims:
            raise ValueError(
                f"field {key!r} has rows of shape {row} in every sample; expected a single dimension, with one value "
                f"for each of the {'' if length is None else f'{length} '}tokens of {options.input_field!r}. List the "
                "field in keep_fields if its values are per sample, or declare it with layout='jagged'"
            )
        if dims:
            raise ValueError(
                f"field {key!r} has rows of shape {row} in every sample, and each sample of the batch has {length} "
                f"tokens, so the field may have one value per token{', in several dimensions' if dims[1:] else ''}; "
                "list the field in keep_fields if its values are per sample, or in token_fields if they are per token. "
                "Alternatively, declare the token dimension, for example with FieldSpec(name, layout='jagged', "
                "row_shape=(3, -1))"
            )
        return None

    def _use(self, key: FieldKey, column: FlatColumn) -> FieldUse:
        options = self._options
        if isinstance(column, list):
            if column and all(isinstance(row, torch.Tensor) for row in column):
                raise ValueError(
                    f"field {key!r} has rows that differ in several dimensions, possibly because of an earlier put; "
                    "expected only one ragged dimension. Declare this dimension before the first put, for example with "
                    "FieldSpec(name, layout='jagged', row_shape=(3, -1))"
                )
            raise ValueError(
                f"field {key!r} contains objects, which cannot be packed; omit the field from data_fields, and fetch "
                "it separately with the pack's meta"
            )
        if isinstance(column, JaggedColumn):
            if key in options.repeat_fields:
                raise ValueError(
                    f"field {key!r} in repeat_fields is jagged; expected a dense field with one value per sample"
                )
            return FieldUse("sample" if key in options.keep_fields else "token", column.ragged_dim - 1)
        if key in (options.input_field, POSITIONS, *options.token_fields):
            raise ValueError(
                f"field {key!r} has rows of shape {tuple(column.shape[1:])}; expected at least one dimension, with "
                "one value per token"
            )
        return FieldUse("repeated" if key in options.repeat_fields else "sample")

    def _check_names(self) -> None:
        options, uses = self._options, self._uses
        for name in (options.input_field, *options.token_fields, *options.repeat_fields, *options.keep_fields):
            if name not in uses:
                raise ValueError(
                    f"the samples have no field {name!r}, only {', '.join(map(repr, uses))}; add the field to "
                    "data_fields"
                )
        for name in _MADE:
            if name in uses:
                raise ValueError(
                    f"the samples have a field {name!r}, but packing creates this field; omit it from data_fields"
                )
        if POSITIONS in options.keep_fields:
            raise ValueError(
                f"keep_fields contains {POSITIONS!r}, which has one value per token; omit this field from keep_fields"
            )

    def lengths(self, positions: Positions, planned: Lengths | None) -> Lengths:
        """Check all per-token fields, and return the samples' token counts as an array of shape `(m,)`.

        Args:
            positions: positions of the pack's rows, as an array of shape `(m,)`.
            planned: planned number of tokens in each row, as an array of shape `(m,)`. Defaults to the row lengths.

        Raises:
            ValueError: a field's row lengths differ from the plan or from the input field.
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
                    f"as {options.input_field!r}; list the field in keep_fields if its values are per sample, or "
                    "declare its row_shape if another dimension is the token dimension"
                    + ("; fetch all per-token fields as shares" if self._is_shared else "")
                )
        if self._is_shared:
            return self._whole_lengths(lengths, planned)
        expected = np.minimum(lengths, options.pack_max_length) if options.overlong == "truncate" else lengths
        if planned is None:
            return expected
        if planned.shape != expected.shape:
            raise ValueError(f"got {planned.size} lengths; expected {expected.size}, one per sample of the pack")
        if (wrong := np.flatnonzero(planned != expected)).size:
            at = wrong[0]
            raise ValueError(
                f"got length {planned[at]} for sample {at} of the pack; expected {expected[at]}, since "
                f"{options.input_field!r} has {lengths[at]} tokens; plan with the row lengths (see the sampler's "
                'length_field), and if the sampler truncates, pack with overlong="truncate" too'
            )
        return planned

    def _whole_lengths(self, got: Lengths, planned: Lengths | None) -> Lengths:
        """Check the lengths of the fetched shares, and return those of the full rows. Both arrays have shape `(m,)`."""
        if planned is None:
            raise ValueError(
                "got shares of rows, but no row lengths; expected a plan that contains the row lengths, such as a plan "
                "of the 'packed' sampler"
            )
        share = self._share
        expected = _rounded(planned, self._options.align) // share.chunk_count * len(share.chunks)
        if expected.shape != got.shape or (expected != got).any():
            raise ValueError(
                f"got shares of {got.tolist()[:8]} tokens; expected {expected.tolist()[:8]} tokens in chunks "
                f"{share.chunks} of {share.chunk_count} of rows planned with {planned.tolist()[:8]} tokens. Use the "
                "same share to fetch and pack, and plan with the row lengths"
            )
        return planned

    def pack(self, positions: Positions, lengths: Lengths) -> PackedSequences:
        """Return a pack of the first `lengths` tokens of each row at `positions`. Both arrays have shape `(m,)`.

        Raises:
            ValueError: the samples do not fit into the pack, or a field's dtype cannot represent the padding value.
        """
        options, share = self._options, self._share
        aligned = _rounded(lengths, options.align)
        end = int(aligned.sum())
        if end > options.pack_max_length:
            rounded = f", each rounded up to a multiple of {options.align}" if options.align > 1 else ""
            raise ValueError(
                f"got {end} tokens in {lengths.size} samples{rounded}; expected at most pack_max_length = "
                f"{options.pack_max_length}; pass fewer samples, or plan with the 'packed' sampler and the same "
                "pack_max_length and align"
            )
        longest = -(-options.padding_sequence_length // options.align) * options.align
        padding = padding_sequences(options.pack_max_length - end, longest)
        sequences = np.concatenate([aligned, np.array(padding, np.int64)])
        sizes = sequences // share.chunk_count
        begins = sizes[:, None] * np.array(share.chunks)
        # For each token of this rank, its position in the full sequence and the index of its sample. The sample index
        # of padding tokens is the number of samples.
        places = expand_runs(begins.reshape(-1), np.repeat(sizes, len(share.chunks)))
        parts = sizes * len(share.chunks)
        sample_of = np.repeat(np.minimum(np.arange(sequences.size), lengths.size), parts)
        sample_of[places >= np.append(lengths, 0)[sample_of]] = lengths.size
        # Sample tokens precede padding, also within this rank's share of the sequence.
        taken = np.clip(lengths[:, None] - begins[: lengths.size], 0, sizes[: lengths.size, None]).sum(axis=1)
        bounds = offsets_of(parts[: lengths.size])
        kept = {key: column for key, column in self._columns.items() if self._uses[key].kind == "sample"}
        rows = build(select_rows(FlatBatch(self.row_count, kept), positions))
        tensors: dict[FieldKey, Any] = {key: rows.get(key) for key in kept}
        for key, column in self._columns.items():
            if isinstance(column, JaggedColumn) and key not in kept:
                tensors[key] = self._concatenated(
                    key, column, positions, taken, bounds=bounds, places=torch.from_numpy(places)
                )
            elif isinstance(column, torch.Tensor) and key not in kept:
                padding_row = _filled(column, [1, *column.shape[1:]], options.pad_value(key), key)
                values = torch.cat([column[torch.from_numpy(positions).to(column.device)], padding_row])
                # Index the values, because repeat_interleave does not support unsigned dtypes.
                tensors[key] = values[torch.from_numpy(sample_of).to(column.device)]
        made = {
            POSITIONS: torch.from_numpy(places),
            "cu_seqlens": torch.from_numpy(offsets_of(sequences).astype(np.int32)),
            "padding_mask": torch.from_numpy(sample_of == lengths.size),
        }
        device = tensors[options.input_field].device
        tensors |= {name: tensor.to(device) for name, tensor in made.items() if name not in tensors}
        return PackedSequences(
            tensors=TensorDict(tensors, batch_size=[]),
            lengths=tuple(taken.tolist()),
            starts=tuple(bounds[:-1].tolist()),
            max_seqlen=int(sequences.max(initial=0)),
            num_padding=places.size - int(taken.sum()),
            uses=self._uses,
        )

    def _concatenated(
        self,
        key: FieldKey,
        column: JaggedColumn,
        positions: Positions,
        lengths: Lengths,
        *,
        bounds: Lengths,
        places: torch.Tensor,
    ) -> torch.Tensor:
        """Concatenate the tokens and alignment padding of all samples, and append the padding sequences.

        Args:
            key: name of the column.
            column: the column.
            positions: positions of the rows to concatenate, as an array of shape `(m,)`.
            lengths: number of tokens to take from each row, as an array of shape `(m,)`.
            bounds: array of shape `(m + 1,)` with the start of each sample in the pack, followed by the end of the last
                sample's alignment padding.
            places: position of each token within its sequence, used to pad position ids.
        """
        dim, values = column.ragged_dim - 1, column.values
        shape = list(values.shape)
        shape[dim] = places.numel()
        if key == POSITIONS:
            places = places.to(device=values.device, dtype=values.dtype)
            padding = places.view([-1 if at == dim else 1 for at in range(values.ndim)]).expand(shape)
        else:
            padding = _filled(values, shape, self._options.pad_value(key), key)
        ends = bounds[:-1] + lengths
        pieces = []
        for row_start, length, end, gap in zip(
            column.pattern.bounds[positions].tolist(),
            lengths.tolist(),
            ends.tolist(),
            (bounds[1:] - ends).tolist(),
            strict=True,
        ):
            pieces.append(values.narrow(dim, row_start, length))
            if gap:
                pieces.append(padding.narrow(dim, end, gap))
        last = int(bounds[-1])
        return torch.cat([*pieces, padding.narrow(dim, last, places.numel() - last)], dim=dim)


def _rounded(lengths: Lengths, align: int) -> Lengths:
    return -(-lengths // align) * align


def _check_share(share: RowSlice, options: PackOptions) -> None:
    aligned = share.chunk_count * share.align
    if not aligned or share.fill is None:
        raise _invalid("share", "a slice that lacks chunks or fill", "RowSlice.share(..., fill=)")
    if options.align != aligned:
        expected = f"{aligned}, the chunk count ({share.chunk_count}) times the share's align"
        raise _invalid("align", options.align, expected)
    if options.overlong == "truncate":
        raise _invalid("overlong", "'truncate' with shares of rows", "'error', because shares are cut from full rows")


def _common_length(pattern: RowPattern) -> int | None:
    return pattern.max_length if pattern.min_length == pattern.max_length else None


def padding_sequences(padding_tokens: int, sequence_length: int = PADDING_SEQUENCE_LENGTH) -> list[int]:
    """Return the lengths of the padding sequences. Only the last sequence may be shorter than `sequence_length`."""
    full, rest = divmod(padding_tokens, sequence_length)
    return [sequence_length] * full + [rest] * (rest > 0)


def _filled(like: torch.Tensor, shape: list[int], value: bool | int | float, name: object) -> torch.Tensor:
    """Return a tensor of the given shape filled with `value`, with the dtype and device of `like`.

    All elements share the memory of a single element.

    Raises:
        ValueError: the dtype cannot represent the value.
    """
    if not value:
        return like.new_zeros(()).expand(shape)
    try:
        scalar = torch.tensor(value, dtype=like.dtype)
        exact = scalar.item() == value
    except (OverflowError, RuntimeError, TypeError):
        exact = False
    if not exact and not (like.is_floating_point() and isinstance(value, float)):
        raise ValueError(
            f"field {name!r} has dtype {like.dtype} and cannot hold the padding value {value}; store the field with a "
            "different dtype, or set a different value in pad_values"
        )
    return scalar.to(like.device).expand(shape)


def unpack_sequences(packed: PackedSequences) -> TensorDict:
    """Return the samples of a pack as rows, one per sample, without padding.

    Per-token fields are jagged. All other fields are restored to their original form, bit for bit. Truncated samples
    contain only their first tokens. `position_ids` are returned only if the original samples had this field.

    Raises:
        ValueError: a sample has no tokens, so its values in repeated fields would be lost.
    """
    lengths = np.asarray(packed.lengths, dtype=np.int64)
    if 0 in packed.lengths and any(use.kind == "repeated" for use in packed.uses.values()):
        raise ValueError(
            f"sample {packed.lengths.index(0)} has no tokens, so its values in repeat_fields would be lost; expected "
            "at least one token in each sample, or no repeat_fields"
        )
    pattern = RowPattern.of_lengths(lengths, beside=packed["cu_seqlens"])
    columns: dict[FieldKey, FlatColumn] = {}
    for key, use in packed.uses.items():
        values = packed.tensors.get(key)
        if use.kind == "token":
            taken = packed.split_tokens(values, use.token_dim) or [values.narrow(use.token_dim, 0, 0)]
            columns[key] = JaggedColumn(torch.cat(taken, use.token_dim), pattern, use.token_dim + 1)
        elif use.kind == "repeated":
            columns[key] = values[torch.tensor(packed.starts, dtype=torch.int64, device=values.device)]
        else:
            columns[key] = values
    return build(FlatBatch(packed.sample_count, columns))
