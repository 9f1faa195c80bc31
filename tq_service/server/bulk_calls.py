"""The bytes of puts between a controller and a storage service: what checkpoints read, and what they bring back."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Sequence
from typing import Any, Final, Protocol

import grpc

from tq_service.errors import PermissionDeniedError, TqError, UnauthenticatedError, UnavailableError
from tq_service.storage.cells import ReadRuns
from tq_service.v1 import metadata_pb2
from tq_service.v1 import storage_service_pb2 as pb
from tq_service.wire.columns import ColumnShape, decode_headers, encode_header
from tq_service.wire.credentials import Metadata
from tq_service.wire.error_table import from_rpc_error, status_from_trailers
from tq_service.wire.frames import (
    DEFAULT_FRAME_BYTES,
    SEND_AS_KEY,
    Garbled,
    decode_get_response,
    encode_put_request,
)

_SERVICE: Final = "/tq_service.v1.StorageService/"
_HELD_BYTES: Final = 4 << 20
_LOST_STATUS: Final = "Internal error from Core"  # what grpc's asyncio calls make of a refusal while they write


class TakesCells(Protocol):
    """Where cells go that are read."""

    async def begin(self, columns: Sequence[ColumnShape]) -> None:
        """Take the columns, whose bytes are to come."""
        ...

    async def add(self, chunks: Iterable[memoryview]) -> None:
        """Take bytes; they may be gone once this returns."""
        ...


class BulkCalls:
    """The streams of a storage service's channel."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self._get: Any = channel.unary_stream(
            _SERVICE + "Get",
            request_serializer=pb.GetRequest.SerializeToString,
            response_deserializer=decode_get_response,
        )
        self._put: Any = channel.stream_unary(
            _SERVICE + "Put",
            request_serializer=encode_put_request,
            response_deserializer=pb.PutResponse.FromString,
        )

    async def read(
        self,
        boot_id: bytes,
        put_ids: Sequence[bytes],
        runs: ReadRuns,
        into: TakesCells,
        *,
        seconds: float,
        metadata: Metadata | None,
    ) -> None:
        """Read cells.

        Raises:
            TqError: what the service says, or UnavailableError where it cannot be reached.
        """
        request = pb.GetRequest(boot_id=boot_id, put_ids=put_ids, runs=[_encode_runs(runs)])
        stream = self._get(request, timeout=seconds, metadata=metadata)
        held: list[memoryview] = []
        size = 0
        try:
            async for part in stream:
                if isinstance(part, pb.GetHeader):
                    await into.begin(decode_headers(part.columns, part.row_count))
                    continue
                held.append(_frame(part))
                size += len(held[-1])
                if size >= _HELD_BYTES:
                    await into.add(held)
                    held, size = [], 0
            await into.add(held)
        except grpc.aio.AioRpcError as error:
            raise typed(error) from error
        finally:
            stream.cancel()

    async def put(
        self,
        put_id: bytes,
        partition_id: str,
        columns: Sequence[ColumnShape],
        values: AsyncIterator[bytes],
        *,
        seconds: float,
        metadata: Metadata | None,
    ) -> None:
        """Store a put; it is to be confirmed.

        Raises:
            TqError: what the service says, or UnavailableError where it cannot be reached.
        """
        header = pb.PutHeader(
            put_id=put_id,
            row_count=columns[0].row_count,
            columns=map(encode_header, columns),
            size_bytes=sum(column.value_bytes for column in columns),
            partition_id=partition_id,
        )
        stream = self._put(timeout=seconds, metadata=metadata)
        try:
            await _write(stream, header, values)
            await stream
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.INTERNAL and error.details() == _LOST_STATUS:
                raise UnavailableError("a put was broken off by the storage service or the network") from error
            raise typed(error) from error
        finally:
            stream.cancel()


async def _write(stream: Any, header: pb.PutHeader, values: AsyncIterator[bytes]) -> None:
    try:
        await stream.write(header)
        if all(key != SEND_AS_KEY for key, _ in await stream.initial_metadata()):
            return  # it is refused
        async for data in values:
            view = memoryview(data)
            for start in range(0, len(view), DEFAULT_FRAME_BYTES):
                await stream.write([view[start : start + DEFAULT_FRAME_BYTES]])
        await stream.done_writing()
    except asyncio.InvalidStateError:
        return  # the call has ended, and awaiting it says how


def typed(error: grpc.aio.AioRpcError) -> TqError:
    """Return the error that a service meant; that it does not let this one in is no fault of the client's."""
    meant = from_rpc_error(error.code(), error.details(), status_from_trailers(error.trailing_metadata()))
    if isinstance(meant, UnauthenticatedError | PermissionDeniedError):
        return UnavailableError(f"a storage service does not let its controller in: {meant.message}")
    return meant


def _frame(part: Any) -> memoryview:
    if isinstance(part, memoryview):
        return part
    reason = part.reason if isinstance(part, Garbled) else f"it is a {type(part).__name__}"
    raise UnavailableError(f"a storage service sent something else than a frame: {reason}")


def _encode_runs(runs: ReadRuns) -> metadata_pb2.CellRuns:
    return metadata_pb2.CellRuns(
        field_names=runs.field_names,
        put_indexes=runs.put_indexes.tolist(),
        first_rows=runs.first_rows.tolist(),
        row_counts=runs.row_counts.tolist(),
    )
