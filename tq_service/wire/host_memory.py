"""Host memory of this process for the bytes of puts and gets: reusable blocks, and pinned memory for copies to devices.

::

    BLOCKS   take: an unused or new block -> array -> last view is deleted -> unused -> reused or freed
    PINNED   pin: registered with the driver once -> Pin -> last reference is deleted -> stays registered until
             others need its share of TQ_PINNED_BYTES, or it is unmapped

Mapping new pages takes the operating system longer than receiving the bytes. In measurements, system time alone made
the throughput of 256 MiB gets vary from 0.5 to 2.2 GB/s. A training loop receives and discards batches of similar size,
so it can reuse a few blocks for all of them.

The following memory is pinned: blocks for a device, buffers filled by loader workers, and regions of a storage service
on this host. Copies to or from pageable memory would be several times slower. Once the limit on pinned memory is
reached or the operating system refuses to pin more, additional memory stays pageable.

Arrays can be garbage-collected at any time and in any thread, so their finalizers take no locks.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from tq_service.errors import InvalidArgumentError
from tq_service.log_message import LogMessage
from tq_service.wire import cuda
from tq_service.wire.mapping import HUGE_PAGE_BYTES, Bytes, Mapping

if TYPE_CHECKING:
    from tq_service.wire.cuda import Device

_log = logging.getLogger(__name__)

ALIGNMENT_BYTES: Final = 64
"""Alignment in bytes of the columns in a memory block."""

LIMIT_VARIABLE: Final = "TQ_PINNED_BYTES"
_DEFAULT_LIMIT_BYTES: Final = 1 << 30

# Below this block size, malloc reuses memory well enough. See `keep_frame_buffers`.
_SMALL_BYTES: Final = 4 << 20
# Sufficient for batches of 1 GiB. A process with smaller batches retains only the few blocks used in the last minute.
_KEPT_BYTES: Final = 2 << 30
_KEPT_SECONDS: Final = 60.0
# Maximum ratio between the size of a reused block and the requested size. It exceeds 1, because batch sizes vary
# slightly.
_MOST_SLACK: Final = 1.25


def aligned(size: int) -> int:
    """Round a size up to a multiple of the column alignment."""
    return -(-size // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


def place_columns(sizes: Iterable[int]) -> tuple[list[int], int]:
    """Return the offset of each column in a memory block shared by columns of the given sizes, and the block's size."""
    *starts, end = accumulate(map(aligned, sizes), initial=0)
    return starts, end


class Pin:
    """A reference to pinned memory, which remains pinned while this object exists.

    Attributes:
        mapping: mapping that contains the pinned memory.
    """

    __slots__ = ("__weakref__", "mapping")

    def __init__(self, mapping: Mapping) -> None:
        self.mapping = mapping


@dataclass(slots=True, eq=False)
class _Pinned:
    """A pinned mapping. While the mapping is in use, `pin` returns its `Pin`."""

    address: int
    size: int
    is_shared: bool
    mapping: weakref.ref[Mapping]
    pin: Callable[[], Pin | None] = lambda: None

    def use(self) -> Pin | None:
        """Return the pin of the mapping, or None if the mapping is being unmapped."""
        mapping = self.mapping()
        pin = self.pin() or (None if mapping is None else Pin(mapping))
        if pin is not None:
            self.pin = weakref.ref(pin)
        return pin


class PinnedMemory:
    """A registry that pins mappings up to a limit. Thread-safe.

    When the limit is reached, the registry unpins the least recently used mappings that are not in use. A mapping is
    unpinned before it is unmapped, but only after the last copy that uses it has finished. `keep` therefore retains the
    arrays of each copy until the copy has finished. The lock is reentrant, because a finalizer can run in a thread that
    holds the lock.

    Args:
        limit_bytes: maximum total number of pinned bytes. If None, the value of `TQ_PINNED_BYTES` is used, or 1 GiB if
            this variable is unset.
    """

    def __init__(self, limit_bytes: int | None = None) -> None:
        self._limit = limit_bytes
        self._granted: dict[bool, int] = {}  # maximum bytes that the operating system agreed to pin, by is_shared
        self._lock = threading.RLock()
        self._pinned: dict[int, _Pinned] = {}  # pinned mappings by address, least recently used first
        self._unpinned: deque[_Pinned] = deque()
        self._copies: dict[cuda.Event, Sequence[Any]] = {}

    @property
    def pinned_bytes(self) -> int:
        """Total number of pinned bytes."""
        with self._lock:
            self.tidy()
            return self._used_bytes()

    def check_limit(self) -> None:
        """Validate the configured limit. Raise InvalidArgumentError if `TQ_PINNED_BYTES` is not a number."""
        self._limit_bytes()

    def _limit_bytes(self) -> int:
        if self._limit is None:
            text = os.environ.get(LIMIT_VARIABLE) or str(_DEFAULT_LIMIT_BYTES)
            if not text.isdecimal():
                raise InvalidArgumentError(
                    f"{LIMIT_VARIABLE} is {text!r}; expected a number of bytes, or 0 to disable pinning"
                )
            self._limit = int(text)
        return self._limit

    def _used_bytes(self, is_shared: bool | None = None) -> int:
        return sum(each.size for each in self._pinned.values() if is_shared in (None, each.is_shared))

    def _may_pin(self, mapping: Mapping) -> bool:
        limit, size = self._limit_bytes(), mapping.size
        granted = self._granted.get(mapping.is_shared, limit)
        return self._used_bytes() + size <= limit and self._used_bytes(mapping.is_shared) + size <= granted

    def pin(self, mapping: Mapping, device: Device) -> Pin | None:
        """Pin a mapping, or return its existing pin. Return None if the mapping remains pageable.

        The mapping must be either an anonymous mapping or a shared mapping of a memfd. If a private mapping of a file
        were pinned, the driver would copy each page. A pinned memfd can no longer be sealed against writing, but this
        does not affect regions, which are never sealed.
        """
        while mapping.size <= self._limit_bytes():
            with self._lock:
                self.tidy()
                pinned = self._pinned.pop(mapping.address, None) or self._register(mapping, device)
                if pinned is not None:
                    self._pinned[mapping.address] = pinned
                    return pinned.use()
                copy = next(iter(self._copies), None)
            if copy is None:
                break
            copy.synchronize()  # afterwards, the memory used by the copy may be unpinned
        return None

    def find(self, array: Bytes) -> Pin | None:
        """Return the pin of the memory that contains an array, or None if the memory is pageable."""
        start = array.ctypes.data
        with self._lock:
            self.tidy()
            for pinned in self._pinned.values():
                if pinned.address <= start and start + array.size <= pinned.address + pinned.size:
                    return pinned.use()
        return None

    def _register(self, mapping: Mapping, device: Device) -> _Pinned | None:
        for other in list(self._pinned.values()):
            if self._may_pin(mapping):
                break
            if other.pin() is None and (unused := other.mapping()) is not None:
                with suppress(IndexError):  # raised if the mapping is being unmapped
                    unused.on_unmap.pop()()
                self.tidy()
        if not self._may_pin(mapping):
            return None
        if not cuda.register(mapping.address, mapping.size, device):
            kept = self._granted[mapping.is_shared] = self._used_bytes(mapping.is_shared)
            _log.warning(
                LogMessage(
                    "could not pin memory; copies to and from the device will be slower",
                    bytes=mapping.size,
                    is_shared=mapping.is_shared,
                    kept=kept,
                )
            )
            return None
        pinned = _Pinned(mapping.address, mapping.size, mapping.is_shared, weakref.ref(mapping))
        mapping.on_unmap.append(partial(self._unpin, pinned, partial(cuda.unregister, pinned.address, device)))
        return pinned

    def _unpin(self, pinned: _Pinned, unregister: Callable[[], None]) -> None:
        unregister()
        self._unpinned.append(pinned)

    def keep(self, event: cuda.Event, *things: Any) -> None:
        """Retain the objects that a copy uses until the copy's stream has reached the event."""
        self._copies[event] = things

    def tidy(self) -> None:
        """Release the objects retained for finished copies, and remove mappings that are no longer pinned."""
        with self._lock:
            for event in [event for event in list(self._copies) if event.query()]:
                self._copies.pop(event, None)
            while self._unpinned:
                pinned = self._unpinned.popleft()
                if self._pinned.get(pinned.address) is pinned:
                    del self._pinned[pinned.address]


class Blocks:
    """A pool of memory blocks. A block is reused once no array, view or tensor references it. Thread-safe.

    At most `kept_bytes` of unused blocks are retained, each for at most `kept_seconds`. Both limits are checked
    whenever a block is requested or returned. The unused blocks are stored in a deque. While one thread processes the
    unused blocks, other threads find the deque empty and create new blocks.

    Args:
        kept_bytes: maximum total size of the unused blocks.
        kept_seconds: maximum number of seconds for which an unused block is retained.
    """

    def __init__(self, kept_bytes: int = _KEPT_BYTES, kept_seconds: float = _KEPT_SECONDS) -> None:
        self._kept_bytes = kept_bytes
        self._kept_seconds = kept_seconds
        self._unused: deque[tuple[float, Mapping]] = deque()

    def take(self, size: int, device: Device | None = None) -> Bytes:
        """Return an array of `size` uninitialized bytes.

        If the array is for a device, it is pinned if possible, and forked child processes do not inherit it.
        """
        if size < _SMALL_BYTES and device is None:
            return np.empty(size, np.uint8)
        if device is not None:
            PINNED.tidy()  # frees the blocks that finished copies have used
        block = self._reused(size, is_inherited=device is None)
        if block is None:
            block = Mapping.anonymous(size, is_inherited=device is None)
        return block.array(0, size, _Use(self, block, None if device is None else PINNED.pin(block, device)))

    def take_columns(self, sizes: Sequence[int], device: Device) -> list[Bytes]:
        """Return arrays of the given sizes in one block, so that a single copy can transfer them to the device."""
        starts, end = place_columns(sizes)
        block = self.take(max(end, 1), device)
        return [block[start : start + size] for start, size in zip(starts, sizes, strict=True)]

    def _reused(self, size: int, *, is_inherited: bool) -> Mapping | None:
        most = size * _MOST_SLACK + HUGE_PAGE_BYTES
        unused = self._take_all()
        fitting = (each for each in unused if each[1].is_inherited == is_inherited and size <= each[1].size <= most)
        found = next(fitting, None)
        self._keep(each for each in unused if each is not found)
        return None if found is None else found[1]

    def put_back(self, block: Mapping) -> None:
        """Return a block to the pool once it is no longer in use."""
        if block.is_own:
            self._keep([(time.monotonic(), block), *self._take_all()])

    def _take_all(self) -> list[tuple[float, Mapping]]:
        """Remove and return all unused blocks, most recent first."""
        taken = []
        with suppress(IndexError):
            while True:
                taken.append(self._unused.pop())
        return [each for each in taken if each[1].is_own]

    def _keep(self, blocks: Iterable[tuple[float, Mapping]]) -> None:
        """Retain the most recent blocks within the limits, and return all others to the operating system."""
        oldest = time.monotonic() - self._kept_seconds
        remaining = self._kept_bytes
        for since, block in blocks:
            if since >= oldest and block.size <= remaining:
                remaining -= block.size
                self._unused.appendleft((since, block))


class _Use:
    """A reference that marks a block as in use while an array in it exists."""

    __slots__ = ("_block", "_blocks", "_pin")

    _is_finalizing = staticmethod(sys.is_finalizing)  # bound here, because modules are cleared when Python exits

    def __init__(self, blocks: Blocks, block: Mapping, pin: Pin | None) -> None:
        self._blocks, self._block, self._pin = blocks, block, pin

    def __del__(self) -> None:
        if not self._is_finalizing():
            self._pin = None  # release the pin before another thread can reuse the block
            self._blocks.put_back(self._block)


# One instance per process, because clients and loaders share the limits, and batches may outlast both.
BLOCKS: Final = Blocks()
PINNED: Final = PinnedMemory()
