"""How fast do tensors go over the wire, into the service and back, beside TransferQueue, raw TCP and a memcpy?

The service is a process of its own and shares no memory with clients of its host; every put makes a partition,
which is cleared after the get. TransferQueue's client is a process of its own, too, and gets rows of the same shapes.

Each turn makes two round trips. Before the first one others had the machine, and memory that was freed may have gone
back to the system, in a virtual machine to its host; the second finds it still at hand. A process that frees memory
after each use pays for that in the first.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch

import tq_service as tq
from benchmarks import tcp_sink
from benchmarks.harness import Options, interleave, main, median, median_ratio, running
from benchmarks.peer import Peer, peer
from benchmarks.peer_environment import TRANSFER_QUEUE
from benchmarks.report import Aim, Cell, Plot, Report
from tq_service.testing import ServiceProcess

DENSE_BYTES = 256 << 20
JAGGED_BYTES = 16 << 20
# Long rows, and sequences of 8,192 as in TransferQueue's own performance test.
_LONG_ROW_BYTES, _SEQUENCE_BYTES = 1 << 20, 32 << 10
_JAGGED_ROW_COUNT = 4_096
_PARTITION = "bulk"
_TCP, _MEMCPY = "raw TCP, 64 MiB sends", "memcpy, warm"
_WANTED_OF_PEER = {"put": 1.7, "get": 3.3}
_WANTED_OF_TCP = 0.3

PutAndGet = Callable[[Any], tuple[float, float]]


class SyncRoundTrip:
    """Puts and gets with `tq.Client`."""

    def __init__(self, address: str) -> None:
        self._client = tq.Client(address, timeout=60.0)

    def __call__(self, data: Any) -> tuple[float, float]:
        """Return the seconds of a put and of a get."""
        times = [time.perf_counter()]
        meta = self._client.put({"x": data}, partition_id=_PARTITION)
        times.append(time.perf_counter())
        back = self._client.get_data(meta)
        times.append(time.perf_counter())
        _check(back["x"], data)
        self._client.clear_partition(_PARTITION)
        return times[1] - times[0], times[2] - times[1]

    def close(self) -> None:
        """Close the client."""
        self._client.close()


class _AsyncRoundTrip:
    """Puts and gets with `tq.AsyncClient`, on uvloop where it is installed."""

    def __init__(self, address: str) -> None:
        try:
            import uvloop

            self._runner = asyncio.Runner(loop_factory=uvloop.new_event_loop)
        except ModuleNotFoundError:
            self._runner = asyncio.Runner()
        self._client = tq.AsyncClient(address, timeout=60.0)

    def __call__(self, data: Any) -> tuple[float, float]:
        """Return the seconds of a put and of a get."""
        return self._runner.run(self._round_trip(data))

    async def _round_trip(self, data: Any) -> tuple[float, float]:
        times = [time.perf_counter()]
        meta = await self._client.put({"x": data}, partition_id=_PARTITION)
        times.append(time.perf_counter())
        back = await self._client.get_data(meta)
        times.append(time.perf_counter())
        _check(back["x"], data)
        await self._client.clear_partition(_PARTITION)
        return times[1] - times[0], times[2] - times[1]

    def close(self) -> None:
        self._runner.run(self._client.aclose())
        self._runner.close()


def _check(back: Any, data: Any) -> None:
    """Raise unless the last row came back; comparing all of them would disturb what is measured next."""
    if data.is_nested:  # taking a row of a nested tensor makes all of them
        back, data = back.values(), data.values()
    if not torch.equal(back[-1], data[-1]):
        raise RuntimeError("what was got is not what was put")


def _seconds(action: Callable[[], object]) -> float:
    started = time.perf_counter()
    action()
    return time.perf_counter() - started


def _twice(action: Callable[[], Any]) -> tuple[Any, Any]:
    return action(), action()


def _dense(row_bytes: int) -> torch.Tensor:
    return torch.rand(DENSE_BYTES // row_bytes, row_bytes // 4)


def jagged() -> torch.Tensor:
    """Return 16 MiB in rows of 2 to 6 KiB."""
    mean = JAGGED_BYTES // 4 // _JAGGED_ROW_COUNT
    lengths = np.random.default_rng(0).integers(mean // 2, mean + mean // 2, _JAGGED_ROW_COUNT)
    return torch.nested.nested_tensor([torch.rand(int(length)) for length in lengths], layout=torch.jagged)


def _row_lengths(data: torch.Tensor) -> list[int]:
    return [int(length) for length in data.offsets().diff()] if data.is_nested else [data.shape[1]] * data.shape[0]


def _measure(options: Options, address: str, sink_address: str, transfer_queue: Peer) -> Report:
    clients: dict[str, Any] = {"tq.Client": SyncRoundTrip(address), "tq.AsyncClient": _AsyncRoundTrip(address)}
    connection = tcp_sink.connect(sink_address)
    rows: list[list[Cell]] = []
    for label, data in (
        ("dense, 256 MiB in rows of 1 MiB", _dense(_LONG_ROW_BYTES)),
        ("dense, 256 MiB in rows of 32 KiB", _dense(_SEQUENCE_BYTES)),
        ("jagged, 16 MiB in rows of 2 to 6 KiB", jagged()),
    ):
        payload = (data.values() if data.is_nested else data).numpy().reshape(-1).view(np.uint8)
        target = np.zeros_like(payload)
        actions: dict[str, Callable[[], Any]] = {name: partial(client, data) for name, client in clients.items()}
        actions[_TCP] = partial(_seconds, partial(tcp_sink.send, connection, payload.data))
        actions[_MEMCPY] = partial(_seconds, partial(np.copyto, target, payload))
        if transfer_queue.is_there:
            transfer_queue.ask("load", name=label, row_lengths=_row_lengths(data))
            actions[transfer_queue.name] = partial(transfer_queue.ask, "round_trip", name=label)
        cases = {name: partial(_twice, action) for name, action in actions.items()}
        times = interleave(cases, options.repeats * 2 if data.is_nested else options.repeats)
        rows += [[label, *cells] for cells in _cells(times, payload.nbytes, list(clients), transfer_queue.name)]
    connection.close()
    for client in clients.values():
        client.close()
    return _report(rows, transfer_queue)


def _cells(times: dict[str, list[Any]], size: int, clients: list[str], peer_name: str) -> list[list[Cell]]:
    """Return rows of: how, GB/s, of raw TCP, of the peer; and of the second round trip GB/s and of the peer."""
    # (repeats, first or second), or (repeats, first or second, put or get)
    rates = {name: size / 1e9 / np.asarray(repeats) for name, repeats in times.items()}
    tcp = rates[_TCP]
    rows: list[list[Cell]] = []
    for column, verb in enumerate(("put", "get")):
        peers = rates[peer_name][..., column] if peer_name in rates else None
        for name in (*clients, *([] if peers is None else [peer_name])):
            ours = rates[name][..., column]
            of_peer = (
                [None, None] if peers is None else [median_ratio(ours[:, trip], peers[:, trip]) for trip in (0, 1)]
            )
            of_tcp = median_ratio(ours[:, 0], tcp[:, 0])
            rows.append([f"{name}, {verb}", median(ours[:, 0]), of_tcp, of_peer[0], median(ours[:, 1]), of_peer[1]])
    for name in (_TCP, _MEMCPY):
        of_tcp = median_ratio(rates[name][:, 0], tcp[:, 0])
        rows.append([name, median(rates[name][:, 0]), of_tcp, None, median(rates[name][:, 1]), None])
    return rows


def _aims(rows: list[list[Cell]]) -> list[Aim]:
    aims = []
    for label, how, rate, of_tcp, of_peer, *_ in rows:
        if not str(how).startswith("tq."):
            continue
        what, verb = f"{label}, {how}", str(how).rpartition(" ")[2]
        if str(label).startswith("dense"):
            aims.append(Aim(what=f"{what}, GB/s", measured=float(rate or 0), wanted=1.0))
            aims.append(Aim(what=f"{what} / raw TCP", measured=float(of_tcp or 0), wanted=_WANTED_OF_TCP))
        measured = None if of_peer is None else float(of_peer)
        aims.append(Aim(what=f"{what} / TransferQueue", measured=measured, wanted=_WANTED_OF_PEER[verb]))
    return aims


def _report(rows: list[list[Cell]], transfer_queue: Peer) -> Report:
    labels = list(dict.fromkeys(str(row[0]) for row in rows))
    return Report(
        name="bulk_throughput",
        question="How fast do tensors go over the wire, into the service and back, beside TransferQueue and raw TCP?",
        columns=[
            "what",
            "how",
            "GB/s",
            "of raw TCP",
            "of TransferQueue",
            "at once again, GB/s",
            "again, of TransferQueue",
        ],
        rows=rows,
        notes=[
            "float32, one tensor, jagged rows in a nested one; GB are 10^9 bytes",
            "TransferQueue gives dense rows back as a nested tensor",
            "at once again: the second of two round trips, before freed memory has gone back to the system",
            *transfer_queue.notes,
        ],
        aims=_aims(rows),
        plots=[
            Plot(
                name="bulk_throughput",
                title="Throughput of one put and one get at a time",
                x_label="",
                y_label="GB/s",
                bars=True,
                series={
                    label: [(str(row[1]), float(row[2] or 0)) for row in rows if row[0] == label and row[1] != _MEMCPY]
                    for label in labels
                },
            )
        ],
        without=transfer_queue.absent,
    )


def run(options: Options) -> Report:
    """Measure."""
    with (
        ServiceProcess("--shared-memory", "off") as server,
        running("benchmarks.tcp_sink") as sink,
        peer(TRANSFER_QUEUE, "benchmarks.transfer_queue_peer", options) as transfer_queue,
    ):
        return _measure(options, server.address, sink.address, transfer_queue)


if __name__ == "__main__":
    sys.exit(main(run))
