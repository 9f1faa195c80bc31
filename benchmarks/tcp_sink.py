"""A process that receives bytes over TCP into memory that it reuses: the limit of what loopback can carry.

Each message is its size (8 bytes, little-endian) and that many bytes; it is answered by one byte when all are there.
Every connection has a thread, which holds no lock while it receives.
"""

from __future__ import annotations

import socket
import threading

BLOCK_BYTES = 64 << 20
_BUFFER_BYTES = 1 << 20


def connect(address: str) -> socket.socket:
    """Return a connection to the process."""
    host, _, port = address.rpartition(":")
    connection = socket.create_connection((host, int(port)))
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return connection


def send(connection: socket.socket, data: memoryview) -> None:
    """Send bytes in blocks of 64 MiB, and wait until they have arrived."""
    connection.sendall(len(data).to_bytes(8, "little"))
    for start in range(0, len(data), BLOCK_BYTES):
        connection.sendall(data[start : start + BLOCK_BYTES])
    connection.recv(1)


def _receive(connection: socket.socket) -> None:
    buffer = memoryview(bytearray(_BUFFER_BYTES))
    with connection:
        while len(head := connection.recv(8, socket.MSG_WAITALL)) == 8:
            left = int.from_bytes(head, "little")
            while left:
                received = connection.recv_into(buffer[: min(left, _BUFFER_BYTES)])
                if not received:
                    return
                left -= received
            connection.sendall(b"\0")


def _serve() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        print(f"listening on 127.0.0.1:{server.getsockname()[1]}", flush=True)
        while True:
            connection, _ = server.accept()
            threading.Thread(target=_receive, args=(connection,), daemon=True).start()


if __name__ == "__main__":
    _serve()
