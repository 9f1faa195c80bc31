"""The words every layer shares: layouts, states, dtypes and the description of a field."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from tq_service.errors import InvalidArgumentError


class Layout(StrEnum):
    """How the rows of a field are laid out."""

    DENSE = "dense"
    JAGGED = "jagged"
    OBJECT = "object"


class SampleState(StrEnum):
    """What may happen with a sample: `failed` is final."""

    LIVE = "live"
    HELD = "held"
    FAILED = "failed"


BatchUnit = Literal["sample", "group"]
KeyMode = Literal["upsert", "new", "existing"]
MetaValue = int | float | bool | str

# Bytes of one element by torch's name of the dtype. Sub-byte dtypes have no per-row byte boundary and are left out.
DTYPE_SIZES: dict[str, int] = {
    "bool": 1, "uint8": 1, "int8": 1, "float8_e4m3fn": 1, "float8_e5m2": 1, "float8_e4m3fnuz": 1, "float8_e5m2fnuz": 1,
    "float8_e8m0fnu": 1, "uint16": 2, "int16": 2, "float16": 2, "bfloat16": 2,
    "uint32": 4, "int32": 4, "float32": 4, "complex32": 4,
    "uint64": 8, "int64": 8, "float64": 8, "complex64": 8, "complex128": 16,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class FieldSpec:
    """A column: its name, dtype, layout and the shape of its rows.

    Attributes:
        name: unique in the partition.
        dtype: torch's name of the dtype ("float32", "bfloat16"); "" for objects, or left to the first put.
        layout: dense, jagged or object; None leaves it to the first put.
        row_shape: shape of one row, -1 in ragged dimensions, () for scalars; None leaves it to the first put.
    """

    name: str
    dtype: str = ""
    layout: Layout | None = None
    row_shape: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        if not self.name:
            raise InvalidArgumentError("a field has an empty name; give every field a name", field="name")
        if self.layout is not None:
            try:
                object.__setattr__(self, "layout", Layout(self.layout))
            except ValueError:
                raise InvalidArgumentError(
                    f"field {self.name!r}: layout {self.layout!r} is unknown; use one of "
                    f"{', '.join(layout.value for layout in Layout)}",
                    field="layout",
                ) from None
        if self.dtype and self.dtype not in DTYPE_SIZES:
            raise InvalidArgumentError(
                f"field {self.name!r}: dtype {self.dtype!r} is unknown; use torch's name of the dtype, one of "
                f"{', '.join(sorted(DTYPE_SIZES))}",
                field="dtype",
            )
        if self.row_shape is not None:
            object.__setattr__(self, "row_shape", tuple(int(size) for size in self.row_shape))

    @property
    def itemsize(self) -> int:
        """Bytes of one element; 1 for objects."""
        return DTYPE_SIZES[self.dtype] if self.dtype else 1

    @property
    def ragged_dims(self) -> tuple[int, ...]:
        """Dimensions of a row that differ between rows."""
        return tuple(dim for dim, size in enumerate(self.row_shape or ()) if size < 0)

    def describe(self) -> str:
        """Return the spec as it appears in messages, such as `int64 jagged (-1,)`."""
        shape = "any shape" if self.row_shape is None else str(self.row_shape)
        return f"{self.dtype or 'any dtype'} {self.layout or 'any layout'} {shape}"


@dataclass(frozen=True, slots=True, kw_only=True)
class MetaColumn:
    """One custom_meta column over some samples.

    Attributes:
        name: name of the column.
        values: `(n,)` of dtype int64, float64, bool or object (str); whatever where not present.
        present: `(n,)`, whether the sample has a value.
    """

    name: str
    values: NDArray[Any]
    present: NDArray[np.bool_]
