"""Ranks as torch.distributed has them: which DP rank this process is, and replicas of which one asks for all.

The processes that hold one DP rank together (tensor, pipeline or context parallel) need the same batches. Each may ask
for itself, since a rank that asks again gets the same answer; or the first of them asks and broadcasts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from typing import TYPE_CHECKING, Any, Final, Literal

import numpy as np
import torch
import torch.distributed as dist

from tq_service.data.source import BatchStream, End, ExceptionWrapper, FetchedBatch
from tq_service.data.workers import BatchLayout, lay_out, open_batch
from tq_service.errors import InvalidArgumentError
from tq_service.wire.columns import Bytes

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

    Ranks = DeviceMesh | ProcessGroup

# The replicas wait in a collective while the first one waits for its batch. It sends them a sign in this interval, so
# that a long wait for data is none of the collective, whose timeout would end the trainer.
_SIGN_OF_WAITING_SECONDS: Final = 10.0


def rank_and_size(group: Ranks) -> tuple[int, int]:
    """Return which rank of how many this process is; the dimensions of a mesh are counted in row-major order.

    Raises:
        InvalidArgumentError: this process is no part of the mesh or group.
    """
    if isinstance(group, dist.ProcessGroup):
        rank, size = dist.get_rank(group), dist.get_world_size(group)
    else:
        coordinate = group.get_coordinate()
        size = math.prod(group.shape)
        rank = -1 if coordinate is None else int(np.ravel_multi_index(tuple(coordinate), tuple(group.shape)))
    if rank < 0:
        raise InvalidArgumentError(
            f"this process, rank {dist.get_rank()}, is no part of {group}; give the mesh or group that it is in",
            field="dp_group",
        )
    return rank, size


_Message = BatchLayout | End | ExceptionWrapper | Literal["waiting", "closed"]
"""A batch, of which the bytes follow; the end; an error; that there is no batch yet; that the stream was closed."""


class ReplicaGroup:
    """The replicas of a DP rank, the first of which asks for all.

    Its collectives run in the thread that reads the stream, in the order of the batches. All replicas read alike.
    """

    def __init__(self, group: Ranks) -> None:
        if not isinstance(group, dist.ProcessGroup):
            if group.ndim != 1:
                raise InvalidArgumentError(
                    f"replica_group has {group.ndim} dimensions, {group.mesh_dim_names}; give a mesh of one dimension, "
                    "or the process group of the replicas, torch.distributed.new_group(ranks)",
                    field="replica_group",
                )
            group = group.get_group()
        if dist.get_rank(group) < 0:
            raise InvalidArgumentError(
                f"this process, rank {dist.get_rank()}, is no part of replica_group; give the group that it is in",
                field="replica_group",
            )
        self._group = group
        self._first = dist.get_global_rank(group, 0)
        self.asks = dist.get_rank(group) == 0
        self._device = _device_of(group)

    def send(self, message: _Message, parts: Sequence[Bytes] = ()) -> None:
        """Give all other replicas a message, and the parts of the batch if it is the layout of one."""
        self._exchange(message)
        if isinstance(message, BatchLayout):
            data = torch.empty(message.size_bytes, dtype=torch.uint8)
            array = data.numpy()
            for (begin, end), part in zip(message.places, parts, strict=True):
                array[begin:end] = part
            self._broadcast(data.to(self._device))

    def receive(self) -> tuple[_Message, Bytes]:
        """Wait for the next message of the first replica, and the bytes of the batch, if it is the layout of one."""
        message = self._exchange(None)
        data = torch.empty(message.size_bytes if isinstance(message, BatchLayout) else 0, dtype=torch.uint8)
        if isinstance(message, BatchLayout):
            data = data.to(self._device)
            self._broadcast(data)
        return message, data.cpu().numpy()

    def _exchange(self, message: _Message | None) -> _Message:
        messages: list[Any] = [message]
        dist.broadcast_object_list(messages, src=self._first, group=self._group, device=self._device)
        received: _Message = messages[0]
        return received

    def _broadcast(self, data: torch.Tensor) -> None:
        dist.broadcast(data, src=self._first, group=self._group)


def _device_of(group: ProcessGroup) -> torch.device:
    """Return the device of the tensors that the group can send: the CPU where it has a backend for it."""
    # Such as "cpu:gloo,cuda:nccl".
    devices = [pair.partition(":")[0] for pair in str(dist.get_backend_config(group)).split(",")]
    return torch.device("cpu" if "cpu" in devices else devices[0])


class ReplicaStream:
    """A stream of which the first replica reads the batches, and broadcasts them to the others.

    ::

        first     inner stream ──> thread that waits ──> read() ──┬──> its batch
                                                                  │ broadcast: layout and bytes; "waiting" every 10 s
        others                                           read() <─┘

    An error of the first replica is raised by all of them.
    """

    def __init__(self, group: ReplicaGroup, open_fetched: Callable[[], BatchStream], batch_index: int) -> None:
        self.next_index = batch_index
        self._group = group
        self.closed = False  # by `close` of this replica or, once a read has found out, of the first one
        self._inner = open_fetched() if group.asks else None
        self._reader = ThreadPoolExecutor(1, thread_name_prefix="tq-replicas")

    def read(self) -> FetchedBatch | End | None:
        """Wait for the next batch, or the end; None once it is closed."""
        got = self._receive() if self._inner is None else self._send(self._inner)
        if isinstance(got, FetchedBatch):
            self.next_index = got.index + 1
        return got

    def _send(self, inner: BatchStream) -> FetchedBatch | End | None:
        reading = self._reader.submit(inner.read)
        message: _Message
        parts: list[Bytes] = []
        try:
            while not wait([reading], _SIGN_OF_WAITING_SECONDS).done:
                self._group.send("waiting")
            got = reading.result()
            message = got if isinstance(got, End) else "closed"
            if isinstance(got, FetchedBatch):
                message, parts = lay_out(got)
        except Exception as error:
            self._group.send(ExceptionWrapper.of(error))
            raise
        self._group.send(message, parts)
        return got

    def _receive(self) -> FetchedBatch | End | None:
        message, data = self._group.receive()
        while message == "waiting":
            message, data = self._group.receive()
        if isinstance(message, BatchLayout):
            return open_batch(message, data)
        if isinstance(message, ExceptionWrapper):
            raise message.with_note("the first replica of this rank")
        if isinstance(message, End):
            return message
        self.closed = True
        return None

    def close(self) -> None:
        """Stop fetching. Idempotent. The other replicas are not notified: they end their loops alike."""
        self.closed = True
        if self._inner is not None:
            self._inner.close()
        self._reader.shutdown(wait=False)
