import collections
import datetime
import enum
import math
import struct
import typing

import msgpack
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from one_object import encode_object
from tensordict import TensorDict

from tq_service.errors import InvalidArgumentError, UnsupportedObjectError
from tq_service.wire.objects import decode_object, encode_objects

SCALARS = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.complex_numbers(allow_nan=False)
    | st.text(st.characters(exclude_categories=()))
    | st.binary()
)
KEYS = st.recursive(SCALARS, lambda inner: st.lists(inner, max_size=3).map(tuple), max_leaves=4)
OBJECTS = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.dictionaries(KEYS, inner, max_size=4)
        | st.sets(SCALARS, max_size=3)
        | st.frozensets(SCALARS, max_size=3)
    ),
    max_leaves=12,
)


@given(OBJECTS)
def test_objects_come_back_equal_and_of_the_same_types(value):
    back = decode_object(encode_object(value))
    assert back == value
    assert repr(back) == repr(value) or isinstance(value, (set, frozenset, dict, list, tuple))
    assert type(back) is type(value)


@pytest.mark.parametrize("value", [2**63, -(2**63), -(2**63) - 1, 2**64, 2**64 - 1, 10**400, -(10**400), 255 - 2**200])
def test_integers_of_any_size(value):
    assert decode_object(encode_object({"n": [value]})) == {"n": [value]}


def test_floats_keep_their_bits():
    payload = struct.unpack("<d", b"\x01\x00\x00\x00\x00\x00\xf8\x7f")[0]
    assert struct.pack("<d", decode_object(encode_object(payload))) == struct.pack("<d", payload)
    assert math.copysign(1, decode_object(encode_object(-0.0))) == -1


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.bool, torch.uint16, torch.complex64]
)
@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 0, 3), (2, 3)])
def test_tensors_inside_objects(dtype, shape):
    tensor = torch.randint(0, 2, shape).to(dtype)
    back = decode_object(encode_object({"pixels": tensor, "n": (tensor,)}))
    assert back["pixels"].dtype is dtype
    assert back["pixels"].shape == tensor.shape
    assert (
        back["pixels"].contiguous().reshape(-1).view(torch.uint8).tolist()
        == tensor.reshape(-1).view(torch.uint8).tolist()
    )
    back["pixels"].fill_(1)  # writable


def test_tensors_that_are_not_plain_memory():
    tensor = torch.arange(6.0, requires_grad=True).reshape(2, 3)
    assert torch.equal(decode_object(encode_object(tensor.t())), tensor.detach().t())
    assert decode_object(encode_object(torch.Size([2, 3]))) == (2, 3)


def test_arrays_and_numpy_scalars():
    for array in (
        np.arange(6, dtype=">i4").reshape(2, 3),
        np.array(["ab", ""]),
        np.zeros((0, 2)),
        np.array(3.5),
        np.array([b"x"]),
    ):
        back = decode_object(encode_object([array]))[0]
        assert back.dtype == array.dtype
        assert back.shape == array.shape
        assert (back == array).all()
    for scalar in (np.float32(0.1), np.int8(-3), np.bool_(True), np.str_("hé"), np.str_("")):
        back = decode_object(encode_object(scalar))
        assert back == scalar
        assert type(back) is type(scalar)


def test_tensors_come_as_arrays_without_torch():
    blob = encode_object({"x": torch.arange(3), "y": np.arange(2)})
    back = decode_object(blob, as_torch=False)
    assert isinstance(back["x"], np.ndarray)
    assert back["x"].tolist() == [0, 1, 2]
    with pytest.raises(InvalidArgumentError, match=r"tq-service\[data\]"):
        decode_object(encode_object(torch.zeros(2, dtype=torch.bfloat16)), as_torch=False)


class Role(str, enum.Enum):  # noqa: UP042  (its str() is not its value)
    USER = "user"


class Kind(enum.StrEnum):
    CHAT = "chat"


class Colour(enum.IntEnum):
    RED = 1


class Turn(typing.NamedTuple):
    role: Role
    tokens: list[int]


class Text(str):
    __slots__ = ()


@pytest.mark.parametrize(
    ("value", "plain"),
    [
        (collections.OrderedDict(b=1, a=collections.OrderedDict()), {"b": 1, "a": {}}),
        (collections.defaultdict(list, {Role.USER: (Turn(Role.USER, [1]),)}), {"user": (("user", [1]),)}),
        (collections.UserDict(input_ids=[1, 2]), {"input_ids": [1, 2]}),
        (Turn(Role.USER, [1, 2]), ("user", [1, 2])),
        ([Role.USER, Kind.CHAT, Colour.RED, Text("t")], ["user", "chat", 1, "t"]),
        ({Role.USER, Kind.CHAT}, {"user", "chat"}),
        (type("Tokens", (list,), {})([1, 2]), [1, 2]),
        (type("Tokens", (frozenset,), {})([1]), frozenset({1})),
        (type("Score", (float,), {})(0.5), 0.5),
        (type("Big", (int,), {})(2**70), 2**70),
        (type("Blob", (bytes,), {})(b"x"), b"x"),
    ],
)
def test_instances_of_derived_types_come_back_as_what_they_derive_from(value, plain):
    back = decode_object(encode_object(value))
    assert repr(back) == repr(plain) or isinstance(plain, set)
    assert back == plain
    assert type(back) is type(plain)


def test_a_dict_keeps_the_order_of_its_keys():
    assert list(decode_object(encode_object(collections.OrderedDict(b=1, a=2)))) == ["b", "a"]


def test_arrays_of_objects_inside_objects():
    rows = np.empty((2, 2), object)
    rows[0, 0], rows[0, 1], rows[1, 0], rows[1, 1] = [1, 2], (3,), None, np.array([{"a": 2**65}], object)
    back = decode_object(encode_object({"rows": rows, "none": np.zeros((0, 3), object), "one": np.array(None)}))
    assert back["rows"].dtype == object
    assert back["rows"].tolist()[0] == [[1, 2], (3,)]
    assert back["rows"][1, 0] is None
    assert back["rows"][1, 1].tolist() == [{"a": 2**65}]
    assert back["none"].shape == (0, 3)
    assert back["one"].shape == ()


@pytest.mark.parametrize(
    "culprit",
    [
        object(), lambda: 0, datetime.datetime(2020, 1, 1), enum.Enum("Shade", "DARK").DARK, range(3),
        np.zeros(1, "i4,i4"), np.datetime64("2020-01-01"), torch.zeros(2).to_sparse(), np.ma.array([1]),
        TensorDict({"x": torch.zeros(1)}),
    ],
)  # fmt: skip
def test_what_only_pickle_could_carry_is_refused_with_its_path(culprit):
    with pytest.raises(UnsupportedObjectError) as caught:
        encode_object({"meta": [1, (culprit,)]}, "text", 3)
    assert "text[3]['meta'][1][0]" in str(caught.value)
    assert type(culprit).__qualname__ in str(caught.value)
    assert isinstance(caught.value, TypeError)
    assert "register_object_codec" in str(caught.value)


@pytest.mark.parametrize(
    ("value", "place"),
    [
        (collections.OrderedDict(a=[object()]), "x[0]['a'][0]"),
        (np.array([[None, object()]]), "x[0][0][1]"),
        (Turn(Role.USER, object()), "x[0][1]"),
        ({object(): 1}, "x[0] key <object object at"),
    ],
)
def test_the_place_of_what_is_refused_is_found_in_all_containers(value, place):
    with pytest.raises(UnsupportedObjectError) as caught:
        encode_object(value, "x")
    assert caught.value.metadata["place"].startswith(place)


@pytest.mark.parametrize(
    ("culprit", "words"),
    [
        (np.array(["2020"], "datetime64[Y]"), "numpy.ndarray of datetime64"),
        (torch.zeros(2).to_sparse(), "torch.sparse_coo"),
        (torch.zeros(2, device="meta"), "on meta"),
    ],
)
def test_an_array_or_tensor_that_is_refused_is_told_from_those_that_are_taken(culprit, words):
    with pytest.raises(UnsupportedObjectError, match=words):
        encode_object([culprit])


@given(st.lists(OBJECTS, max_size=5))
def test_many_objects_are_encoded_as_each_of_them(values):
    assert encode_objects(values, "x") == [encode_object(value) for value in values]


def test_the_first_of_many_objects_that_is_refused_is_named():
    with pytest.raises(UnsupportedObjectError) as caught:
        encode_objects([1, (2, np.arange(2)), {"a": [object()]}, object()], "x")
    assert caught.value.metadata["place"] == "x[2]['a'][0]"


def test_cycles_and_deep_nests_are_refused():
    cycle = []
    cycle.append(cycle)
    deep, deep_array = (), np.array([None])
    for _ in range(100):
        deep, deep_array = (deep,), np.array([{"x": deep_array}])
    for value in (cycle, deep, deep_array):
        with pytest.raises(UnsupportedObjectError):
            encode_object(value)


def _ext(code, content):
    return msgpack.packb(msgpack.ExtType(code, content))


def _nested_tuples(depth):
    blob = msgpack.packb([])
    for _ in range(depth):
        blob = msgpack.packb([msgpack.ExtType(4, blob)])
    return blob


@pytest.mark.parametrize(
    "blob",
    [
        b"", b"\xc1", b"\xdd\xff\xff\xff\xff", b"\xdb\xff\xff\xff\xff", b"\x91" * 5000, b"\x81\x90\x01", b"\x01\x02",
        _nested_tuples(60),
        _ext(99, b""), _ext(4, b"\x05"), _ext(4, b""), _ext(5, b"\x91\x90"), _ext(8, b"123"), _ext(1, b"\x01"),
        _ext(1, msgpack.packb(["float32", [1 << 40], b""])), _ext(1, msgpack.packb(["object", [1], b"1"])),
        _ext(1, msgpack.packb(["float32", [-1], b""])), _ext(1, msgpack.packb(["float32", [0, 1 << 47, 1 << 47], b""])),
        _ext(1, msgpack.packb([["x"], [1], b"1"])),
        _ext(2, msgpack.packb(["|O", [1], b"12345678"])), _ext(2, msgpack.packb(["<U0", [1 << 40], b""])),
        _ext(2, msgpack.packb(["<f4", "ab", b"12345678"])), _ext(2, msgpack.packb(["<f3", [1], b"123"])),
        _ext(3, msgpack.packb(["<f4", b"123"])),
        _ext(9, b"\x01"), _ext(9, msgpack.packb([[1], 5])), _ext(9, msgpack.packb([[2], [1]])),
        _ext(9, msgpack.packb([[-1], []])), _ext(9, msgpack.packb(["ab", []])),
        _ext(9, msgpack.packb([[0, 1 << 48], []])),
        _ext(10, b"\x01"), _ext(10, msgpack.packb([5, 5])), _ext(10, msgpack.packb(["nobody", 5])),
        _ext(10, msgpack.packb(["PIL.Image", 5])), _ext(10, msgpack.packb(["PIL.Image", {}])),
    ],
)  # fmt: skip
def test_garbage_is_an_error(blob):
    with pytest.raises(InvalidArgumentError):
        decode_object(blob)


@given(st.binary(max_size=60))
def test_random_bytes_never_do_worse_than_an_error(data):
    try:
        value = decode_object(data)
    except InvalidArgumentError as error:
        assert error.message
    else:
        assert repr(decode_object(data)) == repr(value)
