"""A rank that gets values put by a driver through the storage engine of NeoProto: the reader of `neoproto`."""

from __future__ import annotations

import pickle
import time
from base64 import b64decode
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from benchmarks.peer_program import Commands, serve
from tq_service.integrations.neoproto import TqServiceStorageEngine


class _Rank:
    def __init__(self) -> None:
        self._engine = TqServiceStorageEngine()

    def column(self, refs: str, row_count: int) -> tuple[float, float, float]:
        """Return the seconds of a get of a column, and of a get of some rows, and the sum of the column."""
        (ref,) = pickle.loads(b64decode(refs))
        started = time.perf_counter()
        total = float(self._engine.get(ref).sum())
        whole_seconds = time.perf_counter() - started
        started = time.perf_counter()
        float(self._engine.get_rows(ref, range(row_count)).sum())
        return whole_seconds, time.perf_counter() - started, total

    def values(self, refs: str) -> tuple[float, float]:
        """Return the seconds of a get of values, and their sum."""
        named = pickle.loads(b64decode(refs))
        started = time.perf_counter()
        total = float(torch.stack(self._engine.get_many(named)).sum())
        return time.perf_counter() - started, total

    def close(self) -> None:
        """Close the client."""
        self._engine.close()


@contextmanager
def _started() -> Iterator[Commands]:
    rank = _Rank()
    yield {"column": rank.column, "values": rank.values}
    rank.close()


if __name__ == "__main__":
    serve(_started())
