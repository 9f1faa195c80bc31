"""Object names, and the encoding of puts and lists in objects.

    tq/<storage_id>/<boot>/g0-17/0              puts, written by the storage service itself
    tq/<storage_id>/<boot>/list0-1790000000/0   list of the objects that existed at that second
    tq/<storage_id>/<boot>/successor/1          marks that a successor has taken over the puts
    tq/<storage_id>/<boot>/g1-3/0               puts that this successor has mirrored again

An object name consists of the storage service's name, its instance id (`boot_id` in messages) in hexadecimal, a label,
and the chunk number. The numbers and seconds in labels are never reused, so a new name never refers to an object left
behind by a killed writer.

An object contains complete puts with the same owner and partition. In order, the object contains the number of puts,
the sizes of each put, all records, and all tables and values. An object that is too large for the object store is split
into chunks. The first chunk is written last, so if it exists, all chunks exist.

Objects are found through lists, because few object stores can find names by prefix without scanning all names. Objects
are numbered. Each list describes all existing objects and states which number the next object will have. At most
`WINDOW` objects are written between two lists. A list plus a check of the next `WINDOW` names therefore covers all
acknowledged objects. Each list is named after the second in which it was written, so a search proceeds backward from
the current second. Each takeover starts a new generation of objects, which has its own lists. A successor searches all
generations, because the writer of an earlier generation may have kept writing.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Final

import msgpack

from tq_service.errors import DataLossError, InvalidArgumentError
from tq_service.objects.base import LARGEST_OBJECT_BYTES, Buffer

WINDOW: Final = 8192
"""Maximum number of objects that are written between two lists."""

HEAD_BYTES: Final = 64 << 10
"""Number of bytes to read from the start of an object. They nearly always contain all of the object's records."""

_COUNT: Final = struct.Struct("<I")
_SIZES: Final = struct.Struct("<IQ")
_PUT_ID_BYTES: Final = 16
_STORAGE_ID: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:-]{0,127}")


@dataclass(slots=True, eq=False)
class PutObject:
    """An object that contains puts with the same owner and partition.

    Attributes:
        generation: number of takeovers before the object was written; see the module docstring.
        number: number of the object within its generation.
        owner: controller that owns the puts.
        partition_id: partition of the puts.
        put_ids: ids of the puts that have not been dropped.
        piece_count: number of chunks.
        is_written: whether the object exists.
        is_short: whether the object has fewer copies than requested.
        is_to_renew: whether to mirror the puts again, in new objects, once they have been fetched into memory.
    """

    generation: int
    number: int
    owner: bytes
    partition_id: str
    put_ids: set[bytes] = field(default_factory=set)
    piece_count: int = 1
    is_written: bool = False
    is_short: bool = False
    is_to_renew: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Names:
    """Generates the object names of a storage service instance.

    Raises:
        InvalidArgumentError: the storage service's name contains characters that are not allowed in object names.
    """

    storage_id: str
    boot_id: bytes

    def __post_init__(self) -> None:
        if not _STORAGE_ID.fullmatch(self.storage_id):
            raise InvalidArgumentError(
                f"storage_id is {self.storage_id[:128]!r}; expected 1 to 128 letters, digits, '.', '_', ':' and '-', "
                "starting with a letter or digit",
                field="storage_id",
            )

    @property
    def prefix(self) -> str:
        """Common prefix of all object names of the instance."""
        return f"tq/{self.storage_id}/{self.boot_id.hex()}/"

    def pieces(self, stored: PutObject) -> list[str]:
        """Return the names of an object's chunks."""
        label = f"g{stored.generation}-{stored.number}"
        return [self._name(label, piece) for piece in range(stored.piece_count)]

    def numbered(self, generation: int, numbers: Iterable[int]) -> list[str]:
        """Return the name of the first chunk of each numbered object."""
        return [self._name(f"g{generation}-{number}", 0) for number in numbers]

    def list_of(self, generation: int, second: int, piece: int = 0) -> str:
        """Return the name of a chunk of a list."""
        return self._name(f"list{generation}-{second}", piece)

    def successor(self, generation: int) -> str:
        """Return the name of the object that marks the start of a generation."""
        return self._name("successor", generation)

    def _name(self, label: str, piece: int) -> str:
        return f"{self.prefix}{label}/{piece}"


def pack_puts(puts: Sequence[tuple[bytes, Sequence[Buffer]]]) -> list[Buffer]:
    """Encode puts as an object, and return the object's bytes in parts.

    Args:
        puts: for each put, a pair of its record and the parts that contain its tables and values.
    """
    sizes = [_SIZES.pack(len(record), sum(map(len, parts))) for record, parts in puts]
    head = b"".join((_COUNT.pack(len(puts)), *sizes, *(record for record, _ in puts)))
    return [head, *(part for _, parts in puts for part in parts)]


def unpack_heads(data: Buffer) -> tuple[list[tuple[bytes, int, int]], int] | int:
    """Decode the records at the start of an object.

    Return the records, each with the start and end of its put's bytes, and the object's size. If `data` is too short to
    include all records, return the number of bytes needed instead.
    """
    if len(data) < _COUNT.size:
        return _COUNT.size
    count: int = _COUNT.unpack_from(data)[0]
    at: int = _COUNT.size + count * _SIZES.size
    if len(data) < at:
        return at
    sizes = [_SIZES.unpack_from(data, _COUNT.size + number * _SIZES.size) for number in range(count)]
    records_end: int = at + sum(record_bytes for record_bytes, _ in sizes)
    if len(data) < records_end:
        return records_end
    found, start = [], records_end
    for record_bytes, put_bytes in sizes:
        found.append((bytes(data[at : at + record_bytes]), start, start + put_bytes))
        at, start = at + record_bytes, start + put_bytes
    return found, start


def piece_count_of(size: int) -> int:
    """Return the number of chunks in an object of `size` bytes."""
    return max(1, -(-size // LARGEST_OBJECT_BYTES))


def cut(parts: Iterable[Buffer], most: int = LARGEST_OBJECT_BYTES) -> list[list[Buffer]]:
    """Split bytes into chunks of `most` bytes. The last chunk may be smaller."""
    pieces: list[list[Buffer]] = [[]]
    free = most
    for part in parts:
        view = memoryview(part).cast("B")
        while len(view) > free:
            pieces[-1].append(view[:free])
            view = view[free:]
            pieces.append([])
            free = most
        if len(view):
            pieces[-1].append(view)
            free -= len(view)
    return pieces


def pack_list(next_number: int, objects: Iterable[PutObject]) -> bytes:
    """Encode a list of objects.

    Args:
        next_number: number of the generation's next object, which is not in the list.
        objects: objects that exist or are being written.
    """
    rows = [
        (each.generation, each.number, each.piece_count, each.owner, each.partition_id, b"".join(each.put_ids))
        for each in objects
    ]
    packed: bytes = msgpack.packb((next_number, rows))
    return _SIZES.pack(0, len(packed)) + packed


def list_bytes(head: Buffer) -> int:
    """Return the total size in bytes of a list whose first bytes are `head`."""
    return int(_SIZES.unpack_from(head)[1]) + _SIZES.size


def unpack_list(data: Buffer) -> tuple[int, list[PutObject]]:
    """Decode a list, and return the number of the next object, followed by the listed objects.

    Raises:
        DataLossError: the data cannot be decoded as a list.
    """
    try:
        next_number, rows = msgpack.unpackb(memoryview(data)[_SIZES.size :], use_list=False)
        return next_number, [
            PutObject(generation, number, owner, partition_id, set(_put_ids(put_ids)), piece_count, is_written=True)
            for generation, number, piece_count, owner, partition_id, put_ids in rows
        ]
    except (ValueError, TypeError) as error:
        raise DataLossError(f"could not decode a list of mirrored puts: {error}") from error


def _put_ids(joined: bytes) -> list[bytes]:
    ends = accumulate(_PUT_ID_BYTES for _ in range(len(joined) // _PUT_ID_BYTES))
    return [joined[end - _PUT_ID_BYTES : end] for end in ends]
