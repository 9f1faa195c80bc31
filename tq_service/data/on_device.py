"""Upload batches to a device and split them there, in separate CUDA streams, while the current step runs.

::

    fetching thread    a batch, uploaded ── event ─┐
    splitting thread                               └─> its micro-batches ── event ─┐
    consumer's thread                                                              └─> the consumer's stream

Each of the three threads uses its own CUDA stream. Work on the default stream would wait for the consumer's kernels.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict

from tq_service.client.reads import RowPattern
from tq_service.client_probes import Span, Stage
from tq_service.data.columns import FlatBatch, build, flatten
from tq_service.data.packs import PackedMicroBatch
from tq_service.data.source import Arrival, End, FetchedBatch, Fetcher
from tq_service.wire import cuda
from tq_service.wire.columns import is_on_device, tensor_bytes
from tq_service.wire.device import copy_stream, upload
from tq_service.wire.host_memory import PINNED
from tq_service.wire.mapping import Bytes

Split = Callable[[FetchedBatch], Iterator[Any]]
"""Function that splits a batch into the items that the loader yields, and returns an iterator over them."""


@dataclass(frozen=True, slots=True)
class ArrivingItem:
    """A loader item and its tensors, which the consumer's stream may use only after a call to `receive`."""

    item: Any
    tensors: Sequence[torch.Tensor]
    arrival: Arrival

    def receive(self) -> Any:
        """Make the tensors available to the current stream, and return the item.

        Call this method in the consumer's thread.
        """
        self.arrival.take(self.tensors)
        return self.item


def tensors_of(item: Any) -> list[torch.Tensor]:
    """Return all device tensors in a batch, a pack, or a pair of a micro-batch and its meta."""
    if isinstance(item, tuple):
        return [tensor for each in item for tensor in tensors_of(each)]
    if isinstance(item, PackedMicroBatch):
        return [tensor for value in item.tensors.values() for tensor in _parts_of(value) if is_on_device(tensor)]
    return list(filter(is_on_device, flatten(item).tensors())) if isinstance(item, TensorDict) else []


def _parts_of(value: Any) -> list[torch.Tensor]:
    return [value.values(), value.offsets()] if value.is_nested else [value]


def upload_batch(flat: FlatBatch, device: torch.device) -> FlatBatch:
    """Upload the tensors of a batch, and return the new batch. The device's current stream waits for the uploads.

    Object columns stay on the CPU unless all of their rows are tensors.
    """
    tensors = [tensor for tensor in flat.tensors() if not is_on_device(tensor)]
    if not tensors:
        return flat
    found = upload([_host_bytes(tensor) for tensor in tensors], device)
    there = {
        id(tensor): values.view(tensor.dtype).reshape(tensor.shape)
        for tensor, values in zip(tensors, found, strict=True)
    }
    return flat.replacing(torch.Tensor, lambda tensor: there.get(id(tensor), tensor))


def _host_bytes(tensor: torch.Tensor) -> Bytes:
    data = tensor_bytes(tensor)
    return np.frombuffer(data, np.uint8) if len(data) else np.empty(0, np.uint8)


class DeviceFeed:
    """Uploads a loader's batches to a device.

    Args:
        device: target device.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device

    @cached_property
    def _stream(self) -> cuda.Stream:
        return cuda.new_stream(self.device)

    def copying(self) -> AbstractContextManager[Any]:
        """Return a context manager that makes the upload stream the current stream of this thread."""
        return cuda.using(copy_stream(self.device, "up"))

    def splitting(self) -> AbstractContextManager[Any]:
        """Return a context manager that makes the splitting stream the current stream of this thread."""
        return cuda.using(self._stream)

    def upload(self, batch: FetchedBatch) -> FetchedBatch:
        """Upload a batch and record its arrival. Return the batch unchanged if its data is not a TensorDict."""
        if not isinstance(batch.data, TensorDict) or batch.arrival is not None:
            return batch
        flat = flatten(batch.data)
        data = build(upload_batch(flat, self.device))
        stream = cuda.current_stream(self.device)
        arrival = Arrival(self.device, cuda.record(stream))
        measured = batch.measured_bytes if batch.measured_bytes is not None else flat.size_bytes
        return replace(batch, data=data, arrival=arrival, measured_bytes=measured)

    def release(self) -> None:
        """Release the host memory of completed uploads."""
        PINNED.tidy()

    def split(self, split: Split) -> Split:
        """Return a function that uploads batches and splits them on the device, in the current stream of its caller."""

        def split_there(batch: FetchedBatch) -> Iterator[Any]:
            uploaded = self.upload(batch)
            if uploaded.arrival is not None:
                uploaded.arrival.take(tensors_of(uploaded.data))
            return split(uploaded)

        return split_there

    def split_ahead(self, split: Split) -> Split:
        """Return a function that uses the feed's stream to split batches into `ArrivingItem` objects."""
        split_there = self.split(split)

        def split_beside(batch: FetchedBatch) -> Iterator[Any]:
            with self.splitting():
                items = split_there(batch)
            del batch
            while (arriving := self._next_of(items)) is not None:
                yield arriving
                del arriving

        return split_beside

    def _next_of(self, items: Iterator[Any]) -> ArrivingItem | None:
        with self.splitting():
            for item in items:
                arrival = Arrival(self.device, cuda.record(self._stream))
                return ArrivingItem(item, tensors_of(item), arrival)
        return None


class UploadingFetcher:
    """Wraps another fetcher, and uploads the fetched batches in the upload stream."""

    def __init__(self, fetcher: Fetcher, feed: DeviceFeed) -> None:
        self._fetcher = fetcher
        self._feed = feed

    @property
    def fetched_until(self) -> int:
        """Index of the batch that follows the last fetched batch."""
        return self._fetcher.fetched_until

    def request(self, batch_index: int) -> None:
        """Announce the batch that will be fetched next."""
        self._fetcher.request(batch_index)

    def fetch(self, batch_index: int, is_wanted: Callable[[], bool], batch_count: int) -> FetchedBatch | End:
        """Wait for a batch or the end marker, and return it. Uploads of a batch's tensors may still be in progress."""
        with self._feed.copying():
            fetched = self._fetcher.fetch(batch_index, is_wanted, batch_count)
            if isinstance(fetched, End):
                return fetched
            began_at = time.perf_counter()
            uploaded = self._feed.upload(fetched)
            return replace(uploaded, spans=(*fetched.spans, Span(Stage.DEVICE, began_at, time.perf_counter())))

    def close(self) -> None:
        """Abort any `fetch` call running in another thread. Idempotent."""
        self._fetcher.close()


def pinned(split: Split) -> Split:
    """Return a function that splits batches into items in pinned memory, for consumers that do their own uploads."""

    def split_pinned(batch: FetchedBatch) -> Iterator[Any]:
        return map(_pinned_item, split(batch))

    return split_pinned


def _pinned_item(item: Any) -> Any:
    if isinstance(item, PackedMicroBatch):
        return replace(item, tensors=_pinned_item(item.tensors))
    if isinstance(item, TensorDict):
        return item.apply(_pinned_tensor)
    return tuple(map(_pinned_item, item)) if type(item) is tuple else item


def _pinned_tensor(tensor: Any) -> torch.Tensor:
    """Copy a tensor to torch's pinned memory. Torch does not reuse this memory while uploads from it are running."""
    if not tensor.is_nested:
        pinned_copy: torch.Tensor = tensor.pin_memory()
        return pinned_copy
    return RowPattern.of_offsets(tensor.offsets()).nested(tensor.values().pin_memory(), tensor._ragged_idx)
