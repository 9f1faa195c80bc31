"""Bulk connections: how ranges are requested, and which system calls transfer their bytes.

This module is used by threads in the client and in the storage service. The messages are:

    service -> client   20 bytes: "TQB1", the boot_id of the storage service (16); then for each range:
    client -> service   32 bytes: "TQB1", the ticket (16), the index of the range (uint32), 8 zero bytes
    and the bytes of the range, from the client for a put, from the service for a get

After each system call, a thread has to wait for the interpreter lock, for up to 5 ms if another thread is busy. A range
is therefore transferred with as few system calls as possible. Sockets are blocking, and the kernel handles timeouts. A
single system call can receive an entire range, or send up to a million slices of memory.
"""

from __future__ import annotations

import ctypes
import os
import socket
import ssl
import struct
import sys
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from tq_service.errors import UnavailableError
from tq_service.wire.columns import iter_frames

TICKET_BYTES: Final = 16
_GREETING: Final = struct.Struct("<4s16s")
_REQUEST: Final = struct.Struct("<4s16sI8x")
_MAGIC: Final = b"TQB1"
_STEP_SECONDS: Final = 1.0
_SECURE_STEP_BYTES: Final = 1 << 20  # Python's TLS transfers at most 16 KiB at once, regardless of the buffer size
_MOST_SLICES: Final = 1024  # maximum number of slices per message (IOV_MAX), and of messages per call (UIO_MAXIOV)
_TIMEVAL: Final = struct.Struct("@ll")
_MESSAGE: Final = np.dtype(
    {
        "names": ["slices", "slice_count", "sent"],
        "formats": [np.uint64, np.uint64, np.uint32],
        "offsets": [16, 24, 56],
        "itemsize": 64,
    }
)  # struct mmsghdr on 64-bit Linux; all other fields are zero
_HAS_SENDMMSG: Final = sys.platform == "linux" and ctypes.sizeof(ctypes.c_void_p) == 8

Moved: TypeAlias = Callable[[int], None]
"""Callback that receives the byte count of each step (0 after an idle second). It can raise an error to abort."""

Integers: TypeAlias = NDArray[np.int64]


class BulkConnection:
    """A connection that transfers one range at a time.

    Only one thread may use a connection, except that any thread may call `end`.

    Args:
        connection: connected socket, which is closed by `close`.
    """

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._is_secure = False
        connection.settimeout(None)
        with suppress(OSError):  # if the peer has already closed the connection, the first step fails
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, _timeval(_STEP_SECONDS))
        self._wait_at_most(_STEP_SECONDS)

    def accept_tls(self, context: ssl.SSLContext, seconds: float) -> None:
        """Perform the server side of the TLS handshake.

        Raises:
            OSError: the handshake failed or timed out.
        """
        self._wrap(context, seconds, server_side=True)

    def open_tls(self, context: ssl.SSLContext, host: str, seconds: float) -> None:
        """Perform the client side of the TLS handshake. The service must present a certificate for `host`.

        Raises:
            OSError: the handshake failed or timed out.
        """
        self._wrap(context, seconds, server_hostname=host)

    def _wrap(self, context: ssl.SSLContext, seconds: float, **options: Any) -> None:
        self._socket.settimeout(seconds)
        self._socket = context.wrap_socket(self._socket, **options)
        self._socket.settimeout(None)
        self._is_secure = True

    @property
    def sends_slices(self) -> bool:
        """Whether this connection supports `send_slices`."""
        return _HAS_SENDMMSG and not self._is_secure

    def is_idle(self) -> bool:
        """Return whether the connection is open and has no unread bytes, so that it can transfer a range."""
        try:
            self._socket.setblocking(False)
            self._socket.recv(1)  # if this call consumes an unexpected byte, the connection is not reused
        except (BlockingIOError, ssl.SSLWantReadError):
            return True
        except OSError:
            return False
        finally:
            with suppress(OSError):
                self._socket.settimeout(None)
        return False

    def _wait_at_most(self, seconds: float) -> None:
        with suppress(OSError):
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, _timeval(seconds))

    def greet(self, boot_id: bytes) -> None:
        """Send the storage service's id, so that the client can detect a proxy or another program on the port.

        Raises:
            OSError: the connection is lost.
        """
        self.send([memoryview(_GREETING.pack(_MAGIC, boot_id))], _once)

    def check_greeting(self, boot_id: bytes, seconds: float) -> None:
        """Wait for the greeting, and check that it comes from the storage service with the id `boot_id`.

        Raises:
            UnavailableError: the greeting did not arrive in time, or contained a different id.
            OSError: the connection is lost.
        """
        data = bytearray(_GREETING.size)
        self._receive_at_once(data, seconds)
        if _GREETING.unpack(data) != (_MAGIC, boot_id):
            raise UnavailableError("the bulk port belongs to another storage service or another program")

    def _receive_at_once(self, data: bytearray, seconds: float) -> None:
        """Fill `data` with a single receive, waiting at most `seconds`."""
        self._wait_at_most(seconds)
        try:
            self.receive_into(memoryview(data), partial(_once, size=len(data)))
        finally:
            self._wait_at_most(_STEP_SECONDS)

    def request(self, ticket: bytes, index: int, moved: Moved) -> None:
        """Request a range from the service.

        Raises:
            OSError: the connection is lost.
        """
        self.send([memoryview(_REQUEST.pack(_MAGIC, ticket, index))], moved)

    def receive_request(self, seconds: float) -> tuple[bytes, int] | None:
        """Return the ticket and index of the next requested range, or None if no further request arrived.

        Raises:
            OSError: the connection is lost.
            ValueError: the received bytes are not a request.
        """
        data = bytearray(_REQUEST.size)
        try:
            self._receive_at_once(data, seconds)
        except UnavailableError:
            return None
        magic, ticket, index = _REQUEST.unpack(data)
        if magic != _MAGIC:
            raise ValueError(f"got {magic!r} as the start of a request; expected {_MAGIC!r}")
        return ticket, index

    def receive_into(self, target: memoryview, moved: Moved) -> None:
        """Receive bytes until `target` is full.

        Raises:
            UnavailableError: the peer has closed the connection.
            OSError: the connection is lost.
            Exception: any exception raised by `moved`.
        """
        while target:
            try:
                if self._is_secure:
                    size = self._socket.recv_into(target[:_SECURE_STEP_BYTES])
                else:
                    size = self._socket.recv_into(target, 0, socket.MSG_WAITALL)
            except (BlockingIOError, ssl.SSLWantReadError):
                moved(0)
                continue
            if not size:
                raise UnavailableError("the other side closed the bulk connection")
            moved(size)
            target = target[size:]

    def receive_all(self, targets: Sequence[memoryview], moved: Moved) -> None:
        """Fill the targets in order with received bytes, using as few system calls as possible.

        Raises the same errors as `receive_into`.
        """
        if self._is_secure or len(targets) == 1:
            for target in targets:
                self.receive_into(target, moved)
            return
        for first in range(0, len(targets), _MOST_SLICES):
            parts = list(targets[first : first + _MOST_SLICES])
            while parts:
                try:
                    size, *_ = self._socket.recvmsg_into(parts, 0, socket.MSG_WAITALL)
                except BlockingIOError:
                    moved(0)
                    continue
                if not size:
                    raise UnavailableError("the other side closed the bulk connection")
                moved(size)
                parts = _behind(parts, size)

    def send(self, chunks: Iterable[memoryview], moved: Moved) -> None:
        """Send chunks of bytes in order.

        Raises:
            OSError: the connection is lost.
            Exception: any exception raised by `moved`.
        """
        frame_bytes = _SECURE_STEP_BYTES if self._is_secure else sys.maxsize
        for frame in iter_frames(chunks, frame_bytes, _MOST_SLICES):
            parts = [memoryview(b"".join(frame))] if self._is_secure and len(frame) > 1 else frame
            while parts:
                try:
                    size = self._socket.send(parts[0]) if self._is_secure else self._socket.sendmsg(parts)
                except (BlockingIOError, ssl.SSLWantWriteError):
                    moved(0)
                    continue
                moved(size)
                parts = _behind(parts, size)

    def send_slices(self, addresses: Integers, sizes: Integers, moved: Moved) -> None:
        """Send slices of memory, in order. Call this method only if `sends_slices` is True.

        Args:
            addresses: start address of each slice. The caller must keep the memory readable.
            sizes: size of each slice in bytes, at least 1.
            moved: callback for each step; see `Moved`.

        Raises:
            OSError: the connection is lost.
            Exception: any exception raised by `moved`.
        """
        slices = np.stack([addresses, sizes], axis=1)  # has the memory layout of an array of struct iovec
        left_bytes = int(sizes.sum())
        while left_bytes:
            size = _send_some(self._socket.fileno(), slices)
            moved(size)
            left_bytes -= size
            if left_bytes and size:
                slices = _slices_behind(slices, size)

    def end(self) -> None:
        """Make the current step and all later steps fail. Any thread may call this method."""
        with suppress(OSError):
            # SSLSocket.shutdown would make the current step of another thread use the socket without TLS.
            socket.socket.shutdown(self._socket, socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the connection. Only the thread that uses the connection may call this method."""
        self._socket.close()


def _once(moved: int, size: int = 1) -> None:
    """Raise UnavailableError if a step transferred fewer than `size` bytes."""
    if moved < size:
        raise UnavailableError("the bulk connection transferred fewer bytes than expected within the time limit")


def _behind(parts: list[memoryview], size: int) -> list[memoryview]:
    """Return the chunks that remain after the first `size` bytes."""
    for number, part in enumerate(parts):
        if size < len(part):
            return [part[size:], *parts[number + 1 :]]
        size -= len(part)
    return []


def _timeval(seconds: float) -> bytes:
    whole = int(seconds)
    return _TIMEVAL.pack(whole, int((seconds - whole) * 1_000_000))


def _slices_behind(slices: Integers, size: int) -> Integers:
    """Return the slices that remain after the first `size` bytes."""
    ends = np.cumsum(slices[:, 1])
    first = int(np.searchsorted(ends, size, "right"))
    left = slices[first:].copy()
    sent = size - (int(ends[first]) - int(left[0, 1]))
    left[0] += (sent, -sent)
    return left


_libc: Final = ctypes.CDLL(None, use_errno=True)


def _send_some(fd: int, slices: Integers) -> int:
    """Send as many slices as possible in a single system call, and return the byte count, or 0 after a timeout.

    Raises:
        OSError: the system call failed.
    """
    count = min(-(-len(slices) // _MOST_SLICES), _MOST_SLICES)
    messages = np.zeros(count, _MESSAGE)
    messages["slices"] = slices.ctypes.data + np.arange(count) * (_MOST_SLICES * slices.strides[0])
    messages["slice_count"] = _MOST_SLICES
    messages["slice_count"][-1] = min(len(slices) - (count - 1) * _MOST_SLICES, _MOST_SLICES)
    sent = int(_libc.sendmmsg(fd, ctypes.c_void_p(messages.ctypes.data), count, socket.MSG_NOSIGNAL))
    if sent >= 0:
        return int(messages["sent"][:sent].sum(dtype=np.int64))
    error = OSError(number := ctypes.get_errno(), os.strerror(number))
    if isinstance(error, BlockingIOError | InterruptedError):
        return 0
    raise error
