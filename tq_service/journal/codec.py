"""Dataclasses as bytes and back, by their own declaration: there is no second list of their fields.

A dataclass becomes a msgpack map of its fields by name; fields that have their default are left out, as are those
declared with `field(metadata={"is_encoded": False})`. Reading goes by the types in the declaration. So a field may be
added with a default, and what was written before it is read as before; a field that the class does not have was written
by a newer version, which is said so. Arrays are bytes: whole numbers that follow each other take two numbers, however
many they are.
"""

from __future__ import annotations

import dataclasses
import enum
import struct
import threading
import types
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from typing import Any, Final, TypeVar

import msgpack
import numpy as np
from numpy.typing import NDArray

from tq_service.errors import NewerVersionError

Value = TypeVar("Value")
_RANGE: Final = 1  # int64, first and count
_TEXTS: Final = 2  # objects: None or text
_ARRAY: Final = 3  # dtype, shape and bytes
_VECTORS: Final[dict[int, np.dtype[Any]]] = {
    4: np.dtype("<i8"),
    5: np.dtype("<f8"),
    6: np.dtype("<i4"),
    7: np.dtype(np.bool_),
}  # one dimension
_VECTOR_CODES: Final[dict[np.dtype[Any], int]] = {dtype: code for code, dtype in _VECTORS.items()}
_LEAST_RANGE: Final = 16
_BOUNDS: Final = struct.Struct("<qq")
_MOST_KEPT_BYTES: Final = 1 << 20
_local = threading.local()  # has the packer of a thread, and its buffer: making one takes longer than packing a change


def encode(value: Any) -> bytes:
    """Return the bytes of a dataclass, or of plain values that hold some.

    Raises:
        TypeError: something in it is neither plain, nor an array, nor a dataclass.
        ValueError, OverflowError: a number or a text has no msgpack form.
    """
    try:
        packer = _local.packer
    except AttributeError:
        packer = _local.packer = msgpack.Packer(default=_plain)
    packed: bytes = packer.pack(value)
    if len(packed) > _MOST_KEPT_BYTES:
        del _local.packer
    return packed


def decode(kind: type[Value], data: bytes | memoryview) -> Value:
    """Return the value of some type that `encode` made bytes of; arrays are not writable.

    Raises:
        NewerVersionError: it has a field that the type does not have.
        ValueError, TypeError, KeyError: the bytes are not those of the type.
    """
    any_kind: Any = kind
    value: Value = decoder(any_kind)(unpack(data))
    return value


def unpack(data: bytes | memoryview) -> Any:
    """Return plain values and arrays; maps for dataclasses, tuples for sequences."""
    return msgpack.unpackb(data, ext_hook=array, strict_map_key=False, use_list=False)


@cache
def decoder(kind: Any) -> Callable[[Any], Any]:
    """Return what makes a value of a type of plain values."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if dataclasses.is_dataclass(kind):
        return _DataclassDecoder(kind)
    if isinstance(kind, type) and issubclass(kind, enum.Enum):
        return kind
    if hasattr(kind, "_fields"):  # a NamedTuple, maybe of some type
        return lambda values: kind(*values)
    if origin in (typing.Union, types.UnionType):
        return _union_decoder(arguments)
    if origin is tuple and arguments[-1] is Ellipsis:
        return _sequence_decoder(tuple, decoder(arguments[0]))
    if origin is tuple:
        parts = tuple(map(decoder, arguments))
        return lambda values: tuple(part(value) for part, value in zip(parts, values, strict=True))
    if origin in (list, Sequence):
        return _sequence_decoder(list, decoder(arguments[0]))
    if origin in (dict, Mapping):
        key, each = map(decoder, arguments)
        return lambda values: {key(name): each(value) for name, value in values.items()}
    return _same


def _same(value: Any) -> Any:
    return value


def _sequence_decoder(make: Callable[[Any], Any], each: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return make if each is _same else lambda values: make(map(each, values))


def _union_decoder(kinds: Sequence[Any]) -> Callable[[Any], Any]:
    """Return the decoder of `X | None`, or of plain values of several types."""
    decoders = [decoder(kind) for kind in kinds if kind is not types.NoneType]
    special = [each for each in decoders if each is not _same]
    if not special:
        return _same
    if len(decoders) > 1:
        raise TypeError(f"{kinds} cannot be distinguished once they are bytes; use one dataclass, or None beside it")
    return lambda value: None if value is None else special[0](value)


class _DataclassDecoder:
    """Makes one dataclass of maps; types are looked up on first use, so that classes may name each other."""

    def __init__(self, kind: Any) -> None:
        self._kind = kind
        self._names: set[str] = set()
        self._decoders: list[tuple[str, Callable[[Any], Any]]] = []  # of fields that are more than plain values

    def __call__(self, values: dict[str, Any]) -> Any:
        if not self._names:
            self._find_decoders()
        if not values.keys() <= self._names:
            unknown = sorted(values.keys() - self._names)
            raise NewerVersionError(
                f"{self._kind.__name__} has {', '.join(map(repr, unknown))}, which this version does not know; it was "
                f"written by a newer version: install that one"
            )
        for name, decode_field in self._decoders:
            if name in values:
                values[name] = decode_field(values[name])
        return self._kind(**values)

    def _find_decoders(self) -> None:
        hints = typing.get_type_hints(self._kind)
        decoders = {field.name: decoder(hints[field.name]) for field in _encoded_fields(self._kind)}
        self._names = set(decoders)
        self._decoders = [(name, each) for name, each in decoders.items() if each is not _same]


def _encoded_fields(kind: Any) -> list[dataclasses.Field[Any]]:
    return [field for field in dataclasses.fields(kind) if field.metadata.get("is_encoded", True)]


_defaults: dict[type, tuple[tuple[str, Any], ...]] = {}


def _plain(value: Any) -> Any:
    """Return what msgpack shall pack in place of a value it does not know."""
    if isinstance(value, np.ndarray):
        return _packed_array(value)
    defaults = _defaults.get(type(value))
    if defaults is None:
        if not dataclasses.is_dataclass(value):
            raise TypeError(f"{type(value).__name__} {value!r} is neither plain, nor an array, nor a dataclass")
        defaults = tuple((field.name, field.default) for field in _encoded_fields(type(value)))
        _defaults[type(value)] = defaults
    packed = {}
    for name, default in defaults:
        each = getattr(value, name)
        if each is not default and (isinstance(each, np.ndarray) or each != default):
            packed[name] = each
    return packed


def _packed_array(values: NDArray[Any]) -> msgpack.ExtType:
    if values.ndim == 1:
        code = _VECTOR_CODES.get(values.dtype)
        if code is not None:
            size = values.size
            may_be_range = size >= _LEAST_RANGE and values.dtype == np.int64
            if may_be_range and int(values[-1]) - int(values[0]) == size - 1 and bool((np.diff(values) == 1).all()):
                return msgpack.ExtType(_RANGE, _BOUNDS.pack(int(values[0]), size))
            return msgpack.ExtType(code, values.tobytes())
        if values.dtype == np.object_:
            return msgpack.ExtType(_TEXTS, msgpack.packb(values.tolist()))
    if values.dtype.hasobject:
        raise TypeError(f"an array of {values.dtype} with {values.ndim} dimensions has no bytes")
    dtype = values.dtype.newbyteorder("<")
    header = msgpack.packb((dtype.str, values.shape))
    return msgpack.ExtType(_ARRAY, header + values.astype(dtype, copy=False).tobytes())


def array(code: int, data: bytes) -> NDArray[Any]:
    """Return the array of an extension of msgpack."""
    if code in _VECTORS:
        return np.frombuffer(data, _VECTORS[code])
    match code:
        case 1:
            first, count = _BOUNDS.unpack(data)
            values = np.arange(first, first + count)
        case 2:
            texts = msgpack.unpackb(data)
            values = np.empty(len(texts), np.object_)
            values[:] = texts
        case 3:
            unpacker = msgpack.Unpacker()
            unpacker.feed(data)
            dtype, shape = unpacker.unpack()
            return np.frombuffer(data, dtype, offset=unpacker.tell()).reshape(shape)
        case _:
            raise NewerVersionError(f"values of the unknown kind {code} were written by a newer version: install it")
    values.flags.writeable = False
    return values


def encode_named(value: Any) -> bytes:
    """Return the bytes of a dataclass with its name."""
    return encode((type(value).__name__, value))


def unpack_each(data: bytes | memoryview) -> Iterator[Any]:
    """Yield the values that follow each other in bytes, each as `unpack` returns it."""
    unpacker = msgpack.Unpacker(ext_hook=array, strict_map_key=False, use_list=False, max_buffer_size=0)
    unpacker.feed(data)
    yield from unpacker


def decode_named(kinds: Mapping[str, type[Value]], name: str, fields: object) -> Value:
    """Return the value of one of some kinds, by its name.

    Raises:
        NewerVersionError: it is none of them, or has a field that is not known here.
    """
    kind: Any = kinds.get(name)
    if kind is None:
        raise NewerVersionError(
            f"a record is of the unknown kind {name!r}; it was written by a newer version: install that one"
        )
    value: Value = decoder(kind)(fields)
    return value
