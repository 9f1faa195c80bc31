"""Specs of fields: which columns a field takes, and what it is afterwards."""

import pytest

from tq_service.domain.tables.cells import ColumnWrite, merge_specs
from tq_service.errors import FieldMismatchError
from tq_service.schema import FieldSpec, Layout

D, J, OBJECT = Layout.DENSE, Layout.JAGGED, Layout.OBJECT


def spec(layout=None, shape=None, dtype="int64"):
    return FieldSpec("x", dtype=dtype, layout=layout, row_shape=shape)


@pytest.mark.parametrize(
    ("known", "new", "layout", "shape"),
    [
        (FieldSpec("x"), spec(D, (3,)), D, (3,)),
        (FieldSpec("x"), spec(D, ()), D, ()),
        (FieldSpec("x"), spec(J, (-1, 4)), J, (-1, 4)),
        (FieldSpec("x"), spec(OBJECT, (), ""), OBJECT, ()),
        (spec(D, (3,)), spec(D, (3,)), D, (3,)),
        (spec(D), spec(D, (3,)), D, (3,)),
        (FieldSpec("x", layout=J), spec(D, (5,)), J, (-1,)),
        (spec(J, (-1,)), spec(D, (5,)), J, (-1,)),
        (spec(J, (-1, 4)), spec(D, (5, 6)), J, (-1, -1)),
        (spec(J, (3, -1)), spec(D, (3, 7)), J, (3, -1)),
        (spec(J, (-1, 4)), spec(J, (-1, 4)), J, (-1, 4)),
        (spec(J, (-1, 4)), spec(J, (-1, 5)), J, (-1, -1)),
        (spec(J, (3, -1)), spec(J, (-1, 3)), J, (-1, -1)),
    ],
)
def test_specs_that_merge(known, new, layout, shape):
    merged = merge_specs(known, ColumnWrite(spec=new))
    assert (merged.name, merged.dtype, merged.layout, merged.row_shape) == ("x", new.dtype, layout, shape)


@pytest.mark.parametrize(
    ("known", "new"),
    [
        (spec(D, (3,)), spec(D, (4,))),
        (spec(D, (3,)), spec(D, (3, 1))),
        (spec(D, (3,)), spec(D, (3,), "int32")),
        (spec(D, (3,)), spec(J, (-1,))),
        (spec(J, (-1,)), spec(J, (-1, 2))),
        (spec(J, (-1,)), spec(D, ())),
        (FieldSpec("x", layout=J), spec(D, ())),
        (spec(J, (-1,)), spec(OBJECT, (), "")),
        (spec(OBJECT, (), ""), spec(D, (3,))),
        (FieldSpec("x"), spec(D, None)),
    ],
)
def test_specs_that_do_not_merge(known, new):
    with pytest.raises(FieldMismatchError, match=r"is .* got .*declare"):
        merge_specs(known, ColumnWrite(spec=new))
