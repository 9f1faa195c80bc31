"""A service that reports its usage and takes orders about its bulk port: `tq-service` with a socket for a benchmark.

Orders and answers go over a Unix socket; its path is in the environment. The number of streams is patched into the bulk
server here, since the service chooses it from its load, without an option.
"""

from __future__ import annotations

import os
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.harness import ROOT
from tq_service.dataplane.bulk.server import BulkServer
from tq_service.testing import ServiceProcess

_SOCKET_VARIABLE = "BENCH_BULK_SOCKET"


class Usage(NamedTuple):
    """A service's usage since its start."""

    transfers: int
    """Puts and gets with their bytes on bulk connections."""
    process_seconds: float
    """Processor time of all threads."""
    loop_seconds: float
    """Processor time of the event loop's thread, which is included above."""

    def since(self, earlier: Usage) -> Usage:
        """Return the difference from an earlier usage."""
        return Usage(*(now - then for now, then in zip(self, earlier, strict=True)))


class BulkService:
    """A running service, and the socket for it."""

    def __init__(self, process: ServiceProcess, address: str, orders: Connection) -> None:
        self.process = process
        self.address = address
        self._orders = orders

    def usage(self) -> Usage:
        """Return the usage so far."""
        return Usage(*self._ask("usage"))

    def set_stream_count(self, count: int | None) -> None:
        """Set the number of streams for new transfers; None: the service chooses it."""
        self._ask("streams", count)

    def _ask(self, *order: Any) -> Any:
        self._orders.send(order)
        return self._orders.recv()


@contextmanager
def bulk_service(*flags: str, is_apart: bool = False) -> Iterator[BulkService]:
    """Run a service without shared memory until the block ends.

    Args:
        *flags: flags of `tq-service serve`.
        is_apart: whether the controller runs in a separate process; the usage is then that of the storage service
            alone.
    """
    with ExitStack() as stack:
        directory = stack.enter_context(tempfile.TemporaryDirectory(prefix="tq-bench-"))
        path = str(Path(directory) / "orders")
        address, role = "", ("--role", "all")
        if is_apart:
            address = stack.enter_context(ServiceProcess("--role", "controller")).address
            role = ("--role", "storage", "--controller", address, "--storage-id", "storage")
        command = (sys.executable, "-m", "benchmarks.bulk_service")
        process = stack.enter_context(
            ServiceProcess(
                *role, "--shared-memory", "off", *flags, command=command, cwd=ROOT, env={_SOCKET_VARIABLE: path}
            )
        )
        orders = stack.enter_context(Client(path, "AF_UNIX"))
        yield BulkService(process, address or process.address, orders)


class _Watch:
    """Counts the transfers of this process's bulk server, and sets the number of their streams on request."""

    def __init__(self) -> None:
        self._stream_count: int | None = None
        self._transfer_count = 0
        self._loop_clock = time.pthread_getcpuclockid(threading.main_thread().ident or 0)

    def patch(self) -> None:
        choose, open_transfer = BulkServer._streams_for, BulkServer.open

        def streams_for(server: BulkServer, size_bytes: int) -> int:
            return choose(server, size_bytes) if self._stream_count is None else self._stream_count

        def opened(server: BulkServer, *given: Any, **named: Any) -> Any:
            self._transfer_count += 1
            return open_transfer(server, *given, **named)

        BulkServer._streams_for = streams_for  # type: ignore[method-assign]
        BulkServer.open = opened  # type: ignore[method-assign]

    def answer(self, listener: Listener) -> None:
        with listener, listener.accept() as orders:
            while True:
                try:
                    what, *given = orders.recv()
                except EOFError:
                    return
                if what == "streams":
                    (self._stream_count,) = given
                loop_seconds = time.clock_gettime(self._loop_clock)
                orders.send((self._transfer_count, time.process_time(), loop_seconds))


if __name__ == "__main__":
    from tq_service.cli import main

    watch = _Watch()
    watch.patch()
    listening = Listener(os.environ.pop(_SOCKET_VARIABLE), "AF_UNIX")
    threading.Thread(target=watch.answer, args=(listening,), name="orders", daemon=True).start()
    sys.exit(main())
