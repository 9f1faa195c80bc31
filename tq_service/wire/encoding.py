"""Columns from what callers hold: tensors, arrays, nested tensors, lists of them, and lists of objects."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from tq_service.errors import InvalidArgumentError
from tq_service.schema import Encoding, FieldSpec, Layout
from tq_service.wire.collection import no_collection
from tq_service.wire.columns import Column, Extents
from tq_service.wire.dtypes import (
    array_bytes,
    dtype_name,
    exact_numbers,
    is_tensor,
    is_tensor_type,
    tensor_bytes,
)
from tq_service.wire.objects import encode_objects

_GATHER_BELOW_BYTES: Final = 64 << 10
"""Lists of rows below this mean size are put together first; larger rows travel as views of their own."""

_COUNTED_AT_ONCE: Final = 1 << 16  # objects, for which no other thread runs
_OBJECT_KINDS: Final = "OUST"  # of numpy's dtypes


def encode_columns(data: Any, declared: Mapping[str, Layout] | None = None) -> list[Column]:
    """Return the columns of a put, without copying tensors that are contiguous and on the CPU.

    Args:
        data: a TensorDict of one batch dimension or a mapping of field names to columns of `n` rows each: a tensor or
            array `(n, ...)`; a nested tensor, or a list of tensors or arrays of one or more dimensions (jagged); a list
            of numbers or 0-dim tensors (dense scalars, Python's float as float64); a list of anything else (objects).
            `NonTensorData` is what `non_tensor_rows` says.
        declared: layouts known beforehand; a field declared jagged takes rows of equal shape too, one declared object
            takes any list. Objects that all are str become text, those that all are bytes bytes, others msgpack.

    Raises:
        InvalidArgumentError: no fields, no rows, row counts that differ, or values no column can hold.
        UnsupportedObjectError: an object that only pickle could carry.
    """
    columns = [
        _encode_column(_checked_name(name), values, (declared or {}).get(name)) for name, values in _fields_of(data)
    ]
    if not columns:
        raise InvalidArgumentError("data has no fields; put at least one column", field="data")
    first = columns[0]
    for column in columns:
        if column.row_count != first.row_count:
            raise InvalidArgumentError(
                f"field {first.spec.name!r} has {first.row_count} rows, field {column.spec.name!r} {column.row_count}; "
                "give every field a row for each sample",
                field="data",
                metadata={
                    "field_name": column.spec.name,
                    "got": str(column.row_count),
                    "expected": str(first.row_count),
                },
            )
    if not first.row_count:
        raise InvalidArgumentError("data has 0 rows; put at least one sample", field="data")
    return columns


def _checked_name(name: Any) -> str:
    if not isinstance(name, str) or not name:
        raise InvalidArgumentError(f"field name {name!r} is no text; name fields by non-empty strings", field="data")
    try:
        name.encode()
    except UnicodeEncodeError as error:
        raise InvalidArgumentError(f"field name {name!r} is not valid Unicode ({error})", field="data") from None
    return name


def _fields_of(data: Any) -> list[tuple[Any, Any]]:
    if _is_tensordict(data):
        return _fields_of_tensordict(data)
    if not isinstance(data, Mapping):
        raise InvalidArgumentError(
            f"data is a {type(data).__name__}; put a TensorDict or a dict of columns", field="data"
        )
    return list(data.items())


def _is_tensordict(value: Any) -> bool:
    # Where another thread is still importing it, it has no such function yet, so there is no TensorDict.
    is_tensor_collection = getattr(sys.modules.get("tensordict"), "is_tensor_collection", None)
    return is_tensor_collection is not None and bool(is_tensor_collection(value))


def _fields_of_tensordict(data: Any) -> list[tuple[Any, Any]]:
    if data.batch_dims != 1:
        raise InvalidArgumentError(
            f"the TensorDict has batch_size {tuple(data.batch_size)}; put one with one batch dimension, the samples",
            field="data",
        )
    fields: list[tuple[Any, Any]] = []
    for name in data.keys():  # noqa: SIM118  (iterating a TensorDict gives rows)
        try:
            fields.append((name, data.get(name)))
        except RuntimeError:  # a lazy stack whose rows differ in shape
            fields.append((name, data.get(name, as_list=True)))
    return fields


def _encode_column(name: str, values: Any, declared: Layout | None) -> Column:
    if is_tensor(values):
        return _encode_nested(name, values) if values.is_nested else _encode_dense(name, values)
    if isinstance(values, np.ndarray) and values.dtype.kind not in _OBJECT_KINDS:
        return _encode_dense(name, values)
    if isinstance(values, np.ndarray):
        return _encode_list(name, _rows_of_array(values), declared or Layout.OBJECT)
    if _is_tensordict(values):
        if not sys.modules["tensordict"].is_non_tensor(values):
            raise InvalidArgumentError(
                f"field {name!r} is a nested TensorDict; put its columns as fields of their own", field="data"
            )
        return _encode_list(name, non_tensor_rows(name, values), declared or Layout.OBJECT)
    if not isinstance(values, (list, tuple)):
        raise InvalidArgumentError(
            f"field {name!r} is a {type(values).__name__}; put a tensor, an array or a list of one value per sample",
            field="data",
        )
    return _encode_list(name, values, declared)


def _rows_of_array(array: NDArray[Any]) -> list[Any]:
    """Return the rows of an array: objects as they are, texts as Python's."""
    return list(array) if array.dtype.kind not in "UST" else array.tolist()


def non_tensor_rows(name: str, values: Any) -> list[Any]:
    """Return the items of a `NonTensorStack` or of a `NonTensorData`, one for each row.

    A `NonTensorData` that holds a list, a tuple or a numpy array holds one item a row, as these do without it (a
    TensorDict wraps arrays of objects and texts so). Anything else, a text or a dict, is one value for all rows.

    Raises:
        InvalidArgumentError: it holds another number of items than there are rows, or one value for no known number.
    """
    items = values.data if isinstance(values, sys.modules["tensordict"].NonTensorData) else None
    if not isinstance(items, (list, tuple)) and not (isinstance(items, np.ndarray) and items.ndim):
        if not len(values.batch_size):
            raise InvalidArgumentError(
                f"field {name!r} is NonTensorData of one {type(items).__name__} that does not say for how many rows; "
                "put it in a TensorDict, or give it a batch_size",
                field="data",
            )
        return list(values.tolist())
    row_count = int(values.batch_size[0]) if len(values.batch_size) else len(items)
    if len(items) != row_count:
        raise InvalidArgumentError(
            f"field {name!r} is NonTensorData of a {type(items).__name__} of {len(items)} items for {row_count} rows; "
            "give one item a row, or NonTensorStack(*[value] * n) for one value in all of n rows",
            field="data",
        )
    return _rows_of_array(items) if isinstance(items, np.ndarray) else list(items)


def _encode_dense(name: str, values: Any) -> Column:
    if not values.ndim:
        raise InvalidArgumentError(f"field {name!r} is a scalar; its first dimension must be the samples", field="data")
    dtype, chunk = _bytes_of(name, values)
    spec = FieldSpec(name, dtype, Layout.DENSE, tuple(map(int, values.shape[1:])))
    return _column(spec, int(values.shape[0]), None, (chunk,))


def _bytes_of(name: str, values: Any) -> tuple[str, memoryview]:
    _check_values(name, values)
    dtype = dtype_name(values.dtype, f"field {name!r}")
    return dtype, tensor_bytes(values) if is_tensor(values) else array_bytes(values)


def _check_values(name: str, values: Any) -> None:
    """Refuse tensors and arrays that have more, or less, than the values of a plain one."""
    if not is_tensor(values):
        problem = "a masked array, whose mask would be lost; fill it first" if np.ma.isMaskedArray(values) else ""
    elif values.is_nested:
        problem = "nested tensors for rows; put each row as a plain tensor"
    elif values.layout is not sys.modules["torch"].strided:
        problem = f"layout {values.layout}; call to_dense() first"
    else:
        problem = "tensors on the device 'meta', which have no values" if values.is_meta else ""
    if problem:
        raise InvalidArgumentError(f"field {name!r} has {problem}", field="data")


def _column(spec: FieldSpec, row_count: int, extents: Extents | None, chunks: tuple[memoryview, ...]) -> Column:
    return Column(
        spec=spec,
        row_count=row_count,
        extents=extents,
        value_bytes=sum(map(len, chunks)),
        chunks=tuple(chunk for chunk in chunks if len(chunk)),
    )


def _encode_nested(name: str, values: Any) -> Column:
    """Encode a nested tensor; the usual form, ragged in the first dimension and packed, without a copy."""
    torch = sys.modules["torch"]
    nested = values.detach()
    if nested.layout is not torch.jagged:
        rows = list(nested.unbind())
        alike = all(row.shape == rows[0].shape for row in rows)
        return _encode_rows(name, rows, (0,) if alike else ())
    ragged_dim = int(nested._ragged_idx) - 1  # torch has no public name for it
    if ragged_dim or nested.lengths() is not None:
        return _encode_rows(name, list(nested.unbind()), (ragged_dim,))
    offsets = nested.offsets().cpu().numpy().astype(np.int64, copy=False)
    packed = nested.values()[int(offsets[0]) : int(offsets[-1])]
    dtype, chunk = _bytes_of(name, packed)
    shape = (-1, *map(int, packed.shape[1:]))
    extents = np.diff(offsets).reshape(-1, 1)
    return _column(FieldSpec(name, dtype, Layout.JAGGED, shape), len(extents), extents, (chunk,))


def _encode_list(name: str, values: Sequence[Any], declared: Layout | None) -> Column:
    if not values:
        return _encode_dense(name, np.zeros(0, np.float32))  # refused for its 0 rows, with all others
    if declared is not Layout.OBJECT:
        if _are_arrays(values):
            try:
                return _encode_arrays(name, values)
            except (AttributeError, RuntimeError):  # torch does not say of which field
                for row in values:
                    _check_values(name, row)
                raise
        kinds = set(map(type, values))
        is_numpy = len(kinds) == 1 and issubclass(next(iter(kinds)), (np.number, np.bool_))
        numbers = np.array(values) if is_numpy else exact_numbers(values, kinds)
        if numbers is not None:
            return _encode_dense(name, numbers)
    return _encode_objects(name, values)


def _are_arrays(values: Sequence[Any]) -> bool:
    """Whether all are tensors or arrays of numbers; asked of their few types first, since there are many of them."""
    kinds = set(map(type, values))
    if not all(issubclass(kind, np.ndarray) or is_tensor_type(kind) for kind in kinds):
        return False
    return all(value.dtype.kind not in _OBJECT_KINDS for value in values if isinstance(value, np.ndarray))


def _encode_arrays(name: str, values: Sequence[Any]) -> Column:
    rows = list(values)
    if len({is_tensor_type(kind) for kind in set(map(type, rows))}) > 1:
        rows = [row if is_tensor(row) else _as_tensor(name, row) for row in rows]
    dim_counts = {row.ndim for row in rows}
    if len(dim_counts) > 1:
        raise InvalidArgumentError(
            f"field {name!r} has rows of {min(dim_counts)} and of {max(dim_counts)} dimensions; give all the same",
            field="data",
        )
    dtypes = {row.dtype for row in rows}
    if len(dtypes) > 1:
        got = " and ".join(sorted(map(str, dtypes)))
        raise InvalidArgumentError(f"field {name!r} has rows of {got}; convert them to one dtype", field="data")
    return _encode_rows(name, rows) if dim_counts != {0} else _encode_dense(name, _concatenate(rows))


def _as_tensor(name: str, array: NDArray[Any]) -> Any:
    _check_values(name, array)
    dtype = dtype_name(array.dtype, f"field {name!r}")
    return sys.modules["torch"].from_numpy(np.array(array, dtype))  # a copy in the byte order of the machine


def _encode_rows(name: str, rows: list[Any], ragged_dims: Sequence[int] = ()) -> Column:
    """Encode rows of one dtype and of one or more dimensions as a column.

    Args:
        name: the field.
        rows: tensors, or arrays.
        ragged_dims: are ragged, besides those in which rows differ; where there are none the column is dense.
    """
    shapes = np.array([row.shape for row in rows], dtype=np.int64).reshape(len(rows), -1)
    is_ragged = (shapes != shapes[0]).any(axis=0)
    is_ragged[list(ragged_dims)] = True
    if sum(row.nbytes for row in rows) < _GATHER_BELOW_BYTES * len(rows):
        rows = [_concatenate(rows)]
    dtypes, chunks = zip(*(_bytes_of(name, row) for row in rows), strict=True)
    is_jagged = bool(is_ragged.any())
    shape = tuple(np.where(is_ragged, -1, shapes[0]).tolist())
    spec = FieldSpec(name, dtypes[0], Layout.JAGGED if is_jagged else Layout.DENSE, shape)
    return _column(spec, len(shapes), np.ascontiguousarray(shapes[:, is_ragged]) if is_jagged else None, chunks)


def _concatenate(rows: list[Any]) -> Any:
    """Return the values of tensors, or arrays, one after the other."""
    flat = rows if rows[0].ndim == 1 else [row.reshape(-1) for row in rows]
    if not is_tensor(rows[0]):
        return np.concatenate(flat)
    torch = sys.modules["torch"]
    with torch.no_grad():
        return torch.cat(flat if len({row.device for row in flat}) == 1 else [row.cpu() for row in flat])


def _encode_objects(name: str, values: Sequence[Any]) -> Column:
    kinds, encoding = set(map(type, values)), Encoding.MSGPACK
    if kinds == {str}:
        encoding = Encoding.TEXT
        try:
            blobs = [value.encode() for value in values]
        except UnicodeEncodeError:  # a lone surrogate, which UTF-8 does not have, and msgpack here does
            encoding = Encoding.MSGPACK
    elif kinds <= {bytes, bytearray, memoryview}:
        encoding, blobs = Encoding.BYTES, list(map(bytes, values))
    if encoding is Encoding.MSGPACK:
        with no_collection():
            blobs = encode_objects(values, name)
    starts = range(0, len(blobs), _COUNTED_AT_ONCE)
    sizes = [np.array(list(map(len, blobs[start : start + _COUNTED_AT_ONCE])), np.int64) for start in starts]
    extents = np.concatenate(sizes).reshape(-1, 1)
    spec = FieldSpec(name, "", Layout.OBJECT, (), encoding)
    return _column(spec, len(blobs), extents, (memoryview(b"".join(blobs)),))
