"""The Unix socket over which a storage service and clients of its host hand each other shared memory."""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import resource
import socket
import stat
from pathlib import Path
from typing import Final

from tq_service.server.handover_session import Session
from tq_service.wire import handover

_log = logging.getLogger(__name__)
_SUFFIX: Final = ".sock"
_MOST_SESSIONS: Final = 1024
_BACKLOG: Final = 128
_MOST_ACCEPTED_AT_ONCE: Final = 32
_PAUSE_SECONDS: Final = 1.0
_COLLECT_SECONDS: Final = 1.0
_MOST_MEMORIES: Final = 16_384  # of the 65,530 mappings that Linux gives a process by default


class HandoverServer:
    """Listens in a folder and holds the sessions. Confined to one event loop.

    Args:
        folder: where the socket is; whoever may enter it may share memory.
        boot_id: the life of the storage service, which clients name.

    Attributes:
        most_memories: how many memories the service should hold: each takes a file descriptor and two mappings, of
            which the system gives a process only so many.
        path: the socket.
    """

    def __init__(self, folder: Path, boot_id: bytes) -> None:
        files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        self.most_memories = min(files // 2, _MOST_MEMORIES)
        self.path = folder / f"{boot_id[:8].hex()}{_SUFFIX}"  # paths of sockets are short
        self._boot_id = boot_id
        self._listener: socket.socket | None = None
        self._connections: dict[Session, None] = {}  # in the order in which they came
        self._proven: set[Session] = set()
        self._sessions: dict[bytes, Session] = {}
        self._drained: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Listen.

        Raises:
            OSError: the folder cannot be used.
        """
        folder = self.path.parent
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        _sweep(folder)
        listener = handover.open_socket()
        unready = self.path.with_suffix(".new")
        try:
            listener.bind(str(unready))
            unready.chmod(0o666)  # the folder says who may come in
            listener.listen(_BACKLOG)
            listener.setblocking(False)
            unready.rename(self.path)  # a socket that does not listen yet would look like one left behind
        except OSError:
            listener.close()
            unready.unlink(missing_ok=True)
            raise
        self._listener = listener
        asyncio.get_running_loop().add_reader(listener, self._accept)

    def session(self, session_id: bytes) -> Session | None:
        """Return the open session of this name, for a call that was let in and names it."""
        session = self._sessions.get(session_id)
        if session is not None:
            self._proven.add(session)
        return session

    def drain(self) -> None:
        """Take back soon what nobody collects: a get lasts until its offer is collected, and would hold up the end."""
        self._drained = asyncio.get_running_loop().call_later(_COLLECT_SECONDS, self._end_offers)

    def _end_offers(self) -> None:
        for session in self._connections:
            session.end_offers()

    def close(self) -> None:
        """End all sessions and remove the socket."""
        if self._drained is not None:
            self._drained.cancel()
        if self._listener is not None:
            asyncio.get_running_loop().remove_reader(self._listener)
            self._listener.close()
            self._listener = None
            self.path.unlink(missing_ok=True)
        for session in list(self._connections):
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
                _log.warning("a client of this host could not be let in: %s", error)
                if error.errno in {errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM}:
                    self._pause()
                    return
                continue
            if len(self._connections) >= _MOST_SESSIONS and not self._make_room():
                connection.close()
                continue
            connection.setblocking(False)
            self._connections[Session(connection, self._boot_id, self._opened, self._closed)] = None

    def _make_room(self) -> bool:
        """End the oldest session that no call has named yet; whoever cannot make calls cannot keep others out."""
        unproven = next((session for session in self._connections if session not in self._proven), None)
        if unproven is None:
            return False
        unproven.close()
        return True

    def _pause(self) -> None:
        """Stop accepting for a moment; the connection that could not be accepted would wake the loop all the time."""
        loop = asyncio.get_running_loop()
        if self._listener is not None:
            loop.remove_reader(self._listener)
            loop.call_later(_PAUSE_SECONDS, self._resume)

    def _resume(self) -> None:
        if self._listener is not None:
            asyncio.get_running_loop().add_reader(self._listener, self._accept)

    def _opened(self, session: Session) -> None:
        self._sessions[session.session_id] = session

    def _closed(self, session: Session) -> None:
        self._connections.pop(session, None)
        self._proven.discard(session)
        self._sessions.pop(session.session_id, None)


def make_private(folder: Path) -> None:
    """Make a folder for this user alone, in a place where all users may make folders.

    Raises:
        OSError: it cannot be made, or another user has made it, who could put a socket of his own there.
    """
    folder.mkdir(mode=0o700, exist_ok=True)
    status = folder.stat(follow_symlinks=False)
    others_may_write = bool(status.st_mode & (stat.S_IWGRP | stat.S_IWOTH))
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid() or others_may_write:
        raise PermissionError(
            f"{folder} is not a folder of this user alone (owner {status.st_uid}, mode {status.st_mode & 0o7777:o})"
        )


def _sweep(folder: Path) -> None:
    """Remove sockets on which nobody listens: their servers were killed."""
    for path in folder.glob(f"*{_SUFFIX}"):
        with handover.open_socket() as probe:
            probe.setblocking(False)
            try:
                probe.connect(str(path))
            except ConnectionRefusedError:
                path.unlink(missing_ok=True)
            except OSError as error:
                _log.debug("%s is left alone: %s", path, error)
