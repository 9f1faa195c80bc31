"""Streams that are fetched by worker processes, which share the batches of their rank.

Lifecycle::

    WorkerPool()  ── start(0, ...)    ──> workers start;    worker w of W fetches batches w, w+W, w+2W, ...
                  ── stream.close()   ──> workers stop fetching and idle; what they fetched ahead is dropped
                  ── start(k, ...)    ──> the same workers; worker w fetches batches k+w, k+w+W, ...
                  ── close() or garbage collection ──> workers end

Each start is a generation with an assignment that every worker is sent through a pipe of its own. A worker goes on as
long as its generation is the shared one, so that neither a closed stream nor `step()` leaves it waiting for a batch
that nobody wants.
"""

from __future__ import annotations

import itertools
import multiprocessing
import time
import traceback
import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.context import BaseContext
from multiprocessing.reduction import ForkingPickler
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from tq_service.data.batch import Batch, Life
from tq_service.data.source import BatchFetcher, BatchSource, StreamClosedError, parent_is_alive
from tq_service.data.transport import Parcel, pack, unpack

_DEATH_NOTICE_SECONDS = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Assignment:
    """What the workers fetch from now on: batches of the partition, from `batch_index`."""

    generation: int
    partition_id: str
    batch_index: int
    life: Life | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """What a worker sends instead of a batch: the error, or a stand-in where it cannot travel, and where it was."""

    error: Exception
    worker_traceback: str

    @classmethod
    def of(cls, error: Exception) -> Failure:
        """Return the failure of an exception that is being handled."""
        text = "".join(traceback.format_exception(error))
        try:
            ForkingPickler.loads(ForkingPickler.dumps(error))
        except Exception:  # an exception class may fail in any way to be copied
            error = RuntimeError(f"{type(error).__name__}: {error}")
        return cls(error=error, worker_traceback=text)


class WorkerPool:
    """Worker processes that live until `close`, and the one stream they fetch at a time.

    Workers get the source when they start, so that with fork its functions need not be picklable; of it only the
    partition changes later.
    """

    def __init__(self, source: BatchSource, num_workers: int, prefetch_factor: int, context: BaseContext) -> None:
        pipes = [context.Pipe(duplex=False) for _ in range(num_workers)]
        self._outboxes = [sender for _, sender in pipes]
        # Written by the parent only, and read whole: needs no lock, which a killed worker could leave locked.
        self._generation = context.Value("q", 0, lock=False)
        self._loader = _torch_loader(
            _WorkerDataset(source, [receiver for receiver, _ in pipes], self._generation),
            num_workers=num_workers,
            prefetch_factor=prefetch_factor,
            context=context,
        )
        self._iterator: Any = None
        # Before the workers are joined, those that wait for a batch must learn that nobody wants it.
        weakref.finalize(self, _abandon, self._generation)

    def start(self, partition_id: str, batch_index: int, life: Life | None) -> Iterator[Parcel | Failure]:
        """Make the workers fetch from `batch_index` on, and return what they send, in order."""
        self.abandon()
        assignment = Assignment(
            generation=self._generation.value, partition_id=partition_id, batch_index=batch_index, life=life
        )
        for outbox in self._outboxes:
            outbox.send(assignment)
        with _more_workers_than_cpus():
            parcels: Iterator[Parcel | Failure] = iter(self._loader)
        self._iterator = parcels
        return parcels

    def abandon(self) -> None:
        """Make the workers stop fetching."""
        _abandon(self._generation)

    def close(self) -> None:
        """End the workers. Idempotent."""
        self.abandon()
        iterator, self._iterator = self._iterator, None
        if iterator is not None:
            # Torch would end them when the iterator is garbage, but the traceback of an error may keep it alive.
            iterator._shutdown_workers()
        for outbox in self._outboxes:
            outbox.close()


class WorkerStream:
    """The stream that a pool fetches."""

    def __init__(self, pool: WorkerPool, partition_id: str, batch_index: int, life: Life | None) -> None:
        self._pool = pool
        self._parcels: Iterator[Parcel | Failure] | None = pool.start(partition_id, batch_index, life)
        self._next_index = batch_index

    @property
    def next_index(self) -> int:
        """The batch_index that `read` gives next."""
        return self._next_index

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._parcels is None

    def read(self) -> Batch | None:
        """Wait for the next batch; None at the end. Raises what a worker raised, and RuntimeError if one died."""
        if self._parcels is None:
            return None
        try:
            arrived = next(self._parcels, None)
        except (OSError, EOFError) as error:
            # A tensor of a dead worker was being received. Torch's handler of SIGCHLD is about to raise, wherever the
            # main thread is: better here than while the other workers are ended.
            time.sleep(_DEATH_NOTICE_SECONDS)
            raise RuntimeError(f"a worker process died while it handed over batch {self._next_index}") from error
        if arrived is None:
            return None
        if isinstance(arrived, Failure):
            arrived.error.add_note(f"raised in a worker process:\n{arrived.worker_traceback}")
            raise arrived.error
        if arrived.index != self._next_index:
            raise RuntimeError(f"got batch {arrived.index} from the workers; expected batch {self._next_index}")
        self._next_index += 1
        return unpack(arrived)

    def close(self) -> None:
        """Make the workers idle. Idempotent."""
        if self._parcels is not None:
            self._parcels = None
            self._pool.abandon()


class _WorkerDataset(IterableDataset[Any]):
    """What runs in the workers: each iteration serves one assignment."""

    def __init__(self, source: BatchSource, inboxes: list[Connection], generation: Any) -> None:
        self._source = source
        self._inboxes = inboxes
        self._generation = generation

    def __iter__(self) -> Iterator[Parcel | Failure]:
        worker = get_worker_info()
        if worker is None:
            raise RuntimeError("a worker's dataset was iterated outside of a worker process")
        # Received here and not in the generator: there is one assignment for each iteration, also for one of which
        # nothing is read.
        assignment: Assignment = self._inboxes[worker.id].recv()
        return _serve(
            BatchFetcher(self._source.of_partition(assignment.partition_id), assignment.life),
            range_start=assignment.batch_index + worker.id,
            range_step=worker.num_workers,
            is_wanted=lambda: self._generation.value == assignment.generation and parent_is_alive(),
        )


def _serve(
    fetcher: BatchFetcher, *, range_start: int, range_step: int, is_wanted: Callable[[], bool]
) -> Iterator[Parcel | Failure]:
    try:
        for batch_index in itertools.count(range_start, range_step):
            batch = fetcher.fetch(batch_index, is_wanted)
            if batch is None:
                return
            yield pack(batch)
    except StreamClosedError:
        return
    except Exception as error:  # whatever it is, it belongs to the reader in the parent
        yield Failure.of(error)
    finally:
        fetcher.close()


def _torch_loader(
    dataset: IterableDataset[Any], *, num_workers: int, prefetch_factor: int, context: BaseContext
) -> DataLoader[Any]:
    with _more_workers_than_cpus():
        return DataLoader(
            dataset,
            batch_size=None,
            collate_fn=_unchanged,
            num_workers=num_workers,
            prefetch_factor=prefetch_factor,
            multiprocessing_context=context,
            persistent_workers=True,
        )


@contextmanager
def _more_workers_than_cpus() -> Iterator[None]:
    """Silence torch's warning: workers wait for the network most of the time, so more of them than CPUs are fine."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="This DataLoader will create", category=UserWarning)
        yield


def _unchanged(item: Any) -> Any:
    return item


def _abandon(generation: Any) -> None:
    generation.value += 1


def worker_context(name: str | BaseContext | None, source: BatchSource) -> BaseContext:
    """Return the way worker processes are started.

    Args:
        name: "fork", "spawn", "forkserver", or a context. None: forkserver, and fork where it is not available or the
            functions of the source cannot be pickled. A fork while another thread is inside a gRPC call, of whatever
            client, leaves gRPC broken in the child; the children of a fork server have nothing of this process.
        source: what the workers fetch from.
    """
    if isinstance(name, BaseContext):
        return name
    if name is None:
        name = "forkserver" if "forkserver" in multiprocessing.get_all_start_methods() and _pickles(source) else "fork"
    context: BaseContext = torch.multiprocessing.get_context(name)
    if name == "forkserver":
        context.set_forkserver_preload(["tq_service.data.workers"])
    return context


def _pickles(source: BatchSource) -> bool:
    try:
        ForkingPickler.dumps(source)
    except Exception:  # whatever a function's own pickling may raise
        return False
    return True
