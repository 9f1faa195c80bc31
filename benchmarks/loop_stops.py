"""How long does the service keep all others waiting while millions of samples come and go, and its status is read?

The service runs in this process, and so does the watcher of its event loop: a short sleep, again and again. The client
is another process, as its own work must not be measured. A stop is the time that the loop spent elsewhere, by the clock
and by the processor time of its thread, to which other processes do not add. With keys the partition is filled by
writes of 8,192 keyed samples, while all tables and the index of keys grow. The status is read of 200 partitions with 20
tasks, while a claim waits for each of them and for 200 that do not exist. It is also read of a partition with half of
its samples dead-lettered.

Data come and go as well: a put is compacted, texts are read in random order, and missing keys are looked up. Samples
are claimed from a large partition: those whose text is one of a hundred, the last ones of a sealed partition, and those
behind an incomplete group and many consumed ones. The work of an asyncio client on its caller's loop is also measured
in this process, after its service has ended, with a new service in another process.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from multiprocessing import get_context
from typing import Any, Final

import grpc
import numpy as np

from benchmarks.harness import Options, main, median, run_async
from benchmarks.report import Aim, Report
from tq_service.client import AsyncClient, Client
from tq_service.config import load_settings
from tq_service.server.app import running
from tq_service.testing import COMMAND, ListeningProcess
from tq_service.v1 import commit_pb2
from tq_service.v1 import controller_service_pb2 as pb
from tq_service.v1.controller_service_pb2_grpc import ControllerServiceStub

_STEP: Final = 1 << 16
_KEYED_STEP: Final = 1 << 13
_ROWS, _QUICK_ROWS = 1 << 24, 1 << 18
_FEWER_ROWS: Final = 1_000_000
_WRITES_BESIDE: Final = 8
_AIM_MS: Final = 50.0
_STATUS_AIM_MS: Final = 5.0
_STEP_AIM_MS: Final = 20.0
_DATA, _QUICK_DATA = 1_000_000, 1 << 17
_LOOKED_UP, _QUICK_LOOKED_UP = 8_000_000, 1 << 18
_BEHIND, _QUICK_BEHIND = 200_000, 20_000
_TEXTS: Final = 1000
_PARTITIONS, _QUICK_PARTITIONS, _TASKS = 200, 20, 20
_TICK_SECONDS: Final = 0.001
_AFTERWARDS_SECONDS: Final = 0.05
_PARTITION = "train"
_KINDS: Final = {
    "status": "of the status",
    "data": "of data",
    "claim": "of claims",
    "async client": "of an async client",
}


def _insert(address: str, row_count: int, keys_from: int | None = None) -> None:
    write = commit_pb2.SampleWrite(partition_id=_PARTITION, row_count=row_count)
    if keys_from is not None:
        write.keys.extend(f"prompt-{row}-{row % 8}" for row in range(keys_from, keys_from + row_count))
    _call(address, "Insert", pb.InsertRequest(request_id=secrets.token_bytes(16), write=write))


def _clear_samples(address: str, start: int, row_count: int) -> None:
    rows = range(start, start + row_count)
    request = pb.ClearSamplesRequest(request_id=secrets.token_bytes(16), partition_id=_PARTITION, global_indexes=rows)
    _call(address, "ClearSamples", request)


def _clear_partition(address: str) -> None:
    _call(
        address, "ClearPartition", pb.ClearPartitionRequest(request_id=secrets.token_bytes(16), partition_id=_PARTITION)
    )


def _describe(address: str) -> None:
    _call(address, "DescribePartition", pb.DescribePartitionRequest(partition_id=_PARTITION))


def _make_partitions(address: str, count: int) -> None:
    for number in range(count):
        name = f"many@{number}"
        write = commit_pb2.SampleWrite(partition_id=name, row_count=64)
        _call(address, "Insert", pb.InsertRequest(request_id=secrets.token_bytes(16), write=write))
        with grpc.insecure_channel(address) as channel:
            for task in range(_TASKS):
                ControllerServiceStub(channel).GetMeta(_claim(name, f"task-{task}"), timeout=300)


def _claim(partition_id: str, task_name: str, **more: Any) -> pb.GetMetaRequest:
    request = {"partition_id": partition_id, "task_name": task_name, "data_fields": ["x"], "batch_size": 8, **more}
    return pb.GetMetaRequest(request_id=secrets.token_bytes(16), **request)


async def _have_claims_wait(client: AsyncClient, names: Sequence[str]) -> list[asyncio.Task[Any]]:
    asked: dict[str, Any] = {"task_name": "task-0", "data_fields": ["x"], "batch_size": 8, "max_wait": 300.0}
    claims = [asyncio.create_task(client.get_meta(partition_id=name, **asked)) for name in names]
    while len((await client.status(explain=False)).waits) < len(names):
        pass
    return claims


def _get_status(address: str, *, explain: bool) -> None:
    with Client(address, timeout=300.0) as client:
        client.status(explain=explain)


def _lose_leases(address: str, rows: int) -> None:
    with Client(address, timeout=300.0) as client:
        for _ in range(0, rows, _STEP):
            client.put(_PARTITION, {"x": np.zeros(_STEP, np.int8)})
        asked: dict[str, Any] = {"task_name": "task", "data_fields": ["x"], "batch_size": _STEP}
        for _ in range(0, rows // 2, _STEP):
            client.get_meta(partition_id=_PARTITION, **asked, lease=0.001, max_deliveries=1)
        while client.check_consumption(_PARTITION, "task").leased_count:
            time.sleep(0.1)


def _call(address: str, method: str, request: Any) -> None:
    with grpc.insecure_channel(address, options=[("grpc.max_send_message_length", -1)]) as channel:
        getattr(ControllerServiceStub(channel), method)(request, timeout=300)


def _client(address: str) -> Client:
    return Client(address, timeout=300.0)


def _put_rows(address: str, row_count: int, row_bytes: int) -> None:
    with _client(address) as client:
        client.put("data", {"x": np.zeros((row_count, row_bytes), np.uint8)})


def _clear_data(address: str, row_count: int) -> None:
    with _client(address) as client:
        client.clear_samples("data", global_indexes=range(row_count))
        time.sleep(1.0)  # the other rows are still copied after the answer


def _put_texts(address: str, row_count: int) -> None:
    with _client(address) as client:
        client.put("texts", {"t": [f"x{row % _TEXTS}" for row in range(row_count)]})


def _get_texts(address: str, row_count: int) -> None:
    order = np.random.default_rng(0).permutation(row_count)
    with _client(address) as client:
        client.get_data("texts", global_indexes=order.tolist(), data_fields=["t"])


def _clear_named(address: str, name: str) -> None:
    with _client(address) as client:
        client.clear_partition(name)


def _look_up(address: str, key_count: int) -> None:
    request = pb.LookupSamplesRequest(partition_id="texts")
    request.keys.extend(f"key-{number}" for number in range(key_count))
    with contextlib.suppress(grpc.RpcError):  # may be refused because of its size or its keys
        _call(address, "LookupSamples", request)


def _put_tagged(address: str, row_count: int) -> None:
    with _client(address) as client:
        for start in range(0, row_count, _STEP):
            rows = np.arange(start, min(start + _STEP, row_count))
            tags = np.char.add("tag-", (rows % _TEXTS).astype("U4"))
            client.put("tagged", {"x": rows}, custom_meta={"tag": tags})


def _claim_tagged(address: str, condition: tuple[str, str, Any], task_name: str) -> None:
    with _client(address) as client:
        client.get_meta(
            partition_id="tagged",
            task_name=task_name,
            data_fields=["x"],
            batch_size=8,
            where=[condition],
            max_wait=0.0,
        )


def _end_tagged(address: str) -> None:
    with _client(address) as client:
        client.seal_partition("tagged")
    _claim_tagged(address, ("tag", "==", "none"), "end")


def _put_behind_group(address: str, row_count: int) -> None:
    """Put a member of an incomplete group, and samples behind it; all of these but the last ones are consumed."""
    asked: dict[str, Any] = {"partition_id": "groups", "task_name": "task", "data_fields": ["x"]}
    with _client(address) as client:
        client.put("groups", {"x": np.zeros(1)}, groups=["open"], group_size=8)
        for start in range(0, row_count + _STEP, _STEP):
            groups = [f"group-{(start + row) // 8}" for row in range(_STEP)]
            client.put("groups", {"x": np.zeros(_STEP)}, groups=groups, group_size=8)
        for _ in range(0, row_count, _STEP // 8):
            client.get_meta(
                **asked, batch_size=_STEP // 8, sampler="grpo_group_n", sampler_config={"n_samples_per_prompt": 8}
            )


def _claim_behind_group(address: str) -> None:
    asked: dict[str, Any] = {"partition_id": "groups", "task_name": "task", "data_fields": ["x"]}
    with _client(address) as client:
        for _ in range(16):
            client.get_meta(**asked, batch_size=8, sampler="grpo_group_n", sampler_config={"n_samples_per_prompt": 8})


@dataclass(slots=True, eq=False)
class _Watch:
    """The measurements by operation: seconds of all calls, and the longest stops in ms, by clock and by processor."""

    address: str
    clients: ProcessPoolExecutor
    seconds: dict[str, list[float]] = field(default_factory=dict)
    stops: dict[str, list[float]] = field(default_factory=dict)
    busy: dict[str, list[float]] = field(default_factory=dict)

    async def call(self, what: str, *calls: Callable[[str], None]) -> None:
        """Make calls one after another, and record the longest stop during them and shortly after."""
        loop = asyncio.get_running_loop()

        async def all_of_them() -> None:
            for call in calls:
                await loop.run_in_executor(self.clients, call, self.address)

        await self.do(what, all_of_them())

    async def do(self, what: str, work: Awaitable[Any]) -> None:
        """Await something, and record the longest stop during it and shortly after."""
        watching = asyncio.get_running_loop().create_task(self._watch(what))
        began_at = time.perf_counter()
        await work
        self.seconds.setdefault(what, []).append(time.perf_counter() - began_at)
        await asyncio.sleep(_AFTERWARDS_SECONDS)
        watching.cancel()

    async def _watch(self, what: str) -> None:
        stops, busy = self.stops.setdefault(what, []), self.busy.setdefault(what, [])
        stops.append(0.0)
        busy.append(0.0)
        while True:
            began_at, processor_seconds = time.perf_counter(), time.thread_time()
            await asyncio.sleep(_TICK_SECONDS)
            late_seconds = time.perf_counter() - began_at - _TICK_SECONDS
            stops[-1] = max(stops[-1], late_seconds * 1e3)
            busy[-1] = max(busy[-1], (time.thread_time() - processor_seconds) * 1e3)


async def _without_keys(watch: _Watch, rows: int) -> None:
    fewer = min(_FEWER_ROWS, rows // 4)
    await watch.call(f"one insert of {fewer:,}", partial(_insert, row_count=fewer))
    await watch.call("clear_partition of these", _clear_partition)
    await watch.call(f"one insert of {rows:,}", partial(_insert, row_count=rows))
    beside = range(_WRITES_BESIDE)
    await watch.call(f"inserts of {_STEP:,} beside these", *(partial(_insert, row_count=_STEP) for _ in beside))
    await watch.call("describe_partition", _describe)
    clears = [partial(_clear_samples, start=number * _STEP, row_count=_STEP) for number in beside]
    await watch.call(f"clear_samples of {_STEP:,} of them", *clears)
    starts = range(_WRITES_BESIDE * _STEP, rows + _WRITES_BESIDE * _STEP, _STEP)
    clears = [partial(_clear_samples, start=start, row_count=_STEP) for start in starts]
    await watch.call(f"clear_samples of {_STEP:,} until none is left", *clears)
    await watch.call(f"one more insert of {rows:,}", partial(_insert, row_count=rows))
    await watch.call(f"clear_partition of {rows:,}", _clear_partition)


async def _with_keys(watch: _Watch, rows: int) -> None:
    inserts = [partial(_insert, row_count=_KEYED_STEP, keys_from=start) for start in range(0, rows, _KEYED_STEP)]
    await watch.call(f"inserts of {_KEYED_STEP:,} with keys, from none to {rows:,}", *inserts)
    middle = rows // 2  # the first keys are found faster than others
    starts = range(middle, middle + _WRITES_BESIDE * _KEYED_STEP, _KEYED_STEP)
    clears = [partial(_clear_samples, start=start, row_count=_KEYED_STEP) for start in starts]
    await watch.call(f"clear_samples of {_KEYED_STEP:,} of {rows:,} with keys", *clears)
    await watch.call(f"clear_partition of {rows:,} with keys", _clear_partition)


async def _status(watch: _Watch, options: Options) -> None:
    loop, count = asyncio.get_running_loop(), _QUICK_PARTITIONS if options.quick else _PARTITIONS
    rows = _QUICK_ROWS if options.quick else _FEWER_ROWS
    await loop.run_in_executor(watch.clients, _make_partitions, watch.address, count)
    async with AsyncClient(watch.address, timeout=300.0) as client:
        names = [*(f"many@{number}" for number in range(count)), *(f"none@{number}" for number in range(count))]
        claims = await _have_claims_wait(client, names)
        for _ in range(options.repeats):
            for how, explain in (("without", False), ("with", True)):
                what = f"status of {count} partitions of {_TASKS} tasks, {how} reasons"
                await watch.call(what, partial(_get_status, explain=explain))
        for claim in claims:
            claim.cancel()
    await loop.run_in_executor(watch.clients, _lose_leases, watch.address, rows)
    for _ in range(options.repeats):
        await watch.call(f"status of {rows:,} samples, half of them dead-lettered", partial(_get_status, explain=True))


async def _data(watch: _Watch, options: Options) -> None:
    rows = _QUICK_DATA if options.quick else _DATA
    looked_up = _QUICK_LOOKED_UP if options.quick else _LOOKED_UP
    await watch.call(f"data: put of {rows:,} rows of 1 KiB", partial(_put_rows, row_count=rows, row_bytes=1024))
    await watch.call("data: clear_samples of 6 tenths of them", partial(_clear_data, row_count=rows * 6 // 10))
    await watch.call("data: clear_partition of the others", partial(_clear_named, name="data"))
    await watch.call(f"data: put of {rows:,} texts", partial(_put_texts, row_count=rows))
    await watch.call("data: get of these in random order", partial(_get_texts, row_count=rows))
    await watch.call(f"data: lookup of {looked_up:,} keys", partial(_look_up, key_count=looked_up))
    await watch.call("data: clear_partition of the texts", partial(_clear_named, name="texts"))


async def _claims(watch: _Watch, options: Options) -> None:
    loop = asyncio.get_running_loop()
    rows, behind = (_QUICK_DATA, _QUICK_BEHIND) if options.quick else (_DATA, _BEHIND)
    await loop.run_in_executor(watch.clients, partial(_put_tagged, watch.address, row_count=rows))
    hundred = ("tag", "in", [f"tag-{number}" for number in range(100)])
    for task in ("first", "second"):
        what = f"claim: where x in 100 texts, of {rows:,} samples"
        await watch.call(what, partial(_claim_tagged, condition=hundred, task_name=task))
    await watch.call(f"claim: where x is a text, at the end of {rows:,} samples", _end_tagged)
    await loop.run_in_executor(watch.clients, partial(_put_behind_group, watch.address, row_count=behind))
    await watch.call(f"claim: behind an open group and {behind:,} consumed samples", _claim_behind_group)


async def _puts_of_an_async_client(watch: _Watch, options: Options) -> None:
    """Put from this process, whose loop is watched, into a separate service."""
    rows = _QUICK_DATA if options.quick else _DATA
    columns: dict[str, Callable[[], Any]] = {
        f"{rows:,} numbers": lambda: list(range(rows)),
        f"{rows:,} texts": lambda: [f"x{row % _TEXTS}" for row in range(rows)],
        f"{rows // 5:,} dicts": lambda: [{"role": "user", "content": f"hello {row}"} for row in range(rows // 5)],
        "an array that is not contiguous": lambda: np.ones((256, rows // 4)).T,
    }
    with ListeningProcess((*COMMAND, "serve", "--port", "0", "--log-level", "error")) as service:
        async with AsyncClient(service.address, timeout=300.0) as client:
            await client.put("p", {"x": [1]})  # leaves out the connection and imports
            for what, make in columns.items():
                data = {"x": make()}
                await watch.do(f"async client: put of {what}", client.put("p", data))
                await client.clear_partition("p")


async def _measure(options: Options) -> Report:
    rows = _QUICK_ROWS if options.quick else _ROWS
    settings = load_settings({"port": 0, "storage_id": "loop-stops"}).settings
    with ProcessPoolExecutor(1, get_context("spawn")) as clients:
        async with running(settings) as app:
            watch = _Watch(f"127.0.0.1:{app.port}", clients)
            await asyncio.get_running_loop().run_in_executor(clients, time.sleep, 0)  # leaves out its imports
            for _ in range(options.repeats):
                await _without_keys(watch, rows)
            await _with_keys(watch, rows)
            await _status(watch, options)
            await _data(watch, options)
            await _claims(watch, options)
        await _puts_of_an_async_client(watch, options)
    return _report(watch, rows)


def _report(watch: _Watch, rows: int) -> Report:
    busy = {what: median(values) for what, values in watch.busy.items()}
    return Report(
        name="loop_stops",
        question="How long does the service keep all others waiting while millions of samples come and go?",
        columns=["what", "seconds", "longest stop, ms", "of the processor, ms"],
        rows=[[what, median(watch.seconds[what]), median(watch.stops[what]), busy[what]] for what in busy],
        notes=[
            f"up to {rows:,} samples in one partition, without cells; with keys they are inserted once, not repeatedly",
            "data, claims and an async client with up to 1,000,000 rows, once each",
            "a stop is the delay of a sleep of 1 ms on the loop of the service, including time that the system gave to "
            "other processes; the processor time of the loop's thread does not include that",
        ],
        aims=[
            Aim(
                what=f"longest stop {of_which}, ms of the processor",
                measured=max(ms for what, ms in busy.items() if _kind_of(what) == of_which),
                wanted=wanted,
                at_least=False,
            )
            for of_which, wanted in (
                ("without keys", _AIM_MS),
                ("with keys", _AIM_MS),
                ("of the status", _STATUS_AIM_MS),
                ("of data", _STEP_AIM_MS),
                ("of claims", _STEP_AIM_MS),
                ("of an async client", _STEP_AIM_MS),
            )
        ],
        plots=[],
    )


def _kind_of(what: str) -> str:
    for beginning, kind in _KINDS.items():
        if what.startswith(beginning):
            return kind
    return "with keys" if "keys" in what else "without keys"


def run(options: Options) -> Report:
    """Measure."""
    return run_async(_measure(options))


if __name__ == "__main__":
    sys.exit(main(run))
