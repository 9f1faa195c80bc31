"""The service's half: a Unix socket for clients of its host, and their sessions.

A session takes file descriptors for puts, and sends those that gets offer, only while a Put or Get call with its
session_id is under way, or for some seconds after a GetInline: what may be read and written is decided there, and what
a client leaves behind goes with its call or its connection.
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
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Final

from tq_service.dataplane.shared_memory import messages
from tq_service.errors import InvalidArgumentError, TqError, UnavailableError
from tq_service.internal.v1.shared_memory_pb2 import (
    HelloAnswer,
    ReceiveFdsAnswer,
    Refusal,
    SendFdsAnswer,
    SharedMemoryAnswer,
    SharedMemoryRequest,
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
_MOST_MEMORIES: Final = 16_384  # of the 65,530 mappings that Linux gives a process by default
_LEASE_SECONDS: Final = 10.0


class SharedMemoryServer:
    """Listens in a directory and holds the sessions. Confined to one event loop.

    Args:
        directory: where the socket is; users that may enter it may share memory.
        boot_id: the instance of the storage service, which clients name.

    Attributes:
        most_memories: how many memories the service should hold: each takes a file descriptor and two mappings, of
            which the system gives a process only so many.
        path: the socket.
    """

    def __init__(self, directory: Path, boot_id: bytes) -> None:
        files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        self.most_memories = _MOST_MEMORIES if files == resource.RLIM_INFINITY else min(files // 2, _MOST_MEMORIES)
        self._has_warned = False
        self.path = directory / f"{boot_id[:8].hex()}{_SUFFIX}"  # paths of sockets are short
        self._boot_id = boot_id
        self._listener: socket.socket | None = None
        self._sessions: dict[bytes, Session] = {}  # in the order in which they came
        self._drained: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Listen.

        Raises:
            OSError: the directory cannot be used.
        """
        directory = self.path.parent
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        _sweep(directory)
        listener = messages.open_socket()
        unready = self.path.with_suffix(".new")
        unready.unlink(missing_ok=True)  # of an instance that was killed here: its boot_id may be this one
        try:
            listener.bind(str(unready))
            unready.chmod(0o666)  # the directory decides which users may connect
            listener.listen(_BACKLOG)
            listener.setblocking(False)
            unready.rename(self.path)  # a socket that does not listen yet would look like one left behind
        except OSError:
            listener.close()
            unready.unlink(missing_ok=True)
            raise
        self._listener = listener
        asyncio.get_running_loop().add_reader(listener, self._accept)

    def takes_memory(self, memory_count: int) -> bool:
        """Whether the service should hold another memory besides so many; the first time that not, it is logged."""
        if memory_count < self.most_memories:
            return True
        if not self._has_warned:
            self._has_warned = True
            soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
            _log.warning(
                LogMessage(
                    "the service holds as much shared memory as its file descriptors allow: other puts go over the "
                    "network; raise the limit of open files (ulimit -n), or put more samples at once",
                    memories=memory_count,
                    most_memories=self.most_memories,
                    file_limit=soft,
                    hard_file_limit=hard,
                )
            )
        return False

    def session(self, session_id: bytes) -> Session | None:
        """Return the open session of this name, for an authorized call that names it."""
        session = self._sessions.get(session_id)
        if session is not None:
            session.is_proven = True
        return session

    def drain(self) -> None:
        """End soon the offers without a client: a get lasts until its offer is received, and would hold up the end."""

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
                _log.warning(LogMessage("a client of this host could not be accepted", error=error))
                if error.errno in {errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM}:
                    self._pause()
                    return
                continue
            if len(self._sessions) >= _MOST_SESSIONS:
                # The oldest that no call has named yet ends: a process that cannot make calls cannot exclude others.
                unproven = next((session for session in self._sessions.values() if not session.is_proven), None)
                if unproven is None:
                    connection.close()
                    continue
                unproven.close()
            connection.setblocking(False)
            session = Session(connection, self._boot_id, on_close=lambda closed: self._sessions.pop(closed.session_id))
            self._sessions[session.session_id] = session

    def _pause(self) -> None:
        """Stop accepting for a moment; the connection that could not be accepted would wake the loop all the time."""
        loop = asyncio.get_running_loop()
        if self._listener is not None:
            loop.remove_reader(self._listener)
            loop.call_later(_PAUSE_SECONDS, self._resume)

    def _resume(self) -> None:
        if self._listener is not None:
            asyncio.get_running_loop().add_reader(self._listener, self._accept)


def make_private(directory: Path) -> None:
    """Make a directory for this user alone, in a place where all users may make directories.

    Raises:
        OSError: it cannot be made, or another user has made it and could put another socket there.
    """
    directory.mkdir(mode=0o700, exist_ok=True)
    status = directory.stat(follow_symlinks=False)
    others_may_write = bool(status.st_mode & (stat.S_IWGRP | stat.S_IWOTH))
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid() or others_may_write:
        raise PermissionError(
            f"{directory} is not a directory of this user alone (owner {status.st_uid}, "
            f"mode {status.st_mode & 0o7777:o})"
        )


def _sweep(directory: Path) -> None:
    """Remove sockets without a listener: their servers were killed."""
    for path in directory.glob(f"*{_SUFFIX}"):
        with messages.open_socket() as probe:
            probe.setblocking(False)
            try:
                probe.connect(str(path))
            except ConnectionRefusedError:
                path.unlink(missing_ok=True)
            except OSError as error:
                _log.debug(LogMessage("a stale socket is not removed", path=path, error=error))


class Session:
    """One connection of a client: a hello, then requests and answers in turn.

    Args:
        connection: does not block.
        boot_id: what the client must name.
        on_close: called once, when the connection is gone.

    Attributes:
        session_id: names it; random, and known to its client alone.
        is_proven: whether an authorized call has named it.
    """

    def __init__(
        self,
        connection: socket.socket,
        boot_id: bytes,
        *,
        on_close: Callable[[Session], object],
    ) -> None:
        self.session_id = os.urandom(16)
        self._connection = connection
        self._boot_id = boot_id
        self._on_close = on_close
        self.is_proven = False
        self._is_open = True
        self._has_said_hello = False
        self._awaited: dict[bytes, list[int]] = {}  # the file descriptors that have come for a put, none so far
        self._offers: dict[bytes, Offer] = {}
        asyncio.get_running_loop().add_reader(connection, self._read)

    @contextlib.contextmanager
    def awaiting(self, put_id: bytes) -> Iterator[Callable[[], list[int]]]:
        """Wait for the file descriptors of a put within the `with`.

        It gives what returns them, which are the caller's then, or raises UnavailableError where they have not come or
        the session has ended. Those that are not taken are closed at the end.
        """

        def take() -> list[int]:
            if not fds:
                raise UnavailableError("the shared memory of the put was not sent; it is tried again over gRPC")
            taken = list(fds)
            fds.clear()
            return taken

        fds = self._awaited[put_id] = list[int]()
        try:
            yield take
        finally:
            if self._awaited.get(put_id) is fds:
                del self._awaited[put_id]
            close_all(fds)

    def lease(self, fds: Sequence[int], on_end: Callable[[], None]) -> Offer:
        """Offer file descriptors until all were received, at most for some seconds.

        Args:
            fds: they must stay open until then.
            on_end: called when no client needs them any more.
        """
        offer = self.offer(fds)
        timer = asyncio.get_running_loop().call_later(_LEASE_SECONDS, offer.close)
        offer.on_end(timer.cancel)
        offer.on_end(on_end)
        return offer

    def offer(self, fds: Sequence[int]) -> Offer:
        """Offer file descriptors until the result is closed, before which they must stay open."""
        offer = Offer(fds)
        self._offers[offer.offer_id] = offer
        offer.on_end(lambda: self._offers.pop(offer.offer_id, None))
        if not self._is_open:
            offer.close()
        return offer

    def close(self) -> None:
        """End the session; a second call does nothing."""
        if not self._is_open:
            return
        self._is_open = False
        asyncio.get_running_loop().remove_reader(self._connection)
        self._connection.close()
        self.end_offers()
        self._on_close(self)

    def end_offers(self) -> None:
        """End what has been offered and not received."""
        for offer in list(self._offers.values()):
            offer.close()

    def _read(self) -> None:
        reason: object = "its client does not read the answers"
        received = None
        try:
            received = messages.receive(self._connection, SharedMemoryRequest)
            if received is None:
                self.close()
                return
            request, fds = received
            answer, answer_fds = self._answer(request, fds)
            messages.send(self._connection, answer, answer_fds)
            offer = self._offers.get(request.receive_fds.offer_id)
            if offer is not None and request.receive_fds.received_count + len(answer_fds) == len(offer.fds):
                offer.close()  # all was sent
            return
        except BlockingIOError:
            if received is None:
                return  # a wake-up without a message
            # The socket is full of answers. A later answer would be taken for the one that cannot be sent.
        except (OSError, TqError) as error:
            reason = error
        _log.info(LogMessage("a shared memory session ends", reason=reason))
        self.close()

    def _answer(self, request: SharedMemoryRequest, fds: list[int]) -> tuple[SharedMemoryAnswer, Sequence[int]]:
        kind = request.WhichOneof("request")
        if kind == "send_fds" and self._has_said_hello:
            awaited = self._awaited.get(request.send_fds.put_id)
            if awaited is not None and fds and not awaited:
                awaited += fds
                return SharedMemoryAnswer(send_fds=SendFdsAnswer()), ()
            close_all(fds)
            return _refuse(f"no put waits for {len(fds)} file descriptors; expected those of a put in progress, once")
        close_all(fds)
        if kind == "hello":
            if request.hello.boot_id != self._boot_id:
                return _refuse("another storage service listens here")
            self._has_said_hello = True
            return SharedMemoryAnswer(hello=HelloAnswer(session_id=self.session_id)), ()
        if kind == "receive_fds" and self._has_said_hello:
            offer = self._offers.get(request.receive_fds.offer_id)
            start = request.receive_fds.received_count
            offered = () if offer is None else offer.fds[start : start + messages.MOST_FDS]
            if not offered:
                return _refuse("no get of this session offers that; it may be over")
            return SharedMemoryAnswer(receive_fds=ReceiveFdsAnswer(fd_count=len(offered))), offered
        raise InvalidArgumentError(f"got {kind or 'nothing known'} as the next request; expected a hello first")


class Offer:
    """File descriptors that a client may receive.

    Attributes:
        offer_id: names it.
        fds: what is offered.
    """

    def __init__(self, fds: Sequence[int]) -> None:
        self.offer_id = os.urandom(16)
        self.fds = fds
        self._ended = asyncio.Event()
        self._on_end = contextlib.ExitStack()

    def on_end(self, call: Callable[[], object]) -> None:
        """Have a function called at the end, at once where that is over."""
        if self._ended.is_set():
            call()
        else:
            self._on_end.callback(call)

    def close(self) -> None:
        """End the offer: all was received, or no client can ask for it any more; a second call does nothing."""
        self._ended.set()
        self._on_end.close()

    async def wait(self) -> None:
        """Wait until nothing more is offered."""
        await self._ended.wait()


def _refuse(reason: str) -> tuple[SharedMemoryAnswer, Sequence[int]]:
    return SharedMemoryAnswer(refusal=Refusal(reason=reason)), ()
