"""Streams that fetch, prefetch and split the batches of a rank."""

from __future__ import annotations

import itertools
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from functools import partial
from multiprocessing.reduction import ForkingPickler
from typing import TYPE_CHECKING, Any, Final, Generic, Protocol, TypeVar

from tensordict import TensorDict

from tq_service.client.transport import WaitReports
from tq_service.client_probes import Span, Stage, collected_here, collecting, step_report
from tq_service.data.columns import flatten, object_bytes
from tq_service.errors import NothingDeliveredError
from tq_service.results import WaitReason
from tq_service.schema import DEFAULT_POLICY, BatchUnit, EndCounts, ReadLayout, Unmatched
from tq_service.wire import cuda

if TYPE_CHECKING:
    import torch

    from tq_service.client import Client
    from tq_service.client.batch_meta import BatchMeta
    from tq_service.step_times import StepTimes

FetchBatch = Callable[..., tuple[Any, Any]]
"""`fetch_batch_fn(**keywords) -> (data, meta)`. See `fetch_batch` for the keyword arguments and the result."""

OnWait = Callable[[WaitReason], object]
"""Callback that receives the reason for a long wait. It runs in the thread or process that fetches batches."""

ClientFactory = Callable[[Any], Any]
"""Function that takes the dataset's `address` and opens the sync client for a fetching thread or worker."""

# Delay before the next call if fetch_batch_fn returned "not_yet" immediately.
_RETRY_SECONDS = 0.05

# Upper limit of max_wait for a single call. Calls are short, because only a later call requests the reason for a wait.
_LONGEST_CALL_SECONDS = 10.0
_MOST_CLAIMED: Final = 64  # batches per call


class StreamClosedError(Exception):
    """The stream was closed while a caller was waiting for a batch."""


@dataclass(frozen=True, slots=True)
class StreamIdentity:
    """A partition's incarnation and a task's epoch. All batches of a stream must have the same identity."""

    incarnation: bytes = b""
    epoch: int = 0

    @classmethod
    def of(cls, meta: Any) -> StreamIdentity:
        """Return the identity in `meta`. Metadata created by a custom fetch_batch_fn may be of any type."""
        return cls(getattr(meta, "incarnation", b""), getattr(meta, "epoch", 0))


@dataclass(frozen=True, slots=True)
class Arrival:
    """Marks the point in a CUDA stream at which the upload of tensors to a device is complete.

    Attributes:
        device: the CUDA device.
        event: the CUDA event that marks this point in the stream.
    """

    device: torch.device
    event: cuda.Event

    def take(self, tensors: Sequence[torch.Tensor]) -> None:
        """Make the current CUDA stream wait for the tensors, and keep them allocated while the stream uses them."""
        stream = cuda.current_stream(self.device)
        stream.wait_event(self.event)
        for tensor in tensors:
            cuda.used_by(tensor, stream)


@dataclass(frozen=True, slots=True, kw_only=True)
class FetchedBatch:
    """One rank's part of a batch.

    Attributes:
        index: the batch_index.
        data: a TensorDict, or the data returned by fetch_batch_fn.
        meta: metadata of the samples in `data`.
        micro_batches: the batch's micro-batches if a background thread splits the batch, otherwise None.
        on_consumed: function called when the consumer starts to process the batch, so that another batch can be
            prefetched.
        measured_bytes: value of `size_bytes` if already known, otherwise None.
        arrival: point in a CUDA stream at which the tensors are available on the device, or None for tensors on the
            CPU.
        spans: time spans recorded for the stages of fetching the batch.
    """

    index: int
    data: Any
    meta: BatchMeta
    micro_batches: Iterator[Any] | None = None
    on_consumed: Callable[[], None] | None = None
    measured_bytes: int | None = None
    arrival: Arrival | None = None
    spans: Sequence[Span] = ()

    @property
    def size_bytes(self) -> int:
        """Total size, in bytes, of the tensors, arrays, strings and images in `data` and its nested containers."""
        if self.measured_bytes is not None:
            return self.measured_bytes
        return flatten(self.data).size_bytes if isinstance(self.data, TensorDict) else object_bytes(self.data)


@dataclass(frozen=True, slots=True)
class End:
    """The end marker that a stream returns after the last batch.

    Attributes:
        identity: partition incarnation and task epoch at the end of the stream.
        counts: number of samples per outcome, identical on all ranks; None if a custom fetch_batch_fn created the end
            marker.
        spans: when each recorded stage of the call that returned the end marker started and ended.
    """

    identity: StreamIdentity
    counts: EndCounts | None = None
    spans: Sequence[Span] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ExceptionWrapper:
    """An error from another process, with its traceback. An error that cannot be pickled becomes a RuntimeError."""

    error: Exception
    traceback: str

    @classmethod
    def of(cls, error: Exception) -> ExceptionWrapper:
        """Wrap an exception. Call this method while the exception is being handled."""
        text = "".join(traceback.format_exception(error))
        try:
            ForkingPickler.loads(ForkingPickler.dumps(error))
        except Exception:  # pickling an exception may raise any error
            error = RuntimeError(f"{type(error).__name__}: {error}")
        return cls(error=error, traceback=text)

    def with_note(self, origin: str) -> Exception:
        """Add the original traceback as a note to the error, and return the error."""
        self.error.add_note(f"raised in {origin}:\n{self.traceback}")
        return self.error


class BatchStream(Protocol):
    """A stream that returns batches in order. Only one thread may use a stream."""

    @property
    def next_index(self) -> int:
        """Index of the batch that `read` returns next."""
        ...

    @property
    def closed(self) -> bool:
        """Whether the stream has been closed."""
        ...

    def read(self) -> FetchedBatch | End | None:
        """Wait for the next batch or the end marker. Return None if the stream is closed. Raises fetch errors."""
        ...

    def close(self) -> None:
        """Stop fetching, and drop prefetched batches, which can be fetched again later. Idempotent."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchRequest:
    """Arguments shared by all claims of a rank. Most attributes correspond to arguments of `Client.claim`.

    Additional attributes:
        read_options: additional arguments for `Client.get_data`, or None.
        version_lag: how many batches may be planned ahead of the published version of `policy`, or None if unlimited.
        first_version: version that `policy` has when it is trained on batch 0.
    """

    partition_id: str
    task_name: str
    data_fields: Sequence[str]
    batch_size: int
    micro_batch_size: int | None
    dp_rank: int
    dp_size: int
    sampler: str
    sampler_config: Mapping[str, Any] | None
    where: Sequence[tuple[str, str, Any]]
    order_by: Sequence[Any]
    drop_last: bool
    batch_unit: BatchUnit
    finite: bool
    max_wait: float
    timeout: float
    layout: ReadLayout | None = None
    max_uses: int | None = None
    unmatched: Unmatched | None = None
    least_members: int | None = None
    refill: tuple[str, str] | None = None
    max_refills: int = 3
    totals: Sequence[str] | None = None
    device: Any = None
    read_options: Mapping[str, Any] | None = None
    version_lag: int | None = None
    first_version: int = 0
    policy: str = DEFAULT_POLICY

    def keywords(self, batch_index: int) -> dict[str, Any]:
        """Return the keyword arguments with which fetch_batch_fn is called for a batch."""
        named = {each.name: getattr(self, each.name) for each in fields(self)}
        lag, first, policy = (named.pop(name) for name in ("version_lag", "first_version", "policy"))
        given = ("layout", "max_uses", "unmatched", "least_members", "refill", "totals", "device", "read_options")
        optional, max_refills = {name: named.pop(name) for name in given}, named.pop("max_refills")
        if self.refill is not None:
            optional["max_refills"] = max_refills
        if lag is not None and (version := first + batch_index - lag) > 0:
            optional |= {"not_before_version": version, "policy": policy}
        return named | {name: value for name, value in optional.items() if value is not None}


def end_warning(end: End, request: BatchRequest) -> str | None:
    """Return a warning about samples that were skipped or consumed in earlier epochs, or None if there are none.

    Cleared samples alone do not cause a warning, because a task that starts late always misses most samples of a
    long-lived partition. The result depends only on the counts in the end marker, which are identical on all ranks.
    Therefore, either all ranks raise an error or none do. The counts include samples consumed before this loader was
    created, so restarting after the last batch is not an error.

    Raises:
        NothingDeliveredError: samples were inserted, but none was delivered to the task.
    """
    counts = end.counts
    if counts is None or not (counts.skipped_count or counts.kept_count):
        return None
    why = "; ".join(_reasons(counts, request))
    if not counts.consumed_count and not counts.dead_lettered_count:
        raise NothingDeliveredError(
            f"task {request.task_name!r} reached the end of partition {request.partition_id!r}, and no rank received "
            f"a sample; all {counts.skipped_count} samples were skipped: {why}",
            metadata={
                "partition_id": request.partition_id,
                "task_name": request.task_name,
                **{name: str(count) for name, count in counts.skipped_counts.items()},
            },
        )
    texts = [] if counts.skipped_count == counts.cleared_count else [f"{counts.skipped_count} were skipped: {why}"]
    if counts.kept_count:
        texts.append(
            f"{counts.kept_count} of them in earlier epochs; reset_consumption(keep_consumed=True) does not deliver "
            "these samples again. They may include batches that a loader had prefetched but not delivered. To train on "
            "such batches, clear the trained samples and reset without keep_consumed"
        )
    if not texts:
        return None
    return (
        f"task {request.task_name!r} reached the end of partition {request.partition_id!r}: {counts.consumed_count} "
        f"samples were consumed, {'; '.join(reversed(texts))}"
    )


def _reasons(counts: EndCounts, request: BatchRequest) -> list[str]:
    whole = request.batch_size * request.dp_size
    left_over = (
        f"left over by drop_last, or by the sampler {request.sampler!r}; a batch across all ranks has {whole} "
        f"{request.batch_unit}s"
        if request.drop_last
        else f"ready, but not planned by the sampler {request.sampler!r}"
    )
    where = f"where={list(request.where)}" if request.where else "the conditions (where) of fetch_batch_fn"
    texts = {
        "in_incomplete_groups_count": "in incomplete groups (a member is missing, failed, cleared or excluded; put "
        "group_size members, or let the sampler accept incomplete groups with incomplete_groups='take')",
        "excluded_count": f"excluded by {where}",
        "overlong_count": "longer than the sampler's token limit, and dropped because of overlong='drop'",
        "left_over_count": left_over,
        "failed_count": "failed",
        "cleared_count": "cleared before they were delivered to the task",
        "dead_lettered_count": "delivered too often without being acknowledged",
    }
    skipped = counts.skipped_counts
    return [f"{skipped[name]} {text}" for name, text in texts.items() if name in skipped]


class ClaimsAhead:
    """Batches that were claimed in the same call as an earlier batch but have not been fetched yet.

    Attributes:
        batch_count: maximum number of batches that the next call may claim.
        until: index after the last claimed batch.
    """

    def __init__(self) -> None:
        self.batch_count = 1
        self.until = 0
        self._metas: dict[int, BatchMeta] = {}

    def claim(self, client: Client, *, batch_index: int, **claim: Any) -> BatchMeta:
        """Return the batch if already claimed; otherwise, claim it and up to `batch_count - 1` later ready batches."""
        if batch_index in self._metas:
            return self._metas.pop(batch_index)
        if self.batch_count > 1:
            metas = client.get_meta(batch_index=batch_index, batch_count=self.batch_count, **claim)
        else:
            metas = [client.get_meta(batch_index=batch_index, **claim)]
        self.until = batch_index + sum(meta.status == "batch" for meta in metas)
        self._metas = dict(enumerate(metas, batch_index))
        return self._metas.pop(batch_index)


def fetch_batch(
    *,
    client: Client,
    max_wait: float,
    timeout: float,
    layout: ReadLayout | None = None,
    device: Any = None,
    read_options: Mapping[str, Any] | None = None,
    ahead: ClaimsAhead | None = None,
    **claim: Any,
) -> tuple[TensorDict | None, BatchMeta]:
    """Claim a batch and fetch its data. This is the default `fetch_batch_fn`.

    A custom `fetch_batch_fn` is called with keyword arguments only. The function should also accept `**others`, because
    later versions may add keywords. The keywords are:

    - always: `client` (a sync client of the calling thread or worker), `batch_index`, `partition_id`, `task_name`,
      `data_fields`, `batch_size`, `micro_batch_size`, `dp_rank`, `dp_size`, `sampler`, `sampler_config`, `where`,
      `order_by`, `drop_last`, `batch_unit`, `finite`, `max_wait`, `timeout`, `incarnation` and `epoch` (b"" and None
      until the first batch arrives);
    - if passed to the dataset: `layout`, `max_uses`, `unmatched`, `least_members`, `refill`, `max_refills`, `totals`
      and `read_options` (additional arguments for `Client.get_data`, including the slices of a context-parallel rank);
    - if the dataset has a `version_lag`: `not_before_version` and `policy`;
    - if the loader has a `device` and fetches in this process: `device`. If the function returns data on the CPU, the
      loader uploads the data;
    - during a long wait: `explain` (True), which asks the service to return the reason for the wait in `waiting_for`.

    Only `fetch_batch` itself receives `ahead`, which contains batches that are claimed but not yet fetched.

    Returns:
        The data and its meta. If the meta's status is "batch", the data must not be None. If the status is "not_yet",
        the loader calls the function again. If the status is "end", iteration ends. Returning `(None, None)` is
        equivalent to the status "not_yet".
    """
    ahead = ahead or ClaimsAhead()
    meta = ahead.claim(client, max_wait=max_wait, timeout=timeout, **claim)
    if meta.status != "batch":
        return None, meta
    where = {} if device is None else {"device": device}
    return client.get_data(meta, layout=layout, timeout=timeout, **where, **(read_options or {})), meta


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchSource:
    """The service that provides the batches, and the request to send to it.

    A source can be pickled if its functions can be pickled.

    Attributes:
        address: address of the service.
        request: arguments for all claims of the rank.
        fetch_batch_fn: function that fetches a batch.
        on_wait: function called with the reason for a long wait.
        client_factory: function that opens the client. By default, `Client` is called with `client_options`.
        client_options: arguments for `Client`: token, tls, insecure and namespace.
    """

    address: str | Sequence[str] | None
    request: BatchRequest
    fetch_batch_fn: FetchBatch
    on_wait: OnWait
    client_factory: ClientFactory | None = None
    client_options: Mapping[str, Any] = field(default_factory=dict, repr=False)

    def of_partition(self, partition_id: str) -> BatchSource:
        """Return a copy of this source for another partition."""
        return replace(self, request=replace(self.request, partition_id=partition_id))

    def of_version(self, first_version: int) -> BatchSource:
        """Return a copy of this source with a different `first_version`."""
        return replace(self, request=replace(self.request, first_version=first_version))

    def to_device(self, device: Any) -> BatchSource:
        """Return a copy of this source that fetches batches directly to a device."""
        return replace(self, request=replace(self.request, device=device))

    def open_client(self) -> Any:
        """Open a new sync client."""
        if self.client_factory is not None:
            return self.client_factory(self.address)
        from tq_service.client import Client  # noqa: PLC0415  (a client_factory makes it unnecessary)

        return Client(self.address, **self.client_options)


class BatchFetcher:
    """A batch fetcher with its own sync client. Only one thread may use a fetcher.

    All batches must have the same incarnation and epoch as the first batch. If the partition is cleared and created
    again, or the task is reset, the next fetch raises an error. A stream therefore never switches to another
    incarnation or epoch partway through.

    Attributes:
        fetched_until: index of the batch after the last one that has been fetched or claimed in advance.
        closed: whether the fetcher has been closed.
    """

    def __init__(
        self,
        source: BatchSource,
        identity: StreamIdentity | None = None,
        take_report: Callable[[], StepTimes | None] = lambda: None,
    ) -> None:
        self._source = source
        self._take_report = take_report
        self._client: Any = None
        self._identity = identity
        self._ahead = ClaimsAhead()
        self.fetched_until = 0
        self.closed = False

    def request(self, batch_index: int) -> None:
        """Do nothing, because `fetch` requests the batch itself."""

    def fetch(self, batch_index: int, is_wanted: Callable[[], bool], batch_count: int = 1) -> FetchedBatch | End:
        """Wait for a batch or the end marker, and return it.

        Args:
            batch_index: index of the batch to fetch.
            is_wanted: function called before each claim; if it returns false, the wait ends.
            batch_count: maximum number of batches to claim in a single call, starting with this batch. The other
                batches are returned by later `fetch` calls.

        Raises:
            StreamClosedError: the batch is no longer wanted.
            TypeError: fetch_batch_fn returned no data for a batch.
        """
        reported = step_report.set(self._take_report)
        try:
            with collecting() as collected:
                fetched = self._fetch(batch_index, is_wanted, batch_count)
        finally:
            step_report.reset(reported)
        return replace(fetched, spans=tuple(collected.spans))

    def _fetch(self, batch_index: int, is_wanted: Callable[[], bool], batch_count: int) -> FetchedBatch | End:
        if self._client is None:
            self._client = self._source.open_client()
        reports, request = WaitReports(), self._source.request
        max_wait = min(request.max_wait, _LONGEST_CALL_SECONDS)
        # With a version lag, batches are claimed individually, because each batch waits for a different version.
        self._ahead.batch_count = min(batch_count, _MOST_CLAIMED) if request.version_lag is None else 1
        claiming = {"ahead": self._ahead} if self._source.fetch_batch_fn is fetch_batch else {}
        while is_wanted():
            asked_at = time.monotonic()
            explaining = {"explain": True} if reports.is_due_after(max_wait) else {}
            data, meta = self._source.fetch_batch_fn(
                client=self._client,
                batch_index=batch_index,
                incarnation=self._identity.incarnation if self._identity else b"",
                epoch=self._identity.epoch if self._identity else None,
                **explaining,
                **claiming,
                **request.keywords(batch_index) | {"max_wait": max_wait},
            )
            status = "not_yet" if meta is None else meta.status
            if status == "end":
                return End(StreamIdentity.of(meta), getattr(meta, "end", None))
            if status == "batch" and data is None:
                raise TypeError(
                    f"fetch_batch_fn returned no data for batch {batch_index}, although its meta has status 'batch'; "
                    "return client.get_data(meta) even if the batch is empty, because every rank needs each batch"
                )
            if status == "batch":
                self._identity = StreamIdentity.of(meta)
                self.fetched_until = max(batch_index + 1, self._ahead.until)
                return FetchedBatch(index=batch_index, data=data, meta=meta)
            reason: WaitReason | None = getattr(meta, "waiting_for", None)
            if reason is not None:
                reports.made()
                self._source.on_wait(reason)
            if time.monotonic() - asked_at < _RETRY_SECONDS:
                slept_at = time.perf_counter()
                time.sleep(_RETRY_SECONDS)
                if (collected := collected_here.get()) is not None:
                    collected.note(Stage.ROLLOUTS, slept_at)
        raise StreamClosedError

    def close(self) -> None:
        """Close the client. Any call in progress in another thread is aborted. Idempotent."""
        self.closed = True
        if self._client is not None:
            self._client.close()


class InlineStream(BatchFetcher):
    """A stream that fetches each batch in the thread that calls `read`."""

    def __init__(
        self,
        source: BatchSource,
        batch_index: int,
        identity: StreamIdentity | None,
        take_report: Callable[[], StepTimes | None] = lambda: None,
    ) -> None:
        super().__init__(source, identity, take_report)
        self.next_index = batch_index

    def read(self) -> FetchedBatch | End:
        """Fetch the next batch or the end marker."""
        fetched = self.fetch(self.next_index, lambda: True)
        self.next_index = max(self.next_index, self.fetched_until)
        return fetched


OnBegun = Callable[[int], None]
S = TypeVar("S", bound="Fetcher | BatchStream")
T = TypeVar("T")

# Maximum seconds to wait for the threads when a stream is closed. Threads end when their current call returns.
_JOIN_SECONDS: Final = 5.0
_MICRO_BATCHES_AHEAD: Final = 2


class PrefetchLimit:
    """A limit on the number and total size of prefetched batches.

    A batch counts as prefetched from the call to `begin` until the call to `consume`. Until `arrive` reports a batch's
    size, the batch is assumed to be as large as the largest batch that has arrived. Before the first arrival, only one
    batch may be in flight. The total size therefore exceeds `max_bytes` only if a batch is larger than all earlier
    batches. The excess is at most the difference in size between this batch and the largest earlier batch. If no batch
    is prefetched, the next batch is admitted regardless of its size, because the consumer waits for it.

    Not thread-safe: the owner must hold a lock when calling any method.

    Args:
        max_batches: maximum number of prefetched batches.
        max_bytes: maximum total size of the prefetched batches, in bytes.
    """

    def __init__(self, max_batches: int, max_bytes: int) -> None:
        self._max_batches = max_batches
        self._max_bytes = max_bytes
        self._under_way = 0
        self._arrived = 0
        self._arrived_bytes = 0
        self._largest_bytes: int | None = None

    def admits(self) -> bool:
        """Return whether another batch may be fetched within the limit."""
        return self._under_way + self._arrived == 0 or self.further_count() > 0

    def further_count(self) -> int:
        """Return how many more batches may be fetched within the limit."""
        if self._largest_bytes is None:
            return 0
        by_number = self._max_batches - self._under_way - self._arrived
        by_bytes = (self._max_bytes - self._arrived_bytes) // max(1, self._largest_bytes) - self._under_way
        return max(0, min(by_number, by_bytes))

    def begin(self) -> None:
        """Record that a batch is now in flight."""
        self._under_way += 1

    def arrive(self, size_bytes: int) -> None:
        """Record that a batch in flight has arrived, and record its size."""
        self._under_way -= 1
        self._arrived += 1
        self._arrived_bytes += size_bytes
        self._largest_bytes = max(self._largest_bytes or 0, size_bytes)

    def consume(self, size_bytes: int) -> None:
        """Record that an arrived batch has been consumed."""
        self._arrived -= 1
        self._arrived_bytes -= size_bytes


class PrefetchQueue(Generic[T]):
    """A bounded queue of numbered items, with one reader and several writers.

    Writers begin items in numerical order, but may put them in any order. The reader receives items in numerical order.

    Attributes:
        closed: whether the queue has been closed.
    """

    def __init__(self, limit: PrefetchLimit) -> None:
        self._limit = limit
        # The condition uses a reentrant lock, because a finalizer may call `close` in a thread that already holds the
        # lock.
        self._changed = threading.Condition()
        self._items: dict[int, T] = {}
        self._begun_count = self._read_count = 0
        # Number at which the queue ends, and the error to raise, if any.
        self._end: tuple[int, BaseException | None] | None = None
        self.closed = False

    def begin(self, on_begun: OnBegun = lambda number: None) -> int | None:
        """Wait until the limit admits another item. Return the item's number, or None if the queue has ended.

        `on_begun`, which must not block, is called with the number before any other writer can begin an item.
        """
        with self._changed:
            self._changed.wait_for(lambda: self.closed or self._end or self._limit.admits())
            return self._begin_now(on_begun)

    def _begin_now(self, on_begun: OnBegun) -> int | None:
        if self.closed or self._end or not self._limit.admits():
            return None
        self._limit.begin()
        self._begun_count += 1
        on_begun(self._begun_count - 1)
        return self._begun_count - 1

    def further_count(self) -> int:
        """Return how many more items the limit admits."""
        with self._changed:
            return self._limit.further_count()

    @contextmanager
    def filling(self, number: int) -> Iterator[None]:
        """Run a block that creates the item with this number. An error in the block ends the queue at this item."""
        try:
            yield
        except StreamClosedError:
            self.end(number)
        except BaseException as error:  # the reader raises the error, whatever its type
            self.end(number, error)

    def put(self, number: int, item: T, size_bytes: int = 0, on_begun: OnBegun | None = None) -> int | None:
        """Add an item that was begun earlier, or drop it if the queue is closed.

        With `on_begun`, also begin the writer's next item, before any other writer can begin one, and return the new
        item's number. If the limit does not admit another item right now, return None.
        """
        with self._changed:
            self._limit.arrive(size_bytes)
            if not self.closed:
                self._items[number] = item
                self._changed.notify_all()
            return None if on_begun is None else self._begin_now(on_begun)

    def end(self, number: int, error: BaseException | None = None) -> None:
        """End the queue before item `number`. After reading all earlier items, the reader raises the error, if any."""
        with self._changed:
            if self._end is None or number < self._end[0]:
                self._end = number, error
            self._changed.notify_all()

    def get(self) -> T | None:
        """Wait for the next item. Return None after the last item.

        The item still counts as prefetched until `on_consumed` is called, because the reader may not process it
        immediately.
        """

        def is_over() -> bool:
            return self.closed or (self._end is not None and self._end[0] <= self._read_count)

        with self._changed:
            self._changed.wait_for(lambda: self._read_count in self._items or is_over())
            if self._read_count in self._items:
                self._read_count += 1
                return self._items.pop(self._read_count - 1)
            if self._end is not None and not self.closed:
                number, error = self._end
                self._end = number, None
                if error is not None:
                    raise error
            return None

    def on_consumed(self, size_bytes: int = 0) -> None:
        """Record that an item of this size has been consumed, so that another item may be admitted."""
        with self._changed:
            self._limit.consume(size_bytes)
            self._changed.notify_all()

    def close(self) -> None:
        """Drop all items, and wake all waiting readers and writers. Idempotent."""
        with self._changed:
            self.closed = True
            self._items.clear()
            self._changed.notify_all()


class _QueuedStream(Generic[S, T]):
    """A stream that reads from a queue filled by background threads, one per source.

    The threads do not refer to the stream, only to the queue and the sources. An abandoned stream can therefore be
    garbage-collected, which stops its threads.

    Attributes:
        next_index: index of the batch that `read` returns next.
    """

    def __init__(
        self,
        next_index: int,
        sources: Sequence[S],
        limit: PrefetchLimit,
        fill: Callable[[S, PrefetchQueue[T]], None],
        thread_name: str,
    ) -> None:
        self.next_index = next_index
        self._sources = sources
        self._queue = PrefetchQueue[T](limit)
        threads = [
            threading.Thread(target=fill, args=(source, self._queue), name=thread_name, daemon=True)
            for source in sources
        ]
        self._end = weakref.finalize(self, _end, self._queue, sources, threads)
        for thread in threads:
            thread.start()

    @property
    def closed(self) -> bool:
        """Whether the stream has been closed."""
        return self._queue.closed

    def close(self) -> None:
        """Stop the threads, and drop all queued items. Idempotent."""
        self._end()


def _end(queue: PrefetchQueue[Any], sources: Sequence[Fetcher | BatchStream], threads: list[threading.Thread]) -> None:
    """Close a queue and its sources, and wait for the threads to exit."""
    # Close the queue first. Otherwise the reader could mistake None for the end, or raise the error of a call that was
    # interrupted by closing its source.
    queue.close()
    for source in sources:
        source.close()
    deadline = time.monotonic() + _JOIN_SECONDS  # one deadline for all threads
    for thread in threads:
        # The garbage collector may run this finalizer in one of the threads, and a thread cannot join itself.
        if threading.current_thread() is not thread:
            thread.join(max(0.0, deadline - time.monotonic()))


class Fetcher(Protocol):
    """Interface of objects that fetch batches in the calling thread or in a worker process."""

    @property
    def fetched_until(self) -> int:
        """Index of the batch after the last one that has been fetched or claimed in advance."""
        ...

    def request(self, batch_index: int) -> None:
        """Announce the batch that will be fetched next. Batches are announced in order. Does not block."""
        ...

    def fetch(self, batch_index: int, is_wanted: Callable[[], bool], batch_count: int) -> FetchedBatch | End:
        """Wait for a batch or the end marker. Raise StreamClosedError if the batch is no longer wanted.

        A single call may claim up to `batch_count` batches, starting with this batch.
        """
        ...

    def close(self) -> None:
        """Abort any `fetch` call running in another thread. Idempotent."""
        ...


class PrefetchStream(_QueuedStream[Fetcher, FetchedBatch | End]):
    """A stream for which one or more fetchers prefetch batches, up to a maximum number and total size of batches.

    Lifecycle::

        __init__ ── threads start ──> fetch while the limit admits ──┬─ end ────> read() returns it
                                             ^                       ├─ error ──> read() raises it
                                   on_consumed of a batch            └─ close() or garbage collection: threads end

    Each thread fetches the next batch that no other thread has started to fetch. `read` returns the batches in order.
    """

    def __init__(self, fetchers: Sequence[Fetcher], batch_index: int, limit: PrefetchLimit) -> None:
        super().__init__(batch_index, fetchers, limit, partial(_fetch_ahead, batch_index), "tq-prefetch")

    @property
    def fetched_until(self) -> int:
        """Index of the batch after the last one that has been fetched or claimed in advance."""
        return max(fetcher.fetched_until for fetcher in self._sources)

    def read(self) -> FetchedBatch | End | None:
        """Wait for the next batch or the end marker. Return None if the stream is closed. Re-raises fetch errors."""
        fetched = self._queue.get()
        if isinstance(fetched, FetchedBatch):
            self.next_index += 1
        return fetched


def _fetch_ahead(first_index: int, fetcher: Fetcher, queue: PrefetchQueue[FetchedBatch | End]) -> None:
    following: int | None = None

    def request(number: int) -> None:
        fetcher.request(first_index + number)

    try:
        while (number := queue.begin(request) if following is None else following) is not None:
            following = None
            with queue.filling(number):
                batch_count = 1 + queue.further_count()
                fetched = fetcher.fetch(first_index + number, lambda: not queue.closed, batch_count)
                if isinstance(fetched, End):
                    queue.put(number, fetched)
                    queue.end(number + 1)
                else:
                    # Begin this fetcher's next batch immediately. Otherwise a fetcher whose worker is still starting
                    # could begin this batch and delay it, although the reader needs it soon.
                    size_bytes = fetched.size_bytes
                    fetched = replace(fetched, on_consumed=partial(queue.on_consumed, size_bytes))
                    following = queue.put(number, fetched, size_bytes, request)
                del fetched  # release the batch before waiting for the limit
    finally:
        # The client may have been opened after the stream was closed. If the queue has ended but the stream is open,
        # close the fetcher later, with the stream. Other fetchers of the same worker may still wait for the end marker.
        if queue.closed:
            fetcher.close()


@dataclass(frozen=True, slots=True)
class _Prefetched:
    """A queue item that contains a micro-batch, the end marker, or a batch without micro-batches.

    The item with the first micro-batch of a batch also contains the batch itself.
    """

    micro_batches: tuple[Any, ...]
    begins: FetchedBatch | End | None = None
    spans: Sequence[Span] = ()


class MicroBatchPrefetcher(_QueuedStream[BatchStream, _Prefetched]):
    """A stream that reads batches from another stream and splits them into micro-batches in the background.

    Lifecycle::

        __init__ ── thread starts ──> reads a batch ──> splits it, two micro-batches ahead ──┬──> the next batch
                                                                                            └──> end, error
        close() or garbage collection: the inner stream is closed, the thread ends

    Each batch is released together with its last micro-batch, before the background thread reads the next batch.
    """

    def __init__(self, inner: BatchStream, split: Callable[[FetchedBatch], Iterator[Any]]) -> None:
        # First item of the next batch. Its arrival shows that the previous batch has no more micro-batches.
        self._begun: _Prefetched | None = None
        limit = PrefetchLimit(_MICRO_BATCHES_AHEAD, sys.maxsize)
        super().__init__(inner.next_index, [inner], limit, partial(_split_ahead, split), "tq-split-ahead")

    def read(self) -> FetchedBatch | End | None:
        """Skip the rest of the current batch, and wait for the next batch or the end marker.

        Return None if the stream is closed.
        """
        while self._begun is None:
            if (item := self._get()) is None:
                return None
            self._begun = item if item.begins is not None else None
        begun, self._begun = self._begun, None
        if (collected := collected_here.get()) is not None:
            collected.add(begun.spans)
        if not isinstance(begun.begins, FetchedBatch):
            return begun.begins
        self.next_index = begun.begins.index + 1
        on_consumed = partial(self._on_consumed, begun.begins.on_consumed)
        return replace(begun.begins, micro_batches=self._micro_batches(begun.micro_batches), on_consumed=on_consumed)

    def _get(self) -> _Prefetched | None:
        item = self._queue.get()
        # The first micro-batch counts as prefetched until its batch is consumed. Later micro-batches count until they
        # are read.
        if item is not None and not isinstance(item.begins, FetchedBatch):
            self._queue.on_consumed()
        return item

    def _on_consumed(self, on_inner_consumed: Callable[[], None] | None) -> None:
        # Notify the inner stream first. Once notified, the splitting thread competes with this thread for the CPU.
        if on_inner_consumed is not None:
            on_inner_consumed()
        self._queue.on_consumed()

    def _micro_batches(self, first: tuple[Any, ...]) -> Iterator[Any]:
        yield from first
        del first
        while (item := self._get()) is not None:
            if item.begins is not None:
                self._begun = item
                return
            if (collected := collected_here.get()) is not None:
                collected.add(item.spans)
            yield from item.micro_batches
            del item


def _split_ahead(
    split: Callable[[FetchedBatch], Iterator[Any]], inner: BatchStream, queue: PrefetchQueue[_Prefetched]
) -> None:
    items = _items_of(inner, split)
    # Each item counts as prefetched before it is created.
    while (number := queue.begin()) is not None:
        with queue.filling(number):
            item = next(items, None)
            if item is None:
                queue.end(number)
            else:
                queue.put(number, item)
            del item


def _items_of(inner: BatchStream, split: Callable[[FetchedBatch], Iterator[Any]]) -> Iterator[_Prefetched]:
    while (batch := inner.read()) is not None:
        if isinstance(batch, End):
            yield _Prefetched((), batch)
            return
        began_at = time.perf_counter()
        micro_batches = split(batch)
        yield _Prefetched(_next_of(micro_batches), batch, _split_since(began_at))
        del batch  # the iterator keeps the batch alive until it has created the last micro-batch
        # A for loop would keep micro-batches alive.
        yield from iter(partial(_next_item, micro_batches), None)


def _next_item(micro_batches: Iterator[Any]) -> _Prefetched | None:
    began_at = time.perf_counter()
    found = _next_of(micro_batches)
    return _Prefetched(found, spans=_split_since(began_at)) if found else None


def _split_since(began_at: float) -> tuple[Span, ...]:
    return (Span(Stage.HOST, began_at, time.perf_counter()),)


def _next_of(micro_batches: Iterator[Any]) -> tuple[Any, ...]:
    """Return a tuple with the next micro-batch, or an empty tuple if there are no more micro-batches."""
    return tuple(itertools.islice(micro_batches, 1))
