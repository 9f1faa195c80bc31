import collections
import datetime
import enum
import math
import struct

import msgpack
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tq_service.errors import InvalidArgumentError, UnsupportedObjectError
from tq_service.wire.objects import decode_object, encode_object

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


class Colour(enum.IntEnum):
    RED = 1


@pytest.mark.parametrize(
    "culprit",
    [
        object(), lambda: 0, datetime.datetime(2020, 1, 1), Colour.RED, collections.OrderedDict(a=1), range(3),
        np.array([object()]), np.datetime64("2020-01-01"), torch.zeros(2).to_sparse(),
    ],
)  # fmt: skip
def test_what_only_pickle_could_carry_is_refused_with_its_path(culprit):
    with pytest.raises(UnsupportedObjectError) as caught:
        encode_object({"meta": [1, (culprit,)]}, "text[3]")
    assert "text[3]['meta'][1][0]" in str(caught.value)
    assert type(culprit).__qualname__ in str(caught.value)
    assert isinstance(caught.value, TypeError)


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


def test_cycles_and_deep_nests_are_refused():
    cycle = []
    cycle.append(cycle)
    deep = ()
    for _ in range(100):
        deep = (deep,)
    for value in (cycle, deep):
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
