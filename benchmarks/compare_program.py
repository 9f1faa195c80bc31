"""The program that `compare` runs in each tree: services of that tree, and the loads on them, as answers to commands.

The loads are those of the other benchmarks, in units of about a tenth of a second. They use only interfaces that every
tree has: `tq.Client` and `tq.AsyncClient`. A unit returns its figures; a run returns their medians.
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager

import numpy as np

import tq_service as tq
from benchmarks.compare_service import checked_package
from benchmarks.durability_load import Load
from benchmarks.harness import median
from benchmarks.insert_rate import LARGE_COUNT, put_rate
from benchmarks.latency import WakeUp
from benchmarks.peer_program import Commands, serve
from tq_service.testing import ServiceProcess

_FLAGS = {"wire": ("--shared-memory", "off"), "shared": (), "process": ("--shared-memory", "off")}
_PART = 4
_WAITS = 8
_SMALL_BYTES, _LARGE_BYTES = 4 << 10, 64 << 20
_ROW_COUNT = 64
_REMOTE_PUTS = 160
_TIMEOUT_SECONDS = 60.0
_SERVICE = (sys.executable, "-m", "benchmarks.compare_service")

Unit = Callable[[], dict[str, float]]


class _Loads:
    """Each method starts the services for its load, imports torch only if needed, and returns the unit to repeat."""

    def __init__(self, stack: ExitStack) -> None:
        try:
            import uvloop

            self._runner = stack.enter_context(asyncio.Runner(loop_factory=uvloop.new_event_loop))
        except ModuleNotFoundError:
            self._runner = stack.enter_context(asyncio.Runner())
        self._stack = stack
        self._addresses: dict[str, str] = {}
        self._units: dict[str, Unit] = {}

    def prepare(self, loads: Sequence[str]) -> str:
        """Start the services for the loads; return the directory of the measured package."""
        for load in loads:
            self._units[load] = getattr(self, load)()
        return checked_package()

    def measure(self, load: str, seconds: float) -> dict[str, float]:
        """Return the figures of a load; its first unit does not count."""
        unit, end = self._units[load], time.perf_counter() + seconds
        unit()
        found = [unit()]
        while time.perf_counter() < end:
            found.append(unit())
        return {name: median([one[name] for one in found]) for name in found[0]}

    def _address(self, kind: str) -> str:
        """Return the address of a service of this kind, which loads share."""
        if kind not in self._addresses:
            flags = [*_FLAGS[kind]]
            if kind == "process":
                directory = self._stack.enter_context(tempfile.TemporaryDirectory(prefix="tq-compare-data-"))
                flags += ["--data-dir", directory, "--durability", "process"]
            started = ServiceProcess(*flags, command=_SERVICE)
            self._addresses[kind] = self._stack.enter_context(started).address
        return self._addresses[kind]

    def _sync_client(self, kind: str) -> tq.Client:
        return self._stack.enter_context(tq.Client(self._address(kind), timeout=_TIMEOUT_SECONDS))

    def _async_client(self, kind: str, address: str | None = None) -> tq.AsyncClient:
        address = address or self._address(kind)

        async def connected() -> tq.AsyncClient:
            return tq.AsyncClient(address, timeout=_TIMEOUT_SECONDS)

        client = self._runner.run(connected())
        self._stack.callback(lambda: self._runner.run(client.aclose()))
        return client

    def _durability_load(self, kind: str) -> Load:
        load = Load(self._async_client(kind), _PART)
        self._runner.run(load.start())
        return load

    def claims(self) -> Unit:
        """Claims of ranks and of queue workers, in memory."""
        load = self._durability_load("wire")
        return lambda: {
            "claims_ranks": self._runner.run(load.ranked_claims()),
            "claims_queue": self._runner.run(load.queue_claims()),
        }

    def wake_up(self) -> Unit:
        """Milliseconds from a put until the waiting rank has its batch."""
        wake_up = WakeUp(self._async_client("wire"), self._async_client("wire"), 1, _WAITS)
        return lambda: {"wake_up": 1e3 * median(self._runner.run(wake_up()))}

    def insert(self) -> Unit:
        """Samples with keys and custom_meta, in one put."""
        client = self._async_client("wire")
        return lambda: {"insert": self._runner.run(put_rate(client, LARGE_COUNT // _PART, 1, with_keys=True))}

    def small(self) -> Unit:
        """Consecutive puts and gets of 4 KiB over the network."""
        return self._round_trips("small", _SMALL_BYTES, 1.0)

    def remote(self) -> Unit:
        """Puts of 4 KiB to a storage service in a different process from the controller, by 1 and by 8 producers."""
        started = ServiceProcess("--role", "controller", command=_SERVICE)
        controller = self._stack.enter_context(started).address
        flags = ("--role", "storage", "--controller", controller, *_FLAGS["wire"])
        self._stack.enter_context(ServiceProcess(*flags, command=_SERVICE))
        client = self._async_client("wire", controller)
        values = np.zeros((1, _SMALL_BYTES), np.uint8)

        async def producer(put_count: int) -> None:
            for _ in range(put_count):
                await client.put("train", {"x": values})

        async def rate(producer_count: int) -> float:
            began = time.perf_counter()
            await asyncio.gather(*(producer(_REMOTE_PUTS // producer_count) for _ in range(producer_count)))
            seconds = time.perf_counter() - began
            await client.clear_partition("train")
            return _REMOTE_PUTS / seconds

        return lambda: {"put_remote": self._runner.run(rate(1)), "put_remote_by_8": self._runner.run(rate(8))}

    def large(self) -> Unit:
        """GB/s of puts and gets of 64 MiB over the network."""
        return self._round_trips("large", _LARGE_BYTES, _LARGE_BYTES / 1e9)

    def _round_trips(self, name: str, size: int, amount: float) -> Unit:
        from benchmarks.round_trips import MIB, RoundTrips, dense

        trips = RoundTrips(self._sync_client("wire"), dense(size, MIB), max(1, min(64, 64 * MIB // size)))

        def unit() -> dict[str, float]:
            put_seconds, get_seconds = trips()
            return {f"put_{name}": amount / put_seconds, f"get_{name}": amount / get_seconds}

        return unit

    def jagged(self) -> Unit:
        """GB/s of puts and gets of 16 MiB in rows of 2 to 6 KiB over the network."""
        from benchmarks.round_trips import JAGGED_BYTES, RoundTrips, jagged

        trip = RoundTrips(self._sync_client("wire"), jagged())

        def unit() -> dict[str, float]:
            put_seconds, get_seconds = trip()
            amount = JAGGED_BYTES / 1e9
            return {"put_jagged": amount / put_seconds, "get_jagged": amount / get_seconds}

        return unit

    def same_host(self) -> Unit:
        """GB/s of puts of 64 MiB through shared memory, and of gets by another client that reads every byte."""
        from benchmarks.same_host import ROW_LENGTH, RoundTrip
        from benchmarks.same_host_reader import Reader

        reader = Reader()
        self._stack.callback(reader.close)
        reader.connect(self._address("shared"))
        trip = RoundTrip(self._sync_client("shared"), reader.read, _ROW_COUNT)

        def unit() -> dict[str, float]:
            put_seconds, _, read_seconds = trip(reuse=True)
            amount = _ROW_COUNT * ROW_LENGTH * 4 / 1e9
            return {"put_same_host": amount / put_seconds, "get_same_host": amount / read_seconds}

        return unit

    def durable_claims(self) -> Unit:
        """Claims of queue workers that survive the process, each a separate change."""
        load = self._durability_load("process")
        return lambda: {"claims_durable": self._runner.run(load.queue_claims())}

    def durable_puts(self) -> Unit:
        """Puts of one sample, and GB/s of puts of 16 MiB, that survive the process."""
        load = self._durability_load("process")
        return lambda: {
            "put_small_durable": self._runner.run(load.small_puts()),
            "put_large_durable": self._runner.run(load.large_puts()),
        }


@contextmanager
def _started() -> Iterator[Commands]:
    with ExitStack() as stack:
        loads = _Loads(stack)
        yield {"prepare": loads.prepare, "measure": loads.measure}


if __name__ == "__main__":
    serve(_started())
