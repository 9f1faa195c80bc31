"""Streams that are fetched by worker processes, which share the batches of their rank.

Lifecycle::

    WorkerPool()  ──────────────────> workers start and idle
    WorkerStream(pool, index=0) ────> requests batches 0, 1, 2, ... as far ahead as its limit admits, each of the worker
                                      with the fewest requests; each batch that arrives or is consumed may admit more
         stream.close() ────────────> workers stop fetching and idle; what they fetched ahead is dropped
    WorkerStream(pool, index=k) ────> the same workers, from batch k
    pool.close() or garbage collection ──> workers end

All bookkeeping is in the parent: a worker knows nothing of other workers, and of a batch only that it was requested.
"""

from __future__ import annotations

import multiprocessing
import multiprocessing.connection
import multiprocessing.spawn
import os
import queue
import signal
import threading
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from multiprocessing.connection import Connection
from multiprocessing.context import BaseContext
from multiprocessing.process import BaseProcess
from multiprocessing.reduction import ForkingPickler, recv_handle, send_handle
from typing import Any, Final

import torch

from tq_service.client_probes import Note, ProbeNotes, notify_probes
from tq_service.data.prefetch import PrefetchLimit
from tq_service.data.shared import SharedBatch, SharedBufferReader, SharedBufferWriter, open_batch
from tq_service.data.source import (
    BatchFetcher,
    BatchSource,
    End,
    ExceptionWrapper,
    FetchedBatch,
    StreamClosedError,
    StreamIdentity,
)
from tq_service.wire.columns import Bytes

_OF_MAIN: Final = (
    "before its first batch. A function of the dataset is defined in __main__, the program itself, which each worker "
    'therefore runs again: put what it does under `if __name__ == "__main__":`, or the function into a module'
)

# A worker ends at once unless a fetch_batch_fn holds it.
_JOIN_SECONDS = 5.0


class WorkerDiedError(RuntimeError):
    """A worker process ended by itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FetchRequest:
    """To a worker: fetch a batch.

    Attributes:
        stream: number of the stream that wants it; requests of earlier streams are void.
        partition_id: the partition.
        batch_index: which batch.
        identity: what the batch must belong to, where known.
        released: buffers of the worker that may be written again.
    """

    stream: int
    partition_id: str
    batch_index: int
    identity: StreamIdentity | None
    released: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Stop:
    """To a worker: nothing that `stream` or an earlier one requested is wanted any more."""

    stream: int


@dataclass(frozen=True, slots=True)
class FetchReply:
    """From a worker: the outcome of a request.

    Attributes:
        stream: of the request.
        batch_index: of the request.
        content: the batch, whose descriptor follows if its buffer is new; an error; the end of the partition.
        notes: what the worker's client did since its last reply, for the probes of the parent.
        buffer: the bytes of the batch, once the parent has them.
    """

    stream: int
    batch_index: int
    content: SharedBatch | ExceptionWrapper | End
    notes: tuple[Note, ...] = ()
    buffer: Bytes | None = None


@dataclass(slots=True)
class _Worker:
    process: BaseProcess
    connection: Connection
    needs_main: bool
    buffers: SharedBufferReader = field(default_factory=SharedBufferReader)
    request_count: int = 0
    has_replied: bool = False


class WorkerPool:
    """Worker processes that live until `close`, and the one stream they fetch at a time.

    Workers get the source when they start, so that with fork its functions need not be picklable; of it only the
    partition changes later. One thread receives; `request` and `stop` may be called by others.
    """

    def __init__(self, source: BatchSource, num_workers: int, context: BaseContext) -> None:
        # Whether the pickle names the main module, as that of a function or class of it does.
        needs_main = context.get_start_method() != "fork" and b"__main__" in (_pickled(source) or b"__main__")
        self._workers = [_start_worker(source, number, context, needs_main=needs_main) for number in range(num_workers)]
        self._stream = 0
        self._stopped = False
        # Guards the number of the stream, the counts of requests, and what is sent to the workers. Reentrant: a
        # finalizer may stop the stream in the middle of a request.
        self._lock = threading.RLock()
        # Wakes a thread that waits in `receive` when another one stops the stream.
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
                worker.request_count = 0
            return self._stream

    def stop(self, stream: int) -> None:
        """Make the workers drop what a stream requested, and `receive` return. Idempotent."""
        with self._lock:
            if stream != self._stream or self._stopped:
                return
            self._stopped = True
            self._waker.send_bytes(b"stop")
            for worker in self._workers:
                _send(worker, Stop(stream))

    def request(self, request: FetchRequest) -> None:
        """Have a batch fetched by the worker that has the fewest requests."""
        with self._lock:
            worker = min(self._workers, key=lambda worker: worker.request_count)
            worker.request_count += 1
            _send(worker, replace(request, released=worker.buffers.take_released()))

    def receive(self, stream: int, *, wait: bool) -> list[FetchReply]:
        """Return what has arrived for a stream; nothing once it was stopped.

        Args:
            stream: its number.
            wait: whether to wait until something arrives.

        Raises:
            WorkerDiedError: a worker died.
        """
        sources: list[Any] = [self._wakeup]
        for worker in self._workers:
            sources += [worker.connection, worker.process.sentinel]
        arrived: list[FetchReply] = []
        while not arrived and not self._stopped and stream == self._stream:
            ready = multiprocessing.connection.wait(sources, None if wait else 0)
            for worker in self._workers:
                if worker.connection in ready or worker.process.sentinel in ready:
                    reply = _receive(worker)
                    notify_probes(reply.notes)
                    if reply.stream == stream:  # else of one that was stopped, whose requests count no more
                        arrived.append(reply)
                        with self._lock:
                            worker.request_count -= 1
            if not wait:
                break
        return arrived

    def close(self) -> None:
        """End the workers. Idempotent."""
        self.stop(self._stream)
        self._finalizer()


class WorkerStream:
    """The stream that a pool fetches.

    Attributes:
        next_index: the batch_index that `read` gives next.
        fetched_until: the batch_index behind the last batch that was fetched.
        closed: whether `close` was called.
    """

    def __init__(
        self, pool: WorkerPool, source: BatchSource, batch_index: int, identity: StreamIdentity | None,
        limit: PrefetchLimit,
    ) -> None:  # fmt: skip
        self._pool = pool
        # The next request, until the end was seen, or an error.
        self._next_request: FetchRequest | None = FetchRequest(
            stream=pool.start(),
            partition_id=source.request.partition_id,
            batch_index=batch_index,
            identity=identity,
        )
        self._number = self._next_request.stream
        self._limit = limit
        self.next_index = batch_index
        self.fetched_until = 0
        self._arrived: dict[int, FetchReply] = {}
        self.closed = False
        # Guards the limit and the requests: a batch may be consumed by another thread than the one that reads.
        self._lock = threading.RLock()
        self._request_more()

    def read(self) -> FetchedBatch | End | None:
        """Wait for the next batch, or the end; None once it is closed.

        Raises:
            WorkerDiedError: a worker died.
            Exception: what a worker raised.
        """
        self._receive(wait=False)
        while (arrived := self._arrived.get(self.next_index)) is None:
            if self.closed:
                return None
            self._receive(wait=True)
        content = arrived.content
        if isinstance(content, End):
            return content
        if isinstance(content, ExceptionWrapper):
            raise content.with_note("a worker process")
        if arrived.buffer is None:
            raise RuntimeError(f"batch {self.next_index} came without its buffer")
        batch = open_batch(content.layout, arrived.buffer)
        self._arrived.pop(self.next_index, None)  # unless `close` dropped it meanwhile
        self.next_index += 1
        return replace(batch, on_consumed=partial(self._on_consumed, content.layout.size_bytes))

    def _receive(self, *, wait: bool) -> None:
        arrived = self._pool.receive(self._number, wait=wait)
        self._arrived.update({reply.batch_index: reply for reply in arrived})
        with self._lock:
            for reply in arrived:
                if isinstance(reply.content, SharedBatch):
                    self.fetched_until = max(self.fetched_until, reply.batch_index + 1)
                    self._limit.arrive(reply.content.layout.size_bytes)
                else:
                    self._limit.arrive(0)
                    self._next_request = None
            self._request_more()

    def _on_consumed(self, size_bytes: int) -> None:
        with self._lock:
            self._limit.consume(size_bytes)
            self._request_more()

    def _request_more(self) -> None:
        while self._next_request is not None and not self.closed and self._limit.admits():
            self._limit.begin()
            self._pool.request(self._next_request)
            self._next_request = replace(self._next_request, batch_index=self._next_request.batch_index + 1)

    def close(self) -> None:
        """Make the workers idle. Idempotent."""
        if not self.closed:
            self.closed = True
            self._pool.stop(self._number)
            self._arrived.clear()


def _start_worker(source: BatchSource, number: int, context: BaseContext, *, needs_main: bool) -> _Worker:
    connection, of_worker = context.Pipe()
    # Each context has it, though the stubs of their base class do not.
    make_process: Callable[..., BaseProcess] = context.Process  # type: ignore[attr-defined]
    process = make_process(target=run_worker, args=(source, of_worker), name=f"tq-worker-{number}", daemon=True)
    if needs_main:
        process.start()
    else:
        _start_without_main(process)
    of_worker.close()
    return _Worker(process=process, connection=connection, needs_main=needs_main)


_starting = threading.Lock()


def _start_without_main(process: BaseProcess) -> None:
    """Start a process that does not run the main module of this one again.

    With spawn and forkserver a child imports the main module, under another name, since what was pickled may be of it.
    A script without `if __name__ == "__main__"` then runs as a whole once more. `multiprocessing` has no switch for
    this: while it starts, what it prepares in this thread names no main module.
    """
    with _starting:
        prepare, this_thread = multiprocessing.spawn.get_preparation_data, threading.get_ident()

        def prepare_without_main(name: str) -> dict[str, Any]:
            data = prepare(name)
            if threading.get_ident() == this_thread:
                data = {key: value for key, value in data.items() if not key.startswith("init_main_from_")}
            return data

        multiprocessing.spawn.get_preparation_data = prepare_without_main
        try:
            process.start()
        finally:
            multiprocessing.spawn.get_preparation_data = prepare


def _send(worker: _Worker, message: FetchRequest | Stop | None) -> None:
    with suppress(OSError):  # dead or ended: `receive` raises that
        worker.connection.send(message)


def _receive(worker: _Worker) -> FetchReply:
    try:
        if not worker.connection.poll():  # it was the process that ended
            raise EOFError
        reply: FetchReply = worker.connection.recv()
        worker.has_replied = True
        if not isinstance(reply.content, SharedBatch):
            return reply
        descriptor = recv_handle(worker.connection) if reply.content.is_new else None
        return replace(reply, buffer=worker.buffers.open(reply.content, descriptor))
    except (EOFError, OSError) as error:
        worker.process.join(_JOIN_SECONDS)
        code = worker.process.exitcode
        # What it could not unpickle, or its main module raised, ended it before its first reply.
        is_of_main = worker.needs_main and code == 1 and not worker.has_replied
        why = _OF_MAIN if is_of_main else "(-9 is often a lack of memory); the next iterator starts new workers"
        raise WorkerDiedError(f"worker process {worker.process.pid} died with exit code {code} {why}") from error


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
    """Return the context by which worker processes are started.

    Args:
        name: "fork", "spawn", "forkserver", or a context. None: forkserver, and fork where it is not available or the
            functions of the source cannot be pickled. A fork while another thread is inside a gRPC call, of whatever
            client, leaves gRPC broken in the child; the children of a fork server inherit nothing from this process.
        source: what the workers fetch from.
    """
    if isinstance(name, BaseContext):
        return name
    if name is None:
        name = "forkserver" if "forkserver" in multiprocessing.get_all_start_methods() and _pickled(source) else "fork"
    context: BaseContext = multiprocessing.get_context(name)
    if name == "forkserver":
        context.set_forkserver_preload(["tq_service.data.workers"])
    return context


def _pickled(source: BatchSource) -> bytes | None:
    """Return the pickle of a source, None if a function of it cannot be pickled."""
    try:
        return bytes(ForkingPickler.dumps(source))
    except Exception:  # whatever a function's own pickling may raise
        return None


# In the worker process


def run_worker(source: BatchSource, connection: Connection) -> None:
    """Serve requests until the parent sends None or is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends its workers
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # a handler of the trainer, which a fork inherits, is not for them
    torch.set_num_threads(1)
    _Fetching(source, connection).run()


class _Fetching:
    """Two threads of a worker: the main one fetches the requested batches, one after the other, and replies.

    The other one receives, so that a call which waits for a batch ends at once when the batch is not wanted any more,
    or when the parent is gone.
    """

    def __init__(self, source: BatchSource, connection: Connection) -> None:
        self._source = source
        self._connection = connection
        self._requests: queue.SimpleQueue[FetchRequest | None] = queue.SimpleQueue()
        self._buffers = SharedBufferWriter()
        self._notes = ProbeNotes()
        # Written by the receiving thread and read by the main one.
        self._stopped_stream = -1
        # The stream and its fetcher: of the main thread; the receiving one closes the fetcher to end its call.
        self._fetching: tuple[int, BatchFetcher] | None = None

    def run(self) -> None:
        self._notes.replace_probes()
        threading.Thread(target=self._receive, name="tq-worker-receive", daemon=True).start()
        while (request := self._requests.get()) is not None:
            self._buffers.release(request.released)
            if self._is_wanted(request):
                self._serve(request)
        self._end_fetcher()

    def _receive(self) -> None:
        parent = multiprocessing.parent_process()
        sources: list[Connection | int] = [self._connection, *([parent.sentinel] if parent is not None else [])]
        while True:
            if self._connection not in multiprocessing.connection.wait(sources):
                os._exit(1)
            try:
                message: FetchRequest | Stop | None = self._connection.recv()
            except (EOFError, OSError):
                os._exit(1)
            if isinstance(message, Stop):
                self._stop(message.stream)
                continue
            self._requests.put(message)
            if message is None:
                return

    def _stop(self, stream: int) -> None:
        # First the number: a fetcher that the main thread makes from now on finds it before its first call.
        self._stopped_stream = stream
        fetching = self._fetching
        if fetching is not None and fetching[0] <= stream:
            fetching[1].close()

    def _is_wanted(self, request: FetchRequest) -> bool:
        return request.stream > self._stopped_stream

    def _serve(self, request: FetchRequest) -> None:
        content: SharedBatch | ExceptionWrapper | End
        try:
            fetched = self._fetcher_for(request).fetch(request.batch_index, lambda: self._is_wanted(request))
            content = fetched if isinstance(fetched, End) else self._buffers.share(fetched)
        except StreamClosedError:
            return
        except Exception as error:  # whatever it is, it belongs to the reader in the parent
            if not self._is_wanted(request):  # a call that `_stop` ended
                return
            content = ExceptionWrapper.of(error)
        self._connection.send(FetchReply(request.stream, request.batch_index, content, self._notes.take()))
        if isinstance(content, SharedBatch) and content.is_new:
            send_handle(self._connection, content.buffer_id, os.getppid())

    def _fetcher_for(self, request: FetchRequest) -> BatchFetcher:
        """Return the fetcher of the request's stream, each with a client of its own."""
        if self._fetching is None or self._fetching[0] != request.stream:
            self._end_fetcher()
            fetcher = BatchFetcher(self._source.of_partition(request.partition_id), request.identity)
            self._fetching = request.stream, fetcher
        return self._fetching[1]

    def _end_fetcher(self) -> None:
        if self._fetching is not None:
            self._fetching[1].close()
            self._fetching = None
