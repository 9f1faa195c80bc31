"""The client side of shared memory: a channel that exchanges file descriptors with a storage service on the same host.

A handshake verifies that the service is on this host. A put fills a memory region that the service offers. If the
service runs as another user, the put sends sealed memory instead. A get maps memory that the service offers.
"""

from __future__ import annotations

import math
import os
import select
import socket
import threading
import time
import weakref
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Final

from tq_service.dataplane.shared_memory import messages
from tq_service.dataplane.shared_memory.mapped import Lease, MappedRegions
from tq_service.errors import TqError, UnavailableError
from tq_service.internal.v1.shared_memory_pb2 import (
    Filled,
    Hello,
    Release,
    SendFd,
    SharedMemoryAnswer,
    SharedMemoryRequest,
    TakeMemory,
)
from tq_service.v1.storage_service_pb2 import RegionOffer, StatResponse
from tq_service.wire import shared_memory
from tq_service.wire.columns import SourceColumn, device_of
from tq_service.wire.host_memory import PINNED
from tq_service.wire.mapping import Mapping

SWITCH_VARIABLE: Final = "TQ_SHARED_MEMORY"
_EXCHANGE_SECONDS: Final = 10.0
_LEAST_SECONDS: Final = 0.001  # above 0, because a socket with a timeout of 0 does not wait
_ASK_AGAIN_SECONDS: Final = 60.0
_TRY_AGAIN_SECONDS: Final = 5.0


class FdChannel:
    """A connection and session with a storage service on this host. Thread-safe.

    Args:
        path: path of the service's Unix socket.
        boot_id: instance id of the service that announced the socket.
        seconds: maximum number of seconds to wait for the connection and for the response to the hello message.

    Attributes:
        session_id: id by which calls refer to the session.
        can_allocate: whether the client is allowed to fill a put's memory after receiving the response to the put.
        regions: regions that the session has mapped.

    Raises:
        UnavailableError: no service responds on the socket, or the service that responds is not the expected one.
    """

    def __init__(self, path: Path, boot_id: bytes, seconds: float = _EXCHANGE_SECONDS) -> None:
        give_up_at = time.monotonic() + seconds
        self._lock = threading.Lock()
        self._connection = messages.open_socket()
        weakref.finalize(self, self._connection.close).atexit = False  # because clients need not be closed
        self._releases = Releases(self._connection)
        weakref.finalize(self, self._releases.close).atexit = False
        self._connection.settimeout(seconds)
        try:
            self._connection.connect(str(path))
        except OSError as error:
            raise UnavailableError(f"could not connect to the shared memory socket {path}: {error}") from None
        self._connection.settimeout(max(give_up_at - time.monotonic(), _LEAST_SECONDS))
        answer, _ = self._exchange(SharedMemoryRequest(hello=Hello(boot_id=boot_id)))
        self._connection.settimeout(_EXCHANGE_SECONDS)
        self.session_id = answer.hello.session_id
        self.can_allocate = answer.hello.can_allocate
        self.regions = MappedRegions(answer.hello.run_id)

    @property
    def has_ended(self) -> bool:
        """Whether the service has closed the connection, for example because the service stopped."""
        fd = self._connection.fileno()  # read only once, because another thread may close the connection at any time
        if fd < 0:
            return True
        poll = select.poll()
        poll.register(fd, 0)  # hang-ups and invalid descriptors are always reported
        return bool(poll.poll(0))

    def send_sealed(self, put_id: bytes, columns: Sequence[SourceColumn]) -> None:
        """Write a put's columns into new memory, seal the memory, and send its file descriptor to the service.

        Raises:
            UnavailableError: the system is out of memory, or the session has ended. The bytes can be sent over the
                network instead.
        """
        try:
            fd = shared_memory.write_sealed(columns)
        except OSError as error:
            raise UnavailableError(f"could not allocate shared memory for a put: {error}") from None
        try:
            self._exchange(SharedMemoryRequest(send_fd=SendFd(put_id=put_id)), [fd])
        finally:
            os.close(fd)

    def fill(self, offer: RegionOffer, columns: Sequence[SourceColumn]) -> None:
        """Copy columns into the region offered for a put.

        The service is notified when the copy ends, even if it fails or the put is cancelled.

        Raises:
            UnavailableError: the region is no longer offered or cannot be mapped, or the session has ended.
        """
        mapping, device = self.regions.shared(offer.region), device_of(columns)
        fds = self.take(offer.offer_id, [0] if mapping is None else [])
        try:
            if mapping is None and device is None and self.regions.is_new(offer.region):
                shared_memory.write(fds[0], columns)
            else:
                mapping = mapping or self.regions.map_shared(offer.region, fds[0])
                pin = None if device is None else PINNED.pin(mapping, device)
                shared_memory.fill(mapping.array(0, mapping.size, pin), columns)
        except BaseException as error:
            self._releases.add(offer.offer_id)
            if isinstance(error, OSError):
                raise UnavailableError(f"could not use the region for a put: {error}") from None
            raise
        finally:
            shared_memory.close_all(fds)
        self._exchange(SharedMemoryRequest(filled=Filled(offer_id=offer.offer_id)))

    def allocate(self, offer: RegionOffer) -> tuple[Mapping, Lease]:
        """Map the region offered for a put. The client may fill the region as long as the returned lease exists.

        Raises:
            UnavailableError: the region is no longer offered or cannot be mapped, or the session has ended.
        """
        mapping = self.regions.shared(offer.region)
        fds = self.take(offer.offer_id, [0] if mapping is None else [])
        lease = self.begin_lease(offer.offer_id)
        try:
            return mapping or self.regions.map_shared(offer.region, fds[0]), lease
        except OSError as error:
            raise UnavailableError(f"could not map the region for a put: {error}") from None
        finally:
            shared_memory.close_all(fds)

    def begin_lease(self, offer_id: bytes) -> Lease:
        """Begin a lease for a call that is about to take the offered memory."""
        return Lease(partial(self._releases.add, offer_id))

    def take(self, offer_id: bytes, indexes: Sequence[int]) -> list[int]:
        """Take the memory offered for a put or get, and lease it until it is filled or released.

        Args:
            offer_id: id of the offer.
            indexes: indexes of the offered memory blocks whose file descriptors are to be returned.

        Returns:
            The requested file descriptors, in order. The caller must close these descriptors.
        """
        fds: list[int] = []
        try:
            while True:
                some = indexes[len(fds) : len(fds) + messages.MOST_FDS]
                is_last = len(fds) + len(some) == len(indexes)
                take = TakeMemory(offer_id=offer_id, indexes=some, is_last=is_last)
                answer, received = self._exchange(SharedMemoryRequest(take_memory=take))
                fds += received
                self.regions.drop(answer.take_memory.dropped_regions)
                if not len(received) == len(some) == answer.take_memory.fd_count:
                    raise UnavailableError(f"received {len(fds)} of {len(indexes)} shared-memory file descriptors")
                if is_last:
                    return fds
        except BaseException:
            shared_memory.close_all(fds)
            raise

    def close(self) -> None:
        """End the session. The service will not reuse regions that arrays in this process still use."""
        self._connection.close()
        self._releases.close()

    def _exchange(self, request: SharedMemoryRequest, fds: Sequence[int] = ()) -> tuple[SharedMemoryAnswer, list[int]]:
        with self._lock:
            try:
                messages.send(self._connection, request, fds)
                received = messages.receive(self._connection, SharedMemoryAnswer)
            except (OSError, TqError) as error:
                self.close()  # otherwise, a late response could be mistaken for the response to the next request
                raise UnavailableError(f"the shared memory session has ended: {error}") from None
        if received is None:
            self.close()
            raise UnavailableError("the service closed the shared memory session")
        answer, answer_fds = received
        if answer.WhichOneof("answer") == "refusal":
            shared_memory.close_all(answer_fds)
            raise UnavailableError(f"the service refused to share memory: {answer.refusal.reason}")
        return answer, answer_fds


class Releases:
    """A queue that reports ended leases to the service without blocking the thread in which a lease happens to end.

    Args:
        connection: socket of the session.
    """

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection.dup()
        self._connection.setblocking(False)
        self._waiting: deque[bytes] = deque()

    def add(self, offer_id: bytes) -> None:
        """Report an ended lease now. If the socket's buffer is full, report it together with a later lease."""
        self._waiting.append(offer_id)
        with suppress(IndexError, OSError):
            while True:
                offer_id = self._waiting.popleft()
                try:
                    messages.send(self._connection, SharedMemoryRequest(release=Release(offer_ids=[offer_id])))
                except BlockingIOError:
                    self._waiting.append(offer_id)
                    return

    def close(self) -> None:
        """Stop reporting. Leases that have not been reported end with the session."""
        self._connection.close()


class HostLink:
    """A link through which a client shares memory with a storage service on the same host.

    Args:
        is_enabled: whether to look for the service on this host. If None, the environment variable TQ_SHARED_MEMORY
            determines this.

    Because event loops call `is_due`, no thread holds the lock of `is_due` while waiting for the service.
    """

    def __init__(self, *, is_enabled: bool | None = None) -> None:
        self._opening = threading.Lock()
        self._lock = threading.Lock()
        self._channel: FdChannel | None = None
        self._ask_at = time.monotonic() if (_is_enabled() if is_enabled is None else is_enabled) else float("inf")

    def is_due(self) -> bool:
        """Return whether the client should now request the service's socket."""
        with self._lock:
            if self._channel is not None and self._channel.has_ended:
                self._channel.close()
                self._channel, self._ask_at = None, time.monotonic()
            return self._channel is None and time.monotonic() >= self._ask_at

    @contextmanager
    def session(self) -> Iterator[FdChannel | None]:
        """Yield the session, or None if there is none. If the block raises UnavailableError, the session is closed."""
        current = self._channel
        try:
            yield current
        except UnavailableError:
            if current is not None:  # later calls use the network
                current.close()
                with self._lock:
                    if self._channel is current:
                        self._channel = None
                self.postpone()
            raise

    def postpone(self) -> None:
        """Record that the service did not respond. The client will ask the service again after a few seconds."""
        self._ask_again_in(_TRY_AGAIN_SECONDS)

    def open(self, stat: StatResponse, seconds: float = _EXCHANGE_SECONDS) -> None:
        """Open a session if the service that sent `stat` is on this host. If none is opened, a later call retries.

        This method waits for other threads that are opening the session, and then for the service, up to `seconds`
        each. `seconds` is limited to the range from `_LEAST_SECONDS` to `_EXCHANGE_SECONDS`.
        """
        seconds = min(max(seconds, _LEAST_SECONDS), _EXCHANGE_SECONDS)
        if not self._opening.acquire(timeout=seconds):
            return
        try:
            if not self.is_due():
                return
            self._ask_again_in(_ASK_AGAIN_SECONDS)
            path = _local_path(stat.shared_memory_socket)
            if path is None or not os.path.exists(path):  # noqa: PTH110  (Path.exists raises if access is denied)
                return
            try:
                opened = FdChannel(path, stat.storage.boot_id, seconds)
            except UnavailableError:
                self._ask_again_in(_TRY_AGAIN_SECONDS)
                return
            with self._lock:
                if math.isinf(self._ask_at):  # the link was closed in the meantime
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
        """End the session and prevent new sessions."""
        with self._lock:
            self._ask_at = float("inf")
            if self._channel is not None:
                self._channel.close()
                self._channel = None


def _is_enabled() -> bool:
    return os.environ.get(SWITCH_VARIABLE, "").lower() != "off" and shared_memory.is_supported()


def _local_path(announced: str) -> Path | None:
    """Return a socket's path in this container, which may mount the shared directory at a different path."""
    if not announced:
        return None
    directory = os.environ.get(messages.SOCKET_DIR_VARIABLE)
    return Path(directory) / Path(announced).name if directory else Path(announced)
