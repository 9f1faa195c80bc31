"""Lists samples and names in pages, waits for samples, and clears samples in batches.

The size of a page and the number of samples on it are limited, so each page is produced quickly. A page token encodes
the start of the page and the partition's incarnation. Tokens need not be secret, because any client with permission to
list a partition can read every page of the list.

`LookupWait` waits until enough samples are found. `Clearing` clears the selected samples in batches, called parts, so
that other calls can run in between. `ClearingFields` clears only some fields of the selected samples.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
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
from tq_service.machine.group_cells import GroupsRemoved
from tq_service.machine.samples import CellsCleared, SamplesCleared, SamplesWritten, SampleWrite
from tq_service.schema import BatchUnit, SampleState, check_range
from tq_service.serving.catalog import Catalog
from tq_service.state.partition import Partition
from tq_service.state.plan import Condition, Indexes, LeasedClaim
from tq_service.state.table import FAILED, as_slice, distinct
from tq_service.wait_clock import Waiting

_MOST_OF_A_PAGE: Final = 16_384  # samples per page
_MOST_NAMES_OF_A_PAGE: Final = 1_000  # names per page; a name has up to 512 characters of up to 4 bytes each
MOST_NAMED: Final = 65_536  # samples or groups per request
_MOST_CHARACTERS: Final = 1 << 19  # characters of keys, groups and custom_meta text per page, which take up to 2 MiB
_MOST_NUMBERS: Final = 1 << 17  # custom_meta numbers per page, which take up to 1.3 MB
_LOOKED_AT_ONCE: Final = 16_384  # rows per step
_MOST_UNSEEN: Final = 65_536  # unchecked rows, counting a row once per write; bounds memory use
_CLEARED_AT_ONCE: Final = 1 << 15  # samples per step
_PUTS_CLEARED_AT_ONCE: Final = 128  # puts per step; a step takes a few milliseconds if each sample has its own put

_MOST_SCANNED: Final = 131_072  # rows scanned per page if the selection has groups or conditions
_NONE: Final = np.zeros(0, np.int64)


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """Consecutive samples from a selection.

    Attributes:
        positions: table positions of the samples, of shape `(n,)`.
        places: place of each sample in the selection, of shape `(n,)`. A later part can start at any of these places.
        next_place: place at which the next part starts, or None for the last part.
    """

    positions: Indexes
    places: Indexes
    next_place: int | None

    def first(self, count: int) -> Part:
        """Return a part that contains only the first `count` samples."""
        if count >= self.positions.size:
            return self
        return Part(positions=self.positions[:count], places=self.places[:count], next_place=int(self.places[count]))


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """The samples selected by a request.

    Individually selected samples appear in this order: first those in `indexes`, then those in `keys`. If no samples
    are selected individually, the selection contains the members of `groups` and `rollouts`, or all samples, in order
    of insertion. A selection may contain millions of samples, so it is read in parts. A place is either a global index
    or an offset into the given indexes and keys.

    Attributes:
        indexes: global indexes, of shape `(n,)`.
        keys: keys of individually selected samples.
        groups: names of groups whose members are selected.
        rollouts: names of rollouts whose samples are selected.
        is_all: whether all samples are selected.
        skipped_by: name of a task, or "" to omit this condition. If set, only samples that this task will never receive
            are selected. Requires `is_all`.
        left_for: name of a task, or "" to omit this condition. If set, only samples that this task can still receive
            and that no task has leased are selected.
        where: further conditions that the selected samples must satisfy.

    Raises:
        InvalidArgumentError: samples are selected both individually and by group or rollout, or `skipped_by` is set
            without `is_all`.
    """

    indexes: Indexes = field(default_factory=_NONE.copy)
    keys: Sequence[str] = ()
    groups: Sequence[str] = ()
    rollouts: Sequence[str] = ()
    is_all: bool = False
    skipped_by: str = ""
    left_for: str = ""
    where: tuple[Condition, ...] = ()

    def __post_init__(self) -> None:
        if self.skipped_by and not self.is_all:
            raise InvalidArgumentError(
                f"skipped_by is {self.skipped_by!r}, but samples or groups are also set; set only one of them",
                field="skipped_by",
            )
        for name in ("groups", "rollouts"):
            if getattr(self, name) and (self.named_count or self.is_all):
                raise InvalidArgumentError(
                    f"{name} and samples are both set; set either samples (by index or key) or {name}",
                    field=name,
                )

    @property
    def named_count(self) -> int:
        """Number of samples specified by index or key, including missing samples."""
        return self.indexes.size + len(self.keys)

    @property
    def has_conditions(self) -> bool:
        """Whether the selection has conditions that a listed sample may not meet, either now or later."""
        return bool(self.where or self.skipped_by or self.left_for)

    @property
    def is_named(self) -> bool:
        """Whether the selection lists individual samples. The list of samples may be empty."""
        return not self.is_of_groups and not self.is_all

    @property
    def is_of_groups(self) -> bool:
        """Whether the selection is defined by groups or rollouts."""
        return bool(self.groups or self.rollouts)

    def part(self, partition: Partition, place: int, size: int) -> Part:
        """Return the part of the selection that starts at `place`.

        If the selection lists samples, the part covers `size` of them. Otherwise, the part covers `size` rows, or more
        if the selection has groups or conditions.
        """
        if self.is_named:
            return self._named(partition, place, place + size)
        is_filtered = self.is_of_groups or self.has_conditions
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
        """Return those of the given samples that are part of the selection."""
        if self.is_named:
            named = np.concatenate([partition.table.find(self.indexes), partition.key_index.positions_of(self.keys)])
            positions = positions[np.isin(positions, named)]
        if self.is_of_groups:
            groups, rows, is_member = partition.groups, as_slice(positions), np.zeros(positions.size, np.bool_)
            units: tuple[tuple[BatchUnit, Indexes], ...] = (
                ("group", groups.slot_of.find(self.groups)),
                ("rollout", groups.rollout_slot_of.find(self.rollouts)),
            )
            for unit, slots in units:
                wanted = np.zeros(groups.slots.count + 1, np.bool_)  # the last element is for samples without a group
                wanted[slots[slots >= 0]] = True
                is_member |= wanted[groups.of_unit(unit, rows)]
            positions = positions[is_member]
        return self.satisfying(partition, positions)

    def satisfying(self, partition: Partition, positions: Indexes) -> Indexes:
        """Return those of the given samples that match `where`, `skipped_by` and `left_for`."""
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
        """Return the selected keys and indexes at places `start` to `stop` that belong to no existing sample."""
        count, indexes = self.indexes.size, self.indexes[start:stop]
        keys = self.keys[max(0, start - count) : None if stop is None else max(0, stop - count)]
        unknown = np.flatnonzero(partition.key_index.positions_of(keys) < 0).tolist()
        return [keys[each] for each in unknown], indexes[partition.table.find(indexes) < 0]


@dataclass(frozen=True, slots=True, kw_only=True)
class Page:
    """One page of a list of a partition's samples.

    Attributes:
        partition: partition that contains the samples.
        positions: table positions of the samples, of shape `(n,)`.
        missing_keys: keys in the page's range for which no sample exists.
        missing_indexes: indexes in the page's range for which no sample exists.
        missing_groups: selected groups that have no members in the partition, set only on the first page.
        missing_rollouts: selected rollouts that have no samples, set only on the first page.
        next_place: place in the selection at which the next page starts, or None if this is the last page.
    """

    partition: Partition
    positions: Indexes
    missing_keys: Sequence[str]
    missing_indexes: Indexes
    missing_groups: Sequence[str]
    missing_rollouts: Sequence[str]
    next_place: int | None

    @property
    def next_token(self) -> str:
        """Token of the next page, or "" on the last page."""
        return "" if self.next_place is None else f"{self.partition.incarnation.hex()}-{self.next_place}"


def find_page(
    catalog: Catalog, partition_id: str, selection: Selection, *, size: int, token: str, missing_ok: bool = False
) -> Page | None:
    """Return a page of the selected samples, or None if the partition is missing and `missing_ok` is set.

    Args:
        catalog: catalog that contains the partition.
        partition_id: name of the partition.
        selection: selected samples, which must be the same for all pages.
        size: maximum number of samples on the page, or 0 for the largest permitted page.
        token: token that identifies the page, or "" for the first page.
        missing_ok: whether to return None if the first page is requested and the partition does not exist.

    Raises:
        PartitionNotFoundError: the partition does not exist.
        StaleIncarnationError: the partition was cleared after the previous page was returned.
        InvalidArgumentError: the size, the token or a condition is invalid.
    """
    size = _page_size(size, _MOST_OF_A_PAGE)
    for name, named in (
        ("keys", selection.keys),
        ("global_indexes", selection.indexes),
        ("groups", selection.groups),
        ("rollouts", selection.rollouts),
    ):
        _check_named(name, len(named))
    incarnation, place = _read_token(token)
    if incarnation and partition_id not in catalog.names():
        raise StaleIncarnationError(
            f"incarnation {incarnation.hex()} of partition {partition_id!r} was cleared during the listing. "
            f"Discard the pages received so far.",
            metadata={"partition_id": partition_id, "got": incarnation.hex()},
        )
    partition = catalog.find(partition_id, incarnation, missing_ok=missing_ok and not incarnation)
    if partition is None:
        return None
    part = selection.part(partition, place, size).first(size)
    part = part.first(fitting_count(partition, part.positions))
    missing_keys, missing_indexes = selection.missing(partition, place, part.next_place)
    groups = partition.groups
    return Page(
        partition=partition,
        positions=part.positions,
        missing_keys=missing_keys,
        missing_indexes=missing_indexes,
        missing_groups=[] if token else _unknown(selection.groups, groups.find(selection.groups)),
        missing_rollouts=[] if token else _unknown(selection.rollouts, groups.find((), selection.rollouts)),
        next_place=part.next_place,
    )


def _unknown(names: Sequence[str], slots: Indexes) -> list[str]:
    return list(itertools.compress(names, slots < 0))


def first_known(
    catalog: Catalog, partition_id: str, incarnation: bytes, rows: Indexes
) -> tuple[Partition, Indexes] | None:
    """Return the partition of the given samples and as many leading samples as fit on one page.

    Return None if the partition or one of the leading samples no longer exists.
    """
    partition = catalog.find(partition_id, incarnation, missing_ok=True)
    if partition is None:
        return None
    positions = partition.table.find(rows[:_MOST_OF_A_PAGE])
    return None if (positions < 0).any() else (partition, rows[: fitting_count(partition, positions)])


def find_names(names: Iterable[str], *, of: str, size: int, token: str) -> tuple[list[str], str]:
    """Return a sorted page of names and the token of the next page, which is "" on the last page.

    Args:
        names: all names, in any order.
        of: kind of names to list. Tokens from a list of a different kind are rejected.
        size: maximum number of names on the page, or 0 for the largest permitted page.
        token: token that identifies the page, or "" for the first page. A token consists of a checksum and the first
            name on the page. This name may have been removed in the meantime.

    Raises:
        InvalidArgumentError: the size or the token is invalid.
    """
    size = _page_size(size, _MOST_NAMES_OF_A_PAGE)
    first = token.partition("-")[2]
    if token and token != name_token(of, first):
        raise no_page_token(token)
    page = heapq.nsmallest(size + 1, (name for name in names if name >= first))
    return page[:size], "".join(name_token(of, name) for name in page[size:])


def name_token(of: str, name: str) -> str:
    """Return the token of a page that starts with the given name."""
    return f"{zlib.crc32(f'{of}/{name}'.encode()):08x}-{name}"


def _page_size(size: int, most: int) -> int:
    check_range("page_size", size, 0, hint="; 0 is the largest")
    return min(size or most, most)


def _check_named(name: str, count: int) -> None:
    """Reject a list of samples or groups that is too long for one request."""
    if count > MOST_NAMED:
        raise InvalidArgumentError(
            f"{name} has {count} entries; expected at most {MOST_NAMED}. Split the entries across several calls.",
            field=name,
            metadata={"got": str(count), "limit": str(MOST_NAMED)},
        )


def _read_token(token: str) -> tuple[bytes, int]:
    """Decode a page token. Return the partition's incarnation and the start of the page."""
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
    """Create the error for a page token that does not belong to the requested list."""
    return InvalidArgumentError(
        f"page_token is {token[:64]!r}, which does not belong to this list; expected the next_page_token of the "
        f"previous page, with the other fields unchanged. Omit page_token for the first page.",
        field="page_token",
    )


def fitting_count(partition: Partition, positions: Indexes) -> int:
    """Return how many leading samples, with their metadata, fit in one response. At least one sample always fits."""
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
        characters += _lengths(partition.groups.rollout_names_of(positions))
    within = int(np.searchsorted(np.cumsum(characters), _MOST_CHARACTERS, side="right"))
    return max(min(count, within), min(1, positions.size))


def _lengths(names: Sequence[str | None]) -> Indexes:
    if None in names:
        names = [name or "" for name in names]
    return np.fromiter(map(len, cast("Sequence[str]", names)), np.int64, len(names))


def check_fields(partition: Partition, names: Sequence[str]) -> None:
    """Raise FieldNotFoundError if the partition has never had one of the fields."""
    for name in names:
        if partition.cells.last_spec(name) is None:
            known = nearest(name, partition.cells.fields)
            raise FieldNotFoundError(
                f"partition {partition.partition_id!r} has no field {name!r}; {known}",
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
    """Return the positions of the samples that have cells in all given fields, and the names of these fields.

    Args:
        partition: partition that contains the samples.
        names: names of the requested fields.
        indexes: global indexes of the samples, which must be empty if keys are given.
        keys: keys of the samples.
        skip_missing: whether to omit missing samples and samples with missing cells.
        skip_missing_fields: whether to omit fields that do not exist or that some samples lack.

    Raises:
        FieldNotFoundError: the partition has never had one of the fields. This error is not raised for a field whose
            cells have all been cleared.
        KeyNotFoundError, SampleNotFoundError, CellNotFoundError: a required sample or cell is missing.
        InvalidArgumentError: too many samples are given, or samples are given both by index and by key.
    """
    if not skip_missing_fields:
        check_fields(partition, names)
    _check_named("keys", len(keys))
    _check_named("global_indexes", indexes.size)
    if keys and indexes.size:
        raise InvalidArgumentError("samples are given both by index and by key; set only one of them", field="keys")
    rows = indexes
    if keys:
        known = partition.key_index.positions_of(list(keys))
        if not skip_missing and bool((known < 0).any()):
            key = keys[int(np.argmax(known < 0))]
            raise KeyNotFoundError(
                f"partition {partition.partition_id!r} has no key {key!r}; {nearest(key, partition.key_index)}. "
                f"Set skip_missing to omit missing keys",
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
        found[found] = partition.cells.produced(names, positions[found])
    if not found.all() and not skip_missing:
        raise _missing_cell(partition, names, rows[~found])
    return positions[found], names


def _missing_cell(partition: Partition, names: Sequence[str], rows: Indexes) -> CellNotFoundError:
    """Create the error for samples that lack a field. The error names a failed sample if there is one."""
    failed = rows[partition.state[partition.table.find(rows)] == FAILED]
    row = (failed if failed.size else rows)[:1]
    position = partition.table.find(row)
    lacking = [name for name in names if not partition.cells.produced([name], position)[0]]
    key = partition.key[position[0]]
    if failed.size:
        why = " and never will, since the sample has failed and data put for it is dropped"
    else:
        why = f" yet, or no longer ({rows.size} samples lack a field); a claim would wait for the data"
    return CellNotFoundError(
        f"sample {int(row[0])}{'' if key is None else f' (key {key!r})'} of partition {partition.partition_id!r} "
        f"has no {', '.join(map(repr, lacking))}{why}. Set skip_missing to omit such samples, or "
        f"skip_missing_fields to omit their missing fields.",
        metadata={
            "partition_id": partition.partition_id,
            "global_index": str(row[0]),
            "field_names": ",".join(lacking),
        },
    )


class LookupWait:
    """A context manager that waits until a look-up finds enough samples.

    Rows are collected as they are written, so no polling is needed. Collected rows are checked only once there are
    enough of them to reach `min_count`. A partition that is filled row by row therefore needs only a few short checks,
    instead of a check of all rows after each write. When `min_count` appears to have been reached, rows cleared in the
    meantime are subtracted.

    Args:
        partition: partition that contains the samples.
        selection: samples to wait for.
        min_count: number of samples to wait for.
    """

    def __init__(self, partition: Partition, selection: Selection, min_count: int) -> None:
        self._partition = partition
        # Conditions on policy versions use the versions published when the wait starts.
        self._selection = selection = replace(selection, where=partition.resolved(selection.where))
        self._min_count = min_count
        self._found: set[int] = set()  # global indexes; samples may have been cleared since they were found
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
        """Wait until enough samples exist or a deadline, in event-loop time, has passed.

        Return True if enough samples exist or if `min_count` can no longer be reached, and False after the deadline.
        All samples that exist when the call starts are checked, even after the deadline. Later samples are checked only
        until the deadline.

        Raises:
            TqError: the wait was ended by `end`.
            InvalidArgumentError: a condition does not match the type of its column.
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
        """Whether waiting is futile because the partition is sealed and has too few samples."""
        count = self._partition.table.present_count
        if self._selection.is_named:
            count = min(count, self._selection.named_count)
        return self._partition.sealed and count < self._min_count

    def _look(self) -> int:
        """Check some of the written rows, oldest first, and return how many were checked."""
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
        """Return whether enough samples have been found, excluding rows that were rewritten after they were checked."""
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
    """Wait until a partition contains `min_count` of the selected samples. Return whether the wait timed out.

    The wait also ends when `min_count` can no longer be reached.

    Raises:
        PartitionClearedError: the partition was cleared during the wait.
        UnavailableError: the server is shutting down.
        InvalidArgumentError: a condition does not match the type of its column.
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
    """Clears samples in batches (parts), ignoring missing samples.

    Each sample is tested against the selection's conditions in the same step that clears it.

    Args:
        catalog: catalog that contains the partition.
        partition_id: name of the partition.
        incarnation: expected incarnation of the partition, or empty to accept the incarnation that exists when the
            first part is cleared.
        selection: samples to clear.
        claim: leased claim that all samples must belong to, or None to skip this check. All samples are checked at the
            start, and each part is checked again when it is cleared.
        missing_ok: whether to succeed without clearing anything if the partition does not exist or was cleared.
    """

    catalog: Catalog
    partition_id: str
    incarnation: bytes
    selection: Selection
    claim: LeasedClaim | None = None
    missing_ok: bool = False
    _place: int | None = 0  # place of the next part
    _part: Indexes = field(default_factory=_NONE.copy)  # remaining samples of the current part
    _last: Indexes = field(default_factory=_NONE.copy)
    _done_count: int = 0

    async def begin(self) -> None:
        """Clear all parts except the last one.

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
        """Clear the last part and the groups that never had samples. Return the total number of cleared samples."""
        self._change()
        if self.selection.groups and not self.selection.has_conditions:
            self._remove_groups()
        return self._done_count

    def _remove_groups(self) -> None:
        """Remove the selected groups that never had samples."""
        if self.catalog.find(self.partition_id, self.incarnation, missing_ok=self.missing_ok) is not None:
            self.catalog.commit(GroupsRemoved(partition_id=self.partition_id, names=list(self.selection.groups)))

    def _change(self) -> None:
        if self._last.size:
            self._done_count += self._commit(self._last)

    def _commit(self, rows: Indexes) -> int:
        """Clear one part of the selected samples, and return how many of these samples existed."""
        change = SamplesCleared(partition_id=self.partition_id, global_indexes=rows, claim=self.claim)
        return self.catalog.commit(change) or 0

    def _next_part(self) -> Indexes:
        """Return the next samples to clear, at most as many as a single step may clear."""
        partition = self.catalog.find(self.partition_id, self.incarnation, missing_ok=self.missing_ok)
        if partition is None:
            self._place, self._part = None, self._part[:0]
            return self._part
        self.incarnation = partition.incarnation  # ignore a later partition with the same name
        table = partition.table
        if not self._part.size and self._place is not None:
            part = self.selection.part(partition, self._place, _CLEARED_AT_ONCE).first(_CLEARED_AT_ONCE)
            self._place = part.next_place
            self._part = np.sort(table.index[part.positions])  # makes the samples of a put adjacent
        positions = table.find(self._part)
        count = partition.cells.count_of_runs(positions, _PUTS_CLEARED_AT_ONCE)
        taken, positions, self._part = self._part[:count], positions[:count], self._part[count:]
        return self._meant(partition, taken, positions)

    def _meant(self, partition: Partition, rows: Indexes, positions: Indexes) -> Indexes:
        """Return the rows that still match the selection.

        `positions` contains the position of each row, or -1 if the row is missing.
        """
        if not self.selection.has_conditions:
            return rows
        meant: Indexes = partition.table.index[self.selection.satisfying(partition, positions[positions >= 0])]
        return meant


class Failing(Clearing):
    """Marks samples as failed, one batch at a time, and ignores missing or already failed samples. See `Clearing`."""

    def _remove_groups(self) -> None:
        """Keep groups without samples, because they contain nothing to mark as failed."""

    def _commit(self, rows: Indexes) -> int:
        """Mark the samples of one part as failed."""
        write = SampleWrite(row_count=rows.size, global_indexes=rows, state=SampleState.FAILED, claim=self.claim)
        self.catalog.commit(SamplesWritten(partition_id=self.partition_id, write=write))
        return rows.size

    def _meant(self, partition: Partition, rows: Indexes, positions: Indexes) -> Indexes:
        """Return the rows that still match the selection and have not failed."""
        there = self.selection.satisfying(partition, distinct(positions[positions >= 0], partition.table.count))
        meant: Indexes = partition.table.index[there[partition.state[there] != FAILED]]
        return meant


@dataclass
class ClearingFields(Clearing):
    """Clears the cells of some fields in batches of samples, but keeps the samples themselves. See `Clearing`.

    Args:
        field_names: names of the fields, without duplicates. If a field has group scope, the selection must consist of
            groups. The cells that the members of a group share are then cleared.

    Raises:
        InvalidArgumentError: `field_names` is empty.
    """

    field_names: Sequence[str] = ()

    def __post_init__(self) -> None:
        if not self.field_names:
            raise InvalidArgumentError("data_fields is empty; specify the fields to clear", field="data_fields")

    async def begin(self) -> None:
        """Clear all parts except the last one.

        Raises:
            FieldNotFoundError: the partition has never had one of the fields, and `missing_ok` is not set.
            InvalidArgumentError: a field has group scope, but the samples are not selected by group alone.
            LeaseExpiredError, InvalidArgumentError: see `check_claim`.
        """
        partition = self.catalog.find(self.partition_id, self.incarnation, missing_ok=self.missing_ok)
        if partition is not None:
            self.incarnation = partition.incarnation
            if not self.missing_ok:
                check_fields(partition, self.field_names)
            if shared := [name for name in self.field_names if name in partition.cells.shared]:
                self._check_shared(partition, shared[0])
                await self._clear_groups()
        await super().begin()

    def _check_shared(self, partition: Partition, name: str) -> None:
        """Raise InvalidArgumentError if the shared cells of a group would be cleared for only some of its samples."""
        selection = self.selection
        if not selection.groups or selection.rollouts or selection.has_conditions:
            raise InvalidArgumentError(
                f"field {name!r} of partition {partition.partition_id!r} has group scope and can be "
                f"cleared only for entire groups, but the selection includes samples, rollouts or conditions. "
                f"Select groups only.",
                field="data_fields",
                metadata={"field_name": name},
            )

    async def _clear_groups(self) -> None:
        """Clear the cells that the members of each selected group share."""
        names = list(self.selection.groups)
        for start in range(0, len(names), _PUTS_CLEARED_AT_ONCE):
            if self.catalog.find(self.partition_id, self.incarnation, missing_ok=self.missing_ok) is None:
                return
            self._done_count += self._commit(_NONE, names[start : start + _PUTS_CLEARED_AT_ONCE])
            await asyncio.sleep(0)

    def _commit(self, rows: Indexes, groups: Sequence[str] = ()) -> int:
        """Clear the cells of a part's samples, or the cells that groups share. Return the number of cleared cells."""
        change = CellsCleared(
            partition_id=self.partition_id,
            field_names=self.field_names,
            global_indexes=rows,
            groups=groups,
            claim=self.claim,
        )
        return self.catalog.commit(change) or 0

    def _remove_groups(self) -> None:
        """Keep groups without samples, because only cells are cleared."""
