"""How much does it cost not to lose acknowledged data: with a process, with the machine, with one of several machines?

The same load goes to services of different durability, each a controller and a storage service in two processes:
- in memory, and the same once more as a control;
- with data directories that survive the death of any process, or of the machine;
- with the controller's journal in three members of etcd;
- with a second copy of the storage service's puts in an object store (`--mirror`): with 1 required copy for each
  available object store, and with none required for one of them.

In a round each service makes each load for a moment; the order of loads, and of services within a load, is random each
time. The ratio of each figure to memory is taken in each round; the table has medians. Servers of etcd and object
stores are on this machine too: this compares the work for its cores and disk, not networks.

    python -m benchmarks.durability_cost
    python -m benchmarks.durability_cost --columns control mirror --engines valkey s3 --rounds 21
"""

from __future__ import annotations

import argparse
import asyncio
import math
import os
import random
import sys
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import partial

import grpc
import psutil

import tq_service as tq
from benchmarks.compare import median_with_interval
from benchmarks.durability_load import BATCH_SIZE, PRODUCER_COUNT, RANK_COUNT, SMALL_ROW_BYTES, Load, Rate
from benchmarks.durability_services import COLUMNS, CONTROL, ENGINE_KEYS, MEMORY, Service, Services
from benchmarks.harness import Options, command_line, given_options, median, median_ratio, run_async, show
from benchmarks.report import Aim, Cell, Plot, Report
from tq_service.dataplane.shared_memory.client import SWITCH_VARIABLE
from tq_service.errors import TqError, UnavailableError
from tq_service.v1.storage_service_pb2 import StatRequest
from tq_service.v1.storage_service_pb2_grpc import StorageServiceStub

_WANTED = 0.8
_ROUNDS, _SECONDS = 7, 0.4
_PART, _QUICK_PART = 4, 8
_LARGE_BYTES, _QUICK_LARGE_BYTES = 64 << 20, 8 << 20
_LARGE_PUTS_EACH = 2
_TIMEOUT_SECONDS = 60.0
_LOOK_SECONDS = 0.1
_MOST_LOOKS = 15
_IDLE_CORES = 0.5

Rates = Mapping[str, Mapping[str, Sequence[float]]]
"""For each figure, for each column, the rate of each round."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The columns to measure, and for how long.

    Attributes:
        rounds: how often each service makes each load.
        seconds: duration of each load of each service in each round, at least one unit of it.
        columns: the `COLUMNS` to compare with memory.
        engines: the object stores of mirrors, names of `ENGINE_KEYS`.
        quick: whether to use small units without waits between them.
    """

    rounds: int = _ROUNDS
    seconds: float = _SECONDS
    columns: Collection[str] = COLUMNS
    engines: Sequence[str] = tuple(ENGINE_KEYS)
    quick: bool = False


def _part(plan: Plan) -> int:
    return _QUICK_PART if plan.quick else _PART


def _large_bytes(plan: Plan) -> int:
    return _QUICK_LARGE_BYTES if plan.quick else _LARGE_BYTES


def _cases(wire: Load, shared: Load, plan: Plan) -> dict[str, Rate]:
    large = f"of {_large_bytes(plan) >> 20} MiB, {PRODUCER_COUNT // _part(plan)} at a time"
    return {
        f"claims/s of {RANK_COUNT} ranks": wire.ranked_claims,
        f"claims/s of {RANK_COUNT} queue workers": wire.queue_claims,
        f"claims/s of {RANK_COUNT} ranks while {PRODUCER_COUNT} producers put": wire.steps,
        f"puts/s of one sample by {PRODUCER_COUNT} producers": wire.small_puts,
        f"put GB/s {large}, over the wire": wire.large_puts,
        f"put GB/s {large}, in shared memory": shared.large_puts,
    }


@contextmanager
def _without_shared_memory() -> Iterator[None]:
    """Keep clients off shared memory, for addresses that they first use within the block."""
    before = os.environ.get(SWITCH_VARIABLE)
    os.environ[SWITCH_VARIABLE] = "off"
    try:
        yield
    finally:
        if before is None:
            del os.environ[SWITCH_VARIABLE]
        else:
            os.environ[SWITCH_VARIABLE] = before


async def _wait_until_mirrored(storage: StorageServiceStub) -> None:
    """Wait until the mirror has all bytes of a storage service.

    Raises:
        UnavailableError: it takes too long.
    """
    end = time.monotonic() + _TIMEOUT_SECONDS
    while waiting := (await storage.Stat(StatRequest())).mirror.unmirrored_bytes:
        if time.monotonic() > end:
            raise UnavailableError(f"{waiting} bytes are missing in the mirror after {_TIMEOUT_SECONDS:g} s")
        await asyncio.sleep(_LOOK_SECONDS / 10)


async def _cases_of(service: Service, plan: Plan, stack: AsyncExitStack) -> dict[str, Rate]:
    """Return the rates of a service by figure, with one client over the network and one in shared memory."""
    before_clear = None
    if service.is_mirrored_afterwards:
        # A clear would spare the mirror the bytes that are not yet written.
        channel = await stack.enter_async_context(grpc.aio.insecure_channel(service.storage_address))
        before_clear = partial(_wait_until_mirrored, StorageServiceStub(channel))

    async def load() -> Load:
        client = await stack.enter_async_context(tq.AsyncClient(service.address, timeout=_TIMEOUT_SECONDS))
        large = {"tensor_bytes": _large_bytes(plan), "large_puts_each": _LARGE_PUTS_EACH}
        return Load(client, _part(plan), before_clear=before_clear, **large)

    wire, shared = await load(), await load()
    with _without_shared_memory():
        await wire.start()
    return _cases(wire, shared, plan)


async def _turn(unit: Rate, seconds: float) -> float:
    """Return the rate over consecutive units of a load within some seconds, at least one unit."""
    end, inverse = time.perf_counter() + seconds, [1 / await unit()]
    while time.perf_counter() < end:
        inverse.append(1 / await unit())
    return len(inverse) / sum(inverse)


def _busy_seconds() -> float:
    """Return the processor time of all processes that this one has started."""
    seconds = 0.0
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            times = process.cpu_times()
            seconds += times.user + times.system
    return seconds


async def _wait_until_idle() -> None:
    """Wait until the last service, its object store and etcd have finished: their work would slow down the next one.

    It takes 1.5 seconds at most.
    """
    before = _busy_seconds()
    for _ in range(_MOST_LOOKS):
        await asyncio.sleep(_LOOK_SECONDS)
        now = _busy_seconds()
        if now - before < _IDLE_CORES * _LOOK_SECONDS:
            return
        before = now


class _Rounds:
    """Measures services in rounds.

    Attributes:
        rates: for each figure and column, one per round.
        failed: reasons why columns were left out after they had started.
    """

    def __init__(self, of_column: Mapping[str, Mapping[str, Rate]], plan: Plan) -> None:
        self._of_column = dict(of_column)
        self._plan = plan
        self._rng = random.Random(0)
        self._figures = list(of_column[MEMORY])
        self.rates: dict[str, dict[str, list[float]]] = {
            figure: {column: [] for column in of_column} for figure in self._figures
        }
        self.failed: list[str] = []

    async def run(self) -> None:
        """Measure, after a round of one unit each that does not count."""
        if not self._plan.quick:
            await self._round(0.0, is_counted=False)
        started = time.monotonic()
        for number in range(1, self._plan.rounds + 1):
            await self._round(self._plan.seconds, is_counted=True)
            left = (time.monotonic() - started) / number * (self._plan.rounds - number)
            print(f"round {number} of {self._plan.rounds}; {left / 60:.1f} minutes left", file=sys.stderr, flush=True)

    async def _round(self, seconds: float, *, is_counted: bool) -> None:
        for figure in self._rng.sample(self._figures, len(self._figures)):
            for column in self._rng.sample(list(self._of_column), len(self._of_column)):
                if not self._plan.quick:
                    await _wait_until_idle()
                try:
                    rate = await _turn(self._of_column[column][figure], seconds)
                except TqError as error:
                    self._leave_out(column, figure, error)
                else:
                    if is_counted:
                        self.rates[figure][column].append(rate)

    def _leave_out(self, column: str, figure: str, error: TqError) -> None:
        """Continue without a column, which keeps the results of the others."""
        if column == MEMORY:
            raise error
        reason = f"{column}: left out because it failed ({figure}): {error}"
        print(reason, file=sys.stderr, flush=True)
        self.failed.append(reason)
        del self._of_column[column]
        for rates in self.rates.values():
            del rates[column]


async def _measure(services: Sequence[Service], plan: Plan) -> tuple[Rates, list[str]]:
    async with AsyncExitStack() as stack:
        of_column = {service.column: await _cases_of(service, plan, stack) for service in services}
        rounds = _Rounds(of_column, plan)
        await rounds.run()
        return rounds.rates, rounds.failed


def _ratios(rates: Mapping[str, Sequence[float]]) -> dict[str, float]:
    return {column: median_ratio(each, rates[MEMORY]) for column, each in rates.items() if column != MEMORY}


def _intervals(figure: str, rates: Mapping[str, Sequence[float]]) -> str:
    found = []
    for column, each in rates.items():
        if column != MEMORY:
            ratio = median_with_interval([one / base for one, base in zip(each, rates[MEMORY], strict=True)])
            if math.isfinite(ratio.high):
                found.append(f"{column} {ratio.low:.2f} to {ratio.high:.2f}")
    return f"95 % intervals, {figure}: {', '.join(found)}" if found else ""


def _report(all_rates: Rates, plan: Plan, missing: Sequence[str]) -> Report:
    ratios = {figure: _ratios(rates) for figure, rates in all_rates.items()}
    columns = list(next(iter(ratios.values())))
    rows: list[list[Cell]] = [
        [figure, median(all_rates[figure][MEMORY]), *each.values()] for figure, each in ratios.items()
    ]
    return Report(
        name="durability_cost",
        question="How much does it cost not to lose acknowledged data, compared with a service in memory?",
        columns=["what", MEMORY, *(f"{column} / {MEMORY}" for column in columns)],
        rows=rows,
        notes=[
            f"{plan.rounds} rounds of {plan.seconds:g} s for each figure and column; median ratios of the same round; "
            f"{CONTROL} is a second service in memory",
            "each column is a controller and a storage service; all share one client process with one event loop; "
            "servers of etcd and of object stores are on the same machine",
            "process, disk: data directories of both, on the disk of the directory for temporary files; etcd: the "
            "controller's journal in three members, bytes in memory; mirrors: state and bytes in memory, a "
            "second copy of the bytes in the object store, 1 copy required unless stated",
            "the files of mirror: file are synced; Valkey has a replica, but writes do not wait; S3 is SeaweedFS; "
            "Mooncake is over TCP",
            f"batches of {BATCH_SIZE}; small puts of {SMALL_ROW_BYTES} B per sample; GB are 10^9 bytes; while "
            "producers put: one put of all samples of a batch_index for each",
            "0 required: the rate while producers put, without the mirror's work after the last put",
            *missing,
            *filter(None, (_intervals(figure, rates) for figure, rates in all_rates.items())),
        ],
        aims=[
            Aim(what=f"{figure}, process / memory", measured=each["process"], wanted=_WANTED)
            for figure, each in ratios.items()
            if "process" in each
        ],
        plots=[
            Plot(
                name="durability_cost",
                title="Share of the rate with durability",
                x_label="",
                y_label="of the rate in memory",
                bars=True,
                series={column: [(figure, each[column]) for figure, each in ratios.items()] for column in columns},
            )
        ],
    )


def measure(plan: Plan) -> Report:
    """Start the compared services, measure them, and stop them."""
    with ExitStack() as stack:
        services = Services(stack, plan.columns, plan.engines)
        rates, failed = run_async(_measure(services.running, plan))
    return _report(rates, plan, [*services.missing, *failed])


def run(options: Options) -> Report:
    """Measure all columns."""
    return measure(_plan(options))


def _plan(options: Options, given: argparse.Namespace | None = None) -> Plan:
    chosen = {} if given is None else {name: getattr(given, name) for name in ("seconds", "columns", "engines")}
    if options.quick:
        chosen["seconds"] = 0.0
    return Plan(rounds=options.repeats, quick=options.quick, **chosen)


def main() -> int:
    """Measure the chosen columns."""
    parser = command_line(run)
    parser.set_defaults(repeats=_ROUNDS)
    parser.add_argument("--rounds", dest="repeats", type=int, help="the same as --repeats; 6 or more for intervals")
    parser.add_argument(
        "--seconds", type=float, default=_SECONDS, help="seconds of each figure of each column in each round"
    )
    parser.add_argument("--columns", nargs="+", choices=COLUMNS, default=COLUMNS, help="columns to compare with memory")
    parser.add_argument(
        "--engines", nargs="+", choices=tuple(ENGINE_KEYS), default=tuple(ENGINE_KEYS), help="of mirrors"
    )
    given = parser.parse_args()
    options = given_options(given)
    if options.repeats < 1:
        parser.error(f"--rounds: got {options.repeats}, expected at least 1")
    show(measure(_plan(options, given)), given)
    return 0


if __name__ == "__main__":
    sys.exit(main())
