"""Batches of a rank: the request, the fetching of batches and of the end, and streams that fetch and split ahead."""

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
from tq_service.data.columns import flatten, object_bytes
from tq_service.errors import NothingDeliveredError
from tq_service.results import WaitReason
from tq_service.schema import DEFAULT_POLICY, BatchUnit, EndCounts, ReadLayout, Unmatched
from tq_service.wire import cuda

if TYPE_CHECKING:
    import torch

    from tq_service.client import Client
    from tq_service.client.batch_meta import BatchMeta

FetchBatch = Callable[..., tuple[Any, Any]]
"""`fetch_batch_fn(**keywords) -> (data, meta)`; see `fetch_batch` for the keywords and the answer."""

OnWait = Callable[[WaitReason], object]
"""Called with the reason of a wait that lasts, in the thread or process that fetches."""

ClientFactory = Callable[[Any], Any]
"""Opens the sync client of a fetching thread or worker, given the address, or addresses, as the dataset was."""

# A fetch_batch_fn that says "not yet" without having waited is asked again after this long.
_RETRY_SECONDS = 0.05

# A call waits no longer than this, however long it may, so that why it waits is asked in time.
_LONGEST_CALL_SECONDS = 10.0
_MOST_CLAIMED: Final = 64  # batches by one call


class StreamClosedError(Exception):
    """The wait for a batch ended since its stream was closed."""


@dataclass(frozen=True, slots=True)
class StreamIdentity:
    """The incarnation of the partition and the epoch of the task: batches of different ones must not be mixed."""

    incarnation: bytes = b""
    epoch: int = 0

    @classmethod
    def of(cls, meta: Any) -> StreamIdentity:
        """Return that of a meta, whatever its type: fetch_batch_fn may have made it."""
        return cls(getattr(meta, "incarnation", b""), getattr(meta, "epoch", 0))


@dataclass(frozen=True, slots=True)
class Arrival:
    """A point in the work of a stream, behind which tensors are on a device.

    Attributes:
        device: the device.
        event: the point.
    """

    device: torch.device
    event: cuda.Event

    def take(self, tensors: Sequence[torch.Tensor]) -> None:
        """Let the current stream use tensors: it waits for them, and their memory stays until it has used them."""
        stream = cuda.current_stream(self.device)
        stream.wait_event(self.event)
        for tensor in tensors:
            cuda.used_by(tensor, stream)


@dataclass(frozen=True, slots=True, kw_only=True)
class FetchedBatch:
    """The part of one rank of one batch.

    Attributes:
        index: its batch_index.
        data: the TensorDict, or whatever fetch_batch_fn returned.
        meta: the samples of `data`.
        micro_batches: its micro-batches, where they are split ahead of the consumer.
        on_consumed: called when the consumer begins with it, so that another batch may be fetched in its place.
        measured_bytes: its `size_bytes`, where they have been measured before; None: they are to be measured.
        arrival: where its tensors are on a device, the point behind which they are; see `Arrival`.
    """

    index: int
    data: Any
    meta: BatchMeta
    micro_batches: Iterator[Any] | None = None
    on_consumed: Callable[[], None] | None = None
    measured_bytes: int | None = None
    arrival: Arrival | None = None

    @property
    def size_bytes(self) -> int:
        """Bytes of its tensors, arrays, texts and images, also in plain containers; other objects are not counted."""
        if self.measured_bytes is not None:
            return self.measured_bytes
        return flatten(self.data).size_bytes if isinstance(self.data, TensorDict) else object_bytes(self.data)


@dataclass(frozen=True, slots=True)
class End:
    """What a stream gives after its last batch.

    Attributes:
        identity: of the partition and the task's consumption.
        counts: what became of the samples, the same for all ranks; None where fetch_batch_fn made the end itself.
    """

    identity: StreamIdentity
    counts: EndCounts | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ExceptionWrapper:
    """An error of another process, or a stand-in of the same text where it cannot be pickled, and its traceback."""

    error: Exception
    traceback: str

    @classmethod
    def of(cls, error: Exception) -> ExceptionWrapper:
        """Return the wrapper of an exception that is being handled."""
        text = "".join(traceback.format_exception(error))
        try:
            ForkingPickler.loads(ForkingPickler.dumps(error))
        except Exception:  # an exception class may fail in any way to be copied
            error = RuntimeError(f"{type(error).__name__}: {error}")
        return cls(error=error, traceback=text)

    def with_note(self, origin: str) -> Exception:
        """Return the error with the traceback as a note, to be raised."""
        self.error.add_note(f"raised in {origin}:\n{self.traceback}")
        return self.error


class BatchStream(Protocol):
    """Gives batches one after the other; used by one thread."""

    @property
    def next_index(self) -> int:
        """The batch_index that `read` gives next."""
        ...

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        ...

    def read(self) -> FetchedBatch | End | None:
        """Wait for the next batch, or the end; None once it is closed. Errors of fetching are raised here."""
        ...

    def close(self) -> None:
        """Stop fetching and drop what was fetched ahead; it will be fetched again when asked for. Idempotent."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchRequest:
    """What a rank asks for, the same for each of its batches; the names are those of `Client.get_meta`.

    Attributes, besides those:
        version_lag: how many batches may be planned ahead of the published version of `policy`; None: any number.
        first_version: the version with which batch 0 is trained.
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
    device: Any = None
    version_lag: int | None = None
    first_version: int = 0
    policy: str = DEFAULT_POLICY

    def keywords(self, batch_index: int) -> dict[str, Any]:
        """Return the keyword arguments of fetch_batch_fn that the request gives for a batch."""
        named = {each.name: getattr(self, each.name) for each in fields(self)}
        lag, first, policy = (named.pop(name) for name in ("version_lag", "first_version", "policy"))
        given = ("layout", "max_uses", "unmatched", "least_members", "refill", "device")
        optional, max_refills = {name: named.pop(name) for name in given}, named.pop("max_refills")
        if self.refill is not None:
            optional["max_refills"] = max_refills
        if lag is not None and (version := first + batch_index - lag) > 0:
            optional |= {"not_before_version": version, "policy": policy}
        return named | {name: value for name, value in optional.items() if value is not None}


def end_warning(end: End, request: BatchRequest) -> str | None:
    """Return what to warn of: samples that were skipped, unless they were cleared, or kept from earlier epochs.

    Cleared ones are nothing to warn of: in a partition that lives for weeks, a task that comes late never gets most of
    them. Only what is the same for all ranks decides, so that all of them raise or none: the counts of the recorded
    end, never what this rank got. What the task consumed before this loader began is in them too, so that a restart
    behind the last batch is not an error.

    Raises:
        NothingDeliveredError: samples were inserted, and the task was given none.
    """
    counts = end.counts
    if counts is None or not (counts.skipped_count or counts.kept_count):
        return None
    why = "; ".join(_reasons(counts, request))
    if not counts.consumed_count and not counts.dead_lettered_count:
        raise NothingDeliveredError(
            f"task {request.task_name!r} is at the end of partition {request.partition_id!r} without one sample, "
            f"on all ranks; its {counts.skipped_count} samples were skipped: {why}",
            metadata={
                "partition_id": request.partition_id,
                "task_name": request.task_name,
                **{name: str(count) for name, count in counts.skipped_counts.items()},
            },
        )
    texts = [] if counts.skipped_count == counts.cleared_count else [f"{counts.skipped_count} were skipped: {why}"]
    if counts.kept_count:
        texts.append(
            f"{counts.kept_count} of them in earlier epochs, which reset_consumption(keep_consumed=True) does not "
            "deliver again: batches that a loader had fetched ahead and not handed out may be among them. To train on "
            "these, clear what was trained and reset without keep_consumed"
        )
    if not texts:
        return None
    return (
        f"task {request.task_name!r} is at the end of partition {request.partition_id!r}: {counts.consumed_count} "
        f"samples were consumed, {'; '.join(reversed(texts))}"
    )


def _reasons(counts: EndCounts, request: BatchRequest) -> list[str]:
    whole = request.batch_size * request.dp_size
    left_over = (
        f"left over by drop_last, or by the sampler {request.sampler!r}; a batch of all ranks has {whole} "
        f"{request.batch_unit}s"
        if request.drop_last
        else f"ready, but in no plan of the sampler {request.sampler!r}"
    )
    where = f"where={list(request.where)}" if request.where else "the where that fetch_batch_fn gave"
    texts = {
        "in_incomplete_groups_count": "in groups that are not whole (a member is missing, failed, cleared or ruled "
        "out; put as many as group_size says, or let the sampler's incomplete_groups='take' take the rest)",
        "excluded_count": f"ruled out by {where}",
        "overlong_count": "longer than the sampler's limit of tokens, which overlong='drop' leaves out",
        "left_over_count": left_over,
        "failed_count": "failed",
        "cleared_count": "cleared before the task took them",
        "dead_lettered_count": "delivered too often without being acknowledged",
    }
    skipped = counts.skipped_counts
    return [f"{skipped[name]} {text}" for name, text in texts.items() if name in skipped]


class ClaimsAhead:
    """Batches of a rank that were claimed with the one before them, and are yet to be fetched.

    Attributes:
        batch_count: how many batches the next claim may ask for.
        until: the batch_index behind the last batch that was claimed.
    """

    def __init__(self) -> None:
        self.batch_count = 1
        self.until = 0
        self._metas: dict[int, BatchMeta] = {}

    def claim(self, client: Client, *, batch_index: int, **claim: Any) -> BatchMeta:
        """Return a batch, claimed before or now, with as many behind it as are ready and wanted."""
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
    ahead: ClaimsAhead | None = None,
    **claim: Any,
) -> tuple[TensorDict | None, BatchMeta]:
    """Claim one batch and fetch its data: what `fetch_batch_fn` does unless another is given.

    A function that takes its place is called with keywords only and should accept `**others`, since keywords may be
    added: `client` (a sync client of the calling thread or worker), `batch_index`, `partition_id`, `task_name`,
    `data_fields`, `batch_size`, `micro_batch_size`, `dp_rank`, `dp_size`, `sampler`, `sampler_config`, `where`,
    `order_by`, `drop_last`, `batch_unit`, `finite`, `max_wait`, `timeout`, `incarnation`, `epoch` (b"" and None
    until the first batch has come), `layout`, `max_uses`, `unmatched`, `least_members`, `refill` and `max_refills`
    where the dataset was given them, `not_before_version` and `policy` where it was given a `version_lag`, `device`
    where the loader was given one and it fetches in this process (data that is returned on the CPU is copied up), and
    `explain` (True) where the wait has lasted and the answer's `waiting_for` is to say why. Only this function itself
    is given `ahead`, the batches that it has claimed and not fetched.

    Returns:
        The data and its meta. The data is None where the meta is no batch: with status "not_yet" the function is
        called again, with "end" the iteration ends. `(None, None)` means "not_yet".
    """
    ahead = ahead or ClaimsAhead()
    meta = ahead.claim(client, max_wait=max_wait, timeout=timeout, **claim)
    if meta.status != "batch":
        return None, meta
    where = {} if device is None else {"device": device}
    return client.get_data(meta, layout=layout, timeout=timeout, **where), meta


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchSource:
    """A service and a request to it; picklable where its functions are, so that it can be sent to worker processes.

    Attributes:
        address: where the service is.
        request: what is asked for.
        fetch_batch_fn: fetches a batch.
        on_wait: called with the reason of a wait that lasts.
        client_factory: opens the client; None: `Client` does, with `client_options`.
        client_options: token, tls, insecure and namespace.
    """

    address: str | Sequence[str] | None
    request: BatchRequest
    fetch_batch_fn: FetchBatch
    on_wait: OnWait
    client_factory: ClientFactory | None = None
    client_options: Mapping[str, Any] = field(default_factory=dict, repr=False)

    def of_partition(self, partition_id: str) -> BatchSource:
        """Return the same source for another partition."""
        return replace(self, request=replace(self.request, partition_id=partition_id))

    def of_version(self, first_version: int) -> BatchSource:
        """Return the same source, whose batch 0 is trained with another version."""
        return replace(self, request=replace(self.request, first_version=first_version))

    def to_device(self, device: Any) -> BatchSource:
        """Return the same source, of which batches are on a device as they are fetched."""
        return replace(self, request=replace(self.request, device=device))

    def open_client(self) -> Any:
        """Return a new sync client."""
        if self.client_factory is not None:
            return self.client_factory(self.address)
        from tq_service.client import Client  # noqa: PLC0415  (a client_factory makes it unnecessary)

        return Client(self.address, **self.client_options)


class BatchFetcher:
    """Fetches batches of a source with a sync client of its own; used by one thread.

    Once a batch has come, later ones must be of the same incarnation and epoch: a partition that is cleared and created
    again, or a task that is reset, ends the stream with the error of a stale claim instead of continuing in the middle
    of another one.

    Attributes:
        fetched_until: the batch_index behind the last batch that was fetched, or claimed to be fetched.
        closed: whether `close` was called.
    """

    def __init__(self, source: BatchSource, identity: StreamIdentity | None = None) -> None:
        self._source = source
        self._client: Any = None
        self._identity = identity
        self._ahead = ClaimsAhead()
        self.fetched_until = 0
        self.closed = False

    def request(self, batch_index: int) -> None:
        """Do nothing: `fetch` asks for the batch."""

    def fetch(self, batch_index: int, is_wanted: Callable[[], bool], batch_count: int = 1) -> FetchedBatch | End:
        """Wait for a batch, or the end, and return it.

        Args:
            batch_index: which batch.
            is_wanted: asked before each call; waiting ends once it is false.
            batch_count: how many batches may be claimed together, from this one on, to be fetched next.

        Raises:
            StreamClosedError: the batch is not wanted any more.
            TypeError: fetch_batch_fn returned no data for a batch.
        """
        if self._client is None:
            self._client = self._source.open_client()
        reports, request = WaitReports(), self._source.request
        max_wait = min(request.max_wait, _LONGEST_CALL_SECONDS)
        # With a version lag each batch waits for a version of its own.
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
                    f"fetch_batch_fn returned no data for batch {batch_index}, whose meta has status 'batch'; return "
                    "client.get_data(meta) for empty batches too, since every rank needs them"
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
                time.sleep(_RETRY_SECONDS)
        raise StreamClosedError

    def close(self) -> None:
        """Close the client; a call in progress in another thread ends. Idempotent."""
        self.closed = True
        if self._client is not None:
            self._client.close()


class InlineStream(BatchFetcher):
    """A stream that fetches in the thread that reads it."""

    def __init__(self, source: BatchSource, batch_index: int, identity: StreamIdentity | None) -> None:
        super().__init__(source, identity)
        self.next_index = batch_index

    def read(self) -> FetchedBatch | End:
        """Fetch the next batch, or the end."""
        fetched = self.fetch(self.next_index, lambda: True)
        self.next_index = max(self.next_index, self.fetched_until)
        return fetched


OnBegun = Callable[[int], None]
S = TypeVar("S", bound="Fetcher | BatchStream")
T = TypeVar("T")

# How long closing a stream waits for a thread. A thread that is still in a call by then ends with it.
_JOIN_SECONDS: Final = 5.0
_MICRO_BATCHES_AHEAD: Final = 2


class PrefetchLimit:
    """Decides whether a further batch may be begun, by number and by bytes.

    A batch is ahead from `begin` until `consume`; its size is known from `arrive` on. Until then it counts as much as
    the largest batch that has arrived, and before one has arrived only one is under way. So as long as no batch is
    larger than all before it, what is ahead stays within `max_bytes`. Larger ones may exceed it, each by its difference
    to the largest before it, and are the measure for those that follow. With nothing ahead a batch is always admitted,
    however large: the consumer waits for it.

    Not safe for several threads; its owner guards it.

    Args:
        max_batches: most batches ahead.
        max_bytes: most bytes of the batches ahead.
    """

    def __init__(self, max_batches: int, max_bytes: int) -> None:
        self._max_batches = max_batches
        self._max_bytes = max_bytes
        self._under_way = 0
        self._arrived = 0
        self._arrived_bytes = 0
        self._largest_bytes: int | None = None

    def admits(self) -> bool:
        """Whether another batch may be begun."""
        return self._under_way + self._arrived == 0 or self.further_count() > 0

    def further_count(self) -> int:
        """Return how many batches may be begun beside those that are ahead."""
        if self._largest_bytes is None:
            return 0
        by_number = self._max_batches - self._under_way - self._arrived
        by_bytes = (self._max_bytes - self._arrived_bytes) // max(1, self._largest_bytes) - self._under_way
        return max(0, min(by_number, by_bytes))

    def begin(self) -> None:
        """Count a batch that is requested from now on."""
        self._under_way += 1

    def arrive(self, size_bytes: int) -> None:
        """Count a batch that was begun as `size_bytes` large."""
        self._under_way -= 1
        self._arrived += 1
        self._arrived_bytes += size_bytes
        self._largest_bytes = max(self._largest_bytes or 0, size_bytes)

    def consume(self, size_bytes: int) -> None:
        """Count a batch that had arrived as no longer ahead."""
        self._arrived -= 1
        self._arrived_bytes -= size_bytes


class PrefetchQueue(Generic[T]):
    """A bounded queue of numbered items with one reader; one condition, predicate waits, `close` wakes all.

    Writers begin items in the order of their numbers, and put them in any order; the reader gets them in order.

    Attributes:
        closed: whether `close` was called.
    """

    def __init__(self, limit: PrefetchLimit) -> None:
        self._limit = limit
        # The condition's lock is reentrant: `close` may run in a finalizer, in a thread that holds it.
        self._changed = threading.Condition()
        self._items: dict[int, T] = {}
        self._begun_count = self._read_count = 0
        self._end: tuple[int, BaseException | None] | None = None  # the first number without an item, and why
        self.closed = False

    def begin(self, on_begun: OnBegun = lambda number: None) -> int | None:
        """Wait until the limit admits another item, and return its number; None once there is an end.

        `on_begun` is called with the number before another writer begins the next item; it must not wait.
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
        """Return how many items the limit admits beside those that were begun."""
        with self._changed:
            return self._limit.further_count()

    @contextmanager
    def filling(self, number: int) -> Iterator[None]:
        """Make an error of a block, in which the item of this number is made, the end of the queue."""
        try:
            yield
        except StreamClosedError:
            self.end(number)
        except BaseException as error:  # whatever it is, it belongs to the reader
            self.end(number, error)

    def put(self, number: int, item: T, size_bytes: int = 0, on_begun: OnBegun | None = None) -> int | None:
        """Add an item that was begun; it is dropped if the queue was closed meanwhile.

        With `on_begun` its writer begins another one, as with `begin`, before other writers do: return the number of
        that, None if the limit does not admit it now.
        """
        with self._changed:
            self._limit.arrive(size_bytes)
            if not self.closed:
                self._items[number] = item
                self._changed.notify_all()
            return None if on_begun is None else self._begin_now(on_begun)

    def end(self, number: int, error: BaseException | None = None) -> None:
        """Have no items from this number on; an error is raised to the reader once it has those before."""
        with self._changed:
            if self._end is None or number < self._end[0]:
                self._end = number, error
            self._changed.notify_all()

    def get(self) -> T | None:
        """Wait for the next item; None after the last one.

        The item stays ahead until `on_consumed`: its reader may not begin with it at once.
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
        """Admit a further item: one of this size is in use and not ahead any more."""
        with self._changed:
            self._limit.consume(size_bytes)
            self._changed.notify_all()

    def close(self) -> None:
        """Drop the items, and end the waits of both sides. Idempotent."""
        with self._changed:
            self.closed = True
            self._items.clear()
            self._changed.notify_all()


class _QueuedStream(Generic[S, T]):
    """A stream whose items background threads put into a queue, one thread for each source.

    The threads refer to the queue and the sources only, never to the stream, so that a stream that is no longer read is
    collected and ends its threads.

    Attributes:
        next_index: the batch_index that `read` gives next.
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
        """Whether `close` was called."""
        return self._queue.closed

    def close(self) -> None:
        """End the threads and drop what they put into the queue. Idempotent."""
        self._end()


def _end(queue: PrefetchQueue[Any], sources: Sequence[Fetcher | BatchStream], threads: list[threading.Thread]) -> None:
    """Close a queue and what its items are read from, and wait for the threads that do so."""
    # In this order: a reader must find the stream closed before the source is. It would take None for the end, and an
    # error of a call that a thread is in for one that concerns it.
    queue.close()
    for source in sources:
        source.close()
    deadline = time.monotonic() + _JOIN_SECONDS  # of all together: each may be in a call that takes its time
    for thread in threads:
        # A cycle that holds the stream may be collected by a thread itself, which cannot join itself.
        if threading.current_thread() is not thread:
            thread.join(max(0.0, deadline - time.monotonic()))


class Fetcher(Protocol):
    """Fetches batches in the thread that calls it, or by a worker process."""

    @property
    def fetched_until(self) -> int:
        """The batch_index behind the last batch that was fetched, or claimed to be fetched."""
        ...

    def request(self, batch_index: int) -> None:
        """Take notice of the batch that `fetch` is called for next, in the order of batches; does not wait."""
        ...

    def fetch(self, batch_index: int, is_wanted: Callable[[], bool], batch_count: int) -> FetchedBatch | End:
        """Wait for a batch, or the end, and return it; StreamClosedError once it is not wanted any more.

        Up to `batch_count` batches, from this one on, may be claimed with it.
        """
        ...

    def close(self) -> None:
        """End the call of `fetch` in progress in another thread. Idempotent."""
        ...


class PrefetchStream(_QueuedStream[Fetcher, FetchedBatch | End]):
    """Fetches batches ahead with one or more fetchers, bounded by number and bytes.

    Lifecycle::

        __init__ ── threads start ──> fetch while the limit admits ──┬─ end ────> read() returns it
                                             ^                       ├─ error ──> read() raises it
                                   on_consumed of a batch            └─ close() or garbage collection: threads end

    Each thread takes the next batch that nobody fetches; `read` gives them in order.
    """

    def __init__(self, fetchers: Sequence[Fetcher], batch_index: int, limit: PrefetchLimit) -> None:
        super().__init__(batch_index, fetchers, limit, partial(_fetch_ahead, batch_index), "tq-prefetch")

    @property
    def fetched_until(self) -> int:
        """The batch_index behind the last batch that was fetched."""
        return max(fetcher.fetched_until for fetcher in self._sources)

    def read(self) -> FetchedBatch | End | None:
        """Wait for the next batch, or the end; None once it is closed. An error of a thread is raised as it is."""
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
                    # By the fetcher that is quick now: a worker that has just started could come last with a batch that
                    # is read first.
                    size_bytes = fetched.size_bytes
                    fetched = replace(fetched, on_consumed=partial(queue.on_consumed, size_bytes))
                    following = queue.put(number, fetched, size_bytes, request)
                del fetched  # not kept alive while the limit is waited for
    finally:
        # Its client may have been opened when the stream was already closed. At the end of the batches, which other
        # fetchers of the same worker may still wait for, `close` of the stream does it.
        if queue.closed:
            fetcher.close()


@dataclass(frozen=True, slots=True)
class _Prefetched:
    """An item of the queue: a micro-batch, with its batch if it is the first, or the end.

    A batch that has no micro-batch comes without one.
    """

    micro_batches: tuple[Any, ...]
    begins: FetchedBatch | End | None = None


class MicroBatchPrefetcher(_QueuedStream[BatchStream, _Prefetched]):
    """Reads the batches of another stream, and splits each into its micro-batches before they are asked for.

    Lifecycle::

        __init__ ── thread starts ──> reads a batch ──> splits it, two micro-batches ahead ──┬──> the next batch
                                                                                            └──> end, error
        close() or garbage collection: the inner stream is closed, the thread ends

    A batch is dropped with its last micro-batch, before the next one is read.
    """

    def __init__(self, inner: BatchStream, split: Callable[[FetchedBatch], Iterator[Any]]) -> None:
        # The first item of the next batch, which was found behind the last one of the batch before.
        self._begun: _Prefetched | None = None
        limit = PrefetchLimit(_MICRO_BATCHES_AHEAD, sys.maxsize)
        super().__init__(inner.next_index, [inner], limit, partial(_split_ahead, split), "tq-split-ahead")

    def read(self) -> FetchedBatch | End | None:
        """Wait for the next batch, or the end, leaving out what is left of the one before; None once it is closed."""
        while self._begun is None:
            if (item := self._get()) is None:
                return None
            self._begun = item if item.begins is not None else None
        begun, self._begun = self._begun, None
        if not isinstance(begun.begins, FetchedBatch):
            return begun.begins
        self.next_index = begun.begins.index + 1
        on_consumed = partial(self._on_consumed, begun.begins.on_consumed)
        return replace(begun.begins, micro_batches=self._micro_batches(begun.micro_batches), on_consumed=on_consumed)

    def _get(self) -> _Prefetched | None:
        item = self._queue.get()
        # The first micro-batch of a batch stays ahead until the batch is consumed; each other one is consumed at once.
        if item is not None and not isinstance(item.begins, FetchedBatch):
            self._queue.on_consumed()
        return item

    def _on_consumed(self, on_inner_consumed: Callable[[], None] | None) -> None:
        # The inner stream first: the thread that splits competes with this one as soon as it may go on.
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
            yield from item.micro_batches
            del item


def _split_ahead(
    split: Callable[[FetchedBatch], Iterator[Any]], inner: BatchStream, queue: PrefetchQueue[_Prefetched]
) -> None:
    items = _items_of(inner, split)
    # Each item is counted before it is made.
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
        micro_batches = split(batch)
        yield _Prefetched(_next_of(micro_batches), batch)
        del batch  # the iterator refers to it until the last micro-batch is made
        yield from map(_Prefetched, iter(partial(_next_of, micro_batches), ()))  # keeps none of them alive


def _next_of(micro_batches: Iterator[Any]) -> tuple[Any, ...]:
    """Return the next one in a tuple, which is empty after the last one."""
    return tuple(itertools.islice(micro_batches, 1))
