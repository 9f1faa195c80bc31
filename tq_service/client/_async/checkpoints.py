"""Calls about checkpoints of the whole service."""

from __future__ import annotations

from typing import Final

from tq_service.client._async.calls import AsyncBase
from tq_service.results import CheckpointCopy, RestoredCheckpoint
from tq_service.v1 import controller_service_pb2 as pb
from tq_service.wire.mapper import read_message

_SECONDS: Final = 3600.0


class AsyncCheckpointCalls(AsyncBase):
    """The part of the client about checkpoints. See `AsyncClient`."""

    async def checkpoint(self, name: str, *, timeout: float | None = None) -> CheckpointCopy:
        """Write a consistent copy of everything to the controller's disk, while all else goes on.

        The name has the new checkpoint whole, or the one before it.

        Args:
            name: a place below the `checkpoint_dir` of the service, such as "nightly/2026-11-21"; parts of letters,
                digits and "._=@+-" that begin with a letter or digit, at most 200 characters in all.
            timeout: seconds until the call fails and the copy is cancelled; None: an hour.

        Raises:
            InvalidArgumentError: the name is none, or cannot be written to.
            PreconditionError: another checkpoint is being written or restored, or the service has no `checkpoint_dir`.
            DiskFullError: the disk has no space.
            DataLossError: bytes that are to be copied are lost; it names their samples.
        """
        seconds = _SECONDS if timeout is None else timeout
        answer = await self._ask(lambda to: to.Checkpoint, pb.CheckpointRequest, seconds, name=name)
        return read_message(CheckpointCopy, answer)

    async def restore(self, name: str, *, timeout: float | None = None) -> RestoredCheckpoint:
        """Bring back what a checkpoint holds, into a service that has no partitions.

        It is read and checked whole before anything is done. Its bytes go to the storage services there are now, and
        all its partitions appear in one step, with their claims: trainers go on where they were.

        Args:
            name: the name that it was written under.
            timeout: seconds until the call fails and nothing is restored; None: an hour.

        Raises:
            PreconditionError: there are partitions, or another checkpoint is being written or restored, or the service
                has no `checkpoint_dir`.
            InvalidArgumentError: there is no checkpoint.
            SnapshotDamagedError: it is damaged.
            QuotaExceededError: the storage services have no capacity for its bytes.
        """
        seconds = _SECONDS if timeout is None else timeout
        answer = await self._ask(lambda to: to.Restore, pb.RestoreRequest, seconds, name=name)
        return read_message(RestoredCheckpoint, answer)
