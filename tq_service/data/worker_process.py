"""A worker process and the messages between it and its parent: it fetches the requested batches, one after the other.

Two threads: the main one fetches and replies; the other receives, so that a call which waits for a batch ends at once
when the batch is not wanted any more, or when the parent is gone.
"""

from __future__ import annotations

import multiprocessing
import os
import queue
import signal
import threading
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.reduction import send_handle

import torch

from tq_service.client_probes import Note, ProbeNotes
from tq_service.data.batch import End, ExceptionWrapper, StreamIdentity
from tq_service.data.shared_batch import SharedBatch, share_batch
from tq_service.data.shared_buffers import SharedBufferWriter
from tq_service.data.source import BatchFetcher, BatchSource, StreamClosedError


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Stop:
    """To a worker: nothing that `stream` or an earlier one requested is wanted any more."""

    stream: int


@dataclass(frozen=True, slots=True, kw_only=True)
class FetchReply:
    """From a worker: the outcome of a request.

    Attributes:
        stream: of the request.
        batch_index: of the request.
        content: the batch, whose descriptor follows if its buffer is new; an error; the end of the partition.
        notes: what the worker's client did since its last reply, for the probes of the parent.
    """

    stream: int
    batch_index: int
    content: SharedBatch | ExceptionWrapper | End
    notes: tuple[Note, ...] = ()


def run_worker(source: BatchSource, connection: Connection) -> None:
    """Serve requests until the parent sends None or is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends its workers
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # a handler of the trainer, which a fork inherits, is not for them
    torch.set_num_threads(1)
    _Worker(source, connection).run()


class _Worker:
    def __init__(self, source: BatchSource, connection: Connection) -> None:
        self._source = source
        self._connection = connection
        self._requests: queue.SimpleQueue[FetchRequest | None] = queue.SimpleQueue()
        self._buffers = SharedBufferWriter()
        self._notes = ProbeNotes()
        # Written by the receiving thread and read by the main one.
        self._stopped_stream = -1
        # Written by the main thread and read by the receiving one, which closes the fetcher to end its call.
        self._fetching_stream = -1
        self._fetcher: BatchFetcher | None = None

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
            if self._connection not in wait(sources):
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
        fetcher = self._fetcher
        if fetcher is not None and self._fetching_stream <= stream:
            fetcher.close()

    def _is_wanted(self, request: FetchRequest) -> bool:
        return request.stream > self._stopped_stream

    def _serve(self, request: FetchRequest) -> None:
        content: SharedBatch | ExceptionWrapper | End
        try:
            fetched = self._fetcher_for(request).fetch(request.batch_index, lambda: self._is_wanted(request))
            content = fetched if isinstance(fetched, End) else share_batch(fetched, self._buffers)
        except StreamClosedError:
            return
        except Exception as error:  # whatever it is, it belongs to the reader in the parent
            if not self._is_wanted(request):  # a call that `_stop` ended
                return
            content = ExceptionWrapper.of(error)
        notes = self._notes.take()
        reply = FetchReply(stream=request.stream, batch_index=request.batch_index, content=content, notes=notes)
        self._connection.send(reply)
        if isinstance(content, SharedBatch) and content.buffer.is_new:
            send_handle(self._connection, self._buffers.descriptor(content.buffer), os.getppid())

    def _fetcher_for(self, request: FetchRequest) -> BatchFetcher:
        """Return the fetcher of the request's stream, each with a client of its own."""
        if self._fetcher is None or self._fetching_stream != request.stream:
            self._end_fetcher()
            # The number before the fetcher: `_stop` must not take a new fetcher for one of an earlier stream.
            self._fetching_stream = request.stream
            self._fetcher = BatchFetcher(self._source.of_partition(request.partition_id), request.identity)
        return self._fetcher

    def _end_fetcher(self) -> None:
        if self._fetcher is not None:
            self._fetcher.close()
            self._fetcher = None
