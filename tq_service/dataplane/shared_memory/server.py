"""The server side of shared memory: a Unix socket for clients on the same host, and the sessions of these clients.

A session transfers file descriptors only during a Put or Get call that names the session, or for a few seconds after a
GetInline call. The call determines which memory the session may read and write. Memory that a client takes is leased to
the session until the client releases the memory or the connection ends:

    Put or Get: offer -> TakeMemory: lease, the call continues without it -> Filled or Release: released
                                                                          -> end of the connection: not released
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
import resource
import socket
import stat
import struct
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Final, Protocol

from tq_service.dataplane.shared_memory import messages
from tq_service.errors import InvalidArgumentError, TqError, UnavailableError
from tq_service.internal.v1.shared_memory_pb2 import (
    FilledAnswer,
    HelloAnswer,
    Refusal,
    SendFdAnswer,
    SharedMemoryAnswer,
    SharedMemoryRequest,
    TakeMemoryAnswer,
)
from tq_service.log_message import LogMessage
from tq_service.wire.shared_memory import close_all

_log = logging.getLogger(__name__)
_SUFFIX: Final = ".sock"
_MOST_SESSIONS: Final = 1024
_BACKLOG: Final = 128
_MOST_ACCEPTED_AT_ONCE: Final = 32
_PAUSE_SECONDS: Final = 1.0
_DRAIN_SECONDS: Final = 1.0
_MOST_MEMORIES: Final = 16_384  # out of the 65,530 mappings per process that Linux allows by default
_OFFER_SECONDS: Final = 10.0  # duration of offers that outlast their call
_MOST_DROPPED: Final = 256  # maximum number of region numbers per message
_CREDENTIALS: Final = struct.Struct("3i")  # pid, uid, gid


class Memory(Protocol):
    """A block of memory that can be offered to clients.

    Attributes:
        fd: file descriptor of the memory.
        number: number of the region, or 0 if the memory is sealed.
    """

    fd: int
    number: int

    def lease(self, session: Session) -> None:
        """Begin a lease. Until it ends, the bytes must not change. If memory is freed, call `session.note_dropped`."""

    def end_lease(self, *, is_released: bool) -> None:
        """End a lease. `is_released` is True if the client has reported that it no longer uses the memory."""


class SharedMemoryServer:
    """A server that listens on a socket in a directory and manages client sessions in a single event loop.

    Args:
        directory: directory of the socket. Users with access to this directory may use shared memory.
        boot_id: instance id of the storage service, which clients must send.
        run_id: id of the service process. Region numbers are unique within the process.
        can_allocate: whether a client may fill a put's region after receiving the response to the put.

    Attributes:
        most_memories: maximum number of memory blocks that the service should keep open. Each block uses a file
            descriptor and a mapping, both of which are limited per process.
        path: path of the socket.
    """

    def __init__(self, directory: Path, boot_id: bytes, run_id: bytes, *, can_allocate: bool = True) -> None:
        self._can_allocate = can_allocate
        files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        self.most_memories = _MOST_MEMORIES if files == resource.RLIM_INFINITY else min(files // 2, _MOST_MEMORIES)
        self._has_warned = False
        self.path = directory / f"{boot_id[:8].hex()}{_SUFFIX}"  # short, because the length of socket paths is limited
        self._boot_id = boot_id
        self._run_id = run_id
        self._listener: socket.socket | None = None
        self._sessions: dict[bytes, Session] = {}  # in order of arrival
        self._drained: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Start listening on the socket.

        Raises:
            OSError: the socket's directory cannot be used.
        """
        directory = self.path.parent
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        _sweep(directory)
        listener = messages.open_socket()
        unready = self.path.with_suffix(".new")
        unready.unlink(missing_ok=True)  # may have been left behind by a killed instance with the same boot_id
        try:
            listener.bind(str(unready))
            unready.chmod(0o666)  # the permissions of the directory determine which users may connect
            listener.listen(_BACKLOG)
            listener.setblocking(False)
            unready.rename(self.path)  # only after listen(), because a socket without a listener looks stale
        except OSError:
            listener.close()
            unready.unlink(missing_ok=True)
            raise
        self._listener = listener
        asyncio.get_running_loop().add_reader(listener, self._accept)

    def takes_memory(self, memory_count: int) -> bool:
        """Return whether the service may open another memory block, given the number of open blocks.

        The first refusal is logged.
        """
        if memory_count < self.most_memories:
            return True
        if not self._has_warned:
            self._has_warned = True
            soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
            _log.warning(
                LogMessage(
                    "the service reached its limit on file descriptors for shared memory, so further puts use the "
                    "network; raise the limit on open files (ulimit -n), or put more samples per call",
                    memories=memory_count,
                    most_memories=self.most_memories,
                    file_limit=soft,
                    hard_file_limit=hard,
                )
            )
        return False

    def session(self, session_id: bytes) -> Session | None:
        """Record that an authorized call has sent this session id, and return the session, or None if none is open."""
        session = self._sessions.get(session_id)
        if session is not None:
            session.is_proven = True
        return session

    def drain(self) -> None:
        """After a delay, end all offers not yet taken, so that gets no longer wait for clients to take them."""

        def end_offers() -> None:
            for session in self._sessions.values():
                session.end_offers()

        self._drained = asyncio.get_running_loop().call_later(_DRAIN_SECONDS, end_offers)

    def close(self) -> None:
        """End all sessions and remove the socket."""
        if self._drained is not None:
            self._drained.cancel()
        if self._listener is not None:
            asyncio.get_running_loop().remove_reader(self._listener)
            self._listener.close()
            self._listener = None
            self.path.unlink(missing_ok=True)
        for session in list(self._sessions.values()):
            session.close()

    def _accept(self) -> None:
        for _ in range(_MOST_ACCEPTED_AT_ONCE):
            if self._listener is None:
                return
            try:
                connection, _ = self._listener.accept()
            except BlockingIOError:
                return
            except OSError as error:
                _log.warning(LogMessage("could not accept a connection from a client on this host", error=error))
                if error.errno in {errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM}:
                    self._pause()
                    return
                continue
            if len(self._sessions) >= _MOST_SESSIONS:
                # End the oldest session that no call has used. Otherwise, processes that never make calls could lock
                # out other clients.
                unproven = next((session for session in self._sessions.values() if not session.is_proven), None)
                if unproven is None:
                    connection.close()
                    continue
                unproven.close()
            connection.setblocking(False)
            is_own_user = peer_uid(connection) == os.geteuid()
            session = Session(
                connection,
                self._boot_id,
                self._run_id,
                is_own_user=is_own_user,
                can_allocate=is_own_user and self._can_allocate,
                on_close=lambda closed: self._sessions.pop(closed.session_id),
            )
            self._sessions[session.session_id] = session

    def _pause(self) -> None:
        """Pause accepting connections, so that a pending connection does not wake the event loop continuously."""
        loop = asyncio.get_running_loop()
        if self._listener is not None:
            loop.remove_reader(self._listener)
            loop.call_later(_PAUSE_SECONDS, self._resume)

    def _resume(self) -> None:
        if self._listener is not None:
            asyncio.get_running_loop().add_reader(self._listener, self._accept)


def peer_uid(connection: socket.socket) -> int:
    """Return the user id of the connected process, as seen in the user namespace of this process."""
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    uid: int = _CREDENTIALS.unpack(credentials)[1]
    return uid


def make_private(directory: Path) -> None:
    """Create a directory that only the current user can access, even if all users can write to its parent.

    Raises:
        OSError: the directory cannot be created, or other users can write to the directory and could replace the
            socket.
    """
    directory.mkdir(mode=0o700, exist_ok=True)
    status = directory.stat(follow_symlinks=False)
    others_may_write = bool(status.st_mode & (stat.S_IWGRP | stat.S_IWOTH))
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid() or others_may_write:
        raise PermissionError(
            f"{directory} is not a directory that only the current user can write to (owner {status.st_uid}, mode "
            f"{status.st_mode & 0o7777:o})"
        )


def _sweep(directory: Path) -> None:
    """Remove sockets that have no listener because their server was killed."""
    for path in directory.glob(f"*{_SUFFIX}"):
        with messages.open_socket() as probe:
            probe.setblocking(False)
            try:
                probe.connect(str(path))
            except ConnectionRefusedError:
                path.unlink(missing_ok=True)
            except OSError as error:
                _log.debug(LogMessage("could not remove stale socket", path=path, error=error))


class Session:
    """A client's connection.

    The client sends a hello message, followed by requests. The client sends each request only after receiving the
    response to the previous request.

    Args:
        connection: non-blocking socket of the client.
        boot_id: instance id of the service, which the client must send.
        run_id: id of the service process, which is sent to the client.
        is_own_user: whether the client runs as the same user as the service.
        can_allocate: whether the client may fill a put's region after receiving the response to the put.
        on_close: function called once when the session has ended.

    Attributes:
        session_id: random id, which is disclosed only to the client.
        is_proven: whether an authorized call has sent the session's id.
        can_allocate: whether the client may fill a put's region after receiving the response to the put.
        is_own_user: whether the client runs as the same user as the service. Regions must not be offered to other
            users, because clients can write to them.
    """

    def __init__(
        self,
        connection: socket.socket,
        boot_id: bytes,
        run_id: bytes,
        *,
        is_own_user: bool,
        can_allocate: bool,
        on_close: Callable[[Session], object],
    ) -> None:
        self.session_id = os.urandom(16)
        self.is_own_user = is_own_user
        self.can_allocate = can_allocate
        self._connection = connection
        self._boot_id = boot_id
        self._run_id = run_id
        self._on_close = on_close
        self.is_proven = False
        self._is_open = True
        self._has_said_hello = False
        self._awaited: dict[bytes, list[int]] = {}  # received file descriptor by put; empty until it arrives
        self._offers: dict[bytes, Offer] = {}
        self._leases: dict[bytes, Offer] = {}  # offers that the client has taken
        self._dropped: deque[int] = deque()  # regions that the client has yet to unmap
        asyncio.get_running_loop().add_reader(connection, self._read)

    @contextlib.contextmanager
    def awaiting(self, put_id: bytes) -> Iterator[Callable[[], int]]:
        """Accept a put's file descriptor for the duration of the `with` block.

        Yields a function that returns the descriptor, which the caller must close. The function raises UnavailableError
        if the descriptor has not arrived, for example because the session ended. If the function is not called, the
        descriptor is closed at the end of the block.
        """

        def take() -> int:
            if not fds:
                raise UnavailableError("the client did not send the put's shared memory; the put is retried over gRPC")
            return fds.pop()

        fds = self._awaited[put_id] = list[int]()
        try:
            yield take
        finally:
            if self._awaited.get(put_id) is fds:
                del self._awaited[put_id]
            close_all(fds)

    def offer_for_a_while(self, memories: Sequence[Memory], on_end: Callable[[], None]) -> Offer:
        """Offer memory until the client takes it or a few seconds have passed.

        Args:
            memories: memory blocks to offer. The bytes in the blocks must not change until the offer ends.
            on_end: function to call when the offer ends.
        """
        offer = self.offer(memories)
        timer = asyncio.get_running_loop().call_later(_OFFER_SECONDS, offer.close)
        offer.on_end(timer.cancel)
        offer.on_end(on_end)
        return offer

    def offer(self, memories: Sequence[Memory]) -> Offer:
        """Offer memory to the client. The bytes must not change until the memory is taken or the offer is closed."""
        offer = Offer(memories)
        self._offers[offer.offer_id] = offer
        offer.on_end(lambda: self._offers.pop(offer.offer_id, None))
        if not self._is_open:
            offer.close()
        return offer

    def close(self) -> None:
        """End the session. Repeated calls have no effect."""
        if not self._is_open:
            return
        self._is_open = False
        asyncio.get_running_loop().remove_reader(self._connection)
        self._connection.close()
        self.end_offers()
        for offer_id in list(self._leases):
            self._end_lease(offer_id, is_released=False)
        self._on_close(self)

    def note_dropped(self, region: int) -> None:
        """Record that the client must unmap a region the next time it takes memory."""
        self._dropped.append(region)

    def end_offers(self) -> None:
        """Withdraw all offers that the client has not taken."""
        for offer in list(self._offers.values()):
            offer.close()

    def _read(self) -> None:
        reason: object = "the client does not read its answers"
        received = None
        try:
            received = messages.receive(self._connection, SharedMemoryRequest)
            if received is None:
                self.close()
                return
            request, fds = received
            if request.HasField("release") and self._has_said_hello and not fds:
                for offer_id in request.release.offer_ids:
                    self._end_lease(offer_id, is_released=True)
                return
            answer, answer_fds = self._answer(request, fds)
            messages.send(self._connection, answer, answer_fds)
            if request.take_memory.is_last and answer.HasField("take_memory"):
                self._begin_lease(self._offers[request.take_memory.offer_id])
            return
        except BlockingIOError:
            if received is None:
                return  # woken up without a message
            # The socket is full of unread responses. Without this response, the client would misinterpret the next
            # response.
        except (OSError, TqError) as error:
            reason = error
        _log.info(LogMessage("a shared memory session ended", reason=reason))
        self.close()

    def _answer(self, request: SharedMemoryRequest, fds: list[int]) -> tuple[SharedMemoryAnswer, Sequence[int]]:
        kind = request.WhichOneof("request")
        if kind == "send_fd" and self._has_said_hello:
            awaited = self._awaited.get(request.send_fd.put_id)
            if awaited is not None and len(fds) == 1 and not awaited:
                awaited += fds
                return SharedMemoryAnswer(send_fd=SendFdAnswer()), ()
            close_all(fds)
            return _refuse(f"no put waits for the {len(fds)} descriptors received; expected one, for a put in progress")
        close_all(fds)
        if kind == "hello":
            if request.hello.boot_id != self._boot_id:
                return _refuse("another storage service listens on this socket")
            self._has_said_hello = True
            hello = HelloAnswer(session_id=self.session_id, can_allocate=self.can_allocate, run_id=self._run_id)
            return SharedMemoryAnswer(hello=hello), ()
        if kind == "take_memory" and self._has_said_hello:
            offer = self._offers.get(request.take_memory.offer_id)
            if offer is None:
                return _refuse("no put or get in this session offers this memory; the call may have ended")
            indexes = request.take_memory.indexes
            highest = max(indexes, default=-1)
            if len(indexes) > messages.MOST_FDS or highest >= len(offer.memories):
                raise InvalidArgumentError(
                    f"got a request for {len(indexes)} file descriptors, numbered up to {highest}; expected "
                    f"at most {messages.MOST_FDS} file descriptors, with numbers below {len(offer.memories)}"
                )
            offered = [offer.memories[index] for index in indexes]
            dropped = [self._dropped.popleft() for _ in range(min(len(self._dropped), _MOST_DROPPED))]
            answer = TakeMemoryAnswer(fd_count=len(offered), dropped_regions=dropped)
            return SharedMemoryAnswer(take_memory=answer), [memory.fd for memory in offered]
        if kind == "filled" and self._has_said_hello:
            offer = self._leases.get(request.filled.offer_id)
            if offer is None:
                return _refuse("the region reported as filled was not taken by this session")
            offer.is_filled = True
            self._end_lease(offer.offer_id, is_released=True)
            return SharedMemoryAnswer(filled=FilledAnswer()), ()
        raise InvalidArgumentError(f"got {kind or 'an unknown request'}; expected a hello message as the first request")

    def _begin_lease(self, offer: Offer) -> None:
        """Lease the memory of a taken offer. From then on, the lease rather than the call protects the bytes."""
        for memory in offer.memories:
            memory.lease(self)
        self._leases[offer.offer_id] = offer
        offer.close()

    def _end_lease(self, offer_id: bytes, *, is_released: bool) -> None:
        offer = self._leases.pop(offer_id, None)
        for memory in () if offer is None else offer.memories:
            memory.end_lease(is_released=is_released)


class Offer:
    """Memory blocks that are offered to a client.

    Attributes:
        offer_id: id of the offer, and of the lease that begins when the client takes the offer.
        memories: the offered memory blocks.
        is_filled: whether the client has reported that it filled the memory.
    """

    def __init__(self, memories: Sequence[Memory]) -> None:
        self.offer_id = os.urandom(16)
        self.memories = memories
        self.is_filled = False
        self._ended = asyncio.Event()
        self._on_end = contextlib.ExitStack()

    def on_end(self, call: Callable[[], object]) -> None:
        """Call a function when the offer ends, or immediately if the offer has already ended."""
        if self._ended.is_set():
            call()
        else:
            self._on_end.callback(call)

    def close(self) -> None:
        """End the offer once the client has taken it or can no longer take it. Repeated calls have no effect."""
        self._ended.set()
        self._on_end.close()

    async def wait(self) -> None:
        """Wait until the offer has ended."""
        await self._ended.wait()


def _refuse(reason: str) -> tuple[SharedMemoryAnswer, Sequence[int]]:
    return SharedMemoryAnswer(refusal=Refusal(reason=reason)), ()
