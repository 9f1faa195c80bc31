"""Tuning of a serving process: memory, file limits, threads, garbage collection, and the event loop."""

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

# Parameters of glibc's mallopt(3). Streams use buffers of a few MiB in bursts. By default, glibc returns these buffers
# to the system after each burst, and mapping them again costs more than filling them. The inbox limits the bytes in
# flight, so keeping a few buffers is enough. `give_back_freed_memory` returns all other freed memory.
_MALLOPT = {
    -3: 8 * 2**20,  # M_MMAP_THRESHOLD: larger buffers are not allocated on the heap
    -1: 16 * 2**20,  # M_TRIM_THRESHOLD: amount of freed memory to keep
    -2: 8 * 2**20,  # M_TOP_PAD
    -8: 2,  # M_ARENA_MAX: each arena keeps its own free memory
}

# Time for which a planning thread that runs pure Python blocks the event loop. Python's default is ten times longer.
_SWITCH_INTERVAL_SECONDS = 0.0005

# Number of allocations per young collection, of young collections per middle collection, and of middle collections per
# full collection. Python's defaults are 700, 10 and 10. Python checks the thresholds only once the number of
# allocations reaches the first threshold. `collect_garbage` also runs collections before this happens.
_COLLECTION_THRESHOLDS = (50_000, 1_000, 50)
_YOUNG_COLLECTION_SECONDS = 0.1
_YOUNG_COLLECTIONS_BEFORE_A_MIDDLE_ONE = 20
_FULL_COLLECTION_SECONDS = 30.0
_MOST_OF_THE_TIME = 0.001


# Upper bound for the file limit. Child processes inherit the limit, and some programs close every possible descriptor.
_MOST_FILES = 1 << 20

_lock = threading.Lock()
_tuned_count = 0
_restore = contextlib.ExitStack()


@contextlib.contextmanager
def tuned_process() -> Iterator[None]:
    """Tune this process during a `with` block. If blocks overlap, the process stays tuned until the last one ends.

    Existing objects are excluded from garbage collection, and Python waits longer before it triggers a collection. The
    service creates few reference cycles, so a full collection frees little, but it scans all recorded plans and blocks
    the event loop. `collect_garbage` compensates for the delay by running collections periodically.

    Threads also yield to the event loop sooner. The memory settings and the raised file limit remain in effect after
    the block.
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
    if not has_frozen_objects():  # else the embedding program has frozen some, which must stay frozen
        _collect_what_imports_left()
        gc.freeze()
        _restore.callback(gc.unfreeze)


def has_frozen_objects() -> bool:
    """Return whether objects are frozen. This takes 40 ms per million frozen objects."""
    return gc.get_freeze_count() > 0


@cache
def keep_freed_memory() -> bool:
    """Make malloc keep freed buffers for reuse. Return whether the C library accepted all settings.

    Environment variables such as `MALLOC_TRIM_THRESHOLD_` have the same effect but must be set before the process
    starts. Without glibc, this function does nothing.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):
        return False
    accepted = [mallopt(parameter, value) == 1 for parameter, value in _MALLOPT.items()]
    return all(accepted)


def raise_file_limit() -> None:
    """Raise the soft limit on open files to the hard limit, or to a million if the hard limit is higher.

    Each connection and each region of shared memory uses a file descriptor. The usual soft limit of 1,024 is meant for
    programs that use select(2).
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _MOST_FILES if hard == resource.RLIM_INFINITY else min(hard, _MOST_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def give_back_freed_memory() -> None:
    """Return malloc's free memory to the operating system. This may take a while. Without glibc, do nothing."""
    with contextlib.suppress(AttributeError, OSError, TypeError):
        ctypes.CDLL(None).malloc_trim(0)


@cache
def _collect_what_imports_left() -> None:
    gc.collect()


async def collect_garbage() -> None:
    """Run garbage collections periodically until cancelled.

    The young generation is collected every 0.1 s, and older generations are collected less often.

    Python bases collections on allocations minus deallocations, so even thousands of completed calls do not trigger
    one. Without this task, the garbage collector's young generation grew to 400,000 objects. Collecting these objects
    blocked the event loop for 0.3 s. With this task, a collection takes at most 25 ms if there are 8,192 clients, and
    almost no time if the server is idle.

    In gRPC, each call is part of a reference cycle. Long polls and other calls may survive a collection of the young
    generation. When such calls end, their cycles are in an older generation. Older generations must therefore be
    collected too. The longer a full collection takes, the less often one is run.
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
    """Return the event loop factory for a mode ("on", "off" or "auto").

    Returns:
        uvloop's factory if the mode is "on", or if it is "auto" and uvloop is installed. In all other cases, the
        result is None, which selects asyncio's loop.

    Raises:
        InvalidArgumentError: `mode` is "on", but uvloop is not installed.
    """
    if mode == "off":
        return None
    try:
        import uvloop  # noqa: PLC0415  (an optional dependency)
    except ModuleNotFoundError:
        if mode == "auto":
            return None
        raise InvalidArgumentError(
            "uvloop is on but not installed; install tq-service[uvloop], or set uvloop to auto", field="uvloop"
        ) from None
    factory: Callable[[], asyncio.AbstractEventLoop] = uvloop.new_event_loop
    return factory
