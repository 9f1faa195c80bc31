"""Columns that a program fills in place, in memory reserved by a storage service for a later put.

allocate: shapes -> a put to be filled later -> arrays in its region -> put of exactly these arrays: Commit
                                                                    -> put of anything else: an ordinary put
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final, TypeAlias
from weakref import WeakValueDictionary

import numpy as np
from numpy.typing import ArrayLike

from tq_service.dataplane.driver import Allocated
from tq_service.dataplane.receiving import Received
from tq_service.errors import InvalidArgumentError
from tq_service.schema import FieldScope, FieldSpec, Layout
from tq_service.v1.storage_service_pb2 import PutHeader
from tq_service.wire.columns import ColumnShape, SourceColumn, fixed_row_bytes
from tq_service.wire.host_memory import BLOCKS, place_columns

_LAYOUTS: Final = (None, Layout.AUTO)


def column_shapes(fields: Iterable[FieldSpec], row_count: int, lengths: Mapping[str, ArrayLike]) -> list[ColumnShape]:
    """Return the shapes of the columns for `row_count` rows of numeric fields.

    Args:
        fields: the fields. Each field must have a dtype and a row shape.
        row_count: number of rows.
        lengths: for each jagged field, an array with each row's size in the ragged dimension. Its shape is `(n,)`, or
            `(n, dims)` if several dimensions are ragged.

    Raises:
        InvalidArgumentError: a field has no dtype or row shape, or contains objects. Also raised if row lengths are
            missing, negative or not expected.
    """
    shapes = [_column_shape(spec, row_count, lengths.get(spec.name)) for spec in fields]
    names = [shape.spec.name for shape in shapes]
    if not names or len(set(names)) != len(names):
        raise InvalidArgumentError(f"fields are {names}; expected one or more distinct fields", field="fields")
    if unknown := lengths.keys() - set(names):
        raise InvalidArgumentError(f"lengths contains fields {sorted(unknown)}; expected only {names}", field="lengths")
    return shapes


def _column_shape(spec: FieldSpec, row_count: int, lengths: ArrayLike | None) -> ColumnShape:
    if not spec.dtype or spec.row_shape is None or spec.layout is Layout.OBJECT:
        raise InvalidArgumentError(
            f"field {spec.name!r} is {spec.describe()}; expected a dtype and a row shape, so that its size is known",
            field="fields",
        )
    if spec.layout in _LAYOUTS:
        spec = replace(spec, layout=Layout.JAGGED if spec.ragged_dims else Layout.DENSE)
    if spec.write_once or spec.scope is not FieldScope.ROW:  # columns do not have these properties of a field
        spec = replace(spec, write_once=False, scope=FieldScope.ROW)
    if spec.layout is Layout.DENSE:
        if lengths is not None:
            raise InvalidArgumentError(
                f"field {spec.name!r} is dense but has lengths; pass lengths only for jagged fields", field="lengths"
            )
        shape = ColumnShape(
            spec=spec, row_count=row_count, extents=None, value_bytes=row_count * (fixed_row_bytes(spec) or 0)
        )
    else:
        if lengths is None:
            raise InvalidArgumentError(
                f"field {spec.name!r} is jagged but has no lengths; pass the size of each row", field="lengths"
            )
        extents = np.asarray(lengths, np.int64)
        shape = ColumnShape(
            spec=spec, row_count=row_count, extents=extents[:, None] if extents.ndim == 1 else extents, value_bytes=0
        )
        shape = replace(shape, value_bytes=int(shape.row_bytes().sum()))
    shape.validate()
    return shape


class Allocation:
    """Memory allocated for a put. It is freed when no array refers to it.

    Attributes:
        header: header of the put.
        allocated: the memory of the put, and the storage service's response.
    """

    def __init__(self, header: PutHeader, shapes: Sequence[ColumnShape], allocated: Allocated) -> None:
        self.header = header
        self.allocated = allocated
        self._shapes = shapes
        self._starts, _ = place_columns(shape.value_bytes for shape in shapes)

    def received(self) -> list[Received]:
        """Return the columns and their bytes, which keep the allocation alive."""
        mapping = self.allocated.mapping
        return [
            (shape, mapping.array(start, shape.value_bytes, self))
            for shape, start in zip(self._shapes, self._starts, strict=True)
        ]

    def holds(self, columns: Sequence[SourceColumn]) -> bool:
        """Return whether the columns are exactly those of the allocation and are stored in its memory."""
        return len(columns) == len(self._shapes) and all(
            column.spec == shape.spec
            and column.row_count == shape.row_count
            and np.array_equal(_extents(column), _extents(shape))
            and _address(column) == self.allocated.mapping.address + start
            for column, shape, start in zip(columns, self._shapes, self._starts, strict=True)
        )


def _extents(shape: ColumnShape) -> Any:
    return () if shape.extents is None else shape.extents


def _address(column: SourceColumn) -> int | None:
    """Return the address of a column's bytes, or None if the bytes are in several pieces or on a device."""
    match [chunk for chunk in column.chunks if len(chunk)]:
        case [memoryview() as view]:
            return np.frombuffer(view, np.uint8).ctypes.data
    return None


Allocations: TypeAlias = "WeakValueDictionary[int, Allocation]"
"""A client's allocations that have not been put yet, keyed by memory address."""


def take_allocation(allocations: Allocations, partition_id: str, columns: Sequence[SourceColumn]) -> Allocation | None:
    """Remove and return the allocation whose columns are exactly `columns`, or return None if no allocation matches."""
    address = _address(columns[0])
    allocation = None if address is None else allocations.get(address)
    if address is None or allocation is None:
        return None
    if allocation.header.partition_id != partition_id or not allocation.holds(columns):
        return None
    return allocations.pop(address, None)


def ordinary(shapes: Sequence[ColumnShape]) -> list[Received]:
    """Allocate columns in this process's ordinary memory and return them."""
    return [(shape, BLOCKS.take(shape.value_bytes)) for shape in shapes]
