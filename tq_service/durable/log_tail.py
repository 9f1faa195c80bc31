"""How far the write-ahead log of an SQLite database is whole, and what follows there.

SQLite goes by the same checksums when it opens a database, and passes over all that follows the first wrong one without
a word: rightly after a loss of power, wrongly where a byte has flipped. The format is documented at
https://www.sqlite.org/fileformat2.html#walformat.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, BinaryIO, Final

import numpy as np
import numpy.typing as npt

Words = npt.NDArray[np.uint32]

_HEADER_BYTES: Final = 32
_FRAME_HEADER_WORDS: Final = 6
_MAGIC: Final = 0x377F0682  # its lowest bit: whether checksums are of big-endian words
_BLOCK_BYTES: Final = 4 * 2**20
_MASK: Final = 0xFFFFFFFF


@dataclass(frozen=True, slots=True, kw_only=True)
class LogTail:
    """What a write-ahead log holds.

    Attributes:
        whole_bytes: up to the end of the last commit that can be read.
        torn_bytes: all that follows.
        torn_commit_count: commits among that, as far as frames are of this log and complete.
        goes_on_after_commit: whether something follows the first of them: it was written to after that commit was done.
    """

    whole_bytes: int = 0
    torn_bytes: int = 0
    torn_commit_count: int = 0
    goes_on_after_commit: bool = False


def read_log_tail(path: Path) -> LogTail:
    """Read a write-ahead log; an empty or missing one has no tail."""
    try:
        with path.open("rb") as log:
            return _read(log, path.stat().st_size)
    except FileNotFoundError:
        return LogTail()


def _read(log: BinaryIO, size_bytes: int) -> LogTail:
    header = log.read(_HEADER_BYTES)
    if len(header) < _HEADER_BYTES:
        return LogTail(torn_bytes=len(header))
    stored = np.frombuffer(header, ">u4")
    is_big_endian, page_bytes = bool(stored[0] & 1), int(stored[2])
    words = np.frombuffer(header[:24], ">u4" if is_big_endian else "<u4").astype(np.uint32)
    sums = _advanced((0, 0), words[None, :])[0]
    if int(stored[0]) & ~1 != _MAGIC or sums != (int(stored[6]), int(stored[7])):
        return LogTail(torn_bytes=size_bytes, torn_commit_count=1, goes_on_after_commit=size_bytes > _HEADER_BYTES)
    return _scan(log, size_bytes, page_bytes + 4 * _FRAME_HEADER_WORDS, is_big_endian, (stored[4:6], sums))


def _scan(log: BinaryIO, size_bytes: int, frame_bytes: int, is_big_endian: bool, begun: tuple[Any, Any]) -> LogTail:
    salts, sums = begun
    frame_count = whole_count = torn_commit_count = 0
    first_torn_commit: int | None = None
    is_whole = True
    for block in _blocks(log, frame_bytes):
        stored = block.view(">u4")
        ours = (stored[:, 2:4] == salts).all(axis=1)
        ends_commit = ours & (stored[:, 1] != 0)
        good = 0
        if is_whole:
            native = stored if is_big_endian else block.view("<u4")
            words = np.concatenate([native[:, :2], native[:, _FRAME_HEADER_WORDS:]], axis=1).astype(np.uint32)
            chain = _advanced(sums, words)
            kept = (int(one) for one in stored[:, 4:6].ravel())
            for expected, got, is_ours in zip(zip(kept, kept, strict=True), chain, ours, strict=True):
                if expected != got or not is_ours:
                    is_whole = False
                    break
                good, sums = good + 1, got
        commits = np.flatnonzero(ends_commit)
        if (before := commits[commits < good]).size:
            whole_count = frame_count + int(before[-1]) + 1
        torn = commits[commits >= good]
        torn_commit_count += torn.size
        if first_torn_commit is None and torn.size:
            first_torn_commit = frame_count + int(torn[0])
        frame_count += len(block)
    whole_bytes = _HEADER_BYTES + whole_count * frame_bytes
    goes_on = first_torn_commit is not None and size_bytes > _HEADER_BYTES + (first_torn_commit + 1) * frame_bytes
    return LogTail(
        whole_bytes=whole_bytes,
        torn_bytes=size_bytes - whole_bytes,
        torn_commit_count=torn_commit_count,
        goes_on_after_commit=goes_on,
    )


def _blocks(log: BinaryIO, frame_bytes: int) -> Iterator[npt.NDArray[np.uint8]]:
    """Yield complete frames as rows of bytes; an incomplete one at the end is left out."""
    while data := log.read(max(1, _BLOCK_BYTES // frame_bytes) * frame_bytes):
        count = len(data) // frame_bytes
        yield np.frombuffer(data, np.uint8, count * frame_bytes).reshape(count, frame_bytes)


def _advanced(sums: tuple[int, int], frames: Words) -> list[tuple[int, int]]:
    """Return SQLite's two running sums after each frame, of which a row has the words.

    For each pair of words: s0 += x0 + s1; s1 += x1 + s0. That is linear modulo 2**32, so that the part of each frame is
    a product with weights.
    """
    (m00, m01, m10, m11), weights = _weights(frames.shape[1] // 2)
    parts = frames @ weights
    s0, s1 = sums
    result = []
    for c0, c1 in parts.tolist():
        s0, s1 = (m00 * s0 + m01 * s1 + c0) & _MASK, (m10 * s0 + m11 * s1 + c1) & _MASK
        result.append((s0, s1))
    return result


@cache
def _weights(pair_count: int) -> tuple[tuple[int, int, int, int], Words]:
    """Return what the sums before are multiplied with, and the weights of the words, (2 * pairs, 2)."""
    weights = np.empty((2 * pair_count, 2), np.uint32)
    m00, m01, m10, m11 = 1, 0, 0, 1
    for pair in reversed(range(pair_count)):
        weights[2 * pair] = (m00 + m01) & _MASK, (m10 + m11) & _MASK
        weights[2 * pair + 1] = m01, m11
        m00, m01, m10, m11 = (m00 + m01) & _MASK, (m00 + 2 * m01) & _MASK, (m10 + m11) & _MASK, (m10 + 2 * m11) & _MASK
    return (m00, m01, m10, m11), weights
