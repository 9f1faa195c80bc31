"""A process that gets the data put by another process: the reader of `same_host`."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import tq_service as tq
from benchmarks.peer_program import Commands, serve


class Reader:
    """A client that gets."""

    def __init__(self) -> None:
        self._client = tq.Client()

    def connect(self, address: str) -> None:
        """Connect to a service for all further gets."""
        self._client.close()
        self._client = tq.Client(address, timeout=60.0)

    def read(self, partition_id: str, task_name: str, sample_count: int) -> tuple[float, float, float]:
        """Return the seconds of a get of all samples, the seconds until every byte was read, and the sum."""
        meta = self._client.get_meta(
            partition_id=partition_id, task_name=task_name, data_fields=["x"], batch_size=sample_count
        )
        times = [time.perf_counter()]
        array = self._client.get_data(meta)["x"].numpy()
        times.append(time.perf_counter())
        total = float(array.sum())
        times.append(time.perf_counter())
        return times[1] - times[0], times[2] - times[0], total

    def close(self) -> None:
        """Close the client."""
        self._client.close()


@contextmanager
def _started() -> Iterator[Commands]:
    reader = Reader()
    yield {"connect": reader.connect, "read": reader.read}
    reader.close()


if __name__ == "__main__":
    serve(_started())
