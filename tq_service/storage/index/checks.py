"""Whether the bytes of recovered puts are as they were put: looked at before the first read, and in the background."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Mapping
from typing import Final

from tq_service.errors import UnavailableError
from tq_service.log_message import LogMessage
from tq_service.storage.blobs.base import Blob, DurableBlobStore, is_temporary

_log = logging.getLogger(__name__)
_SCRUB_BYTES_PER_SECOND: Final = 100e6
_LEAST_PAUSE_SECONDS: Final = 0.001
_RETRY_SECONDS: Final = 1.0


class BlobChecks:
    """Knows which puts were not looked at yet, and which are damaged. Confined to one event loop."""

    def __init__(self, store: DurableBlobStore) -> None:
        self._store = store
        self._expected: dict[bytes, tuple[Blob, int]] = {}
        self._running: dict[bytes, asyncio.Task[None]] = {}
        self._damaged: dict[bytes, str] = {}

    @property
    def damaged(self) -> Mapping[bytes, str]:
        """Puts whose bytes are not as they were put, and why."""
        return self._damaged

    def expect(self, put_id: bytes, blob: Blob, checksum: int) -> None:
        """Have a put looked at: its blob is to have this checksum."""
        self._expected[put_id] = blob, checksum

    def is_sound(self, put_id: bytes) -> bool:
        """Whether a put is known to be as it was put."""
        return put_id not in self._expected and put_id not in self._damaged

    def mark_damaged(self, put_id: bytes, reason: str) -> None:
        """Take note of a put that cannot be read."""
        _log.error(LogMessage("a put is damaged", put_id=put_id, reason=reason))
        self._damaged[put_id] = reason

    def forget(self, put_id: bytes) -> bool:
        """Forget a put; return whether it was damaged."""
        self._expected.pop(put_id, None)
        return self._damaged.pop(put_id, None) is not None

    async def check(self, put_ids: Iterable[bytes]) -> None:
        """Look at those of these puts that were not looked at yet.

        Raises:
            UnavailableError: one of them cannot be looked at now, since this process lacks files or memory.
        """
        if self._expected:
            tasks = [self._start(put_id) for put_id in put_ids if put_id in self._expected]
            if tasks:
                await asyncio.wait(tasks)
                for task in tasks:
                    task.result()

    async def scrub(self) -> None:
        """Look at all puts that were not looked at yet, one after the other, slowly."""
        while self._expected:
            put_id, (blob, _) = next(iter(self._expected.items()))
            task = self._start(put_id)
            await asyncio.wait([task])
            if (error := task.exception()) is None:
                await asyncio.sleep(max(blob.size / _SCRUB_BYTES_PER_SECOND, _LEAST_PAUSE_SECONDS))
            else:
                _log.warning(LogMessage("the check of recovered puts is tried again later", error=error))
                await asyncio.sleep(_RETRY_SECONDS)

    def _start(self, put_id: bytes) -> asyncio.Task[None]:
        task = self._running.get(put_id)
        if task is None:
            task = self._running[put_id] = asyncio.get_running_loop().create_task(self._check(put_id))
            task.add_done_callback(lambda done: self._end(put_id, done))
        return task

    def _end(self, put_id: bytes, task: asyncio.Task[None]) -> None:
        del self._running[put_id]
        if not task.cancelled():
            task.exception()  # where nobody waits any more, nobody is to be told of it

    async def _check(self, put_id: bytes) -> None:
        blob, expected = self._expected.get(put_id, (None, 0))
        if blob is None:
            return
        reason = ""
        try:
            found = await self._store.checksum(blob)
            if found != expected:
                reason = f"segment {blob.number} has checksum {found:016x}, expected {expected:016x}"
        except OSError as error:
            if is_temporary(error):
                raise UnavailableError(f"put {put_id.hex()} cannot be looked at now ({error}); try again") from error
            reason = f"its segment cannot be read: {error}"
        if self._expected.pop(put_id, None) is not None and reason:
            self.mark_damaged(put_id, reason)
