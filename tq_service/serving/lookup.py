"""Pages of the samples that a request means, those of them with some cells; and pages of names.

Pages of samples are bounded by count and by what is known of the samples, so that each is made quickly. Their token
says where the next one begins and in which incarnation of the partition. It is no secret: a caller that has it could
ask for any page.
"""

from __future__ import annotations

import heapq
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final, cast

import numpy as np

from tq_service.errors import (
    CellNotFoundError,
    FieldNotFoundError,
    InvalidArgumentError,
    KeyNotFoundError,
    StaleIncarnationError,
    nearest,
)
from tq_service.schema import check_range
from tq_service.serving.catalog import Catalog
from tq_service.state.partition import Partition
from tq_service.state.plan import Indexes
from tq_service.state.selection import Selection
from tq_service.state.states import FAILED

_MOST_OF_A_PAGE: Final = 16_384  # samples
_MOST_NAMES_OF_A_PAGE: Final = 1_000  # which may be 512 characters long, of up to 4 bytes
MOST_NAMED: Final = 65_536  # by one request
_MOST_CHARACTERS: Final = 1 << 19  # of keys, groups, text and JSON of custom_meta; 2 MiB at most
_MOST_NUMBERS: Final = 1 << 17  # of custom_meta; 1.3 MB at most


@dataclass(frozen=True, slots=True, kw_only=True)
class Page:
    """Samples of a partition.

    Attributes:
        partition: the partition.
        positions: where they are in the table `(n,)`.
        missing_keys: keys of the page that no sample has.
        missing_indexes: indexes of the page that no sample has.
        missing_groups: groups without members here, on the first page.
        next_place: where the next page begins in the selection; None: nowhere.
    """

    partition: Partition
    positions: Indexes
    missing_keys: Sequence[str]
    missing_indexes: Indexes
    missing_groups: Sequence[str]
    next_place: int | None

    @property
    def next_token(self) -> str:
        """The token that asks for the page after this one, "" where there is none."""
        return "" if self.next_place is None else f"{self.partition.incarnation.hex()}-{self.next_place}"


def find_page(
    catalog: Catalog, partition_id: str, selection: Selection, *, size: int, token: str, missing_ok: bool = False
) -> Page | None:
    """Return a page of samples.

    Args:
        catalog: where the partition is.
        partition_id: the partition.
        selection: the samples, in all pages the same.
        size: the most samples of the page; 0: as many as a page has at most.
        token: that of the page, "" for the first one.
        missing_ok: whether a partition that is not there has no first page, which is None then.

    Raises:
        PartitionNotFoundError: the partition is not there.
        StaleIncarnationError: the partition has been cleared since the page before.
        InvalidArgumentError: the size, the token or a condition.
    """
    size = _page_size(size, _MOST_OF_A_PAGE)
    for name, named in (("keys", selection.keys), ("global_indexes", selection.indexes), ("groups", selection.groups)):
        _check_named(name, len(named))
    incarnation, place = _read_token(token)
    if incarnation and partition_id not in catalog.names():
        raise StaleIncarnationError(
            f"partition {partition_id!r} of incarnation {incarnation.hex()} was cleared while it was listed; "
            f"drop the pages you have of it",
            metadata={"partition_id": partition_id, "got": incarnation.hex()},
        )
    partition = catalog.find(partition_id, incarnation, missing_ok=missing_ok and not incarnation)
    if partition is None:
        return None
    part = selection.part(partition, place, size).first(size)
    part = part.first(fitting_count(partition, part.positions))
    return Page(
        partition=partition,
        positions=part.positions,
        missing_keys=selection.missing_keys(partition, place, part.next_place),
        missing_indexes=selection.missing_indexes(partition, place, part.next_place),
        missing_groups=selection.missing_groups(partition) if selection.groups and not token else (),
        next_place=part.next_place,
    )


def first_known(
    catalog: Catalog, partition_id: str, incarnation: bytes, rows: Indexes
) -> tuple[Partition, Indexes] | None:
    """Return the partition of some samples, and the first of them: as many as fit on a page.

    None where the partition, or one of these samples, is not there any more.
    """
    partition = catalog.find(partition_id, incarnation, missing_ok=True)
    if partition is None:
        return None
    positions = partition.table.find(rows[:_MOST_OF_A_PAGE])
    return None if (positions < 0).any() else (partition, rows[: fitting_count(partition, positions)])


def find_names(names: Iterable[str], *, of: str, size: int, token: str) -> tuple[list[str], str]:
    """Return a page of names in their order, and the token of the page after it, "" where there is none.

    Args:
        names: all of them, in any order.
        of: which list it is: a token of another one is refused.
        size: the most names of the page; 0: as many as a page has at most.
        token: that of the page, "" for the first one: the name that it begins with, or would, behind a checksum.

    Raises:
        InvalidArgumentError: the size, or the token.
    """
    size = _page_size(size, _MOST_NAMES_OF_A_PAGE)
    first = token.partition("-")[2]
    if token and token != name_token(of, first):
        raise no_page_token(token)
    page = heapq.nsmallest(size + 1, (name for name in names if name >= first))
    return page[:size], "".join(name_token(of, name) for name in page[size:])


def name_token(of: str, name: str) -> str:
    """Return the token of the page of a list that begins with a name."""
    return f"{zlib.crc32(f'{of}/{name}'.encode()):08x}-{name}"


def _page_size(size: int, most: int) -> int:
    check_range("page_size", size, 0, hint="; 0 is the largest")
    return min(size or most, most)


def _check_named(name: str, count: int) -> None:
    """Refuse a request that names more than one answer is about."""
    if count > MOST_NAMED:
        raise InvalidArgumentError(
            f"{name} has {count} of them, at most {MOST_NAMED} expected; ask for them in several calls",
            field=name,
            metadata={"got": str(count), "limit": str(MOST_NAMED)},
        )


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
    raise no_page_token(token)


def no_page_token(token: str) -> InvalidArgumentError:
    """Return the error of a token that is none of a list."""
    return InvalidArgumentError(
        f"page_token is {token[:64]!r}, which is none of this list; send the next_page_token of the page before with "
        "the other fields as they were, or none for the first page",
        field="page_token",
    )


def fitting_count(partition: Partition, positions: Indexes) -> int:
    """Return how many of the first of some samples fit into one answer with what is known of them, at least one."""
    columns = [column for name in partition.meta.names() if (column := partition.meta.read(name, positions))]
    number_count = sum(column.values.dtype.kind != "O" for column in columns)
    count = min(positions.size, _MOST_NUMBERS // max(1, number_count))
    characters = np.zeros(positions.size, np.int64)
    for column in columns:
        if column.values.dtype.kind == "O":
            characters[column.present] += _lengths(column.values[column.present].tolist())
        if column.json is not None:
            characters += _lengths(column.json.tolist())
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


def check_fields(partition: Partition, names: Sequence[str]) -> None:
    """Refuse fields that a partition does not have."""
    for name in names:
        if name not in partition.cells.fields:
            raise _no_field(partition, name)


def _no_field(partition: Partition, name: str) -> FieldNotFoundError:
    return FieldNotFoundError(
        f"partition {partition.partition_id!r} has no field {name!r}; {nearest(name, partition.cells.fields)}",
        metadata={"partition_id": partition.partition_id, "field_name": name},
    )


def locate(
    partition: Partition,
    names: Sequence[str],
    *,
    indexes: Indexes,
    keys: Sequence[str],
    skip_missing: bool,
    skip_missing_fields: bool,
) -> tuple[Indexes, Sequence[str]]:
    """Return the positions of those samples that have all cells of some fields, and these fields.

    Args:
        partition: where they are.
        names: the fields.
        indexes: the samples, where they are not named by their keys.
        keys: theirs.
        skip_missing: whether samples may be missing, or cells of theirs.
        skip_missing_fields: whether fields may be missing, and are left out where not all samples have them.

    Raises:
        FieldNotFoundError: there is no such field. A field is forgotten with its last cell: samples that have failed or
            were cleared are named instead.
        KeyNotFoundError, SampleNotFoundError, CellNotFoundError: something is missing that may not be.
        InvalidArgumentError: too many are named, or by index and by key.
    """
    if not skip_missing_fields and (unknown := [name for name in names if partition.cells.spec_of_none(name) is None]):
        raise _no_field(partition, unknown[0])
    _check_named("keys", len(keys))
    _check_named("global_indexes", indexes.size)
    if keys and indexes.size:
        raise InvalidArgumentError("samples are named by index or by key, not by both", field="keys")
    rows = _rows_of_keys(partition, keys, skip_missing=skip_missing) if keys else indexes
    if not keys and not skip_missing:
        partition.positions_of(rows, may_repeat=True)
    positions = partition.table.find(rows)
    found = positions >= 0
    if skip_missing_fields:
        names = [name for name in names if partition.cells.produced([name], positions[found]).all()]
    else:
        states = partition.state.data[positions[found]]
        if states.size and not (states == FAILED).any():
            check_fields(partition, names)
        found[found] = partition.cells.produced(names, positions[found])
    if not found.all() and not skip_missing:
        raise _missing_cell(partition, names, rows[~found])
    return positions[found], names


def _rows_of_keys(partition: Partition, keys: Sequence[str], *, skip_missing: bool) -> Indexes:
    positions = partition.key_index.positions_of(list(keys))
    if not skip_missing and bool((positions < 0).any()):
        key = keys[int(np.argmax(positions < 0))]
        raise KeyNotFoundError(
            f"partition {partition.partition_id!r} has no key {key!r}; {nearest(key, partition.key_index)}; "
            f"leave it out with skip_missing",
            metadata={"partition_id": partition.partition_id, "key": key},
        )
    rows: Indexes = partition.table.index.data[positions[positions >= 0]]
    return rows


def _missing_cell(partition: Partition, names: Sequence[str], rows: Indexes) -> CellNotFoundError:
    """Return the error of samples that lack a field; one that has failed, and so never gets it, is named first."""
    failed = rows[partition.state.data[partition.table.find(rows)] == FAILED]
    row = (failed if failed.size else rows)[:1]
    position = partition.table.find(row)
    lacking = [name for name in names if not partition.cells.produced([name], position)[0]]
    key = partition.key.data[position[0]]
    if failed.size:
        why = ", and gets none: it has failed, so that what is put for it is dropped"
    else:
        why = f" yet ({rows.size} samples lack a field); a claim waits for it"
    return CellNotFoundError(
        f"sample {int(row[0])}{'' if key is None else f' (key {key!r})'} of partition {partition.partition_id!r} has "
        f"no {', '.join(map(repr, lacking))}{why}; leave it out with skip_missing, or its fields with "
        f"skip_missing_fields",
        metadata={
            "partition_id": partition.partition_id,
            "global_index": str(row[0]),
            "field_names": ",".join(lacking),
        },
    )
