"""Converts dataclasses to bytes and back, based on their declared fields.

A dataclass is encoded as a msgpack map from field names to values. Fields set to their default value are omitted.
Fields declared with `field(metadata={"is_encoded": False})` are also omitted. Decoding follows the declared types, so
older data remains readable when a field with a default is added. Decoding an unknown field raises an error that says
the data was written by a newer version.

Arrays are encoded as bytes. A range of consecutive integers is encoded as two numbers, regardless of its length.
`compact` reduces the encoded size of an array but takes additional time. Object arrays may contain strings, tuples and
None.
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
_RANGE, _OBJECTS, _SHAPED, _RUNS, _NEAR = range(5)
_DTYPES: Final = dict(enumerate(map(np.dtype, ("<i8", "<f8", "<i4", "?", "u1", "<u2", "<u4", "<u8", "i1", "<i2")), 5))
_CODES: Final = {dtype: code for code, dtype in _DTYPES.items()}
_LEAST_RANGE: Final = 16
_BOUNDS: Final = struct.Struct("<qq")
_RUN_BYTES: Final = 12
_MOST_KEPT_BYTES: Final = 1 << 20
_local = threading.local()  # one packer per thread, because creating a packer takes longer than packing a change


def encode(value: Any) -> bytes:
    """Encode a dataclass or a plain value that contains dataclasses.

    Raises:
        TypeError: the value contains an object that is not a plain value, an array or a dataclass.
        ValueError, OverflowError: msgpack cannot represent a number or a string in the value.
    """
    try:
        packer = _local.packer
    except AttributeError:
        packer = _local.packer = msgpack.Packer(default=_plain)
    packed: bytes = packer.pack(value)
    if len(packed) > _MOST_KEPT_BYTES:
        del _local.packer
    return packed


def unpack(data: bytes | memoryview) -> Any:
    """Decode bytes into plain values and arrays. Dataclasses become maps, and sequences become tuples."""
    return msgpack.unpackb(data, ext_hook=_array, strict_map_key=False, use_list=False)


def unpack_each(data: bytes | memoryview) -> Iterator[Any]:
    """Decode consecutive values one by one. Each value is decoded as in `unpack`."""
    unpacker = msgpack.Unpacker(ext_hook=_array, strict_map_key=False, use_list=False, max_buffer_size=0)
    unpacker.feed(data)
    yield from unpacker


def encode_named(value: Any) -> bytes:
    """Encode a dataclass and its class name."""
    return encode((type(value).__name__, value))


def decode_named(kinds: Mapping[str, type[Value]], name: str, fields: object) -> Value:
    """Create an instance of one of the given dataclasses from a class name and fields.

    All arrays in the instance are read-only.

    Raises:
        NewerVersionError: the class name or a field is unknown.
        ValueError, TypeError, KeyError: the fields do not match the dataclass.
    """
    kind: Any = kinds.get(name)
    if kind is None:
        raise NewerVersionError(f"a newer version wrote a record of the unknown kind {name!r}; install that version")
    value: Value = decoder(kind)(fields)
    return value


@cache
def decoder(kind: Any) -> Callable[[Any], Any]:
    """Return a function that converts plain values, as returned by `unpack`, to the given type."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if dataclasses.is_dataclass(kind):
        return _dataclass_decoder(kind)
    if isinstance(kind, type) and issubclass(kind, enum.Enum):
        return kind
    if hasattr(kind, "_fields"):  # a NamedTuple, which may be generic
        return lambda values: kind(*values)
    if origin in (typing.Union, types.UnionType):
        return _union_decoder(arguments)
    if origin is tuple and arguments[-1] is not Ellipsis:
        parts = tuple(map(decoder, arguments))
        return lambda values: tuple(part(value) for part, value in zip(parts, values, strict=True))
    if origin in (tuple, list, Sequence):
        make: Callable[[Any], Any] = tuple if origin is tuple else list
        item = decoder(arguments[0])
        return make if item is _same else lambda values: make(map(item, values))
    if origin in (dict, Mapping):
        key, each = map(decoder, arguments)
        return lambda values: {key(name): each(value) for name, value in values.items()}
    return _same


def _same(value: Any) -> Any:
    return value


def _union_decoder(kinds: Sequence[Any]) -> Callable[[Any], Any]:
    """Return the decoder for `X | None` or for a union of plain types."""
    decoders = [decoder(kind) for kind in kinds if kind is not types.NoneType]
    special = next((each for each in decoders if each is not _same), None)
    if special is None:
        return _same
    if len(decoders) > 1:
        raise TypeError(f"{kinds} cannot be distinguished after encoding. Use a single dataclass, or make it Optional")
    return lambda value: None if value is None else special(value)


def _dataclass_decoder(kind: Any) -> Callable[[Any], Any]:
    @cache
    def decoders() -> dict[str, Callable[[Any], Any]]:  # built on first use, because classes may refer to each other
        hints = typing.get_type_hints(kind)
        return {name: decoder(hints[name]) for name, _ in _encoded_fields(kind)}

    def decode(values: dict[str, Any]) -> Any:
        known = decoders()
        for name, value in values.items():
            if name not in known:
                raise NewerVersionError(
                    f"{kind.__name__} has the unknown field {name!r} because a newer version wrote the data; "
                    "install that version"
                )
            if known[name] is not _same:
                values[name] = known[name](value)
        return kind(**values)

    return decode


@cache
def _encoded_fields(kind: Any) -> list[tuple[str, Any]]:
    """Return the name and default value of each encoded field of a dataclass."""
    return [(each.name, each.default) for each in dataclasses.fields(kind) if each.metadata.get("is_encoded", True)]


def _plain(value: Any) -> Any:
    """Convert an array or a dataclass to an object that msgpack can pack."""
    if isinstance(value, np.ndarray):
        return _packed_array(value)
    if not dataclasses.is_dataclass(value):
        raise TypeError(f"cannot encode {type(value).__name__} {value!r}; expected a plain value, array or dataclass")
    kind: Any = type(value)
    packed = {}
    for name, default in _encoded_fields(kind):
        each = getattr(value, name)
        if each is not default and (isinstance(each, np.ndarray) or each != default):
            packed[name] = each
    return packed


def _packed_array(values: NDArray[Any]) -> msgpack.ExtType:
    size = values.size
    if values.ndim == 1 and values.dtype == np.object_:
        return msgpack.ExtType(_OBJECTS, msgpack.packb(values.tolist()))
    if values.dtype not in _CODES:
        raise TypeError(f"cannot encode a {values.ndim}-dimensional array of {values.dtype}")
    if values.ndim != 1:
        return msgpack.ExtType(_SHAPED, msgpack.packb((values.shape, values.reshape(-1)), default=_plain))
    may_be_range = size >= _LEAST_RANGE and values.dtype == np.int64
    if may_be_range and int(values[-1]) - int(values[0]) == size - 1 and bool((np.diff(values) == 1).all()):
        return msgpack.ExtType(_RANGE, _BOUNDS.pack(int(values[0]), size))
    return msgpack.ExtType(_CODES[values.dtype], values.tobytes())


def compact(values: NDArray[Any]) -> Any:
    """Convert a one-dimensional array to a more compact form for `encode`. Decoding the result yields an equal array.

    Integers and booleans are represented either as runs of consecutive numbers or as offsets from the minimum. Each
    offset takes a few bytes, or none if all values are equal. Other arrays are returned unchanged.
    """
    if values.dtype.kind not in "iub" or not values.size:
        return values
    numbers = values.view(np.uint8) if values.dtype == np.bool_ else values
    base = int(numbers.min())
    span = int(numbers.max()) - base
    width = next(width for width in (0, 1, 2, 4, 8) if span < 1 << (8 * width))
    if width > 1:
        heads = np.flatnonzero(np.diff(numbers, prepend=numbers[:1]) != 1)
        if heads.size * _RUN_BYTES < width * numbers.size:
            runs = numbers[heads], np.diff(heads, append=numbers.size).astype(np.int32)
            return msgpack.ExtType(_RUNS, msgpack.packb(runs, default=_plain))
    if width >= values.itemsize:
        return values
    distances = (numbers - numbers.dtype.type(base)).astype(f"<u{width}").tobytes() if width else b""
    near = _CODES[values.dtype], numbers.size, base, distances
    return msgpack.ExtType(_NEAR, msgpack.packb(near))


def _array(code: int, data: bytes) -> NDArray[Any]:
    """Decode an array from a msgpack extension."""
    if code in _DTYPES:
        return np.frombuffer(data, _DTYPES[code])
    if code > _NEAR:
        raise NewerVersionError(f"a newer version wrote an array of the unknown kind {code}; install that version")
    values: NDArray[Any]
    content = _BOUNDS.unpack(data) if code == _RANGE else unpack(data)
    if code == _RANGE:
        first, count = content
        values = np.arange(first, first + count)
    elif code == _RUNS:
        firsts, lengths = content
        ends = np.cumsum(lengths, dtype=np.int64)
        counted = np.repeat(firsts.astype(np.int64) - (ends - lengths), lengths) + np.arange(ends[-1])
        values = counted.astype(firsts.dtype, copy=False)
    elif code == _OBJECTS:
        values = np.fromiter(content, np.object_, len(content))
    elif code == _SHAPED:
        shape, values = content
        return values.reshape(shape)
    else:
        number, size, base, distances = content
        values = np.full(size, base, np.uint64 if base >= 0 else np.int64)
        if distances:
            values += np.frombuffer(distances, f"<u{len(distances) // size}").astype(values.dtype)
        values = values.astype(_DTYPES[number], copy=False)
    values.flags.writeable = False
    return values
