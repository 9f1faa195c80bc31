import math
import sys
from types import ModuleType

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from padded_rows import LENGTHS, assert_pads_like, columns_of
from tensordict import NonTensorData, NonTensorStack, TensorDict, lazy_stack

from tq_service.client.reads import decode_columns, to_tensordict
from tq_service.errors import InvalidArgumentError, UnsupportedObjectError
from tq_service.schema import DTYPE_SIZES, FieldSpec, Layout
from tq_service.wire.columns import ColumnReceiver, decode_header, encode_header, iter_frames
from tq_service.wire.encoding import encode_columns

pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf", "ignore:The PyTorch API of nested tensors")


def send(data, known=None, *, as_torch=True, frame_bytes=7):
    """Take data through headers and frames as a put and a get would."""
    columns = encode_columns(data, known)
    headers = [decode_header(encode_header(column), column.row_count) for column in columns]
    receiver = ColumnReceiver(headers)
    for parts in iter_frames((chunk for column in columns for chunk in column.chunks), frame_bytes):
        receiver.write(memoryview(b"".join(parts)))
    return decode_columns(headers, receiver.finish(), as_torch=as_torch)


def bits(tensor):
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).tolist() if tensor.numel() else []


def random_tensor(dtype, *shape):
    size = math.prod(shape) * DTYPE_SIZES[dtype]
    if dtype == "bool":
        return torch.randint(0, 2, shape).bool()
    raw = torch.randint(0, 256, (size,), dtype=torch.uint8)
    return raw.view(getattr(torch, dtype)).reshape(shape) if size else torch.empty(shape, dtype=getattr(torch, dtype))


def jagged(lengths):
    return torch.nested.nested_tensor([torch.ones(length) for length in lengths], layout=torch.jagged)


@pytest.mark.parametrize("dtype", sorted(DTYPE_SIZES))
@pytest.mark.parametrize("shape", [(4,), (3, 5), (2, 0), (3, 2, 4), (1, 1, 1, 1)])
def test_dense_comes_back_bit_for_bit(dtype, shape):
    tensor = random_tensor(dtype, *shape)
    back = send({"x": tensor})["x"]
    assert back.dtype == tensor.dtype
    assert back.shape == tensor.shape
    assert bits(back) == bits(tensor)


@pytest.mark.parametrize("dtype", sorted(DTYPE_SIZES))
@pytest.mark.parametrize(
    "shapes", [[(3,), (0,), (5,)], [(2, 3), (1, 3)], [(2, 3), (2, 1)], [(0,), (1,)], [(2, 3), (1, 4), (0, 0)]]
)
def test_jagged_comes_back_bit_for_bit(dtype, shapes):
    rows = [random_tensor(dtype, *shape) for shape in shapes]
    back = send({"x": rows})["x"]
    several = (
        len({shape[-1] for shape in shapes}) > 1 and len({shape[0] for shape in shapes}) > 1 and len(shapes[0]) > 1
    )
    assert isinstance(back, list) == several
    assert several or back.layout is torch.jagged
    for row, twin in zip(rows, back if several else back.unbind(), strict=True):
        assert twin.dtype == row.dtype
        assert twin.shape == row.shape
        assert bits(twin) == bits(row)


def test_nan_payloads_and_negative_zero_survive():
    raw = torch.tensor([0x7FC00001, 0xFFC12345 - (1 << 32), 0x80000000 - (1 << 32)], dtype=torch.int32)
    assert torch.equal(send({"x": raw.view(torch.float32)})["x"].view(torch.int32), raw)


def test_dense_shares_what_was_received_and_what_is_put():
    tensor = torch.arange(12.0).reshape(3, 4)
    (column,) = encode_columns({"x": tensor})
    tensor[0, 0] = 7.0
    assert bytes(column.chunks[0][:4]) == np.float32(7).tobytes()
    buffer = np.zeros(48, np.uint8)
    back = decode_columns([column], [buffer], as_torch=True)["x"]
    back.fill_(1.0)
    assert buffer.any()


def test_tensors_that_are_not_plain_memory():
    base = torch.arange(24.0).reshape(4, 6)
    complex_base = torch.complex(base, base + 1)
    data = {
        "t": base.t(),
        "grad": base.clone().requires_grad_().t() * 2,
        "step": base.t()[:, ::2],
        "conj": complex_base.t().conj(),
        "neg": complex_base.t().conj().imag,
        "expand": torch.ones(1, 3).expand(6, 3),
    }
    back = send(data)
    for name, tensor in data.items():
        assert torch.equal(back[name], tensor.detach()), name
        assert not back[name].requires_grad


def test_fields_with_one_pattern_of_lengths_can_be_added():
    lengths = [3, 0, 5]
    back = send(
        {
            "a": [torch.full((n,), 1.0) for n in lengths],
            "b": [torch.full((n,), 2.0) for n in lengths],
            "c": [torch.ones(1, n) for n in lengths],
        }
    )
    assert (back["a"] + back["b"]).values().tolist() == [3.0] * 8
    assert back["a"].offsets() is back["c"].offsets()


@pytest.mark.parametrize("equal", [False, True])
def test_lists_of_arrays_are_jagged_where_they_differ(equal):
    rows = [np.arange(3), np.arange(3 if equal else 4)]
    assert send({"x": rows})["x"].is_nested is not equal
    assert send({"x": [torch.from_numpy(row) for row in rows]})["x"].is_nested is not equal
    back = send({"x": rows}, as_torch=False)["x"]
    assert [row.tolist() for row in back] == [row.tolist() for row in rows]


def test_nested_tensors_of_every_form():
    rows = [torch.arange(6.0).reshape(2, 3), torch.arange(12.0).reshape(4, 3)]
    jagged = torch.nested.nested_tensor(rows, layout=torch.jagged)
    forms = {
        "jagged": (jagged, rows),
        "strided": (torch.nested.nested_tensor(rows, layout=torch.strided), rows),
        "transposed": (jagged.transpose(1, 2), [row.t() for row in rows]),
        "narrow": (
            torch.nested.narrow(
                torch.arange(20.0).reshape(2, 10), 1, torch.tensor([1, 4]), torch.tensor([2, 3]), layout=torch.jagged
            ),
            [torch.arange(1.0, 3.0), torch.arange(14.0, 17.0)],
        ),
        "window": (
            torch.nested.nested_tensor_from_jagged(torch.arange(10.0), torch.tensor([2, 4, 9])),
            [torch.arange(2.0, 4.0), torch.arange(4.0, 9.0)],
        ),
        "grad": (torch.nested.nested_tensor(rows, layout=torch.jagged, requires_grad=True), rows),
    }
    back = send({name: nested for name, (nested, _) in forms.items()})
    for name, (_, expected) in forms.items():
        assert all(map(torch.equal, back[name].unbind(), expected)), name


def test_nested_tensors_with_equal_rows_stay_jagged():
    nested = torch.nested.nested_tensor([torch.ones(2, 3), torch.ones(2, 3)], layout=torch.jagged).transpose(1, 2)
    back = send({"x": nested})["x"]
    assert back.layout is torch.jagged
    assert [tuple(row.shape) for row in back.unbind()] == [(3, 2), (3, 2)]


@pytest.mark.parametrize("name", LENGTHS)
def test_nested_tensors_are_padded_to_their_longest_row(name):
    data = columns_of(LENGTHS[name])
    back = send(data)
    for field, put in data.items():
        assert_pads_like(back[field], list(put.unbind()))
        assert back[field].offsets() is back["tokens"].offsets()
    assert torch.equal(back["position_ids"].to_padded_tensor(0), data["position_ids"].to_padded_tensor(0))


def test_large_rows_travel_without_being_put_together():
    rows = [torch.ones(40_000), torch.ones(30_000)]
    (column,) = encode_columns({"x": rows})
    assert len(column.chunks) == 2


def test_scalars_numbers_and_mixed_lists():
    back = send(
        {
            "i": [1, 2],
            "f": [0.1, 2],
            "b": [True, False],
            "t": [torch.tensor(1.5), torch.tensor(2.5)],
            "np": [np.float16(1), np.float16(2)],
            "big": [1, 2**70],
            "mixed": [True, 2],
            "none": [None, 1],
        }
    )
    assert back["i"].dtype is torch.int64
    assert back["f"].tolist() == [0.1, 2.0]
    assert back["b"].dtype is torch.bool
    assert back["t"].tolist() == [1.5, 2.5]
    assert back["np"].dtype is torch.float16
    assert back["big"] == [1, 2**70]
    assert back["mixed"] == [True, 2]
    assert back["none"] == [None, 1]


@pytest.mark.filterwarnings("ignore:ComplexHalf")
@pytest.mark.parametrize("dtype", sorted(DTYPE_SIZES))
@pytest.mark.parametrize("shape", [(1,), (1, 1), (1, 1, 1)])
def test_one_value_with_any_stride(dtype, shape):
    """Such as `values[:, -1]` of one trajectory: torch counts it as contiguous, whatever its stride."""
    many = random_tensor(dtype, 2, 10)
    value = many[1:, 7].as_strided(shape, (10,) * len(shape))
    assert value.is_contiguous()
    nested = torch.nested.nested_tensor_from_jagged(value.as_strided((1,), (10,)), torch.tensor([0, 1]))
    back = send({"x": value, "l": [value], "o": NonTensorStack(value), "n": nested})
    for row in (back["x"], back["l"][0], back["o"][0], back["n"].values()):
        assert bits(row) == bits(many[1, 7:8])
    assert back["o"][0].shape == value.shape


def test_a_row_of_one_value_among_large_ones_has_any_stride():
    large = torch.arange(1 << 17)
    (back,) = send({"x": [large, torch.arange(20).reshape(2, 10)[:1, 3]]}, frame_bytes=1 << 20).values()
    assert [row.tolist() for row in back.unbind()] == [large.tolist(), [3]]


def test_declared_layouts():
    back = send({"y": ["a", "b"], "z": [1, 2]}, {"z": FieldSpec("z", layout="object")})
    assert back == {"y": ["a", "b"], "z": [1, 2]}


def test_tensordict_there_and_back():
    objects = [{"t": 1, "l": [1, [2]]}, "text", None]
    data = to_tensordict(
        send(
            {
                "d": torch.ones(3, 2),
                "s": [1.0, 2.0, 3.0],
                "j": [torch.ones(1), torch.ones(0), torch.ones(2)],
                "o": objects,
                "same": [["a"], ["a"], ["a"]],
                "nd": [torch.ones(1, 2), torch.ones(2, 1), torch.ones(0, 0)],
            }
        ),
        3,
    )
    assert isinstance(data, TensorDict)
    assert data.batch_size == torch.Size([3])
    again = to_tensordict(send(data), 3)
    for batch in (data, again):
        assert isinstance(batch["o"], list)
        assert batch["o"] == objects
        assert batch["same"] == [["a"]] * 3
        assert batch["j"].layout is torch.jagged
        assert [tuple(row.shape) for row in batch["nd"]] == [(1, 2), (2, 1), (0, 0)]
    assert data[1:]["o"] == objects[1:]


VALUES = [
    ["calc"],
    ["a", "b"],
    [7, 8],
    [[1], []],
    [],
    ("a", "b"),
    np.arange(2.0),
    np.array(["a"]),
    {"k": [1]},
    None,
    "a",
]


@pytest.mark.parametrize("value", VALUES)
@pytest.mark.parametrize("row_count", [1, 2, 3])
def test_non_tensor_data_is_one_value_for_all_rows_as_tensordict_has_it(value, row_count):
    row = TensorDict({"x": NonTensorData(value), "n": torch.tensor(1)}, batch_size=[])
    batch = TensorDict({"n": torch.arange(row_count)}, batch_size=[row_count])
    forms = {
        "set": batch.clone().set_non_tensor("x", value),
        "given": TensorDict({"x": NonTensorData(value)}, batch_size=[row_count]),
        "expanded": row.expand(row_count),
        "stacked": torch.stack([row] * row_count),
        "lazy": lazy_stack([row] * row_count).contiguous(),
        "rebatched": row[None].expand(row_count).view(row_count),
        "captured": TensorDict({"x": NonTensorData(value, batch_size=[row_count])}, batch_size=[row_count]),
    }
    for name, data in forms.items():
        back = send(data)["x"]
        if isinstance(value, np.ndarray) and value.dtype.kind == "U" and len(value) == row_count:
            assert back == value.tolist()  # as TensorDict({"x": array}) has it
        else:
            assert repr(back) == repr(data.get("x").tolist()) == repr([value] * row_count), name


def test_arrays_of_objects_and_texts_in_a_tensordict_are_one_item_a_row():
    texts, objects = np.array(["a", "b", "c"]), np.array(["a", None, 3], dtype=object)
    back = send(TensorDict({"texts": texts, "objects": objects, "tuple": ("a", "b", "c")}, batch_size=[3]))
    assert back == {"texts": ["a", "b", "c"], "objects": ["a", None, 3], "tuple": ["a", "b", "c"]}


def test_non_tensor_data_without_a_batch_dimension_is_a_column():
    for rows in (["a", "b"], ("a", "b"), np.array(["a", "b"])):
        assert send({"x": NonTensorData(rows)})["x"] == ["a", "b"]


@pytest.mark.parametrize("rows", [["a", "b"], [1.5, 2.5], [[1, 2], [3]], [None, {"a": 1}], [torch.ones(2)] * 2])
def test_non_tensor_data_in_a_list_is_what_it_holds(rows):
    stack = NonTensorStack(*map(NonTensorData, rows))
    for values in ([NonTensorData(row) for row in rows], [stack[0], stack[1]], [NonTensorData(rows[0]), rows[1]]):
        (column,) = encode_columns({"x": values})
        assert column.spec.layout is Layout.OBJECT
        assert repr(send({"x": values})["x"]) == repr(rows)


NUMBERS = [1, 0, 2]
ROWS_OF_TENSORS = [torch.ones(2), torch.zeros(2), torch.ones(2)]


@pytest.mark.parametrize("rows", [NUMBERS, [0.5, 1, True], [2, None, 3], ROWS_OF_TENSORS, [np.float32(1)] * 3])
@pytest.mark.parametrize("hold", ["stack", "array", "leaf"])
def test_objects_stay_objects_whatever_they_are(hold, rows):
    array = np.empty(3, object)
    for position, row in enumerate(rows):
        array[position] = row
    held = {"stack": NonTensorStack(*rows), "array": array, "leaf": array}[hold]
    data = {"x": held} if hold == "array" else TensorDict({"x": held}, batch_size=[3])
    (column,) = encode_columns(data)
    assert column.spec.layout is Layout.OBJECT
    back = send(data)["x"]
    assert repr(back) == repr(rows)
    assert repr(send(to_tensordict({"x": back}, 3))["x"]) == repr(rows)


def fake_tensor():
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        return torch.ones(2, 3)


class DTensor(torch.Tensor):
    """Stands for torch's, which needs a process group."""

    @staticmethod
    def __new__(cls):
        return torch.Tensor._make_wrapper_subclass(cls, (2, 3))

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        return args[0] if func is torch.ops.aten.detach.default else NotImplemented

    def full_tensor(self):
        return torch.ones(2, 3)


@pytest.mark.parametrize(("made", "hint"), [(fake_tensor, "FakeTensor"), (DTensor, r"DTensor.*full_tensor\(\)")])
def test_tensors_without_values_here_are_refused_by_name(made, hint):
    value = made()
    for column in (value, [value] * 2, [value, torch.ones(2, 3)]):
        with pytest.raises(InvalidArgumentError, match=f"field 'x' .*{hint}"):
            encode_columns({"x": column})
    with pytest.raises(UnsupportedObjectError, match=rf"x\[0\]\['a'\] is .*{hint}"):
        encode_columns({"x": [{"a": value}]})


def nested_of(values, offsets, lengths=None, ragged=1):
    lengths = None if lengths is None else torch.tensor(lengths)
    nested = torch.nested.nested_tensor_from_jagged(values, torch.tensor(offsets), lengths)
    nested._ragged_idx = ragged
    return nested


@pytest.mark.parametrize(
    "made",
    [
        lambda: nested_of(torch.ones(4, 12), [0, 5, 12]),
        lambda: nested_of(torch.ones(8, 5), [0, 4, 8], ragged=2),
        lambda: nested_of(torch.ones(10), [0, 3, 12]),
        lambda: nested_of(torch.ones(10), [0, 6, 3]),
        lambda: nested_of(torch.ones(10), [-2, 3, 5]),
        lambda: nested_of(torch.ones(5), [0, 2, 4], [3, 3]),
        lambda: nested_of(torch.ones(10), [0, 2, 4], [-1, 2]),
    ],
)
def test_nested_tensors_whose_parts_disagree_are_refused_by_name(made):
    with pytest.raises(InvalidArgumentError, match=r"field 'x' is a nested tensor with values of shape .* offsets"):
        encode_columns({"x": made()})


def test_rows_of_a_nested_tensor_may_overlap():
    back = send({"x": nested_of(torch.arange(10), [0, 2, 4], [3, 3])})["x"]
    assert [row.tolist() for row in back.unbind()] == [[0, 1, 2], [2, 3, 4]]


def test_arrays_of_objects_of_several_dimensions_are_put_row_by_row():
    rows = np.array([["a", None], [1, {"b": 2}]], dtype=object)
    for data in ({"x": rows}, TensorDict({"x": rows}, batch_size=[2])):
        back = send(data)["x"]
        assert [row.tolist() for row in back] == rows.tolist()
        assert {row.dtype for row in back} == {np.dtype(object)}


def test_objects_of_a_field_known_to_hold_tensors_are_tensors():
    numbers, tensors = NonTensorStack(*NUMBERS), NonTensorStack(*ROWS_OF_TENSORS)
    assert send({"x": numbers}, {"x": FieldSpec("x", layout="dense")})["x"].tolist() == NUMBERS
    assert [row.tolist() for row in send({"x": tensors}, {"x": FieldSpec("x", layout="jagged")})["x"]] == [
        [1, 1],
        [0, 0],
        [1, 1],
    ]


@pytest.mark.parametrize("value", ["abc", {"a": 1}, None, 5, np.array(3)])
def test_one_value_for_all_rows_needs_a_number_of_rows(value):
    with pytest.raises(InvalidArgumentError, match=r"'x' is NonTensorData with one .* its number of rows is unknown"):
        encode_columns({"x": NonTensorData(value)})
    assert send({"x": NonTensorData(value, batch_size=[2])})["x"] == [value] * 2


LISTS = [
    ([[1, 2, 3], [4]], "int64", Layout.JAGGED, (-1,)),
    ([[1, 2], [3, 4]], "int64", Layout.DENSE, (2,)),
    ([[1], []], "int64", Layout.JAGGED, (-1,)),
    ([[0.5], [1, 2]], "float64", Layout.JAGGED, (-1,)),
    ([[True, False], [True]], "bool", Layout.JAGGED, (-1,)),
    ([[np.float32(0.1)], [np.float32(2), np.float32(3)]], "float32", Layout.JAGGED, (-1,)),
]


@pytest.mark.parametrize(("rows", "dtype", "layout", "shape"), LISTS)
def test_lists_of_numbers_are_rows_of_a_tensor(rows, dtype, layout, shape):
    (column,) = encode_columns({"x": rows})
    assert column.spec == FieldSpec("x", dtype, layout, shape)
    assert [row.tolist() for row in send({"x": rows})["x"].unbind()] == [list(row) for row in rows]
    assert send({"x": rows}, {"x": FieldSpec("x", layout="object")})["x"] == rows


OTHER_LISTS = [
    [[], []], [[1], None], [["a"], [1]], [[1], (2,)], [(1,), (2, 3)], [[True, 2], [3]], [[2**63], [1]], [[[1], [2, 3]]],
    [[[1, 2], [3, 4]]], [[1, [2]], [3]], [[torch.tensor(1)], []], [[2**53 + 1], [0.5]], [[None], [1.0]],
]  # fmt: skip


@pytest.mark.parametrize("rows", OTHER_LISTS)
def test_other_lists_are_objects(rows):
    (column,) = encode_columns({"x": rows})
    assert column.spec.layout is Layout.OBJECT
    assert repr(send({"x": rows})["x"]) == repr(rows)


@pytest.mark.parametrize(
    ("rows", "known", "shape"),
    [
        ([[], []], FieldSpec("x", "float32", Layout.JAGGED, (-1,)), (0,)),
        ([[], []], FieldSpec("x", layout="jagged"), (0,)),
        ([[], []], FieldSpec("x", "bfloat16", Layout.JAGGED, (-1, 3)), (0, 3)),
        ([[[1, 2], [3, 4]], [[5, 6]]], FieldSpec("x", "int64", Layout.DENSE, (2, 2)), (-1, 2)),
        ([[[1, 2], [3, 4]], []], FieldSpec("x", layout="jagged"), (-1, 2)),
        ([[[1, 2], [3, 4]], [[], []]], FieldSpec("x", layout="jagged"), (2, -1)),
    ],
)
def test_lists_that_do_not_say_it_are_tensors_in_a_field_of_tensors(rows, known, shape):
    (column,) = encode_columns({"x": rows}, {"x": known})
    assert (column.spec.dtype, column.spec.row_shape) == (known.dtype or "int64", shape)
    back = send({"x": rows}, {"x": known})["x"]
    assert [row.tolist() for row in back] == rows or not sum(map(len, rows))


def test_nested_lists_without_a_shape_are_objects_in_any_field():
    for rows in ([[[1], [2, 3]]], [[1], [[2]]], [[[1]], [["a"]]]):
        (column,) = encode_columns({"x": rows}, {"x": FieldSpec("x", layout="jagged")})
        assert column.spec.layout is Layout.OBJECT


@given(
    st.one_of(
        st.lists(st.lists(st.integers(-(2**63), 2**63 - 1)), min_size=1),
        st.lists(st.lists(st.floats(width=64)), min_size=1),
        st.lists(st.lists(st.booleans()), min_size=1),
        st.lists(st.lists(st.one_of(st.integers(), st.floats(), st.booleans(), st.none(), st.text(max_size=2)))),
    )
)
def test_any_lists_come_back(rows):
    if not rows:
        return
    back = send({"x": rows})["x"]
    exact = [row.tolist() for row in back] if isinstance(back, torch.Tensor) else back
    wanted = [list(map(float, row)) for row in rows] if getattr(back, "dtype", None) is torch.float64 else rows
    assert repr(exact) == repr(wanted)


def test_lazy_stacks_of_rows_of_different_length():
    stack = lazy_stack([TensorDict({"x": torch.ones(2), "s": "a"}), TensorDict({"x": torch.ones(3), "s": "b"})])
    back = send(stack)
    assert [len(row) for row in back["x"].unbind()] == [2, 3]
    assert back["s"] == ["a", "b"]


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({}, "no fields"),
        (5, "int"),
        ({"a": torch.zeros(0, 3)}, "0 rows"),
        ({"a": []}, "0 rows"),
        ({"a": torch.zeros(2), "b": torch.zeros(3)}, "'a' has 2 rows, but field 'b' has 3"),
        ({"a": torch.tensor(1)}, "scalar"),
        ({"a": "text"}, "str"),
        ({"": [1]}, "name"),
        ({1: [1]}, "name"),
        ({"a": [torch.ones(1), torch.ones(1, 1)]}, "dimensions"),
        ({"a": [torch.ones(1), torch.ones(1).int()]}, "one dtype"),
        ({"a": torch.eye(2).to_sparse()}, "to_dense"),
        ({"a": [torch.eye(2).to_sparse()] * 2}, "'a' has layout torch.sparse_coo.*to_dense"),
        ({"a": torch.ones(2, device="meta")}, "'a' has tensors on the device 'meta'"),
        ({"a": [torch.ones(2, device="meta"), torch.ones(3)]}, "'a' has tensors on the device 'meta'"),
        ({"a": [jagged([1, 2]), jagged([2, 1])]}, "'a' has nested tensors as rows"),
        ({"a": np.ma.array([1, 2], mask=[0, 1])}, "'a' has a masked array, whose mask would be lost"),
        ({"a": [np.ma.array([1, 2], mask=[0, 1])] * 2}, "'a' has a masked array"),
        ({"a": [np.ma.array([1, 2], mask=[0, 1]), torch.ones(2)]}, "'a' has a masked array"),
        ({"a": [np.ones(2, np.longdouble), torch.ones(2)]}, "'a' has dtype 'float128'"),
        ({"a\ud800": [1]}, "not valid Unicode"),
        ({"a": np.array(["2020-01-01"], "datetime64[D]")}, "datetime64"),
        ({"a": TensorDict({"b": torch.ones(2)}, batch_size=[2])}, "nested TensorDict"),
        (TensorDict({"b": torch.ones(2)}, batch_size=[]), "batch_size"),
    ],
)
@pytest.mark.filterwarnings("ignore:.*nested tensors is in prototype stage")
def test_wrong_data_is_refused(data, message):
    with pytest.raises(InvalidArgumentError, match=message):
        encode_columns(data)


def test_arrays_of_any_byte_order_are_rows_beside_tensors():
    back = send({"x": [np.arange(3, dtype=">i8"), torch.arange(2)]})["x"]
    assert [row.tolist() for row in back.unbind()] == [[0, 1, 2], [0, 1]]


def test_objects_are_refused_with_field_and_row():
    with pytest.raises(UnsupportedObjectError, match=r"text\[1\]\['meta'\]"):
        encode_columns({"text": ["a", {"meta": object()}]})


def test_numpy_needs_no_torch_and_knows_what_only_torch_has(monkeypatch):
    monkeypatch.delitem(sys.modules, "torch")
    data = {
        "x": np.arange(6, dtype=">f4").reshape(2, 3),
        "y": [np.ones(1), np.ones(2)],
        "s": np.array(["a", "b"]),
        "o": [{"k": np.ones(2)}, 1],
    }
    back = send(data, as_torch=False)
    assert back["x"].tolist() == data["x"].tolist()
    assert back["s"] == ["a", "b"]
    monkeypatch.undo()
    with pytest.raises(InvalidArgumentError, match=r"tq-service\[data\]"):
        send({"x": torch.zeros(2, dtype=torch.bfloat16)}, as_torch=False)


def test_arrays_are_put_while_another_thread_imports_torch(monkeypatch):
    for name in ("torch", "tensordict"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    assert [column.spec.name for column in encode_columns({"x": np.arange(2), "o": ["a", {}]})] == ["x", "o"]


@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3), st.integers(0, 2)), min_size=1, max_size=6),
    st.integers(1, 3),
)
def test_rows_of_any_shapes(shapes, dims):
    rows = [torch.rand(shape[:dims]) for shape in shapes]
    back = send({"x": rows})["x"]
    twins = back if isinstance(back, list) else back.unbind()
    assert all(map(torch.equal, twins, rows))
    assert all(twin.shape == row.shape for twin, row in zip(twins, rows, strict=True))
