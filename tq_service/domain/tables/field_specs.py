"""What the columns of a put are, and whether a field takes them."""

from __future__ import annotations

from dataclasses import dataclass, replace

from tq_service.domain.plan import Indexes
from tq_service.errors import FieldMismatchError
from tq_service.schema import FieldSpec, Layout


@dataclass(frozen=True, slots=True, kw_only=True)
class ColumnWrite:
    """One column of a put.

    Attributes:
        spec: dtype, layout and row shape of the column.
        extents: size of each row in each ragged dimension of `spec` `(n, ragged dims)`; None where it is not jagged.
        value_bytes: bytes of its values, all rows together.
    """

    spec: FieldSpec
    extents: Indexes | None = None
    value_bytes: int = 0

    @property
    def fitting_shape(self) -> tuple[int, ...]:
        """The row shape with -1 only where rows of this put differ: rows of one size fit a field of that size."""
        shape = list(self.spec.row_shape or ())
        if self.extents is not None and self.extents.size:
            for column, dim in enumerate(self.spec.ragged_dims):
                sizes = self.extents[:, column]
                if sizes.min() == sizes.max():
                    shape[dim] = int(sizes[0])
        return tuple(shape)

    def sizes(self, dim: int) -> Indexes | int:
        """Return the size of the rows in one dimension: of each `(n,)`, or of all."""
        if self.extents is not None and dim in self.spec.ragged_dims:
            return self.extents[:, self.spec.ragged_dims.index(dim)]
        return (self.spec.row_shape or ())[dim]


def merge_specs(known: FieldSpec, column: ColumnWrite) -> FieldSpec:
    """Return the spec of a field that holds the rows of a column too, or raise FieldMismatchError with both."""
    new = column.spec
    layout = known.layout or new.layout
    dtype = known.dtype or new.dtype
    if dtype != new.dtype or not _takes(layout, new.layout) or new.row_shape is None:
        raise _mismatch(known, new)
    if layout is Layout.OBJECT:
        return replace(new, layout=layout)
    shape = known.row_shape if known.row_shape is not None else new.row_shape
    if len(shape) != len(new.row_shape) or (layout is Layout.JAGGED and not shape):
        raise _mismatch(known, new)
    if layout is Layout.DENSE:
        if shape != new.row_shape:
            raise _mismatch(known, new)
        return known if known.row_shape is not None and known.layout and known.dtype else replace(new, layout=layout)
    given = new.row_shape if known.row_shape is None else column.fitting_shape
    widened = tuple(a if a == b else -1 for a, b in zip(shape, given, strict=True))
    if all(size >= 0 for size in widened):
        widened = (-1, *widened[1:])
    return replace(new, layout=layout, row_shape=widened)


def _takes(layout: Layout | None, given: Layout | None) -> bool:
    """Whether a field of `layout` takes data that came as `given`: jagged fields take rows of equal shape."""
    return layout is given or (layout is Layout.JAGGED and given is Layout.DENSE)


def _mismatch(known: FieldSpec, new: FieldSpec) -> FieldMismatchError:
    return FieldMismatchError(
        f"field {known.name!r} is {known.describe()}, got {new.describe()}; put the same dtype, layout and row shape, "
        f"or declare the field with create_partition(..., fields=[FieldSpec({known.name!r}, layout='jagged')]) before "
        f"its first put where rows differ in shape",
        field=known.name,
    )
