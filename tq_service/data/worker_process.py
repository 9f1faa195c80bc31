"""What runs in a worker process: it fetches the batches that its parent orders, one after the other.

Two threads: the main one fetches and answers; the other takes messages, so that a call which waits for a batch ends at
once when the batch is not wanted any more, or when the parent is gone.
"""

from __future__ import annotations

import multiprocessing
import os
import queue
import signal
import threading
from multiprocessing.connection import Connection, wait
from multiprocessing.reduction import send_handle

import torch

from tq_service.data.blocks import BlockWriter
from tq_service.data.end import End
from tq_service.data.source import BatchFetcher, BatchSource, StreamClosedError
from tq_service.data.transport import Parcel, pack
from tq_service.data.worker_messages import Answer, Failure, Order, Stop


def run_worker(source: BatchSource, connection: Connection) -> None:
    """Serve orders until the parent says None or is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends its workers
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # a handler of the trainer, which a fork inherits, is not for them
    torch.set_num_threads(1)
    _Worker(source, connection).run()


class _Worker:
    def __init__(self, source: BatchSource, connection: Connection) -> None:
        self._source = source
        self._connection = connection
        self._orders: queue.SimpleQueue[Order | None] = queue.SimpleQueue()
        self._blocks = BlockWriter()
        self._stopped_stream = -1
        self._fetching_stream = -1
        self._fetcher: BatchFetcher | None = None

    def run(self) -> None:
        threading.Thread(target=self._listen, name="tq-orders", daemon=True).start()
        while (order := self._orders.get()) is not None:
            self._blocks.release(order.released)
            if self._is_wanted(order):
                self._serve(order)
        self._end_fetcher()

    def _listen(self) -> None:
        parent = multiprocessing.parent_process()
        sources: list[Connection | int] = [self._connection, *([parent.sentinel] if parent is not None else [])]
        while True:
            if self._connection not in wait(sources):
                os._exit(1)
            try:
                message: Order | Stop | None = self._connection.recv()
            except (EOFError, OSError):
                os._exit(1)
            if isinstance(message, Stop):
                self._stop(message.stream)
                continue
            self._orders.put(message)
            if message is None:
                return

    def _stop(self, stream: int) -> None:
        self._stopped_stream = stream
        fetcher = self._fetcher
        if fetcher is not None and self._fetching_stream <= stream:
            fetcher.close()

    def _is_wanted(self, order: Order) -> bool:
        return order.stream > self._stopped_stream

    def _serve(self, order: Order) -> None:
        content: Parcel | Failure | End
        try:
            fetched = self._fetcher_for(order).fetch(order.batch_index, lambda: self._is_wanted(order))
            content = fetched if isinstance(fetched, End) else pack(fetched, self._blocks)
        except StreamClosedError:
            return
        except Exception as error:  # whatever it is, it belongs to the reader in the parent
            if not self._is_wanted(order):
                return
            content = Failure.of(error)
        self._connection.send(Answer(stream=order.stream, batch_index=order.batch_index, content=content))
        if isinstance(content, Parcel) and content.block.is_new:
            send_handle(self._connection, self._blocks.descriptor(content.block), os.getppid())

    def _fetcher_for(self, order: Order) -> BatchFetcher:
        """Return the fetcher of the order's stream, each with a client of its own."""
        if self._fetcher is None or self._fetching_stream != order.stream:
            self._end_fetcher()
            self._fetching_stream = order.stream
            self._fetcher = BatchFetcher(self._source.of_partition(order.partition_id), order.life)
        return self._fetcher

    def _end_fetcher(self) -> None:
        if self._fetcher is not None:
            self._fetcher.close()
            self._fetcher = None
