"""Prints the pids of two workers that wait for data which never comes, and stays until it is killed: CONTEXT."""

from __future__ import annotations

import multiprocessing
import sys
import time
from dataclasses import dataclass
from typing import Any

from fake_client import SealedRows

from tq_service.data import StreamingDataLoader, StreamingDataset


@dataclass(frozen=True)
class Endless:
    """A client whose partition is never sealed and has two batches."""

    def __call__(self, address: str | None) -> Any:
        client = SealedRows(8)(address)
        client._service.partitions["train@0"].sealed = False
        return client


def main(context: str) -> None:
    dataset = StreamingDataset(
        batch_size=4, data_fields=["index"], partition_id="train@0", task_name="t", client_factory=Endless(),
        max_wait=600.0,
    )  # fmt: skip
    iterator = iter(StreamingDataLoader(dataset, 2, 2, context))
    next(iterator), next(iterator)
    print(*(child.pid for child in multiprocessing.active_children()), flush=True)
    time.sleep(600)


if __name__ == "__main__":
    main(sys.argv[1])
