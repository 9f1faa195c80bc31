"""Columns as they travel and are stored: what cuts their bytes into rows, and its checks.

The values of a column are the rows' bytes one after the other. A dense column needs nothing else; a jagged one has the
size of each row in each ragged dimension, an object column the bytes of each row: its extents. Objects that were put in
different encodings and are read together have the number of the row's encoding beside the bytes of the row.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray
from xxhash import xxh3_128

from tq_service.errors import FieldMismatchError, InvalidArgumentError
from tq_service.schema import DTYPE_SIZES, Encoding, FieldSpec, Layout, check_range
from tq_service.v1 import metadata_pb2, storage_service_pb2
from tq_service.wire.metadata import ENCODINGS, LAYOUTS, decode_spec, encode_spec

Extents = NDArray[np.int64]

MAX_ROWS: Final = 1 << 24
"""Most rows of one put or one get: bounds what a header alone can make its receiver allocate."""

_MAX_BYTES: Final = 1 << 60
_MAX_DIMS: Final = 64
_OBJECT: Final = LAYOUTS.encode(Layout.OBJECT)
_ENCODINGS: Final = [ENCODINGS.encode(encoding) for encoding in Encoding]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ColumnShape:
    """What cuts the bytes of a column into rows.

    Attributes:
        spec: dtype, layout and row shape, all of them known; objects of several encodings have none.
        row_count: number of rows.
        extents: jagged: `(n, ragged dims)`, the size of each row in each ragged dimension; object: `(n, 1)`, the bytes
            of each row, or `(n, 2)` with the number of its encoding; dense: None.
        value_bytes: bytes of all rows together.
    """

    spec: FieldSpec
    row_count: int
    extents: Extents | None
    value_bytes: int

    def row_bytes(self) -> NDArray[np.int64]:
        """Return the bytes of each row `(n,)`."""
        if self.extents is None:
            return np.full(self.row_count, fixed_row_bytes(self.spec) or 0, np.int64)
        is_plain = self.extents.shape[1] == 1 or self.spec.layout is Layout.OBJECT
        elements = self.extents[:, 0] if is_plain else self.extents.prod(axis=1)
        return np.asarray(elements * _fixed_part(self.spec), dtype=np.int64)

    def row_offsets(self) -> NDArray[np.int64]:
        """Return where each row starts in the values, and their end `(n + 1,)`."""
        return offsets_of(self.row_bytes())

    def validate(self) -> None:
        """Check that the parts agree, whatever was sent.

        Raises:
            InvalidArgumentError: a size is negative or too large, a part is missing, or the extents do not give
                `value_bytes`.
        """
        _validate_spec(self.spec)
        check_range("row_count", self.row_count, 1, MAX_ROWS, "; split larger puts")
        if not 0 <= self.value_bytes <= _MAX_BYTES:
            raise self._wrong("value_bytes", f"value_bytes {self.value_bytes}, expected 0 to {_MAX_BYTES}")
        expected = self._dense_bytes() if self.spec.layout is Layout.DENSE else self._ragged_bytes()
        if expected != self.value_bytes:
            raise self._wrong(
                "value_bytes", f"value_bytes {self.value_bytes}, but its rows take {expected}; declare what is sent"
            )

    def _dense_bytes(self) -> int:
        if self.extents is not None:
            raise self._wrong("extents", "extents in a dense column; leave them out or send it jagged")
        return self.row_count * (fixed_row_bytes(self.spec) or 0)

    def _ragged_bytes(self) -> int:
        shape = (self.row_count, extent_count(self.spec))
        if self.extents is None or self.extents.shape != shape:
            got = "none" if self.extents is None else list(self.extents.shape)
            raise self._wrong("extents", f"extents of shape {got}, expected {list(shape)}")
        if self.extents.size and int(self.extents.min()) < 0:
            raise self._wrong("extents", "a negative extent; sizes are 0 or more")
        sizes = self.extents
        if self.spec.layout is Layout.OBJECT:
            sizes, encodings = self.extents[:, :1], self.extents[:, 1:]
            if not np.isin(encodings, _ENCODINGS).all():
                known = ", ".join(map(str, _ENCODINGS))
                raise self._wrong("extents", f"an unknown encoding of a row; expected one of {known}")
        with np.errstate(over="ignore", invalid="ignore"):
            products = sizes[:, 0].astype(np.float64) if sizes.shape[1] else np.ones(self.row_count)
            for extent in sizes.T[1:]:  # far quicker than a product along rows
                products *= extent
            estimate = float(products.sum()) * _fixed_part(self.spec)
        if not estimate <= _MAX_BYTES:
            raise self._wrong("extents", f"extents of more than {_MAX_BYTES} bytes")
        return int(self.row_bytes().sum())

    def _wrong(self, field: str, what: str) -> InvalidArgumentError:
        return _wrong_column(self.spec, field, f"field {self.spec.name!r} ({self.spec.describe()}) has {what}")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Column(ColumnShape):
    """A column with its bytes.

    Attributes:
        chunks: the bytes of the values in row order, views on the caller's tensors where possible.
    """

    chunks: tuple[memoryview, ...]


def columns_digest(columns: Sequence[ColumnShape]) -> bytes:
    """Return 16 bytes that differ, but for chance, wherever columns do."""
    digest = xxh3_128()
    for column in columns:
        spec = column.spec
        what = (spec.name, spec.dtype, spec.layout, spec.row_shape, spec.encoding, column.row_count, column.value_bytes)
        digest.update(repr(what).encode())
        if column.extents is not None:
            digest.update(np.ascontiguousarray(column.extents).data)
    return digest.digest()


def _wrong_column(spec: FieldSpec, field: str, message: str) -> InvalidArgumentError:
    return InvalidArgumentError(message, field=field, metadata={"field_name": spec.name})


@lru_cache(maxsize=1024)
def _validate_spec(spec: FieldSpec) -> None:
    shape = spec.row_shape
    if spec.layout in (None, Layout.AUTO):
        raise _wrong_column(
            spec,
            "layout",
            f"field {spec.name!r} has the layout {spec.layout or 'none'}; a column of a put or get says dense, jagged "
            "or object",
        )
    if shape is None:
        raise _wrong_column(
            spec,
            "row_shape_known",
            f"field {spec.name!r} has row_shape_known unset; a column of a put or get has a row shape, set it",
        )
    if spec.layout is Layout.OBJECT:
        if spec.dtype or shape:
            raise _wrong_column(
                spec,
                "dtype" if spec.dtype else "row_shape",
                f"field {spec.name!r} has objects, with dtype {spec.dtype!r} and row shape {list(shape)}; objects have "
                "neither",
            )
        return
    if not spec.dtype:
        raise _wrong_column(
            spec, "dtype", f"field {spec.name!r} has no dtype; give one of {', '.join(sorted(DTYPE_SIZES))}"
        )
    least = -1 if spec.layout is Layout.JAGGED else 0
    if len(shape) > _MAX_DIMS or any(size < least for size in shape):
        raise _wrong_column(
            spec,
            "row_shape",
            f"field {spec.name!r} is {spec.describe()}; expected at most {_MAX_DIMS} sizes of 0 or more, -1 in ragged "
            "dimensions of jagged fields only",
        )
    if spec.layout is Layout.JAGGED and not spec.ragged_dims:
        raise _wrong_column(
            spec,
            "row_shape",
            f"field {spec.name!r} is jagged without a ragged dimension, its row shape is {list(shape)}; set -1 in one",
        )
    if _fixed_part(spec) > _MAX_BYTES:
        raise _wrong_column(spec, "row_shape", f"field {spec.name!r} has rows of over {_MAX_BYTES} bytes")


@lru_cache(maxsize=1024)
def _fixed_part(spec: FieldSpec) -> int:
    """Return the bytes of a row of which every ragged dimension has size 1."""
    return math.prod(size for size in spec.row_shape or () if size >= 0) * spec.itemsize


def offsets_of(sizes: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return where each of some rows starts that lie one after the other, and their end `(n + 1,)`."""
    offsets = np.zeros(sizes.size + 1, np.int64)
    np.cumsum(sizes, out=offsets[1:])
    return offsets


def extent_count(spec: FieldSpec) -> int:
    """Return the number of extents of one row: 0 for dense, 1 for objects, 2 where these have several encodings."""
    if spec.layout is Layout.OBJECT:
        return 1 if spec.encoding is not None else 2
    return len(spec.ragged_dims)


def fixed_row_bytes(spec: FieldSpec) -> int | None:
    """Return the bytes of each row of a dense field, None where rows differ."""
    return _fixed_part(spec) if spec.layout is Layout.DENSE else None


def encode_header(column: ColumnShape) -> metadata_pb2.ColumnHeader:
    """Return the header of a column as a message."""
    extents = b"" if column.extents is None else np.ascontiguousarray(column.extents, "<i8").tobytes()
    return metadata_pb2.ColumnHeader(spec=encode_spec(column.spec), value_bytes=column.value_bytes, extents=extents)


def put_header(put_id: bytes, columns: Sequence[ColumnShape], **more: Any) -> storage_service_pb2.PutHeader:
    """Return the header of a put of these columns; `more` are its other fields, such as the partition."""
    return storage_service_pb2.PutHeader(
        put_id=put_id,
        row_count=columns[0].row_count,
        columns=map(encode_header, columns),
        size_bytes=sum(column.value_bytes for column in columns),
        **more,
    )


def decode_header(message: metadata_pb2.ColumnHeader, row_count: int) -> ColumnShape:
    """Return the checked header of a column of `row_count` rows.

    Raises:
        InvalidArgumentError: its parts do not agree.
    """
    check_range("row_count", row_count, 1, MAX_ROWS, "; split larger puts")
    spec = decode_spec(message.spec)
    _validate_spec(spec)
    width = extent_count(spec)
    data = message.extents  # each look at the field copies it
    if len(data) != row_count * width * 8:
        raise _wrong_column(
            spec,
            "extents",
            f"field {spec.name!r} ({spec.describe()}) has {len(data)} bytes of extents, expected "
            f"{row_count * width * 8} for {row_count} rows",
        )
    extents = None
    if width:
        extents = np.frombuffer(data, "<i8").astype(np.int64, copy=False).reshape(row_count, width)
    column = ColumnShape(spec=spec, row_count=row_count, extents=extents, value_bytes=message.value_bytes)
    column.validate()
    return column


def decode_headers(
    messages: Iterable[metadata_pb2.ColumnHeader], row_count: int, *, of_get: bool = False
) -> list[ColumnShape]:
    """Return the checked headers of the columns of one put, or one get, whose objects may have several encodings.

    Raises:
        InvalidArgumentError: one is wrong, there is none, or a name comes twice.
    """
    columns = []
    for message in messages:
        spec = message.spec
        if spec.layout == _OBJECT and not spec.encoding and not of_get:
            raise InvalidArgumentError(
                f"field {spec.name!r} has objects without an encoding; say for each column of a put which of "
                f"{', '.join(Encoding)} all its rows are",
                field="encoding",
                metadata={"field_name": spec.name},
            )
        columns.append(decode_header(message, row_count))
    names = [column.spec.name for column in columns]
    if not columns:
        raise InvalidArgumentError("there are no columns, expected at least one", field="columns")
    if len(set(names)) != len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise InvalidArgumentError(
            f"field {twice!r} has two columns; send each name once", field="name", metadata={"field_name": twice}
        )
    return columns


def merge_specs(specs: Sequence[FieldSpec]) -> FieldSpec:
    """Return the spec that covers rows of several puts of one field: sizes that differ become ragged.

    Objects of several encodings have none together.
    Dense rows beside jagged ones, or beside dense ones of another shape, are jagged: they were put into a field that is
    declared so.

    Raises:
        FieldMismatchError: dtype, number of dimensions, or tensors and objects differ.
    """
    merged = specs[0]
    for spec in specs:
        if spec is not merged and spec != merged:
            merged = _merge_two(merged, spec)
    return merged


def _merge_two(one: FieldSpec, other: FieldSpec) -> FieldSpec:
    left, right = one.row_shape or (), other.row_shape or ()
    is_jagged = Layout.JAGGED in (one.layout, other.layout) or left != right
    is_one_kind = one.layout is other.layout or Layout.OBJECT not in (one.layout, other.layout)
    if one.dtype != other.dtype or not is_one_kind or len(left) != len(right):
        raise FieldMismatchError(
            f"field {one.name!r} is {one.describe()} in one put and {other.describe()} in another; put one kind only",
            field="runs",
            metadata={"field_name": one.name, "got": other.describe(), "expected": one.describe()},
        )
    shape = tuple(size if size == twin else -1 for size, twin in zip(left, right, strict=True))
    return FieldSpec(
        one.name,
        dtype=one.dtype,
        layout=Layout.JAGGED if is_jagged else one.layout,
        row_shape=shape,
        encoding=one.encoding if one.encoding is other.encoding else None,
    )


def with_ragged_dim(spec: FieldSpec) -> FieldSpec:
    """Return the spec of a column of a field: of a jagged one without a ragged dimension the first one is ragged."""
    if spec.layout is not Layout.JAGGED or spec.ragged_dims or not spec.row_shape:
        return spec
    return replace(spec, row_shape=(-1, *spec.row_shape[1:]))


def row_shapes(spec: FieldSpec, extents: Extents | None, row_count: int) -> NDArray[np.int64]:
    """Return the shape of each row of a column of tensors `(row_count, dims)`."""
    shapes = np.empty((row_count, len(spec.row_shape or ())), np.int64)
    shapes[:] = spec.row_shape or ()
    if extents is not None:
        shapes[:, list(spec.ragged_dims)] = extents
    return shapes


def extents_as(other: FieldSpec, spec: FieldSpec, extents: Extents | None, row_count: int) -> Extents | None:
    """Return the extents of rows that are described as `spec` where they are described as another spec that fits them.

    Args:
        other: a spec with other ragged dimensions, or without an encoding, such as one that covers several puts of one
            field.
        spec: how the rows were put.
        extents: `(row_count, extents of a row of spec)`, None where it is dense.
        row_count: number of rows.
    """
    if extents is not None and extent_count(other) > extent_count(spec) and spec.layout is Layout.OBJECT:
        return np.column_stack([extents, np.full(row_count, ENCODINGS.encode(spec.encoding), np.int64)])
    if other.ragged_dims == spec.ragged_dims:
        return extents
    return row_shapes(spec, extents, row_count)[:, list(other.ragged_dims)] if other.ragged_dims else None
