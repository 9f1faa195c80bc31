"""Pages of long lists of samples: bounded by count and by what is known of the samples, so that each is made quickly.

The token of a page says where the next one begins and in which incarnation of the partition. It is no secret: who has
it could ask for any page.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, cast

import numpy as np

from tq_service.domain.catalog import Catalog
from tq_service.domain.partition import Partition
from tq_service.domain.plan import Indexes
from tq_service.errors import InvalidArgumentError, StaleIncarnationError
from tq_service.server.from_proto import check_range
from tq_service.v1 import controller_service_pb2 as pb

MOST_SAMPLES: Final = 16_384
MOST_NAMED: Final = 65_536  # by the keys or indexes of one request
_MOST_CHARACTERS: Final = 1 << 19  # of keys, groups and text of custom_meta; 2 MiB at most
_MOST_NUMBERS: Final = 1 << 17  # of custom_meta; 1.3 MB at most


@dataclass(frozen=True, slots=True)
class Page:
    """Samples of a partition.

    Attributes:
        rows: their global indexes `(n,)`.
        missing_keys: keys of the page that no sample has.
        next_place: where the next page begins: an index, or a position among the keys; None: nowhere.
    """

    rows: Indexes
    missing_keys: Sequence[str] = ()
    next_place: int | None = None


def check_named(name: str, count: int) -> None:
    """Refuse a request that names more samples than one answer is about."""
    if count > MOST_NAMED:
        raise InvalidArgumentError(
            f"{name} names {count} samples, at most {MOST_NAMED} expected; ask for them in several calls", field=name
        )


def find_page(catalog: Catalog, request: pb.LookupSamplesRequest) -> tuple[Partition, Page]:
    """Return the page that a request asks for.

    Raises:
        StaleIncarnationError: the partition has been cleared since the page before.
        InvalidArgumentError: the size or the token of the page.
    """
    check_range("page_size", request.page_size, 0, hint="; 0 is the largest")
    size = min(request.page_size or MOST_SAMPLES, MOST_SAMPLES)
    check_named("keys", len(request.keys))
    incarnation, place = _read_token(request.page_token)
    if incarnation and request.partition_id not in catalog.names():
        raise StaleIncarnationError(
            f"partition {request.partition_id!r} of incarnation {incarnation.hex()} was cleared while it was listed; "
            f"drop the pages you have of it"
        )
    partition = catalog.get(request.partition_id, incarnation)
    if request.all_samples:
        return partition, _page_of_all(partition, place, size)
    return partition, _page_of_keys(partition, list(request.keys[place : place + size]), place, len(request.keys))


def token_of(partition: Partition, page: Page) -> str:
    """Return the token that asks for the page after this one."""
    return "" if page.next_place is None else f"{partition.incarnation.hex()}-{page.next_place}"


def _read_token(token: str) -> tuple[bytes, int]:
    """Return the incarnation that a list is of, and where a page of it begins."""
    if not token:
        return b"", 0
    incarnation, _, place = token.partition("-")
    if len(incarnation) == 32 and len(place) <= 18 and place.isascii() and place.isdecimal():
        try:
            return bytes.fromhex(incarnation), int(place)
        except ValueError:
            pass
    raise InvalidArgumentError(
        f"page_token is {token[:64]!r}; send the next_page_token of the page before, or none for the first page",
        field="page_token",
    )


def _page_of_all(partition: Partition, first_index: int, size: int) -> Page:
    positions = partition.table.present_from(first_index, size + 1)
    count = min(size, _fitting(partition, positions))
    rows = partition.table.index.data[positions]
    return Page(rows[:count], next_place=int(rows[count]) if count < rows.size else None)


def _page_of_keys(partition: Partition, keys: list[str], place: int, key_count: int) -> Page:
    positions = partition.key_index.positions_of(keys)
    found = np.flatnonzero(positions >= 0)
    count = _fitting(partition, positions[found])
    end = len(keys) if count == found.size else int(found[count])
    missing = [keys[each] for each in np.flatnonzero(positions[:end] < 0).tolist()]
    rows = partition.table.index.data[positions[found[:count]]]
    return Page(rows, missing, place + end if place + end < key_count else None)


def _fitting(partition: Partition, positions: Indexes) -> int:
    """Return how many of the first samples fit on a page, at least one."""
    columns = [column for name in partition.meta.names() if (column := partition.meta.read(name, positions))]
    texts = [column.values[column.present] for column in columns if column.values.dtype.kind == "O"]
    count = min(positions.size, _MOST_NUMBERS // max(1, len(columns) - len(texts)))
    characters = np.zeros(positions.size, np.int64)
    for column in columns:
        if column.values.dtype.kind == "O":
            characters[column.present] += _lengths(column.values[column.present].tolist())
    if not partition.key.is_blank:
        characters += _lengths(partition.key.data[positions].tolist())
    if partition.groups.in_use:
        characters += _lengths(partition.groups.names_of(positions))
    within = int(np.searchsorted(np.cumsum(characters), _MOST_CHARACTERS, side="right"))
    return max(min(count, within), min(1, positions.size))


def _lengths(names: Sequence[str | None]) -> Indexes:
    if None in names:
        names = [name or "" for name in names]
    return np.fromiter(map(len, cast("Sequence[str]", names)), np.int64, len(names))
