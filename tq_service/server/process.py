"""Tuning of a serving process: memory, file limit, threads, garbage collection, event loop."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import gc
import resource
import sys
import threading
import time
from collections.abc import Callable, Iterator
from functools import cache

from tq_service.errors import InvalidArgumentError

# Parameters of glibc's mallopt(3). Streams use buffers of a few MiB in bursts. By default glibc returns them to the
# system after every burst, and mapping them again costs more than filling them. The inbox limits the bytes in flight,
# so it is enough to keep a few buffers; `give_back_freed_memory` returns the rest.
_MALLOPT = {
    -3: 8 * 2**20,  # M_MMAP_THRESHOLD: larger buffers are not on the heap
    -1: 16 * 2**20,  # M_TRIM_THRESHOLD: freed memory to keep
    -2: 8 * 2**20,  # M_TOP_PAD
    -8: 2,  # M_ARENA_MAX: each arena keeps free memory separately
}

# A thread that plans in pure Python blocks the event loop for this long at a time; Python's default is ten times this.
_SWITCH_INTERVAL_SECONDS = 0.0005

# Allocations before a young collection, young before a middle one, middle before a full one; Python's are 700, 10, 10.
# Python checks them when allocations reach the first threshold; `collect_garbage` does not wait for that.
_COLLECTION_THRESHOLDS = (50_000, 1_000, 50)
_YOUNG_COLLECTION_SECONDS = 0.1
_YOUNG_COLLECTIONS_BEFORE_A_MIDDLE_ONE = 20
_FULL_COLLECTION_SECONDS = 30.0
_MOST_OF_THE_TIME = 0.001


# Child processes inherit the limit of open files, and some programs try to close that many descriptors.
_MOST_FILES = 1 << 20

_lock = threading.Lock()
_tuned_count = 0
_restore = contextlib.ExitStack()


@contextlib.contextmanager
def tuned_process() -> Iterator[None]:
    """Tune this process during a `with` block; if several blocks overlap, until the last one ends.

    Objects that exist before are excluded from garbage collections, and collections start later. The service makes few
    cycles, while a full collection scans all recorded plans and blocks the event loop. `collect_garbage` compensates.

    Threads yield to the event loop sooner. Two settings stay after the block: malloc keeps freed buffers, and the soft
    limit of open files is the hard limit.
    """
    global _tuned_count  # noqa: PLW0603  (the settings are per process)
    with _lock:
        _tuned_count += 1
        if _tuned_count == 1:
            _tune()
    try:
        yield
    finally:
        with _lock:
            _tuned_count -= 1
            if not _tuned_count:
                _restore.close()


def _tune() -> None:
    keep_freed_memory()
    raise_file_limit()
    _restore.callback(gc.set_threshold, *gc.get_threshold())
    gc.set_threshold(*_COLLECTION_THRESHOLDS)
    _restore.callback(sys.setswitchinterval, sys.getswitchinterval())
    sys.setswitchinterval(_SWITCH_INTERVAL_SECONDS)
    if not gc.get_freeze_count():  # else the program that embeds the server has frozen objects
        _collect_what_imports_left()
        gc.freeze()
        _restore.callback(gc.unfreeze)


@cache
def keep_freed_memory() -> bool:
    """Let malloc keep freed buffers for reuse; return whether the C library accepted it.

    Environment variables (`MALLOC_TRIM_THRESHOLD_` and so on) do the same but must be set before the process starts.
    Without glibc this does nothing.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):
        return False
    accepted = [mallopt(parameter, value) == 1 for parameter, value in _MALLOPT.items()]
    return all(accepted)


def raise_file_limit() -> None:
    """Raise the soft limit of open files to the hard limit, or to a million if the hard limit is higher.

    Shared memory and connections take a file descriptor each, while the usual soft limit of 1,024 is for programs that
    use select(2).
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _MOST_FILES if hard == resource.RLIM_INFINITY else min(hard, _MOST_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def give_back_freed_memory() -> None:
    """Return malloc's free memory to the system; without glibc, do nothing. Call it in a thread: it takes a while."""
    with contextlib.suppress(AttributeError, OSError, TypeError):
        ctypes.CDLL(None).malloc_trim(0)


@cache
def _collect_what_imports_left() -> None:
    gc.collect()


async def collect_garbage() -> None:
    """Collect the young generation every tenth of a second, and older generations less often, until cancelled.

    Python counts allocations minus deallocations, so thousands of calls that begin and end do not trigger a collection.
    The young generation grew to 400,000 objects, and collecting it blocked the event loop for 0.3 s. With this task a
    collection takes at most 25 ms with 8,192 clients, and almost no time on an idle server.

    gRPC leaves each call in a cycle. Calls that survive a young collection, such as long polls, have left the young
    generation when they end. So older generations are collected too; the longer a full collection takes, the rarer it
    gets.
    """
    full_at, count = time.monotonic() + _FULL_COLLECTION_SECONDS, 0
    while True:
        await asyncio.sleep(_YOUNG_COLLECTION_SECONDS)
        count += 1
        if (began := time.monotonic()) >= full_at:
            gc.collect()
            took = time.monotonic() - began
            full_at = began + max(_FULL_COLLECTION_SECONDS, took / _MOST_OF_THE_TIME)
        else:
            gc.collect(0 if count % _YOUNG_COLLECTIONS_BEFORE_A_MIDDLE_ONE else 1)


def loop_factory(mode: str) -> Callable[[], asyncio.AbstractEventLoop] | None:
    """Return the factory of the event loop: uvloop's for "on", and for "auto" if installed; None means asyncio's.

    Raises:
        InvalidArgumentError: mode is "on" but uvloop is not installed.
    """
    if mode == "off":
        return None
    try:
        import uvloop  # noqa: PLC0415  (an optional dependency)
    except ModuleNotFoundError:
        if mode == "auto":
            return None
        raise InvalidArgumentError(
            "uvloop is on but not installed; install tq-service[uvloop] or set uvloop to auto", field="uvloop"
        ) from None
    factory: Callable[[], asyncio.AbstractEventLoop] = uvloop.new_event_loop
    return factory
