"""Calls that claim samples and fetch their data: `get_batch` for single batches, and `work` for queue workers."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, Self, Unpack

from tq_service.client._async.claims import AsyncClaimCalls
from tq_service.client._async.fetches import AsyncFetchCalls
from tq_service.client._async.samples import AsyncSampleCalls
from tq_service.client.batch_meta import BatchMeta
from tq_service.client.heartbeats import AsyncHeartbeat
from tq_service.client.requests import ClaimOptions, MetaGiven, not_zero, seconds
from tq_service.errors import InvalidArgumentError, LeaseExpiredError, NotFoundError, PreconditionError
from tq_service.log_message import LogMessage
from tq_service.schema import BatchUnit

if TYPE_CHECKING:
    from tensordict import TensorDict

_log = logging.getLogger(__name__)

_BEATS_PER_LEASE: Final = 3
_MOST_FAILED_FETCHES: Final = 3
DEFAULT_LEASE_SECONDS: Final = 60.0
DEFAULT_MAX_LEASE_SECONDS: Final = 3600.0


class AsyncWorkItem:
    """Samples leased to a queue worker, and their data. See `AsyncClient.work`.

    Attributes:
        meta: the samples. Parts of the batch can be written, acknowledged or released separately.
        data: the fetched fields, as returned by `get_data`.
    """

    def __init__(self, client: AsyncWorkCalls, meta: BatchMeta, data: TensorDict) -> None:
        self.meta = meta
        self.data = data
        self._client = client
        self._is_done = False

    async def put(self, data: Any = None, *, custom_meta: MetaGiven | None = None, ack: bool = True) -> None:
        """Put results for all samples of the item, and acknowledge the samples atomically with the put.

        Args:
            data: columns with one row per sample; see `AsyncClient.put`.
            custom_meta: values to attach to the samples; see `AsyncClient.put`.
            ack: whether to acknowledge the samples. If False, the samples stay leased, and more results can be put.

        Raises:
            LeaseExpiredError: the samples are no longer leased to this worker. Nothing is written.
        """
        await self._client.put(self.meta, data, custom_meta=custom_meta, ack=ack)
        self._is_done = self._is_done or ack

    async def release(self) -> None:
        """Release the samples to other workers. This delivery does not count toward `max_deliveries`."""
        self._is_done = True
        await self._client.release(self.meta)

    async def fail(self) -> None:
        """Mark the samples as failed so that they are never delivered to any task again."""
        self._is_done = True
        await self._client.fail_samples(self.meta)


class AsyncWork:
    """An iterator over a queue worker's items. See `AsyncClient.work`.

    Attributes:
        lost_count: number of items whose lease expired before the iterator could acknowledge them.
    """

    def __init__(
        self, client: AsyncWorkCalls, claim: Mapping[str, Any], fetched: Sequence[str], max_lease_seconds: float
    ) -> None:
        self.lost_count = 0
        self._client = client
        self._claim = claim
        self._fetched = fetched
        self._max_lease_seconds = max_lease_seconds
        # Written by the consumer of the iterator, and read by the heartbeat.
        self._item: AsyncWorkItem | None = None
        self._began_at = 0.0
        self._heartbeat: AsyncHeartbeat | None = None

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> AsyncWorkItem:
        await self._finish()
        if self._heartbeat is None:
            self._heartbeat = AsyncHeartbeat(self._extend, self._claim["lease"] / _BEATS_PER_LEASE)
        failed_count = 0
        while True:
            meta = await self._client.claim(**self._claim)
            if meta.status == "end":
                self._stop()
                raise StopAsyncIteration
            if meta.status == "not_yet":
                continue
            try:
                data = await self._client.get_data(meta, data_fields=self._fetched, timeout=self._claim["timeout"])
            except NotFoundError:  # some samples were cleared, so release the remaining samples
                await self._client.release(meta)
                failed_count += 1
                if failed_count == _MOST_FAILED_FETCHES:  # a field of `fetch` may not exist
                    raise
                continue
            self._began_at, self._item = time.monotonic(), AsyncWorkItem(self._client, meta, data)
            return self._item

    async def aclose(self) -> None:
        """End the loop and release the current item's unacknowledged samples."""
        item, self._item = self._item, None
        self._stop()
        if item is not None and not item._is_done:
            await item.release()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is not None:
            self._item = None  # do not release the item, so that the delivery counts, as after a crash
        await self.aclose()

    async def _finish(self) -> None:
        """Acknowledge the current item, unless it has already been acknowledged, released or marked as failed."""
        item, self._item = self._item, None
        if item is None or item._is_done:
            return
        try:
            await self._client.ack(item.meta)
        except LeaseExpiredError as error:
            self.lost_count += 1
            _log.warning(LogMessage("could not acknowledge samples because their lease had expired", error=error))

    async def _extend(self) -> None:
        """Extend the lease of the current item, unless the maximum lease duration has passed."""
        item = self._item
        if item is None or item._is_done or time.monotonic() - self._began_at > self._max_lease_seconds:
            return
        try:
            await self._client.extend(item.meta, self._claim["lease"])
        except PreconditionError:  # the item was acknowledged, or its lease expired; the next call shows which
            return

    def _stop(self) -> None:
        if self._heartbeat is not None:
            self._heartbeat.stop()
            self._heartbeat = None


class AsyncWorkCalls(AsyncClaimCalls, AsyncFetchCalls, AsyncSampleCalls):
    """Client calls that claim samples and fetch their data. See `AsyncClient`."""

    async def get_batch(
        self,
        partition_id: str,
        task_name: str,
        data_fields: Sequence[str],
        *,
        fetch: Sequence[str] | None = None,
        timeout: float | None = None,
        **options: Unpack[ClaimOptions],
    ) -> tuple[TensorDict | None, BatchMeta]:
        """Claim a batch and fetch its data.

            data, batch = client.get_batch("train", "update_actor", ["input_ids"], batch_size=8, dp_rank=0, dp_size=4,
                                           batch_index=0)

        Args:
            partition_id: the partition.
            task_name: the task that consumes the samples.
            data_fields: fields that a sample must have before it can be claimed.
            fetch: fields to fetch. Defaults to `data_fields`.
            timeout: seconds until the claim or the fetch fails. For the claim, `max_wait` is added to this time.
                Defaults to the client's `timeout`.
            **options: further arguments of `claim`, such as `batch_size`. `batch_count` is not supported.

        Returns:
            The data, as returned by `get_data`, and the batch. If no samples were claimed, the data is None, and
            `batch.status` is "not_yet" or "end".

        Raises:
            TqError: any error raised by `claim` or `get_data`.
        """
        if "batch_count" in options:
            raise InvalidArgumentError(
                "get_batch does not accept batch_count; to claim several batches, use claim", field="batch_count"
            )
        batch = await self.claim(partition_id, task_name, data_fields, timeout=timeout, **options)
        if batch.status != "batch":
            return None, batch
        fetched = list(data_fields if fetch is None else fetch)
        return await self.get_data(batch, data_fields=fetched, timeout=timeout), batch

    def work(
        self,
        partition_id: str,
        task_name: str,
        data_fields: Sequence[str],
        *,
        batch_size: int = 32,
        batch_unit: BatchUnit = "sample",
        fetch: Sequence[str] | None = None,
        lease: float = DEFAULT_LEASE_SECONDS,
        max_lease: float = DEFAULT_MAX_LEASE_SECONDS,
        max_deliveries: int | None = None,
        where: Iterable[tuple[str, str, Any]] = (),
        order_by: Iterable[str] = (),
        finite: bool = False,
        timeout: float | None = None,
    ) -> AsyncWork:
        """Return an iterator that yields samples to a queue worker until the partition is sealed and consumed.

            for item in client.work("train", "reward", ["response"]):
                item.put({"reward": score(item.data["response"])})

        Each item is a leased claim with its data. The lease is extended in the background while the loop body runs.
        `put` acknowledges the item. If the loop body does not call `put`, the next iteration acknowledges the item. If
        the lease expires, for example because the process was paused, `put` raises LeaseExpiredError and the samples
        are redelivered to another worker.

        If the loop body raises an exception, the samples are redelivered after their lease has expired, and the
        delivery counts toward `max_deliveries`. To release the current item immediately after a `break`, use the
        iterator in a `with` block.

        Args:
            partition_id: the partition. If the partition does not exist yet, the iterator waits until it is created.
            task_name: the task that consumes the samples. The samples are distributed among all workers of the task.
            data_fields: fields that a sample must have before it can be claimed.
            batch_size: maximum number of samples, rollouts or groups per item (see `batch_unit`). Ready samples are
                delivered immediately, even if they do not fill an item.
            batch_unit: unit of `batch_size`: "sample", "rollout" or "group".
            fetch: fields to fetch into `item.data`. Defaults to `data_fields`.
            lease: number of seconds after which a stopped worker's samples are redelivered.
            max_lease: maximum number of seconds to keep extending an item's lease, in case the loop body hangs.
            max_deliveries: maximum number of times to deliver a sample; see `claim`. Unlimited if None.
            where: conditions on custom_meta; see `claim`.
            order_by: custom_meta columns used to sort the samples; see `claim`.
            finite: whether to end once all samples are consumed, even if the partition is not sealed; see `claim`.
            timeout: seconds until a claim or fetch fails. Defaults to the client's `timeout`.

        Raises, from the iterator:
            TqError: any error raised by `claim` or `get_data`.
        """
        claim = {
            "partition_id": partition_id,
            "task_name": task_name,
            "data_fields": list(data_fields),
            "batch_size": batch_size,
            "min_batch_size": 1,
            "batch_unit": batch_unit,
            "lease": not_zero("lease", seconds("lease", lease)),
            "max_deliveries": max_deliveries,
            "where": list(where),
            "order_by": list(order_by),
            "finite": finite,
            "timeout": timeout,
        }
        fetched = list(data_fields if fetch is None else fetch)
        return AsyncWork(self, claim, fetched, seconds("max_lease", max_lease))
