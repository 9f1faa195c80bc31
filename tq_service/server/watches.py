"""Watch calls, which send partition changes to clients at a limited total rate.

Sending is expensive, so changes are sent in rounds. If no round has run recently, a change is sent immediately;
otherwise, it is sent in the next round. The interval between rounds grows with the number of watch calls. An update
that fits in a single message is built once and shared by all calls with the same selection and revision. A round with a
hundred calls therefore costs little more than writing a hundred messages. Changes between rounds cost nothing.

Each watch call holds only a revision number and the message that it is writing. If a client stops reading, its call is
ended after `stall_seconds`. A watch call never delays other calls.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Final, Literal, TypeAlias

from tq_service.errors import InvalidArgumentError
from tq_service.results import Revision
from tq_service.server import converters
from tq_service.server.rpc.inbox import Progress, WaitingCalls
from tq_service.server.rpc.methods import Context, shown_partitions
from tq_service.serving.catalog import Catalog
from tq_service.serving.history import ROWS_OF_A_PART, PartitionChanges, Watched
from tq_service.serving.lookup import fitting_count
from tq_service.serving.planner import LoopYielder
from tq_service.serving.status import status_of, summary_of
from tq_service.state.partition import Partition
from tq_service.v1 import controller_service_pb2 as pb
from tq_service.v1.metadata_pb2 import BatchMeta, IndexRanges
from tq_service.wire.messages import read_message, read_seconds, to_message
from tq_service.wire.metadata import runs_of

_LEAST_INTERVAL_SECONDS: Final = 0.1
_ANSWERS_A_SECOND: Final = 100
_PROGRESS_SECONDS: Final = 10.0
_LEAST_PROGRESS_SECONDS: Final = 0.1
_LONGEST_SECONDS: Final = 600.0  # after this time, the client calls again with its current token
_LAST_ANSWER_SECONDS: Final = 1.0  # time to send the last update while the server drains
_SHARED_SECONDS: Final = 1.0
_PARTITION_ROWS: Final = 128  # size of a partition summary, expressed as a number of sample rows
_TASK_ROWS: Final = 32
_List: TypeAlias = Literal["cleared_samples", "samples"]


@dataclass(slots=True, eq=False)
class _Watcher:
    """A watch call. All changes up to `revision` have been sent or are being sent to the call's client."""

    selection: Watched
    revision: int
    context: Context


class Watches:
    """The watch calls that follow a catalog's partitions. Use this class only on the catalog's event loop.

    Args:
        catalog: the controller's partitions.
        most: maximum number of concurrent watch calls.
        stall_seconds: maximum time that a client may take to read an update.

    Attributes:
        calls: counter of watch calls.
        end_connection: function that ends the connection to a given peer. It is called for each client that does not
            read updates while the server drains. gRPC sends a call's status only after all messages, so such a client
            would otherwise delay shutdown.
    """

    def __init__(self, catalog: Catalog, *, most: int, stall_seconds: float) -> None:
        self._catalog = catalog
        self._history = catalog.history
        self._history.on_change = self._on_change
        self.calls = WaitingCalls(most, limit_name="max_watchers")
        self._stall_seconds = stall_seconds
        self._waiting: set[asyncio.Future[None]] = set()
        self._round: asyncio.Task[None] | None = None
        self._round_at = 0.0
        self._ends: set[asyncio.Timeout] = set()  # timeouts of all watch calls
        self._shared: dict[
            tuple[Watched, int], pb.WatchResponse
        ] = {}  # single-message updates built in the last second
        self._is_draining = False
        self.end_connection: Callable[[str], Awaitable[None]] | None = None

    async def serve(self, request: pb.WatchRequest, context: Context) -> None:
        """Serve a watch call for at most `_LONGEST_SECONDS`, or until the client disconnects or the server drains.

        Raises:
            CompactedError: some of the changes since the client's revision are no longer stored.
            InvalidArgumentError: the revision or the progress interval is invalid.
            LimitExceededError: too many watch calls are open.
            DeadlineError: the client does not read the updates.
            UnavailableError: the server is draining.
        """
        progress_seconds = _PROGRESS_SECONDS
        if request.HasField("progress_interval"):
            progress_seconds = read_seconds("progress_interval", request.progress_interval)
            if progress_seconds < _LEAST_PROGRESS_SECONDS:
                raise InvalidArgumentError(
                    f"progress_interval is {progress_seconds:g} s; expected at least {_LEAST_PROGRESS_SECONDS:g} s",
                    field="progress_interval",
                )
        selection = Watched(
            prefix=request.prefix,
            is_shown=shown_partitions.get(),
            has_samples=not request.omit_samples,
            has_tasks=not request.omit_tasks,
        )
        self._catalog.check_not_draining()
        since = 0
        if request.HasField("revision"):
            since = self._history.number_of(read_message(Revision, request.revision))
        end = asyncio.timeout(None)
        with self.calls.one(context):
            self._ends.add(end)
            try:
                async with end:
                    await self._follow(_Watcher(selection, since, context), progress_seconds)
            except TimeoutError:
                if self._is_draining and self.end_connection is not None:
                    await self.end_connection(context.peer())
                self._catalog.check_not_draining()
                raise
            finally:
                self._ends.discard(end)

    def drain(self) -> None:
        """End all watch calls. To avoid delaying shutdown, end a call after a second if its client does not read."""
        self._is_draining = True
        if self._round is not None:
            self._round.cancel()
        for waiting in self._waiting:
            if not waiting.done():
                waiting.set_result(None)
        for end in self._ends:
            end.reschedule(asyncio.get_running_loop().time() + _LAST_ANSWER_SECONDS)

    async def _follow(self, watcher: _Watcher, progress_seconds: float) -> None:
        loop, is_due = asyncio.get_running_loop(), True
        # The duration is random so that calls that began together after a restart do not end together.
        ends_at = loop.time() + _LONGEST_SECONDS * random.uniform(0.75, 1.0)  # noqa: S311
        while True:
            await self._send_changes(watcher, is_due=is_due)
            left_seconds = ends_at - loop.time()
            if self._is_draining or left_seconds <= 0:
                return
            is_due = not await self._until_round(watcher, min(progress_seconds, left_seconds))

    async def _send_changes(self, watcher: _Watcher, *, is_due: bool) -> None:
        """Send a watcher the changes made since its revision.

        If nothing has changed, send the revision alone, or nothing if `is_due` is False.
        """
        key = watcher.selection, watcher.revision
        shared = self._shared.get(key)
        if shared is not None and shared.revision.number >= self._history.forgotten_at:
            watcher.revision = shared.revision.number
            await self._write(shared, watcher)
            return
        changes = self._history.since(watcher.revision, watcher.selection)
        watcher.revision = self._history.mark()
        if not changes and not is_due:
            return
        for number, message in enumerate(self._messages(changes, watcher.revision)):
            if changes and number == 0 and message.HasField("revision"):
                self._shared[key] = message
                asyncio.get_running_loop().call_later(_SHARED_SECONDS, self._shared.pop, key, None)
            await self._write(message, watcher)
            if self._is_draining:
                return

    async def _write(self, message: pb.WatchResponse, watcher: _Watcher) -> None:
        waiting = Progress(self._stall_seconds, "an answer was not read")
        await waiting.wait_for(watcher.context.write(message))

    # Rounds

    def _on_change(self) -> None:
        if self._waiting and self._round is None and not self._is_draining:
            self._round = asyncio.get_running_loop().create_task(self._make_round())

    async def _make_round(self) -> None:
        """Wake all waiting watch calls so that they look for changes."""
        loop, pace = asyncio.get_running_loop(), LoopYielder()
        try:
            interval = max(_LEAST_INTERVAL_SECONDS, self.calls.count / _ANSWERS_A_SECOND)
            await asyncio.sleep(max(0.0, self._round_at + interval - loop.time()))
            self._round_at, number = loop.time(), self._history.mark()
            for waiting in tuple(self._waiting):
                if not waiting.done():
                    waiting.set_result(None)
                await pace.step()
        finally:
            self._round = None
        if self._history.number > number:
            self._on_change()

    async def _until_round(self, watcher: _Watcher, seconds: float) -> bool:
        """Wait for the next round, which only a change can start. Return False if no round starts within `seconds`."""
        waiting: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.add(waiting)
        if self._history.number > watcher.revision:
            self._on_change()
        try:
            await asyncio.wait((waiting,), timeout=seconds)
            return waiting.done()
        finally:
            self._waiting.discard(waiting)

    # Updates

    def _messages(self, changes: Sequence[PartitionChanges], number: int) -> Iterator[pb.WatchResponse]:
        """Yield the messages that make up an update.

        Each message is built in a single event-loop iteration. The last message contains the revision.
        """
        message, rows = pb.WatchResponse(), 0
        for changed in changes:
            for part, size in self._parts(changed):
                message.partitions.append(part)
                rows += size
                if rows >= ROWS_OF_A_PART:
                    yield message
                    message, rows = pb.WatchResponse(), 0
        message.revision.CopyFrom(pb.Revision(instance_id=self._history.instance_id, number=number))
        yield message

    def _parts(self, changed: PartitionChanges) -> Iterator[tuple[pb.PartitionChange, int]]:
        """Split a partition's changes into parts, and yield each part with its number of rows.

        Stop early if the partition is cleared.
        """
        partition = changed.partition
        part, size = _part_of(changed), _PARTITION_ROWS
        if partition is None:
            part.cleared = True
            yield part, size
            return
        if not self._history.is_there(partition):
            return
        part.summary.CopyFrom(to_message(pb.PartitionSummary, summary_of(partition)))
        for task in filter(None, map(partition.tasks.get, changed.task_names)):  # None if the task was forgotten
            part.tasks.append(to_message(pb.TaskStatus, status_of(self._catalog, partition, task)))
            size += _TASK_ROWS
        for list_name, samples, count in chain(_removed(changed), self._written(changed, partition)):
            if part.HasField(list_name):
                yield part, size
                part, size = _part_of(changed), 0
            getattr(part, list_name).CopyFrom(samples)
            size += count
        yield part, size

    def _written(self, changed: PartitionChanges, partition: Partition) -> Iterator[tuple[_List, BatchMeta, int]]:
        """Yield the metadata of written rows that still exist, split into parts of limited size."""
        for left in changed.written():
            rows = left
            while rows.size and self._history.is_there(partition):
                rows = rows[partition.table.find(rows) >= 0]
                count = fitting_count(partition, partition.table.find(rows))
                if count:
                    yield "samples", converters.all_meta(partition, rows[:count], None), count
                rows = rows[count:]


def _part_of(changed: PartitionChanges) -> pb.PartitionChange:
    return pb.PartitionChange(partition_id=changed.partition_id, incarnation=changed.incarnation)


def _removed(changed: PartitionChanges) -> Iterator[tuple[_List, pb.ClearedSamples, int]]:
    """Split the removed rows into parts, and yield each part with its number of rows."""
    for indexes, keys in changed.removed:
        for start in range(0, len(indexes), ROWS_OF_A_PART):
            some = slice(start, start + ROWS_OF_A_PART)
            firsts, counts = runs_of(indexes[some])
            ranges = IndexRanges(first_indexes=firsts.tolist(), index_counts=counts.tolist())
            names = () if keys is None else converters.names_of(keys[some].tolist())
            yield "cleared_samples", pb.ClearedSamples(index_ranges=ranges, keys=names), len(indexes[some])
