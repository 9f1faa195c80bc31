"""What do a hundred watchers cost claims and puts, and how soon do they know?

Claims of 64 ranks and puts of 16 workers are measured alone, then while 100 clients in another process watch all
partitions, and alone again, in turns. Clients and service share the processors, so the service's processor time per
call is shown too.
"""

from __future__ import annotations

import asyncio
import itertools
import secrets
import sys
import time
from asyncio.subprocess import PIPE
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass

import numpy as np
import psutil

import tq_service as tq
from benchmarks.harness import ROOT, Options, interleave_async, main, median, median_ratio, run_async
from benchmarks.report import Aim, Cell, Report
from tq_service.client import AsyncWatch
from tq_service.testing import ServiceProcess

_WATCHERS = 100
_SAMPLES = 65_536
_RANKS = 64
_CLAIMS = 3_072
_WORKERS = 16
_PUTS = 1_024
_TRICKLE_SECONDS = 3.0
_TRICKLE_PAUSE_SECONDS = 0.02
_QUIET_PUTS = 20
_QUIET_SECONDS = 0.3


@dataclass(frozen=True, slots=True, kw_only=True)
class _Measured:
    """Calls per second, and microseconds of the service's processor time per call."""

    rate: float
    cpu_us: float


class _Load:
    """The measured calls on one service; they use one event loop."""

    def __init__(self, service: ServiceProcess, scale: int) -> None:
        self._address = service.address
        self._process = psutil.Process(service.pid)
        self._client = tq.AsyncClient(service.address)
        self._scale = scale
        self._numbers = itertools.count()

    async def start(self) -> None:
        await self._client.put("claims", {"x": np.arange(_SAMPLES)})

    async def stop(self) -> None:
        await self._client.aclose()

    @asynccontextmanager
    async def watchers(self) -> AsyncIterator[Callable[[], AbstractAsyncContextManager[None]]]:
        """Start a process of watchers. It watches inside a `with` block of the yielded function."""
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "benchmarks.watchers", "--watch", self._address, cwd=ROOT, stdin=PIPE, stdout=PIPE
        )
        commands, answers = process.stdin, process.stdout
        if commands is None or answers is None:
            raise RuntimeError("the watchers were started without pipes")

        @asynccontextmanager
        async def watching() -> AsyncIterator[None]:
            for command in (b"on\n", b"off\n"):
                commands.write(command)
                await answers.readline()
                if command == b"on\n":
                    yield

        try:
            yield watching
        finally:
            commands.close()
            await process.wait()

    async def claims(self) -> _Measured:
        """Claim with all ranks at the same time."""
        task, count = secrets.token_hex(8), _CLAIMS // _RANKS // self._scale

        async def consume(rank: int) -> None:
            for batch_index in range(count):
                await self._client.get_meta(
                    partition_id="claims", task_name=task, data_fields=["x"], batch_size=8, dp_rank=rank,
                    dp_size=_RANKS, batch_index=batch_index, max_wait=30.0,
                )  # fmt: skip

        return await self._measured(lambda: asyncio.gather(*map(consume, range(_RANKS))), _RANKS * count)

    async def puts(self) -> _Measured:
        """Put single samples with all workers at the same time, and clear them."""
        name, count = f"puts-{next(self._numbers)}", _PUTS // _WORKERS // self._scale
        row = {"x": np.zeros(1)}

        async def put(worker: int) -> None:
            for number in range(count):
                await self._client.put(name, row, keys=[f"{worker}-{number}"], custom_meta=[{"number": number}])

        measured = await self._measured(lambda: asyncio.gather(*map(put, range(_WORKERS))), _WORKERS * count)
        await self._client.clear_partition(name)
        return measured

    async def trickle(self) -> float:
        """Claim occasionally; return the service's processor time in milliseconds per second."""
        task, before, began_at = secrets.token_hex(8), self._process.cpu_times(), time.perf_counter()
        while (seconds := time.perf_counter() - began_at) < _TRICKLE_SECONDS:
            await self._client.get_meta(
                partition_id="claims", task_name=task, data_fields=["x"], batch_size=1, max_wait=0.0
            )
            await asyncio.sleep(_TRICKLE_PAUSE_SECONDS)
        after = self._process.cpu_times()
        return (after.user + after.system - before.user - before.system) / seconds * 1e3

    async def _measured(self, work: Callable[[], Awaitable[object]], count: int) -> _Measured:
        before, began_at = self._process.cpu_times(), time.perf_counter()
        await work()
        seconds, after = time.perf_counter() - began_at, self._process.cpu_times()
        cpu = after.user + after.system - before.user - before.system
        return _Measured(rate=count / seconds, cpu_us=cpu / count * 1e6)

    async def delays(self) -> list[float]:
        """Return the seconds until a single watcher has a put, for some puts after a pause."""
        delays = []
        async with self._client.watch("quiet") as watch:
            await anext(watch)
            for _ in range(_QUIET_PUTS // self._scale):
                await asyncio.sleep(_QUIET_SECONDS)
                began_at = time.perf_counter()
                await self._client.put("quiet", {"x": np.zeros(1)})
                while not (await anext(watch)).partitions:
                    pass
                delays.append(time.perf_counter() - began_at)
        return delays


async def _measure(options: Options) -> Report:
    rows: list[list[Cell]] = []
    with ServiceProcess() as service:
        load = _Load(service, 8 if options.quick else 1)
        await load.start()
        async with load.watchers() as watching:
            for name, measure in (("claims of 64 ranks", load.claims), ("puts of 16 workers", load.puts)):

                async def watched(measure: Callable[[], Awaitable[_Measured]] = measure) -> _Measured:
                    async with watching():
                        return await measure()

                cases = {"alone": measure, "watched": watched, "again": measure}
                rows.append([name, *_cells(await interleave_async(cases, options.repeats))])

            async def trickle_watched() -> float:
                async with watching():
                    return await load.trickle()

            trickles = await interleave_async({"alone": load.trickle, "watched": trickle_watched}, options.repeats)
            extra_ms = median([b - a for a, b in zip(trickles["alone"], trickles["watched"], strict=True)])
        delay = median(await load.delays()) * 1e3
        await load.stop()
    return Report(
        name="watchers",
        question="What do a hundred watchers cost claims and puts, and how soon do they know?",
        columns=[
            "calls",
            "alone, calls/s",
            "with 100 watchers, calls/s",
            "watched / alone",
            "alone again / alone",
            "service's CPU a call, watched / alone",
            "the same, alone again / alone",
        ],
        rows=rows,
        notes=[
            f"{_WATCHERS} clients in one process of the same machine watch samples and tasks of all partitions",
            f"at about 40 claims per second they take {extra_ms:.1f} ms of the service's processor time per second "
            "(median of differences) for the rounds of answers, whose number does not grow with the claims",
            f"after a pause a single watcher has a put {delay:.1f} ms after it was begun, in the median",
        ],
        aims=[
            Aim(what="claims/s with 100 watchers / without", measured=_number(rows[0][3]), wanted=0.97),
            Aim(
                what="the service's processor time for 100 watchers, ms/s", measured=extra_ms, wanted=30, at_least=False
            ),
        ],
    )


def _cells(found: dict[str, list[_Measured]]) -> list[Cell]:
    rates = {case: [each.rate for each in all_of] for case, all_of in found.items()}
    cpus = {case: [each.cpu_us for each in all_of] for case, all_of in found.items()}
    return [
        median(rates["alone"]),
        median(rates["watched"]),
        median_ratio(rates["watched"], rates["alone"]),
        median_ratio(rates["again"], rates["alone"]),
        median_ratio(cpus["watched"], cpus["alone"]),
        median_ratio(cpus["again"], cpus["alone"]),
    ]


def _number(cell: Cell) -> float | None:
    return cell if isinstance(cell, float) else None


async def _watch(address: str) -> None:
    """Watch from a line "on" to a line "off" on standard input; answer each line once it has taken effect."""
    clients = [tq.AsyncClient(address) for _ in range(_WATCHERS)]
    watches: list[AsyncWatch] = []

    async def follow(watch: AsyncWatch) -> None:
        async for _ in watch:
            pass

    while line := await asyncio.to_thread(sys.stdin.readline):
        if line == "on\n":
            revision = (await clients[0].list_partitions()).revision
            watches = [client.watch(revision=revision) for client in clients]
            for watch in watches:
                await anext(watch)
            following = [asyncio.create_task(follow(watch)) for watch in watches]
        else:
            for watch in watches:
                await watch.aclose()
            await asyncio.gather(*following)
        print(line, end="", flush=True)
    for client in clients:
        await client.aclose()


def run(options: Options) -> Report:
    """Measure."""
    return run_async(_measure(options))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--watch"]:
        run_async(_watch(sys.argv[2]))
    else:
        sys.exit(main(run))
