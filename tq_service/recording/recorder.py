"""The recorder, which saves every step planned by a service in a recording, and removes the oldest steps.

    planned -> taken (bytes pinned, files kept) -> puts written or linked -> step written -> removed by retention

A step is taken in the event-loop iteration in which it is planned, without copying its bytes. Steps are written later,
in order. Problems with the recording never stop the service. If too many bytes are waiting to be written, a step is
skipped. A persistent error ends the recording. Skipped steps and errors are logged and reported in the status.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
import zlib
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Final, TypeAlias, TypeVar

import xxhash

from tq_service.errors import DataLossError, TqError, UnavailableError
from tq_service.log_message import LogMessage
from tq_service.objects.base import LARGEST_OBJECT_BYTES, Buffer
from tq_service.recording.layout import PUTS, STEPS, Pack, PutPlace, RecordedStep, encode_step, step_name, step_number
from tq_service.recording.places import LINKED_SUFFIX, Place
from tq_service.recording.reading import read_step
from tq_service.results import RecordingStatus
from tq_service.storage.engine import KeptPut
from tq_service.storage.index.put_table import PutStored
from tq_service.storage.mirror.layout import cut

_log = logging.getLogger(__name__)
MOST_PENDING_BYTES: Final = 1 << 30
"""Maximum total size, in bytes, of in-memory puts that wait to be written. They count toward the storage quota."""

_PAUSES_SECONDS: Final = (0.2, 1.0, 3.0)  # pause before each retry while the place is unavailable
_CLOSE_SECONDS: Final = 10.0
T = TypeVar("T")
TaskEpoch: TypeAlias = tuple[bytes, str, int]
"""Partition incarnation, task name and epoch number."""

_COMPRESSION: Final = 1  # zlib level for steps; the lowest level suffices because put records are very similar


@dataclass(slots=True, eq=False)
class _Put:
    """A put that has already been recorded, or will be recorded with a waiting step.

    Attributes:
        place: location of the put's bytes, or None until the bytes have been written.
        pack: objects that contain the bytes, or None until the bytes have been written.
        step_count: number of stored or waiting steps that reference the put.
    """

    place: PutPlace | None = None
    pack: Pack | None = None
    step_count: int = 0


@dataclass(slots=True, eq=False)
class _Waiting:
    """A step waiting to be written.

    Attributes:
        step: step to be written, whose number and put locations are not set yet.
        put_ids: ids of the puts that the step references.
        kept: by id, the puts that this step is the first to reference.
        size: memory used by the puts in `kept`, in bytes.
    """

    step: RecordedStep
    put_ids: Sequence[bytes]
    kept: Mapping[bytes, KeptPut]
    size: int = 0

    def release(self) -> None:
        for each in self.kept.values():
            each.release()


@dataclass(slots=True, eq=False)
class _Step:
    """A stored step, with the name and size of its object and the ids of the puts that it references."""

    name: str
    size: int
    puts: Sequence[bytes] = field(default_factory=tuple)


class Recorder:
    """Records the steps that a service plans. A recorder must be used from a single event loop.

    Args:
        place: directory or object store that contains the recording. Closed by `close`.
        most_steps: maximum number of stored steps, or None for no limit.
        most_bytes: maximum size of all stored steps, in bytes. None for no limit. The last step is always kept.
        most_pending_bytes: maximum number of bytes in memory that may wait to be written. Steps that would exceed this
            limit are skipped.
        run: name that identifies this start of the service in object names, or None for a random name.
    """

    def __init__(
        self,
        place: Place,
        *,
        most_steps: int | None = None,
        most_bytes: int | None = None,
        most_pending_bytes: int = MOST_PENDING_BYTES,
        run: str | None = None,
    ) -> None:
        self._place = place
        self._most_steps = most_steps
        self._most_bytes = most_bytes
        self._most_pending_bytes = most_pending_bytes
        self._run = run or os.urandom(4).hex()
        self._puts: dict[bytes, _Put] = {}
        self._steps: deque[_Step] = deque()
        self._waiting: deque[_Waiting] = deque()
        self._has_waiting, self._is_idle = asyncio.Event(), asyncio.Event()
        self._is_idle.set()
        self._last_number = self._last_object = 0
        self._bytes = self._pending_bytes = self._copied_bytes = self._linked_bytes = 0
        self._recorded_count = self._skipped_count = self._removed_count = 0
        self._processor_seconds = 0.0
        self._error = ""

    def status(self) -> RecordingStatus:
        """Return the status of the recording."""
        return RecordingStatus(
            place=self._place.name,
            is_recording=not self._error,
            error=self._error,
            step_count=len(self._steps),
            stored_bytes=self._bytes,
            recorded_step_count=self._recorded_count,
            skipped_step_count=self._skipped_count,
            removed_step_count=self._removed_count,
            pending_bytes=self._pending_bytes,
            copied_bytes=self._copied_bytes,
            linked_bytes=self._linked_bytes,
            processor_seconds=self._processor_seconds,
        )

    async def open(self) -> dict[TaskEpoch, int]:
        """Open the place, read the existing steps, and remove objects that no step references.

        Returns:
            Last recorded `batch_index` of each task epoch.

        Raises:
            TqError: the place cannot be used.
        """
        await self._place.open(for_writing=True)
        last: dict[TaskEpoch, int] = {}
        try:
            for name in await self._place.names(STEPS):
                self._last_number = max(self._last_number, step_number(name))
                try:
                    step, size = await read_step(self._place, name)
                except DataLossError as error:
                    _log.warning(LogMessage("skipped a damaged step of the recording", error=error))
                    continue
                self._take_over(name, size, step)
                of = step.incarnation, step.task_name, step.epoch
                last[of] = max(step.batch_index, last.get(of, -1))
            packs = {each.pack for each in self._puts.values() if each.pack is not None}
            needed = {name for pack in packs for name in pack.names}
            if left := [name for name in await self._place.names(PUTS) if name not in needed]:
                await self._place.remove(left)
        except BaseException:
            await self._place.close()
            raise
        return last

    def _take_over(self, name: str, size: int, step: RecordedStep) -> None:
        """Register a step that an earlier run of the service recorded."""
        packs: dict[tuple[str, ...], Pack] = {}
        for place in step.puts:
            known = self._puts.get(place.record.put_id)
            if known is None:
                pack = packs.get(place.names)
                if pack is None:
                    pack = packs[place.names] = Pack(names=place.names)
                self._add_put(place, pack)
        self._add_step(_Step(name, size, [place.record.put_id for place in step.puts]))
        for place in step.puts:
            self._puts[place.record.put_id].step_count += 1

    # Taking steps

    def take(
        self, step: RecordedStep, put_ids: Sequence[bytes], keep: Callable[[bytes], KeptPut | None]
    ) -> Callable[[], None]:
        """Pin the current bytes of a step's puts, and return a callback that queues the step for writing.

        Args:
            step: planned batch and the metadata of its samples. The step's number and the locations of its puts are set
                when the step is written.
            put_ids: distinct ids of the puts to which the step refers.
            keep: function that pins a put's bytes until they are released, or returns None if the bytes are not in this
                process.
        """
        kept: dict[bytes, KeptPut] = {}
        for put_id in put_ids:
            if put_id not in self._puts:
                found = keep(put_id)
                if found is None:
                    return self._leave(kept, f"put {put_id.hex()} is not stored in this process, or is damaged")
                kept[put_id] = found
        size = sum(len(part) for each in kept.values() for part in each.parts)
        if self._pending_bytes and self._pending_bytes + size > self._most_pending_bytes:
            return self._leave(
                kept,
                f"{self._pending_bytes} bytes are waiting to be written; the limit is {self._most_pending_bytes}",
            )
        for put_id in put_ids:
            self._puts.setdefault(put_id, _Put()).step_count += 1
        self._pending_bytes += size
        return partial(self._enqueue, _Waiting(step, put_ids, kept, size))

    def _leave(self, kept: Mapping[bytes, KeptPut], reason: str) -> Callable[[], None]:
        for each in kept.values():
            each.release()
        self.skip(reason)
        return lambda: None

    def _enqueue(self, waiting: _Waiting) -> None:
        if self._error:
            waiting.release()
            return
        self._waiting.append(waiting)
        self._has_waiting.set()
        self._is_idle.clear()

    def count_seconds(self, seconds: float) -> None:
        """Add to the CPU time for taking steps, which the status reports."""
        self._processor_seconds += seconds

    @property
    def is_recording(self) -> bool:
        """Whether steps are being recorded. False once an error has ended the recording."""
        return not self._error

    def skip(self, reason: str) -> None:
        """Count a step that was not recorded, and log a warning if the new count is a power of two."""
        self._skipped_count += 1
        if self._skipped_count & (self._skipped_count - 1) == 0:  # log the 1st, 2nd, 4th, 8th, ... skipped step
            _log.warning(LogMessage("a step was not recorded", reason=reason, skipped_steps=self._skipped_count))

    def fail(self, error: BaseException) -> None:
        """End the recording after an error, and release the bytes of waiting steps."""
        if self._error:
            return
        self._error = error.message if isinstance(error, TqError) else f"{type(error).__name__}: {error}"
        _log.error(
            LogMessage("recording has stopped; the service continues", place=self._place.name, error=self._error),
            exc_info=None if isinstance(error, TqError) else error,
        )
        for each in self._waiting:
            each.release()
        self._waiting.clear()
        self._pending_bytes = 0
        self._is_idle.set()

    # Writing

    async def run(self) -> None:
        """Write steps until cancelled. On any error, end the recording instead of raising the error."""
        while True:
            await self._has_waiting.wait()
            self._has_waiting.clear()
            while self._waiting:
                try:
                    await self._write(self._waiting[0])
                    await self._remove_old()
                except Exception as error:  # the service continues after any error
                    self.fail(error)
                    break
            self._is_idle.set()

    async def _write(self, waiting: _Waiting) -> None:
        """Write a step and its puts. If the directory or object store is unavailable, retry several times."""
        for pause in (*_PAUSES_SECONDS, None):
            try:
                await self._write_once(waiting)
                break
            except UnavailableError as error:
                if pause is None:
                    raise
                _log.warning(LogMessage("could not record a step; retrying", error=error))
                await asyncio.sleep(pause)
        self._waiting.popleft()
        self._pending_bytes -= waiting.size
        waiting.release()

    async def _write_once(self, waiting: _Waiting) -> None:
        missing = {put_id: each for put_id, each in waiting.kept.items() if self._puts[put_id].place is None}
        await self._link({put_id: each for put_id, each in missing.items() if each.file is not None})
        left = [each for put_id, each in missing.items() if self._puts[put_id].place is None]
        for some in _packed(left):
            await self._write_pack(some)
        places = [place for put_id in waiting.put_ids if (place := self._puts[put_id].place) is not None]
        self._last_number += 1
        step = replace(waiting.step, number=self._last_number, puts=tuple(places))
        encoded = await self._in_thread(lambda: zlib.compress(encode_step(step), _COMPRESSION))
        name = step_name(step.number, self._run)
        await self._place.write(name, [encoded])
        self._add_step(_Step(name, len(encoded), waiting.put_ids))
        self._recorded_count += 1

    async def _link(self, kept: Mapping[bytes, KeptPut]) -> None:
        """If the place supports links, link the puts' files in the data directory into the recording."""
        names = {put_id: self._new_name() + LINKED_SUFFIX for put_id in kept}
        files = [(names[put_id], each.file, each.record.size_bytes) for put_id, each in kept.items() if each.file]
        if not files or not await self._place.link(files):
            return
        for put_id, name in names.items():
            self._add_put(PutPlace(record=replace(kept[put_id].record, segment=0), names=(name,)), Pack(names=(name,)))
            self._linked_bytes += kept[put_id].record.size_bytes

    async def _write_pack(self, puts: Sequence[KeptPut]) -> None:
        """Write several puts to one object, or one large put to several objects."""
        parts, records = await self._in_thread(lambda: _contents(puts))
        names = []
        for piece in cut(parts):
            names.append(self._new_name())
            await self._place.write(names[-1], piece)
        pack, start = Pack(names=tuple(names)), 0
        for record in records:
            self._add_put(PutPlace(record=record, names=pack.names, start=start), pack)
            self._copied_bytes += record.size_bytes
            start += record.size_bytes

    async def _in_thread(self, work: Callable[[], T]) -> T:
        """Run `work` in a thread, record its CPU time in the status, and return its result."""

        def timed() -> tuple[T, float]:
            began_at = time.thread_time()
            return work(), time.thread_time() - began_at

        result, seconds = await asyncio.to_thread(timed)
        self._processor_seconds += seconds
        return result

    def _new_name(self) -> str:
        self._last_object += 1
        return f"{PUTS}{self._run}-{self._last_object}"

    # Bookkeeping

    def _add_put(self, place: PutPlace, pack: Pack) -> None:
        entry = self._puts.setdefault(place.record.put_id, _Put())
        entry.place, entry.pack = place, pack
        pack.put_count += 1
        pack.size += place.record.size_bytes
        self._bytes += place.record.size_bytes

    def _add_step(self, written: _Step) -> None:
        self._steps.append(written)
        self._bytes += written.size

    async def _remove_old(self) -> None:
        """Remove the oldest steps, and the puts that no remaining step references, until no limit is exceeded."""
        while len(self._steps) > 1 and (
            (self._most_steps is not None and len(self._steps) > self._most_steps)
            or (self._most_bytes is not None and self._bytes > self._most_bytes)
        ):
            oldest = self._steps.popleft()
            self._bytes -= oldest.size
            self._removed_count += 1
            await self._place.remove([oldest.name])  # the step before its puts, so stored steps are always complete
            if unneeded := list(self._forget(oldest.puts)):
                await self._place.remove(unneeded)

    def _forget(self, put_ids: Sequence[bytes]) -> Iterator[str]:
        """Remove a step's references to its puts, and yield the names of objects that are no longer needed."""
        for put_id in put_ids:
            entry = self._puts[put_id]
            entry.step_count -= 1
            if entry.step_count or entry.pack is None:
                continue
            del self._puts[put_id]
            entry.pack.put_count -= 1
            if not entry.pack.put_count:
                self._bytes -= entry.pack.size
                yield from entry.pack.names

    async def close(self) -> None:
        """Wait at most a few seconds for pending steps to be written, then close the place. Cancel `run` afterward."""
        try:
            async with asyncio.timeout(_CLOSE_SECONDS):
                await self._is_idle.wait()
        except TimeoutError:
            self.fail(UnavailableError(f"{len(self._waiting)} steps were not written before the service shut down"))
        await self._place.close()


def _packed(puts: Sequence[KeptPut]) -> Iterator[list[KeptPut]]:
    """Split puts into one list per object.

    The puts in each list add up to at most `LARGEST_OBJECT_BYTES`, unless the list consists of one larger put.
    """
    some: list[KeptPut] = []
    size = 0
    for put in puts:
        if some and size + put.record.size_bytes > LARGEST_OBJECT_BYTES:
            yield some
            some, size = [], 0
        some.append(put)
        size += put.record.size_bytes
    if some:
        yield some


def _contents(puts: Sequence[KeptPut]) -> tuple[list[Buffer], list[PutStored]]:
    """Return the bytes of the given puts, and records that contain the checksums of these bytes."""
    parts: list[Buffer] = []
    records = []
    for put in puts:
        if put.file is not None:
            with put.file.open("rb", buffering=0) as file:
                parts.append(file.read(put.record.size_bytes))
            records.append(replace(put.record, segment=0))
            continue
        digest = xxhash.xxh3_64()
        for part in put.parts:
            digest.update(part)
        parts += put.parts
        records.append(replace(put.record, checksum=digest.intdigest()))
    return parts, records
