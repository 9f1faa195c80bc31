"""Worker processes that fetch batches for a `PrefetchStream`, and the code that serializes these batches.

Lifecycle::

    WorkerPool()  ──────────────────> workers start and idle
    WorkerFetcher ──────────────────> fetches batches for one thread of a stream, with one request and one reply per
                                      batch; two fetchers per worker keep the worker busy
          close() ──────────────────> the worker ends its call and idles until a fetcher of the next stream uses it
    pool.close() or garbage collection ──> workers end

The parent process does all bookkeeping. A worker receives only the requests for its own batches.

A batch is sent as contiguous bytes. The worker copies these bytes once into a shared buffer, from which the parent
reads them without another copy. The first replica of a rank broadcasts batches in the same format. The bytes contain
the tensors of all columns in sequence. On the receiving side, the tensors are views of these bytes. The meta and all
objects are pickled. Because micro-batches refer to tensors within objects without copying them, these tensors are
unpickled into separate memory.

A shared buffer is an anonymous file. The worker sends the buffer's file descriptor only once, with the first batch in
the buffer. The parent keeps the buffer mapped. Once the parent has freed its last tensor in a buffer, the parent's next
request reports the buffer as released. The worker may then reuse the buffer. Reusing a buffer is faster, because
touching new pages costs more than copying data.
"""

from __future__ import annotations

import io
import itertools
import multiprocessing
import multiprocessing.connection
import multiprocessing.spawn
import os
import pickle
import queue
import signal
import tempfile
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from multiprocessing.connection import Connection
from multiprocessing.context import BaseContext
from multiprocessing.process import BaseProcess
from multiprocessing.reduction import ForkingPickler, recv_handle, send_handle
from typing import Any, Final

import numpy as np
import torch
from tensordict import TensorDict

from tq_service.client_probes import Note, ProbeNotes, Span, Stage, notify_probes
from tq_service.data.columns import FlatBatch, build, flatten, object_bytes
from tq_service.data.source import (
    BatchFetcher,
    BatchRequest,
    BatchSource,
    End,
    ExceptionWrapper,
    FetchedBatch,
    StreamClosedError,
    StreamIdentity,
)
from tq_service.step_times import StepTimer, StepTimes
from tq_service.wire.columns import tensor_bytes
from tq_service.wire.host_memory import PINNED
from tq_service.wire.mapping import Bytes, Mapping

_ALIGNMENT: Final = 64
_GRAIN_BYTES: Final = 1 << 20
# Maximum ratio of buffer size to content size. Batches are similar in size but not equal.
_MOST_SLACK: Final = 1.5
_KEPT_COUNT: Final = 2


@dataclass(frozen=True, slots=True)
class BatchLayout:
    """Layout of a serialized batch.

    Attributes:
        index: index of the batch within the epoch.
        places: byte positions at which each part starts and ends. The first part is the pickle, and the column tensors
            follow.
        batch_bytes: `FetchedBatch.size_bytes` of the batch. This size is sent along, because recomputing it would
            require visiting every object.
    """

    index: int
    places: tuple[tuple[int, int], ...]
    batch_bytes: int

    @property
    def size_bytes(self) -> int:
        """Total size of all parts in bytes, including the gaps between them."""
        return self.places[-1][1]


def lay_out(batch: FetchedBatch) -> tuple[BatchLayout, list[Bytes]]:
    """Return the layout of a batch, and the batch's parts in order.

    Raises:
        Exception: an object could not be pickled.
    """
    content = flatten(batch.data) if isinstance(batch.data, TensorDict) else batch.data
    file = io.BytesIO()
    pickler = _Pickler(file, content.parts() if isinstance(content, FlatBatch) else ())
    pickler.dump((batch.meta, content))
    parts = [np.frombuffer(part, np.uint8) for part in (file.getbuffer(), *(each.raw() for each in pickler.beside))]
    places, end = [], 0
    for part in parts:
        begin = -(-end // _ALIGNMENT) * _ALIGNMENT
        end = begin + part.nbytes
        places.append((begin, end))
    batch_bytes = content.size_bytes if isinstance(content, FlatBatch) else object_bytes(content)
    return BatchLayout(batch.index, tuple(places), batch_bytes), parts


def open_batch(layout: BatchLayout, data: Bytes) -> FetchedBatch:
    """Deserialize a batch.

    The batch's tensors are views of `data`, so the underlying buffer is not overwritten while these tensors exist.
    """
    pickled, *tensors = (data[begin:end] for begin, end in layout.places)
    meta, content = pickle.loads(pickled.data, buffers=tensors)  # noqa: S301  (from a process of this program)
    return FetchedBatch(
        index=layout.index,
        data=build(content) if isinstance(content, FlatBatch) else content,
        meta=meta,
        measured_bytes=layout.batch_bytes,
    )


class _Pickler(pickle.Pickler):
    """A pickler for batches. Column tensors are pickled out of band, and tensors within objects are pickled in band."""

    def __init__(self, file: io.BytesIO, columns: Iterable[torch.Tensor | list[Any]]) -> None:
        self.beside: list[pickle.PickleBuffer] = []
        # Do not use a bound method. CPython 3.11 may crash if the garbage collector, rather than reference counting,
        # frees a PickleBuffer of a memoryview. So no reference cycle may contain a PickleBuffer, and each PickleBuffer
        # wraps an array.
        super().__init__(file, protocol=5, buffer_callback=partial(_is_inside, self.beside))
        self._ids_beside = {id(each) for part in columns for each in (part if isinstance(part, list) else (part,))}

    def reducer_override(self, value: Any) -> Any:
        if (
            type(value) is not torch.Tensor
            or value.device.type != "cpu"
            or value.layout is not torch.strided
            or value.is_quantized
        ):
            return NotImplemented
        data = tensor_bytes(value)
        if id(value) not in self._ids_beside:
            return _tensor_of, (bytearray(data), value.dtype, tuple(value.shape))
        array: Any = np.frombuffer(data, np.uint8)
        self.beside.append(pickle.PickleBuffer(array))
        return _tensor_of, (self.beside[-1], value.dtype, tuple(value.shape))


def _is_inside(beside: list[pickle.PickleBuffer], buffer: pickle.PickleBuffer) -> bool:
    """Return whether a buffer is stored inside the pickle, as the buffers of NumPy arrays are."""
    return not beside or buffer is not beside[-1]


def _tensor_of(data: Any, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    return torch.frombuffer(data, dtype=dtype).reshape(shape) if len(data) else torch.empty(shape, dtype=dtype)


@dataclass(frozen=True, slots=True)
class SharedBatch:
    """The reply of a worker that has written a batch into a shared buffer.

    Attributes:
        layout: layout of the batch in the buffer.
        buffer_id: the worker's file descriptor for the buffer.
        buffer_bytes: size of the buffer in bytes.
        is_new: whether the buffer is new, in which case its descriptor is sent next.
        retired: ids of buffers that the worker has closed.
    """

    layout: BatchLayout
    buffer_id: int
    buffer_bytes: int
    is_new: bool
    retired: tuple[int, ...]


class SharedBufferWriter:
    """Writes batches into a worker's shared buffers. Only the worker's main thread may use the writer."""

    def __init__(self) -> None:
        self._sizes: dict[int, int] = {}
        self._idle: deque[int] = deque()

    def share(self, batch: FetchedBatch) -> SharedBatch:
        """Write a batch into an idle or new buffer.

        Raises:
            OSError: the system ran out of memory or file descriptors.
            Exception: an object could not be pickled.
        """
        layout, parts = lay_out(batch)
        most_bytes = layout.size_bytes * _MOST_SLACK + _GRAIN_BYTES
        fitting = (each for each in self._idle if layout.size_bytes <= self._sizes[each] <= most_bytes)
        buffer = next(fitting, None)
        is_new = buffer is None
        if buffer is None:
            size_bytes = max(1, -(-layout.size_bytes // _GRAIN_BYTES)) * _GRAIN_BYTES
            buffer = _anonymous_file(size_bytes)
            self._sizes[buffer] = size_bytes
        else:
            self._idle.remove(buffer)
        for (begin, _), part in zip(layout.places, parts, strict=True):
            _write(buffer, part, begin)
        retired = tuple(self._idle.pop() for _ in range(len(self._idle) - _KEPT_COUNT))
        for surplus in retired:
            os.close(surplus)
            del self._sizes[surplus]
        return SharedBatch(layout, buffer, self._sizes[buffer], is_new, retired)

    def release(self, buffer_ids: Sequence[int]) -> None:
        """Mark as idle the buffers that the parent has released. The most recently released buffer is reused first."""
        self._idle.extendleft(buffer_ids)


class SharedBufferReader:
    """Reads a worker's shared buffers in the parent process.

    Args:
        device: device to which batches are copied from the buffers, or None. If a device is given, the buffers are
            pinned.
    """

    def __init__(self, device: torch.device | None = None) -> None:
        self._device = device
        self._mappings: dict[int, Mapping] = {}
        # Finalizers may append at any time and in any thread. A deque needs no lock for this.
        self._released: deque[int] = deque()

    def open(self, shared: SharedBatch, descriptor: int | None) -> Bytes:
        """Return the bytes of a buffer, which is released when the last view or tensor of these bytes is freed.

        Args:
            shared: the batch in the buffer.
            descriptor: file descriptor of a new buffer, which this method closes, or None if the buffer is already
                mapped.
        """
        # The worker retires only released buffers, so no array uses these mappings anymore.
        for buffer_id in shared.retired:
            del self._mappings[buffer_id]
        if descriptor is not None:
            try:
                # Populate all pages when mapping, because page faults for each page would take several times as long.
                self._mappings[shared.buffer_id] = Mapping(descriptor, is_shared=True, is_populated=True)
            finally:
                os.close(descriptor)
        mapping = self._mappings[shared.buffer_id]
        pin = None if self._device is None else PINNED.pin(mapping, self._device)
        array = mapping.array(0, mapping.size, pin)
        weakref.finalize(array, self._released.append, shared.buffer_id).atexit = False
        return array

    def take_released(self) -> tuple[int, ...]:
        """Return the ids of the buffers that have been released since the last call."""
        return tuple(self._released.popleft() for _ in range(len(self._released)))


def _anonymous_file(size_bytes: int) -> int:
    if hasattr(os, "memfd_create"):
        descriptor = os.memfd_create("tq-batch", os.MFD_CLOEXEC)
    else:
        with tempfile.TemporaryFile() as file:
            descriptor = os.dup(file.fileno())
    os.ftruncate(descriptor, size_bytes)
    return descriptor


def _write(descriptor: int, part: Bytes, offset: int) -> None:
    view: memoryview = part.data
    while view:
        written = os.pwrite(descriptor, view, offset)
        view, offset = view[written:], offset + written


_OF_MAIN: Final = (
    "before its first batch. A function passed to the dataset is defined in __main__, so each worker runs the program "
    'again. Put the program\'s code under `if __name__ == "__main__":`, or move the function into a module'
)

# Maximum seconds to wait for a worker to end. It ends immediately unless it is blocked in a fetch_batch_fn.
_JOIN_SECONDS = 5.0


class WorkerDiedError(RuntimeError):
    """A worker process exited unexpectedly."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FetchRequest:
    """A request to a worker to fetch a batch.

    Attributes:
        stream: number that identifies the stream that sent the request.
        claim: arguments of the stream's claims.
        batch_index: index of the batch to fetch.
        identity: stream identity that the batch must have, or None if it is not known yet.
        released: ids of the worker's buffers that may be overwritten.
        step_times: breakdown of the trainer's most recent steps, which the client reports to the service.
    """

    stream: int
    claim: BatchRequest
    batch_index: int
    identity: StreamIdentity | None
    released: tuple[int, ...]
    step_times: StepTimes | None = None


@dataclass(frozen=True, slots=True)
class Stop:
    """Tells a worker that batches of `stream` and of earlier streams are no longer wanted."""

    stream: int


@dataclass(frozen=True, slots=True)
class FetchReply:
    """A worker's reply to a request. Each request gets exactly one reply.

    Attributes:
        content: the batch, an error, the end marker, or None if the batch is no longer wanted. If the batch is in a new
            buffer, the buffer's file descriptor is sent after the reply.
        notes: events that the worker's client has reported since the previous reply, to be passed to the parent's
            probes.
        spans: time spans recorded for the stages of fetching the batch.
    """

    content: SharedBatch | ExceptionWrapper | End | None
    notes: tuple[Note, ...]
    spans: tuple[Span, ...] = ()


@dataclass(slots=True, eq=False)
class _Worker:
    """The state that the parent keeps for a worker process.

    Attributes:
        process: the worker process.
        connection: connection for sending requests and receiving replies.
        needs_main: whether the process runs the main module on startup.
        buffers: shared buffers of the process.
        has_replied: whether the process has replied to any request.
        last_received: event that is set when the reply to the latest request has been received, or has been lost
            because the process exited. Replies, including those for closed streams, arrive in the order of the
            requests.
        sending: lock held while sending a message. The lock is reentrant, because a finalizer may close a fetcher
            during a request.
    """

    process: BaseProcess
    connection: Connection
    needs_main: bool
    buffers: SharedBufferReader
    has_replied: bool = False
    last_received: threading.Event = field(default_factory=threading.Event)
    sending: threading.RLock = field(default_factory=threading.RLock)

    def __post_init__(self) -> None:
        self.last_received.set()

    def send(self, message: FetchRequest | Stop | None) -> None:
        with self.sending, suppress(OSError):  # raised if the process has ended; `receive` reports this
            self.connection.send(message)

    def receive(self) -> tuple[FetchReply, Bytes | None]:
        """Wait for the reply to a request, and return it with the bytes of its batch, if any.

        Raises:
            WorkerDiedError: the process has exited.
        """
        try:
            multiprocessing.connection.wait((self.connection, self.process.sentinel))
            if not self.connection.poll():  # the process ended
                raise EOFError
            reply: FetchReply = self.connection.recv()
            self.has_replied = True
            if not isinstance(reply.content, SharedBatch):
                return reply, None
            descriptor = recv_handle(self.connection) if reply.content.is_new else None
            return reply, self.buffers.open(reply.content, descriptor)
        except (EOFError, OSError) as error:
            self.process.join(_JOIN_SECONDS)
            code = self.process.exitcode
            # Either the source could not be unpickled or the main module failed before the first reply.
            is_of_main = self.needs_main and code == 1 and not self.has_replied
            why = _OF_MAIN if is_of_main else "(-9 often means out of memory); the next iterator starts new workers"
            raise WorkerDiedError(f"worker process {self.process.pid} died with exit code {code} {why}") from error


class WorkerPool:
    """Worker processes that run until `close` is called, and fetch batches for one stream at a time.

    Workers receive the source when they start. With fork, the source's functions therefore need not be picklable. Each
    stream sends its own `BatchRequest`, because the partition and the policy version differ between streams.
    """

    def __init__(
        self, source: BatchSource, num_workers: int, context: BaseContext, device: torch.device | None = None
    ) -> None:
        # Whether the pickled source refers to the main module, because one of its functions or classes is defined
        # there.
        needs_main = context.get_start_method() != "fork" and b"__main__" in (_pickled(source) or b"__main__")
        self._workers = [
            _start_worker(source, number, context, SharedBufferReader(device), needs_main=needs_main)
            for number in range(num_workers)
        ]
        self._streams = itertools.count()
        self.close = weakref.finalize(self, _end_workers, self._workers)
        """Ends the workers. Idempotent."""

    def fetchers(self, source: BatchSource, identity: StreamIdentity | None, timer: StepTimer) -> list[WorkerFetcher]:
        """Return the fetchers of a new stream, two for each worker.

        While one fetcher deserializes a batch, the worker fetches the batch requested by the other fetcher.
        """
        stream = next(self._streams)
        return [WorkerFetcher(worker, stream, source.request, identity, timer) for worker in self._workers * 2]


class WorkerFetcher:
    """A counterpart of `BatchFetcher` that fetches batches in a worker process. Only one thread may use a fetcher.

    Attributes:
        fetched_until: index of the batch after the last fetched batch.
    """

    def __init__(
        self, worker: _Worker, stream: int, claim: BatchRequest, identity: StreamIdentity | None, timer: StepTimer
    ) -> None:
        self._worker = worker
        self._timer = timer
        self._stream = stream
        self._claim = claim
        self._identity = identity
        # Set when the replies to the worker's previous request and to this fetcher's request have been received.
        self._earlier = self._own = threading.Event()
        self.fetched_until = 0

    def request(self, batch_index: int) -> None:
        """Request a batch. The caller must call `fetch` afterward, because every reply must be received."""
        worker = self._worker
        with worker.sending:
            self._earlier, self._own = worker.last_received, threading.Event()
            worker.last_received = self._own
            worker.send(
                FetchRequest(
                    stream=self._stream,
                    claim=self._claim,
                    batch_index=batch_index,
                    identity=self._identity,
                    released=worker.buffers.take_released(),
                    step_times=self._timer.take_report(),
                )
            )

    def fetch(self, batch_index: int, is_wanted: Callable[[], bool], batch_count: int = 1) -> FetchedBatch | End:
        """Wait for the requested batch or the end marker, and return it. A call to `close` ends the wait promptly.

        `batch_count` is ignored. The worker claims only the requested batch, because other workers may fetch later
        batches.

        Raises:
            StreamClosedError: the batch is no longer wanted.
            WorkerDiedError: the worker process has exited.
            Exception: the worker raised an error. The error's original type is preserved.
        """
        try:
            self._earlier.wait()
            reply, data = self._worker.receive()
        finally:
            self._own.set()
        notify_probes(reply.notes)
        content = reply.content
        if isinstance(content, ExceptionWrapper):
            raise content.with_note("a worker process")
        if isinstance(content, SharedBatch) and data is not None:
            self.fetched_until = batch_index + 1
            return replace(open_batch(content.layout, data), spans=reply.spans)
        if isinstance(content, End):
            return replace(content, spans=reply.spans)
        raise StreamClosedError

    def close(self) -> None:
        """Abort the worker's call in progress, if any, so that the worker becomes idle. Idempotent."""
        self._worker.send(Stop(self._stream))


def _start_worker(
    source: BatchSource, number: int, context: BaseContext, buffers: SharedBufferReader, *, needs_main: bool
) -> _Worker:
    connection, of_worker = context.Pipe()
    # All contexts have `Process`, but the type stubs of the base class lack it.
    make_process: Callable[..., BaseProcess] = context.Process  # type: ignore[attr-defined]
    process = make_process(target=run_worker, args=(source, of_worker), name=f"tq-worker-{number}", daemon=True)
    if needs_main:
        process.start()
    else:
        _start_without_main(process)
    of_worker.close()
    return _Worker(process=process, connection=connection, needs_main=needs_main, buffers=buffers)


_starting = threading.Lock()


def _start_without_main(process: BaseProcess) -> None:
    """Start a process that does not run this program's main module again.

    With spawn and forkserver, a child process imports the main module under a different name, since the module may
    define pickled functions. A script without `if __name__ == "__main__"` then runs a second time. `multiprocessing`
    has no option to prevent this. Therefore, while this thread starts the process, the main module is left out of the
    preparation data for the process.
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


def _end_workers(workers: Sequence[_Worker]) -> None:
    for worker in workers:
        worker.send(None)
    deadline = time.monotonic() + _JOIN_SECONDS
    for worker in workers:
        worker.process.join(max(0.0, deadline - time.monotonic()))
        if worker.process.exitcode is None:
            worker.process.kill()
            worker.process.join()
        worker.connection.close()


def worker_context(name: str | BaseContext | None, source: BatchSource) -> BaseContext:
    """Return the multiprocessing context for starting worker processes.

    If a thread is making a gRPC call when the process forks, gRPC does not work in the child. The children of a fork
    server avoid this problem, because they do not inherit this process's state.

    Args:
        name: "fork", "spawn", "forkserver", or a context. The default is forkserver if it is available and the source's
            functions can be pickled, and fork otherwise.
        source: batch source used by the workers.
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
    """Return a pickled source, or None if one of its functions cannot be pickled."""
    try:
        return bytes(ForkingPickler.dumps(source))
    except Exception:  # pickling a function may raise any error
        return None


# Code that runs in the worker process


def run_worker(source: BatchSource, connection: Connection) -> None:
    """Serve requests until the parent process sends None or exits."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent process ends its workers
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # a forked worker inherits the trainer's handler
    torch.set_num_threads(1)
    _Fetching(source, connection).run()


class _Fetching:
    """The two threads of a worker process. The main thread fetches the requested batches in order and sends replies.

    The second thread receives messages, and interrupts the waiting call if its batch is no longer wanted. If the parent
    process has exited, the second thread terminates the worker process.
    """

    def __init__(self, source: BatchSource, connection: Connection) -> None:
        self._source = source
        self._connection = connection
        self._requests: queue.SimpleQueue[FetchRequest | None] = queue.SimpleQueue()
        self._buffers = SharedBufferWriter()
        self._notes = ProbeNotes()
        self._step_times: StepTimes | None = None
        # Written by the receiving thread and read by the main thread.
        self._stopped_stream = -1
        # The current stream and its fetcher. The main thread sets this value, and the receiving thread may close the
        # fetcher.
        self._fetching: tuple[int, BatchFetcher] | None = None

    def run(self) -> None:
        self._notes.replace_probes()
        threading.Thread(target=self._receive, name="tq-worker-receive", daemon=True).start()
        while (request := self._requests.get()) is not None:
            self._buffers.release(request.released)
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
        # Set the number first. If the main thread creates a fetcher later, it checks the number before its first call.
        self._stopped_stream = max(self._stopped_stream, stream)  # a late Stop of an earlier stream has no effect
        fetching = self._fetching
        if fetching is not None and fetching[0] <= stream:
            fetching[1].close()

    def _is_wanted(self, request: FetchRequest) -> bool:
        return request.stream > self._stopped_stream

    def _serve(self, request: FetchRequest) -> None:
        content: SharedBatch | ExceptionWrapper | End | None = None
        spans: tuple[Span, ...] = ()
        try:
            self._step_times = request.step_times
            fetched = self._fetcher_for(request).fetch(request.batch_index, lambda: self._is_wanted(request))
            began_at = time.perf_counter()
            content = fetched if isinstance(fetched, End) else self._buffers.share(fetched)
            spans = (*fetched.spans, Span(Stage.HOST, began_at, time.perf_counter()))
        except StreamClosedError:
            pass
        except Exception as error:  # the parent's reader raises the error, whatever its type
            if self._is_wanted(request):  # otherwise closing the fetcher in `_stop` caused the error
                content = ExceptionWrapper.of(error)
        self._connection.send(FetchReply(content, self._notes.take(), spans))
        if isinstance(content, SharedBatch) and content.is_new:
            send_handle(self._connection, content.buffer_id, os.getppid())

    def _fetcher_for(self, request: FetchRequest) -> BatchFetcher:
        """Return the fetcher for the request's stream. Each stream uses a separate client."""
        if self._fetching is None or self._fetching[0] != request.stream:
            self._end_fetcher()
            source = replace(self._source, request=request.claim)
            fetcher = BatchFetcher(source, request.identity, lambda: self._step_times)
            self._fetching = request.stream, fetcher
        return self._fetching[1]

    def _end_fetcher(self) -> None:
        if self._fetching is not None:
            self._fetching[1].close()
            self._fetching = None
