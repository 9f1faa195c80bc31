"""What does it cost that nothing acknowledged is lost, when a process dies or when the machine does?

The same load on services that keep nothing, that survive the death of any process, and that survive the machine's. One
client process with one event loop plays 8 producers and 8 ranks. Bytes go over the wire to one service of each kind,
and as shared memory to another. Where there is an etcd, also on a controller whose journal is in three members of it,
with a storage service apart, beside the same two processes in memory.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AsyncExitStack, ExitStack
from pathlib import Path

import numpy as np

import tq_service as tq
from benchmarks.harness import Options, interleave_async, main, median, median_ratio, run_async
from benchmarks.report import Aim, Cell, Plot, Report
from chaos.cluster import free_ports
from chaos.etcd import etcd_members
from tq_service.testing import ServiceProcess

MODES = ("memory", "process", "disk")
APART = ("apart", "etcd")  # controller and storage service are two processes
PRODUCER_COUNT = 8
RANK_COUNT = 8
BATCH_SIZE = 8
_SAMPLE_COUNT = 32_768
_CLAIM_COUNT = 1_536
_STEP_COUNT = 96
_SMALL_PUT_COUNT = 512
_SMALL_ROW_BYTES = 2_048
_TENSOR_BYTES = 16 << 20
_TENSOR_ROW_COUNT = 64
_WANTED = 0.8
_TIMEOUT_SECONDS = 120.0

Rate = Callable[[], Awaitable[float]]


class Load:
    """The ways to make the same load on one service; each returns a rate.

    Args:
        client: of the service.
        part: by how much less than everything is done.
    """

    def __init__(self, client: tq.AsyncClient, part: int) -> None:
        self._client = client
        self._part = part
        self._numbers = itertools.count()
        self._tensor = np.random.default_rng(17).random((_TENSOR_ROW_COUNT, _TENSOR_BYTES // _TENSOR_ROW_COUNT // 8))

    async def start(self) -> None:
        """Put what is claimed."""
        await self._client.put({"x": np.arange(_SAMPLE_COUNT)}, partition_id="claims")

    async def _claim(self, partition_id: str, task: str, rank: int, batch_index: int) -> None:
        meta = await self._client.get_meta(
            partition_id=partition_id, task_name=task, data_fields=["x"], batch_size=BATCH_SIZE, dp_rank=rank,
            dp_size=RANK_COUNT, batch_index=batch_index,
        )  # fmt: skip
        if meta.size != BATCH_SIZE:
            raise RuntimeError(f"got {meta.size} samples, expected {BATCH_SIZE}")

    async def ranked_claims(self) -> float:
        """Claims a second of ranks, from samples that are there."""
        task, count = f"task-{next(self._numbers)}", _CLAIM_COUNT // RANK_COUNT // self._part

        async def consume(rank: int) -> None:
            for batch_index in range(count):
                await self._claim("claims", task, rank, batch_index)

        return await _rate(map(consume, range(RANK_COUNT)), count * RANK_COUNT)

    async def queue_claims(self) -> float:
        """Claims a second of queue workers, each of which is a change of its own."""
        task, count = f"task-{next(self._numbers)}", _CLAIM_COUNT // RANK_COUNT // self._part

        async def consume(_worker: int) -> None:
            for _ in range(count):
                await self._client.get_meta(
                    partition_id="claims", task_name=task, data_fields=["x"], batch_size=BATCH_SIZE
                )

        return await _rate(map(consume, range(RANK_COUNT)), count * RANK_COUNT)

    async def steps(self) -> float:
        """Claims a second while producers put what is claimed, one put for each batch of all ranks."""
        partition_id, count = f"steps-{next(self._numbers)}", _STEP_COUNT // self._part
        data = {"x": np.zeros((RANK_COUNT * BATCH_SIZE, _SMALL_ROW_BYTES // 8))}

        async def produce(producer: int) -> None:
            for _ in range(producer, count, PRODUCER_COUNT):
                await self._client.put(data, partition_id=partition_id)

        async def consume(rank: int) -> None:
            for batch_index in range(count):
                await self._claim(partition_id, "train", rank, batch_index)

        work = [*map(produce, range(PRODUCER_COUNT)), *map(consume, range(RANK_COUNT))]
        rate = await _rate(work, count * RANK_COUNT)
        await self._client.clear_partition(partition_id)
        return rate

    async def small_puts(self) -> float:
        """Puts a second of one sample each."""
        partition_id, count = f"small-{next(self._numbers)}", _SMALL_PUT_COUNT // PRODUCER_COUNT // self._part
        data = {"x": np.zeros((1, _SMALL_ROW_BYTES // 8))}

        async def produce(_producer: int) -> None:
            for _ in range(count):
                await self._client.put(data, partition_id=partition_id)

        rate = await _rate(map(produce, range(PRODUCER_COUNT)), count * PRODUCER_COUNT)
        await self._client.clear_partition(partition_id)
        return rate

    async def large_puts(self) -> float:
        """GB/s of producers that put a tensor each; what was there before was cleared."""
        count = PRODUCER_COUNT // self._part

        async def produce(_producer: int) -> None:
            await self._client.put({"x": self._tensor}, partition_id="large")

        rate = await _rate(map(produce, range(count)), count * _TENSOR_BYTES / 1e9)
        await self._client.clear_partition("large")
        return rate


async def _rate(work: object, amount: float) -> float:
    started = time.perf_counter()
    await asyncio.gather(*work)  # type: ignore[misc]
    return amount / (time.perf_counter() - started)


def _cases(wire: Load, shared: Load) -> dict[str, Rate]:
    return {
        f"claims/s of {RANK_COUNT} ranks": wire.ranked_claims,
        f"claims/s of {RANK_COUNT} queue workers": wire.queue_claims,
        f"claims/s of {RANK_COUNT} ranks while {PRODUCER_COUNT} producers put": wire.steps,
        f"puts/s of one sample by {PRODUCER_COUNT} producers": wire.small_puts,
        f"put GB/s by {PRODUCER_COUNT} producers over the wire": wire.large_puts,
        f"put GB/s by {PRODUCER_COUNT} producers on one host": shared.large_puts,
    }


async def _measure(options: Options, addresses: Mapping[str, tuple[str, str]]) -> Report:
    part = 8 if options.quick else 1
    of_mode: dict[str, dict[str, Rate]] = {}
    async with AsyncExitStack() as stack:
        for mode, pair in addresses.items():
            wire, shared = [
                Load(await stack.enter_async_context(tq.AsyncClient(one, timeout=_TIMEOUT_SECONDS)), part)
                for one in pair
            ]
            await wire.start()
            of_mode[mode] = _cases(wire, shared)
        rows: list[list[Cell]] = []
        for what in of_mode[MODES[0]]:
            rates = await interleave_async({mode: of_mode[mode][what] for mode in addresses}, options.repeats)
            ratios = [median_ratio(rates[mode], rates["memory"]) for mode in MODES[1:]]
            cells: list[Cell] = [what, *(median(rates[mode]) for mode in MODES), *ratios]
            if "etcd" in rates:
                cells += [*(median(rates[mode]) for mode in APART), median_ratio(rates["etcd"], rates["apart"])]
            rows.append(cells)
    return _report(rows, has_etcd="etcd" in addresses)


def _report(rows: list[list[Cell]], *, has_etcd: bool) -> Report:
    return Report(
        name="durability_cost",
        question="What does it cost that nothing acknowledged is lost, when a process dies or when the machine does?",
        columns=[
            "what",
            *MODES,
            "process / memory",
            "disk / memory",
            *((*APART, "etcd / apart") if has_etcd else ()),
        ],
        rows=rows,
        notes=[
            f"batches of {BATCH_SIZE}; small puts of {_SMALL_ROW_BYTES} B a sample, large ones of "
            f"{_TENSOR_BYTES >> 20} MiB; GB are 10^9 bytes",
            "while producers put: one put of all samples of a batch_index for each",
            "one client process with one event loop, services of one process; data directories on the disk of the "
            "directory for temporary files",
            "apart: a controller and a storage service, in memory; etcd: the same with the journal in three members of "
            "etcd, on the same machine and disk"
            if has_etcd
            else "no etcd on this machine: its column is left out",
        ],
        aims=[Aim(what=f"{row[0]}, process / memory", measured=_number(row[4]), wanted=_WANTED) for row in rows],
        plots=[
            Plot(
                name="durability_cost",
                title="What is left with durability",
                x_label="",
                y_label="of the rate in memory",
                bars=True,
                series={
                    mode: [(str(row[0]), float(row[column] or 0)) for row in rows]
                    for column, mode in ((4, "process"), (5, "disk"))
                },
            )
        ],
    )


def _number(cell: Cell) -> float | None:
    return cell if isinstance(cell, float) else None


def _apart(stack: ExitStack) -> dict[str, tuple[str, str]]:
    """Start controllers with storage services apart, one with its journal in etcd; none where there is no etcd."""
    directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="tq-durability-")))
    ports = free_ports(6, random.Random())
    try:
        members = etcd_members(list(zip(ports[:3], ports[3:], strict=True)), directory)
    except FileNotFoundError:
        return {}
    for member in members.values():
        member.start()
        stack.callback(member.end)
    journal = "etcd://" + ",".join(f"127.0.0.1:{port}" for port in ports[:3])
    addresses = {}
    for mode in APART:
        pair = []
        for sharing in ("off", "auto"):
            secret = ["--internal-secret-file", str(directory / f"secret-{mode}-{sharing}")]
            flags = ["--role", "controller", *secret]
            if mode == "etcd":
                flags += ["--journal", journal, "--cluster", sharing, "--data-dir", str(directory / sharing)]
            address = stack.enter_context(ServiceProcess(*flags)).address
            storage = ["--role", "storage", "--controller", address, "--shared-memory", sharing, *secret]
            stack.enter_context(ServiceProcess(*storage))
            pair.append(address)
        addresses[mode] = (pair[0], pair[1])
    return addresses


def run(options: Options) -> Report:
    """Measure."""
    with ExitStack() as stack:
        addresses = {}
        for mode in MODES:
            pair = []
            for sharing in ("off", "auto"):
                flags = ["--shared-memory", sharing]
                if mode != "memory":
                    directory = stack.enter_context(tempfile.TemporaryDirectory(prefix="tq-durability-"))
                    flags += ["--data-dir", directory, "--durability", mode]
                pair.append(stack.enter_context(ServiceProcess(*flags)).address)
            addresses[mode] = (pair[0], pair[1])
        addresses |= _apart(stack)
        return run_async(_measure(options, addresses))


if __name__ == "__main__":
    sys.exit(main(run))
