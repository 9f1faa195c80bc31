"""`tq-service bench`: benchmarks claims, puts and gets for a few seconds from a single client process."""

from __future__ import annotations

import asyncio
import secrets
import signal
import statistics
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np
import typer

from tq_service.cli.options import Answer, AsJson, open_client, show, table, with_address
from tq_service.client import AsyncClient
from tq_service.config import parse_size
from tq_service.errors import InvalidArgumentError
from tq_service.testing import ServiceProcess

EXAMPLES = """\
  tq-service bench
  tq-service bench --address controller:50051 --seconds 5
  tq-service bench --size 256MiB --json"""

_ADDRESS_HELP = (
    "Service address as host:port, or host alone for port 50051. Default: a temporary service, started only for this "
    "measurement."
)
_ANSWER_SECONDS = 5.0
_CLAIM_SAMPLES = 65_536
_CLAIM_BATCH = 8
_ROW_BYTES = 65_536
_MOST_REPEATS = 2_000


def _command(
    seconds: Annotated[float, typer.Option(min=0.5, max=600, help="Approximate duration of the measurement.")] = 10.0,
    ranks: Annotated[int, typer.Option(min=1, max=512, help="Number of trainer ranks that claim concurrently.")] = 16,
    size: Annotated[str, typer.Option(metavar="SIZE", help="Size of a bulk put, such as 64MiB.")] = "64MiB",
    as_json: AsJson = False,
    **given: Any,
) -> None:
    """Benchmark claims, puts and gets from one client process against a service.

    The command removes its test data at the end. The results depend on the machines that run the client and the
    service.
    """
    size_bytes = _positive_bytes(size)

    async def run(target: str, **credentials: Any) -> list[_Figure]:
        measuring = asyncio.current_task()
        if measuring is not None:  # on SIGTERM, remove the benchmark's data as on SIGINT
            asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, measuring.cancel)
        async with AsyncClient(target, **credentials) as client:
            return [
                *await _measure_latencies(client, seconds * 0.3),
                *await _measure_claims(client, seconds * 0.3, ranks),
                *await _measure_bulk(client, seconds * 0.4, size_bytes),
            ]

    try:
        if given["address"]:
            with open_client(
                timeout=_ANSWER_SECONDS, **given
            ):  # fails fast; AsyncClient would retry a wrong address for a minute
                pass
            figures = asyncio.run(run(given.pop("address"), **given))
        else:
            with ServiceProcess() as service:
                figures = asyncio.run(run(service.address, token=False, tls=False))
    except asyncio.CancelledError:
        raise typer.Exit(128 + signal.SIGTERM) from None
    show(_answer(figures), as_json)


def _answer(figures: list[_Figure]) -> Answer:
    yield figures
    rows = [
        (figure.name, round(figure.rate), figure.unit, f"{figure.p50_ms:.2f}", f"{figure.p99_ms:.2f}", figure.count)
        for figure in figures
    ]
    yield table("measured, >rate, unit, >p50 ms, >p99 ms, >calls", rows)


command = with_address(_command, _ADDRESS_HELP)


def _positive_bytes(size: str) -> int:
    try:
        size_bytes = parse_size(size)
    except ValueError as error:
        raise InvalidArgumentError(f"--size: got {size!r}: {error}", field="size") from None
    if not isinstance(size_bytes, int) or size_bytes <= 0:
        raise InvalidArgumentError(f"--size: got {size!r}, expected a size greater than 0, such as 64MiB", field="size")
    return size_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class _Figure:
    """One row of benchmark results.

    Attributes:
        name: name of the measured operation.
        rate: measured throughput, in `unit`.
        unit: unit of `rate`, such as "calls/s".
        p50_ms: median latency in milliseconds.
        p99_ms: 99th-percentile latency in milliseconds.
        count: number of calls measured.
    """

    name: str
    rate: float
    unit: str
    p50_ms: float
    p99_ms: float
    count: int


def _figure(name: str, latencies: list[float], *, rate: float, unit: str) -> _Figure:
    p50, p99 = np.percentile(np.asarray(latencies) * 1e3, [50, 99])
    return _Figure(name=name, rate=rate, unit=unit, p50_ms=float(p50), p99_ms=float(p99), count=len(latencies))


@asynccontextmanager
async def _partition(client: AsyncClient) -> AsyncIterator[str]:
    """Create a partition and yield its name. Clear the partition on exit, even after an error."""
    partition_id = f"bench-{secrets.token_hex(6)}"
    await client.create_partition(partition_id)
    try:
        yield partition_id
    finally:
        await client.clear_partition(partition_id)


async def _timed(call: Awaitable[object]) -> float:
    started = time.perf_counter()
    await call
    return time.perf_counter() - started


async def _repeated(call: Callable[[], Awaitable[float]], seconds: float) -> list[float]:
    """Repeat a call for `seconds` seconds, but no more than `_MOST_REPEATS` times. Return the latencies."""
    latencies: list[float] = []
    until = time.perf_counter() + seconds
    while not latencies or (time.perf_counter() < until and len(latencies) < _MOST_REPEATS):
        latencies.append(await call())
    return latencies


async def _measure_latencies(client: AsyncClient, seconds: float) -> list[_Figure]:
    """Measure the latency of a simple call, and of the delivery of a newly put sample to a waiting worker."""
    async with _partition(client) as partition_id:

        async def wake() -> float:
            claim = asyncio.create_task(
                client.get_meta(
                    partition_id=partition_id, task_name="bench", data_fields=["value"], batch_size=1, max_wait=10.0
                )
            )
            await asyncio.sleep(0)  # send the claim before the put
            row = {"value": np.zeros(1, np.int8)}
            return await _timed(asyncio.gather(client.put(partition_id, row), claim))

        await client.describe_partition(partition_id)  # opens the connection
        trips = await _repeated(lambda: _timed(client.describe_partition(partition_id)), seconds / 2)
        wakes = await _repeated(wake, seconds / 2)
    return [
        _figure("round trip", trips, rate=len(trips) / sum(trips), unit="calls/s"),
        _figure("put to waiting worker", wakes, rate=len(wakes) / sum(wakes), unit="samples/s"),
    ]


async def _measure_claims(client: AsyncClient, seconds: float, ranks: int) -> list[_Figure]:
    """Measure concurrent claims of 8-sample batches by `ranks` trainer ranks. All samples are ready at the start."""
    async with _partition(client) as partition_id:
        await client.put(partition_id, {"value": np.zeros(_CLAIM_SAMPLES, np.int8)})
        latencies: list[float] = []
        started = time.perf_counter()

        async def consume(rank: int) -> None:
            for batch_index in range(_CLAIM_SAMPLES // _CLAIM_BATCH // ranks):
                if time.perf_counter() - started > seconds:
                    return
                claim = client.get_meta(
                    partition_id=partition_id,
                    task_name="bench",
                    data_fields=["value"],
                    batch_size=_CLAIM_BATCH,
                    dp_rank=rank,
                    dp_size=ranks,
                    batch_index=batch_index,
                    max_wait=0.0,
                )
                latencies.append(await _timed(claim))

        await asyncio.gather(*(consume(rank) for rank in range(ranks)))
        elapsed = time.perf_counter() - started
    return [_figure(f"claim, {ranks} concurrent ranks", latencies, rate=len(latencies) / elapsed, unit="claims/s")]


async def _measure_bulk(client: AsyncClient, seconds: float, size_bytes: int) -> list[_Figure]:
    """Measure sequential puts and gets of a dense float32 column of about `size_bytes` bytes."""
    rows = max(size_bytes // _ROW_BYTES, 1)
    column = np.random.default_rng(0).random((rows, _ROW_BYTES // 4), dtype=np.float32)
    puts: list[float] = []
    gets: list[float] = []
    async with _partition(client) as partition_id:  # the first get imports torch if installed, and is not measured
        await client.get_data(await client.put(partition_id, {"column": column[:1]}))
    until = time.perf_counter() + seconds
    while not gets or time.perf_counter() < until:
        async with _partition(client) as partition_id:
            started = time.perf_counter()
            meta = await client.put(partition_id, {"column": column})
            puts.append(time.perf_counter() - started)
            gets.append(await _timed(client.get_data(meta)))
    size = f"{column.nbytes / 2**20:g} MiB"
    return [
        _figure(f"{verb} {size}", times, rate=column.nbytes / 1e6 / statistics.median(times), unit="MB/s")
        for verb, times in (("put", puts), ("get", gets))
    ]
