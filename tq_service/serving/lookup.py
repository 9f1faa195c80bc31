"""Selections of samples: read in pages, waited for, cleared in parts; and pages of names.

Pages of samples are bounded by count and by what is known of the samples, so that each is made quickly. Their token
says where the next one begins and in which incarnation of the partition. It is no secret: a caller that has it could
ask for any page.

`LookupWait` waits until enough samples are found. `Clearing` clears the samples of a selection in parts, between which
other calls have their turn.
"""

from __future__ import annotations

import asyncio
import heapq
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Final, cast

import numpy as np

from tq_service.errors import (
    CellNotFoundError,
    FieldNotFoundError,
    InvalidArgumentError,
    KeyNotFoundError,
    StaleIncarnationError,
    TqError,
    nearest,
)
from tq_service.machine.claims import check_claim
from tq_service.machine.samples import SamplesCleared, SamplesWritten, SampleWrite
from tq_service.schema import SampleState, check_range
from tq_service.serving.catalog import Catalog
from tq_service.state.partition import Partition
from tq_service.state.plan import Condition, Indexes, LeasedClaim
from tq_service.state.table import FAILED, as_slice, distinct
from tq_service.wait_clock import Waiting

_MOST_OF_A_PAGE: Final = 16_384  # samples
_MOST_NAMES_OF_A_PAGE: Final = 1_000  # which may be 512 characters long, of up to 4 bytes
MOST_NAMED: Final = 65_536  # by one request
_MOST_CHARACTERS: Final = 1 << 19  # of keys, groups, text and JSON of custom_meta; 2 MiB at most
_MOST_NUMBERS: Final = 1 << 17  # of custom_meta; 1.3 MB at most
_LOOKED_AT_ONCE: Final = 16_384  # rows
_MOST_UNSEEN: Final = 65_536  # rows, one written several times counted as often: memory is bounded by what is stored
_CLEARED_AT_ONCE: Final = 1 << 15  # samples
_PUTS_CLEARED_AT_ONCE: Final = 128  # that have cells of these: a few milliseconds, where each sample has its own

_MOST_SCANNED: Final = 131_072  # rows, for those in groups or under conditions
_NONE: Final = np.zeros(0, np.int64)


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """Samples that come one after the other in a selection.

    Attributes:
        positions: where they are in the table `(n,)`.
        places: for each of them the place at which a part begins that begins with it `(n,)`.
        next_place: where the part after this one begins; None: nowhere.
    """

    positions: Indexes
    places: Indexes
    next_place: int | None

    def first(self, count: int) -> Part:
        """Return the part of the first `count` samples at most."""
        if count >= self.positions.size:
            return self
        return Part(positions=self.positions[:count], places=self.places[:count], next_place=int(self.places[count]))


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """Samples that a request means.

    Those that are named come in the order of `indexes`, then of `keys`; where none is named, the members of `groups`,
    or all samples, in the order of insertion. It is read in parts, since there may be millions: a place is a number of
    names, or a global index.

    Attributes:
        indexes: global indexes `(n,)`.
        keys: keys.
        groups: names of groups, whose members are meant.
        is_all: whether all samples are.
        skipped_by: name of a task that never gets the samples; empty: any samples. For `is_all`.
        left_for: name of a task that the samples are left for, none of which a worker of any task has leased; empty:
            any samples.
        where: what the samples must satisfy besides.

    Raises:
        InvalidArgumentError: samples are named both by themselves and by their group, or by what skipped them.
    """

    indexes: Indexes = field(default_factory=_NONE.copy)
    keys: Sequence[str] = ()
    groups: Sequence[str] = ()
    is_all: bool = False
    skipped_by: str = ""
    left_for: str = ""
    where: tuple[Condition, ...] = ()

    def __post_init__(self) -> None:
        if self.skipped_by and not self.is_all:
            raise InvalidArgumentError(
                f"skipped_by is {self.skipped_by!r}, and samples or groups are named too; give one of them",
                field="skipped_by",
            )
        if self.groups and (self.named_count or self.is_all):
            raise InvalidArgumentError(
                "groups are named, and samples too; name samples by index or key, or the groups they are in",
                field="groups",
            )

    @property
    def named_count(self) -> int:
        """Number of samples that are named, those included that are not there."""
        return self.indexes.size + len(self.keys)

    @property
    def has_conditions(self) -> bool:
        """Whether a sample that is named need not be meant, or may not be any more."""
        return bool(self.where or self.skipped_by or self.left_for)

    @property
    def is_named(self) -> bool:
        """Whether samples are named one by one; it may be none of them."""
        return not self.groups and not self.is_all

    def part(self, partition: Partition, place: int, size: int) -> Part:
        """Return the samples from a place on, of so many names, or so many rows where no condition is looked at."""
        if self.is_named:
            return self._named(partition, place, place + size)
        is_filtered = bool(self.groups) or self.has_conditions
        return self._scanned(partition, place, _MOST_SCANNED if is_filtered else size)

    def _named(self, partition: Partition, start: int, stop: int) -> Part:
        count = self.indexes.size
        positions = partition.table.find(self.indexes[start:stop])
        if keys := self.keys[max(0, start - count) : max(0, stop - count)]:
            positions = np.concatenate([positions, partition.key_index.positions_of(keys)])
        places = start + np.arange(positions.size)
        found = positions >= 0
        found[found] = self._holds(partition, positions[found])
        next_place = stop if stop < self.named_count else None
        return Part(positions=positions[found], places=places[found], next_place=next_place)

    def _scanned(self, partition: Partition, first_index: int, count: int) -> Part:
        table = partition.table
        positions = table.present_from(first_index, count + 1)
        next_place = int(table.index[positions[count]]) if positions.size > count else None
        positions = self.among(partition, positions[:count])
        return Part(positions=positions, places=table.index[positions], next_place=next_place)

    def among(self, partition: Partition, positions: Indexes) -> Indexes:
        """Return those of some samples that are meant."""
        if self.is_named:
            named = np.concatenate([partition.table.find(self.indexes), partition.key_index.positions_of(self.keys)])
            positions = positions[np.isin(positions, named)]
        if self.groups:
            slots = partition.groups.slot_of.find(self.groups)
            wanted = np.zeros(partition.groups.slots.count + 1, np.bool_)  # the last one is of samples without a group
            wanted[slots[slots >= 0]] = True
            positions = positions[wanted[partition.groups.of_rows[as_slice(positions)]]]
        return self.satisfying(partition, positions)

    def satisfying(self, partition: Partition, positions: Indexes) -> Indexes:
        """Return those of some samples that satisfy all conditions, and are what tasks are named for."""
        if self.skipped_by:
            positions = positions[partition.known_task(self.skipped_by).is_lost(positions)]
        if self.left_for:
            positions = positions[partition.known_task(self.left_for).is_left(positions)]
            positions = positions[~partition.is_leased(positions)]
        return positions[self._holds(partition, positions)] if self.where else positions

    def _holds(self, partition: Partition, positions: Indexes) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
        mask = np.ones(positions.size, np.bool_)
        rows = as_slice(positions)
        for condition in partition.resolved(self.where):
            mask &= partition.meta.holds(condition, rows)[0]
        return mask

    def missing(self, partition: Partition, start: int, stop: int | None) -> tuple[list[str], Indexes]:
        """Return the keys, and the indexes, from a place to another that no sample has."""
        count, indexes = self.indexes.size, self.indexes[start:stop]
        keys = self.keys[max(0, start - count) : None if stop is None else max(0, stop - count)]
        unknown = np.flatnonzero(partition.key_index.positions_of(keys) < 0).tolist()
        return [keys[each] for each in unknown], indexes[partition.table.find(indexes) < 0]


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
    missing_keys, missing_indexes = selection.missing(partition, place, part.next_place)
    unknown = [] if token else np.flatnonzero(partition.groups.slot_of.find(selection.groups) < 0).tolist()
    return Page(
        partition=partition,
        positions=part.positions,
        missing_keys=missing_keys,
        missing_indexes=missing_indexes,
        missing_groups=[selection.groups[each] for each in unknown],
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
        characters += column.text_sizes(len)
    if not partition.key.is_blank:
        characters += _lengths(partition.key[positions].tolist())
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
    if not skip_missing_fields and (
        unknown := [name for name in names if partition.cells.spec_for_empty_batch(name) is None]
    ):
        raise _no_field(partition, unknown[0])
    _check_named("keys", len(keys))
    _check_named("global_indexes", indexes.size)
    if keys and indexes.size:
        raise InvalidArgumentError("samples are named by index or by key, not by both", field="keys")
    rows = indexes
    if keys:
        known = partition.key_index.positions_of(list(keys))
        if not skip_missing and bool((known < 0).any()):
            key = keys[int(np.argmax(known < 0))]
            raise KeyNotFoundError(
                f"partition {partition.partition_id!r} has no key {key!r}; {nearest(key, partition.key_index)}; "
                f"leave it out with skip_missing",
                metadata={"partition_id": partition.partition_id, "key": key},
            )
        rows = partition.table.index[known[known >= 0]]
    elif not skip_missing:
        partition.positions_of(rows, may_repeat=True)
    positions = partition.table.find(rows)
    found = positions >= 0
    if skip_missing_fields:
        names = [name for name in names if partition.cells.produced([name], positions[found]).all()]
    else:
        states = partition.state[positions[found]]
        if states.size and not (states == FAILED).any():
            check_fields(partition, names)
        found[found] = partition.cells.produced(names, positions[found])
    if not found.all() and not skip_missing:
        raise _missing_cell(partition, names, rows[~found])
    return positions[found], names


def _missing_cell(partition: Partition, names: Sequence[str], rows: Indexes) -> CellNotFoundError:
    """Return the error of samples that lack a field; one that has failed, and so never gets it, is named first."""
    failed = rows[partition.state[partition.table.find(rows)] == FAILED]
    row = (failed if failed.size else rows)[:1]
    position = partition.table.find(row)
    lacking = [name for name in names if not partition.cells.produced([name], position)[0]]
    key = partition.key[position[0]]
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


class LookupWait:
    """Waits for one look-up, in a `with`.

    Nothing is polled: it takes note of rows as they are written, and looks at those once they are so many that, if all
    of them were found, the number would be reached. So a partition that is filled row by row has a few looks at some
    rows, not one look at all of them for each row. That rows were cleared is found out where the number seems reached.

    Args:
        partition: where the samples are.
        selection: which they are.
        min_count: how many are waited for.
    """

    def __init__(self, partition: Partition, selection: Selection, min_count: int) -> None:
        self._partition = partition
        # It compares with the versions that are published now, since rows are looked at once.
        self._selection = selection = replace(selection, where=partition.resolved(selection.where))
        self._min_count = min_count
        self._found: set[int] = set()  # global indexes; some may have been cleared since
        if selection.is_named:
            present = np.unique(selection.part(partition, 0, selection.named_count).positions)
        else:
            present = partition.table.present_positions()
        stored: Indexes = partition.table.index[present]
        self._unseen: deque[Indexes | range] = deque([stored])
        self._unseen_count = stored.size
        self._is_due = asyncio.Event()
        self._end_error: Callable[[], TqError] | None = None

    def __enter__(self) -> LookupWait:
        self._partition.on_rows.append(self._note)
        self._partition.on_change.append(self._wake)
        return self

    def __exit__(self, *exception: object) -> None:
        self._partition.on_rows.discard(self._note)
        self._partition.on_change.discard(self._wake)

    def end(self, error: Callable[[], TqError]) -> None:
        """End the wait with an error."""
        self._end_error = error
        self._is_due.set()

    async def until_enough(self, deadline: float) -> bool:
        """Return True once there are enough samples, or there never will be; False at a time of the event loop.

        The samples that are stored when it is called are looked at however long that takes, those that are written
        later until the deadline.

        Raises:
            TqError: the wait was ended.
            InvalidArgumentError: a condition does not fit its column.
        """
        loop, stored_count = asyncio.get_running_loop(), self._unseen_count
        while True:
            self._is_due.clear()
            while self._unseen and (stored_count > 0 or loop.time() < deadline):
                stored_count -= self._look()
                await asyncio.sleep(0)
                if self._has_enough():
                    break
            if self._end_error is not None:
                raise self._end_error()
            if self._has_enough() or self._is_in_vain:
                return True
            if loop.time() >= deadline:
                return False
            try:
                with Waiting():
                    async with asyncio.timeout_at(deadline):
                        await self._is_due.wait()
            except TimeoutError:
                return False

    def _note(self, indexes: Indexes | range) -> None:
        self._unseen.append(indexes)
        self._unseen_count += len(indexes)

    def _wake(self) -> None:
        if self._unseen_count >= min(self._min_count - len(self._found), _MOST_UNSEEN) or self._is_in_vain:
            self._is_due.set()

    @property
    def _is_in_vain(self) -> bool:
        """Whether there are fewer samples than are waited for, and no others come."""
        count = self._partition.table.present_count
        if self._selection.is_named:
            count = min(count, self._selection.named_count)
        return self._partition.sealed and count < self._min_count

    def _look(self) -> int:
        """Look at some rows that were written, the first ones first; return how many."""
        taken: list[Indexes | range] = []
        left = _LOOKED_AT_ONCE
        while self._unseen and left:
            rows = self._unseen.popleft()
            if len(rows) > left:
                self._unseen.appendleft(rows[left:])
                rows = rows[:left]
            taken.append(rows)
            left -= len(rows)
        indexes = np.concatenate([np.asarray(rows, np.int64) for rows in taken])
        self._unseen_count -= indexes.size
        positions = self._partition.table.find(indexes)
        found = self._selection.among(self._partition, positions[positions >= 0])
        self._found.difference_update(indexes.tolist())
        self._found.update(self._partition.table.index[found].tolist())
        if len(self._found) > self._partition.table.present_count + _MOST_UNSEEN:
            self._forget_cleared()
        return indexes.size

    def _has_enough(self) -> bool:
        """Whether there are enough samples, whatever is found out of those that were written to since."""
        least = self._min_count + sum(len(rows) for rows in self._unseen if not isinstance(rows, range))
        if len(self._found) >= least:
            self._forget_cleared()
        return len(self._found) >= least

    def _forget_cleared(self) -> None:
        indexes = np.fromiter(self._found, np.int64, len(self._found))
        self._found = set(indexes[self._partition.table.find(indexes) >= 0].tolist())


async def wait_for_samples(
    catalog: Catalog, partition_id: str, selection: Selection, min_count: int, max_wait_seconds: float
) -> bool:
    """Wait for a partition, and until it has so many of some samples; return whether the time was over before.

    It also ends where there never will be so many.

    Raises:
        PartitionClearedError: the partition was cleared meanwhile.
        UnavailableError: the server is shutting down.
        InvalidArgumentError: a condition does not fit its column.
    """
    deadline = asyncio.get_running_loop().time() + max_wait_seconds
    partition = await catalog.arrival(partition_id, deadline)
    if partition is None:
        return True
    enders = catalog.enders(partition)
    with LookupWait(partition, selection, min_count) as lookup:
        enders.add(lookup.end)
        try:
            return not await lookup.until_enough(deadline)
        finally:
            enders.discard(lookup.end)


@dataclass(slots=True)
class Clearing:
    """Clears samples in parts; those that are not there are ignored.

    Whether a sample satisfies the conditions of the selection is decided in the step that clears it.

    Args:
        catalog: where their partition is.
        partition_id: the partition.
        incarnation: that is meant; empty: whichever there is at the first part.
        selection: the samples.
        claim: the leased claim that they are of, all of which it must hold before any is cleared, and those of each
            part in the step that clears it; None: no claim is asked about.
        missing_ok: whether there is nothing to clear where the partition is not there, or not any more.
    """

    catalog: Catalog
    partition_id: str
    incarnation: bytes
    selection: Selection
    claim: LeasedClaim | None = None
    missing_ok: bool = False
    _place: int | None = 0  # where the next part begins
    _part: Indexes = field(default_factory=_NONE.copy)  # of it what is still to be cleared
    _last: Indexes = field(default_factory=_NONE.copy)
    _done_count: int = 0

    async def begin(self) -> None:
        """Clear all but the last part.

        Raises:
            LeaseExpiredError, InvalidArgumentError: see `check_claim`.
        """
        partition = self.catalog.find(self.partition_id, self.incarnation, missing_ok=self.missing_ok)
        if partition is not None:
            check_claim(partition, self.claim, self.selection.indexes)
        self._last = self._next_part()
        while self._part.size or self._place is not None:
            self._change()
            await asyncio.sleep(0)
            self._last = self._next_part()

    def finish(self) -> int:
        """Clear the last part; return how many samples were cleared in all."""
        self._change()
        return self._done_count

    def _change(self) -> None:
        if self._last.size:
            self._done_count += self._commit(self._last)

    def _commit(self, rows: Indexes) -> int:
        """Clear the samples of a part; return how many were there."""
        change = SamplesCleared(partition_id=self.partition_id, global_indexes=rows, claim=self.claim)
        return self.catalog.commit(change) or 0

    def _next_part(self) -> Indexes:
        """Return the next samples, no more than a step may clear."""
        partition = self.catalog.find(self.partition_id, self.incarnation, missing_ok=self.missing_ok)
        if partition is None:
            self._place, self._part = None, self._part[:0]
            return self._part
        self.incarnation = partition.incarnation  # what comes under the name meanwhile is another
        table = partition.table
        if not self._part.size and self._place is not None:
            part = self.selection.part(partition, self._place, _CLEARED_AT_ONCE).first(_CLEARED_AT_ONCE)
            self._place = part.next_place
            self._part = np.sort(table.index[part.positions])  # so that those of one put are neighbours
        positions = table.find(self._part)
        count = partition.cells.count_of_runs(positions, _PUTS_CLEARED_AT_ONCE)
        taken, positions, self._part = self._part[:count], positions[:count], self._part[count:]
        return self._meant(partition, taken, positions)

    def _meant(self, partition: Partition, rows: Indexes, positions: Indexes) -> Indexes:
        """Return those of some samples, of which -1 is the position of one that is not there, that are meant now."""
        if not self.selection.has_conditions:
            return rows
        meant: Indexes = partition.table.index[self.selection.satisfying(partition, positions[positions >= 0])]
        return meant


class Failing(Clearing):
    """Has samples fail in parts; those that are not there, or have failed, are ignored. See `Clearing`."""

    def _commit(self, rows: Indexes) -> int:
        """Have the samples of a part fail."""
        write = SampleWrite(row_count=rows.size, global_indexes=rows, state=SampleState.FAILED, claim=self.claim)
        self.catalog.commit(SamplesWritten(partition_id=self.partition_id, write=write))
        return rows.size

    def _meant(self, partition: Partition, rows: Indexes, positions: Indexes) -> Indexes:
        """Return those of some samples that are meant now and have not failed."""
        there = self.selection.satisfying(partition, distinct(positions[positions >= 0], partition.table.count))
        meant: Indexes = partition.table.index[there[partition.state[there] != FAILED]]
        return meant
