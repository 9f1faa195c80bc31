"""All partitions by name, the planners of their tasks, and those who wait for a partition to appear."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

from tq_service.domain.admission.limits import Limits
from tq_service.domain.admission.put_line import PutLine
from tq_service.domain.changes import UNRECORDED, Change, PartitionCleared, PartitionCreated, SamplesWritten, Tell
from tq_service.domain.claims.plan_search import RunsPlans
from tq_service.domain.claims.planner import Planner
from tq_service.domain.claims.request import ClaimRequest
from tq_service.domain.claims.wait_queue import Answer, LoopYielder, NotYet
from tq_service.domain.partition import Partition, PartitionSnapshot
from tq_service.domain.replay import apply_change
from tq_service.domain.tables.cells import CellsSnapshot, FreedCells
from tq_service.domain.writes import PartitionSettings, SampleWrite, Written
from tq_service.errors import (
    AlreadyExistsError,
    InvalidArgumentError,
    PartitionClearedError,
    PartitionNotFoundError,
    PreconditionError,
    StaleIncarnationError,
    UnavailableError,
    nearest,
)


@dataclass(frozen=True, slots=True)
class Claimed:
    """The answer to a claim; no partition where it does not exist yet."""

    partition: Partition | None
    answer: Answer


class Catalog:
    """The partitions of a controller. All methods run on its event loop."""

    def __init__(self, runner: RunsPlans, limits: Limits | None = None) -> None:
        self.limits = limits or Limits()
        self._runner = runner
        self._tell: Tell | None = None
        self._partitions: dict[str, Partition] = {}
        self._planners: dict[Partition, dict[str, Planner]] = {}
        self._put_lines: dict[Partition, PutLine] = {}
        self._most_samples: int | None = None  # there are no more than that; None: to be counted
        self._arrivals: dict[str, dict[asyncio.Future[None], None]] = {}  # in order of their calls
        self._waking: set[asyncio.Task[None]] = set()
        self._is_draining = False
        self._is_closed = False

    # Partitions

    def names(self) -> Iterable[str]:
        """Return the names of all partitions."""
        return self._partitions.keys()

    def snapshot_cells(self) -> list[CellsSnapshot]:
        """Return which cells samples of all partitions have now, for `live_cells`, which another thread may read."""
        return [partition.cells.snapshot() for partition in self._partitions.values()]

    def get(self, partition_id: str, incarnation: bytes = b"") -> Partition:
        """Return a partition that must be there, in the life the caller means."""
        partition = self._partitions.get(partition_id)
        if partition is None:
            raise PartitionNotFoundError(f"no partition {partition_id!r}; {nearest(partition_id, self._partitions)}")
        partition.check_incarnation(incarnation)
        return partition

    def create(self, partition_id: str, settings: PartitionSettings) -> Partition:
        """Return the partition with these settings, made if it is not there."""
        partition = self._partitions.get(partition_id)
        if partition is None:
            check_name("partition_id", partition_id)
            self._check_open()
            self.limits.check_create(settings, len(self._partitions))
            return self._add(Partition(partition_id, settings))
        if partition.settings != settings:
            raise AlreadyExistsError(
                f"partition {partition_id!r} is there with {partition.settings}, got {settings}; create a partition "
                f"before its first samples, and with the same settings everywhere"
            )
        return partition

    def write(self, partition_id: str, incarnation: bytes, write: SampleWrite) -> tuple[Partition, Written]:
        """Write samples; the first ones make their partition, and a refused write leaves none behind."""
        is_for_new = write.global_indexes is None and not (write.keys is not None and write.key_mode == "existing")
        if partition_id in self._partitions or incarnation or not is_for_new:
            partition = self.get(partition_id, incarnation)
            self.limits.check_write(partition, write)
            if is_for_new:
                self._check_samples(partition, write)
            return partition, partition.write(write)
        check_name("partition_id", partition_id)
        self._check_open()
        self.limits.check_create(PartitionSettings(), len(self._partitions))
        self.limits.check_write(None, write)
        self._check_samples(None, write)
        partition = Partition(partition_id, PartitionSettings())
        written = partition.write(write)  # which may refuse it: nobody has the partition yet
        recording_write = self._recording(SamplesWritten(partition_id=partition_id, write=write))
        self._add(partition)
        with recording_write:
            return partition, written

    def _check_samples(self, partition: Partition | None, write: SampleWrite) -> None:
        """Refuse a write that would make too many samples.

        They are counted only where all that were added since could be too many: there may be thousands of partitions.
        """
        count = max(0, write.row_count)
        if self._most_samples is None or self._most_samples + count > self.limits.max_samples:
            self._most_samples = sum(each.table.present_count for each in self._partitions.values())
            is_near = self._most_samples + count > self.limits.max_samples
            if is_near and partition is not None and write.keys is not None:
                count -= sum(map(partition.key_index.__contains__, write.keys))
            if count > 0:
                self.limits.check_samples(self._most_samples + count)
        self._most_samples += count

    def _recording(self, change: Change) -> AbstractContextManager[object]:
        return UNRECORDED if self._tell is None else self._tell(change)

    def _add(self, partition: Partition) -> Partition:
        change = PartitionCreated(
            partition_id=partition.partition_id, incarnation=partition.incarnation, settings=partition.settings
        )
        with self._recording(change):
            self._insert(partition)
        return partition

    def _insert(self, partition: Partition) -> None:
        self._partitions[partition.partition_id] = partition
        self._planners[partition] = {}
        partition.tell = self._tell
        if waiting := self._arrivals.pop(partition.partition_id, None):
            waking = asyncio.get_running_loop().create_task(_wake_all(waiting))
            self._waking.add(waking)
            waking.add_done_callback(self._waking.discard)

    def remove(self, partition_id: str, incarnation: bytes) -> tuple[int, list[FreedCells]]:
        """Remove a partition; return how many samples it held, and their cells."""
        partition = self.get(partition_id, incarnation)
        with self._recording(PartitionCleared(partition_id=partition_id)):
            self._drop(partition)
        return partition.table.present_count, partition.cells.forget_all()

    def _drop(self, partition: Partition) -> None:
        partition_id = partition.partition_id
        del self._partitions[partition_id]
        for planner in self._planners.pop(partition).values():
            planner.end(_was_cleared(partition_id))
        if (line := self._put_lines.pop(partition, None)) is not None:
            line.end(_was_cleared(partition_id))
        partition.on_change.clear()  # lest planners and partition hold each other until a full collection
        partition.on_consumed.clear()
        partition.tell = None

    # Journals

    def start_telling(self, tell: Tell) -> None:
        """Have every change from now on written down; see `Tell`."""
        self._tell = tell
        for partition in self._partitions.values():
            partition.tell = tell

    def apply(self, change: Change) -> None:
        """Make a change that was told of before, on the state in which it was told.

        Raises:
            TqError, LookupError, ValueError: the change does not fit the state.
        """
        match change:
            case PartitionCreated():
                self._add(Partition(change.partition_id, change.settings, change.incarnation))
            case PartitionCleared():
                self.remove(change.partition_id, b"")
            case _:
                apply_change(self.get(change.partition_id), change)

    def put_line(self, partition_id: str) -> PutLine | None:
        """Return where writes of new samples wait for room, None where nothing bounds them."""
        partition = self._partitions.get(partition_id)
        if partition is None or not partition.settings.is_bounded:
            return None
        line = self._put_lines.get(partition)
        if line is None:
            line = self._put_lines[partition] = PutLine(partition)
            if self._is_draining:
                line.end(_is_draining)
        return line

    def waiting_put_count(self, partition_id: str) -> int:
        """Return the number of writes of new samples that wait for room."""
        line = self.put_line(partition_id)
        return 0 if line is None else line.waiting_count

    # Snapshots

    def snapshot(self) -> list[PartitionSnapshot]:
        """Return all partitions as they are now, for another thread to read."""
        return [partition.snapshot() for partition in self._partitions.values()]

    def restore(self, partitions: Iterable[PartitionSnapshot]) -> None:
        """Take over the partitions of a snapshot, into a catalog that has none; nothing is told of it.

        Raises:
            NewerVersionError: one was written by a newer version.
        """
        self.adopt([Partition.restore(snapshot) for snapshot in partitions])

    @contextlib.contextmanager
    def closed(self) -> Iterator[None]:
        """Refuse new partitions until the end of the `with`, but those that are adopted.

        Raises:
            PreconditionError: there are partitions.
        """
        if self._partitions or self._is_closed:
            raise PreconditionError(
                f"the service has {len(self._partitions)} partitions; a checkpoint is restored into one that has none: "
                f"clear them, or start another service"
            )
        self._is_closed = True
        try:
            yield
        finally:
            self._is_closed = False

    def adopt(self, restored: Sequence[Partition]) -> None:
        """Take over partitions, all in one step; nothing is told of it."""
        tell, self._tell = self._tell, None
        self._most_samples = None
        try:
            for partition in restored:
                self._add(partition)
                partition.tell = tell
        finally:
            self._tell = tell

    # Claims

    def planner(self, partition: Partition, task_name: str) -> Planner:
        """Return the planner of a task, made on its first use."""
        planners = self._planners[partition]
        if task_name not in planners:
            self.limits.check_task(partition, task_name)
            planners[task_name] = Planner(partition, partition.task(task_name), self._runner)
        return planners[task_name]

    def start_leases(self) -> None:
        """Let the leases run out that were recovered or restored, each after its full time."""
        for partition in self._partitions.values():
            for task in partition.tasks.values():
                if task.leases:
                    self.planner(partition, task.name).start_leases()

    def waiting_count(self, partition: Partition, task_name: str) -> int:
        """Return the number of calls that wait for a task."""
        planner = self._planners[partition].get(task_name)
        return 0 if planner is None else planner.waiting_count

    async def claim(
        self, partition_id: str, incarnation: bytes, request: ClaimRequest, max_wait_seconds: float
    ) -> Claimed:
        """Return a claim, waiting for the partition and for its samples up to `max_wait_seconds` together."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + max_wait_seconds
        if partition_id not in self._partitions:
            check_name("partition_id", partition_id)  # lest one that can never appear is waited for
        while partition_id not in self._partitions:
            if incarnation:
                raise StaleIncarnationError(
                    f"partition {partition_id!r} of incarnation {incarnation.hex()} was cleared; drop what you "
                    f"hold of it"
                )
            if not await self._wait_for_arrival(partition_id, deadline - loop.time()):
                return Claimed(None, NotYet())
        self._check_not_draining()
        partition = self.get(partition_id, incarnation)
        answer = await self.planner(partition, request.task_name).claim(request, max(0.0, deadline - loop.time()))
        return Claimed(partition, answer)

    async def _wait_for_arrival(self, partition_id: str, seconds: float) -> bool:
        self._check_not_draining()
        if seconds <= 0:
            return False
        arrival: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        waiting = self._arrivals.setdefault(partition_id, {})
        waiting[arrival] = None
        try:
            async with asyncio.timeout(seconds):
                await arrival
        except TimeoutError:
            return False
        finally:
            waiting.pop(arrival, None)
            if not waiting and self._arrivals.get(partition_id) is waiting:
                del self._arrivals[partition_id]
        return True

    def drain(self) -> None:
        """End all waiting calls, and those to come, so that their clients turn to the next server."""
        self._is_draining = True
        for planners in self._planners.values():
            for planner in planners.values():
                planner.end(_is_draining)
        for line in self._put_lines.values():
            line.end(_is_draining)
        for arrivals in self._arrivals.values():
            for arrival in arrivals:
                if not arrival.done():
                    arrival.set_exception(_is_draining())

    def _check_open(self) -> None:
        if self._is_closed:
            raise UnavailableError("a checkpoint is being restored; new partitions can be made once it is")

    def _check_not_draining(self) -> None:
        if self._is_draining:
            raise _is_draining()


async def _wake_all(arrivals: Iterable[asyncio.Future[None]]) -> None:
    pace = LoopYielder()
    for arrival in tuple(arrivals):
        if not arrival.done():
            arrival.set_result(None)
            await pace.step()


def check_name(what: str, name: str) -> None:
    """Refuse names that nobody could type or print."""
    if not name or len(name) > 512 or not name.isprintable():
        raise InvalidArgumentError(f"{what} is {name[:64]!r}; give 1 to 512 printable characters", field=what)


def _was_cleared(partition_id: str) -> Callable[[], PartitionClearedError]:
    return lambda: PartitionClearedError(
        f"partition {partition_id!r} was cleared while the call waited; ask again to wait for its next life"
    )


def _is_draining() -> UnavailableError:
    return UnavailableError("the server is shutting down; the call may be sent again to its successor")
