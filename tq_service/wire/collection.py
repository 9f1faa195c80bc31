"""Making many objects without a search for garbage among them."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def no_collection() -> Iterator[None]:
    """Keep Python's cyclic garbage collector from running in this process meanwhile.

    It runs for every 700 objects more that are alive, and now and then looks at all that the process has: with torch
    imported, that takes longer than to read thousands of objects. All objects made here are kept, so it would find
    nothing. Where several threads do so, it may run again when the first of them is done.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
