"""Calls that claim and fetch: a batch with its data, and the loop of a queue worker."""

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
    """Leased samples of a worker, with their data. See `AsyncClient.work`.

    Attributes:
        meta: the samples; its parts may be put, acknowledged or released by themselves.
        data: their fields, as `get_data` returns them.
    """

    def __init__(self, client: AsyncWorkCalls, meta: BatchMeta, data: TensorDict) -> None:
        self.meta = meta
        self.data = data
        self._client = client
        self._is_done = False

    async def put(self, data: Any = None, *, custom_meta: MetaGiven | None = None, ack: bool = True) -> None:
        """Put results for all samples of the item and acknowledge them, in one change.

        Args:
            data: columns with a row for each sample; see `AsyncClient.put`.
            custom_meta: see `AsyncClient.put`.
            ack: False: more results follow, and the samples stay leased.

        Raises:
            LeaseExpiredError: the samples are no longer leased to this worker; nothing is written.
        """
        await self._client.put(self.meta, data, custom_meta=custom_meta, ack=ack)
        self._is_done = self._is_done or ack

    async def release(self) -> None:
        """Return the samples: other workers can claim them at once, and this delivery does not count."""
        self._is_done = True
        await self._client.release(self.meta)

    async def fail(self) -> None:
        """Mark the samples as failed: no task gets them any more."""
        self._is_done = True
        await self._client.fail_samples(self.meta)


class AsyncWork:
    """Iterates over the items of a queue worker. See `AsyncClient.work`.

    Attributes:
        lost_count: number of items whose lease expired before their results were put or acknowledged.
    """

    def __init__(
        self, client: AsyncWorkCalls, claim: Mapping[str, Any], fetched: Sequence[str], max_lease_seconds: float
    ) -> None:
        self.lost_count = 0
        self._client = client
        self._claim = claim
        self._fetched = fetched
        self._max_lease_seconds = max_lease_seconds
        # Of the consumer; the heartbeat reads it.
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
            except NotFoundError:  # samples were cleared since; the others can be claimed again
                await self._client.release(meta)
                failed_count += 1
                if failed_count == _MOST_FAILED_FETCHES:  # or a field of `fetch` that does not exist
                    raise
                continue
            self._began_at, self._item = time.monotonic(), AsyncWorkItem(self._client, meta, data)
            return self._item

    async def aclose(self) -> None:
        """End the loop; samples of the current item that are not acknowledged are released."""
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
            self._item = None  # as if the process had died: the delivery counts
        await self.aclose()

    async def _finish(self) -> None:
        """Acknowledge the item whose work is over."""
        item, self._item = self._item, None
        if item is None or item._is_done:
            return
        try:
            await self._client.ack(item.meta)
        except LeaseExpiredError as error:
            self.lost_count += 1
            _log.warning(LogMessage("results came after their lease had expired", error=error))

    async def _extend(self) -> None:
        """Extend the lease of the current item."""
        item = self._item
        if item is None or item._is_done or time.monotonic() - self._began_at > self._max_lease_seconds:
            return
        try:
            await self._client.extend(item.meta, self._claim["lease"])
        except PreconditionError:  # it was acknowledged meanwhile, or its lease has expired, as the next call will tell
            return

    def _stop(self) -> None:
        if self._heartbeat is not None:
            self._heartbeat.stop()
            self._heartbeat = None


class AsyncWorkCalls(AsyncClaimCalls, AsyncFetchCalls, AsyncSampleCalls):
    """The part of the client that claims and fetches. See `AsyncClient`."""

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
            task_name: the consumer.
            data_fields: fields that make a sample ready.
            fetch: fields of the data; None: `data_fields`.
            timeout: seconds until each of the two calls fails, for the claim beyond its `max_wait`; None: the client's.
            **options: as for `claim`: `batch_size` and others, except for `batch_count`.

        Returns:
            The data, as `get_data` returns it, and the batch. If there is none, the data is None, and `batch.status`
            is "not_yet" or "end".

        Raises:
            TqError: as `claim` and `get_data`.
        """
        if "batch_count" in options:
            raise InvalidArgumentError(
                "get_batch has batch_count; expected one batch per call. Use claim for several", field="batch_count"
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
        """Return an iterator over samples to work on, until the partition ends: the loop of a reward worker.

            for item in client.work("train", "reward", ["response"]):
                item.put({"reward": score(item.data["response"])})

        Each item is a leased claim with its data. The lease is extended in the background during the loop body. `put`
        acknowledges the item; so does the next iteration if the body did not. An item is lost if its lease expires
        anyway, as after a pause of the process: `put` raises LeaseExpiredError then, and another worker gets the
        samples.

        If the body raises, the samples are redelivered once their lease has expired, which counts for
        `max_deliveries`. Use the iterator in a `with` block to release the current item at once after a `break`.

        Args:
            partition_id: the partition; one that does not exist yet is waited for.
            task_name: the consumer; all workers of a task share its samples.
            data_fields: fields that make a sample ready.
            batch_size: most samples (or rollouts or groups, see `batch_unit`) of an item; what is ready is delivered at
                once.
            batch_unit: "sample", "rollout" or "group".
            fetch: fields of `item.data`; None: `data_fields`.
            lease: seconds after which the samples of a worker that has stopped are redelivered.
            max_lease: seconds after which the lease of one item is no longer extended, such as that of a body that
                hangs.
            max_deliveries: see `claim`; None: no bound.
            where: see `claim`.
            order_by: see `claim`.
            finite: see `claim`.
            timeout: seconds until each claim and fetch fails; None: the client's.

        Raises, from the iterator:
            TqError: as `claim` and `get_data`.
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
