"""Puts and gets at a storage engine in the same process."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Sequence

from tq_service.dataplane.parties import Deadline, Engine, Received
from tq_service.dataplane.receive_buffers import RECEIVE_BUFFERS
from tq_service.v1.storage_service_pb2 import GetRequest, PutHeader, PutResponse
from tq_service.wire.columns import Column
from tq_service.wire.frames import ColumnReceiver


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
