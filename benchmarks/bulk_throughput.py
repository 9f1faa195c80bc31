"""How fast do tensors go into the service and come back, as a share of raw TCP over loopback and of a memcpy?

The service is a process of its own; every put makes a partition, which is cleared after the get.
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
from benchmarks.harness import Options, interleave, main, median, running, service
from benchmarks.report import Aim, Plot, Report

DENSE_BYTES = 256 << 20
JAGGED_BYTES = 16 << 20
_ROW_BYTES = 1 << 20
_JAGGED_ROW_COUNT = 4_096
_PARTITION = "bulk"

PutAndGet = Callable[[Any], tuple[float, float]]


class _SyncRoundTrip:
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


def _dense() -> torch.Tensor:
    return torch.rand(DENSE_BYTES // _ROW_BYTES, _ROW_BYTES // 4)


def _jagged() -> torch.Tensor:
    mean = JAGGED_BYTES // 4 // _JAGGED_ROW_COUNT
    lengths = np.random.default_rng(0).integers(mean // 2, mean + mean // 2, _JAGGED_ROW_COUNT)
    return torch.nested.nested_tensor([torch.rand(int(length)) for length in lengths], layout=torch.jagged)


def _rates(times: list[float], size: int) -> list[float]:
    return [size / 1e9 / seconds for seconds in times]


def _measure(options: Options, address: str, sink_address: str) -> Report:
    clients: dict[str, Any] = {"tq.Client": _SyncRoundTrip(address), "tq.AsyncClient": _AsyncRoundTrip(address)}
    connection = tcp_sink.connect(sink_address)
    rows: list[list[str | float | None]] = []
    for label, data in (("dense float32, 256 MiB", _dense()), ("jagged float32, 16 MiB", _jagged())):
        payload = (data.values() if data.is_nested else data).numpy().reshape(-1).view(np.uint8)
        target = np.zeros_like(payload)
        cases: dict[str, Callable[[], Any]] = {name: partial(client, data) for name, client in clients.items()}
        cases["tcp"] = partial(_seconds, partial(tcp_sink.send, connection, payload.data))
        cases["memcpy"] = partial(_seconds, partial(np.copyto, target, payload))
        repeats = options.repeats if data.is_nested is False else options.repeats * 3
        times = interleave(cases, repeats)
        tcp = _rates(times["tcp"], payload.nbytes)
        for name in clients:
            for verb, column in (("put", 0), ("get", 1)):
                rates = _rates([pair[column] for pair in times[name]], payload.nbytes)
                of_tcp = median([rate / limit for rate, limit in zip(rates, tcp, strict=True)])
                rows.append([label, f"{name}.{'put' if verb == 'put' else 'get_data'}", median(rates), of_tcp])
        rows.append([label, "raw TCP, 64 MiB sends", median(tcp), 1.0])
        copies = _rates(times["memcpy"], payload.nbytes)
        rows.append([label, "memcpy, warm", median(copies), median(copies) / median(tcp)])
    connection.close()
    for client in clients.values():
        client.close()
    return _report(rows)


def _report(rows: list[list[str | float | None]]) -> Report:
    dense = [row for row in rows if str(row[0]).startswith("dense")]
    aims = [
        aim
        for row in dense[:4]
        for aim in (
            Aim(what=f"256 MiB, {row[1]}, GB/s", measured=float(row[2] or 0), wanted=1.0),
            Aim(what=f"256 MiB, {row[1]} / raw TCP", measured=float(row[3] or 0), wanted=0.3),
        )
    ]
    labels = list(dict.fromkeys(str(row[0]) for row in rows))
    return Report(
        name="bulk_throughput",
        question="How fast do tensors go into the service and come back, as a share of raw TCP over loopback?",
        columns=["what", "how", "GB/s", "of raw TCP"],
        rows=rows,
        notes=["GB are 10^9 bytes", f"jagged: {_JAGGED_ROW_COUNT:,} rows of 2 to 6 KiB in one nested tensor"],
        aims=aims,
        plots=[
            Plot(
                name="bulk_throughput",
                title="Throughput of one put and one get at a time",
                x_label="",
                y_label="GB/s",
                bars=True,
                series={
                    label: [(row[1], row[2]) for row in rows if row[0] == label and "memcpy" not in str(row[1])]
                    for label in labels
                },
            )
        ],
    )


def run(options: Options) -> Report:
    """Measure."""
    with service() as server, running("benchmarks.tcp_sink") as sink:
        return _measure(options, server.address, sink.address)


if __name__ == "__main__":
    sys.exit(main(run))
