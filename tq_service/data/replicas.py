"""Integrate with torch.distributed: determine the DP rank of this process, and share batches among replicas.

Processes with the same DP rank (tensor, pipeline or context parallel) need the same batches. Each process may fetch the
batches itself, because repeated requests from a rank receive the same response. Alternatively, the first process
fetches each batch and broadcasts it to the others.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Literal

import numpy as np
import torch
import torch.distributed as dist

from tq_service.data.columns import FlatBatch, build, flatten
from tq_service.data.on_device import tensors_of
from tq_service.data.source import BatchStream, End, ExceptionWrapper, FetchedBatch
from tq_service.data.workers import BatchLayout, lay_out, open_batch
from tq_service.errors import InvalidArgumentError
from tq_service.wire import cuda
from tq_service.wire.host_memory import aligned
from tq_service.wire.mapping import Bytes

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

    Ranks = DeviceMesh | ProcessGroup

# While the first replica waits for a batch, all other replicas wait in a collective. The first replica sends "waiting"
# at this interval. Otherwise a long wait would exceed the collective's timeout and terminate the trainer.
_SIGN_OF_WAITING_SECONDS: Final = 10.0


def rank_and_size(group: Ranks) -> tuple[int, int]:
    """Return the rank of this process and the number of ranks. Mesh dimensions are flattened in row-major order.

    Raises:
        InvalidArgumentError: this process does not belong to the mesh or group.
    """
    if isinstance(group, dist.ProcessGroup):
        rank, size = dist.get_rank(group), dist.get_world_size(group)
    else:
        coordinate = group.get_coordinate()
        size = math.prod(group.shape)
        rank = -1 if coordinate is None else int(np.ravel_multi_index(tuple(coordinate), tuple(group.shape)))
    if rank < 0:
        raise InvalidArgumentError(
            f"this process, rank {dist.get_rank()}, does not belong to {group}; pass a mesh or group that contains it",
            field="dp_group",
        )
    return rank, size


def world_group() -> dist.ProcessGroup | None:
    """Return the group of all processes, or None if torch.distributed is not initialized."""
    return dist.group.WORLD if dist.is_available() and dist.is_initialized() else None


@dataclass(frozen=True, slots=True)
class _Place:
    """A placeholder for a tensor, with the position of its bytes in a buffer."""

    start: int
    dtype: torch.dtype
    shape: tuple[int, ...]

    def tensor(self, data: torch.Tensor) -> torch.Tensor:
        size = math.prod(self.shape) * self.dtype.itemsize
        return data[self.start : self.start + size].view(self.dtype).reshape(self.shape)


@dataclass(frozen=True, slots=True)
class DeviceBatchLayout:
    """A batch without tensor bytes. The bytes are sent separately, directly from device to device.

    Attributes:
        index: batch_index of the batch.
        meta: metadata of the samples.
        content: the columns, with placeholders for tensors.
        size_bytes: total size of all tensors in bytes, including the gaps for alignment.
        batch_bytes: `FetchedBatch.size_bytes` of the batch.
    """

    index: int
    meta: Any
    content: FlatBatch
    size_bytes: int
    batch_bytes: int

    def open(self, data: torch.Tensor) -> FetchedBatch:
        """Return the batch with its tensors as views of `data`, which has shape `(size_bytes,)`."""
        content = self.content.replacing(_Place, lambda place: place.tensor(data))
        return FetchedBatch(index=self.index, data=build(content), meta=self.meta, measured_bytes=self.batch_bytes)


def _empty(size_bytes: int, device: torch.device) -> torch.Tensor:
    return cuda.empty(size_bytes, device, cuda.current_stream(device))


def lay_out_on(device: torch.device, batch: FetchedBatch) -> tuple[DeviceBatchLayout, torch.Tensor]:
    """Copy a batch's tensors into a device buffer, using the current stream, and return the layout and the buffer."""
    content = flatten(batch.data)
    starts: dict[int, int] = {}
    end = 0
    for tensor in content.tensors():
        starts[id(tensor)], end = end, aligned(end + tensor.nbytes)
    data = _empty(end, device)
    for tensor in content.tensors():
        place = _Place(starts[id(tensor)], tensor.dtype, tuple(tensor.shape))
        place.tensor(data).copy_(tensor)
    places = content.replacing(
        torch.Tensor, lambda tensor: _Place(starts[id(tensor)], tensor.dtype, tuple(tensor.shape))
    )
    return DeviceBatchLayout(batch.index, batch.meta, places, end, batch.size_bytes), data


_Message = BatchLayout | DeviceBatchLayout | End | ExceptionWrapper | Literal["waiting", "closed"]
"""A message is an end marker, an error, "waiting", "closed", or a batch layout that precedes the batch's bytes."""


class ReplicaGroup:
    """The replicas of a DP rank. The first replica fetches batches for the group.

    Collectives run in the thread that reads the stream, in batch order. All replicas must read in the same order.
    """

    def __init__(self, group: Ranks) -> None:
        if not isinstance(group, dist.ProcessGroup):
            if group.ndim != 1:
                raise InvalidArgumentError(
                    f"replica_group has {group.ndim} dimensions, {group.mesh_dim_names}; pass a one-dimensional mesh, "
                    "or a process group of the replicas created with torch.distributed.new_group(ranks)",
                    field="replica_group",
                )
            group = group.get_group()
        if dist.get_rank(group) < 0:
            raise InvalidArgumentError(
                f"this process, rank {dist.get_rank()}, is not in replica_group; pass a group that contains it",
                field="replica_group",
            )
        self._group = group
        self._first = dist.get_global_rank(group, 0)
        self.asks = dist.get_rank(group) == 0
        # The config has the form "cpu:gloo,cuda:nccl".
        self._devices = [pair.partition(":")[0] for pair in str(dist.get_backend_config(group)).split(",")]
        # CPU data is sent from this device. It is the CPU if the group has a backend for CPU tensors.
        self._device = torch.device("cpu" if "cpu" in self._devices else self._devices[0])

    def sends_from(self, device: torch.device) -> bool:
        """Return whether tensors on this device are sent directly from the device."""
        return device.type in self._devices

    def send_there(self, message: DeviceBatchLayout, data: torch.Tensor) -> None:
        """Send a batch to all other replicas, directly from the device that holds its bytes."""
        self._exchange(message)
        self._broadcast(data)

    def receive_there(self, message: DeviceBatchLayout, device: torch.device) -> FetchedBatch:
        """Receive the bytes of a batch into device memory."""
        data = _empty(message.size_bytes, device)
        self._broadcast(data)
        return message.open(data)

    def send(self, message: _Message, parts: Sequence[Bytes] = ()) -> None:
        """Send a message to all other replicas, followed by the parts of the batch if the message is a batch layout."""
        self._exchange(message)
        if isinstance(message, BatchLayout):
            data = torch.empty(message.size_bytes, dtype=torch.uint8)
            array = data.numpy()
            for (begin, end), part in zip(message.places, parts, strict=True):
                array[begin:end] = part
            self._broadcast(data.to(self._device))

    def receive(self) -> tuple[_Message, Bytes]:
        """Wait for the next message from the first replica and, if it is a batch layout, for the batch's bytes."""
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


class ReplicaStream:
    """A stream of batches that the first replica reads and broadcasts to all other replicas.

    ::

        first     inner stream ──> thread that waits ──> read() ──┬──> its batch
                                                                  │ broadcast: layout and bytes; "waiting" every 10 s
        others                                           read() <─┘

    If reading fails in the first replica, all replicas raise the error.

    Args:
        group: the replicas.
        open_fetched: function that opens the inner stream, called only in the first replica.
        batch_index: index of the stream's first batch.
        device: device on which the inner stream holds its batches and the other replicas receive them. By default,
            batches are on the CPU.
    """

    def __init__(
        self,
        group: ReplicaGroup,
        open_fetched: Callable[[], BatchStream],
        batch_index: int,
        device: torch.device | None = None,
    ) -> None:
        self.next_index = batch_index
        self._group = group
        self._device = device
        # Set by `close`, or when a read finds that the first replica has closed its stream.
        self.closed = False
        self._inner = open_fetched() if group.asks else None
        self._reader = ThreadPoolExecutor(1, thread_name_prefix="tq-replicas")

    def read(self) -> FetchedBatch | End | None:
        """Wait for the next batch or the end marker. Return None if the stream is closed."""
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
            data = None
            if isinstance(got, FetchedBatch) and self._device is not None and got.arrival is not None:
                got.arrival.take(tensors_of(got.data))
                message, data = lay_out_on(self._device, got)
            elif isinstance(got, FetchedBatch):
                message, parts = lay_out(got)
        except Exception as error:
            self._group.send(ExceptionWrapper.of(error))
            raise
        if isinstance(message, DeviceBatchLayout) and data is not None:
            self._group.send_there(message, data)
        else:
            self._group.send(message, parts)
        return got

    def _receive(self) -> FetchedBatch | End | None:
        message, data = self._group.receive()
        while message == "waiting":
            message, data = self._group.receive()
        if isinstance(message, BatchLayout):
            return open_batch(message, data)
        if isinstance(message, DeviceBatchLayout) and self._device is not None:
            return self._group.receive_there(message, self._device)
        if isinstance(message, ExceptionWrapper):
            raise message.with_note("the first replica of this rank")
        if isinstance(message, End):
            return message
        self.closed = True
        return None

    def close(self) -> None:
        """Stop fetching. Idempotent. Other replicas are not notified, because they stop reading at the same point."""
        self.closed = True
        if self._inner is not None:
            self._inner.close()
        self._reader.shutdown(wait=False)
