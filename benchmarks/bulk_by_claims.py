"""`bulk --by claims`: another client's claim rate while clients put and get at full rate."""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import NamedTuple

from benchmarks.bulk_by_clients import find_way
from benchmarks.bulk_clients import CLAIMING_RANKS, Claims, Clients, Data, Target, running_claimer, running_clients
from benchmarks.bulk_service import BulkService, bulk_service
from benchmarks.harness import Options, interleave, median, p50_p99, running
from benchmarks.machine import usable_cores
from benchmarks.report import Aim, Cell, Plot, Report

CLIENT_COUNTS = (1, 4, 16)
_QUICK_COUNTS = (1,)
_DATA, _QUICK_DATA = Data(64 << 20, 1 << 20), Data(4 << 20, 1 << 20)
_SECONDS, _QUICK_SECONDS = 2.0, 0.3
_HEAD_SECONDS = 0.25  # of the clients, before the claims and after them
_MAX_BYTES = "8GiB"
_ALL, _APART = "all in one", "apart"
_MANY_CORES = 8
_WANTED_RATE, _WANTED_P99_MS = 1_000.0, 50.0

Claim = Callable[[str, float], Claims]


class _Turn(NamedTuple):
    """Measurements over some seconds."""

    claims: Claims
    moved_bytes: int
    push_seconds: float


def measure(options: Options, counts: Sequence[int]) -> Report:
    """Measure the given or the usual numbers of clients, and no clients."""
    counts = sorted(counts or (_QUICK_COUNTS if options.quick else CLIENT_COUNTS))
    seconds = _QUICK_SECONDS if options.quick else _SECONDS
    load_before = os.getloadavg()[0]
    rows: list[list[Cell]] = []
    with ExitStack() as stack:
        sink = stack.enter_context(running("benchmarks.tcp_sink"))
        clients = stack.enter_context(running_clients(counts[-1], sink.address))
        clients.seconds(counts[-1], "load", _QUICK_DATA if options.quick else _DATA)
        claim = stack.enter_context(running_claimer())
        services = {
            (where, bulk): stack.enter_context(
                bulk_service("--max-bytes", _MAX_BYTES, "--bulk", bulk, is_apart=where == _APART)
            )
            for where, bulk in itertools.product((_ALL, _APART), ("on", "off"))
        }
        for (_, bulk), service in services.items():
            claim(service.address, 0.0)
            find_way(clients, counts[-1], service, Target(service.address), is_bulk=bulk == "on")
        for count in (0, *counts):
            cases = {
                f"{where}, {'bulk' if bulk == 'on' else 'frames'}": partial(
                    _turn, clients, count, claim, service, seconds
                )
                for (where, bulk), service in services.items()
            }
            for how, turns in interleave(cases, options.repeats).items():
                rows.append(_row(count, how, turns))
    return Report(
        name="bulk_by_claims",
        question="How many claims per second can another client make while clients put and get at full rate?",
        columns=[
            "clients",
            "how",
            "claims/s",
            "least",
            "most",
            "p50, ms",
            "p99, ms",
            "worst p99, ms",
            "puts and gets, GB/s",
        ],
        rows=rows,
        notes=[
            f"another client: a process with {CLAIMING_RANKS} ranks, for {seconds:g} s each time; batches of 8",
            "clients: each a process that repeatedly puts, gets and clears 64 MiB in rows of 1 MiB",
            "apart: controller and storage service are separate processes; frames: with `bulk=off`",
            "least, most and worst are over the repeats; claims/s, p50, p99 and GB/s are their medians",
            f"load average before {load_before:.1f}, after {os.getloadavg()[0]:.1f}; {usable_cores()} cores usable",
        ],
        aims=[] if options.quick or usable_cores() < _MANY_CORES else _aims(rows),
        plots=[
            Plot(
                name="bulk_by_claims",
                title="Claims while clients put and get",
                x_label="clients",
                y_label="claims/s",
                series={
                    how: [(row[0], float(row[2] or 0)) for row in rows if row[1] == how]
                    for how in dict.fromkeys(str(row[1]) for row in rows)
                },
            )
        ],
    )


def _turn(clients: Clients, count: int, claim: Claim, service: BulkService, seconds: float) -> _Turn:
    started = time.perf_counter()
    clients.begin(count, "push", Target(service.address), seconds + 2 * _HEAD_SECONDS)
    time.sleep(_HEAD_SECONDS)
    found = claim(service.address, seconds)
    moved = sum(clients.results(count))
    return _Turn(found, moved, time.perf_counter() - started)


def _row(count: int, how: str, turns: Sequence[_Turn]) -> list[Cell]:
    rates = [len(turn.claims.latencies) / turn.claims.seconds for turn in turns]
    p50, p99 = p50_p99([turn.claims.latencies for turn in turns])
    _, worst = zip(*(p50_p99([turn.claims.latencies]) for turn in turns), strict=True)
    moved = median([turn.moved_bytes / 1e9 / turn.push_seconds for turn in turns])
    return [count, how, median(rates), min(rates), max(rates), p50, p99, max(worst), moved if count else None]


def _aims(rows: Sequence[Sequence[Cell]]) -> list[Aim]:
    aims = []
    for count, how, rate, *_, p99, _worst, _moved in rows:
        if count == 16 and str(how) == f"{_ALL}, bulk":
            aims.append(Aim(what=f"claims/s with {count} clients", measured=float(rate or 0), wanted=_WANTED_RATE))
            what = f"p99 of claims with {count} clients, ms"
            aims.append(Aim(what=what, measured=float(p99 or 0), wanted=_WANTED_P99_MS, at_least=False))
    return aims
