"""Specs of fields: which columns a field takes, and what it is afterwards."""

import numpy as np
import pytest

from tq_service.errors import FieldMismatchError
from tq_service.schema import FieldSpec, Layout
from tq_service.state.cells import ColumnWrite, merge_specs

AUTO, D, J, OBJECT = Layout.AUTO, Layout.DENSE, Layout.JAGGED, Layout.OBJECT


def spec(layout=None, shape=None, dtype="int64"):
    return FieldSpec("x", dtype=dtype, layout=layout, row_shape=shape)


def alike(shape, given):
    """Return a column that comes jagged, whose two rows are alike."""
    sizes = [size for size, of_spec in zip(shape, given, strict=True) if of_spec < 0]
    return ColumnWrite(spec=spec(J, given), extents=np.array([sizes, sizes]))


@pytest.mark.parametrize(
    ("declared", "known", "new", "layout", "shape"),
    [
        (AUTO, FieldSpec("x"), spec(D, (3,)), D, (3,)),
        (AUTO, FieldSpec("x"), spec(D, ()), D, ()),
        (AUTO, FieldSpec("x"), spec(J, (-1, 4)), J, (-1, 4)),
        (AUTO, FieldSpec("x"), spec(OBJECT, (), ""), OBJECT, ()),
        (AUTO, FieldSpec("x", layout=AUTO), spec(OBJECT, (), ""), OBJECT, ()),
        (OBJECT, FieldSpec("x", layout=OBJECT), spec(OBJECT, (), ""), OBJECT, ()),
        (AUTO, FieldSpec("x", layout=AUTO, row_shape=(3, 2)), spec(D, (3, 5)), J, (3, -1)),
        (AUTO, spec(None, (3, -1)), spec(D, (3, 5)), J, (3, -1)),
        (AUTO, spec(D, (3,)), spec(D, (3,)), D, (3,)),
        (AUTO, spec(D, (3,)), spec(D, (4,)), J, (-1,)),
        (AUTO, spec(D, (3, 7)), spec(D, (3, 9)), J, (3, -1)),
        (AUTO, spec(D, (3, 7)), spec(D, (4, 9)), J, (-1, -1)),
        (AUTO, spec(D, (3, 7)), spec(J, (3, -1)), J, (3, -1)),
        (AUTO, spec(D, (3,)), spec(J, (-1,)), J, (-1,)),
        (AUTO, FieldSpec("x"), alike((3, 7), (-1, 7)), J, (3, 7)),  # as torch nests equal rows
        (AUTO, FieldSpec("x"), alike((3, 7), (3, -1)), J, (3, -1)),
        (AUTO, FieldSpec("x"), alike((3, 4, 7), (-1, 4, 7)), J, (3, 4, 7)),
        (AUTO, FieldSpec("x"), alike((3, 7), (-1, -1)), J, (3, -1)),
        (AUTO, FieldSpec("x"), alike((7,), (-1,)), J, (-1,)),
        (J, FieldSpec("x"), alike((3, 7), (-1, 7)), J, (3, 7)),
        (J, FieldSpec("x", layout=J), alike((3, 7), (-1, 7)), J, (3, 7)),
        (AUTO, spec(D, (3, 7)), alike((3, 7), (-1, 7)), J, (3, 7)),
        (AUTO, spec(J, (3, 7)), alike((3, 9), (-1, 9)), J, (3, -1)),
        (AUTO, spec(J, (3, 7)), alike((4, 7), (-1, 7)), J, (-1, 7)),
        (AUTO, spec(J, (3, 7)), alike((3, 7), (3, -1)), J, (3, -1)),
        (AUTO, spec(J, (3, -1)), alike((3, 7), (-1, 7)), J, (3, -1)),
        (AUTO, spec(D, (3, 7)), alike((3, 7), (3, -1)), J, (3, -1)),
        (AUTO, spec(D, (3, 7)), alike((3, 9), (-1, 9)), J, (3, -1)),
        (AUTO, spec(J, (-1,)), spec(D, (5,)), J, (-1,)),
        (D, spec(D), spec(D, (3,)), D, (3,)),
        (D, FieldSpec("x"), spec(D, (3,)), D, (3,)),
        (J, FieldSpec("x"), spec(D, (5,)), J, (5,)),
        (J, FieldSpec("x", layout=J), spec(D, (3, 7)), J, (3, 7)),
        (J, spec(J, (3, 7)), spec(D, (3, 9)), J, (3, -1)),
        (J, spec(J, (3, 7)), alike((3, 7), (3, -1)), J, (3, -1)),
        (J, spec(J, (-1, 4)), spec(D, (5, 6)), J, (-1, -1)),
        (J, spec(J, (3, -1)), spec(D, (3, 7)), J, (3, -1)),
        (J, spec(J, (-1, 4)), spec(J, (-1, 4)), J, (-1, 4)),
        (J, spec(J, (-1, 4)), spec(J, (-1, 5)), J, (-1, -1)),
        (J, spec(J, (3, -1)), spec(J, (-1, 3)), J, (-1, -1)),
        (J, spec(J, (3, -1)), alike((3, 8), (-1, 8)), J, (3, -1)),
    ],
)
def test_specs_that_merge(declared, known, new, layout, shape):
    column = new if isinstance(new, ColumnWrite) else ColumnWrite(spec=new)
    merged = merge_specs(known, column, declared)
    assert (merged.name, merged.dtype, merged.layout, merged.row_shape) == ("x", column.spec.dtype, layout, shape)
    assert merge_specs(merged, column, declared) == merged  # what says nothing new makes no other


@pytest.mark.parametrize(
    ("declared", "known", "new", "remedy"),
    [
        (D, spec(D, (3,)), spec(D, (4,)), "put rows of one shape, or declare"),
        (D, spec(D, (3,)), spec(J, (-1,)), "put rows of one shape, or declare"),
        (D, spec(D, (3, 7)), alike((3, 7), (3, -1)), "put rows of one shape, or declare"),
        (AUTO, spec(D, (3,)), spec(D, (3, 1)), "same number of dimensions"),
        (AUTO, spec(D, ()), spec(D, (3,)), "same number of dimensions"),
        (AUTO, spec(D, (1,)), spec(D, ()), "same number of dimensions"),
        (J, spec(J, (-1,)), spec(J, (-1, 2)), "same number of dimensions"),
        (J, spec(J, (-1,)), spec(D, ()), "same number of dimensions"),
        (J, FieldSpec("x", layout=J), spec(D, ()), "one or more dimensions"),
        (AUTO, spec(D, (3,)), spec(D, (3,), "int32"), "convert the rows"),
        (AUTO, FieldSpec("x", dtype="int64"), spec(D, (3,), "int32"), "convert the rows"),
        (AUTO, spec(J, (-1,)), spec(OBJECT, (), ""), "the field contains tensors.*lists of numbers"),
        (AUTO, FieldSpec("x", dtype="int64"), spec(OBJECT, (), ""), "the field contains tensors.*lists of numbers"),
        (J, FieldSpec("x", layout=J), spec(OBJECT, (), ""), "the field contains tensors.*lists of numbers"),
        (AUTO, spec(OBJECT, (), ""), spec(D, (3,)), "the field contains objects.*as a list"),
        (OBJECT, FieldSpec("x", layout=OBJECT), spec(D, (3,)), "the field contains objects.*as a list"),
        (AUTO, FieldSpec("x"), spec(D, None), "row shape"),
    ],
)
def test_specs_that_do_not_merge(declared, known, new, remedy):
    column = new if isinstance(new, ColumnWrite) else ColumnWrite(spec=new)
    with pytest.raises(FieldMismatchError, match=rf"is .* got .*{remedy}"):
        merge_specs(known, column, declared)
