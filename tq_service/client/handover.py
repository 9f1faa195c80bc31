"""Sharing memory with a storage service of the same host: found out by a handshake, never assumed."""

from __future__ import annotations

import math
import os
import select
import threading
import time
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from tq_service.errors import TqError, UnavailableError
from tq_service.v1.handover_pb2 import Collection, Deposit, Greeting, HandoverAnswer, HandoverRequest
from tq_service.v1.storage_service_pb2 import StatResponse
from tq_service.wire import handover, shared_memory
from tq_service.wire.columns import Column

SWITCH_VARIABLE: Final = "TQ_SHARED_MEMORY"
SHARED_FROM_BYTES: Final = 1 << 20
"""Smaller puts go over the wire: it is as fast, and takes no file descriptor in the service."""

_EXCHANGE_SECONDS: Final = 10.0
_ASK_AGAIN_SECONDS: Final = 60.0
_TRY_AGAIN_SECONDS: Final = 5.0


class Handover:
    """A session with a storage service of this host. May be used by several threads.

    Args:
        path: the service's Unix socket.
        boot_id: the instance of the service that announced it.

    Attributes:
        session_id: names the session in calls.

    Raises:
        UnavailableError: nobody answers there, or another service does.
    """

    def __init__(self, path: Path, boot_id: bytes) -> None:
        self._lock = threading.Lock()
        self._connection = handover.open_socket()
        weakref.finalize(self, self._connection.close).atexit = False  # clients need not be closed
        self._connection.settimeout(_EXCHANGE_SECONDS)
        try:
            self._connection.connect(str(path))
        except OSError as error:
            raise UnavailableError(f"the handover socket {path} cannot be used: {error}") from None
        answer, _ = self._exchange(HandoverRequest(greeting=Greeting(boot_id=boot_id)))
        self.session_id = answer.welcome.session_id

    @property
    def has_ended(self) -> bool:
        """Whether the service has closed the connection, such as by its end."""
        fd = self._connection.fileno()  # read once: another thread may close the connection after any line of this
        if fd < 0:
            return True
        poll = select.poll()
        poll.register(fd, 0)  # hang-up, and that the number is no open file, are reported without being asked for
        return bool(poll.poll(0))

    def deposit(self, put_id: bytes, columns: Sequence[Column]) -> None:
        """Write columns into memory and hand it over as that of a put.

        Raises:
            UnavailableError: there is no memory left, or the session has ended; the put can go over the wire.
        """
        try:
            fds = shared_memory.write_columns(columns)
        except OSError as error:
            raise UnavailableError(f"no shared memory for a put: {error}") from None
        try:
            self._exchange(HandoverRequest(deposit=Deposit(put_id=put_id)), fds)
        finally:
            shared_memory.close_all(fds)

    def collect(self, offer_id: bytes, count: int) -> list[int]:
        """Return the file descriptors that a get offers; they are the caller's to close.

        Raises:
            UnavailableError: they are no longer offered, or the session has ended.
        """
        fds: list[int] = []
        try:
            while len(fds) < count:
                request = HandoverRequest(collection=Collection(offer_id=offer_id, received_count=len(fds)))
                answer, received = self._exchange(request)
                fds += received
                if not received or len(received) != answer.collected.count:
                    raise UnavailableError(f"got {len(fds)} of {count} file descriptors of shared memory")
        except BaseException:
            shared_memory.close_all(fds)
            raise
        return fds

    def close(self) -> None:
        """End the session."""
        self._connection.close()

    def _exchange(self, request: HandoverRequest, fds: Sequence[int] = ()) -> tuple[HandoverAnswer, list[int]]:
        with self._lock:
            try:
                handover.send(self._connection, request, fds)
                received = handover.receive(self._connection, HandoverAnswer)
            except (OSError, TqError) as error:
                self.close()  # an answer that comes late would be taken for that of the next request
                raise UnavailableError(f"the session of shared memory has ended: {error}") from None
        if received is None:
            self.close()
            raise UnavailableError("the session of shared memory has ended: the service closed it")
        answer, answer_fds = received
        if answer.WhichOneof("answer") == "refusal":
            shared_memory.close_all(answer_fds)
            raise UnavailableError(f"shared memory was refused: {answer.refusal.reason}")
        return answer, answer_fds


class HostLink:
    """What a client knows about sharing memory with the storage service at one address.

    Nothing waits for the service with the lock that `is_due` takes: event loops call that.
    """

    def __init__(self) -> None:
        self._opening = threading.Lock()
        self._lock = threading.Lock()
        self._handover: Handover | None = None
        self._ask_at = time.monotonic() if _is_enabled() else float("inf")

    def is_due(self) -> bool:
        """Return whether the service should be asked for its socket now."""
        with self._lock:
            if self._handover is not None and self._handover.has_ended:
                self._handover.close()
                self._handover, self._ask_at = None, time.monotonic()
            return self._handover is None and time.monotonic() >= self._ask_at

    @contextmanager
    def session(self) -> Iterator[Handover | None]:
        """Give the session, None where there is none; it ends where what is done within the `with` is unavailable."""
        current = self._handover
        try:
            yield current
        except UnavailableError:
            if current is not None:
                self._drop(current)
            raise

    def postpone(self) -> None:
        """Take note that the service did not answer."""
        self._ask_again_in(_TRY_AGAIN_SECONDS)

    def open(self, stat: StatResponse) -> None:
        """Open a session where the service that answered is found on this host; without one, ask again later.

        Waits for the service, and for other threads that do so.
        """
        with self._opening:
            if not self.is_due():
                return
            self._ask_again_in(_ASK_AGAIN_SECONDS)
            path = _local_path(stat.handover_socket)
            if path is None or not path.exists():
                return
            try:
                opened = Handover(path, stat.storage.boot_id)
            except UnavailableError:
                self._ask_again_in(_TRY_AGAIN_SECONDS)
                return
            with self._lock:
                if math.isinf(self._ask_at):  # closed meanwhile
                    opened.close()
                else:
                    self._handover = opened

    def _ask_again_in(self, seconds: float) -> None:
        with self._lock:
            if not math.isinf(self._ask_at):
                self._ask_at = time.monotonic() + seconds

    def _drop(self, failed: Handover) -> None:
        """End a session; the next calls go over the wire."""
        failed.close()
        with self._lock:
            if self._handover is not failed:
                return
            self._handover = None
        self._ask_again_in(_TRY_AGAIN_SECONDS)

    def close(self) -> None:
        """End the session, and open no other."""
        with self._lock:
            self._ask_at = float("inf")
            if self._handover is not None:
                self._handover.close()
                self._handover = None


def _is_enabled() -> bool:
    return os.environ.get(SWITCH_VARIABLE, "").lower() != "off" and shared_memory.is_supported()


def _local_path(told: str) -> Path | None:
    """Return where a socket is on this side: a folder shared by containers may be mounted elsewhere."""
    if not told:
        return None
    folder = os.environ.get(handover.SOCKET_DIR_VARIABLE)
    return Path(folder) / Path(told).name if folder else Path(told)
