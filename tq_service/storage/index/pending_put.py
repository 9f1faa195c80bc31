"""A put that is being received."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import Enum, auto

from xxhash import xxh3_64

from tq_service.errors import CallCancelledError, InvalidArgumentError
from tq_service.storage.index.stored_put import StoredPut
from tq_service.wire.shared_memory import close_all


class _Stage(Enum):
    WAITING = auto()
    OPEN = auto()
    DONE = auto()
    ABORTED = auto()


class PendingPut:
    """Takes the bytes of a put: `write` as they come, or `adopt` of all at once; then `finish`, or `abort`.

    Waiting for capacity → open → done, or aborted from any but done. Whoever reserved it aborts it unless it finished;
    an older stream of the same put is aborted by the newer one and learns it from its next call.

    Args:
        put_id: the put.
        on_finish: called with the put when all bytes are there.
        on_abort: called once with what is stored so far, None where it has no memory yet.

    Attributes:
        already_complete: whether the put was there before.
        checksum: of all its bytes, once they are in a segment.
    """

    __slots__ = (
        "_digest",
        "_filled",
        "_is_checked",
        "_on_abort",
        "_on_finish",
        "_size",
        "_stage",
        "_stored",
        "_view",
        "already_complete",
        "checksum",
        "put_id",
    )

    def __init__(
        self,
        put_id: bytes,
        *,
        on_finish: Callable[[PendingPut, StoredPut], None],
        on_abort: Callable[[PendingPut, StoredPut | None], None],
    ) -> None:
        self.put_id = put_id
        self.already_complete = False
        self._on_finish = on_finish
        self._on_abort = on_abort
        self._stage = _Stage.WAITING
        self._stored: StoredPut | None = None
        self._view = memoryview(b"")
        self._filled = self._size = 0
        self._is_checked = False
        self._digest: xxh3_64 | None = None
        self.checksum: int | None = None

    @classmethod
    def completed(cls, put_id: bytes) -> PendingPut:
        """Return a put that is there already: it takes no bytes, and finishing or aborting it changes nothing."""
        pending = cls(put_id, on_finish=lambda *_: None, on_abort=lambda *_: None)
        pending.already_complete = True
        pending._stage = _Stage.DONE
        return pending

    @property
    def is_aborted(self) -> bool:
        """Whether it was aborted, by its owner or by a retry."""
        return self._stage is _Stage.ABORTED

    def begin(self, stored: StoredPut, *, with_checksum: bool = False) -> None:
        """Give it the blob that it writes to.

        Args:
            stored: its tables written, its values to come.
            with_checksum: whether the checksum of the blob is wanted in the end.
        """
        self._stored = stored
        self._size = stored.values.size
        self._filled = stored.values_at
        self._stage = _Stage.OPEN
        if stored.values.store.local_view:
            self._view = stored.values.view()
        if with_checksum:
            self._digest = xxh3_64(self._view[: self._filled])

    async def write(self, data: memoryview | bytes) -> None:
        """Append bytes of the values; ignored where the put is complete already.

        Raises:
            InvalidArgumentError: there are more bytes than were declared.
            CallCancelledError: a retry took over.
        """
        if self.already_complete:
            return
        stored = self._open()
        if self.is_shared:
            raise InvalidArgumentError("frames came for a put whose bytes are in shared memory", field="frame")
        start, end = self._filled, self._filled + len(data)
        if end > self._size:
            raise InvalidArgumentError(
                f"the stream has at least {end - self._size} bytes more than its header declared", field="frame"
            )
        if stored.values.store.local_view:
            self._view[start:end] = data
        else:
            await self._write_elsewhere(stored, start, data)
        if self._digest is not None:
            self._digest.update(data)
        self._filled = end

    async def _write_elsewhere(self, stored: StoredPut, start: int, data: memoryview | bytes) -> None:
        """Write bytes that cannot be looked at again; the blob stays if the put is aborted meanwhile."""
        stored.check_objects(data, start)
        stored.values.pin()
        try:
            await stored.values.store.write(stored.values, start, data)
        finally:
            stored.values.unpin()
        self.check_open()

    @property
    def is_shared(self) -> bool:
        """Whether its bytes are to come as shared memory."""
        return self._stored is not None and self._stored.values.store.adopts

    def adopt(self, fds: Sequence[int]) -> None:
        """Take all bytes at once, as file descriptors of shared memory, which are closed when they are not needed.

        Raises:
            InvalidArgumentError: they are not sealed memory of the size declared, or the put is not to be shared.
            CallCancelledError: a retry took over.
            OSError: the system refuses to map them.
        """
        if self._stored is None or not self.is_shared:
            close_all(fds)
            self.check_open()
            raise InvalidArgumentError(
                "shared memory came for a put whose bytes are to come in frames", field="send_fds"
            )
        self._stored.values.adopt(fds)
        self._filled = self._size

    def whole(self) -> StoredPut | None:
        """Return what is stored, None where the put was there already.

        Raises:
            InvalidArgumentError: bytes are missing, or rows of objects are none.
            CallCancelledError: a retry took over.
        """
        if self._stage is _Stage.DONE:
            return None
        stored = self._open()
        if self._filled < self._size:
            raise InvalidArgumentError(
                f"the stream ended {self._size - self._filled} bytes before what its header declared", field="frame"
            )
        if not self._is_checked:
            stored.check_object_sizes()
            stored.check_objects(self._view, 0)
            self._is_checked = True
        if self._digest is not None:
            self.checksum = self._digest.intdigest()
        return stored

    def finish(self) -> None:
        """Make the put complete; where it is to outlive this process, `StorageEngine.flush` comes before.

        Raises:
            InvalidArgumentError: bytes are missing.
            CallCancelledError: a retry took over.
        """
        stored = self.whole()
        if stored is None:
            return
        self._stored, self._view = None, memoryview(b"")
        self._stage = _Stage.DONE
        self._on_finish(self, stored)

    def abort(self) -> None:
        """Give everything back unless it is done; a second call does nothing."""
        if self._stage in {_Stage.DONE, _Stage.ABORTED}:
            return
        stored, self._stored, self._view = self._stored, None, memoryview(b"")
        self._stage = _Stage.ABORTED
        self._on_abort(self, stored)

    def check_open(self) -> None:
        """Raise CallCancelledError where it was aborted."""
        self._open()

    def _open(self) -> StoredPut:
        if self._stage is not _Stage.OPEN or self._stored is None:
            raise CallCancelledError(
                f"put {self.put_id.hex()} is no longer received here: another attempt at the same put took over"
            )
        return self._stored
