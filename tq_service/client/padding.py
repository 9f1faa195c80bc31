"""Padded reads, which receive rows of jagged fields directly into a dense buffer and pad them to a common length.

    header of an answer -> positions of its rows in the buffer -> bytes received there, or copied from shared memory
    after all answers   -> remainder of each row filled, masks built

The header determines the positions if the read has only one response, or if `length` is set. Otherwise, the rows are
received contiguously and then copied to the buffer.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, Literal, TypeAlias, get_args

import numpy as np
from numpy.typing import NDArray

from tq_service.dataplane.receiving import Received
from tq_service.errors import FieldMismatchError, InternalError, InvalidArgumentError
from tq_service.schema import FieldScope, FieldSpec, Layout
from tq_service.wire.columns import (
    ColumnShape,
    ScatteredRows,
    has_torch,
    make_values,
    merge_specs,
    row_shapes,
    tensor_bytes,
    with_ragged_dim,
)
from tq_service.wire.host_memory import BLOCKS
from tq_service.wire.mapping import Bytes
from tq_service.wire.metadata import Indexes

Side: TypeAlias = Literal["right", "left"]
"""Side of the padding: "right" (after the values) or "left" (before the values)."""

# With more rows than this, preparing the positions takes longer than the copy that it avoids.
_MOST_PLACES: Final = 1 << 16
# Numpy dtypes, keyed by item size.
_ITEMS: Final = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64, 16: np.complex128}


def fill_pattern(spec: FieldSpec, value: Any) -> Bytes:
    """Convert a fill value to bytes in a field's dtype.

    Raises:
        InvalidArgumentError: the dtype cannot represent the value.
    """
    try:
        if not has_torch():
            return np.array(value, spec.dtype).reshape(1).view(np.uint8)
        import torch  # noqa: PLC0415  (torch is optional and slow to import)

        dtype = make_values(np.zeros(spec.itemsize, np.uint8), spec.dtype, (1,), as_torch=True).dtype
        given = value.item() if hasattr(value, "item") else value
        filled = torch.tensor(given).to(dtype) if isinstance(given, float) else torch.tensor(given, dtype=dtype)
        is_whole = not (filled.is_floating_point() or filled.is_complex())
        if filled.dim() or (is_whole and filled.item() != given):
            raise ValueError("conversion to this dtype would change the value")
        return np.frombuffer(tensor_bytes(filled.reshape(1)), np.uint8)
    except (ValueError, TypeError, RuntimeError, OverflowError) as error:
        raise InvalidArgumentError(
            f"pad_value {value!r} cannot be stored as {spec.dtype}, the dtype of field {spec.name!r} ({error}); "
            "expected a number of this dtype. To set pad_value per field, pass {field: value}",
            field="pad_value",
            metadata={"field_name": spec.name},
        ) from None


def lengthen(column: ColumnShape, values: Bytes, row_bytes: Indexes, pattern: Bytes) -> Bytes:
    """Append fill values to each row, and return the bytes of the filled rows.

    Args:
        column: the rows to fill.
        values: bytes of the rows.
        row_bytes: array of shape `(n,)` with the size of each filled row in bytes.
        pattern: bytes of the fill value.
    """
    ends = np.cumsum(row_bytes)
    target = BLOCKS.take(int(row_bytes.sum()))
    item = _ITEMS[pattern.size]
    items: NDArray[Any] = target.view(item)
    fill = pattern.view(item)[0]
    bounds = column.row_offsets().tolist()
    for row, (start, end) in enumerate(zip((ends - row_bytes).tolist(), ends.tolist(), strict=True)):
        size = bounds[row + 1] - bounds[row]
        target[start : start + size] = values[bounds[row] : bounds[row + 1]]
        items[(start + size) // pattern.size : end // pattern.size] = fill
    return target


@dataclass(frozen=True, slots=True, kw_only=True)
class Padding:
    """The padding options passed to a call.

    Attributes:
        fields: names of the fields to pad. If None, all jagged fields that have one ragged dimension are padded.
        value: fill value, or a dict that maps fields to fill values.
        length: row length, or a dict that maps fields to row lengths. If None, each field is padded to the length of
            its longest row.
        side: side of the row that is padded, "right" or "left".
        mask: whether to also return masks.
        truncate: whether to truncate rows longer than `length` to their first `length` items.
    """

    fields: tuple[str, ...] | None
    value: Any
    length: int | Mapping[str, int] | None
    side: Side
    mask: bool
    truncate: bool

    @classmethod
    def of(
        cls,
        padded: bool | str | Sequence[str],
        *,
        pad_value: Any = 0,
        length: int | Mapping[str, int] | None = None,
        side: str = "right",
        mask: bool = False,
        truncate: bool = False,
    ) -> Padding | None:
        """Return the padding options for `get_data` arguments, or None if no field is padded.

        Raises:
            InvalidArgumentError: an argument is invalid, or has no effect without `padded`.
        """
        if side not in get_args(Side):
            raise _wrong("side", repr(side), "'right' or 'left'")
        lengths = list(length.values()) if isinstance(length, Mapping) else [length]
        if any(each is not None and (type(each) is not int or each < 0) for each in lengths):
            raise _wrong("length", repr(length), "an integer of at least 0, or a dict of integers by field")
        if isinstance(padded, str):
            raise _wrong("padded", repr(padded), "True or a list of fields")
        if padded is False or (not isinstance(padded, bool) and not len(padded)):
            for name, is_given in (
                ("pad_value", isinstance(pad_value, Mapping) or pad_value != 0),
                ("length", length is not None),
                ("mask", mask),
                ("truncate", truncate),
                ("side", side != "right"),
            ):
                if is_given:
                    raise _wrong("padded", repr(padded), f"True or a list of fields because {name} is set")
            return None
        if truncate and length is None:
            raise _wrong("truncate", "True without a length", "a length")
        fields = None if isinstance(padded, bool) else tuple(padded)
        for name, given in (("pad_value", pad_value), ("length", length)):
            others = [each for each in given if each not in fields] if fields and isinstance(given, Mapping) else []
            if others:
                raise _wrong(name, f"set for field {others[0]!r}", f"only fields in padded: {', '.join(fields or ())}")
        return cls(fields=fields, value=pad_value, length=length, side=side, mask=bool(mask), truncate=truncate)  # type: ignore[arg-type]

    def length_of(self, name: str) -> int | None:
        """Return the padded row length of a field, or None to use the length of the longest row."""
        return self.length.get(name) if isinstance(self.length, Mapping) else self.length

    def pattern_of(self, spec: FieldSpec) -> Bytes:
        """Return the bytes of a field's fill value."""
        value = self.value.get(spec.name, 0) if isinstance(self.value, Mapping) else self.value
        return fill_pattern(spec, value)

    def check(self, names: Sequence[str]) -> None:
        """Check that the fields to pad are fetched, and that mask names differ from field names.

        Raises:
            InvalidArgumentError: a field is not fetched, or a mask has the same name as a field.
        """
        for name in self.fields or ():
            if name not in names:
                raise _wrong(
                    "padded", f"field {name!r}, which is not fetched", f"some of {', '.join(map(repr, names))}"
                )
        if self.mask:
            taken = next((name for name in self.fields or names if mask_name(name) in names), None)
            if taken is not None:
                raise _wrong("mask", f"True, but field {mask_name(taken)!r} exists", "no field with a mask's name")

    def pads(self, spec: FieldSpec) -> bool:
        """Return whether the field with this spec is padded. Fields with several ragged dimensions must be listed."""
        if self.fields is not None:
            return spec.name in self.fields
        if spec.scope is FieldScope.GROUP:
            return False
        return spec.layout is Layout.JAGGED and _ragged_dim(spec) is not None

    def heads(self, specs: Sequence[FieldSpec], sliced: Sequence[str]) -> dict[str, int]:
        """Return the maximum row length of each field that storage services truncate, by field name."""
        return {
            spec.name: length
            for spec in specs
            if self.truncate
            and self.pads(spec)
            and spec.name not in sliced
            and (length := self.length_of(spec.name)) is not None
            and spec.layout is not Layout.OBJECT
            and spec.row_shape != ()
            and _ragged_dim(spec) == 0
        }

    def specs(self, specs: Sequence[FieldSpec]) -> list[FieldSpec]:
        """Return the specs of the padded fields and masks. Sizes that depend on the rows are set to 0."""
        found: list[FieldSpec] = []
        masks: list[FieldSpec] = []
        for spec in specs:
            if not self.pads(spec):
                found.append(spec)
                continue
            dim, shape = _ragged_dim(spec), list(spec.row_shape or (-1,))
            _check_can_pad(spec, dim)
            length = self.length_of(spec.name)
            size = max(shape[dim or 0], 0) if length is None else length
            shape[dim or 0] = size
            found.append(replace(spec, layout=Layout.DENSE, row_shape=tuple(max(each, 0) for each in shape)))
            if self.mask:
                masks.append(FieldSpec(mask_name(spec.name), "bool", Layout.DENSE, (size,)))
        return [*found, *masks]


def _wrong(name: str, got: str, expected: str) -> InvalidArgumentError:
    return InvalidArgumentError(f"{name} is {got}; expected {expected}", field=name)


def mask_name(name: str) -> str:
    """Return the name of a padded field's mask."""
    return f"{name}_mask"


def _ragged_dim(spec: FieldSpec) -> int | None:
    """Return the row dimension to pad, or None if there is no single dimension to pad."""
    if spec.row_shape is None:
        return 0 if spec.layout is not Layout.OBJECT else None
    dims = with_ragged_dim(spec).ragged_dims
    if len(dims) > 1 or not spec.row_shape:
        return None
    return dims[0] if dims else 0


def _check_can_pad(spec: FieldSpec, dim: int | None) -> None:
    if spec.layout is Layout.OBJECT or dim is None:
        raise FieldMismatchError(
            f"field {spec.name!r} is {spec.describe()}; expected tensors whose rows differ in one dimension. "
            "Set padded to a list without this field",
            field="padded",
            metadata={"field_name": spec.name, "got": spec.describe(), "expected": "rows that differ in one dimension"},
        )


class PaddedColumn:
    """A field of a padded read, with the buffer that receives its rows.

    Args:
        padding: padding options of the call.
        spec: the parts of the field's spec that are known before the read.
        row_count: number of rows in the result.
        device: device to which the buffer is copied, or None for the CPU.
        is_one_answer: whether all rows arrive in one response. If True, the header of the response determines the
            longest row.
    """

    def __init__(
        self, padding: Padding, spec: FieldSpec, row_count: int, device: Any = None, *, is_one_answer: bool = False
    ) -> None:
        self._padding = padding
        self._spec = spec
        self._row_count = row_count
        self._device = device
        self._is_one_answer = is_one_answer
        self._lock = threading.Lock()  # responses arrive in several threads
        self._buffer: Bytes | None = None
        self._shape: tuple[int, ...] = ()

    def place(self, column: ColumnShape, positions: Indexes) -> ScatteredRows | None:
        """Return the memory for the rows in a response, or None if the row length is not known yet."""
        dim, length = _ragged_dim(self._spec), self._padding.length_of(self._spec.name)
        if dim is None or (length is None and not self._is_one_answer) or column.spec.layout is Layout.OBJECT:
            return None
        shapes = row_shapes(column.spec, column.extents, column.row_count)
        if dim >= shapes.shape[1]:
            return None
        longest = int(shapes[:, dim].max(initial=0))
        shape = shapes[0].copy()
        shape[dim] = longest if length is None else length
        others = np.delete(shapes, dim, axis=1)
        if longest > shape[dim] or (others != others[:1]).any() or column.row_count * shape[:dim].prod() > _MOST_PLACES:
            return None
        with self._lock:
            if self._buffer is None or self._is_one_answer:
                self._shape = tuple(shape.tolist())
                self._buffer = self._take(self._shape, column.spec)
            elif self._shape != tuple(shape.tolist()):
                return None
        views = self._buffer.data
        starts, sizes = self._places(column.spec, dim, shapes[:, dim], positions)
        found = [
            views[start : start + size] for start, size in zip(starts.tolist(), sizes.tolist(), strict=True) if size
        ]
        return ScatteredRows(self._buffer, found)

    def _take(self, shape: Sequence[int], spec: FieldSpec) -> Bytes:
        return BLOCKS.take(self._row_count * int(np.prod(shape, dtype=np.int64)) * spec.itemsize, self._device)

    def _places(self, spec: FieldSpec, dim: int, lengths: Indexes, positions: Indexes) -> tuple[Indexes, Indexes]:
        """Return the start and size, in bytes, of each contiguous piece of a row in the buffer."""
        outer = int(np.prod(self._shape[:dim], dtype=np.int64))
        item_bytes = int(np.prod(self._shape[dim + 1 :], dtype=np.int64)) * spec.itemsize
        width = self._shape[dim] * item_bytes
        starts = (positions[:, None] * outer + np.arange(outer)) * width
        sizes = np.broadcast_to((lengths * item_bytes)[:, None], starts.shape)
        if self._padding.side == "left":
            starts = starts + (width - sizes)
        return starts.reshape(-1), sizes.reshape(-1)

    def assemble(self, parts: Sequence[tuple[Indexes, ColumnShape, Bytes]]) -> list[Received]:
        """Return the padded column and, if requested, its mask.

        Args:
            parts: for each response, the positions of its rows in the result, its column, and its values. If the values
                are the buffer itself, they were received in place. All other values are copied.

        Raises:
            FieldMismatchError: a row is longer than `length`, or the shapes of the rows differ in several dimensions.
        """
        name, known = self._spec.name, self._spec
        covered = [known] if known.layout is Layout.JAGGED and known.row_shape is not None else []
        spec = with_ragged_dim(merge_specs([*(column.spec for _, column, _ in parts), *covered]))
        dim = _ragged_dim(spec)
        if len(spec.ragged_dims) > 1 and len(differing := self._differing(parts)) <= 1:
            dim = differing[0] if differing else _ragged_dim(known) or 0
        _check_can_pad(spec, dim)
        dim = dim or 0
        shapes = np.empty((self._row_count, len(spec.row_shape or ())), np.int64)
        for positions, column, _ in parts:
            shapes[positions] = row_shapes(column.spec, column.extents, column.row_count)
        lengths, length = shapes[:, dim], self._padding.length_of(name)
        longest = int(lengths.max(initial=0))
        if length is not None and longest > length:
            self._refuse(dim, lengths, length)
        shape = shapes[0].tolist() if self._row_count else [max(each, 0) for each in spec.row_shape or ()]
        shape[dim] = longest if length is None else length
        left = [part for part in parts if part[2] is not self._buffer]
        if self._buffer is None or len(left) == len(parts):
            self._buffer, self._shape = self._take(shape, spec), tuple(shape)
        elif self._shape != tuple(shape):
            raise InternalError(f"field {name!r} was received with row shape {self._shape}; expected {tuple(shape)}")
        for positions, _, values in left:
            starts, sizes = self._places(spec, dim, lengths[positions], positions)
            _copy(self._buffer, starts, sizes, values)
        self._fill(spec, dim, lengths)
        padded = FieldSpec(name, spec.dtype, Layout.DENSE, tuple(shape))
        result: list[Received] = [
            (
                ColumnShape(spec=padded, row_count=self._row_count, extents=None, value_bytes=self._buffer.size),
                self._buffer,
            )
        ]
        if self._padding.mask:
            result.append(self._mask(lengths, shape[dim]))
        return result

    def _differing(self, parts: Sequence[tuple[Indexes, ColumnShape, Bytes]]) -> list[int]:
        """Return the dimensions in which the rows differ in size."""
        shapes = np.concatenate([row_shapes(column.spec, column.extents, column.row_count) for _, column, _ in parts])
        return [int(dim) for dim in np.flatnonzero((shapes != shapes[:1]).any(axis=0))]

    def _refuse(self, dim: int, lengths: Indexes, length: int) -> None:
        at = int(np.flatnonzero(lengths > length)[0])
        remedy = "Pass a larger length" if dim else "Pass a larger length, or truncate rows with truncate=True"
        raise FieldMismatchError(
            f"row {at} of field {self._spec.name!r} has {int(lengths[at])} items in dimension {dim}; expected at most "
            f"length={length}. {remedy}",
            field="length",
            metadata={"field_name": self._spec.name, "got": str(int(lengths[at])), "expected": str(length)},
        )

    def _fill(self, spec: FieldSpec, dim: int, lengths: Indexes) -> None:
        pattern = self._padding.pattern_of(spec)
        width = self._shape[dim]
        if self._buffer is None or not self._buffer.size or (lengths == width).all():
            return
        item = _ITEMS[pattern.size]
        inner = int(np.prod(self._shape[dim + 1 :], dtype=np.int64))
        items: NDArray[Any] = self._buffer.view(item).reshape(self._row_count, -1, width * inner)
        fill = pattern.view(item)[0]
        is_left = self._padding.side == "left"
        for row in np.flatnonzero(lengths < width).tolist():
            size = int(lengths[row]) * inner
            if is_left:
                items[row, :, : width * inner - size] = fill
            else:
                items[row, :, size:] = fill

    def _mask(self, lengths: Indexes, width: int) -> Received:
        steps = np.arange(width)
        is_left = self._padding.side == "left"
        mask = steps >= (width - lengths)[:, None] if is_left else steps < lengths[:, None]
        spec = FieldSpec(mask_name(self._spec.name), "bool", Layout.DENSE, (width,))
        column = ColumnShape(spec=spec, row_count=self._row_count, extents=None, value_bytes=mask.size)
        return column, np.ascontiguousarray(mask).view(np.uint8).reshape(-1)


def _copy(target: Bytes, starts: Indexes, sizes: Indexes, values: Bytes) -> None:
    """Copy contiguous pieces of values to their positions in the target."""
    at = 0
    for start, size in zip(starts.tolist(), sizes.tolist(), strict=True):
        target[start : start + size] = values[at : at + size]
        at += size
