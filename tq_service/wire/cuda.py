"""The parts of `torch.cuda` that the package uses. Tests replace these functions with fakes that need no device.

Torch is imported only if a tensor is on a device or a device is named. No function here waits for a device, or for a
stream to drain. Only a thread that calls an event's `synchronize` waits, for the work before that event.
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
    """A point in a stream's work."""

    def query(self) -> bool:
        """Return whether the stream has reached the event."""
        ...

    def synchronize(self) -> None:
        """Block this thread until the stream has reached the event."""
        ...


class Stream(Protocol):
    """A queue of work on a device, executed in order."""

    def wait_event(self, event: Any) -> None:
        """Continue only after an event of another stream."""
        ...


def load_torch() -> Any:
    """Import torch and return the module."""
    import torch  # noqa: PLC0415  (torch is optional and slow to import)

    return torch


def find(name: Any) -> Device:
    """Return the named device, with its index.

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
            f"device is {name!r}; expected 'cpu' or one of the {count} CUDA devices that torch sees, from 'cuda:0' on. "
            "Get the data without a device, and move it afterwards",
            field="device",
        )
    return device if device.index is not None else load_torch().device("cuda", cuda.current_device())


def current_stream(device: Device) -> Stream:
    """Return the current stream of this thread."""
    stream: Stream = load_torch().cuda.current_stream(device)
    return stream


def side_streams() -> list[Stream]:
    """Return the current streams of this thread that are not the default streams of their devices."""
    cuda = getattr(sys.modules.get("torch"), "cuda", None)
    if cuda is None or not cuda.is_initialized():
        return []
    streams = map(cuda.current_stream, range(cuda.device_count()))
    return [stream for stream in streams if stream != cuda.default_stream(stream.device)]


def new_stream(device: Device) -> Stream:
    """Return a new stream."""
    stream: Stream = load_torch().cuda.Stream(device)
    return stream


def using(stream: Stream) -> AbstractContextManager[Any]:
    """Return a context manager that makes a stream this thread's current stream."""
    context: AbstractContextManager[Any] = load_torch().cuda.stream(stream)
    return context


def record(stream: Any) -> Event:
    """Return an event after all work submitted to the stream so far; a thread that waits for the event sleeps."""
    event: Event = stream.record_event(load_torch().cuda.Event(blocking=True))
    return event


def empty(size: int, device: Device, stream: Stream) -> Tensor:
    """Allocate bytes on the device for use by the stream; raise torch's OutOfMemoryError if the device is full."""
    with using(stream):
        values: Tensor = load_torch().empty(size, dtype=load_torch().uint8, device=device)
    return values


def copy(target: Tensor, source: Tensor, stream: Stream) -> None:
    """Make the stream copy bytes from the host to a device, or back.

    With pinned memory, the call returns at once: the host memory must stay unchanged and pinned until the stream has
    completed the copy. With pageable memory, the call returns once the bytes have been read or written.
    """
    with using(stream):
        target.copy_(source, non_blocking=True)


def used_by(tensor: Tensor, stream: Any) -> None:
    """Prevent reuse of a freed tensor's memory until the stream has done the work submitted to it by then."""
    tensor.record_stream(stream)


def register(address: int, size: int, device: Device) -> bool:
    """Pin memory of this process for all devices; return whether the system allowed it.

    The driver pins pages for writing. It replaces the pages of a private file mapping with copies. The memfd of a
    shared mapping cannot be sealed against writing while pages are pinned.
    """
    with load_torch().cuda.device(device):  # otherwise, the driver would also create a context on the first device
        if int(load_torch().cuda.cudart().cudaHostRegister(address, size, 0)) == 0:
            return True
        # The driver keeps the error and raises it in this thread's next kernel, so launch one here.
        with suppress(RuntimeError):
            load_torch().zeros(1, device=device)
    return False


def unregister(address: int, device: Device) -> None:
    """Unpin memory before it is unmapped; no copy may use the memory anymore."""
    with load_torch().cuda.device(device):
        load_torch().cuda.cudart().cudaHostUnregister(address)
