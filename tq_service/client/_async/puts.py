"""The way of a put: placed, streamed to a storage service, committed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from tq_service.client._async.base import AsyncBase
from tq_service.client.requests import new_id
from tq_service.client.retry import Deadline
from tq_service.dataplane.messages import put_header
from tq_service.dataplane.parties import CONTROLLER_KIND
from tq_service.errors import DataLossError, PutNotFoundError, TqError, UnavailableError
from tq_service.v1 import commit_pb2
from tq_service.v1 import controller_service_pb2 as pb
from tq_service.v1.metadata_pb2 import StorageEndpoint
from tq_service.v1.storage_service_pb2 import PutHeader
from tq_service.wire.columns import Column

_COMMIT_PATIENCE_SECONDS: Final = 5.0
_MOST_LOSSES: Final = 3
_CONTROLLER: Final = StorageEndpoint(kind=CONTROLLER_KIND)


class AsyncPuts(AsyncBase):
    """Streams puts. See `AsyncClient.put`."""

    async def _put_columns(
        self, request: commit_pb2.CommitRequest, columns: Sequence[Column], deadline: Deadline
    ) -> commit_pb2.CommitResponse:
        """Put columns and commit them, all again under the same ids where a service is unavailable in the middle."""
        header = put_header(
            new_id(),
            request.write.partition_id,
            columns,
            for_existing_rows=bool(request.write.global_indexes)
            or request.write.key_mode == commit_pb2.KEY_MODE_EXISTING,
        )

        loss_count = 0

        async def attempt() -> commit_pb2.CommitResponse:
            nonlocal loss_count
            try:
                return await self._put_where_told(header, request, columns, deadline)
            except TqError as error:
                self._placement.end()
                # The put was lost before its commit, by a restart or since it waited for too long.
                if not isinstance(error, DataLossError | PutNotFoundError) or loss_count == _MOST_LOSSES:
                    raise
                loss_count += 1
                raise UnavailableError(error.message) from error

        return await self._calls.retried(attempt, deadline)

    async def _put_where_told(
        self, header: PutHeader, request: commit_pb2.CommitRequest, columns: Sequence[Column], deadline: Deadline
    ) -> commit_pb2.CommitResponse:
        place = self._placement.place(header.size_bytes)
        if place is None:
            asked = pb.PlacePutRequest(size_bytes=header.size_bytes, partition_id=header.partition_id)
            place = await self._calls.unary_once(lambda to: to.controller.PlacePut, asked, deadline)
            self._placement.renew(place)
        header.controller_id = place.controller_id
        if place.embedded:
            header.commit.CopyFrom(request)
            answer = await self._calls.put_once(_CONTROLLER, header, columns, deadline)
            return answer.commit
        header.ClearField("commit")
        answer = await self._calls.put_once(self._placement.endpoint(place), header, columns, deadline)
        commit = commit_pb2.CommitRequest(
            request_id=request.request_id,
            write=request.write,
            placement=commit_pb2.PutPlacement(storage=answer.storage, put_id=header.put_id, receipt=answer.receipt),
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
