"""Threads that continuously make changes and read samples, to measure how long a fault stops the service."""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
from typing import Final, Self

import numpy as np

import tq_service as tq

_TIMEOUT_SECONDS: Final = 60.0
_READ_SAMPLES: Final = 12
_CHANGED, _READ = "probe", "probe-read"


class Probe:
    """A thread that makes calls until its `with` block ends.

    Args:
        address: address of the controllers.
    """

    def __init__(self, address: str) -> None:
        self._client = tq.Client(address, timeout=_TIMEOUT_SECONDS)
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopping.set()
        self._thread.join()
        self._client.close()

    def _run(self) -> None:
        while not self._stopping.wait(0.01):
            with contextlib.suppress(tq.TqError):
                self._call()

    def _call(self) -> None:
        raise NotImplementedError


class ChangeProbe(Probe):
    """Makes small changes continuously and records when each was acknowledged.

    Attributes:
        count: acknowledged changes.
    """

    def __init__(self, address: str) -> None:
        super().__init__(address)
        self._client.create_partition(_CHANGED)
        self._done_at = [time.monotonic()]
        self.count = 0

    def _call(self) -> None:
        self._client.insert(_CHANGED, 1, keys=[f"{self.count}"])
        self.count += 1
        self._done_at.append(time.monotonic())

    def pause_since(self, at: float) -> float:
        """Return the longest period without an acknowledged change since a given time."""
        done = [each for each in self._done_at if each >= at]
        before = max(each for each in self._done_at if each < at)
        times = [before, *done, time.monotonic()]
        return max(later - earlier for earlier, later in itertools.pairwise(times))

    def violations(self) -> list[str]:
        """Return a line for each acknowledged change that is missing, and one if any is stored twice."""
        count = self.count  # before the look-up, during which changes continue
        found, _ = self._client.lookup_samples(_CHANGED)
        keys = list(found.keys)
        there = set(keys)
        lost = [
            f"probe {number} was acknowledged and is missing" for number in range(count) if str(number) not in there
        ]
        return lost + (["a probe is stored twice"] if len(keys) != len(there) else [])


class ReadProbe(Probe):
    """Repeatedly reads a few samples, which are spread over all storage services, and compares their bytes.

    Attributes:
        violations: failed reads, and values that differ from the values put.
    """

    def __init__(self, address: str) -> None:
        super().__init__(address)
        self._client.create_partition(_READ)
        self._keys: list[str] = []
        self._generation = 0
        self._lock = threading.Lock()  # held during a read: `renew` does not clear samples being read
        self._reads: list[tuple[float, float]] = []  # began, ended
        self._began: float | None = None
        self._rounds: list[tuple[float, float]] = []
        self.violations: list[str] = []

    def renew(self) -> None:
        """Switch to new samples: earlier faults may have moved the old ones off some storage services."""
        self.clear()
        with self._lock:
            self._generation += 1
            keys = [f"{self._generation}-{number}" for number in range(_READ_SAMPLES)]
            for number, key in enumerate(keys):  # one put each: all rows of a put are on one storage service
                self._client.put(_READ, {"x": _row(self._generation, number)}, keys=[key])
            self._keys = keys

    def clear(self) -> None:
        """Clear the samples and pause reading."""
        with self._lock:
            keys, self._keys = self._keys, []
        if keys:
            meta, _ = self._client.lookup_samples(_READ, keys)
            self._client.clear_samples(meta)

    def _call(self) -> None:
        generation, began = self._generation, time.monotonic()
        for number in range(_READ_SAMPLES):
            with self._lock:
                if self._generation != generation or not self._keys or self._stopping.is_set():
                    return
                self._began = time.monotonic()
                try:
                    batch = self._client.get_data(_READ, keys=[self._keys[number]], data_fields=["x"])
                    if not np.array_equal(np.asarray(batch["x"]), _row(generation, number)):
                        self.violations.append(f"read sample {generation}-{number} has wrong bytes")
                except tq.TqError as error:
                    self.violations.append(f"read sample {generation}-{number}: {error!r}")
                self._reads.append((self._began, time.monotonic()))
                self._began = None
        self._rounds.append((began, time.monotonic()))

    def has_read_all_since(self, at: float) -> bool:
        """Return whether every sample has been read since a given time."""
        return any(began >= at for began, _ in self._rounds[-3:])

    def pause_since(self, at: float) -> float:
        """Return the duration of the longest read that ended since a time, or of the running read if none ended."""
        began = self._began
        running = 0.0 if began is None else time.monotonic() - began
        return max((ended - start for start, ended in self._reads if ended >= at), default=running)


def _row(generation: int, number: int) -> np.ndarray[tuple[int, ...], np.dtype[np.int64]]:
    return np.full((1, 64), generation * 1000 + number)
