"""Copies tensors between a CUDA device and the host through pinned memory, concurrently with the caller's kernels.

::

    down    caller's stream ── event ──> copy stream ── pinned memory ── event ──> the thread that sends the bytes
    up      pinned memory ──> copy stream ── one arena on the device ── event ──> the caller's stream

Each copy waits for an event in the caller's stream. If the copy is to the device, the caller's stream in turn waits for
an event in the copy stream. No step synchronizes the entire device or an entire stream. Copies to or from pinned host
memory (see `host_memory`), such as a region shared with the storage service, are direct. Otherwise, the bytes pass
through pinned blocks.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from itertools import chain
from typing import TYPE_CHECKING, Any, Final, Literal, TypeAlias, TypeVar

import numpy as np

from tq_service.errors import InvalidArgumentError
from tq_service.wire import cuda
from tq_service.wire.host_memory import ALIGNMENT_BYTES, BLOCKS, PINNED, aligned
from tq_service.wire.mapping import Bytes

if TYPE_CHECKING:
    from tq_service.wire.cuda import Device, Tensor

T = TypeVar("T")

# Copying a block takes a fraction of a millisecond, which is several times as long as the calls that start the copy.
_BLOCK_BYTES: Final = 8 << 20
_LARGE_CHUNK_BYTES: Final = 64 << 10  # large enough for a NumPy copy, during which other Python threads can run


def find_device(name: Any) -> Device | None:
    """Return the named device, with its index filled in, or None for the CPU.

    Raises:
        InvalidArgumentError: the device does not exist, torch is not installed, or `TQ_PINNED_BYTES` is not a number.
    """
    if name is None or str(name) == "cpu":
        return None
    PINNED.check_limit()
    try:
        return cuda.find(name)
    except ImportError:
        raise InvalidArgumentError(
            f"device is {name!r}, but torch is not installed. Install tq-service[data], or omit device", field="device"
        ) from None


def on_these_streams(work: Callable[[], T]) -> Callable[[], T]:
    """Wrap a function so that it uses the calling thread's current streams even if another thread runs it."""
    streams = cuda.side_streams()
    if not streams:
        return work

    def on_streams() -> T:
        with ExitStack() as stack:
            for stream in streams:
                stack.enter_context(cuda.using(stream))
            return work()

    return on_streams


_streams: dict[tuple[Device, str], cuda.Stream] = {}


def copy_stream(device: Device, direction: Literal["up", "down"]) -> cuda.Stream:
    """Return the process's stream for copies from the host to a device ("up") or from a device to the host ("down")."""
    # If two threads create a stream at the same time, both use the stream that is stored first.
    return _streams.get((device, direction)) or _streams.setdefault((device, direction), cuda.new_stream(device))


class DeviceBytes:
    """The bytes of a tensor on a device, in row-major order. Slicing returns another `DeviceBytes`.

    Attributes:
        device: device on which the tensor is stored.
    """

    __slots__ = ("_ready", "_values", "device")

    def __init__(self, values: Tensor, ready: cuda.Event) -> None:
        self._values = values
        self._ready = ready
        self.device = values.device

    @classmethod
    def of(cls, tensor: Tensor) -> DeviceBytes:
        """Return the bytes that a tensor contains once the current stream has finished all work submitted so far."""
        plain = tensor.detach().resolve_conj().resolve_neg().contiguous()
        # Do not use reshape here. For a single value, torch considers any stride contiguous, but view rejects some
        # strides.
        values = plain.as_strided((plain.numel(),), (1,)).view(cuda.load_torch().uint8)
        return cls(values, cuda.record(cuda.current_stream(plain.device)))

    def __len__(self) -> int:
        return int(self._values.numel())

    def __getitem__(self, part: slice) -> DeviceBytes:
        return DeviceBytes(self._values[part], self._ready)

    def copy_to(self, target: Bytes) -> cuda.Event:
        """Start copying the bytes to `target`.

        Keep `target` and this object alive until the returned event has occurred.
        """
        self._ready.synchronize()  # blocks this thread instead of the stream, which other callers also use
        stream = copy_stream(self.device, "down")
        cuda.copy(cuda.load_torch().from_numpy(target), self._values, stream)
        return cuda.record(stream)


Chunk: TypeAlias = memoryview | DeviceBytes
"""Bytes of a column, on the host or on a device."""


def on_host(chunks: Iterable[Chunk]) -> Iterator[list[memoryview]]:
    """Yield the bytes of the chunks on the host, in order.

    While the caller uses a block, the next block is copied from the device. So that memory can be reused, the caller
    should delete each list before requesting the next one.
    """
    here: list[memoryview] = []
    copies: deque[tuple[cuda.Event, Bytes, DeviceBytes]] = deque()

    def copied_blocks(most_left: int) -> Iterator[list[memoryview]]:
        while len(copies) > most_left:
            copies[0][0].synchronize()
            yield [copies.popleft()[1].data]

    try:
        for chunk in chunks:
            if isinstance(chunk, memoryview):
                yield from copied_blocks(0)
                here.append(chunk)
                continue
            if here:
                yield here
                here = []
            for start in range(0, len(chunk), _BLOCK_BYTES):
                part = chunk[start : start + _BLOCK_BYTES]
                block = BLOCKS.take(_BLOCK_BYTES, part.device)[: len(part)]
                copies.append((part.copy_to(block), block, part))
                del block
                yield from copied_blocks(1)
        yield from copied_blocks(0)
        if here:
            yield here
    finally:
        for event, *_ in copies:  # in case the caller stops iterating early
            event.synchronize()


def copy_to_host(target: Bytes, chunks: Iterable[Chunk]) -> None:
    """Copy chunks into contiguous host memory. Bytes on a device are copied to pinned memory directly."""
    view, end = target.data, 0
    pin = PINNED.find(target)
    copies: list[tuple[cuda.Event, DeviceBytes]] = []  # references chunks, so the device cannot reuse their memory

    def copy(start: int, source: memoryview) -> int:
        end = start + len(source)
        if len(source) < _LARGE_CHUNK_BYTES:
            view[start:end] = source
        else:
            target[start:end] = np.frombuffer(source, np.uint8)
        return end

    try:
        for chunk in chunks:
            if isinstance(chunk, memoryview):
                end = copy(end, chunk)
            elif pin is not None:
                start, end = end, end + len(chunk)
                copies.append((chunk.copy_to(target[start:end]), chunk))
            else:
                for (block,) in on_host([chunk]):
                    end = copy(end, block)
    finally:
        for event, _ in copies:
            event.synchronize()


def copied(chunk: DeviceBytes) -> memoryview:
    """Copy bytes from a device to new host memory."""
    data = np.empty(len(chunk), np.uint8)
    copy_to_host(data, [chunk])
    return data.data


def to_cpu(tensor: Tensor) -> Tensor:
    """Copy a tensor from a device to a contiguous tensor on the CPU."""
    torch = cuda.load_torch()
    values: Tensor = torch.empty(tensor.shape, dtype=tensor.dtype)
    copy_to_host(values.reshape(-1).view(torch.uint8).numpy(), [DeviceBytes.of(tensor)])
    return values


def upload(arrays: Sequence[Bytes], device: Device) -> list[Tensor]:
    """Copy byte arrays from the host into a single arena on a device, and return a view of the arena for each array.

    The views are aligned to 64 bytes. Adjacent arrays in pinned memory are copied in a single step. Arrays in pageable
    memory pass through pinned blocks. The device's current stream waits for the copies, but the calling thread does
    not. The caller must not modify the arrays afterward.

    Raises:
        torch.OutOfMemoryError: the device is out of memory; no memory remains allocated.
    """
    pins = [PINNED.find(array) if array.size else None for array in arrays]
    addresses = [array.ctypes.data for array in arrays]
    places = [0] * len(arrays)
    straight: list[tuple[int, Bytes]] = []
    last, end = None, 0
    for index in sorted(range(len(arrays)), key=addresses.__getitem__):
        pin, array = pins[index], arrays[index]
        if pin is None:
            continue
        start, span = straight[-1] if pin is last else (end, array[:0])
        offset = addresses[index] - span.ctypes.data
        if pin is last and offset <= aligned(span.size) and offset % ALIGNMENT_BYTES == 0:
            size = max(span.size, offset + array.size)
            straight[-1] = start, np.lib.stride_tricks.as_strided(span, (size,), (1,))
        else:
            start, offset = end, 0
            straight.append((start, array))
        places[index] = start + offset
        last, end = pin, aligned(start + straight[-1][1].size)
    staged_from = end
    staged: deque[tuple[int, Bytes]] = deque()
    for index, array in enumerate(arrays):
        if pins[index] is None:
            staged.append((end, array))
            places[index], end = end, aligned(end + array.size)
    stream = copy_stream(device, "up")
    arena = cuda.empty(end, device, stream)
    for start, source in chain(straight, _blocks(staged, staged_from, end, device)):
        cuda.copy(arena[start : start + source.size], cuda.load_torch().from_numpy(source), stream)
        PINNED.keep(cuda.record(stream), source, arrays, pins)
    current = cuda.current_stream(device)
    current.wait_event(cuda.record(stream))
    cuda.used_by(arena, current)
    return [arena[start : start + array.size] for start, array in zip(places, arrays, strict=True)]


def _blocks(waiting: deque[tuple[int, Bytes]], start: int, end: int, device: Device) -> Iterator[tuple[int, Bytes]]:
    """Yield bytes `start` to `end` of an arena in pinned blocks, each with its offset in the arena."""
    while start < end:
        stop = min(start + _BLOCK_BYTES, end)
        block = BLOCKS.take(_BLOCK_BYTES, device)[: stop - start]
        while waiting and waiting[0][0] < stop:
            at, array = waiting.popleft()
            size = min(array.size, stop - at)
            block[at - start : at - start + size] = array[:size]
            if size < array.size:
                waiting.appendleft((stop, array[size:]))
        yield start, block
        start = stop


def copy_on_device(target: Tensor, source: Tensor) -> None:
    """Make the current stream copy a tensor to another tensor of the same shape on the same device."""
    cuda.copy(target.detach(), source, cuda.current_stream(target.device))
