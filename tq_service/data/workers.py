"""Streams that are fetched by worker processes, which share the batches of their rank.

Lifecycle::

    WorkerPool()  ──────────────────> workers start and idle
    WorkerStream(pool, index=0) ────> orders batches 0, 1, 2, ... as far ahead as its bound allows, from whoever has
                                      the fewest orders; each batch that arrives or is read makes room for the next
         stream.close() ────────────> workers stop fetching and idle; what they fetched ahead is dropped
    WorkerStream(pool, index=k) ────> the same workers, from batch k
    pool.close() or garbage collection ──> workers end

All bookkeeping is in the parent: a worker knows nothing of other workers, and of a batch only that it was ordered.
"""

from __future__ import annotations

import multiprocessing
import multiprocessing.connection
import threading
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from multiprocessing.connection import Connection
from multiprocessing.context import BaseContext
from multiprocessing.process import BaseProcess
from multiprocessing.reduction import ForkingPickler, recv_handle
from typing import Any

from tq_service.data.ahead import AheadBound
from tq_service.data.batch import Batch, Life
from tq_service.data.blocks import BlockReader
from tq_service.data.end import End
from tq_service.data.source import BatchSource
from tq_service.data.transport import Parcel, unpack
from tq_service.data.worker_messages import Answer, Failure, Order, Stop
from tq_service.data.worker_process import run_worker
from tq_service.wire.dtypes import Bytes

# A worker ends at once unless a fetch_batch_fn holds it.
_JOIN_SECONDS = 5.0


class WorkerDiedError(RuntimeError):
    """A worker process ended by itself."""


@dataclass(frozen=True, slots=True)
class Arrived:
    """What a worker answered to an order, with the block where the batch lies."""

    content: Parcel | Failure | End
    block: Bytes | None = None


@dataclass(slots=True)
class _Worker:
    process: BaseProcess
    connection: Connection
    blocks: BlockReader = field(default_factory=BlockReader)
    order_count: int = 0


class WorkerPool:
    """Worker processes that live until `close`, and the one stream they fetch at a time.

    Workers get the source when they start, so that with fork its functions need not be picklable; of it only the
    partition changes later. One thread receives; `order` and `stop` may come from others.
    """

    def __init__(self, source: BatchSource, num_workers: int, context: BaseContext) -> None:
        self._workers = [_start_worker(source, number, context) for number in range(num_workers)]
        self._stream = 0
        self._stopped = False
        # Reentrant: a finalizer may stop in the middle of an order.
        self._lock = threading.RLock()
        self._wakeup, self._waker = multiprocessing.Pipe(duplex=False)
        self._finalizer = weakref.finalize(self, _end_workers, self._workers)

    def start(self) -> int:
        """Begin a stream, which ends the one before it, and return its number."""
        self.stop(self._stream)
        with self._lock:
            self._stream += 1
            self._stopped = False
            while self._wakeup.poll():
                self._wakeup.recv_bytes()
            for worker in self._workers:
                worker.order_count = 0
            return self._stream

    def stop(self, stream: int) -> None:
        """Make the workers drop what a stream ordered, and `receive` return. Idempotent."""
        with self._lock:
            if stream != self._stream or self._stopped:
                return
            self._stopped = True
            self._waker.send_bytes(b"stop")
            for worker in self._workers:
                _send(worker, Stop(stream=stream))

    def order(self, order: Order) -> None:
        """Have a batch fetched by the worker that has the fewest orders."""
        with self._lock:
            worker = min(self._workers, key=lambda worker: worker.order_count)
            worker.order_count += 1
            _send(worker, replace(order, released=worker.blocks.take_released()))

    def receive(self, stream: int, *, wait: bool) -> dict[int, Arrived]:
        """Return what has arrived for a stream, by batch_index; nothing once it was stopped.

        Args:
            stream: its number.
            wait: whether to wait until something arrives.

        Raises:
            WorkerDiedError: a worker died.
        """
        sources: list[Any] = [self._wakeup]
        for worker in self._workers:
            sources += [worker.connection, worker.process.sentinel]
        arrived: dict[int, Arrived] = {}
        while not arrived and not self._stopped and stream == self._stream:
            ready = multiprocessing.connection.wait(sources, None if wait else 0)
            for worker in self._workers:
                if worker.connection in ready or worker.process.sentinel in ready:
                    answer, block = _receive(worker)
                    if answer.stream == stream:
                        arrived[answer.batch_index] = Arrived(answer.content, block)
                        with self._lock:
                            worker.order_count -= 1
            if not wait:
                break
        return arrived

    def close(self) -> None:
        """End the workers. Idempotent."""
        self.stop(self._stream)
        self._finalizer()


class WorkerStream:
    """The stream that a pool fetches."""

    def __init__(
        self, pool: WorkerPool, partition_id: str, batch_index: int, life: Life | None, bound: AheadBound
    ) -> None:
        self._pool = pool
        self._number = pool.start()
        self._partition_id = partition_id
        self._life = life
        self._bound = bound
        self._next_index = batch_index
        self._next_order = batch_index
        self._arrived: dict[int, Arrived] = {}
        # Nothing is ordered any more: the end was seen, or an error.
        self._ordered_all = False
        self._closed = False
        # A batch may be taken by another thread than the one that reads.
        self._lock = threading.RLock()
        self._order()

    @property
    def next_index(self) -> int:
        """The batch_index that `read` gives next."""
        return self._next_index

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._closed

    def read(self) -> Batch | End | None:
        """Wait for the next batch, or the end; None once it is closed.

        Raises:
            WorkerDiedError: a worker died.
            Exception: what a worker raised.
        """
        self._receive(wait=False)
        while (arrived := self._arrived.get(self._next_index)) is None:
            if self._closed:
                return None
            self._receive(wait=True)
        if isinstance(arrived.content, End):
            return arrived.content
        if isinstance(arrived.content, Failure):
            arrived.content.error.add_note(f"raised in a worker process:\n{arrived.content.worker_traceback}")
            raise arrived.content.error
        if arrived.block is None:
            raise RuntimeError(f"batch {self._next_index} came without its block")
        batch = unpack(arrived.content, arrived.block)
        self._arrived.pop(self._next_index, None)  # unless `close` dropped it meanwhile
        self._next_index += 1
        return replace(batch, taken=partial(self._take, arrived.content.size_bytes))

    def _receive(self, *, wait: bool) -> None:
        arrived = self._pool.receive(self._number, wait=wait)
        self._arrived.update(arrived)
        with self._lock:
            for answer in arrived.values():
                if isinstance(answer.content, Parcel):
                    self._bound.arrive(answer.content.size_bytes)
                else:
                    self._bound.arrive(0)
                    self._ordered_all = True
            self._order()

    def _take(self, size_bytes: int) -> None:
        with self._lock:
            self._bound.take(size_bytes)
            self._order()

    def _order(self) -> None:
        while not self._ordered_all and not self._closed and self._bound.admits():
            self._bound.begin()
            self._pool.order(
                Order(
                    stream=self._number,
                    partition_id=self._partition_id,
                    batch_index=self._next_order,
                    life=self._life,
                )
            )
            self._next_order += 1

    def close(self) -> None:
        """Make the workers idle. Idempotent."""
        if not self._closed:
            self._closed = True
            self._pool.stop(self._number)
            self._arrived.clear()


def _start_worker(source: BatchSource, number: int, context: BaseContext) -> _Worker:
    connection, of_worker = context.Pipe()
    # Each context has it, though the stubs of their base class do not.
    make_process: Callable[..., BaseProcess] = context.Process  # type: ignore[attr-defined]
    process = make_process(target=run_worker, args=(source, of_worker), name=f"tq-worker-{number}", daemon=True)
    process.start()
    of_worker.close()
    return _Worker(process=process, connection=connection)


def _send(worker: _Worker, message: Order | Stop | None) -> None:
    with suppress(OSError):  # dead or ended: `receive` tells
        worker.connection.send(message)


def _receive(worker: _Worker) -> tuple[Answer, Bytes | None]:
    try:
        if not worker.connection.poll():  # it was the process that ended
            raise EOFError
        answer: Answer = worker.connection.recv()
        if not isinstance(answer.content, Parcel):
            return answer, None
        ref = answer.content.block
        return answer, worker.blocks.open(ref, recv_handle(worker.connection) if ref.is_new else None)
    except (EOFError, OSError) as error:
        worker.process.join(_JOIN_SECONDS)
        raise WorkerDiedError(
            f"worker process {worker.process.pid} died with exit code {worker.process.exitcode} "
            "(-9 is often a lack of memory); the next iterator starts new workers"
        ) from error


def _end_workers(workers: Sequence[_Worker]) -> None:
    for worker in workers:
        _send(worker, None)
    for worker in workers:
        worker.process.join(_JOIN_SECONDS)
        if worker.process.exitcode is None:
            worker.process.kill()
            worker.process.join()
        worker.connection.close()


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
    context: BaseContext = multiprocessing.get_context(name)
    if name == "forkserver":
        context.set_forkserver_preload(["tq_service.data.workers"])
    return context


def _pickles(source: BatchSource) -> bool:
    try:
        ForkingPickler.dumps(source)
    except Exception:  # whatever a function's own pickling may raise
        return False
    return True
