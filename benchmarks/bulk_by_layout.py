"""How fast do 16 MiB of dense, jagged and object columns go over the wire and back, beside raw TCP and a memcpy?

The service is a process of its own and shares no memory with clients of its host. Every column has 4,096 rows of
about 4 KiB; a get makes of them what a caller works with: tensors, nested tensors, Python objects.
"""

from __future__ import annotations

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
from benchmarks.report import Aim, Cell, Plot, Report
from tq_service.testing import ServiceProcess
from tq_service.wire.encoding import encode_columns

TOTAL_BYTES = 16 << 20
ROW_COUNT = 4_096
_MEAN_LENGTH = TOTAL_BYTES // ROW_COUNT // 4  # of float32
_PARTITION = "bulk"
_TURNS = 4
_WANTED_OF_TCP = 0.3


def _columns() -> dict[str, Any]:
    lengths = np.random.default_rng(0).integers(_MEAN_LENGTH // 2, _MEAN_LENGTH * 3 // 2, ROW_COUNT).tolist()
    rows = [torch.rand(length) for length in lengths]
    text = "the quick brown fox jumps over the lazy dog; " * 86
    return {
        "dense": torch.rand(ROW_COUNT, _MEAN_LENGTH),
        "jagged, a nested tensor": torch.nested.nested_tensor(rows, layout=torch.jagged),
        "jagged, a list of tensors": rows,
        "objects: dicts of text": [
            {"uid": f"u{row}", "messages": [{"role": "user", "content": text}], "turns": row}
            for row in range(ROW_COUNT)
        ],
        "objects: dicts with a tensor": [
            {"uid": f"u{row}", "image": torch.rand(_MEAN_LENGTH)} for row in range(ROW_COUNT)
        ],
    }


class _Turns:
    """Puts and gets of one column, and the same bytes over TCP and copied."""

    def __init__(self, client: tq.Client, sink_address: str, column: Any) -> None:
        self._client = client
        self._column = column
        self._connection = tcp_sink.connect(sink_address)
        chunks = encode_columns({"x": column})[0].chunks
        self._bytes = np.frombuffer(b"".join(chunks), np.uint8)
        self._copy = np.zeros_like(self._bytes)
        self.size = self._bytes.nbytes

    def cases(self) -> dict[str, Callable[[], Any]]:
        """Return what is measured; each gives seconds."""
        send = partial(tcp_sink.send, self._connection, self._bytes.data)
        copy = partial(np.copyto, self._copy, self._bytes)
        return {"service": self._round_trips, "tcp": partial(_seconds, send), "memcpy": partial(_seconds, copy)}

    def close(self) -> None:
        self._connection.close()

    def _round_trips(self) -> tuple[float, float]:
        metas: list[tq.BatchMeta] = []
        put = _seconds(lambda: metas.append(self._client.put({"x": self._column}, partition_id=_PARTITION)))
        get = _seconds(lambda: self._client.get_data(metas[-1]))
        self._client.clear_partition(_PARTITION)
        return put, get


def _seconds(action: Callable[[], object]) -> float:
    started = time.perf_counter()
    for _ in range(_TURNS):
        action()
    return (time.perf_counter() - started) / _TURNS


def _measure(options: Options, address: str, sink_address: str) -> Report:
    rows: list[list[Cell]] = []
    with tq.Client(address, timeout=60.0) as client:
        for name, column in _columns().items():
            turns = _Turns(client, sink_address, column)
            rows.append([name, *_cells(interleave(turns.cases(), options.repeats), turns.size)])
            turns.close()
    return _report(rows)


def _cells(times: dict[str, list[Any]], size: int) -> list[Cell]:
    cells: list[Cell] = []
    for column in (0, 1):
        seconds = [pair[column] for pair in times["service"]]
        of_tcp, of_copy = (median_ratio(times[limit], seconds) for limit in ("tcp", "memcpy"))
        cells += [size / 1e9 / median(seconds), of_tcp, of_copy]
    return [*cells, size / 1e9 / median(times["tcp"])]


def _report(rows: list[list[Cell]]) -> Report:
    aims = [
        Aim(what=f"16 MiB {row[0]}, {verb} / raw TCP", measured=float(row[column] or 0), wanted=_WANTED_OF_TCP)
        for row in rows
        if str(row[0]) in ("dense", "jagged, a nested tensor")
        for verb, column in (("put", 2), ("get", 5))
    ]
    heads = ["of raw TCP", "of a memcpy"]
    return Report(
        name="bulk_by_layout",
        question="How fast do 16 MiB of dense, jagged and object columns go over the wire and back, beside raw TCP?",
        columns=["column", "put, GB/s", *heads, "get, GB/s", *heads, "raw TCP, GB/s"],
        rows=rows,
        notes=[
            f"GB are 10^9 bytes; {ROW_COUNT:,} rows of about 4 KiB, jagged ones of 2 to 6 KiB; tq.Client",
            "raw TCP and memcpy carry the bytes as they travel; writing and reading objects is part of put and get",
        ],
        aims=aims,
        plots=[
            Plot(
                name="bulk_by_layout",
                title="Throughput of 16 MiB by layout",
                x_label="",
                y_label="GB/s",
                bars=True,
                series={
                    name: [(str(row[0]), float(row[column] or 0)) for row in rows]
                    for name, column in (("put", 1), ("get", 4), ("raw TCP", 7))
                },
            )
        ],
    )


def run(options: Options) -> Report:
    """Measure."""
    with ServiceProcess("--shared-memory", "off") as server, running("benchmarks.tcp_sink") as sink:
        return _measure(options, server.address, sink.address)


if __name__ == "__main__":
    sys.exit(main(run))
