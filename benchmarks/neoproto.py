"""How fast do values of verl's NeoProto go from process to process, compared with verl's engine over Ray?

A driver puts a column of a batch as one value, and a rank on the same host reads the full column, or its own eighth of
the rows. It also puts many small values, which the rank reads together. Ray's side does the same as verl's Ray engine:
a tensor is copied into an array and put, an array is copied at the get, and a rank gets the full column for its rows.
"""

from __future__ import annotations

import pickle
import sys
import time
from base64 import b64encode
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from benchmarks.harness import ROOT, Options, interleave, main, median, median_ratio
from benchmarks.peer import Peer, Program, peer, program
from benchmarks.peer_environment import RAY
from benchmarks.report import Aim, Cell, Report
from tq_service.testing import ServiceProcess

STUB = ROOT / "tests/integrations/neoproto_stub"  # verl's Ref: no release of verl has NeoProto
ROW_COUNT, ROW_LENGTH = 1024, 1 << 14
RANK_COUNT = 8
VALUE_COUNT, VALUE_LENGTH = 512, 1 << 11
_WANTED = {
    "put a column": 1.0,
    "get a column": 1.0,
    "get the rows of a rank": 2.0,
    "put small values": 1.0,
    "get small values": 1.0,
}

# Seconds of each of these operations, in order.
Times = list[float]


class _RoundTrip:
    """Puts in this process, and gets in another."""

    def __init__(self, engine: Any, reader: Program) -> None:
        self._engine = engine
        self._reader = reader
        self._column = torch.rand(ROW_COUNT, ROW_LENGTH)
        self._values = list(torch.rand(VALUE_COUNT, VALUE_LENGTH))

    def __call__(self) -> Times:
        """Put, get and release."""
        put_seconds, refs = [], []
        for put, value in ((self._engine.put, self._column), (self._engine.put_many, self._values)):
            started = time.perf_counter()
            made = put(value)
            put_seconds.append(time.perf_counter() - started)
            refs.append(made if isinstance(made, list) else [made])
        sent = [b64encode(pickle.dumps(some)).decode() for some in refs]
        whole, rows, total = self._reader.ask("column", refs=sent[0], row_count=ROW_COUNT // RANK_COUNT)
        values, value_total = self._reader.ask("values", refs=sent[1])
        self._engine.release([ref for some in refs for ref in some])
        if total != float(self._column.sum()) or value_total != float(torch.stack(self._values).sum()):
            raise RuntimeError("the get returned other values than the put sent")
        return [put_seconds[0], whole, rows, put_seconds[1], values]


def _measure(options: Options, engine: Any, reader: Program, ray: Peer) -> Report:
    cases: dict[str, Callable[[], Times]] = {"ours": _RoundTrip(engine, reader)}
    if ray.is_there:
        ray.ask("load", row_count=ROW_COUNT, row_length=ROW_LENGTH, value_count=VALUE_COUNT, value_length=VALUE_LENGTH)
        cases["Ray"] = partial(ray.ask, "round_trip", rank_count=RANK_COUNT)
    times = interleave(cases, options.repeats)
    rows: list[list[Cell]] = []
    for number, what in enumerate(_WANTED):
        ours = [each[number] for each in times["ours"]]
        peers: list[Cell] = [None, None]
        if ray.is_there:
            theirs = [each[number] for each in times["Ray"]]
            peers = [median(theirs) * 1e3, median_ratio(theirs, ours)]
        rows.append([what, median(ours) * 1e3, *peers])
    return Report(
        name="neoproto",
        question="How fast do values of verl's NeoProto go between processes, compared with verl's engine over Ray?",
        columns=["what", "ms", "Ray, ms", "ours / Ray, speed"],
        rows=rows,
        notes=[
            f"a column: {ROW_COUNT * ROW_LENGTH * 4 >> 20} MiB of float32 in {ROW_COUNT} rows; a rank: one of "
            f"{RANK_COUNT}",
            f"small values: {VALUE_COUNT} of {VALUE_LENGTH * 4 >> 10} KiB",
            "gets end when every byte was read, by a sum, on both sides",
            "Ray: the steps of verl's Ray engine, in numpy only; verl itself is not installed on either side",
            *ray.notes,
        ],
        aims=[
            Aim(
                what=f"{what}, speed / Ray", measured=None if ratio is None else float(ratio), wanted=_WANTED[str(what)]
            )
            for what, _, _, ratio in rows
        ],
        without=ray.absent,
    )


def run(options: Options) -> Report:
    """Measure."""
    sys.path.insert(0, str(STUB))
    from tq_service.integrations.neoproto import TqServiceStorageEngine

    with ServiceProcess() as server:
        engine = TqServiceStorageEngine(server.address)
        variables = {"TQ_ADDRESS": server.address, "PYTHONPATH": str(STUB)}
        try:
            with (
                program("benchmarks.neoproto_reader", variables=variables) as reader,
                peer(RAY, "benchmarks.neoproto_peer", options) as ray,
            ):
                return _measure(options, engine, reader, ray)
        finally:
            engine.close()


if __name__ == "__main__":
    sys.exit(main(run))
