"""What becomes of each field of a pack, and how many tokens of each sample are taken."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray

from tq_service.data.columns import FieldKey, FlatBatch, FlatColumn, JaggedColumn, ObjectColumn
from tq_service.data.micro_batches import Positions, check_positions
from tq_service.data.pack_options import PackOptions

POSITIONS = "position_ids"
_MADE = ("cu_seqlens", "padding_mask", "max_seqlen", "num_padding")


@dataclass(frozen=True, slots=True, kw_only=True)
class FieldUse:
    """What became of a field: concatenated along `token_dim`, repeated over the tokens, or kept per sample."""

    kind: Literal["token", "repeated", "sample"]
    token_dim: int = 0


def field_uses(flat: FlatBatch, options: PackOptions) -> dict[FieldKey, FieldUse]:
    """Return what becomes of each field, which its layout and the options decide.

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
    if key in (options.input_field, POSITIONS):
        raise ValueError(
            f"field {key!r} is dense, with rows of shape {tuple(column.values.shape[1:])}; expected a jagged one, of "
            'one value a token: put it as a list of tensors, or declare it with layout="jagged"'
        )
    return FieldUse(kind="repeated" if key in options.repeat_fields else "sample")


def _check_names(uses: Mapping[FieldKey, FieldUse], options: PackOptions) -> None:
    for name in (options.input_field, *options.repeat_fields, *options.keep_fields):
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
