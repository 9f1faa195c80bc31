"""The functions of `torch.cuda` that this package uses. Tests replace these functions with fakes that need no device.

Torch is imported only if a tensor is on a device or the caller specifies one. No function in this module waits for an
entire device or stream. Only an event's `synchronize` method and a `copy` of pageable memory block the calling thread.
`synchronize` returns once the work before the event is done.
"""

from __future__ import annotations

import sys
from contextlib import AbstractContextManager, suppress
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

from tq_service.errors import InvalidArgumentError

if TYPE_CHECKING:
    import torch

    Device: TypeAlias = torch.device
    Tensor: TypeAlias = torch.Tensor


class Event(Protocol):
    """A point in the sequence of work that a CUDA stream performs."""

    def query(self) -> bool:
        """Return whether the stream has reached the event."""
        ...

    def synchronize(self) -> None:
        """Block this thread until the stream has reached the event."""
        ...


class Stream(Protocol):
    """A queue of work that a device executes in order."""

    def wait_event(self, event: Any) -> None:
        """Make all subsequent work in this stream wait for an event of another stream."""
        ...


def load_torch() -> Any:
    """Import and return torch."""
    import torch  # noqa: PLC0415  (torch is optional and slow to import)

    return torch


def find(name: Any) -> Device:
    """Return the named device, with its index filled in.

    Raises:
        InvalidArgumentError: the device does not exist.
    """
    try:
        device: Device = load_torch().device(name)
    except (RuntimeError, TypeError) as error:
        raise InvalidArgumentError(
            f"device is {name!r}; expected a name such as 'cuda:0' ({error})", field="device"
        ) from None
    cuda = load_torch().cuda
    count = cuda.device_count() if cuda.is_available() else 0
    if device.type != "cuda" or (device.index or 0) >= count:
        raise InvalidArgumentError(
            f"device is {name!r}; expected 'cpu' or one of the {count} CUDA devices that torch detects, starting at "
            "'cuda:0'. Alternatively, get the data without a device, and move it afterward",
            field="device",
        )
    return device if device.index is not None else load_torch().device("cuda", cuda.current_device())


def current_stream(device: Device) -> Stream:
    """Return the current stream of this thread on a device."""
    stream: Stream = load_torch().cuda.current_stream(device)
    return stream


def side_streams() -> list[Stream]:
    """Return the current streams of this thread, excluding the default streams of devices."""
    cuda = getattr(sys.modules.get("torch"), "cuda", None)
    if cuda is None or not cuda.is_initialized():
        return []
    streams = map(cuda.current_stream, range(cuda.device_count()))
    return [stream for stream in streams if stream != cuda.default_stream(stream.device)]


def new_stream(device: Device) -> Stream:
    """Create a stream on a device."""
    stream: Stream = load_torch().cuda.Stream(device)
    return stream


def using(stream: Stream) -> AbstractContextManager[Any]:
    """Return a context manager that makes the given stream the current stream of this thread."""
    context: AbstractContextManager[Any] = load_torch().cuda.stream(stream)
    return context


def record(stream: Any) -> Event:
    """Record an event after all work submitted to the stream so far. Threads sleep while they wait for the event."""
    event: Event = stream.record_event(load_torch().cuda.Event(blocking=True))
    return event


def empty(size: int, device: Device, stream: Stream) -> Tensor:
    """Allocate device memory for use in a stream. If the device is full, torch raises its OutOfMemoryError."""
    with using(stream):
        values: Tensor = load_torch().empty(size, dtype=load_torch().uint8, device=device)
    return values


def copy(target: Tensor, source: Tensor, stream: Stream) -> None:
    """Copy bytes between the host and a device, in either direction, on a stream.

    If the host memory is pinned, the call returns immediately. The memory must then remain unchanged and pinned until
    the stream has completed the copy. If the host memory is pageable, the call returns only once the bytes have been
    read or written.
    """
    with using(stream):
        target.copy_(source, non_blocking=True)


def used_by(tensor: Tensor, stream: Any) -> None:
    """Keep a deleted tensor's memory from being reused until the stream has finished all work submitted so far."""
    tensor.record_stream(stream)


def register(address: int, size: int, device: Device) -> bool:
    """Pin memory of this process for all devices. Return whether the operating system allowed the memory to be pinned.

    The driver pins pages for writing, and would therefore replace pages of a private file mapping with copies. While
    pages of a shared mapping are pinned, the mapping's memfd cannot be sealed against writing.
    """
    with load_torch().cuda.device(device):  # otherwise, the driver would also create a context on the first device
        if int(load_torch().cuda.cudart().cudaHostRegister(address, size, 0)) == 0:
            return True
        # The driver would raise the error again in the next kernel of this thread. Launch a kernel here to clear the
        # error.
        with suppress(RuntimeError):
            load_torch().zeros(1, device=device)
    return False


def unregister(address: int, device: Device) -> None:
    """Unpin memory before it is unmapped. All copies that use the memory must have finished."""
    with load_torch().cuda.device(device):
        load_torch().cuda.cudart().cudaHostUnregister(address)
