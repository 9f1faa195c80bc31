"""The `StreamingDataset`, which yields the micro-batches of one rank."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, Final

import numpy as np
from tensordict import TensorDict

from tq_service import data
from tq_service.data.columns import build, flatten, select_rows
from transfer_queue.client import TransferQueueClient
from transfer_queue.metadata import BatchMeta
from transfer_queue.session import current

_END: Final = SimpleNamespace(status="end")
_FIRST_PAUSE_SECONDS: Final = 0.01

TQ_STREAMING_DATASET_EMPTY_BATCH_SLEEP_INTERVAL: Final = float(
    os.environ.get("TQ_STREAMING_DATASET_EMPTY_BATCH_SLEEP_INTERVAL", "1")
)
"""Maximum number of seconds between checks for a batch. The next check comes sooner if samples become ready."""


class StreamingDataset(data.StreamingDataset[Any]):
    """A dataset that yields the micro-batches of one rank in the current run.

    All replicas of the rank get the same micro-batches.

    Args:
        config: ignored, because the run's own configuration is used.
        batch_size: number of samples per batch.
        micro_batch_size: number of samples per micro-batch.
        data_fields: fields to fetch. A sample is ready once it has all of these fields.
        partition_id: the partition to read.
        task_name: the task that consumes the samples.
        dp_rank: data-parallel rank. All replicas of a rank pass the same number.
        should_check_consumption_status: whether iteration ends once all samples are consumed. If False, iteration waits
            indefinitely for more samples.
        fetch_batch_fn: function to use instead of `default_fetch_batch_fn`, called with the same keyword arguments.
        process_batch_fn: function to use instead of `chunk_batch_fn`, called with the batch, its metadata, and
            `micro_batch_size` as a keyword argument.

    Attributes:
        config, batch_size, micro_batch_size, data_fields, task_name, dp_rank, should_check_consumption_status,
            fetch_batch_fn, process_batch_fn: values of the constructor arguments with the same names.
        sampling_config: mapping passed to `fetch_batch_fn`.

    Raises:
        ValueError: an argument is invalid.
    """

    def __init__(
        self,
        config: Any,
        batch_size: int,
        micro_batch_size: int,
        data_fields: Sequence[str],
        partition_id: str,
        task_name: str,
        dp_rank: int,
        should_check_consumption_status: bool = False,
        fetch_batch_fn: Callable[..., Any] | None = None,
        process_batch_fn: Callable[..., Any] | None = None,
    ) -> None:
        if dp_rank < 0:
            raise ValueError(f"dp_rank is {dp_rank}; expected at least 0")
        self.config = config
        self.batch_size = batch_size
        self.micro_batch_size = micro_batch_size
        self.data_fields = data_fields
        self.task_name = task_name
        self.dp_rank = dp_rank
        self.should_check_consumption_status = should_check_consumption_status
        self.fetch_batch_fn = fetch_batch_fn or default_fetch_batch_fn
        self.process_batch_fn = process_batch_fn or chunk_batch_fn
        self.sampling_config = {"dp_rank": dp_rank, "task_name": task_name}
        client = current().client
        super().__init__(
            client.address,
            batch_size=batch_size,
            micro_batch_size=micro_batch_size,
            data_fields=data_fields,
            partition_id=partition_id,
            task_name=task_name,
            dp_rank=dp_rank,
            dp_size=dp_rank + 1,  # a lower bound, since perhaps only the sampler contains the run's dp_size
            finite=should_check_consumption_status,
            fetch_batch_fn=FetchBatch(self.fetch_batch_fn, self.sampling_config),
            process_batch_fn=self.process_batch_fn,
            replay_buffer_bytes=sys.maxsize,
            client_factory=client.polling(),
        )

    @property
    def buffer(self) -> list[tuple[Any, Any]]:
        """The batches fetched so far. After `reset`, these batches are replayed."""
        return self.get_buffer()


@dataclass(frozen=True, slots=True)
class FetchBatch:
    """A callable that fetches a batch for the loader, using either the user's function or the default one."""

    fetch_batch_fn: Callable[..., Any]
    sampling_config: Mapping[str, Any]

    def __call__(self, *, client: TransferQueueClient, batch_index: int, finite: bool, **asked: Any) -> Any:
        """Return a batch and its metadata. The batch is None if no data remains or no batch is ready yet.

        A finite pass checks for a batch immediately, then after pauses of increasing length. Frequent checks are
        necessary because other ranks may claim the last samples at any time. A replica that asks late still receives
        its last batch.
        """
        pause, pauses_until = 0.0, time.monotonic() + TQ_STREAMING_DATASET_EMPTY_BATCH_SLEEP_INTERVAL
        if not finite:
            pause = TQ_STREAMING_DATASET_EMPTY_BATCH_SLEEP_INTERVAL
        named = {name: asked[name] for name in ("data_fields", "batch_size", "partition_id", "task_name")}
        while True:
            client.wait_at_most(pause)
            asked_at = time.monotonic()
            batch, meta = self.fetch_batch_fn(
                tq_client=client, sampling_config=dict(self.sampling_config), batch_index=batch_index, **named
            )
            if batch is not None:
                return batch, meta
            if finite and client.check_consumption_status(asked["task_name"], asked["partition_id"]):
                return None, _END
            time.sleep(max(0.0, asked_at + pause - time.monotonic()))  # the user's function may return without waiting
            left = pauses_until - time.monotonic()
            if left <= 0:
                return None, None
            pause = min(max(2 * pause, _FIRST_PAUSE_SECONDS), left)


def default_fetch_batch_fn(
    tq_client: TransferQueueClient,
    data_fields: Sequence[str],
    batch_size: int,
    partition_id: str,
    task_name: str,
    sampling_config: Mapping[str, Any],
    batch_index: int,
) -> tuple[TensorDict | None, BatchMeta]:
    """Return a rank's next batch with its metadata. The batch is None if too few samples are ready."""
    meta = tq_client.get_meta(
        data_fields=data_fields,
        batch_size=batch_size,
        partition_id=partition_id,
        task_name=task_name,
        sampling_config={**sampling_config, "batch_index": batch_index, "partition_id": partition_id},
    )
    return (tq_client.get_data(meta) if meta else None), meta


def chunk_batch_fn(
    td: TensorDict, batch_meta: BatchMeta, micro_batch_size: int = 1
) -> list[tuple[TensorDict, BatchMeta]]:
    """Split a batch into micro-batches, each with its metadata.

    Each micro-batch has `micro_batch_size` rows; the last may have fewer.

    Raises:
        ValueError: the batch has fewer than `micro_batch_size` rows.
    """
    if not 1 <= micro_batch_size <= len(td):
        raise ValueError(
            f"micro_batch_size is {micro_batch_size}; expected 1 to {len(td)}, the number of rows in the batch"
        )
    flat, rows = flatten(td), np.arange(len(td))
    parts = [rows[start : start + micro_batch_size] for start in range(0, len(td), micro_batch_size)]
    return [(build(select_rows(flat, part)), batch_meta.select_samples(part)) for part in parts]
