"""Serialize Python objects as msgpack bytes with extension types, and JSON objects as text.

The supported types are None, bool, int of any size, float, complex, str, bytes, list, tuple, set, frozenset, and dict
with hashable keys of these types. Values of type bytearray and memoryview are returned as bytes. Torch tensors, numpy
arrays (including object arrays), numpy scalars, and types with a codec are also supported. An instance of a subclass of
a built-in Python type is returned as an instance of the built-in type. For example, an OrderedDict becomes a dict, a
NamedTuple becomes a tuple, and a str Enum becomes a str. All other objects are rejected, because they would require
pickle, which executes code from its input.

Codecs are registered by name. A codec for PIL images is built in. The codec's name is sent with each object, and
determines which decoding function the reader uses. Modules and classes are never sent. PIL is imported only when an
image is put or read.

JSON objects are stored as text that the service does not parse.
"""

from __future__ import annotations

import gc
import json
import math
import re
import struct
import sys
from collections import UserDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final, NoReturn

import msgpack
import numpy as np

from tq_service.errors import InvalidArgumentError, UnsupportedObjectError
from tq_service.schema import DTYPE_SIZES, check_name
from tq_service.wire.columns import (
    has_torch,
    is_tensor,
    loaded_torch,
    make_values,
    subclass_problem,
    tensor_bytes,
)

_TENSOR, _ARRAY, _NUMPY_SCALAR, _TUPLE, _SET, _FROZENSET, _BIG_INT, _COMPLEX, _OBJECT_ARRAY, _NAMED = range(1, 11)
_MAX_NESTED_EXTENSIONS: Final = 32
_MAX_DIMS: Final = 64
_PACKED_AT_ONCE: Final = 1024  # number of values packed per call, during which other threads are blocked
_ARRAY_DTYPE: Final = re.compile(r"[<>|=]?[biufcSU]\d{1,9}")
_COMPLEX_FORMAT: Final = struct.Struct("<dd")
_CARRIED: Final = frozenset({
    type(None), bool, int, float, complex, str, bytes, bytearray, memoryview, list, tuple, set, frozenset, dict,
})  # fmt: skip
_IMAGE: Final = "PIL.Image"
_PLAIN: Final = (str, bytes, bytearray, memoryview, float, bool, type(None), int)


class _Refused(Exception):  # noqa: N818  (never leaves this module)
    """Raised for a value that cannot be encoded. The message is empty if the value's type is not supported.

    `_explain` later determines where the value is located.
    """


_GARBLED: Final = (
    ValueError, LookupError, TypeError, OverflowError, RuntimeError, struct.error, msgpack.UnpackException,
)  # fmt: skip
_OPTIONS: Final[dict[str, Any]] = {"strict_types": True, "unicode_errors": "surrogatepass"}
_FAILURES: Final = (_Refused, ValueError, OverflowError, RecursionError)


def encode_objects(values: Sequence[Any], name: str, *, first: int = 0) -> list[bytes]:
    """Encode each object as bytes. All objects share one packer, which is ten times as fast as creating one per object.

    Args:
        values: objects to encode.
        name: name of the list in error messages. The position of an object is appended to the name, as in `text[3]`.
        first: position of the first object, for use in error messages.

    Raises:
        UnsupportedObjectError: an object contains a value that only pickle could encode; the message names the value's
            type and path.
    """
    packer = msgpack.Packer(default=lambda other: _extension(other, 0), **_OPTIONS)
    packed: list[bytes] = []
    try:
        for start in range(0, len(values), _PACKED_AT_ONCE):
            packed.extend(map(packer.pack, values[start : start + _PACKED_AT_ONCE]))
    except _FAILURES as error:
        position = len(packed)
        raise _explain(values[position], f"{name}[{first + position}]", error) from None
    return packed


def decode_object(data: memoryview | bytes, *, as_torch: bool | None = None) -> Any:
    """Decode an object encoded by `encode_objects`.

    Args:
        data: bytes of the encoded object.
        as_torch: whether to return tensors as torch tensors instead of numpy arrays. If None, torch tensors are
            returned if torch is installed.

    Raises:
        InvalidArgumentError: the bytes are not a valid encoding, or a dtype requires torch, which is not installed.
    """
    return _unpack(data, 0, has_torch() if as_torch is None else as_torch)


def _pack(value: Any, depth: int) -> bytes:
    packed: bytes = msgpack.packb(value, default=lambda other: _extension(other, depth), **_OPTIONS)
    return packed


def _extension(value: Any, depth: int) -> Any:
    """Convert a value that msgpack does not support to a value that it can pack."""
    kind = type(value)
    if kind is int:
        size = value.bit_length() // 8 + 1
        return msgpack.ExtType(_BIG_INT, value.to_bytes(size, "little", signed=True))
    if kind is complex:
        return msgpack.ExtType(_COMPLEX, _COMPLEX_FORMAT.pack(value.real, value.imag))
    if kind in _SEQUENCES:
        return _nested(_SEQUENCES[kind], list(value), depth)
    codec = codec_of(kind)
    if codec is not None:
        try:
            encoded = codec.encode(value)
        except Exception as error:
            raise _Refused(f"was rejected by codec {codec.name!r}: {error!r}") from error
        return _nested(_NAMED, [codec.name, encoded], depth)
    torch = loaded_torch()
    if torch is not None and isinstance(value, torch.Tensor):
        dtype = str(value.dtype).removeprefix("torch.")
        if value.layout is not torch.strided or value.is_nested or value.is_meta or dtype not in DTYPE_SIZES:
            raise _Refused
        problem = subclass_problem(value)
        if problem:
            raise _Refused(f"is {problem}")
        header = [dtype, list(value.shape), tensor_bytes(value)]
        return msgpack.ExtType(_TENSOR, msgpack.packb(header))
    if isinstance(value, np.generic) and _is_number(value.dtype):
        array = np.asarray(value)  # an empty np.str_ has no buffer
        return msgpack.ExtType(_NUMPY_SCALAR, msgpack.packb([array.dtype.str, array.tobytes()]))
    if kind is np.ndarray and value.dtype.kind == "O":
        return _nested(_OBJECT_ARRAY, [list(value.shape), list(value.flat)], depth)
    if kind is np.ndarray and _is_number(value.dtype):
        header = [value.dtype.str, list(value.shape), np.ascontiguousarray(value).tobytes()]
        return msgpack.ExtType(_ARRAY, msgpack.packb(header))
    base = next((make for each, make in _BASES.items() if issubclass(kind, each)), None)
    if base is None:
        raise _Refused
    plain = base(value)
    is_extension = base in _SEQUENCES or (base is int and plain.bit_length() > 63)  # msgpack converts a value only once
    return _extension(plain, depth) if is_extension else plain


def _nested(code: int, items: list[Any], depth: int) -> Any:
    """Return an extension whose payload is a list of arbitrary values."""
    if depth >= _MAX_NESTED_EXTENSIONS:
        raise _Refused(
            f"is nested more than {_MAX_NESTED_EXTENSIONS} levels deep in tuples, sets, arrays or objects with a codec"
        )
    return msgpack.ExtType(code, _pack(items, depth + 1))


_SEQUENCES: Final[dict[type, int]] = {tuple: _TUPLE, set: _SET, frozenset: _FROZENSET}


# Conversions of subclass instances to their base type. UserDict is included, although it is not a dict, because
# tokenizers and processors in the transformers library return subclasses of it. str() does not return the text of a str
# enum member or an np.str_.
_BASES: Final[dict[type, Callable[[Any], Any]]] = {
    dict: dict, UserDict: dict, list: list, tuple: tuple, set: set, frozenset: frozenset, str: str.__str__, int: int,
    float: float, bytes: bytes,
}  # fmt: skip


def _is_number(dtype: np.dtype[Any]) -> bool:
    return dtype.fields is None and _ARRAY_DTYPE.fullmatch(dtype.str) is not None


def _explain(value: Any, path: str, error: Exception) -> UnsupportedObjectError:
    """Build the error for a rejected object, with the location of the first value that cannot be encoded."""
    try:
        found = _find_refused(value, path)
    except RecursionError:
        found = None
    place, reason = found or (path, f"is nested too deeply, or too large, for msgpack ({error})")
    return UnsupportedObjectError(
        f"{place} {reason}. Put plain values, tensors, arrays, or lists, tuples, sets and dicts of these, or register "
        "a codec for the type (tq_service.register_object_codec)",
        metadata={"place": place},
    )


def _find_refused(value: Any, path: str) -> tuple[str, str] | None:
    """Return the location of the first value that cannot be encoded, and the reason, or None if there is none."""
    for part, place in _parts_of(value, path):
        found = _find_refused(part, place)
        if found:
            return found
    try:
        _pack(value, 0)
    except _Refused as refused:
        return path, str(refused) or _describe_kind(value)
    except (ValueError, OverflowError):
        return None
    return None


def _parts_of(value: Any, path: str) -> Iterable[tuple[Any, str]]:
    """Yield each part of a container and the path to that part."""
    kind = type(value)
    if kind in _PLAIN or codec_of(kind) is not None:
        return
    if isinstance(value, dict | UserDict):
        for key, item in value.items():
            yield key, f"{path} key {key!r}"
            yield item, f"{path}[{key!r}]"
    elif isinstance(value, list | tuple | set | frozenset):
        for position, item in enumerate(value):
            yield item, f"{path}[{position}]"
    elif kind is np.ndarray and value.dtype.kind == "O":
        for indexes, item in np.ndenumerate(value):
            yield item, path + "".join(f"[{index}]" for index in indexes)


def _describe_kind(culprit: Any) -> str:
    kind = f"{type(culprit).__module__}.{type(culprit).__qualname__}"
    if isinstance(culprit, np.ndarray):
        kind += f" of {culprit.dtype}"
    elif is_tensor(culprit):
        kind += f" of {culprit.dtype}, {culprit.layout} on {culprit.device}"
    return f"has type {kind}, which only pickle could encode"


def _unpack(data: memoryview | bytes, depth: int, as_torch: bool) -> Any:
    if depth > _MAX_NESTED_EXTENSIONS:
        raise InvalidArgumentError(f"an object contains more than {_MAX_NESTED_EXTENSIONS} nested extensions")
    try:
        return msgpack.unpackb(
            data,
            strict_map_key=False,
            unicode_errors="surrogatepass",
            ext_hook=lambda code, payload: _extended(code, payload, depth, as_torch),
        )
    except InvalidArgumentError:
        raise
    except _GARBLED as error:
        raise InvalidArgumentError(f"an object of {len(data)} bytes is garbled: {error}") from None


def _extended(code: int, payload: bytes, depth: int, as_torch: bool) -> Any:
    """Decode an extension. The caller treats any exception as a sign of damaged bytes."""
    if code == _BIG_INT:
        return int.from_bytes(payload, "little", signed=True)
    if code == _COMPLEX:
        return complex(*_COMPLEX_FORMAT.unpack(payload))
    if code == _TENSOR:
        return _decode_tensor(*msgpack.unpackb(payload), as_torch=as_torch)
    if code == _ARRAY:
        return _decode_array(*msgpack.unpackb(payload))
    if code == _NUMPY_SCALAR:
        dtype, values = msgpack.unpackb(payload)
        return _decode_array(dtype, [], values)[()]
    if not 0 < code <= _NAMED:
        raise InvalidArgumentError(f"an object contains the unknown extension type {code}; update tq-service")
    items = _checked_list(_unpack(payload, depth + 1, as_torch))
    for make, number in _SEQUENCES.items():
        if code == number:
            return make(items)
    return _decode_named(*items) if code == _NAMED else _decode_object_array(*items)


def _checked_list(value: Any) -> list[Any]:
    if type(value) is not list:
        raise ValueError(f"got a {type(value).__name__}; expected a list")
    return value


def _decode_named(name: Any, encoded: Any) -> Any:
    codec = codec_named(name)
    try:
        return codec.decode(encoded)
    except Exception as error:
        raise InvalidArgumentError(f"codec {name!r} could not decode an object: {error!r}") from error


def _decode_tensor(dtype: Any, shape: Any, values: Any, *, as_torch: bool) -> Any:
    if dtype not in DTYPE_SIZES:
        raise InvalidArgumentError(f"an object contains a tensor of unknown dtype {dtype!r}")
    _check_size(shape, DTYPE_SIZES[dtype], values)
    buffer = np.frombuffer(bytearray(memoryview(values)), np.uint8)
    return make_values(buffer, dtype, tuple(shape), as_torch=as_torch)


def _decode_array(dtype: Any, shape: Any, values: Any) -> Any:
    if not _ARRAY_DTYPE.fullmatch(dtype):
        raise InvalidArgumentError(f"an array inside an object has dtype {dtype!r}; expected numbers or text")
    parsed = np.dtype(dtype)
    _check_size(shape, parsed.itemsize, values)
    if not parsed.itemsize and math.prod(shape) > 1:
        raise InvalidArgumentError(
            f"an array inside an object has shape {shape} and 0-byte elements; expected at most one such element"
        )
    if not values:
        return np.zeros(tuple(shape), parsed)
    return np.frombuffer(bytearray(memoryview(values)), parsed).reshape(shape)


def _decode_object_array(shape: Any, items: Any) -> Any:
    _check_size(shape, 1, _checked_list(items))
    array = np.empty(len(items), np.object_)
    for position, item in enumerate(items):  # item by item, because numpy would turn lists into additional dimensions
        array[position] = item
    return array.reshape(shape)


def _check_size(shape: Any, itemsize: int, values: Any) -> None:
    """Check that a shape matches the values before memory is allocated for the array."""
    plausible = len(_checked_list(shape)) <= _MAX_DIMS
    if not plausible or any(type(size) is not int or not 0 <= size < 1 << 48 for size in shape):
        raise InvalidArgumentError(f"a tensor or array inside an object has shape {shape!r}; expected a list of sizes")
    expected = math.prod(shape) * itemsize
    if expected != len(values):
        raise InvalidArgumentError(
            f"a tensor or array inside an object has {len(values)} bytes or objects; expected {expected} for shape "
            f"{shape}"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectCodec:
    """A codec for objects of a particular type. See `register_object_codec`."""

    name: str
    kind: type
    encode: Callable[[Any], Any]
    decode: Callable[[Any], Any]


_by_name: Final[dict[str, ObjectCodec]] = {}
_by_kind: Final[dict[type, ObjectCodec]] = {}


def register_object_codec(name: str, kind: type, *, encode: Callable[[Any], Any], decode: Callable[[Any], Any]) -> None:
    """Register a codec for objects of a particular type in this process.

    Every process that puts or reads such objects, including loader workers, must first register a codec under the same
    name. The best place to register the codec is the module that defines the type. A new registration replaces earlier
    registrations of the same name or type.

    Args:
        name: name sent with each object, consisting of 1 to 512 printable characters. A unique prefix is recommended,
            as in "acme.Trajectory".
        kind: type of the objects. The codec also applies to subclasses for which no codec is registered.
        encode: function that converts an object to a value that needs no codec: a plain value, a tensor, an array, or a
            container of these.
        decode: function that recreates the object from the result of `encode`. Readers call this function on data from
            any producer, so it must not trust or unpickle its input.
    """
    check_name("name", name)
    if not isinstance(kind, type) or kind in _CARRIED:
        raise InvalidArgumentError(
            f"kind is {kind!r}; expected a type that needs a codec. Register a class of your own instead",
            field="kind",
        )
    before = _by_name.get(name)
    if before is not None and _by_kind.get(before.kind) is before:
        del _by_kind[before.kind]
    _by_name[name] = _by_kind[kind] = ObjectCodec(name=name, kind=kind, encode=encode, decode=decode)


def codec_of(kind: type) -> ObjectCodec | None:
    """Return the codec for instances of a type, or None if it has none."""
    for base in kind.__mro__:
        if base in _by_kind:
            return _by_kind[base]
    return _image_codec(kind) if is_image_type(kind) else None


def codec_named(name: str) -> ObjectCodec:
    """Return the codec registered under a name.

    Raises:
        InvalidArgumentError: the name is not registered in this process, or PIL is not installed.
    """
    if name in _by_name:
        return _by_name[name]
    if name != _IMAGE:
        raise InvalidArgumentError(
            f"an object was encoded with the codec {name!r:.200}, which is not registered in this process; call "
            "tq_service.register_object_codec with this name first"
        )
    try:
        from PIL import Image  # noqa: PLC0415  (optional)
    except ImportError:
        raise InvalidArgumentError("an object is a PIL image, but PIL is not installed; install pillow") from None
    return _image_codec(Image.Image)


# PIL images are stored as raw pixels. PNG would need half the space but a hundred times the processing time.


def is_image_type(kind: type) -> bool:
    """Return whether values of this type are PIL images."""
    image = getattr(sys.modules.get(_IMAGE), "Image", None)  # None while another thread is importing PIL.Image
    return isinstance(image, type) and issubclass(kind, image)


def _image_codec(kind: type) -> ObjectCodec:
    return ObjectCodec(name=_IMAGE, kind=kind, encode=_encode_image, decode=_decode_image)


def _encode_image(image: Any) -> dict[str, Any]:
    pixels = image.tobytes()  # also loads the file of an opened image, which sets the attributes used below
    palette = image.getpalette(None) if image.mode in {"P", "PA"} else None
    return {
        "mode": image.mode,
        "size": image.size,
        "pixels": pixels,
        "palette": None if palette is None else (image.palette.mode, bytes(palette)),
        "info": {name: value for name, value in image.info.items() if isinstance(name, str) and _is_plain(value)},
    }


def _is_plain(value: Any) -> bool:
    """Return whether an entry of an image's info can be encoded.

    Some image formats store PIL objects in the info, and these cannot be encoded.
    """
    return type(value) in {bool, int, float, str, bytes} or (type(value) is tuple and all(map(_is_plain, value)))


def _decode_image(parts: Mapping[str, Any]) -> Any:
    from PIL import Image  # noqa: PLC0415  (optional; already imported by `codec_named`)

    size, pixels = parts["size"], parts["pixels"]
    if math.prod(size) > 8 * len(pixels):  # a pixel has at least 1 bit; check before memory is allocated
        raise ValueError(f"got only {len(pixels)} bytes for an image of size {size}")
    image = Image.frombytes(parts["mode"], size, pixels)
    if parts["palette"] is not None:
        rawmode, palette = parts["palette"]
        image.putpalette(palette, rawmode)
    image.info.update(parts["info"])
    return image


MOST_JSON_BYTES: Final = 262_144


def encode_json_object(name: str, value: Mapping[str, Any] | None) -> str:
    """Encode a mapping as JSON text. None is encoded as an empty mapping.

    Raises:
        InvalidArgumentError: `value` contains a value that JSON cannot represent, or the JSON text is too long.
    """
    try:
        _check_keys(value)
        text = json.dumps(dict(value or {}), ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidArgumentError(
            f"{name} cannot be encoded as JSON ({error}); expected a mapping from strings to JSON values: text, finite "
            "numbers, True, False, None, or lists and mappings of these",
            field=name,
        ) from None
    check_json_object(name, text)
    return text


def _check_keys(value: Any) -> None:
    """Raise TypeError if a key is not a string, because JSON would silently convert the key to a string."""
    if isinstance(value, Mapping):
        for key in value:
            if not isinstance(key, str):
                raise TypeError(f"key {key!r} is not a string")
        value = value.values()
    elif not isinstance(value, list | tuple):
        return
    for each in value:
        _check_keys(each)


def decode_json_object(text: str) -> dict[str, Any]:
    """Decode JSON text to a mapping. Empty text yields an empty mapping."""
    value: dict[str, Any] = json.loads(text) if text else {}
    return value


def check_json_object(name: str, text: str) -> None:
    """Check that the text is a JSON object that does not exceed the length limit.

    Raises:
        InvalidArgumentError: the text is not a JSON object or is too long.
    """
    if (size := len(text.encode())) > MOST_JSON_BYTES:
        raise InvalidArgumentError(f"{name} has {size} bytes; expected at most {MOST_JSON_BYTES}", field=name)
    try:
        value = json.loads(text, parse_constant=_no_number) if text else {}
    except (ValueError, RecursionError) as error:
        raise InvalidArgumentError(f"{name} is not valid JSON ({error}); pass a JSON object", field=name) from None
    if not isinstance(value, dict):
        raise InvalidArgumentError(f"{name} is a JSON {type(value).__name__}; expected an object", field=name)


def _no_number(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not a valid JSON number")


@contextmanager
def no_collection() -> Iterator[None]:
    """Disable Python's cyclic garbage collector in this process during the `with` block.

    The collector runs once for every 700 additional objects, and some of these runs scan all objects in the process.
    Once torch is imported, such a scan takes longer than reading thousands of objects. All objects created in the block
    remain in use, so the collector could not free any of them. If several threads use this context manager, the
    collector may resume when the first thread leaves its block.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
