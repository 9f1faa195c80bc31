"""The client's half: an fd channel to a storage service of the same host, opened by a handshake, never assumed.

A put writes its columns into memfds and sends their file descriptors; a get receives those of the columns that it is
offered.
"""

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

from tq_service.dataplane.shared_memory import messages
from tq_service.errors import TqError, UnavailableError
from tq_service.internal.v1.shared_memory_pb2 import Hello, ReceiveFds, SendFds, SharedMemoryAnswer, SharedMemoryRequest
from tq_service.v1.storage_service_pb2 import StatResponse
from tq_service.wire import shared_memory
from tq_service.wire.columns import SourceColumn

SWITCH_VARIABLE: Final = "TQ_SHARED_MEMORY"
_EXCHANGE_SECONDS: Final = 10.0
_LEAST_SECONDS: Final = 0.001  # a socket with a timeout of 0 does not wait at all
_ASK_AGAIN_SECONDS: Final = 60.0
_TRY_AGAIN_SECONDS: Final = 5.0


class FdChannel:
    """A connection to a storage service of this host, which is a session there. May be used by several threads.

    Args:
        path: the service's Unix socket.
        boot_id: the instance of the service that announced it.
        seconds: how long it may take to answer the hello.

    Attributes:
        session_id: names the session in calls.

    Raises:
        UnavailableError: no service answers there, or another one does.
    """

    def __init__(self, path: Path, boot_id: bytes, seconds: float = _EXCHANGE_SECONDS) -> None:
        give_up_at = time.monotonic() + seconds
        self._lock = threading.Lock()
        self._connection = messages.open_socket()
        weakref.finalize(self, self._connection.close).atexit = False  # clients need not be closed
        self._connection.settimeout(seconds)
        try:
            self._connection.connect(str(path))
        except OSError as error:
            raise UnavailableError(f"the socket {path} for shared memory cannot be used: {error}") from None
        self._connection.settimeout(max(give_up_at - time.monotonic(), _LEAST_SECONDS))
        answer, _ = self._exchange(SharedMemoryRequest(hello=Hello(boot_id=boot_id)))
        self._connection.settimeout(_EXCHANGE_SECONDS)
        self.session_id = answer.hello.session_id

    @property
    def has_ended(self) -> bool:
        """Whether the service has closed the connection, such as by its end."""
        fd = self._connection.fileno()  # read once: another thread may close the connection after any line of this
        if fd < 0:
            return True
        poll = select.poll()
        poll.register(fd, 0)  # hang-up, and that the number is no open file, are reported without being asked for
        return bool(poll.poll(0))

    def send_fds(self, put_id: bytes, columns: Sequence[SourceColumn]) -> None:
        """Write columns into memory and send its file descriptors as those of a put.

        Raises:
            UnavailableError: there is no memory left, or the session has ended; the put can go over the wire.
        """
        try:
            fds = shared_memory.write_columns(columns)
        except OSError as error:
            raise UnavailableError(f"no shared memory for a put: {error}") from None
        try:
            self._exchange(SharedMemoryRequest(send_fds=SendFds(put_id=put_id)), fds)
        finally:
            shared_memory.close_all(fds)

    def receive_fds(self, offer_id: bytes, count: int) -> list[int]:
        """Return the file descriptors that a get offers; they are the caller's to close.

        Raises:
            UnavailableError: they are no longer offered, or the session has ended.
        """
        fds: list[int] = []
        try:
            while len(fds) < count:
                request = SharedMemoryRequest(receive_fds=ReceiveFds(offer_id=offer_id, received_count=len(fds)))
                answer, received = self._exchange(request)
                fds += received
                if not received or len(received) != answer.receive_fds.fd_count:
                    raise UnavailableError(f"got {len(fds)} of {count} file descriptors of shared memory")
        except BaseException:
            shared_memory.close_all(fds)
            raise
        return fds

    def close(self) -> None:
        """End the session."""
        self._connection.close()

    def _exchange(self, request: SharedMemoryRequest, fds: Sequence[int] = ()) -> tuple[SharedMemoryAnswer, list[int]]:
        with self._lock:
            try:
                messages.send(self._connection, request, fds)
                received = messages.receive(self._connection, SharedMemoryAnswer)
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

    Args:
        is_enabled: whether it looks for the service on this host; None: as the environment says.

    Nothing waits for the service with the lock that `is_due` takes: event loops call that.
    """

    def __init__(self, *, is_enabled: bool | None = None) -> None:
        self._opening = threading.Lock()
        self._lock = threading.Lock()
        self._channel: FdChannel | None = None
        self._ask_at = time.monotonic() if (_is_enabled() if is_enabled is None else is_enabled) else float("inf")

    def is_due(self) -> bool:
        """Return whether the service should be asked for its socket now."""
        with self._lock:
            if self._channel is not None and self._channel.has_ended:
                self._channel.close()
                self._channel, self._ask_at = None, time.monotonic()
            return self._channel is None and time.monotonic() >= self._ask_at

    @contextmanager
    def session(self) -> Iterator[FdChannel | None]:
        """Give the session, None where there is none; it ends where what is done within the `with` is unavailable."""
        current = self._channel
        try:
            yield current
        except UnavailableError:
            if current is not None:  # the next calls go over the wire
                current.close()
                with self._lock:
                    if self._channel is current:
                        self._channel = None
                self.postpone()
            raise

    def postpone(self) -> None:
        """Take note that the service did not answer."""
        self._ask_again_in(_TRY_AGAIN_SECONDS)

    def open(self, stat: StatResponse, seconds: float = _EXCHANGE_SECONDS) -> None:
        """Open a session where the service that answered is found on this host; without one, ask again later.

        Waits for the service, and for other threads that do so, for so many seconds each at most.
        """
        seconds = min(max(seconds, _LEAST_SECONDS), _EXCHANGE_SECONDS)
        if not self._opening.acquire(timeout=seconds):
            return
        try:
            if not self.is_due():
                return
            self._ask_again_in(_ASK_AGAIN_SECONDS)
            path = _local_path(stat.shared_memory_socket)
            if path is None or not os.path.exists(path):  # noqa: PTH110  (Path.exists raises where this user may not look)
                return
            try:
                opened = FdChannel(path, stat.storage.boot_id, seconds)
            except UnavailableError:
                self._ask_again_in(_TRY_AGAIN_SECONDS)
                return
            with self._lock:
                if math.isinf(self._ask_at):  # closed meanwhile
                    opened.close()
                else:
                    self._channel = opened
        finally:
            self._opening.release()

    def _ask_again_in(self, seconds: float) -> None:
        with self._lock:
            if not math.isinf(self._ask_at):
                self._ask_at = time.monotonic() + seconds

    def close(self) -> None:
        """End the session, and open no other."""
        with self._lock:
            self._ask_at = float("inf")
            if self._channel is not None:
                self._channel.close()
                self._channel = None


def _is_enabled() -> bool:
    return os.environ.get(SWITCH_VARIABLE, "").lower() != "off" and shared_memory.is_supported()


def _local_path(announced: str) -> Path | None:
    """Return where a socket is on this side: a directory shared by containers may be mounted elsewhere."""
    if not announced:
        return None
    directory = os.environ.get(messages.SOCKET_DIR_VARIABLE)
    return Path(directory) / Path(announced).name if directory else Path(announced)
