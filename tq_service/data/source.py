"""Fetching of batches: the request of a rank, the service it goes to, and the wait for the answer."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from tensordict import TensorDict

from tq_service.client.transport import WaitReports, warn_of_wait
from tq_service.data.batch import End, FetchedBatch, StreamIdentity
from tq_service.results import WaitReason
from tq_service.schema import BatchUnit, ReadLayout

if TYPE_CHECKING:
    from tq_service.client import Client
    from tq_service.client.batch_meta import BatchMeta
    from tq_service.wire.connection import Tls

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


class StreamClosedError(Exception):
    """The wait for a batch ended since its stream was closed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchRequest:
    """What a rank asks for, the same for each of its batches; the names are those of `Client.get_meta`."""

    partition_id: str
    task_name: str
    data_fields: tuple[str, ...]
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

    def keywords(self) -> dict[str, Any]:
        """Return the keyword arguments of fetch_batch_fn that the request gives."""
        return {
            "partition_id": self.partition_id,
            "task_name": self.task_name,
            "data_fields": list(self.data_fields),
            "batch_size": self.batch_size,
            "micro_batch_size": self.micro_batch_size,
            "dp_rank": self.dp_rank,
            "dp_size": self.dp_size,
            "sampler": self.sampler,
            "sampler_config": None if self.sampler_config is None else dict(self.sampler_config),
            "where": list(self.where),
            "order_by": list(self.order_by),
            "drop_last": self.drop_last,
            "batch_unit": self.batch_unit,
            "finite": self.finite,
            "max_wait": self.max_wait,
            "timeout": self.timeout,
            **({} if self.layout is None else {"layout": self.layout}),
            **({} if self.max_uses is None else {"max_uses": self.max_uses}),
        }


def fetch_batch(
    *, client: Client, max_wait: float, timeout: float, layout: ReadLayout | None = None, **claim: Any
) -> tuple[TensorDict | None, BatchMeta]:
    """Claim one batch and fetch its data: what `fetch_batch_fn` does unless another is given.

    A function that takes its place is called with keywords only and should accept `**others`, since keywords may be
    added: `client` (a sync client of the calling thread or worker), `batch_index`, `partition_id`, `task_name`,
    `data_fields`, `batch_size`, `micro_batch_size`, `dp_rank`, `dp_size`, `sampler`, `sampler_config`, `where`,
    `order_by`, `drop_last`, `batch_unit`, `finite`, `max_wait`, `timeout`, `incarnation`, `epoch` (b"" and None
    until the first batch has come), `layout` and `max_uses` where the dataset was given them, and `explain` (True)
    where the wait has lasted and the answer's `waiting_for` is to say why.

    Returns:
        The data and its meta. The data is None where the meta is no batch: with status "not_yet" the function is
        called again, with "end" the iteration ends. `(None, None)` means "not_yet".
    """
    meta = client.get_meta(max_wait=max_wait, timeout=timeout, **claim)
    if meta.status != "batch":
        return None, meta
    return client.get_data(meta, layout=layout, timeout=timeout), meta


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchSource:
    """A service and a request to it; picklable where its functions are, so that it can be sent to worker processes."""

    address: str | Sequence[str] | None
    request: BatchRequest
    fetch_batch_fn: FetchBatch
    client_factory: ClientFactory | None = None
    token: str | Path | Literal[False] | None = field(default=None, repr=False)
    tls: Tls | Literal[False] | None = None
    insecure: bool | None = None
    namespace: str | Literal[False] | None = None
    on_wait: OnWait = warn_of_wait

    def of_partition(self, partition_id: str) -> BatchSource:
        """Return the same source for another partition."""
        return replace(self, request=replace(self.request, partition_id=partition_id))

    def open_client(self) -> Any:
        """Return a new sync client."""
        if self.client_factory is not None:
            return self.client_factory(self.address)
        from tq_service.client import Client  # noqa: PLC0415  (a client_factory makes it unnecessary)

        return Client(self.address, token=self.token, tls=self.tls, insecure=self.insecure, namespace=self.namespace)


class BatchFetcher:
    """Fetches batches of a source with a sync client of its own; used by one thread.

    Once a batch has come, later ones must be of the same incarnation and epoch: a partition that is cleared and created
    again, or a task that is reset, ends the stream with the error of a stale claim instead of continuing in the middle
    of another one.
    """

    def __init__(self, source: BatchSource, identity: StreamIdentity | None = None) -> None:
        self._source = source
        self._client: Any = None
        self._identity = identity
        self.fetched_until = 0  # the batch_index behind the last batch that was fetched

    def fetch(self, batch_index: int, is_wanted: Callable[[], bool]) -> FetchedBatch | End:
        """Wait for a batch, or the end, and return it.

        Args:
            batch_index: which batch.
            is_wanted: asked before each call; waiting ends once it is false.

        Raises:
            StreamClosedError: the batch is not wanted any more.
            TypeError: fetch_batch_fn returned no data for a batch.
        """
        if self._client is None:
            self._client = self._source.open_client()
        reports, request = WaitReports(), self._source.request
        max_wait = min(request.max_wait, _LONGEST_CALL_SECONDS)
        while is_wanted():
            asked_at = time.monotonic()
            explaining = {"explain": True} if reports.is_due_after(max_wait) else {}
            data, meta = self._source.fetch_batch_fn(
                client=self._client,
                batch_index=batch_index,
                incarnation=self._identity.incarnation if self._identity else b"",
                epoch=self._identity.epoch if self._identity else None,
                **explaining,
                **request.keywords() | {"max_wait": max_wait},
            )
            status = "not_yet" if meta is None else meta.status
            if status == "end":
                return End.of(meta)
            if status == "batch":
                return self._accept(batch_index, data, meta)
            reason: WaitReason | None = getattr(meta, "waiting_for", None)
            if reason is not None:
                reports.made()
                self._source.on_wait(reason)
            if time.monotonic() - asked_at < _RETRY_SECONDS:
                time.sleep(_RETRY_SECONDS)
        raise StreamClosedError

    def _accept(self, batch_index: int, data: Any, meta: Any) -> FetchedBatch:
        if data is None:
            raise TypeError(
                f"fetch_batch_fn returned no data for batch {batch_index}, whose meta has status 'batch'; return "
                "client.get_data(meta) for empty batches too, since every rank needs them"
            )
        batch = FetchedBatch(index=batch_index, data=data, meta=meta)
        self._identity = batch.identity
        self.fetched_until = batch_index + 1
        return batch

    def close(self) -> None:
        """Close the client; a call in progress in another thread ends. Idempotent."""
        if self._client is not None:
            self._client.close()


class InlineStream:
    """A stream that fetches in the thread that reads it."""

    def __init__(self, source: BatchSource, batch_index: int, identity: StreamIdentity | None) -> None:
        self._fetcher = BatchFetcher(source, identity)
        self.next_index = batch_index
        self._closed = False

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._closed

    @property
    def fetched_until(self) -> int:
        """The batch_index behind the last batch that was fetched."""
        return self._fetcher.fetched_until

    def read(self) -> FetchedBatch | End:
        """Fetch the next batch, or the end."""
        fetched = self._fetcher.fetch(self.next_index, lambda: True)
        if isinstance(fetched, FetchedBatch):
            self.next_index += 1
        return fetched

    def close(self) -> None:
        """Close the client."""
        self._closed = True
        self._fetcher.close()
