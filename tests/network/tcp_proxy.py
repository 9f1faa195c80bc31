"""A network between client and service that can be cut, frozen, delayed and slowed down."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from typing import Any

from live_server import LoopThread

_CHUNK_BYTES = 16 << 10


class Network:
    """Passes TCP connections on to a target; use it in a `with`.

    Attributes:
        delay_seconds: how long each chunk takes, either way.
        bytes_per_second: most that passes, either way of each connection; None: no bound.
        cut_after_bytes: the connections are cut once so many bytes have come from clients; None: never.
        passed_bytes: bytes from clients that were passed on.
    """

    def __init__(self, loop: LoopThread, target: str) -> None:
        host, _, port = target.rpartition(":")
        self._target = (host, int(port))
        self._loop = loop
        self._writers: set[asyncio.StreamWriter] = set()
        self._flowing = asyncio.Event()
        self._answering = asyncio.Event()
        self._is_open = True
        self.delay_seconds = 0.0
        self.bytes_per_second: float | None = None
        self.cut_after_bytes: int | None = None
        self.passed_bytes = 0
        self._server: Any = None
        self.address = ""

    def __enter__(self) -> Network:
        async def start() -> None:
            self._flowing.set()
            self._answering.set()
            self._server = await asyncio.start_server(self._connected, "127.0.0.1", 0)
            self.address = f"127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

        self._loop.run(start())
        return self

    def __exit__(self, *exception: object) -> None:
        async def stop() -> None:
            self._server.close()
            self._cut_all()
            self._flowing.set()
            self._answering.set()

        self._loop.run(stop())

    # What may happen to a network

    def cut(self, *, refuse: bool = False) -> None:
        """Reset all connections; with `refuse`, new ones too until `mend`."""

        async def cut() -> None:
            self._is_open = not refuse
            self._cut_all()

        self._loop.run(cut())

    def freeze(self) -> None:
        """Let nothing through from now on, as where the other side is gone without a word."""
        self._loop.loop.call_soon_threadsafe(self._flowing.clear)

    def hold_answers(self) -> None:
        """Let nothing from the target through from now on."""
        self._loop.loop.call_soon_threadsafe(self._answering.clear)

    def mend(self) -> None:
        """Let everything through again, also what was on its way."""

        def mend() -> None:
            self._is_open = True
            self._flowing.set()
            self._answering.set()

        self._loop.loop.call_soon_threadsafe(mend)

    def _cut_all(self) -> None:
        for writer in self._writers:
            _reset(writer)
        self._writers.clear()

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if not self._is_open:
            _reset(writer)
            return
        try:
            target_reader, target_writer = await asyncio.open_connection(*self._target)
        except OSError:
            _reset(writer)
            return
        self._writers |= {writer, target_writer}
        ways = (self._pump(reader, target_writer, from_client=True), self._pump(target_reader, writer))
        await asyncio.gather(*ways)
        self._writers -= {writer, target_writer}

    async def _pump(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, from_client: bool = False
    ) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(_CHUNK_BYTES):
                await asyncio.sleep(self.delay_seconds)
                if self.bytes_per_second is not None:
                    await asyncio.sleep(len(data) / self.bytes_per_second)
                await self._flowing.wait()
                if not from_client:
                    await self._answering.wait()
                writer.write(data)
                await writer.drain()
                if from_client:
                    self._count(len(data))
        writer.close()

    def _count(self, size: int) -> None:
        self.passed_bytes += size
        if self.cut_after_bytes is not None and self.passed_bytes >= self.cut_after_bytes:
            self.cut_after_bytes = None
            self._cut_all()


def _reset(writer: asyncio.StreamWriter) -> None:
    """Close a connection with a reset, as a network does that has forgotten it."""
    connection = writer.get_extra_info("socket")
    if connection is not None and connection.fileno() >= 0:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
    writer.transport.abort()
