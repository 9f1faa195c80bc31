"""`bulk --by clients`: concurrent puts and gets of many clients, over bulk connections and in frames, and raw TCP."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple

from benchmarks.bulk_clients import Clients, Data, Target, running_clients
from benchmarks.bulk_service import BulkService, Usage, bulk_service
from benchmarks.harness import Options, interleave, median, median_ratio, running
from benchmarks.machine import usable_cores
from benchmarks.report import Aim, Cell, Plot, Report
from tq_service.wire.connection import Tls

KIB, MIB = 1 << 10, 1 << 20
CLIENT_COUNTS = (1, 4, 16)
MOST_CLIENTS = 32
DATA = {
    "64 MiB, rows of 1 MiB": Data(64 * MIB, MIB),
    "64 MiB, rows of 32 KiB": Data(64 * MIB, 32 * KIB),
    "64 MiB, rows of 2-6 KiB": Data(64 * MIB, None),
    "16 MiB, rows of 1 MiB": Data(16 * MIB, MIB),
    "16 MiB, rows of 32 KiB": Data(16 * MIB, 32 * KIB),
    "16 MiB, rows of 2-6 KiB": Data(16 * MIB, None),
}
_QUICK_COUNTS = (1, 2)
_QUICK_DATA = {"4 MiB, rows of 1 MiB": Data(4 * MIB, MIB), "4 MiB, rows of 2-6 KiB": Data(4 * MIB, None)}
# Bytes per client in a turn; the total for few clients, as a turn would otherwise be too short to measure.
_TURN_BYTES, _TURN_BYTES_TOGETHER, _QUICK_TURN_BYTES = 64 * MIB, 256 * MIB, 8 * MIB
_MAX_BYTES = "8GiB"
_FIND_SECONDS, _ASK_AGAIN_SECONDS = 90.0, 0.1
_TCP, _FRAMES, _BULK, _SECURE_FRAMES, _SECURE_BULK = "raw TCP", "frames", "bulk", "frames, TLS", "bulk, TLS"
_STREAMS = {"bulk, 1 stream": 1, "bulk, 2 streams": 2, "bulk, 4 streams": 4}
WAYS = (*_STREAMS, _SECURE_BULK, _SECURE_FRAMES)
"""Other ways than raw TCP, bulk as the service chooses, and frames; measured with rows of 1 MiB."""

_MANY_CORES = 8
_LOOP_MS = 2.0


class _Turn(NamedTuple):
    """Seconds of the calls in a turn, and their cost to the service."""

    put: float
    get: float
    get_shuffled: float
    put_usage: Usage
    get_usage: Usage
    transfers: int


@dataclass(frozen=True, slots=True)
class _Way:
    """A way to send bytes to a service."""

    service: BulkService
    target: Target
    stream_count: int | None
    is_bulk: bool


def measure(
    options: Options, counts: Sequence[int] = (), data_names: Sequence[str] = (), hows: Sequence[str] = ()
) -> Report:
    """Measure the given numbers of clients, data and `WAYS`; by default the usual numbers, and all data and ways."""
    counts = sorted(counts or (_QUICK_COUNTS if options.quick else CLIENT_COUNTS))
    data = _QUICK_DATA if options.quick else DATA
    data = {name: each for name, each in data.items() if name in (data_names or data)}
    load_before = _load_average()
    rows: list[list[Cell]] = []
    notes: list[str] = []
    with ExitStack() as stack:
        sink = stack.enter_context(running("benchmarks.tcp_sink"))
        clients = stack.enter_context(running_clients(counts[-1], sink.address))
        ways = _ways(stack)
        if any(map(_has_all_ways, data.values())) and {_SECURE_BULK, _SECURE_FRAMES} & set(hows or WAYS):
            ways |= _secure_ways(stack)
        for name, each in data.items():
            clients.seconds(counts[-1], "load", each)
            for count in counts:
                bench = _Bench(clients, count, _put_count(each, count, options))
                chosen = {
                    how: way
                    for how, way in ways.items()
                    if how in (_BULK, _FRAMES) or (_has_all_ways(each) and how in (hows or WAYS))
                }
                for way in chosen.values():
                    bench.find_way(way)
                cases: dict[str, Callable[[], _Turn]] = {how: partial(bench.turn, way) for how, way in chosen.items()}
                times = interleave({_TCP: bench.tcp_turn, **cases}, options.repeats)
                what = f"{count} client{'s' * (count > 1)}, {name}"
                rows += _rows(what, count * bench.put_count * each.size_bytes, bench.call_count, times)
                notes += _strays(what, bench, chosen, times)
    return Report(
        name="bulk_by_clients",
        question="How fast do many clients put and get at once over the wire, over bulk connections and in frames?",
        columns=[
            "what",
            "how",
            *(f"{verb}{unit}" for verb in ("put", "get", "random get") for unit in (", GB/s", " / TCP", " / frames")),
            *(f"service, ms a {verb}{part}" for verb in ("put", "get") for part in ("", ", its loop")),
        ],
        rows=rows,
        notes=[
            "GB are 10^9 bytes, of all clients together; each is a separate process with `tq.Client`",
            "raw TCP: as many processes with one connection each, into and out of reused memory of one Python process "
            "with a thread for each connection; gets are compared with bytes sent by it",
            "frames: the same with the service's `bulk=off`; bulk: as many streams as the service chooses, or as named",
            "random get: the rows of each put in random order; service: its processor time, and that of its event loop",
            f"TLS: compared with the same raw TCP without TLS; load average before {load_before}, "
            f"after {_load_average()}; {usable_cores()} cores usable",
            *(
                []
                if _SECURE_BULK in ways
                else ["TLS is not measured here: it needs rows of 1 MiB and trustme installed"]
            ),
            *notes,
        ],
        aims=[] if options.quick else list(_aims(rows, usable_cores())),
        plots=[_plot(rows)],
    )


def _put_count(data: Data, count: int, options: Options) -> int:
    """Return the number of puts of each client in a turn."""
    size = _QUICK_TURN_BYTES if options.quick else max(_TURN_BYTES, _TURN_BYTES_TOGETHER // count)
    return size // data.size_bytes


def _has_all_ways(data: Data) -> bool:
    return data.row_bytes == MIB


def _ways(stack: ExitStack) -> dict[str, _Way]:
    """Start the services."""
    with_bulk = stack.enter_context(bulk_service("--max-bytes", _MAX_BYTES))
    without = stack.enter_context(bulk_service("--max-bytes", _MAX_BYTES, "--bulk", "off"))
    ways = {
        _BULK: _Way(with_bulk, Target(with_bulk.address), None, is_bulk=True),
        _FRAMES: _Way(without, Target(without.address), None, is_bulk=False),
    }
    return ways | {
        how: _Way(with_bulk, Target(with_bulk.address), count, is_bulk=True) for how, count in _STREAMS.items()
    }


def _secure_ways(stack: ExitStack) -> dict[str, _Way]:
    """Start services with TLS, if certificates can be created."""
    try:
        import trustme
    except ModuleNotFoundError:
        return {}
    directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="tq-bench-")))
    authority = trustme.CA()
    issued = authority.issue_cert("localhost", "127.0.0.1")
    authority.cert_pem.write_to_path(directory / "ca.pem")
    (directory / "cert.pem").write_bytes(b"".join(pem.bytes() for pem in issued.cert_chain_pems))
    (directory / "key.pem").touch(0o600)
    issued.private_key_pem.write_to_path(directory / "key.pem")
    flags = (
        "--max-bytes",
        _MAX_BYTES,
        "--tls-cert",
        str(directory / "cert.pem"),
        "--tls-key",
        str(directory / "key.pem"),
    )
    tls = Tls(ca=str(directory / "ca.pem"))
    ways = {}
    for how, bulk in ((_SECURE_BULK, "on"), (_SECURE_FRAMES, "off")):
        service = stack.enter_context(bulk_service(*flags, "--bulk", bulk))
        ways[how] = _Way(service, Target(service.address, tls), None, is_bulk=bulk == "on")
    return ways


class _Bench:
    """Turns of a number of clients, each making a number of puts and getting them twice."""

    def __init__(self, clients: Clients, count: int, put_count: int) -> None:
        self._clients = clients
        self._count = count
        self.put_count = put_count
        self.call_count = count * put_count

    def find_way(self, way: _Way) -> None:
        """Make the first calls, until the service has seen all of them go the given way.

        Raises:
            RuntimeError: they did not in time.
        """
        find_way(self._clients, self._count, way.service, way.target, is_bulk=way.is_bulk)

    def turn(self, way: _Way) -> _Turn:
        """Make the turn in a given way, in memory that the service has used shortly before."""
        service, clients = way.service, self._clients
        service.set_stream_count(way.stream_count)
        # Otherwise, the first way of a service in a round would pay for memory that was returned to the system in the
        # pause.
        clients.seconds(self._count, "put", way.target, self.put_count)
        clients.seconds(self._count, "clear", way.target)
        usages = [service.usage()]
        put = clients.seconds(self._count, "put", way.target, self.put_count)
        usages.append(service.usage())
        get = clients.seconds(self._count, "get", way.target)
        usages.append(service.usage())
        clients.seconds(self._count, "shuffle")
        get_shuffled = clients.seconds(self._count, "get_shuffled", way.target)
        transfers = service.usage().since(usages[0]).transfers
        clients.seconds(self._count, "clear", way.target)
        return _Turn(put, get, get_shuffled, usages[1].since(usages[0]), usages[2].since(usages[1]), transfers)

    def tcp_turn(self) -> _Turn:
        """Send the same number of bytes over raw TCP."""
        send, fetch = (self._clients.seconds(self._count, action, self.put_count) for action in ("send", "fetch"))
        nothing = Usage(0, 0.0, 0.0)
        return _Turn(send, fetch, fetch, nothing, nothing, 0)


def find_way(clients: Clients, count: int, service: BulkService, target: Target, *, is_bulk: bool) -> None:
    """Connect clients, and make calls until the service has seen all of them go the given way.

    Raises:
        RuntimeError: they did not in time.
    """
    clients.seconds(count, "connect", target)
    wanted = 2 * count if is_bulk else 0
    until = time.monotonic() + _FIND_SECONDS
    while True:
        before = service.usage()
        clients.seconds(count, "put", target, 1)
        clients.seconds(count, "get", target)
        found = service.usage().since(before).transfers
        clients.seconds(count, "clear", target)
        if found == wanted:
            return
        if time.monotonic() > until:
            raise RuntimeError(f"of {2 * count} puts and gets, {found} went over bulk connections; expected {wanted}")
        time.sleep(_ASK_AGAIN_SECONDS)


# Report


def _rows(what: str, size: int, call_count: int, times: Mapping[str, Sequence[_Turn]]) -> Iterator[list[Cell]]:
    limits, frames = times[_TCP], times[_FRAMES]
    for how, turns in times.items():
        cells: list[Cell] = [what, how]
        for part in range(3):
            seconds, of_limit, of_frames = ([turn[part] for turn in each] for each in (turns, limits, frames))
            cells += [size / 1e9 / median(seconds), median_ratio(of_limit, seconds), median_ratio(of_frames, seconds)]
        for usages in ([turn.put_usage for turn in turns], [turn.get_usage for turn in turns]):
            for spent in ([usage.process_seconds for usage in usages], [usage.loop_seconds for usage in usages]):
                cells.append(None if how == _TCP else median(spent) / call_count * 1e3)
        yield cells


def _strays(what: str, bench: _Bench, ways: Mapping[str, _Way], times: Mapping[str, Sequence[_Turn]]) -> Iterator[str]:
    """Yield a line for each way with a wrong number of bulk transfers; one per call is expected."""
    for how, way in ways.items():
        wanted = 3 * bench.call_count * len(times[how]) if way.is_bulk else 0
        found = sum(turn.transfers for turn in times[how])
        if found != wanted:
            yield f"**{what}, {how}: {found} bulk transfers, expected {wanted}**"


def _aims(rows: Sequence[Sequence[Cell]], core_count: int) -> Iterator[Aim]:
    for what, how, *cells in rows:
        if how != _BULK:
            continue
        count, is_large = int(str(what).split()[0]), ", 64 MiB" in str(what)
        of_tcp, of_frames = cells[1:9:3], cells[2:9:3]
        is_jagged = "2-6 KiB" in str(what)
        if core_count < _MANY_CORES:
            if count in (1, 4):
                for verb, ratio in zip(("put", "get"), of_frames, strict=False):
                    yield Aim(
                        what=f"{what}, {verb} / frames", measured=_number(ratio), wanted=1.4 if count == 1 else 2.0
                    )
            loop_ms = _number(cells[10])
            yield Aim(what=f"{what}, loop's ms a put", measured=loop_ms, wanted=_LOOP_MS, at_least=False)
        elif count in (1, 16):
            shares: tuple[float, ...]
            if is_jagged:
                shares = (0.4, 0.4, 0.25) if count == 1 else (0.3, 0.3, 0.15)
            elif is_large:
                shares = (1.3, 1.3) if count == 1 else (0.65, 0.65)
            else:
                shares = (0.6, 0.6) if count == 1 else (0.4, 0.4)
            for verb, ratio, share in zip(("put", "get", "random get"), of_tcp, shares, strict=False):
                yield Aim(what=f"{what}, {verb} / raw TCP", measured=_number(ratio), wanted=share)


def _plot(rows: Sequence[Sequence[Cell]]) -> Plot:
    series = {
        f"{how}, {verb}": [(str(row[0]), float(row[column] or 0)) for row in rows if row[1] == how]
        for how in (_TCP, _BULK, _FRAMES)
        for verb, column in (("put", 2), ("get", 5))
    }
    return Plot(name="bulk_by_clients", title="Throughput", x_label="", y_label="GB/s", bars=True, series=series)


def _number(cell: Cell) -> float | None:
    return cell if isinstance(cell, float) else None


def _load_average() -> str:
    return f"{os.getloadavg()[0]:.1f}"
