"""Texts of many samples as bytes, in a few arrays instead of a string of Python for each.

Keys, groups and columns of text travel so, are written to the log so, and are hashed by the array.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, overload

import numpy as np
from numpy.typing import NDArray

from tq_service.errors import InvalidArgumentError

Sizes = NDArray[np.uint32]
Hashes = NDArray[np.uint64]

_NUL: Final = b"\0"
_MANY: Final = 64
_STEP: Final = 1 << 14  # texts that are hashed at once, while they are in the cache
_WORD: Final = 8  # bytes that are hashed at once
_MOST_WORDS: Final = 16  # of texts that are compared word by word
_MASKS: Final = np.array([(1 << 8 * count) - 1 for count in range(_WORD + 1)], np.uint64)
# Odd numbers that differ from process to process, so that a client cannot choose texts of one hash.
_FACTOR: Final = np.uint64(secrets.randbits(64) | 1)
_OTHER_FACTOR: Final = np.uint64(secrets.randbits(64) | 1)
_HALF: Final = np.uint64(32)
_FIRST_BITS: Final = np.uint64(48)
_MOST_HASH: Final = (1 << 64) - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class HashOrder:
    """Texts in the order of their hashes, which are the same for equal texts in one process.

    Attributes:
        hashes: `(m,)`, ascending.
        positions: `(m,)`, which text each is of.
    """

    hashes: Hashes
    positions: NDArray[np.int64]

    @property
    def are_distinct(self) -> bool:
        """Whether no two texts have one hash; then no two are equal."""
        return not bool((self.hashes[1:] == self.hashes[:-1]).any())


class Texts(Sequence[str]):
    """Texts in order; one that several in a row share may be there once. Immutable.

    Attributes:
        utf8: the texts in UTF-8, one after the other.
        sizes: `(m,)`, the bytes of each.
        counts: `(m,)`, how many in a row have it; None: one each.
    """

    __slots__ = ("_found_ends", "_is_ascii", "_last", "_order", "counts", "sizes", "utf8")

    def __init__(self, utf8: bytes, sizes: Sizes, counts: Sizes | None = None) -> None:
        self.utf8 = utf8
        self.sizes = sizes
        self.counts = counts
        self._is_ascii = utf8.isascii()
        self._order: HashOrder | None = None
        self._found_ends: NDArray[np.int64] | None = None
        self._last: NDArray[np.int64] | None = None if counts is None else np.cumsum(counts, dtype=np.int64)

    @classmethod
    def of(cls, texts: Sequence[str]) -> Texts:
        """Return strings as bytes.

        Raises:
            TypeError: one is no string; UnicodeEncodeError: one is not valid Unicode.
        """
        joined = "".join(texts)
        utf8 = joined.encode()
        sizes = map(len, texts) if len(utf8) == len(joined) else (len(text.encode()) for text in texts)
        return cls(utf8, np.fromiter(sizes, np.uint32, len(texts)))

    @classmethod
    def of_shared(cls, texts: Sequence[str]) -> Texts:
        """Return strings as bytes, those that neighbours share once."""
        values = np.empty(len(texts), np.object_)
        values[:] = texts
        heads = _heads(values)
        return cls.of(values[heads].tolist())._repeated(heads, values.size)

    @classmethod
    def of_array(cls, texts: NDArray[np.str_], *, are_shared: bool = False) -> Texts:
        """Return an array of text `(n,)` as bytes; `are_shared`: those that neighbours share once.

        Raises:
            UnicodeEncodeError: one is not valid Unicode.
        """
        if are_shared:
            heads = _heads(texts)
            if heads.size < texts.size:
                return cls.of_array(texts[heads])._repeated(heads, texts.size)
        plain = np.ascontiguousarray(texts, texts.dtype.newbyteorder("="))
        points = plain.view(np.uint32)
        if points.size and int(np.bitwise_or.reduce(points)) < 0x80:
            width = points.size // plain.size
            if points[width - 1 :: width].all():  # none is filled up to the longest
                return cls(points.astype(np.uint8).tobytes(), np.full(plain.size, width, np.uint32))
            sizes = np.char.str_len(plain).astype(np.uint32)
            utf8 = points.astype(np.uint8).tobytes().replace(_NUL, b"")
            if len(utf8) == int(sizes.sum(dtype=np.int64)):  # else one has a NUL of its own
                return cls(utf8, sizes)
        return cls.of(plain.tolist())

    def _repeated(self, heads: NDArray[np.int64], count: int) -> Texts:
        """Return the same texts, each for the samples from one head to the next."""
        return Texts(self.utf8, self.sizes, np.diff(heads, append=count).astype(np.uint32))

    def __len__(self) -> int:
        if self._last is None:
            return self.sizes.size
        return int(self._last[-1]) if self._last.size else 0

    @overload
    def __getitem__(self, where: int) -> str: ...
    @overload
    def __getitem__(self, where: slice) -> list[str]: ...
    def __getitem__(self, where: Any) -> Any:
        if isinstance(where, slice):
            return self.at(np.arange(*where.indices(len(self))))
        if not -len(self) <= where < len(self):
            raise IndexError(f"there are {len(self)} texts, and none at {where}")
        at = int(where) % len(self)
        at = at if self._last is None else int(np.searchsorted(self._last, at, "right"))
        end = int(self._ends[at])
        return self.utf8[end - int(self.sizes[at]) : end].decode()

    def __iter__(self) -> Iterator[str]:
        return iter(self.tolist())

    def __repr__(self) -> str:
        return f"Texts({len(self)} of {len(self.utf8)} bytes)"

    def __reduce__(self) -> tuple[Any, ...]:
        return Texts, (self.utf8, self.sizes, self.counts)

    @property
    def _ends(self) -> NDArray[np.int64]:
        """Where each of `distinct()` ends in `utf8`; found out once."""
        if self._found_ends is None:
            self._found_ends = np.cumsum(self.sizes, dtype=np.int64)
        return self._found_ends

    @property
    def longest(self) -> int:
        """Characters of the longest text."""
        if self._is_ascii:
            return int(self.sizes.max(initial=0))
        return max(map(len, self.distinct()), default=0)

    @property
    def codes(self) -> NDArray[np.int64]:
        """Which of `distinct()` each text is `(n,)`."""
        numbers = np.arange(self.sizes.size)
        return numbers if self.counts is None else np.repeat(numbers, self.counts)

    def distinct(self, start: int = 0, stop: int | None = None) -> list[str]:
        """Return the texts `(m,)`, those that several in a row have once; or those of them between two places."""
        ends = self._ends[start:stop]
        if ends.size < _MANY:
            return self._cut(ends - self.sizes[start:stop], ends)
        first = int(ends[0]) - int(self.sizes[start])
        utf8 = self.utf8[first : int(ends[-1])]
        if _NUL in utf8:
            return self._cut(ends - self.sizes[start:stop], ends)
        is_text = np.ones(len(utf8) + ends.size - 1, np.bool_)
        is_text[ends[:-1] - first + np.arange(ends.size - 1)] = False
        separated = np.zeros(is_text.size, np.uint8)
        separated[is_text] = np.frombuffer(utf8, np.uint8)
        return separated.tobytes().decode().split("\0")  # several times as quick as a slice for each

    def part(self, start: int, stop: int) -> Texts:
        """Return `distinct()` between two places, which is in memory of its own."""
        ends = self._ends[start:stop]
        utf8 = self.utf8[int(ends[0]) - int(self.sizes[start]) : int(ends[-1])] if ends.size else b""
        return Texts(utf8, self.sizes[start:stop].copy())

    def tolist(self) -> list[str]:
        """Return all texts."""
        texts = self.distinct()
        return texts if self.counts is None else list(map(texts.__getitem__, self.codes.tolist()))

    def at(self, positions: NDArray[np.int64]) -> list[str]:
        """Return the texts at some positions."""
        if self._last is not None:
            positions = np.searchsorted(self._last, positions, "right")
        ends = self._ends[positions]
        return self._cut(ends - self.sizes[positions], ends)

    def _cut(self, starts: NDArray[np.int64], ends: NDArray[np.int64]) -> list[str]:
        """Return the texts between two places each."""
        if not starts.size:
            return []
        first = int(starts.min())
        utf8 = self.utf8[first : int(ends.max())]
        places = map(slice, (starts - first).tolist(), (ends - first).tolist())
        if self._is_ascii:
            return list(map(utf8.decode().__getitem__, places))
        return [part.decode() for part in map(utf8.__getitem__, places)]

    @property
    def order(self) -> HashOrder:
        """Return `distinct()` in the order of hashes; found out once."""
        if self._order is None:
            parts = [self.hashes(start, start + _STEP) for start in range(0, self.sizes.size, _STEP)]
            hashes = np.concatenate(parts) if parts else np.zeros(0, np.uint64)
            positions = _order_of(hashes)
            self._order = HashOrder(hashes=hashes[positions], positions=positions)
        return self._order

    def hashes(self, start: int = 0, stop: int | None = None) -> Hashes:
        """Return a hash of each text of `distinct()`, or of those between two places."""
        sizes = self.sizes[start:stop].astype(np.int64)
        if not sizes.size:
            return np.zeros(0, np.uint64)
        ends = self._ends[start:stop]
        first = int(ends[0] - sizes[0])
        hashes: Hashes = sizes.astype(np.uint64) * _FACTOR
        data = np.frombuffer(self.utf8[first : int(ends[-1])] + bytes(_WORD), np.uint8)
        size = int(sizes[0])
        if bool((sizes == size).all()):  # as many are
            for at in range(0, size, _WORD):
                words = np.ndarray(sizes.shape, "<u8", data, at, (size,))
                hashes = _mixed(hashes, words & _MASKS[min(_WORD, size - at)])
            return hashes
        word_at = np.ndarray((data.size - _WORD + 1,), "<u8", data, strides=(1,))
        starts, left = ends - sizes - first, sizes  # where to go on, and for how long
        which: Any = slice(None)  # in which of them
        while True:
            is_left = left > 0
            if not is_left.all():
                which = np.flatnonzero(is_left) if isinstance(which, slice) else which[is_left]
                starts, left = starts[is_left], left[is_left]
            if not left.size:
                return hashes
            hashes[which] = _mixed(hashes[which], word_at[starts] & _MASKS[np.minimum(left, _WORD)])
            starts, left = starts + _WORD, left - _WORD


def hash_of(text: str) -> int:
    """Return the hash that `Texts.hashes` has of a text; of one it is quicker than arrays."""
    utf8 = text.encode()
    value = len(utf8) * int(_FACTOR) & _MOST_HASH
    for start in range(0, len(utf8), _WORD):
        word = int.from_bytes(utf8[start : start + _WORD], "little")
        value = (value ^ word) * int(_OTHER_FACTOR) & _MOST_HASH
        value ^= value >> int(_HALF)
    return value


def _mixed(hashes: Hashes, words: Hashes) -> Hashes:
    mixed: Hashes = (hashes ^ words) * _OTHER_FACTOR
    mixed ^= mixed >> _HALF
    return mixed


def _order_of(hashes: Hashes) -> NDArray[np.int64]:
    """Return the positions of hashes in their order.

    The first 16 bits are sorted by counting, as numpy sorts numbers of that size. That leaves a few hashes to sort in
    each place, and a sort that takes what is in order as it is does the rest: a quarter of the time of one sort alone.
    """
    positions = np.argsort((hashes >> _FIRST_BITS).astype(np.uint16), kind="stable")
    ordered: NDArray[np.int64] = positions[np.argsort(hashes[positions], kind="stable")]
    return ordered


def _heads(values: NDArray[Any]) -> NDArray[np.int64]:
    """Return the positions of values that differ from the one before them."""
    if not values.size:
        return np.zeros(0, np.int64)
    is_head = np.ones(values.size, np.bool_)
    if values.dtype.kind == "U" and values.flags.c_contiguous and 0 < values.itemsize <= _MOST_WORDS * _WORD:
        word = np.uint64 if values.itemsize % _WORD == 0 else np.uint32
        words = values.view(word).reshape(values.size, -1)  # in half the time that it takes to compare texts
        is_head[1:] = words[1:, -1] != words[:-1, -1]
        for at in range(words.shape[1] - 1):
            is_head[1:] |= words[1:, at] != words[:-1, at]
    else:
        is_head[1:] = values[1:] != values[:-1]
    return np.flatnonzero(is_head)


def check_texts(texts: Sequence[Any], name: str, field: str) -> None:
    """Refuse what is no text.

    Args:
        texts: the texts.
        name: what they are.
        field: the argument they were given in.

    Raises:
        InvalidArgumentError: one is no string, or not valid Unicode; names the first.
    """
    for place, text in enumerate(texts):
        try:
            str.encode(text)
        except (TypeError, UnicodeEncodeError) as error:
            raise InvalidArgumentError(
                f"{name}[{place}] is {text!r:.200}, expected a string, in valid Unicode ({error})", field=field
            ) from None
