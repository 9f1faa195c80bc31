"""How many bytes move for one batch of a DP rank in a context-parallel group?

Three ways: each rank fetches full rows; one rank fetches full rows and broadcasts them (`replica_group`); each rank
fetches its share of the token fields. Bytes are counted at the storage service, and the broadcast by the sizes of its
tensors, so the figures do not depend on the machine.
"""

from __future__ import annotations

import sys
from typing import Any, Final

import numpy as np

import tq_service as tq
from benchmarks.harness import Options, main, run_async
from benchmarks.report import Aim, Cell, Report
from tq_service.config import load_settings
from tq_service.server.app import running

_CP_SIZE: Final = 4
_MIB: Final = 1 << 20
_SETS: Final = {
    "token fields": ("input_ids", "labels", "logprobs"),
    "token fields, and routed experts of 48 layers": ("input_ids", "labels", "logprobs", "routed_experts"),
}


def _rows(sample_count: int) -> dict[str, list[Any]]:
    lengths = np.random.default_rng(7).integers(256, 8192, sample_count).tolist()
    return {
        "input_ids": [np.zeros(length, np.int64) for length in lengths],
        "labels": [np.zeros(length, np.int64) for length in lengths],
        "logprobs": [np.zeros(length, np.float32) for length in lengths],
        "routed_experts": [np.zeros((length, 48, 8), np.uint8) for length in lengths],
    }


async def _count(sample_count: int) -> list[list[Cell]]:
    """Return a row for each set of fields and each way."""
    settings = load_settings({"port": 0, "shared_memory": "off", "bulk": "off"}).settings
    rows: list[list[Cell]] = []
    async with running(settings) as app, tq.AsyncClient(f"127.0.0.1:{app.port}", timeout=120.0) as client:
        assert app.storage is not None
        meta = await client.put("p", _rows(sample_count))

        async def fetched(fields: tuple[str, ...], **how: Any) -> int:
            await client.get_data(meta, data_fields=fields, **how)  # the first call also makes a small request
            before = app.storage.engine.stat().read_bytes
            await client.get_data(meta, data_fields=fields, **how)
            return int(app.storage.engine.stat().read_bytes - before)

        for name, fields in _SETS.items():
            whole = await fetched(fields)
            rows += [
                [name, "each fetches full rows", _CP_SIZE * whole / _MIB, whole / _MIB, 0.0],
                [name, "one fetches and broadcasts", whole / _MIB, whole / _MIB, (_CP_SIZE - 1) * whole / _MIB],
            ]
            for layout in ("contiguous", "zigzag"):
                shares = []
                for rank in range(_CP_SIZE):
                    share = tq.RowSlice.share(rank, _CP_SIZE, layout, fill=0)
                    shares.append(await fetched(fields, slices=dict.fromkeys(fields, share)))
                rows.append([name, f"each fetches its share, {layout}", sum(shares) / _MIB, max(shares) / _MIB, 0.0])
    return rows


def run(options: Options) -> Report:
    """Measure."""
    sample_count = 4 if options.quick else 16
    rows = run_async(_count(sample_count))
    whole = [row[3] for row in rows if row[1] == "each fetches full rows"]
    shares = [row[3] for row in rows if str(row[1]).startswith("each fetches its share")]
    largest = max(float(share or 0) / float(whole[at // 2] or 1) for at, share in enumerate(shares))
    return Report(
        name="context_parallel",
        question=f"How many bytes move for one batch of a DP rank in a context-parallel group of {_CP_SIZE}?",
        columns=["fields", "way", "service sends, MiB", "a rank gets, MiB", "ranks send, MiB"],
        rows=rows,
        notes=[f"{sample_count} samples of 256 to 8,191 tokens; bytes of values, counted at the storage service"],
        aims=[Aim(what="largest share of a rank, of full rows", measured=largest, wanted=0.26, at_least=False)],
    )


if __name__ == "__main__":
    sys.exit(main(run))
