"""Calls that watch: each is sent what has changed, as often as all of them together may be.

What costs is the sending, so it is that which is bounded: a change goes out at once where nothing was sent for a while,
and else with the next round of answers. Rounds are the further apart the more calls there are. In a round, calls that
watch the same from the same revision get the same messages, which are made once; so a round of a hundred of them costs
hardly more than writing a hundred messages, and what changes in between costs nothing.

A call holds a number, and the message that is being written. One whose client does not read is ended (`stall_seconds`),
or has to start over when what it lacks is forgotten (`ChangeHistory`), and holds nothing up meanwhile.
"""

from __future__ import annotations

import asyncio
import random
import weakref
from collections import deque
from collections.abc import Iterator
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from tq_service.errors import InvalidArgumentError
from tq_service.results import Revision
from tq_service.server import converters
from tq_service.server.rpc.inbox import Progress, WaitingCalls
from tq_service.server.rpc.methods import Context, shown_partitions
from tq_service.serving.catalog import Catalog
from tq_service.serving.history import ROWS_OF_A_PART, Changes, PartitionChanges, Reader, Selection
from tq_service.serving.lookup import fitting_count
from tq_service.serving.status import status_of, summary_of
from tq_service.serving.wait_queue import LoopYielder
from tq_service.state.partition import Partition
from tq_service.state.plan import Indexes
from tq_service.v1 import controller_service_pb2 as pb
from tq_service.v1.metadata_pb2 import BatchMeta, IndexRanges
from tq_service.wire.durations import read_seconds
from tq_service.wire.mapper import read_message, to_message
from tq_service.wire.runs import runs_of

_LEAST_INTERVAL_SECONDS: Final = 0.1
_ANSWERS_A_SECOND: Final = 100
_PROGRESS_SECONDS: Final = 10.0
_LEAST_PROGRESS_SECONDS: Final = 0.1
_LONGEST_SECONDS: Final = 600.0  # then the client calls again, with the token that it has by then
_LAST_ANSWER_SECONDS: Final = 1.0  # of a server that drains
_KEPT_MESSAGES: Final = 16
_SHARED_SECONDS: Final = 1.0
_PARTITION_ROWS: Final = 128  # what a partition takes of an answer besides its samples, in samples
_TASK_ROWS: Final = 32


class Watches:
    """The calls that watch the partitions of a catalog. Confined to its event loop.

    Args:
        catalog: the partitions.
        most: calls there may be.
        stall_seconds: how long a client may take to read.
    """

    def __init__(self, catalog: Catalog, *, most: int, stall_seconds: float) -> None:
        self._catalog = catalog
        self._history = catalog.history
        self._history.on_change = self._on_change
        self._counted = WaitingCalls(most, limit_name="max_watchers")
        self._stall_seconds = stall_seconds
        self._waiting: dict[asyncio.Future[None], tuple[Reader, Selection]] = {}
        self._round: asyncio.Task[None] | None = None
        self._round_at = 0.0
        self._ends: set[asyncio.Timeout] = set()  # of the answers that are being written
        self._answers: weakref.WeakValueDictionary[tuple[Selection, int], _Answer] = weakref.WeakValueDictionary()
        self._answers_of_round: list[_Answer] = []
        self._is_draining = False

    async def serve(self, request: pb.WatchRequest, context: Context) -> None:
        """Answer a call, until it has lasted long enough, its client leaves, or the server drains.

        Raises:
            CompactedError: what has changed since the revision of the client is not known any more.
            InvalidArgumentError: the revision or the interval.
            LimitExceededError: it is one call too many.
            DeadlineError: the client does not read.
            UnavailableError: the server is draining.
        """
        progress_seconds = _PROGRESS_SECONDS
        if request.HasField("progress_interval"):
            progress_seconds = read_seconds("progress_interval", request.progress_interval)
            if progress_seconds < _LEAST_PROGRESS_SECONDS:
                raise InvalidArgumentError(
                    f"progress_interval is {progress_seconds:g} s, expected {_LEAST_PROGRESS_SECONDS:g} s or more",
                    field="progress_interval",
                )
        selection = Selection(
            prefix=request.prefix,
            is_shown=shown_partitions.get(),
            has_samples=not request.omit_samples,
            has_tasks=not request.omit_tasks,
        )
        self._catalog.check_not_draining()
        since = 0
        if request.HasField("revision"):
            since = self._history.number_of(read_message(Revision, request.revision))
        with self._counted.one(context):
            reader = Reader(since)
            self._history.readers.add(reader)
            try:
                await self._follow(reader, selection, progress_seconds, context)
            finally:
                self._history.readers.discard(reader)
                if not self._history.readers:
                    self._history.is_awaited = False

    def drain(self) -> None:
        """End all calls; soon after also those whose clients do not read, so that none holds up the end."""
        self._is_draining = True
        if self._round is not None:
            self._round.cancel()
        for waiting in self._waiting:
            if not waiting.done():
                waiting.set_result(None)
        for end in self._ends:
            end.reschedule(asyncio.get_running_loop().time() + _LAST_ANSWER_SECONDS)

    async def _follow(self, reader: Reader, selection: Selection, progress_seconds: float, context: Context) -> None:
        loop = asyncio.get_running_loop()
        # Calls that began together, after a restart, do not end together.
        ends_at = loop.time() + _LONGEST_SECONDS * random.uniform(0.75, 1.0)  # noqa: S311
        await self._send_changes(reader, selection, context)
        while not self._is_draining and loop.time() < ends_at:
            seconds = max(0.0, min(progress_seconds, ends_at - loop.time()))
            if await self._until_changed(reader, selection, seconds):
                await self._send_changes(reader, selection, context)
            elif not self._history.has_changed(reader.revision, selection):
                reader.revision = self._history.mark()
                await self._write(pb.WatchResponse(revision=self._revision(reader.revision)), context)

    async def _send_changes(self, reader: Reader, selection: Selection, context: Context) -> None:
        """Send what has changed since the revision of a reader, and have it be at the next one."""
        since = reader.revision
        while True:
            answer = self._answer(since, selection)
            reader.revision = answer.number
            place = 0
            while (message := answer.message(place)) is not None:  # else others with the same answer are far ahead
                await self._write(message, context)
                if message.HasField("revision") or self._is_draining:
                    return
                place += 1

    async def _write(self, message: pb.WatchResponse, context: Context) -> None:
        waiting = Progress(self._stall_seconds, "an answer was not read")
        end = asyncio.timeout(_LAST_ANSWER_SECONDS if self._is_draining else None)
        self._ends.add(end)
        try:
            async with end:
                await waiting.wait_for(context.write(message))
        except TimeoutError:
            self._catalog.check_not_draining()
            raise
        finally:
            self._ends.discard(end)

    def _revision(self, number: int) -> pb.Revision:
        return pb.Revision(instance_id=self._history.instance_id, number=number)

    # Rounds

    def _on_change(self) -> None:
        if self._waiting and self._round is None and not self._is_draining:
            self._history.is_awaited = False
            self._round = asyncio.get_running_loop().create_task(self._make_round())

    async def _make_round(self) -> None:
        """Have those calls answer for which something has changed."""
        loop, history = asyncio.get_running_loop(), self._history
        try:
            interval = max(_LEAST_INTERVAL_SECONDS, len(history.readers) / _ANSWERS_A_SECOND)
            await asyncio.sleep(max(0.0, self._round_at + interval - loop.time()))
            self._round_at = loop.time()
            number, pace = history.mark(), LoopYielder()
            has_changed: dict[tuple[Selection, int], bool] = {}
            for waiting, (reader, selection) in list(self._waiting.items()):
                key = selection, reader.revision
                if key not in has_changed:
                    has_changed[key] = history.has_changed(reader.revision, selection)
                if not has_changed[key]:
                    reader.revision = max(reader.revision, number)
                elif not waiting.done():
                    waiting.set_result(None)
                await pace.step(has_answered=has_changed[key])
            await asyncio.sleep(interval / 2)  # in which those that were woken last find what was made for the others
        finally:
            self._answers_of_round.clear()
            self._round = None
        if history.catch_up() > number:
            self._on_change()
        else:
            history.is_awaited = True

    async def _until_changed(self, reader: Reader, selection: Selection, seconds: float) -> bool:
        """Wait for the round in which something that is watched has changed; return whether it came in time."""
        waiting: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting[waiting] = reader, selection
        if self._history.catch_up() > reader.revision:
            self._on_change()
        elif self._round is None:
            self._history.is_awaited = True
        try:
            await asyncio.wait((waiting,), timeout=seconds)
            return waiting.done()
        finally:
            self._waiting.pop(waiting, None)

    # Answers

    def _answer(self, since: int, selection: Selection) -> _Answer:
        """Return the messages that bring a reader from a revision to a later one; others may get the same."""
        now = asyncio.get_running_loop().time()
        answer = self._answers.get((selection, since))
        if answer is None or not answer.is_whole or now - answer.made_at > _SHARED_SECONDS:
            changes = self._history.since(since, selection)
            answer = self._answers[selection, since] = _Answer(changes.revision, self._messages(changes), now)
            if self._round is not None:
                self._answers_of_round.append(answer)
        return answer

    def _messages(self, changes: Changes) -> Iterator[pb.WatchResponse]:
        """Yield the messages of an answer, each made in a step of the loop; the last one has the revision."""
        message, rows = pb.WatchResponse(), 0
        for partition_id, incarnation in changes.cleared:
            message.partitions.add(partition_id=partition_id, incarnation=incarnation, cleared=True)
        for changed in changes.partitions:
            for part, size in self._parts(changed):
                message.partitions.append(part)
                rows += size
                if rows >= ROWS_OF_A_PART:
                    yield message
                    message, rows = pb.WatchResponse(), 0
        message.revision.CopyFrom(self._revision(changes.revision))
        yield message

    def _parts(self, changed: PartitionChanges) -> Iterator[tuple[pb.PartitionChange, int]]:
        """Yield what has changed in a partition, as long as that is there, each part with the rows that it is worth."""
        partition = changed.partition
        if not self._history.is_there(partition):
            return
        known = map(partition.tasks.get, changed.task_names)
        tasks = [task for task in known if task is not None]  # else it was forgotten since
        part = pb.PartitionChange(
            partition_id=partition.partition_id,
            incarnation=partition.incarnation,
            summary=to_message(pb.PartitionSummary, summary_of(partition)),
            tasks=[to_message(pb.TaskStatus, status_of(self._catalog, partition, task)) for task in tasks],
        )
        size = _PARTITION_ROWS + _TASK_ROWS * len(tasks)
        for more, rows in self._row_parts(changed):
            # Another list of the same kind would be appended to the one before.
            is_second = part.HasField("samples") or (part.HasField("cleared_samples") and not more.HasField("samples"))
            if is_second or size + rows > 2 * ROWS_OF_A_PART:
                yield part, size
                part = pb.PartitionChange(partition_id=partition.partition_id, incarnation=partition.incarnation)
                size = 0
            part.MergeFrom(more)
            size += rows
        yield part, size

    def _row_parts(self, changed: PartitionChanges) -> Iterator[tuple[pb.PartitionChange, int]]:
        """Yield rows that were removed, then those that were written, with their number."""
        for indexes, keys in changed.removed:
            for start in range(0, len(indexes), ROWS_OF_A_PART):
                end = start + ROWS_OF_A_PART
                gone = _cleared_samples(indexes[start:end], None if keys is None else keys[start:end])
                yield pb.PartitionChange(cleared_samples=gone), len(indexes[start:end])
        for written in changed.written_in_parts():
            for samples in self._samples(changed.partition, written):
                yield pb.PartitionChange(samples=samples), written.size

    def _samples(self, partition: Partition, rows: Indexes) -> Iterator[BatchMeta]:
        """Yield what is known of rows, as far as they are there; many of them where it is much."""
        while rows.size and self._history.is_there(partition):
            is_there = partition.table.find(rows) >= 0
            rows = rows[is_there]
            count = fitting_count(partition, partition.table.find(rows))
            if count:
                yield converters.all_meta(partition, rows[:count], None)
            rows = rows[count:]


def _cleared_samples(indexes: Indexes | range, keys: NDArray[Any] | None) -> pb.ClearedSamples:
    firsts, counts = runs_of(np.asarray(indexes, np.int64))
    ranges = IndexRanges(first_indexes=firsts.tolist(), index_counts=counts.tolist())
    return pb.ClearedSamples(index_ranges=ranges, keys=() if keys is None else converters.names_of(keys.tolist()))


class _Answer:
    """The messages of an answer, made as they are asked for; the last ones made are kept for other calls.

    Attributes:
        number: the revision at which a reader is with the last one.
        made_at: when it was begun, by the clock of the event loop.
    """

    def __init__(self, number: int, messages: Iterator[pb.WatchResponse], made_at: float) -> None:
        self.number = number
        self.made_at = made_at
        self._messages = messages
        self._kept: deque[pb.WatchResponse] = deque(maxlen=_KEPT_MESSAGES)
        self._made_count = 0

    @property
    def is_whole(self) -> bool:
        """Whether its messages can be had from the first one on."""
        return self._made_count == len(self._kept)

    def message(self, place: int) -> pb.WatchResponse | None:
        """Return one of the messages, None where it is not kept any more; the place is at most one beyond the last."""
        if place == self._made_count:
            self._made_count += 1
            try:
                self._kept.append(next(self._messages))
            except BaseException:
                self._kept.clear()  # no other call is to go on with what cannot be made whole
                raise
        place -= self._made_count - len(self._kept)
        return self._kept[place] if place >= 0 else None
