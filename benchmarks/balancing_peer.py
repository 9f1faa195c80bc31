"""Runs in TransferQueue's environment: balances lengths with its Karmarkar-Karp."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version

from transfer_queue.sampler.seqlen_balanced_sampler import get_seqlen_balanced_partitions

from benchmarks.peer_program import Commands, serve


def _balance(lengths: list[int], k_partitions: int, equal_size: bool) -> tuple[float, list[list[int]]]:
    """Return the seconds taken, and the items of each partition."""
    started = time.perf_counter()
    partitions = get_seqlen_balanced_partitions(lengths, k_partitions, equal_size)
    return time.perf_counter() - started, partitions


@contextmanager
def _started() -> Iterator[Commands]:
    yield {"versions": lambda: {"TransferQueue": version("TransferQueue")}, "balance": _balance}


if __name__ == "__main__":
    serve(_started())
