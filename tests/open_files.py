"""What this process has open: a test that looks for leaks compares what is open after with what was open before."""

from __future__ import annotations

import gc
from contextlib import suppress
from pathlib import Path


def open_files() -> set[tuple[int, str, int]]:
    """Return number, target and inode of each open file descriptor, after a garbage collection.

    A set and not a count: threads of gRPC close the connections of earlier tests when they come to it, so a count
    falls in the middle of a test. Event descriptors of such threads are left out, since they also open them.
    """
    gc.collect()
    found = set()
    for entry in Path("/proc/self/fd").iterdir():
        with suppress(OSError):  # closed meanwhile
            target = str(entry.readlink())
            if not target.startswith(("anon_inode:", "/proc/")):
                found.add((int(entry.name), target, entry.stat().st_ino))
    return found
