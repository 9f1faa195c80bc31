"""Tensors on a CUDA device: copies to the host and back, through pinned memory, in parallel with the caller's kernels.

::

    down    caller's stream ── event ──> copy stream ── a pinned block ── event ──> the thread that sends the block
    up      pinned memory ──> copy stream ── one arena on the device ── event ──> the caller's stream

A copy waits for one event of the caller's stream, and the caller's stream for one event of the copy. Nothing waits for
the device, or for a stream to run empty. Copies of pageable memory are several times slower. A process pins at most
`TQ_PINNED_BYTES`; if no more may be pinned, or the system refuses, pageable memory is used instead.

Torch is imported only if a tensor is on a device or a device is named.
"""

from __future__ import annotations

import logging
import mmap
import os
import sys
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, suppress
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import TYPE_CHECKING, Any, Final, Literal, Protocol, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

from tq_service.errors import InvalidArgumentError
from tq_service.log_message import LogMessage

if TYPE_CHECKING:
    import torch

    Device: TypeAlias = torch.device
    Tensor: TypeAlias = torch.Tensor

T = TypeVar("T")
Bytes: TypeAlias = NDArray[np.uint8]
_log = logging.getLogger(__name__)

LIMIT_VARIABLE: Final = "TQ_PINNED_BYTES"
_DEFAULT_LIMIT_BYTES: Final = 1 << 30
# Takes a fraction of a millisecond to copy, and several times as long as the calls that start the copy.
_BLOCK_BYTES: Final = 8 << 20
_GRAIN_BYTES: Final = 2 << 20  # a huge page
# A block may be this much larger than requested, since batches differ a little in size.
_MOST_SLACK: Final = 1.25
_ALIGNMENT_BYTES: Final = 64


class Event(Protocol):
    """A point in the work of a stream."""

    def query(self) -> bool:
        """Return whether the stream has reached it."""
        ...

    def synchronize(self) -> None:
        """Block this thread until the stream has reached it."""
        ...


class Stream(Protocol):
    """Work of a device, done in order."""

    def wait_event(self, event: Any) -> None:
        """Continue only after an event of another stream."""
        ...


class Accelerator(Protocol):
    """The functions of `torch.cuda` that are needed; tests replace them with a stand-in that needs no device."""

    def find(self, name: Any) -> Device:
        """Return the device of a name, with its index; raise InvalidArgumentError if it does not exist."""
        ...

    def current_stream(self, device: Device) -> Stream:
        """Return the current stream of this thread."""
        ...

    def side_streams(self) -> list[Stream]:
        """Return the current streams of this thread that are not the default streams of their devices."""
        ...

    def new_stream(self, device: Device) -> Stream:
        """Return a new stream."""
        ...

    def using(self, stream: Stream) -> AbstractContextManager[Any]:
        """Make it the current stream of this thread within a `with`."""
        ...

    def record(self, stream: Stream) -> Event:
        """Return the event after all work submitted to the stream so far."""
        ...

    def empty(self, size: int, device: Device, stream: Stream) -> Tensor:
        """Allocate bytes on the device for use by the stream; raise torch's OutOfMemoryError if the device is full."""
        ...

    def copy(self, target: Tensor, source: Tensor, stream: Stream) -> None:
        """Have the stream copy bytes of the host to a device, or back."""
        ...

    def used_by(self, tensor: Tensor, stream: Stream) -> None:
        """Reuse the memory of a tensor, once it is freed, only after the work submitted to the stream so far."""
        ...

    def register(self, address: int, size: int, device: Device) -> bool:
        """Pin memory of this process; return whether the system granted it."""
        ...

    def unregister(self, address: int, device: Device) -> None:
        """Unpin memory."""
        ...


def _torch() -> Any:
    import torch  # noqa: PLC0415  (torch is optional and slow to import)

    return torch


class _Cuda:
    """`torch.cuda`."""

    def find(self, name: Any) -> Device:
        torch = _torch()
        try:
            device: Device = torch.device(name)
        except (RuntimeError, TypeError) as error:
            raise InvalidArgumentError(
                f"device is {name!r}; expected a name such as 'cuda:0' ({error})", field="device"
            ) from None
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if device.type != "cuda" or (device.index or 0) >= count:
            raise InvalidArgumentError(
                f"device is {name!r}; expected 'cpu' or one of the {count} CUDA devices that torch sees, 'cuda:0' on. "
                "Get the data without it, and move it",
                field="device",
            )
        return device if device.index is not None else torch.device("cuda", torch.cuda.current_device())

    def current_stream(self, device: Device) -> Stream:
        stream: Stream = _torch().cuda.current_stream(device)
        return stream

    def side_streams(self) -> list[Stream]:
        cuda = getattr(sys.modules.get("torch"), "cuda", None)
        if cuda is None or not cuda.is_initialized():
            return []
        streams = map(cuda.current_stream, range(cuda.device_count()))
        return [stream for stream in streams if stream != cuda.default_stream(stream.device)]

    def new_stream(self, device: Device) -> Stream:
        stream: Stream = _torch().cuda.Stream(device)
        return stream

    def using(self, stream: Any) -> AbstractContextManager[Any]:
        context: AbstractContextManager[Any] = _torch().cuda.stream(stream)
        return context

    def record(self, stream: Any) -> Event:
        event: Event = stream.record_event(_torch().cuda.Event(blocking=True))  # a thread that waits for it sleeps
        return event

    def empty(self, size: int, device: Device, stream: Stream) -> Tensor:
        torch = _torch()
        with self.using(stream):
            values: Tensor = torch.empty(size, dtype=torch.uint8, device=device)
        return values

    def copy(self, target: Tensor, source: Tensor, stream: Stream) -> None:
        with self.using(stream):
            target.copy_(source, non_blocking=True)

    def used_by(self, tensor: Tensor, stream: Any) -> None:
        tensor.record_stream(stream)

    def register(self, address: int, size: int, device: Device) -> bool:
        torch = _torch()
        with torch.cuda.device(device):  # else the driver would make a context on the first device, too
            if int(torch.cuda.cudart().cudaHostRegister(address, size, 0)) == 0:
                return True
            # The driver keeps the error for the next kernel of this thread, which would raise it: let it be this one.
            with suppress(RuntimeError):
                torch.zeros(1, device=device)
        return False

    def unregister(self, address: int, device: Device) -> None:
        torch = _torch()
        with torch.cuda.device(device):
            torch.cuda.cudart().cudaHostUnregister(address)


accelerator: Accelerator = _Cuda()


def find_device(name: Any) -> Device | None:
    """Return the device of a name, with its index; None for the CPU.

    Raises:
        InvalidArgumentError: the device does not exist, torch is not installed, or `TQ_PINNED_BYTES` is not a number.
    """
    if name is None or str(name) == "cpu":
        return None
    PINNED.check_limit()
    try:
        return accelerator.find(name)
    except ImportError:
        raise InvalidArgumentError(
            f"device is {name!r}, and torch is not installed; expected None. Install tq-service[data]", field="device"
        ) from None


def on_these_streams(work: Callable[[], T]) -> Callable[[], T]:
    """Return the same work for another thread, with the current streams of this thread."""
    streams = accelerator.side_streams()
    if not streams:
        return work

    def on_streams() -> T:
        with ExitStack() as stack:
            for stream in streams:
                stack.enter_context(accelerator.using(stream))
            return work()

    return on_streams


class Registration:
    """Memory that is pinned until this object is gone; the mapping outlives it."""

    __slots__ = ("__weakref__", "mapping")

    def __init__(self, mapping: mmap.mmap) -> None:
        self.mapping = mapping


class PinnedMemory:
    """Pins memory up to a limit: blocks, which are reused, and mappings of callers.

    Threads may share it. Finalizers can run at any point of any thread, so ours only append to a deque, and the lock is
    reentrant for those of others.

    Args:
        limit_bytes: most bytes together; None: `TQ_PINNED_BYTES`, then 1 GiB.
    """

    def __init__(self, limit_bytes: int | None = None) -> None:
        self._limit = limit_bytes
        self._lock = threading.RLock()  # of all below
        self._ranges: dict[int, int] = {}  # sizes of pinned memory by address
        self._idle: list[Registration] = []
        self._returned: deque[Registration] = deque()
        self._unpinned: deque[int] = deque()
        self._in_use: dict[Event, Sequence[Any]] = {}

    @property
    def pinned_bytes(self) -> int:
        """Bytes that are pinned."""
        with self._lock:
            self._tidy()
            return sum(self._ranges.values())

    def check_limit(self) -> None:
        """Read the limit; raise InvalidArgumentError if `TQ_PINNED_BYTES` is not a number."""
        self._limit_bytes()

    def _limit_bytes(self) -> int:
        if self._limit is None:
            text = os.environ.get(LIMIT_VARIABLE) or str(_DEFAULT_LIMIT_BYTES)
            if not text.isdecimal():
                raise InvalidArgumentError(f"{LIMIT_VARIABLE} is {text!r}; expected a number of bytes. 0 pins none")
            self._limit = int(text)
        return self._limit

    def take(self, size: int, device: Device) -> Bytes | None:
        """Return a pinned array of `size` arbitrary bytes; None if no more may be pinned.

        Its memory is reused after the array and all views of it are gone.
        """
        while True:
            with self._lock:
                self._tidy()
                block = self._reused(size) or self._new(size, device)
                waited_for = next(iter(self._in_use), None) if block is None else None
            if block is not None:
                array: Bytes = np.frombuffer(block.mapping, np.uint8, size)
                weakref.finalize(array, self._returned.append, block).atexit = False
                return array
            if waited_for is None:
                return None
            waited_for.synchronize()

    def _reused(self, size: int) -> Registration | None:
        most = size * _MOST_SLACK + _GRAIN_BYTES
        found = next((block for block in self._idle if size <= len(block.mapping) <= most), None)
        if found is not None:
            self._idle.remove(found)
        return found

    def _new(self, size: int, device: Device) -> Registration | None:
        size = -(-size // _GRAIN_BYTES) * _GRAIN_BYTES
        if size > self._limit_bytes():
            return None
        while self._idle and self._is_over(size):
            del self._idle[0]  # the least recently used one
            self._tidy()
        if self._is_over(size):
            return None
        mapping = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            mapping.madvise(mmap.MADV_HUGEPAGE)
        if hasattr(mmap, "MADV_DONTFORK"):  # else a write after a fork gets a new page, which is not pinned
            mapping.madvise(mmap.MADV_DONTFORK)
        return self._register(mapping, device)

    def _is_over(self, size: int) -> bool:
        return sum(self._ranges.values()) + size > self._limit_bytes()

    def register(self, mapping: mmap.mmap, device: Device) -> Registration | None:
        """Pin a shared mapping as long as the returned object exists; None if the mapping stays pageable.

        Pinning copies a private mapping of a file, and a pinned memfd cannot be sealed: neither belongs here.
        """
        with self._lock:
            self._tidy()
            return None if self._is_over(len(mapping)) else self._register(mapping, device)

    def _register(self, mapping: mmap.mmap, device: Device) -> Registration | None:
        address, size = np.frombuffer(mapping, np.uint8).ctypes.data, len(mapping)
        if not accelerator.register(address, size, device):
            self._limit = sum(self._ranges.values())  # no further attempts
            _log.warning(
                LogMessage(
                    "memory could not be pinned; copies to and from the device are slower", bytes=size, kept=self._limit
                )
            )
            return None
        self._ranges[address] = size
        registration = Registration(mapping)
        # The finalizer owns the mapping too, so that memory is unpinned before it is unmapped.
        unpin = partial(accelerator.unregister, address, device)
        weakref.finalize(registration, _unpin, os.getpid(), self._unpinned, address, unpin, mapping).atexit = False
        return registration

    def _tidy(self) -> None:
        """Account for returned blocks, unpinned memory and completed copies."""
        for event in [event for event in self._in_use if event.query()]:
            self._in_use.pop(event, None)
        while self._returned:
            self._idle.append(self._returned.popleft())
        while self._unpinned:
            del self._ranges[self._unpinned.popleft()]

    def keep(self, event: Event, *things: Any) -> None:
        """Keep things that a stream reads or writes until it reaches an event."""
        with self._lock:
            self._in_use[event] = things

    def tidy(self) -> None:
        """Release things that `keep` holds for completed copies."""
        with self._lock:
            self._tidy()

    def base_of(self, array: Bytes) -> int | None:
        """Return the address of the pinned memory that contains an array; None if the array is pageable."""
        with self._lock:
            self._tidy()
            start = array.ctypes.data
            found = (base for base, size in self._ranges.items() if base <= start and start + array.size <= base + size)
            return next(found, None)


def _unpin(process_id: int, unpinned: deque[int], address: int, unpin: Callable[[], None], _mapping: mmap.mmap) -> None:
    if os.getpid() == process_id:  # a forked child has no CUDA
        unpinned.append(address)
        unpin()


# One per process, since the limit and the streams are shared by all clients and loaders.
PINNED: Final = PinnedMemory()
_streams: dict[tuple[Accelerator, Device, str], Stream] = {}


def _block(device: Device) -> Bytes:
    block = PINNED.take(_BLOCK_BYTES, device)
    return np.empty(_BLOCK_BYTES, np.uint8) if block is None else block


def copy_stream(device: Device, direction: Literal["up", "down"]) -> Stream:
    """Return the stream of this process that copies to a device, or from it."""
    key = accelerator, device, direction
    # If two threads create a stream at the same time, both use the one that is stored first.
    return _streams.get(key) or _streams.setdefault(key, accelerator.new_stream(device))


class DeviceBytes:
    """The bytes of a tensor on a device, in row-major order; `on_host` copies them down. Slices are DeviceBytes too."""

    __slots__ = ("_ready", "_values")

    def __init__(self, values: Tensor, ready: Event) -> None:
        self._values = values
        self._ready = ready

    @classmethod
    def of(cls, tensor: Tensor) -> DeviceBytes:
        """Return the bytes of a tensor, as they are after the work submitted to the current stream so far."""
        torch = _torch()
        plain = tensor.detach().resolve_conj().resolve_neg().contiguous()
        # Not reshape: a single value counts as contiguous with any stride, which view does not accept.
        values = plain.as_strided((plain.numel(),), (1,)).view(torch.uint8)
        return cls(values, accelerator.record(accelerator.current_stream(plain.device)))

    def __len__(self) -> int:
        return int(self._values.numel())

    def __getitem__(self, part: slice) -> DeviceBytes:
        return DeviceBytes(self._values[part], self._ready)

    def begin(self) -> _Copy:
        """Begin to copy them into one block."""
        torch = _torch()
        device = self._values.device
        # This thread waits, not the stream: copies of other callers go over it too.
        self._ready.synchronize()
        block, stream = _block(device)[: len(self)], copy_stream(device, "down")
        accelerator.copy(torch.from_numpy(block), self._values, stream)
        event = accelerator.record(stream)
        PINNED.keep(event, block, self._values)
        return _Copy(block, event)


@dataclass(frozen=True, slots=True)
class _Copy:
    """Bytes that are on their way to the host."""

    block: Bytes
    event: Event

    def finish(self) -> memoryview:
        """Wait for them."""
        self.event.synchronize()
        PINNED.tidy()
        return self.block.data


Chunk: TypeAlias = memoryview | DeviceBytes
"""Bytes of a column, on the host or on a device."""


def on_host(chunks: Iterable[Chunk]) -> Iterator[list[memoryview]]:
    """Yield the bytes of chunks on the host, in order, while the next block is copied down.

    Drop each list before requesting the next one, so that its memory can be reused.
    """
    here: list[memoryview] = []
    under_way: deque[_Copy] = deque()
    for chunk in chunks:
        if isinstance(chunk, memoryview):
            while under_way:
                yield [under_way.popleft().finish()]
            here.append(chunk)
            continue
        if here:
            yield here
            here = []
        for start in range(0, len(chunk), _BLOCK_BYTES):
            under_way.append(chunk[start : start + _BLOCK_BYTES].begin())
            if len(under_way) > 1:
                yield [under_way.popleft().finish()]
    while under_way:
        yield [under_way.popleft().finish()]
    if here:
        yield here


def copied(chunk: DeviceBytes) -> memoryview:
    """Copy bytes of a device into new memory of the host."""
    data, filled = np.empty(len(chunk), np.uint8), 0
    for (view,) in on_host([chunk]):
        data[filled : filled + len(view)] = view
        filled += len(view)
    return data.data


def to_cpu(tensor: Tensor) -> Tensor:
    """Return the values of a tensor on a device as a contiguous one on the CPU."""
    torch = _torch()
    data = copied(DeviceBytes.of(tensor))
    if not len(data):
        empty: Tensor = torch.empty(tensor.shape, dtype=tensor.dtype)
        return empty
    values: Tensor = torch.frombuffer(data, dtype=tensor.dtype).reshape(tensor.shape)
    return values


def upload(arrays: Sequence[Bytes], device: Device) -> list[Tensor]:
    """Return bytes `(size,)` of the host as views of one arena on a device, each at a multiple of 64 bytes.

    Arrays within one pinned mapping are copied together, in one copy; others through pinned blocks. The current stream
    waits for the copies, this thread does not. Do not write to the arrays afterwards.

    Raises:
        torch.OutOfMemoryError: the device is full; nothing is kept.
    """
    spans: dict[int, list[int]] = {}
    loose: list[int] = []
    for index, array in enumerate(arrays):
        is_aligned = array.size and array.ctypes.data % _ALIGNMENT_BYTES == 0
        base = PINNED.base_of(array) if is_aligned else None
        (loose if base is None else spans.setdefault(base, [])).append(index)
    places = np.zeros(len(arrays), np.int64)
    end = 0
    copies: list[tuple[int, Bytes]] = []
    for indexes in spans.values():
        addresses = np.array([arrays[index].ctypes.data for index in indexes])
        places[indexes] = addresses - addresses.min() + end
        first = arrays[indexes[int(addresses.argmin())]]
        size = int((addresses + [arrays[index].size for index in indexes]).max() - addresses.min())
        copies.append((end, np.lib.stride_tricks.as_strided(first, (size,), (1,))))
        end = aligned(end + size)
    loose_at = end
    for index in loose:
        places[index] = end
        end = aligned(end + arrays[index].size)
    stream = copy_stream(device, "up")
    arena = accelerator.empty(end, device, stream)
    for start, span in copies:
        _copy_up(arena, start, span, stream)
    for start, block in _blocks([(int(places[index]), arrays[index]) for index in loose], loose_at, end, device):
        _copy_up(arena, start, block, stream)
    event, current = accelerator.record(stream), accelerator.current_stream(device)
    PINNED.keep(event, arrays)
    current.wait_event(event)
    accelerator.used_by(arena, current)
    return [arena[start : start + array.size] for start, array in zip(places.tolist(), arrays, strict=True)]


def copy_on_device(target: Tensor, source: Tensor) -> None:
    """Have the current stream copy a tensor of a device to one of the same shape there."""
    accelerator.copy(target.detach(), source, accelerator.current_stream(target.device))


def pinned_arrays(sizes: Sequence[int], device: Device) -> list[Bytes] | None:
    """Return arrays of these sizes in one pinned block, for `upload`; None if no more may be pinned."""
    *starts, end = accumulate(map(aligned, sizes), initial=0)
    block = PINNED.take(max(end, 1), device)
    if block is None:
        return None
    return [block[start : start + size] for start, size in zip(starts, sizes, strict=True)]


def aligned(size: int) -> int:
    """Return the next multiple of the alignment of columns."""
    return -(-size // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES


def _copy_up(arena: Tensor, start: int, source: Bytes, stream: Stream) -> None:
    accelerator.copy(arena[start : start + source.size], _torch().from_numpy(source), stream)
    PINNED.keep(accelerator.record(stream), source)


def _blocks(placed: Sequence[tuple[int, Bytes]], start: int, end: int, device: Device) -> Iterator[tuple[int, Bytes]]:
    """Yield the bytes from `start` to `end` of an arena in pinned blocks, each with its start."""
    waiting = deque(placed)
    while start < end:
        stop = min(start + _BLOCK_BYTES, end)
        block = _block(device)[: stop - start]
        while waiting and waiting[0][0] < stop:
            at, array = waiting.popleft()
            size = min(array.size, stop - at)
            block[at - start : at - start + size] = array[:size]
            if size < array.size:
                waiting.appendleft((stop, array[size:]))
        yield start, block
        start = stop
