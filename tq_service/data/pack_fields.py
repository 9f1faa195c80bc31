"""What becomes of each field of a pack, and how many tokens of each sample are taken."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from tensordict import TensorDict

from tq_service.data.columns import (
    DenseColumn,
    FieldKey,
    FlatBatch,
    FlatColumn,
    JaggedColumn,
    ObjectColumn,
    flatten,
)
from tq_service.data.micro_batches import Positions, check_positions
from tq_service.data.pack_options import PackOptions
from tq_service.wire.decoding import RowPattern

POSITIONS = "position_ids"
_MADE = ("cu_seqlens", "padding_mask", "max_seqlen", "num_padding")


@dataclass(frozen=True, slots=True, kw_only=True)
class FieldUse:
    """What became of a field: concatenated along `token_dim`, repeated over the tokens, or kept per sample."""

    kind: Literal["token", "repeated", "sample"]
    token_dim: int = 0


def flatten_tokens(data: TensorDict, options: PackOptions) -> FlatBatch:
    """Return the columns of a batch, jagged where they have a value for each token, also if all rows are alike.

    Raises:
        ValueError: a field may be per token or per sample, or is named as per token and is not.
    """
    flat = flatten(data)
    length, is_dense = _common_length(flat, options)
    columns, sizes = dict(flat.columns), dict[int, int]()
    for key, column in flat.columns.items():
        dim, rows = None, _alike_rows(column, flat)
        if rows is not None and isinstance(column, DenseColumn):
            dim = _token_dim(key, tuple(rows.shape), length, options, is_dense=is_dense)
        elif rows is not None:
            dim = _other_token_dim(key, tuple(rows.shape), length, options)
        if rows is not None and dim is not None:
            size = rows.shape[dim + 1]
            pattern = len(flat.patterns) + sizes.setdefault(size, len(sizes))
            values = rows.movedim(0, dim).flatten(dim, dim + 1)
            columns[key] = JaggedColumn(values=values, pattern=pattern, ragged_dim=dim + 1)
    made = (RowPattern.of_lengths(np.full(flat.row_count, size, np.int64)) for size in sizes)
    return FlatBatch(row_count=flat.row_count, columns=columns, patterns=(*flat.patterns, *made))


def _alike_rows(column: FlatColumn, flat: FlatBatch) -> torch.Tensor | None:
    """Return the rows `(n, ...)` of a column of equal rows of one or more dimensions, None of any other."""
    if isinstance(column, DenseColumn):
        return column.values if column.values.ndim > 1 else None
    if not isinstance(column, JaggedColumn) or column.ragged_dim != 1 or not flat.row_count:
        return None
    pattern = flat.patterns[column.pattern]
    is_alike = pattern.min_length == pattern.max_length
    shape = (flat.row_count, pattern.max_length, *column.values.shape[1:])
    return column.values.reshape(shape) if is_alike else None


def _other_token_dim(key: FieldKey, shape: tuple[int, ...], length: int | None, options: PackOptions) -> int | None:
    """Return the dimension of the tokens in equal rows of a nested tensor `(n, ...)`; None: the first, or unknown.

    torch takes the first dimension of equal rows for the ragged one, whichever differs in other batches.
    """
    dims = [dim for dim, size in enumerate(shape[1:]) if size == length]
    if key in (options.input_field, *options.keep_fields) or not dims:
        return None
    if key == POSITIONS:
        return dims[-1]
    return dims[0] if len(dims) == 1 else None


def _common_length(flat: FlatBatch, options: PackOptions) -> tuple[int | None, bool]:
    """Return the tokens of every sample, None where they differ or there are none; and whether the field is dense."""
    tokens = flat.columns.get(options.input_field)
    if isinstance(tokens, DenseColumn):
        return (tokens.values.shape[1] if tokens.values.ndim > 1 else None), True
    if not isinstance(tokens, JaggedColumn) or not flat.row_count:
        return None, False
    pattern = flat.patterns[tokens.pattern]
    return (pattern.max_length if pattern.min_length == pattern.max_length else None), False


def _token_dim(
    key: FieldKey, shape: tuple[int, ...], length: int | None, options: PackOptions, *, is_dense: bool
) -> int | None:
    """Return the dimension of the tokens in the rows of a dense field `(n, ...)`; None: it is per sample."""
    row_count, *row = shape
    if key in options.keep_fields or key in options.repeat_fields:
        return None
    if key == options.input_field:
        return 0
    is_named = key == POSITIONS or key in options.token_fields
    dims = [dim for dim, size in enumerate(row) if size == length]
    if len(dims) == 1 and (is_dense or is_named):
        return dims[0]
    if is_named and length is None and (len(row) == 1 or not row_count):
        return len(row) - 1 if key == POSITIONS else 0  # `sample_lengths` compares the sizes, where there are samples
    if is_named and not dims:
        raise ValueError(
            f"field {key!r} has a row of shape {tuple(row)} in every sample; expected one dimension with a value for "
            f"each of the {'' if length is None else f'{length} '}tokens of {options.input_field!r}; name it in "
            "keep_fields if it has none, or declare it with layout='jagged'"
        )
    if dims:
        raise ValueError(
            f"field {key!r} has a row of shape {tuple(row)} in every sample, and each sample of the batch has {length} "
            f"tokens, so that it may have a value for each token{', in several dimensions' if dims[1:] else ''}; name "
            "it in keep_fields if it has none, else in token_fields, or declare which dimension has the tokens, such "
            "as FieldSpec(name, layout='jagged', row_shape=(3, -1))"
        )
    return None


def field_uses(flat: FlatBatch, options: PackOptions) -> dict[FieldKey, FieldUse]:
    """Return what becomes of each field of a batch of `flatten_tokens`.

    Raises:
        ValueError: a field holds objects, is of the wrong layout, or is missing.
    """
    uses = {key: _use(key, column, options) for key, column in flat.columns.items()}
    _check_names(uses, options)
    return uses


def sample_lengths(
    flat: FlatBatch, positions: Positions, planned: NDArray[np.int64] | None, options: PackOptions
) -> NDArray[np.int64]:
    """Return the tokens to take of each sample, `(m,)`, after a look at all fields that must have them.

    Args:
        flat: the batch.
        positions: the rows `(m,)` that make the pack.
        planned: the tokens `(m,)` that the plan counted on; None: those that the rows have.
        options: what becomes of which field.

    Raises:
        ValueError: the rows have other lengths than the plan counted on, or than those of the input field.
        IndexError: a position is outside the batch.
    """
    check_positions(flat, positions)
    by_pattern: dict[int, NDArray[np.int64]] = {}
    for number, pattern in enumerate(flat.patterns):
        lengths_of_all = np.diff(pattern.offsets.detach().cpu().numpy())
        by_pattern[number] = lengths_of_all[positions].astype(np.int64, copy=False)
    tokens = flat.columns[options.input_field]
    lengths = by_pattern[tokens.pattern] if isinstance(tokens, JaggedColumn) else np.zeros(0, np.int64)
    for key, column in flat.columns.items():
        if isinstance(column, JaggedColumn) and key not in options.keep_fields:
            _check_row_lengths(key, by_pattern[column.pattern], lengths, options)
    return _taken_lengths(lengths, planned, options)


def _check_row_lengths(
    key: FieldKey, got: NDArray[np.int64], expected: NDArray[np.int64], options: PackOptions
) -> None:
    wrong = np.flatnonzero(got != expected)
    if wrong.size:
        at = wrong[0]
        raise ValueError(
            f"field {key!r} has {got[at]} values in sample {at} of the pack; expected {expected[at]}, as many as "
            f"{options.input_field!r}; name it in keep_fields if it has no value for each token, or declare its "
            "row_shape if another dimension has the tokens"
        )


def _taken_lengths(
    lengths: NDArray[np.int64], planned: NDArray[np.int64] | None, options: PackOptions
) -> NDArray[np.int64]:
    expected = np.minimum(lengths, options.pack_max_length) if options.overlong == "truncate" else lengths
    if planned is None:
        return expected
    if planned.shape != expected.shape:
        raise ValueError(f"got {planned.size} lengths; expected {expected.size}, one for each sample of the pack")
    wrong = np.flatnonzero(planned != expected)
    if wrong.size:
        at = wrong[0]
        raise ValueError(
            f"got length {planned[at]} of sample {at} of the pack; expected {expected[at]}, as {options.input_field!r} "
            f"has {lengths[at]} tokens; plan with the lengths that the rows have, and where the sampler truncates, "
            'pack with overlong="truncate" too'
        )
    return planned


def _use(key: FieldKey, column: FlatColumn, options: PackOptions) -> FieldUse:
    if isinstance(column, ObjectColumn):
        raise ValueError(_why_no_objects(key, column))
    if isinstance(column, JaggedColumn):
        if key in options.repeat_fields:
            raise ValueError(f"field {key!r} of repeat_fields is jagged; expected a dense one, of one value a sample")
        return FieldUse(kind="sample" if key in options.keep_fields else "token", token_dim=column.ragged_dim - 1)
    if key in (options.input_field, POSITIONS, *options.token_fields):
        raise ValueError(
            f"field {key!r} has rows of shape {tuple(column.values.shape[1:])}; expected a value for each token, "
            "in rows of one or more dimensions"
        )
    return FieldUse(kind="repeated" if key in options.repeat_fields else "sample")


def _check_names(uses: Mapping[FieldKey, FieldUse], options: PackOptions) -> None:
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


def _why_no_objects(key: FieldKey, column: ObjectColumn) -> str:
    if column.rows and all(isinstance(row, torch.Tensor) for row in column.rows):
        return (
            f"field {key!r} has rows that differ in several dimensions, or did so in some put; expected one ragged "
            "dimension: declare it before the first put, such as FieldSpec(name, layout='jagged', row_shape=(3, -1))"
        )
    return (
        f"field {key!r} holds objects, which no pack can hold; leave it out of data_fields, and fetch it by the pack's "
        "meta where it is needed"
    )
