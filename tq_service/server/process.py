"""How a process that serves is tuned: its memory, its files, its threads, its garbage, its event loop."""

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

# Parameters of glibc's mallopt(3). Streams use buffers of a few MiB in bursts; with its own settings glibc gives them
# back to the system after every burst, and mapping them again costs more than filling them. The inbox bounds what is in
# flight, so a few buffers are enough to keep; `give_back_freed_memory` returns the rest.
_MALLOPT = {
    -3: 8 * 2**20,  # M_MMAP_THRESHOLD: larger buffers are not on the heap
    -1: 16 * 2**20,  # M_TRIM_THRESHOLD: what is kept
    -2: 8 * 2**20,  # M_TOP_PAD
    -8: 2,  # M_ARENA_MAX: each arena has free memory of its own
}

# A thread that plans in pure Python holds the event loop up for this long at a time; Python's default is ten times it.
_SWITCH_INTERVAL_SECONDS = 0.0005

# Allocations before a young collection, young before a middle one, middle before a full one; Python's are 700, 10, 10.
# Python looks at them when there are as many allocations; `collect_garbage` does not wait for that.
_COLLECTION_THRESHOLDS = (50_000, 1_000, 50)
_YOUNG_COLLECTION_SECONDS = 0.1
_YOUNG_COLLECTIONS_BEFORE_A_MIDDLE_ONE = 20
_FULL_COLLECTION_SECONDS = 30.0
_MOST_OF_THE_TIME = 0.001


# Programs that a process starts inherit its limit of open files, and some of them try to close as many.
_MOST_FILES = 1 << 20

_lock = threading.Lock()
_tuned_count = 0
_restore = contextlib.ExitStack()


@contextlib.contextmanager
def tuned_process() -> Iterator[None]:
    """Tune this process for the time of a `with` block; where several overlap, until the last one ends.

    What was imported before is left out of garbage collections, and these start later: the service makes few cycles,
    while a full collection goes over all recorded plans and holds the event loop up. `collect_garbage` makes up for it.

    Threads give way to the event loop sooner. Beyond the block too, malloc keeps freed buffers, and the soft limit of
    open files is the hard one.
    """
    global _tuned_count  # noqa: PLW0603  (it is of the process, as what it counts)
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
    if not gc.get_freeze_count():  # else the program around the server has done that
        _collect_what_imports_left()
        gc.freeze()
        _restore.callback(gc.unfreeze)


@cache
def keep_freed_memory() -> bool:
    """Let malloc keep freed buffers for reuse; return whether the C library accepted it.

    Settings in the environment (`MALLOC_TRIM_THRESHOLD_` and so on) do the same but must be there before the process
    starts; this needs no second start. Without glibc it does nothing.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):
        return False
    accepted = [mallopt(parameter, value) == 1 for parameter, value in _MALLOPT.items()]
    return all(accepted)


def raise_file_limit() -> None:
    """Raise the soft limit of open files to the hard one, or to a million if that is higher.

    Shared memory and connections take a file descriptor each, and the usual soft limit of 1,024 is for programs that
    use select(2).
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _MOST_FILES if hard == resource.RLIM_INFINITY else min(hard, _MOST_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def give_back_freed_memory() -> None:
    """Return to the system what malloc keeps; without glibc it does nothing. Call it in a thread: it takes a while."""
    with contextlib.suppress(AttributeError, OSError, TypeError):
        ctypes.CDLL(None).malloc_trim(0)


@cache
def _collect_what_imports_left() -> None:
    gc.collect()


async def collect_garbage() -> None:
    """Collect what is young every tenth of a second, what is older now and then, until cancelled.

    Python counts allocations less deallocations: to it, thousands of calls that come and go are nothing new. The young
    generation grew to 400,000 objects, and the one collection that went over them held the event loop up for 0.3 s. So
    it takes 25 ms at most with 8,192 clients, and nothing to speak of while the server is idle.

    gRPC leaves each call in a cycle. Those that lasted over a young collection, such as long polls, are not young any
    more when they end. So the older generations have their turns too: the full one the more rarely, the longer it is.
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
    """Return what makes the event loop: uvloop's for "on", or for "auto" where it is installed; None is asyncio's.

    Raises:
        InvalidArgumentError: uvloop is asked for and not installed.
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
