"""The controller's puts, the only truth about which live: each is absent, being committed, or committed.

    controller, here                                   storage service (`storage/index/put_table.py`)

    absent                                             waiting: complete, with a receipt
      | Commit, its receipt is valid                     | overdue: asked for in the heartbeat; the receipt
    being committed -- refused by all calls -> freed     | is void from then on; dropped if absent here
      | the step that makes its samples                  |
    committed ----------- durable: confirmed ----------> committed
      | its last cell is freed                           |
    leaving: committed still -- durable: freed --------> dropped
      |
    absent; its receipt is revoked (`receipts.py`)

Why no put is lost, and none is left:

- *A commit under way* makes a put known: the storage service is not told to drop the put, and asks again.
- *A commit after the answer "unknown"* has a void receipt: the heartbeat that asked had the number of the first valid
  receipt, and all overdue puts have lower ones.
- *A commit again after the put was freed* is refused: until the storage service has answered that it freed the put the
  receipt is not taken at all, and from then on only one that was given later, to bytes that came again.
- *A controller that has started again*, or a standby that took over, has other receipt keys, and all committed puts
  from its journal. It lists them to the storage service, which drops committed puts that are not listed, and asks
  about the others when they are overdue.
- *A put that is committed just when its storage service asks* is either known by then, or its receipt is void: taking
  note of the bound and answering are one step, and so are looking at the receipt and entering the put here.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final, Protocol

from tq_service.errors import AlreadyExistsError, TqError, UnavailableError
from tq_service.server.known_puts import KnownPuts, put_cells
from tq_service.server.supervisor import Supervisor
from tq_service.state.cells import CellSet, CellsSnapshot, Freed, Put, freed_cells, live_cells
from tq_service.storage.index.put import PutCells

_FREED_PER_TURN: Final = 128  # puts, or parts of some, freed before others have their turns: a millisecond


class Holder(Protocol):
    """A storage service that holds puts: the engine of this process, or a `RemoteStorage`."""

    storage_id: str
    boot_id: bytes

    def confirm(self, put_id: bytes) -> object:
        """Make a put stay, soon."""
        ...

    def free(self, cells: Sequence[PutCells]) -> None:
        """Free cells, in order, as soon as it can be reached."""
        ...


@dataclass(slots=True, eq=False)
class _Commits:
    """The calls that are about to commit one put: how many, and whether one of them has come to an answer."""

    call_count: int = 0
    is_answered: bool = False


class Puts:
    """The puts that samples have or are about to get, and the cells that are to be freed. Confined to the event loop.

    Args:
        embedded: the engine of this process; None: it has none.
        find: returns what holds the puts of another instance of a storage service; None: nothing that is known.
        snapshot_cells: returns the cells that samples have now, by partition.
        after_durable: calls something once all that has changed here so far cannot be lost any more.
        supervisor: runs the background task.

    Attributes:
        has_some_elsewhere: whether storage services of other processes hold puts. The one of this process writes to
            the journal of the controller, after the controller: with it alone nothing waits for durability.
    """

    def __init__(
        self,
        embedded: Holder | None,
        find: Callable[[str, bytes], Holder | None],
        snapshot_cells: Callable[[], Sequence[CellsSnapshot]],
        after_durable: Callable[[Callable[[], None]], None],
        supervisor: Supervisor,
    ) -> None:
        self.has_some_elsewhere = False
        self._embedded = embedded
        self._find = find
        self._snapshot_cells = snapshot_cells
        self._after_durable = after_durable
        self._supervisor = supervisor
        self._uncommitted: dict[Put, _Commits] = {}
        self._committed: set[Put] = set()
        self._leaving: deque[Freed] = deque()  # cells that no sample has any more, in order
        self._due_count = 0  # of these, those that may be freed now
        self._held_count = 0  # and those that came since `_hold_count` was 0
        self._hold_count = 0
        self._freeing: asyncio.Task[None] | None = None
        self._is_closed = False

    def recover(self) -> None:
        """Learn which puts are committed, once the samples have been recovered."""
        self._committed = {cells.put for each in self._snapshot_cells() for cells in live_cells(each)}

    def instances(self) -> set[tuple[str, bytes]]:
        """Return name and boot of all storage services that hold committed puts."""
        return {put[:2] for put in self._committed}

    def unknown(self, storage_id: str, boot_id: bytes, put_ids: Iterable[bytes]) -> list[bytes]:
        """Return those of some puts of a storage service that are neither committed nor being committed."""
        puts = (Put(storage_id, boot_id, put_id) for put_id in put_ids)
        return [put.put_id for put in puts if put not in self._committed and put not in self._uncommitted]

    def known(self, storage_id: str, boot_id: bytes) -> KnownPuts:
        """Return the puts of a storage service as of now."""
        return KnownPuts(
            storage_id=storage_id,
            boot_id=boot_id,
            cells=self._snapshot_cells(),
            leaving=tuple(self._leaving),
            uncommitted=[put.put_id for put in self._uncommitted if put[:2] == (storage_id, boot_id)],
        )

    # Committing

    def is_committed(self, put: Put) -> bool:
        """Whether some samples have their cells in this put."""
        return put in self._committed

    def check_uncommitted(self, put: Put) -> None:
        """Refuse a second commit of a put: its cells would be freed with the samples of either."""
        if put in self._committed:
            raise AlreadyExistsError(
                f"put {put.put_id.hex()} is committed already under another request_id; put data once for each commit",
                metadata={"resource_type": "put", "resource_name": put.put_id.hex()},
            )

    @contextlib.contextmanager
    def committing(self, put: Put) -> Iterator[Callable[[], None]]:
        """Have a put known within the `with`, which is to commit it; yield what raises if it was freed meanwhile.

        Several calls may commit one put at once, such as a retry beside the call that was given up. A put that none of
        them has committed is freed by the last one, if one of them was refused. If all were cancelled, or a service was
        unavailable, a retry may still commit it.

        Raises:
            AlreadyExistsError: it is committed.
        """
        self.check_uncommitted(put)
        commits = self._uncommitted.setdefault(put, _Commits())
        commits.call_count += 1

        def check() -> None:
            if put not in self._committed and self._uncommitted.get(put) is not commits:
                raise UnavailableError(f"put {put.put_id.hex()} was freed while it was committed again; put it again")

        try:
            yield check
            commits.is_answered = True
        except TqError as error:
            commits.is_answered |= not isinstance(error, UnavailableError)
            raise
        finally:
            commits.call_count -= 1
            if not commits.call_count and self._uncommitted.get(put) is commits:
                if commits.is_answered:
                    self.free_now([put])
                else:
                    del self._uncommitted[put]

    @contextlib.contextmanager
    def commit(self, put: Put) -> Iterator[None]:
        """Have a put committed by the step in the `with`, unless that raises.

        Raises:
            AlreadyExistsError: it is committed.
        """
        self.check_uncommitted(put)
        commits = self._uncommitted.pop(put, None)
        self._committed.add(put)
        try:
            yield
        except BaseException:
            self._committed.discard(put)
            if commits is not None:
                self._uncommitted[put] = commits
            raise
        # The engine of this process confirms at once: its put comes back from the journal together with the samples.
        if self._embedded is not None and put.storage_id == self._embedded.storage_id:
            self._confirm(put)
        else:
            self._when_durable(partial(self._confirm, put))

    @contextlib.contextmanager
    def placing(self, put: Put) -> Iterator[None]:
        """Have a put that is made here known until `mark_committed` or `free_now`; the latter if the `with` raises."""
        self._uncommitted[put] = _Commits(call_count=1)
        try:
            yield
        except BaseException:
            self.free_now([put])
            raise

    def mark_committed(self, puts: Sequence[Put]) -> None:
        """Take note that puts made here are committed by now."""
        for put in puts:
            with self.commit(put):
                pass

    def _confirm(self, put: Put) -> None:
        if put in self._committed and (holder := self._holder_of(*put[:2])) is not None:
            holder.confirm(put.put_id)

    def _holder_of(self, storage_id: str, boot_id: bytes) -> Holder | None:
        embedded = self._embedded
        if embedded is not None and (embedded.storage_id, embedded.boot_id) == (storage_id, boot_id):
            return embedded
        return self._find(storage_id, boot_id)

    def _when_durable(self, action: Callable[[], None]) -> None:
        if self.has_some_elsewhere:
            self._after_durable(action)
        else:
            action()

    # Freeing

    @contextlib.contextmanager
    def holding_frees(self) -> Iterator[None]:
        """Free no more cells until the end of the `with`, so that those of its beginning can be read."""
        self._hold_count += 1
        try:
            yield
        finally:
            self._hold_count -= 1
            if not self._hold_count:
                count, self._held_count = self._held_count, 0
                self._when_durable(partial(self._free_more, count))

    def free(self, freed: Sequence[Freed]) -> None:
        """Free cells that samples had, in order, once a crash of this controller cannot bring the samples back.

        A few are freed at once; the rest of many, such as all of a partition, in small steps with turns for others.
        What is left when this process ends is unknown to the process that starts after it, and goes as such.
        """
        self._leaving += freed
        if self._hold_count:
            self._held_count += len(freed)
        else:
            self._when_durable(partial(self._free_more, len(freed)))

    def _free_more(self, count: int) -> None:
        if self._is_closed:
            return
        is_first = not self._due_count
        self._due_count += count
        if is_first:
            self._free_some()
        if self._due_count and (self._freeing is None or self._freeing.done()):
            self._freeing = self._supervisor.start("freeing cells", self._free_all(), may_end=True)

    async def _free_all(self) -> None:
        while self._due_count:
            await asyncio.sleep(0)
            self._free_some()

    def _free_some(self) -> None:
        count = min(self._due_count, _FREED_PER_TURN)
        self._due_count -= count
        self._free(freed_cells(self._leaving.popleft()) for _ in range(count))

    def free_now(self, puts: Iterable[Put]) -> None:
        """Free puts that were not committed at once: they may be sent again, and must be gone by then."""
        self._free(CellSet(put=put) for put in puts)

    def _free(self, freed: Iterable[CellSet]) -> None:
        """Free cells, each where it is held; a boot that is over has nothing to free."""
        cells_of: dict[tuple[str, bytes], list[PutCells]] = {}
        for each in freed:
            if each.rows is None:
                self._committed.discard(each.put)
                self._uncommitted.pop(each.put, None)
            cells_of.setdefault(each.put[:2], []).append(put_cells(each))
        for instance, cells in cells_of.items():
            if (holder := self._holder_of(*instance)) is not None:
                holder.free(cells)

    async def close(self) -> None:
        """Free what may be, and end the background task."""
        self._is_closed = True
        if self._freeing is not None:
            self._freeing.cancel()
        await self._free_all()
