"""What changes and reads all the time, in threads, to see for how long a fault stops the service."""

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
    """A thread that makes calls until it is left.

    Args:
        address: of the controllers.
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
    """Makes a small change all the time, and notes when each was acknowledged.

    Attributes:
        count: changes that were acknowledged.
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
        """Return the longest time without an acknowledged change since a moment."""
        done = [each for each in self._done_at if each >= at]
        before = max(each for each in self._done_at if each < at)
        times = [before, *done, time.monotonic()]
        return max(later - earlier for earlier, later in itertools.pairwise(times))

    def violations(self) -> list[str]:
        """Return which changes were acknowledged and are not there, or are there twice."""
        count = self.count  # before the look-up: changes go on during it
        found, _ = self._client.lookup_samples(_CHANGED)
        keys = list(found.keys)
        there = set(keys)
        lost = [
            f"probe {number} was acknowledged and is not there" for number in range(count) if str(number) not in there
        ]
        return lost + (["a probe is there twice"] if len(keys) != len(there) else [])


class ReadProbe(Probe):
    """Reads the same few samples over and over, which lie on all storage services, and compares their bytes.

    Attributes:
        violations: what it read and was not what was put, and reads that failed.
    """

    def __init__(self, address: str) -> None:
        super().__init__(address)
        self._client.create_partition(_READ)
        self._keys: list[str] = []
        self._generation = 0
        self._lock = threading.Lock()  # held for a read: `renew` clears no samples that are being read
        self._reads: list[tuple[float, float]] = []  # began, ended
        self._began: float | None = None
        self._rounds: list[tuple[float, float]] = []
        self.violations: list[str] = []

    def renew(self) -> None:
        """Read other samples from now on: those of before are where earlier faults have left them."""
        self.clear()
        with self._lock:
            self._generation += 1
            keys = [f"{self._generation}-{number}" for number in range(_READ_SAMPLES)]
            for number, key in enumerate(keys):  # a put each, since a put lies on one storage service
                self._client.put({"x": _row(self._generation, number)}, partition_id=_READ, keys=[key])
            self._keys = keys

    def clear(self) -> None:
        """Clear the samples, and read nothing for now."""
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
                    batch = self._client.get_data(partition_id=_READ, keys=[self._keys[number]], data_fields=["x"])
                    if not np.array_equal(np.asarray(batch["x"]), _row(generation, number)):
                        self.violations.append(f"read sample {generation}-{number} has wrong bytes")
                except tq.TqError as error:
                    self.violations.append(f"read sample {generation}-{number}: {error!r}")
                self._reads.append((self._began, time.monotonic()))
                self._began = None
        self._rounds.append((began, time.monotonic()))

    def has_read_all_since(self, at: float) -> bool:
        """Whether each sample was read once after a moment."""
        return any(began >= at for began, _ in self._rounds[-3:])

    def pause_since(self, at: float) -> float:
        """Return the longest time that a read took which ended after a moment, or has not ended yet."""
        began = self._began
        running = 0.0 if began is None else time.monotonic() - began
        return max((ended - start for start, ended in self._reads if ended >= at), default=running)


def _row(generation: int, number: int) -> np.ndarray[tuple[int, ...], np.dtype[np.int64]]:
    return np.full((1, 64), generation * 1000 + number)
