"""Calls about checkpoints of the whole service."""

from __future__ import annotations

from typing import Final

from tq_service.client._async.base import AsyncBase
from tq_service.client.requests import new_id, text
from tq_service.client.results import CheckpointCopy, RestoredCheckpoint
from tq_service.v1 import controller_service_pb2 as pb

_SECONDS: Final = 3600.0


class AsyncCheckpointCalls(AsyncBase):
    """The part of the client about checkpoints. See `AsyncClient`."""

    async def checkpoint(self, directory: str, *, timeout: float | None = None) -> CheckpointCopy:
        """Write a consistent copy of everything to a folder of the controller's host, while all else goes on.

        The folder has the new checkpoint whole, or is as it was.

        Args:
            directory: the whole path of the folder; made where it is not there.
            timeout: seconds until the call fails and the copy is given up; None: an hour.

        Raises:
            InvalidArgumentError: the folder cannot be used.
            PreconditionError: another checkpoint is being written or restored.
            DiskFullError: the disk has no room.
            DataLossError: bytes that are to be copied are lost; it names their samples.
        """
        request = pb.CheckpointRequest(directory=text("directory", directory))
        deadline = self._deadline(_SECONDS if timeout is None else timeout)
        answer = await self._calls.unary(lambda to: to.controller.Checkpoint, request, deadline)
        return CheckpointCopy.from_proto(answer)

    async def restore(self, directory: str, *, timeout: float | None = None) -> RestoredCheckpoint:
        """Bring back what a checkpoint holds, into a service that has no partitions.

        It is read and checked whole before anything is done. Its bytes go to the storage services there are now, and
        all its partitions appear in one step, with their claims: trainers go on where they were.

        Args:
            directory: the whole path of its folder on the controller's host.
            timeout: seconds until the call fails and nothing is restored; None: an hour.

        Raises:
            PreconditionError: there are partitions, or another checkpoint is being written or restored.
            InvalidArgumentError: there is no checkpoint.
            SnapshotDamagedError: it is damaged.
            QuotaExceededError: the storage services have no room for its bytes.
        """
        request = pb.RestoreRequest(request_id=new_id(), directory=text("directory", directory))
        deadline = self._deadline(_SECONDS if timeout is None else timeout)
        answer = await self._calls.unary(lambda to: to.controller.Restore, request, deadline)
        return RestoredCheckpoint.from_proto(answer)
