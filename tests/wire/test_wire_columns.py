import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tq_service.errors import FieldMismatchError, InvalidArgumentError
from tq_service.schema import Encoding, FieldSpec, Layout
from tq_service.v1.metadata_pb2 import ColumnHeader
from tq_service.wire.columns import (
    MAX_ROWS,
    ColumnShape,
    decode_header,
    decode_headers,
    encode_header,
    extents_as,
    merge_specs,
)
from tq_service.wire.metadata import encode_spec

DENSE = FieldSpec("d", dtype="float32", layout=Layout.DENSE, row_shape=(2, 3))
JAGGED = FieldSpec("j", dtype="int64", layout=Layout.JAGGED, row_shape=(-1, 2))
RAGGED = FieldSpec("r", dtype="int16", layout=Layout.JAGGED, row_shape=(-1, 3, -1))
TEXT = FieldSpec("o", layout=Layout.OBJECT, row_shape=(), encoding=Encoding.TEXT)
MIXED = FieldSpec("o", layout=Layout.OBJECT, row_shape=())


def shape(spec, rows, extents, value_bytes):
    extents = None if extents is None else np.array(extents, np.int64).reshape(rows, -1)
    return ColumnShape(spec=spec, row_count=rows, extents=extents, value_bytes=value_bytes)


COLUMNS = [
    (shape(DENSE, 3, None, 72), [24, 24, 24]),
    (shape(JAGGED, 3, [1, 0, 2], 48), [16, 0, 32]),
    (shape(RAGGED, 2, [[2, 1], [1, 4]], 36), [12, 24]),
    (shape(TEXT, 2, [5, 0], 5), [5, 0]),
    (shape(MIXED, 3, [[5, 1], [0, 3], [2, 2]], 7), [5, 0, 2]),
]


@pytest.mark.parametrize(("column", "sizes"), COLUMNS)
def test_headers_come_back_and_cut_rows(column, sizes):
    back = decode_header(encode_header(column), column.row_count)
    assert back.spec == column.spec
    assert back.value_bytes == column.value_bytes
    assert back.row_bytes().tolist() == sizes
    assert back.row_offsets().tolist() == np.cumsum([0, *sizes]).tolist()


WRONG = {
    "row_count": [
        shape(DENSE, 0, None, 0), shape(DENSE, -1, None, -24), shape(DENSE, MAX_ROWS + 1, None, 24 * (MAX_ROWS + 1)),
    ],
    "value_bytes": [
        shape(DENSE, 3, None, 71), shape(JAGGED, 2, [1, 2], 47), shape(TEXT, 1, [-5], -5),
        shape(MIXED, 1, [[-5, 1]], -5), shape(TEXT, 1, [5], 6),
    ],
    "extents": [
        shape(DENSE, 3, [1, 1, 1], 72), shape(JAGGED, 2, None, 0), shape(JAGGED, 2, [-1, 2], 16),
        shape(JAGGED, 2, [[1, 1], [1, 1]], 32), shape(JAGGED, 2, [1 << 62, 1 << 62], 0),
        shape(JAGGED, 1, [1 << 60], 0), shape(RAGGED, 1, [[1 << 40, 1 << 40]], 0),
        shape(RAGGED, 1, [[1 << 62, 1 << 62]], 0), shape(TEXT, 1, [[5, 1]], 5), shape(MIXED, 1, [5], 5),
        shape(MIXED, 1, [[5, 0]], 5), shape(MIXED, 1, [[5, 4]], 5), shape(TEXT, 1, [-5], 5),
    ],
    "layout": [shape(FieldSpec("x"), 1, None, 0), shape(FieldSpec("x", "int8", Layout.AUTO, ()), 1, None, 1)],
    "row_shape_known": [shape(FieldSpec("x", "int8", Layout.DENSE), 1, None, 1)],
    "dtype": [
        shape(FieldSpec("x", layout=Layout.DENSE, row_shape=()), 1, None, 1),
        shape(FieldSpec("x", "int64", Layout.OBJECT, ()), 1, [1], 1),
    ],
    "row_shape": [
        shape(FieldSpec("x", "int64", Layout.DENSE, (-1,)), 1, None, 8),
        shape(FieldSpec("x", "int64", Layout.JAGGED, (2,)), 1, [2], 16),
        shape(FieldSpec("x", "int64", Layout.JAGGED, (-2,)), 1, [2], 16),
        shape(FieldSpec("x", "int64", Layout.DENSE, (1 << 40, 1 << 40)), 1, None, 0),
        shape(FieldSpec("x", "int64", Layout.DENSE, (1,) * 65), 1, None, 8),
        shape(FieldSpec("x", "", Layout.OBJECT, (2,)), 1, [1], 1),
    ],
}  # fmt: skip


@pytest.mark.parametrize(("field", "column"), [(field, column) for field in WRONG for column in WRONG[field]])
def test_parts_that_do_not_agree_are_refused(field, column):
    with pytest.raises(InvalidArgumentError) as caught:
        column.validate()
    assert caught.value.field == field


@given(st.binary(max_size=80), st.integers(-5, 5), st.integers(-(1 << 63), (1 << 63) - 1))
def test_hostile_headers_are_refused_or_sound(extents, rows, value_bytes):
    for spec in (DENSE, JAGGED, RAGGED, TEXT, MIXED):
        message = ColumnHeader(spec=encode_spec(spec), value_bytes=value_bytes, extents=extents)
        try:
            column = decode_header(message, rows)
        except InvalidArgumentError:
            continue
        assert int(column.row_bytes().sum()) == column.value_bytes


def test_names_must_be_unique_and_there():
    header = encode_header(COLUMNS[0][0])
    assert len(decode_headers([header], 3)) == 1
    for headers, field in (([], "columns"), ([header, header], "name")):
        with pytest.raises(InvalidArgumentError, match=r"at least one|two columns") as caught:
            decode_headers(headers, 3)
        assert caught.value.field == field


def test_jagged_specs_widen_and_others_do_not():
    twin = FieldSpec("j", dtype="int64", layout=Layout.JAGGED, row_shape=(-1, 5))
    merged = merge_specs([JAGGED, JAGGED, twin])
    assert merged.row_shape == (-1, -1)
    assert extents_as(merged, twin, np.array([[4], [1]]), 2).tolist() == [[4, 5], [1, 5]]
    with pytest.raises(FieldMismatchError, match="int64 jagged"):
        merge_specs([JAGGED, FieldSpec("j", dtype="int32", layout=Layout.JAGGED, row_shape=(-1, 2))])
    with pytest.raises(FieldMismatchError):
        merge_specs([JAGGED, FieldSpec("j", dtype="int64", layout=Layout.JAGGED, row_shape=(-1,))])
    with pytest.raises(FieldMismatchError):
        merge_specs([DENSE, FieldSpec("d", dtype="float32", layout=Layout.DENSE, row_shape=(2,))])
    # Only a field that is declared jagged takes dense rows of two shapes.
    other = merge_specs([DENSE, FieldSpec("d", dtype="float32", layout=Layout.DENSE, row_shape=(2, 4))])
    assert (other.layout, other.row_shape) == (Layout.JAGGED, (2, -1))
