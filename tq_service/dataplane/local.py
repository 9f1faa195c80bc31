"""Puts and gets at a storage engine in the same process."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from typing import Protocol

from tq_service.dataplane.parties import Deadline, Received
from tq_service.dataplane.receive_buffers import RECEIVE_BUFFERS
from tq_service.v1.storage_service_pb2 import GetRequest, PutHeader, PutResponse
from tq_service.wire.columns import Column, ColumnShape
from tq_service.wire.frames import ColumnReceiver


class Pending(Protocol):
    """A put of an engine whose bytes are to come."""

    async def write(self, data: memoryview | bytes) -> None:
        """Append bytes of the values; ignored where the put was complete before."""
        ...


class Reading(Protocol):
    """Cells of an engine."""

    @property
    def headers(self) -> Sequence[ColumnShape]:
        """The columns, in the order asked for."""
        ...

    def parts(self) -> AsyncIterator[Iterable[memoryview]]:
        """Yield the bytes of all columns in order, as chunks to be used before the next part."""
        ...


class Engine(Protocol):
    """A storage engine in the same process, asked by messages."""

    def storing(
        self, header: PutHeader, columns: Sequence[ColumnShape], *, until: float | None
    ) -> AbstractAsyncContextManager[Pending]:
        """Reserve capacity for a put, at most until a time of the engine's clock; it is complete at the end."""
        ...

    async def open(self, request: GetRequest) -> AbstractContextManager[Reading]:
        """Find cells, which stay as they are within the `with`."""
        ...


class LocalDriver:
    """An `AsyncDriver` whose calls are those of an engine, on its event loop."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    async def put(self, header: PutHeader, columns: Sequence[Column], deadline: Deadline) -> PutResponse:
        """Store a put, see `AsyncDriver`."""
        async with self._engine.storing(header, columns, until=time.monotonic() + deadline.remaining()) as pending:
            for column in columns:
                for chunk in column.chunks:
                    await pending.write(chunk)
        return PutResponse()

    async def get(
        self, request: GetRequest, row_count: int, deadline: Deadline, size_bytes: int | None = None
    ) -> list[Received]:
        """Return columns with their bytes, see `AsyncDriver`; a thread copies them."""
        with await self._engine.open(request) as reading:
            receiver = ColumnReceiver(reading.headers, RECEIVE_BUFFERS.take)
            async for part in reading.parts():
                await asyncio.to_thread(_write, receiver, part)
            return list(zip(reading.headers, receiver.finish(), strict=True))


def _write(receiver: ColumnReceiver, chunks: Iterable[memoryview]) -> None:
    for chunk in chunks:
        receiver.write(chunk)
