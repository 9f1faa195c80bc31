"""Rows of text are looked at as their put comes in: each is UTF-8.

What msgpack says is not read here: decoding it costs a step in Python for each row, and its readers do it anyway.
"""

from __future__ import annotations

import codecs
from typing import Final

import numpy as np

from tq_service.errors import InvalidArgumentError
from tq_service.storage.cells import Rows

PIECE_BYTES: Final = 1 << 20
"""What to look at in one step, which takes some 2 ms at most."""
_CONTINUES: Final = 0x80  # the two highest bits of a byte that is not the first of its character
_HIGHEST_BITS: Final = 0xC0


def wrong_row(name: str, row: int, what: str) -> InvalidArgumentError:
    """Return the error for a row of objects that is not what its encoding says."""
    return InvalidArgumentError(
        f"row {row} of field {name!r} {what}", field="columns", metadata={"row": str(row), "field_name": name}
    )


class TextCheck:
    """Looks at one column of text, part by part in their order.

    Args:
        name: the field.
        offsets: where each row starts in the values of the column, and their end `(n + 1,)`.
        values_at: where these start in the blob of their put.

    Attributes:
        next: up to where in the blob the column has been looked at.
        end: where it ends.
    """

    __slots__ = ("_name", "_offsets", "_rest", "_values_at", "end", "next")

    def __init__(self, name: str, offsets: Rows, values_at: int) -> None:
        self._name = name
        self._offsets = offsets
        self._values_at = values_at
        self._rest = b""  # of a character whose last bytes come with the next part
        self.next = values_at
        self.end = values_at + int(offsets[-1])

    def look_at(self, data: memoryview | bytes, at: int) -> None:
        """Look at what a part of the blob, which starts at `at`, has of the column.

        Raises:
            InvalidArgumentError: a row is not UTF-8; it names the first of them.
        """
        end = min(at + len(data), self.end)
        if self.next >= end:
            return
        part, start = memoryview(data)[self.next - at : end - at], self.next - self._values_at
        first, last = np.searchsorted(self._offsets[:-1], (start, start + len(part))).tolist()
        rows = self._offsets[first:last]
        rows = rows[self._offsets[first + 1 : last + 1] > rows]  # an empty one has no first byte
        inside = (np.frombuffer(part, np.uint8)[rows - start] & _HIGHEST_BITS) == _CONTINUES
        piece, piece_start = (self._rest + part, start - len(self._rest)) if self._rest else (part, start)
        # A row that begins within a character: the first wrong row is that one, or the one before, which has its lead.
        wrong_at = int(rows[int(inside.argmax())]) if inside.any() else None
        looked_at = piece if wrong_at is None else piece[: wrong_at - piece_start]
        try:
            _, used = codecs.utf_8_decode(looked_at, "strict", wrong_at is not None or end == self.end)
        except UnicodeDecodeError as error:
            raise self._wrong(piece_start + error.start) from None
        if wrong_at is not None:
            raise self._wrong(wrong_at)
        self._rest = bytes(piece[used:])
        self.next = end

    def _wrong(self, at: int) -> InvalidArgumentError:
        row = int(np.searchsorted(self._offsets, at, "right")) - 1
        return wrong_row(
            self._name,
            row,
            f"is not UTF-8 from its byte {at - int(self._offsets[row])} on; encode text as UTF-8, or put it with the "
            "encoding bytes",
        )
