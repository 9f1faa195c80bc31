"""Texts and numbers of many samples as fields of messages, without an object of Python for each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from tq_service.errors import InvalidArgumentError
from tq_service.texts import Texts, check_texts
from tq_service.v1 import metadata_pb2 as pb

FEW: Final = 64
"""Values up to which objects of Python cost less than arrays."""
_BYTES_TYPE: Final = 2  # of a field, in the encoding of protobuf: a packed one has its values as bytes
_VARINT_BITS: Final = 7
_LATER: Final = 0x80  # in UTF-8 the upper two bits of every byte of a character but the first
_LATER_BITS: Final = 0xC0


def encode_texts(texts: Sequence[str], name: str) -> pb.Texts:
    """Return texts as a message, see `fill_texts`."""
    message = pb.Texts()
    fill_texts(message, texts, name)
    return message


def fill_texts(
    message: pb.Texts, texts: Sequence[str], name: str, *, field: str | None = None, are_shared: bool = False
) -> None:
    """Fill a message that is empty with texts.

    Args:
        message: the message.
        texts: the texts.
        name: what they are, for errors.
        field: the argument they were given in; None: `name`.
        are_shared: whether those that neighbours share travel once, where they are many.

    Raises:
        InvalidArgumentError: one is no string, or not valid Unicode.
    """
    if not isinstance(texts, Texts):
        try:
            if len(texts) <= FEW:
                parts = [text.encode() for text in texts]
                message.utf8 = b"".join(parts)
                message.sizes.extend(map(len, parts))
                return
            texts = Texts.of_shared(texts) if are_shared else Texts.of(texts)
        except (AttributeError, TypeError, UnicodeEncodeError):
            check_texts(texts, name, field or name)
            raise
    message.utf8 = texts.utf8
    fill_packed(message, "sizes", texts.sizes)
    if texts.counts is not None:
        fill_packed(message, "counts", texts.counts)


def decode_texts(message: pb.Texts, most: int, name: str, *, field: str | None = None) -> Sequence[str]:
    """Return the texts of a message, few of them as a list.

    Args:
        message: the message.
        most: how many texts there may be, one a sample.
        name: what they are, for errors.
        field: the argument they are of; None: `name`.

    Raises:
        InvalidArgumentError: there are more, sizes or counts do not fit, or the bytes are not valid UTF-8.
    """
    few = _decode_few(message) if len(message.sizes) <= min(FEW, most) and not message.counts else None
    if few is not None:
        return few
    field = field or name
    sizes, counts = np.array(message.sizes, np.uint32), np.array(message.counts, np.uint32)
    total = int(counts.sum(dtype=np.int64)) if counts.size else sizes.size
    size_bytes = int(sizes.sum(dtype=np.int64))
    if size_bytes != len(message.utf8):
        what = f"sizes of {size_bytes} bytes together, but utf8 of {len(message.utf8)}; send the bytes of each text"
        raise InvalidArgumentError(f"{name}: got {what}", field=field)
    if counts.size and (counts.size != sizes.size or not counts.all()):
        what = f"{counts.size} counts, {np.count_nonzero(counts == 0)} of them 0, for {sizes.size} sizes"
        raise InvalidArgumentError(f"{name}: got {what}; send as many, each 1 or more, or none", field=field)
    if total > most:
        raise InvalidArgumentError(f"got {total} {name} for {most} samples; give one a sample", field=field)
    texts = Texts(message.utf8, sizes, counts if counts.size else None)
    try:
        _check_characters(texts)
        return texts.tolist() if total <= FEW else texts
    except UnicodeDecodeError as error:
        raise InvalidArgumentError(
            f"{name}: got bytes that are not the UTF-8 of texts ({error}); send valid Unicode", field=field
        ) from None


def _decode_few(message: pb.Texts) -> list[str] | None:
    """Return the texts of a message of few, None where they are none; arrays cost more."""
    utf8, start, texts = message.utf8, 0, []
    try:
        for size in message.sizes:
            texts.append(utf8[start : start + size].decode())
            start += size
    except UnicodeDecodeError:
        return None
    return texts if start == len(utf8) else None


def _check_characters(texts: Texts) -> None:
    """Raise UnicodeDecodeError where the bytes of a text are not UTF-8 by themselves."""
    if texts.utf8.isascii():
        return
    texts.utf8.decode()
    starts = (np.cumsum(texts.sizes, dtype=np.int64) - texts.sizes)[texts.sizes > 0]
    firsts = np.frombuffer(texts.utf8, np.uint8)[starts]
    if bool(((firsts & _LATER_BITS) == _LATER).any()):
        raise UnicodeDecodeError("utf-8", b"", 0, 0, "a text begins within a character")


def fill_packed(message: Any, field: str, values: NDArray[Any]) -> None:
    """Fill a repeated field of numbers of 4 or 8 bytes, or of truth values, that has none yet.

    Its values lie in a message as they do in an array, so that many of them are copied at once.
    """
    if values.size <= FEW:
        getattr(message, field).extend(values.tolist())
        return
    number = message.DESCRIPTOR.fields_by_name[field].number
    data: Any = np.ascontiguousarray(values, values.dtype.newbyteorder("<"))
    message.MergeFromString(b"".join((_varint(number << 3 | _BYTES_TYPE), _varint(data.nbytes), data)))


def _varint(value: int) -> bytes:
    parts = []
    while value >> _VARINT_BITS:
        parts.append(value & ~(-1 << _VARINT_BITS) | 1 << _VARINT_BITS)
        value >>= _VARINT_BITS
    return bytes([*parts, value])
