"""Messages on the Unix socket that processes on the same host use to exchange file descriptors."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from typing import Final, TypeVar

from google.protobuf.message import DecodeError

from tq_service.errors import InvalidArgumentError
from tq_service.internal.v1.shared_memory_pb2 import SharedMemoryAnswer, SharedMemoryRequest
from tq_service.wire.shared_memory import close_all

Message = TypeVar("Message", SharedMemoryRequest, SharedMemoryAnswer)

MOST_FDS: Final = 128
"""Maximum number of file descriptors per message. Linux allows up to 253."""

SOCKET_DIR_VARIABLE: Final = "TQ_SHARED_MEMORY_DIR"
"""Environment variable for the client's path to the socket directory, if it differs from the service's path."""

_MOST_MESSAGE_BYTES: Final = 4096


def open_socket() -> socket.socket:
    """Create a socket of the type used by both the client and the service."""
    return socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)


def send(connection: socket.socket, message: SharedMemoryRequest | SharedMemoryAnswer, fds: Sequence[int] = ()) -> None:
    """Send a message with file descriptors. The sender must still close its own copies of the descriptors.

    Raises:
        OSError: the peer has closed the connection, or the buffer of a non-blocking socket is full.
    """
    socket.send_fds(connection, [message.SerializeToString()], fds)


def receive(
    connection: socket.socket, kind: type[Message], most_fds: int = MOST_FDS
) -> tuple[Message, list[int]] | None:
    """Return the next message and its file descriptors, or None if the peer has closed the connection.

    The caller must close the file descriptors.

    Raises:
        InvalidArgumentError: the data is not a message of this kind, or exceeds the limits.
        OSError: the connection failed. BlockingIOError: a non-blocking socket has no message available.
    """
    data, fds, flags, _ = socket.recv_fds(connection, _MOST_MESSAGE_BYTES, most_fds, socket.MSG_CMSG_CLOEXEC)
    if flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC):
        problem = (
            f"a message of more than {_MOST_MESSAGE_BYTES} bytes or {most_fds} file descriptors arrived on the shared "
            "memory socket"
        )
    else:
        try:
            if data:
                return kind.FromString(data), list(fds)
            problem = ""
        except DecodeError as error:
            problem = f"the message on the shared memory socket is not a {kind.DESCRIPTOR.name}: {error}"
    close_all(fds)
    if problem:
        raise InvalidArgumentError(problem)
    return None
