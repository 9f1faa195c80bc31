"""Encoding of user data (tensors, arrays, nested tensors, lists of these, and lists of objects) as columns."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any, Final, TypeVar

import numpy as np
from numpy.typing import NDArray

from tq_service.errors import InvalidArgumentError
from tq_service.schema import Encoding, FieldSpec, Layout
from tq_service.wire.columns import (
    Extents,
    SourceColumn,
    array_bytes,
    dtype_name,
    extents_as,
    is_on_device,
    is_tensor,
    is_tensor_type,
    on_cpu,
    subclass_problem,
    tensor_bytes,
)
from tq_service.wire.device import Chunk, DeviceBytes
from tq_service.wire.metadata import exact_numbers
from tq_service.wire.objects import encode_objects, no_collection

T = TypeVar("T")
_GATHER_BELOW_BYTES: Final = 64 << 10
"""Mean row size in bytes below which rows are concatenated. Larger rows in host memory are sent as individual views."""

_AT_ONCE: Final = 1 << 16  # number of objects per call into C, during which other threads are blocked
_LISTS_AT_ONCE: Final = 1 << 10
_OBJECT_KINDS: Final = "OUST"  # kinds of NumPy dtypes whose values are objects or text


def encode_columns(data: Any, known: Mapping[str, FieldSpec] | None = None) -> list[SourceColumn]:
    """Encode the columns for a put. Contiguous tensors on the CPU are not copied.

    Tensors on a device are not copied to the host. The bytes of a device tensor are read once the current stream has
    finished all work submitted so far.

    Args:
        data: a TensorDict with one batch dimension, or a mapping from field names to columns of `n` rows each. A tensor
            or array of shape `(n, ...)` becomes a dense column. A nested tensor, or a list of tensors or arrays with at
            least one dimension, becomes a jagged column. A list of numbers or 0-dimensional tensors becomes a dense
            column of scalars (int64 for int, float64 for float). A list of lists of numbers becomes a dense column if
            all lists have the same length, otherwise a jagged column. A list of other values becomes a column of
            objects. See `non_tensor_rows` for `NonTensorData`.
        known: specs of the fields that already exist in the partition. Object fields accept any list. In tensor fields,
            nested lists of numbers and empty lists also become tensors. Objects are encoded as text if all are str, as
            bytes if all are bytes, and as msgpack otherwise.

    Raises:
        InvalidArgumentError: `data` has no fields or no rows, the row counts of fields differ, or the values of a field
            do not form a column.
        UnsupportedObjectError: an object can be encoded only with pickle.
    """
    columns = [
        _encode_column(_checked_name(name), values, (known or {}).get(name)) for name, values in _fields_of(data)
    ]
    if not columns:
        raise InvalidArgumentError("data has no fields; pass at least one column", field="data")
    first = columns[0]
    for column in columns:
        if column.row_count != first.row_count:
            raise InvalidArgumentError(
                f"field {first.spec.name!r} has {first.row_count} rows, but field {column.spec.name!r} has "
                f"{column.row_count}; pass one row per sample in every field",
                field="data",
                metadata={
                    "field_name": column.spec.name,
                    "got": str(column.row_count),
                    "expected": str(first.row_count),
                },
            )
    if not first.row_count:
        raise InvalidArgumentError("data has 0 rows; pass at least one sample", field="data")
    return columns


def encode_appended(data: Any, known: Mapping[str, FieldSpec]) -> list[SourceColumn]:
    """Encode the columns for an append. Each column becomes jagged, and its dimension 0 becomes ragged.

    Args:
        data: columns in the form that `encode_columns` accepts. Each row must have at least one dimension.
        known: specs of the fields that already exist in the partition.

    Raises:
        InvalidArgumentError: a column contains scalars or objects, or its rows differ in a dimension other than 0. See
            also `encode_columns`.
    """
    names = [name for name, _ in _fields_of(data)]
    jagged = {name: FieldSpec(name, layout=Layout.JAGGED) for name in names if isinstance(name, str) and name}
    return [_ragged(column) for column in encode_columns(data, jagged | dict(known))]


def _ragged(column: SourceColumn) -> SourceColumn:
    spec, shape = column.spec, column.spec.row_shape
    if spec.layout is Layout.OBJECT or not shape or spec.ragged_dims not in {(), (0,)}:
        raise InvalidArgumentError(
            f"field {spec.name!r} is {spec.describe()}; expected one tensor or list of numbers per sample, with "
            "shapes that differ at most in the first dimension. For other fields, use put instead of append",
            field="data",
            metadata={"field_name": spec.name},
        )
    ragged = replace(spec, layout=Layout.JAGGED, row_shape=(-1, *shape[1:]))
    extents = extents_as(ragged, spec, column.extents, column.row_count)
    return replace(column, spec=ragged, extents=None if extents is None else np.ascontiguousarray(extents))


def has_lists(data: Any) -> bool:
    """Return whether any column is a list.

    How a list is encoded depends on the existing field's spec.
    """
    is_mapping = isinstance(data, Mapping) and not _is_tensordict(data)
    return is_mapping and any(isinstance(values, (list, tuple)) for values in data.values())


def _checked_name(name: Any) -> str:
    if not isinstance(name, str) or not name:
        raise InvalidArgumentError(f"a field name is {name!r}; expected a non-empty string", field="data")
    try:
        name.encode()
    except UnicodeEncodeError as error:
        raise InvalidArgumentError(f"field name {name!r} is not valid Unicode: {error}", field="data") from None
    return name


def _fields_of(data: Any) -> list[tuple[Any, Any]]:
    if _is_tensordict(data):
        return _fields_of_tensordict(data)
    if not isinstance(data, Mapping):
        raise InvalidArgumentError(
            f"data has type {type(data).__name__}; expected a TensorDict or a dict of columns", field="data"
        )
    return list(data.items())


def _is_tensordict(value: Any) -> bool:
    # While another thread is importing tensordict, the attribute may be missing. No TensorDict can exist yet.
    is_tensor_collection = getattr(sys.modules.get("tensordict"), "is_tensor_collection", None)
    return is_tensor_collection is not None and bool(is_tensor_collection(value))


def _fields_of_tensordict(data: Any) -> list[tuple[Any, Any]]:
    if data.batch_dims != 1:
        raise InvalidArgumentError(
            f"the TensorDict has batch_size {tuple(data.batch_size)}; expected one batch dimension with one entry per "
            "sample",
            field="data",
        )
    fields: list[tuple[Any, Any]] = []
    for name in data.keys():  # noqa: SIM118  (iterating over a TensorDict yields rows)
        try:
            fields.append((name, data.get(name)))
        except RuntimeError:  # raised for a lazy stack whose rows differ in shape
            fields.append((name, data.get(name, as_list=True)))
    return fields


def _encode_column(name: str, values: Any, known: FieldSpec | None) -> SourceColumn:
    if is_tensor(values):
        return _encode_nested(name, values) if values.is_nested else _encode_dense(name, values)
    if isinstance(values, np.ndarray) and values.dtype.kind not in _OBJECT_KINDS:
        return _encode_dense(name, values)
    if isinstance(values, np.ndarray):
        return _encode_list(name, _rows_of_array(values), _objects_unless_tensors(name, known))
    if _is_tensordict(values):
        if not _is_non_tensor(values):
            raise InvalidArgumentError(
                f"field {name!r} is a nested TensorDict; pass its columns as separate fields", field="data"
            )
        return _encode_list(name, non_tensor_rows(name, values), _objects_unless_tensors(name, known))
    if not isinstance(values, (list, tuple)):
        raise InvalidArgumentError(
            f"field {name!r} has type {type(values).__name__}; expected a tensor, an array or a list with one value "
            "per sample",
            field="data",
        )
    return _encode_list(name, values, known)


def _holds_tensors(known: FieldSpec | None) -> bool:
    return known is not None and known.layout in {Layout.DENSE, Layout.JAGGED}


def _objects_unless_tensors(name: str, known: FieldSpec | None) -> FieldSpec | None:
    """Return the spec for rows in an object container: `known` for a tensor field, otherwise an object spec."""
    return known if _holds_tensors(known) else FieldSpec(name, layout=Layout.OBJECT)


def _rows_of_array(array: NDArray[Any]) -> list[Any]:
    """Return the rows of an array. Objects remain unchanged, and text is converted to Python strings."""
    return list(array) if array.dtype.kind not in "UST" else array.tolist()


def non_tensor_rows(name: str, values: Any) -> list[Any]:
    """Return the rows of a `NonTensorStack` or `NonTensorData`, as tensordict's `tolist()` does.

    A `NonTensorData` usually contains a single value for all rows, even if the value is a list. This rule has two
    exceptions. First, an array of objects or text that has one item per row is taken as the rows, because TensorDicts
    store lists and arrays in this form. Second, if a `NonTensorData` has no batch dimension and is not in a TensorDict,
    a list, tuple or array in it is taken as the rows.

    Raises:
        InvalidArgumentError: the `NonTensorData` contains a single value for an unknown number of rows.
    """
    items = values.data if isinstance(values, sys.modules["tensordict"].NonTensorData) else None
    array = items if isinstance(items, np.ndarray) and items.ndim else None
    if len(values.batch_size):
        is_of_rows = array is not None and array.dtype.kind in _OBJECT_KINDS and len(array) == values.batch_size[0]
        return list(values.tolist()) if array is None or not is_of_rows else _rows_of_array(array)
    if array is not None:
        return _rows_of_array(array)
    if not isinstance(items, (list, tuple)):
        raise InvalidArgumentError(
            f"field {name!r} is NonTensorData with one {type(items).__name__}, so its number of rows is unknown. Pass "
            "it in a TensorDict, or set its batch_size",
            field="data",
        )
    return list(items)


def _encode_dense(name: str, values: Any) -> SourceColumn:
    if not values.ndim:
        raise InvalidArgumentError(f"field {name!r} is a scalar; expected one value per sample", field="data")
    dtype, chunk = _bytes_of(name, values)
    spec = FieldSpec(name, dtype, Layout.DENSE, tuple(map(int, values.shape[1:])))
    return _column(spec, int(values.shape[0]), None, (chunk,))


def _bytes_of(name: str, values: Any) -> tuple[str, Chunk]:
    _check_values(name, values)
    dtype = dtype_name(values.dtype, f"field {name!r}")
    if not is_tensor(values):
        return dtype, array_bytes(values)
    return dtype, DeviceBytes.of(values) if is_on_device(values) else tensor_bytes(values)


def _check_values(name: str, values: Any) -> None:
    """Reject values that are not plain tensors or arrays, such as masked arrays and sparse or meta tensors."""
    if not is_tensor(values):
        problem = "a masked array, whose mask would be lost; call filled() first" if np.ma.isMaskedArray(values) else ""
    elif values.is_nested:
        problem = "nested tensors as rows; pass each row as a plain tensor"
    elif values.layout is not sys.modules["torch"].strided:
        problem = f"layout {values.layout}; call to_dense() first"
    elif values.is_meta:
        problem = "tensors on the device 'meta', which have no values"
    else:
        problem = subclass_problem(values)
    if problem:
        raise InvalidArgumentError(f"field {name!r} has {problem}", field="data")


def _column(spec: FieldSpec, row_count: int, extents: Extents | None, chunks: tuple[Chunk, ...]) -> SourceColumn:
    return SourceColumn(
        spec=spec,
        row_count=row_count,
        extents=extents,
        value_bytes=sum(map(len, chunks)),
        chunks=tuple(chunk for chunk in chunks if len(chunk)),
    )


def _encode_nested(name: str, values: Any) -> SourceColumn:
    """Encode a nested tensor. A packed tensor that is ragged in dimension 0, which is the usual case, is not copied."""
    torch = sys.modules["torch"]
    nested = values.detach()
    if nested.layout is not torch.jagged:
        rows = list(nested.unbind())
        alike = all(row.shape == rows[0].shape for row in rows)
        return _encode_rows(name, rows, (0,) if alike else ())
    ragged_dim = int(nested._ragged_idx) - 1  # torch has no public attribute for this
    if ragged_dim or nested.lengths() is not None:
        try:
            rows = list(nested.unbind())
        except RuntimeError as error:
            raise _inconsistent(name, nested) from error
        return _encode_rows(name, rows, (ragged_dim,))
    offsets = on_cpu(nested.offsets()).numpy().astype(np.int64, copy=False)
    if offsets[0] < 0 or offsets[-1] > nested.values().shape[0] or (offsets[1:] < offsets[:-1]).any():
        raise _inconsistent(name, nested)
    packed = nested.values()[int(offsets[0]) : int(offsets[-1])]
    dtype, chunk = _bytes_of(name, packed)
    shape = (-1, *map(int, packed.shape[1:]))
    extents = np.diff(offsets).reshape(-1, 1)
    return _column(FieldSpec(name, dtype, Layout.JAGGED, shape), len(extents), extents, (chunk,))


def _inconsistent(name: str, nested: Any) -> InvalidArgumentError:
    return InvalidArgumentError(
        f"field {name!r} is a nested tensor with values of shape {tuple(nested.values().shape)}, but its offsets "
        f"{nested.offsets().tolist()[:8]} do not divide them into rows along ragged dimension {nested._ragged_idx}. "
        "Recreate the nested tensor from its rows, for example with torch.nested.as_nested_tensor(rows, "
        "layout=torch.jagged)",
        field="data",
    )


def _encode_list(name: str, values: Sequence[Any], known: FieldSpec | None) -> SourceColumn:
    if not values:
        return _encode_dense(name, np.zeros(0, np.float32))  # rejected later, like all data with 0 rows
    kinds = _kinds(values)
    if any(map(_is_non_tensor, kinds.values())):  # produced by iterating over a NonTensorStack
        values = [value.tolist() if _is_non_tensor(value) else value for value in values]
        kinds, known = _kinds(values), _objects_unless_tensors(name, known)
    if known is None or known.layout is not Layout.OBJECT:
        column = _encode_tensors(name, values, set(kinds), known)
        if column is not None:
            return column
    return _encode_objects(name, values, set(kinds))


def _parts(values: Sequence[T], size: int = _AT_ONCE) -> Iterator[Sequence[T]]:
    return (values[start : start + size] for start in range(0, len(values), size))


def _kinds(values: Sequence[Any]) -> dict[type, Any]:
    """Return the types of the values, with one example value per type."""
    kinds: dict[type, Any] = {}
    for part in _parts(values):
        for kind in set(map(type, part)) - kinds.keys():
            kinds[kind] = next(value for value in part if type(value) is kind)
    return kinds


def _is_non_tensor(value: Any) -> bool:
    return _is_tensordict(value) and bool(sys.modules["tensordict"].utils.is_non_tensor(value))


def _encode_tensors(name: str, values: Sequence[Any], kinds: set[type], known: FieldSpec | None) -> SourceColumn | None:
    """Encode tensors, arrays, numbers or lists of numbers as a tensor column. Return None for any other rows."""
    # Check the types instead of the values, because there are only a few types.
    are_arrays = all(issubclass(kind, np.ndarray) or is_tensor_type(kind) for kind in kinds)
    if are_arrays and all(row.dtype.kind not in _OBJECT_KINDS for row in values if isinstance(row, np.ndarray)):
        try:
            return _encode_arrays(name, values)
        except (AttributeError, RuntimeError):  # torch's message does not contain the name of the field
            for row in values:
                _check_values(name, row)
            raise
    if kinds == {list}:
        return _encode_number_lists(name, values, known)
    numbers = _as_numbers(values, kinds)
    return None if numbers is None else _encode_dense(name, numbers)


def _as_numbers(values: Sequence[Any], kinds: set[type]) -> NDArray[Any] | None:
    """Convert Python numbers, or numpy numbers of a single type, to an array. Return None if any value would change."""
    is_numpy = len(kinds) == 1 and issubclass(next(iter(kinds)), (np.number, np.bool_))
    return np.concatenate(list(map(np.array, _parts(values)))) if is_numpy else exact_numbers(values, kinds)


def _encode_number_lists(name: str, values: Sequence[list[Any]], known: FieldSpec | None) -> SourceColumn | None:
    """Encode rows that are lists of numbers as a tensor column. Return None for any other lists.

    The type of an empty list is unknown, and the shape of nested lists may be irregular. Empty and nested lists are
    therefore converted to tensors only if the field already exists and contains tensors. Otherwise, the values in a new
    field's first put would determine whether the field contains tensors.
    """
    items: list[Any] = []
    for some in _parts(values, _LISTS_AT_ONCE):
        items.extend(chain.from_iterable(some))
    shapes: list[tuple[int, ...]] = [(len(row),) for row in values]
    if known is not None and _holds_tensors(known):
        if items and type(items[0]) is list:
            parts = [_unnested(row) for row in values]
            items = list(chain.from_iterable(part for _, part in parts))
            shapes = [shape for shape, _ in parts]
        # The dtype and any additional dimensions of an empty row are unknown.
        full = next((shape for shape in shapes if 0 not in shape), known.row_shape or ())
        shapes = [shape + tuple(max(size, 0) for size in full[len(shape) :] if 0 in shape) for shape in shapes]
        if not items:
            return _tensor_column(name, known.dtype or "int64", shapes, ())
    numbers = _as_numbers(items, set(_kinds(items)))
    if numbers is None or len(set(map(len, shapes))) > 1:
        return None
    return _tensor_column(name, dtype_name(numbers.dtype, f"field {name!r}"), shapes, (array_bytes(numbers),))


def _unnested(row: list[Any]) -> tuple[tuple[int, ...], list[Any]]:
    """Return the shape of nested lists down to the first irregular level, and the items at that level."""
    shape: tuple[int, ...] = (len(row),)
    items = row
    while items and set(map(type, items)) == {list} and len(set(map(len, items))) == 1:
        shape, items = (*shape, len(items[0])), list(chain.from_iterable(items))
    return shape, items


def _encode_arrays(name: str, values: Sequence[Any]) -> SourceColumn:
    rows = list(values)
    for row in {type(row): row for row in rows}.values():
        _check_values(name, row)
    if len({is_tensor_type(kind) for kind in set(map(type, rows))}) > 1:
        rows = [row if is_tensor(row) else _as_tensor(name, row) for row in rows]
    dim_counts = {row.ndim for row in rows}
    if len(dim_counts) > 1:
        raise InvalidArgumentError(
            f"field {name!r} has rows with {min(dim_counts)} and with {max(dim_counts)} dimensions; use the same "
            "number of dimensions in all rows",
            field="data",
        )
    dtypes = {row.dtype for row in rows}
    if len(dtypes) > 1:
        got = " and ".join(sorted(map(str, dtypes)))
        raise InvalidArgumentError(f"field {name!r} has rows with dtypes {got}; use only one dtype", field="data")
    return _encode_rows(name, rows) if dim_counts != {0} else _encode_dense(name, _concatenate(rows))


def _as_tensor(name: str, array: NDArray[Any]) -> Any:
    _check_values(name, array)
    dtype = dtype_name(array.dtype, f"field {name!r}")
    return sys.modules["torch"].from_numpy(np.array(array, dtype))  # a copy in the native byte order


def _encode_rows(name: str, rows: list[Any], ragged_dims: Sequence[int] = ()) -> SourceColumn:
    """Encode rows as a column. The rows must have the same dtype and at least one dimension.

    Args:
        name: name of the field.
        rows: rows of the column, as tensors or arrays.
        ragged_dims: dimensions to make ragged even if all rows have the same size in them. If no dimension is ragged,
            the column is dense.
    """
    shapes = [tuple(row.shape) for row in rows]
    is_small = sum(row.nbytes for row in rows) < _GATHER_BELOW_BYTES * len(rows)
    if is_small or (is_tensor(rows[0]) and any(map(is_on_device, rows))):
        rows = [_concatenate(rows)]
    dtypes, chunks = zip(*(_bytes_of(name, row) for row in rows), strict=True)
    return _tensor_column(name, dtypes[0], shapes, chunks, ragged_dims)


def _tensor_column(
    name: str,
    dtype: str,
    row_shapes: Sequence[tuple[int, ...]],
    chunks: tuple[Chunk, ...],
    ragged_dims: Sequence[int] = (),
) -> SourceColumn:
    shapes = np.array(row_shapes, np.int64).reshape(len(row_shapes), -1)
    is_ragged = (shapes != shapes[0]).any(axis=0)
    is_ragged[list(ragged_dims)] = True
    is_jagged = bool(is_ragged.any())
    shape = tuple(np.where(is_ragged, -1, shapes[0]).tolist())
    spec = FieldSpec(name, dtype, Layout.JAGGED if is_jagged else Layout.DENSE, shape)
    return _column(spec, len(shapes), np.ascontiguousarray(shapes[:, is_ragged]) if is_jagged else None, chunks)


def _concatenate(rows: list[Any]) -> Any:
    """Concatenate the values of all tensors or arrays into a one-dimensional tensor or array."""
    flat = rows if rows[0].ndim == 1 else [row.reshape(-1) for row in rows]
    if not is_tensor(rows[0]):
        return np.concatenate(flat)
    torch = sys.modules["torch"]
    with torch.no_grad():
        return torch.cat(flat if len({row.device for row in flat}) == 1 else list(map(on_cpu, flat)))


def _encode_objects(name: str, values: Sequence[Any], kinds: set[type]) -> SourceColumn:
    if kinds == {str}:
        try:
            return _objects_column(name, Encoding.TEXT, values, lambda part, _: [text.encode() for text in part])
        except UnicodeEncodeError:  # a lone surrogate, which UTF-8 rejects but msgpack supports here
            pass
    elif kinds <= {bytes, bytearray, memoryview}:
        return _objects_column(name, Encoding.BYTES, values, lambda part, _: list(map(bytes, part)))
    with no_collection():
        return _objects_column(
            name, Encoding.MSGPACK, values, lambda part, first: encode_objects(part, name, first=first)
        )


def _objects_column(
    name: str, encoding: Encoding, values: Sequence[Any], encode: Callable[[Sequence[Any], int], list[bytes]]
) -> SourceColumn:
    """Encode a column of objects. The function `encode` receives a slice of the objects and its start position."""
    sizes, chunks = [], []
    for number, part in enumerate(_parts(values)):
        blobs = encode(part, number * _AT_ONCE)
        sizes.append(np.fromiter(map(len, blobs), np.int64, len(blobs)))
        chunks.append(memoryview(b"".join(blobs)))
    extents = np.concatenate(sizes).reshape(-1, 1)
    return _column(FieldSpec(name, "", Layout.OBJECT, (), encoding), len(extents), extents, tuple(chunks))
