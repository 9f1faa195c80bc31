"""What one thread makes ahead and another takes."""

from __future__ import annotations

import threading
from collections import deque
from typing import Generic, TypeVar

from tq_service.data.ahead import AheadBound

T = TypeVar("T")


class AheadQueue(Generic[T]):
    """A bounded queue with one writer and one reader; one condition, predicate waits, `close` wakes both."""

    def __init__(self, bound: AheadBound) -> None:
        self._bound = bound
        # The condition's lock is reentrant: `close` may run in a finalizer, in a thread that holds it.
        self._changed = threading.Condition()
        self._items: deque[tuple[T, int]] = deque()
        self._finished = False
        self._error: BaseException | None = None
        self._closed = False

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._closed

    def begin(self) -> bool:
        """Wait until another item may be begun; false if the queue was closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or self._bound.admits())
            self._bound.begin()
            return not self._closed

    def put(self, item: T, size_bytes: int) -> None:
        """Hand over the item that was begun."""
        with self._changed:
            self._bound.arrive(size_bytes)
            if not self._closed:
                self._items.append((item, size_bytes))
                self._changed.notify_all()

    def finish(self, error: BaseException | None) -> None:
        """Say that no further item comes, because of `error` or the end."""
        with self._changed:
            self._finished = True
            self._error = error
            self._changed.notify_all()

    def get(self, *, stays_ahead: bool = False) -> T | None:
        """Wait for an item; None after the last one. Items that were made before an error come before the error.

        Args:
            stays_ahead: whether the item makes room with `taken` only.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._items or self._finished or self._closed)
            if self._closed or not self._items:
                error, self._error = self._error, None
                if error is not None and not self._closed:
                    raise error
                return None
            item, size_bytes = self._items.popleft()
            if not stays_ahead:
                self.taken(size_bytes)
            return item

    def taken(self, size_bytes: int) -> None:
        """Make room: an item of this size is in use and not ahead any more."""
        with self._changed:
            self._bound.take(size_bytes)
            self._changed.notify_all()

    def close(self) -> None:
        """Drop the items, and end the waits of both sides. Idempotent."""
        with self._changed:
            self._closed = True
            self._items.clear()
            self._changed.notify_all()
