"""The way of a put: placed, streamed to a storage service, committed."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Final

from tq_service.client._async.base import AsyncBase
from tq_service.client.requests import new_id
from tq_service.client.retry import Deadline
from tq_service.dataplane.parties import CONTROLLER_KIND
from tq_service.errors import DataLossError, PutNotFoundError, UnavailableError
from tq_service.v1 import controller_service_pb2 as pb
from tq_service.v1.metadata_pb2 import StorageEndpoint
from tq_service.v1.storage_service_pb2 import PutHeader
from tq_service.wire.columns import Column, encode_header

# A put of less than this goes where the last one was told to go, saving a round trip; larger ones are placed each, so
# that several storage services fill evenly, unless there is only one.
_PLACED_FROM_BYTES: Final = 1 << 20
_REMEMBERED_SECONDS: Final = 10.0
_COMMIT_PATIENCE_SECONDS: Final = 5.0
_MOST_LOSSES: Final = 3
_CONTROLLER: Final = StorageEndpoint(kind=CONTROLLER_KIND)


class AsyncPuts(AsyncBase):
    """Streams puts. See `AsyncClient.put`."""

    async def _put_columns(
        self, request: pb.CommitRequest, columns: Sequence[Column], deadline: Deadline
    ) -> pb.CommitResponse:
        """Put columns and commit them, all again under the same ids where a service is unavailable in the middle."""
        header = PutHeader(
            put_id=new_id(),
            row_count=columns[0].row_count,
            columns=[encode_header(column) for column in columns],
            size_bytes=sum(column.value_bytes for column in columns),
            for_existing_rows=bool(request.write.global_indexes) or request.write.key_mode == pb.KEY_MODE_EXISTING,
            partition_id=request.write.partition_id,
        )

        loss_count = 0

        async def attempt() -> pb.CommitResponse:
            nonlocal loss_count
            try:
                return await self._put_where_told(header, request, columns, deadline)
            except UnavailableError:
                self._embedded_until = 0.0
                raise
            except (DataLossError, PutNotFoundError) as error:
                # The storage service has lost it before its commit, by a restart or because it took too long.
                loss_count += 1
                if loss_count > _MOST_LOSSES:
                    raise
                raise UnavailableError(error.message) from error

        return await self._calls.retried(attempt, deadline)

    async def _put_where_told(
        self, header: PutHeader, request: pb.CommitRequest, columns: Sequence[Column], deadline: Deadline
    ) -> pb.CommitResponse:
        place = await self._place(header, deadline)
        if place.embedded:
            header.commit.CopyFrom(request)
            answer = await self._calls.put_once(_CONTROLLER, header, columns, deadline)
            return answer.commit
        header.ClearField("commit")
        answer = await self._calls.put_once(place.storage, header, columns, deadline)
        commit = pb.CommitRequest(
            request_id=request.request_id,
            write=request.write,
            placement=pb.PutPlacement(storage=answer.storage, put_id=header.put_id),
            columns=header.columns,
        )
        # Where it stays unavailable, the put is sent again: perhaps to another storage service.
        patience = Deadline.after(min(_COMMIT_PATIENCE_SECONDS, deadline.remaining()))
        try:
            return await self._calls.retried(
                lambda: self._calls.unary_once(lambda to: to.controller.Commit, commit, deadline), patience
            )
        except UnavailableError as given_up:  # the tries of the whole put are told, not those of this part
            raise given_up.__cause__ or given_up from None

    async def _place(self, header: PutHeader, deadline: Deadline) -> pb.PlacePutResponse:
        """Return the storage service for a put."""
        is_told = header.size_bytes < _PLACED_FROM_BYTES or self._is_only_one
        if is_told and time.monotonic() < self._embedded_until:
            return pb.PlacePutResponse(embedded=True)
        request = pb.PlacePutRequest(size_bytes=header.size_bytes, partition_id=header.partition_id)
        answer = await self._calls.unary_once(lambda to: to.controller.PlacePut, request, deadline)
        self._embedded_until = time.monotonic() + _REMEMBERED_SECONDS if answer.embedded else 0.0
        self._is_only_one = answer.only_one
        return answer
