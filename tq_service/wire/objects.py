"""Python objects as bytes: msgpack with extension types.

Carried: None, bool, int of any size, float, complex, str, bytes (bytearray and memoryview come back as bytes), list,
tuple, set, frozenset, dict with any hashable of these as key, torch tensors, numpy arrays and numpy scalars. Anything
else would take pickle, which runs what it reads, and is refused.
"""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Callable, Hashable
from typing import Any, Final

import msgpack
import numpy as np

from tq_service.errors import InvalidArgumentError, UnsupportedObjectError
from tq_service.schema import DTYPE_SIZES
from tq_service.wire.dtypes import dtype_name, has_torch, is_tensor, loaded_torch, make_values, tensor_bytes

_TENSOR, _ARRAY, _NUMPY_SCALAR, _TUPLE, _SET, _FROZENSET, _BIG_INT, _COMPLEX = range(1, 9)
_MAX_NESTED_EXTENSIONS: Final = 32
_MAX_DIMS: Final = 64
_ARRAY_DTYPE: Final = re.compile(r"[<>|=]?[biufcSU]\d{1,9}")
_COMPLEX_FORMAT: Final = struct.Struct("<dd")
_PLAIN: Final = (str, bytes, bytearray, memoryview, float, bool, type(None), int)


class _Refused(Exception):  # noqa: N818  (never leaves this module)
    """The packer met a value it cannot carry; where it is, is looked up afterwards."""


def encode_object(value: Any, path: str = "object") -> bytes:
    """Return an object as bytes.

    Args:
        value: what is carried.
        path: how messages name it, such as `text[3]`.

    Raises:
        UnsupportedObjectError: it holds something only pickle could carry; the message has its type and path.
    """
    try:
        return _pack(value, 0)
    except (_Refused, ValueError, OverflowError, RecursionError) as error:
        raise _explain(value, path, error) from None


def decode_object(data: memoryview | bytes, *, as_torch: bool | None = None) -> Any:
    """Return the object that `encode_object` wrote.

    Args:
        data: its bytes.
        as_torch: whether tensors come as torch tensors, else as numpy arrays; None: where torch is installed.

    Raises:
        InvalidArgumentError: the bytes are none of ours, or hold a dtype that only torch has while it is not installed.
    """
    return _unpack(data, 0, has_torch() if as_torch is None else as_torch)


def _pack(value: Any, depth: int) -> bytes:
    packed: bytes = msgpack.packb(
        value, strict_types=True, unicode_errors="surrogatepass", default=lambda other: _extension(other, depth)
    )
    return packed


def _extension(value: Any, depth: int) -> Any:
    """Return what msgpack shall pack in place of a value it does not know."""
    kind = type(value)
    if kind in _SEQUENCES and depth < _MAX_NESTED_EXTENSIONS:
        return msgpack.ExtType(_SEQUENCES[kind], _pack(list(value), depth + 1))
    if kind is int:
        size = value.bit_length() // 8 + 1
        return msgpack.ExtType(_BIG_INT, value.to_bytes(size, "little", signed=True))
    if kind is complex:
        return msgpack.ExtType(_COMPLEX, _COMPLEX_FORMAT.pack(value.real, value.imag))
    if is_tensor(value) and _is_plain_tensor(value):
        header = [dtype_name(value.dtype, "a tensor"), list(value.shape), tensor_bytes(value)]
        return msgpack.ExtType(_TENSOR, msgpack.packb(header))
    if isinstance(value, np.generic) and _is_number(value.dtype):
        array = np.asarray(value)  # an empty np.str_ has no bytes of its own
        return msgpack.ExtType(_NUMPY_SCALAR, msgpack.packb([array.dtype.str, array.tobytes()]))
    if kind is np.ndarray and _is_number(value.dtype):
        header = [value.dtype.str, list(value.shape), np.ascontiguousarray(value).tobytes()]
        return msgpack.ExtType(_ARRAY, msgpack.packb(header))
    torch = loaded_torch()
    if torch is not None and kind is torch.Size:
        return _extension(tuple(value), depth)
    if isinstance(value, list) and kind.__module__.startswith("tensordict."):
        return list(value)  # tensordict hands lists out as a subclass of its own
    raise _Refused


_SEQUENCES: Final[dict[type, int]] = {tuple: _TUPLE, set: _SET, frozenset: _FROZENSET}


def _is_plain_tensor(tensor: Any) -> bool:
    torch = loaded_torch()
    strided = torch is not None and tensor.layout is torch.strided and not (tensor.is_nested or tensor.is_meta)
    return strided and str(tensor.dtype).removeprefix("torch.") in DTYPE_SIZES


def _is_number(dtype: np.dtype[Any]) -> bool:
    return dtype.fields is None and _ARRAY_DTYPE.fullmatch(dtype.str) is not None


def _explain(value: Any, path: str, error: Exception) -> UnsupportedObjectError:
    """Return the error for an object that was refused, with the first place where it fails."""
    try:
        place, culprit = _find_refused(value, path) or (path, None)
    except RecursionError:
        place, culprit = path, None
    if culprit is None:
        reason = f"is nested too deeply, or too large, for msgpack ({error})"
    else:
        kind = f"{type(culprit).__module__}.{type(culprit).__qualname__}"
        if isinstance(culprit, np.ndarray):
            kind += f" of {culprit.dtype}"
        elif is_tensor(culprit):
            kind += f" of {culprit.dtype}, {culprit.layout} on {culprit.device}"
        reason = f"has type {kind}, which only pickle could carry"
    return UnsupportedObjectError(
        f"{place} {reason}; put plain values, tensors, arrays, or lists, tuples, sets and dicts of them",
        metadata={"place": place},
    )


def _find_refused(value: Any, path: str) -> tuple[str, Any] | None:
    kind = type(value)
    if kind in _PLAIN:
        return None
    if kind is dict:
        for key, item in value.items():
            found = _find_refused(key, f"{path} key {key!r}") or _find_refused(item, f"{path}[{key!r}]")
            if found:
                return found
        return None
    if kind is list or kind in _SEQUENCES:
        for position, item in enumerate(value):
            found = _find_refused(item, f"{path}[{position}]")
            if found:
                return found
        return None
    try:
        _pack(value, 0)
    except _Refused:
        return path, value
    return None


def _unpack(data: memoryview | bytes, depth: int, as_torch: bool) -> Any:
    if depth > _MAX_NESTED_EXTENSIONS:
        raise InvalidArgumentError(f"an object nests more than {_MAX_NESTED_EXTENSIONS} tuples or sets")
    try:
        return msgpack.unpackb(
            data,
            strict_map_key=False,
            unicode_errors="surrogatepass",
            ext_hook=lambda code, payload: _extended(code, payload, depth, as_torch),
        )
    except InvalidArgumentError:
        raise
    except (ValueError, TypeError, KeyError, OverflowError, RuntimeError, msgpack.UnpackException) as error:
        raise InvalidArgumentError(f"an object of {len(data)} bytes is garbled: {error}") from None


def _extended(code: int, payload: bytes, depth: int, as_torch: bool) -> Any:
    if code in _SEQUENCE_MAKERS:
        items = _unpack(payload, depth + 1, as_torch)
        if type(items) is not list:
            raise InvalidArgumentError("a tuple or set inside an object is garbled")
        return _SEQUENCE_MAKERS[code](items)
    if code == _BIG_INT:
        return int.from_bytes(payload, "little", signed=True)
    if code == _COMPLEX:
        return _decode_complex(payload)
    if code == _TENSOR:
        return _decode_tensor(payload, as_torch)
    if code == _ARRAY:
        return _decode_array(*_header(payload, 3))
    if code == _NUMPY_SCALAR:
        dtype, values = _header(payload, 2)
        return _decode_array(dtype, [], values)[()]
    raise InvalidArgumentError(f"an object has extension type {code}, which is unknown; update tq-service")


_SEQUENCE_MAKERS: Final[dict[int, Callable[[list[Hashable]], Any]]] = {
    _TUPLE: tuple,
    _SET: set,
    _FROZENSET: frozenset,
}


def _header(payload: bytes, size: int) -> list[Any]:
    parts = msgpack.unpackb(payload)
    if type(parts) is not list or len(parts) != size:
        raise InvalidArgumentError(f"a tensor or array inside an object is garbled: expected {size} parts")
    return parts


def _decode_complex(payload: bytes) -> complex:
    if len(payload) != _COMPLEX_FORMAT.size:
        raise InvalidArgumentError(f"a complex number inside an object has {len(payload)} bytes, expected 16")
    return complex(*_COMPLEX_FORMAT.unpack(payload))


def _decode_tensor(payload: bytes, as_torch: bool) -> Any:
    dtype, shape, values = _header(payload, 3)
    if dtype not in DTYPE_SIZES:
        raise InvalidArgumentError(f"a tensor inside an object has dtype {dtype!r}, which is unknown")
    _check_size(shape, DTYPE_SIZES[dtype], values)
    return make_values(np.frombuffer(bytearray(values), np.uint8), dtype, tuple(shape), as_torch=as_torch)


def _decode_array(dtype: Any, shape: Any, values: Any) -> Any:
    if type(dtype) is not str or not _ARRAY_DTYPE.fullmatch(dtype):
        raise InvalidArgumentError(f"an array inside an object has dtype {dtype!r}, expected one of numbers or text")
    parsed = np.dtype(dtype)
    _check_size(shape, parsed.itemsize, values)
    if not parsed.itemsize and math.prod(shape) > 1:
        raise InvalidArgumentError(f"an array inside an object has {shape} elements of no bytes")
    if not values:
        return np.zeros(tuple(shape), parsed)
    return np.frombuffer(bytearray(values), parsed).reshape(shape)


def _check_size(shape: Any, itemsize: int, values: Any) -> None:
    """Check what was sent before anything is allocated for it."""
    plausible = type(shape) is list and len(shape) <= _MAX_DIMS and type(values) is bytes
    if not plausible or any(type(size) is not int or not 0 <= size < 1 << 48 for size in shape):
        raise InvalidArgumentError(f"a tensor or array inside an object has shape {shape!r}, expected sizes")
    expected = math.prod(shape) * itemsize
    if expected != len(values):
        raise InvalidArgumentError(
            f"a tensor or array inside an object has {len(values)} bytes, expected {expected} for shape {shape}"
        )
