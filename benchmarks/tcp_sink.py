"""A process that receives and sends bytes over TCP, in reused memory: the upper limit for loopback.

A message is its size (8 bytes, little-endian) and that many bytes; it is answered by one byte once complete. A size
with the highest bit set requests that many bytes instead. Every connection has a thread, which holds no lock while it
receives and sends, and memory for the largest message so far, at most 64 MiB.
"""

from __future__ import annotations

import socket
import threading

BLOCK_BYTES = 64 << 20
_STEP_BYTES = 4 << 20  # no other size is faster (`MSG_WAITALL` fills it in one call)
_FETCH = 1 << 63


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


def fetch(connection: socket.socket, target: memoryview) -> None:
    """Receive bytes until memory is full."""
    connection.sendall((_FETCH | len(target)).to_bytes(8, "little"))
    if not _receive(connection, target):
        raise ConnectionError("the sending process has closed the connection")


def _receive(connection: socket.socket, target: memoryview) -> bool:
    """Fill memory; return whether enough bytes came."""
    while target:
        received = connection.recv_into(target[:_STEP_BYTES], 0, socket.MSG_WAITALL)
        if not received:
            return False
        target = target[received:]
    return True


def _answer(connection: socket.socket) -> None:
    memory = memoryview(bytearray(_STEP_BYTES))
    with connection:
        while len(head := connection.recv(8, socket.MSG_WAITALL)) == 8:
            size = int.from_bytes(head, "little")
            is_fetch, size = bool(size & _FETCH), size & ~_FETCH
            if len(memory) < min(size, BLOCK_BYTES):
                memory = memoryview(bytearray(min(size, BLOCK_BYTES)))
            for start in range(0, size, BLOCK_BYTES):
                block = memory[: min(size - start, BLOCK_BYTES)]
                if is_fetch:
                    connection.sendall(block)
                elif not _receive(connection, block):
                    return
            if not is_fetch:
                connection.sendall(b"\0")


def _serve() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        print(f"listening on 127.0.0.1:{server.getsockname()[1]}", flush=True)
        while True:
            connection, _ = server.accept()
            threading.Thread(target=_answer, args=(connection,), daemon=True).start()


if __name__ == "__main__":
    _serve()
