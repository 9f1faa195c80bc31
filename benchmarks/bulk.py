"""How fast do columns travel into the service and back, compared with raw TCP, a memcpy and TransferQueue?

`--by` chooses the variable: the kind of the column (the default, measured with an asyncio client and TransferQueue
too), its size, the number of client processes, another client's claim rate meanwhile, or the number of storage
services.

Services run in separate processes and share no memory with clients of their host. Each turn clears the partition that
it filled. TransferQueue's client runs in a separate process too, and gets rows of the same shapes. Raw TCP sends the
same number of bytes, and waits for one byte in answer.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch

import tq_service as tq
from benchmarks import bulk_by_claims, bulk_by_clients, tcp_sink
from benchmarks.harness import (
    Options,
    command_line,
    given_options,
    interleave,
    median,
    median_ratio,
    new_runner,
    running,
    show,
)
from benchmarks.peer import Peer, peer
from benchmarks.peer_environment import TRANSFER_QUEUE
from benchmarks.report import Aim, Cell, Plot, Report
from benchmarks.round_trips import (
    GIB,
    JAGGED_BYTES,
    JAGGED_ROW_COUNT,
    KIB,
    MIB,
    PARTITION,
    PutAndGet,
    RoundTrips,
    check_last_row,
    dense,
    jagged,
    jagged_rows,
)
from tq_service.testing import ServiceProcess
from tq_service.wire.encoding import encode_columns

BY = ("column", "size", "clients", "claims", "storages")
_DENSE_BYTES = 256 * MIB
# Long rows, and sequences of 8,192 as in TransferQueue's own performance test.
_LONG_ROW_BYTES, _SEQUENCE_BYTES = MIB, 32 * KIB
_SIZES = (KIB, 16 * KIB, 256 * KIB, MIB, 4 * MIB, 16 * MIB, 64 * MIB, 256 * MIB, GIB)
# Bytes of a turn, as several small tensors: a single one takes too little time to measure.
_TURN_BYTES = 64 * MIB
_MOST_TENSORS_A_TURN = 64
_STORAGE_COUNTS = (1, 2, 4)
_PUT_COUNT, _PUT_BYTES, _ROWS_A_PUT = 16, 4 * MIB, 64  # of a batch on several storage services
_LONGEST_SECONDS = 120.0
_SERVICE, _ASYNC, _TCP, _MEMCPY = "tq.Client", "tq.AsyncClient", "raw TCP", "memcpy"
_AGAIN = ", at once again"
_WANTED_OF_PEER = {"put": 1.7, "get": 3.3}
_WANTED_OF_TCP = 0.3

# The columns


def _columns() -> dict[str, Any]:
    text = "the quick brown fox jumps over the lazy dog; " * 86
    return {
        "dense, 256 MiB in rows of 1 MiB": dense(_DENSE_BYTES, _LONG_ROW_BYTES),
        "dense, 256 MiB in rows of 32 KiB": dense(_DENSE_BYTES, _SEQUENCE_BYTES),
        "jagged, 16 MiB, a nested tensor": jagged(),
        "jagged, 16 MiB, a list of tensors": jagged_rows(),
        "objects, 16 MiB: dicts of text": [
            {"uid": f"u{row}", "messages": [{"role": "user", "content": text}], "turns": row}
            for row in range(JAGGED_ROW_COUNT)
        ],
        "objects, 16 MiB: dicts with a tensor": [
            {"uid": f"u{row}", "image": torch.rand(JAGGED_BYTES // 4 // JAGGED_ROW_COUNT)}
            for row in range(JAGGED_ROW_COUNT)
        ],
    }


async def _async_round_trip(client: tq.AsyncClient, column: Any) -> PutAndGet:
    times = [time.perf_counter()]
    meta = await client.put(PARTITION, {"x": column})
    times.append(time.perf_counter())
    back = await client.get_data(meta)
    times.append(time.perf_counter())
    check_last_row(back["x"], column)
    await client.clear_partition(PARTITION)
    return times[1] - times[0], times[2] - times[1]


def _seconds(action: Callable[[], object], count: int = 1) -> float:
    started = time.perf_counter()
    for _ in range(count):
        action()
    return (time.perf_counter() - started) / count


def _twice(action: Callable[[], Any]) -> tuple[Any, Any]:
    return action(), action()


# Rows of the table


def _rows(what: str, size: int, times: Mapping[str, Sequence[Any]], limit: Sequence[Any], peer_name: str = "") -> Any:
    """Return a row for each way to carry the bytes.

    Args:
        what: label of the data.
        size: its bytes.
        times: seconds of each repeat, of a put and a get or of one copy, keyed by the way.
        limit: the repeats that all others are compared with.
        peer_name: key of a peer in `times`, if there is one to compare with.
    """
    rows: list[list[Cell]] = []
    for how, repeats in times.items():
        cells: list[Cell] = [what, how]
        for column in (0, 1) if isinstance(repeats[0], Sequence) else (0,):
            seconds = _column(repeats, column)
            of_limit = median_ratio(_column(limit, column), seconds)
            of_peer = median_ratio(_column(times[peer_name], column), seconds) if peer_name in times else None
            figures = [median(seconds) * 1e3, size / 1e9 / median(seconds), of_limit, of_peer]
            cells += [None if figure is None or math.isnan(figure) else figure for figure in figures]
        rows.append(cells + [None] * (10 - len(cells)))
    return rows


def _column(repeats: Sequence[Any], column: int) -> list[float]:
    return [each[column] if isinstance(each, Sequence) else each for each in repeats]


def _by_column(options: Options, stack: ExitStack, transfer_queue: Peer) -> Iterator[list[Cell]]:
    """Make two round trips per turn.

    Before the first trip other cases used the machine, and freed memory may have returned to the system (in a virtual
    machine, to its host). The second trip reuses it.
    """
    address, connection = _service(stack)
    client = stack.enter_context(tq.Client(address, timeout=60.0))
    runner, async_client = stack.enter_context(new_runner()), tq.AsyncClient(address, timeout=60.0)
    stack.callback(lambda: runner.run(async_client.aclose()))
    for label, data in _columns().items():
        payload = np.frombuffer(b"".join(encode_columns({"x": data})[0].chunks), np.uint8)
        target = np.zeros_like(payload)
        actions: dict[str, Callable[[], Any]] = {
            _SERVICE: RoundTrips(client, data),
            _ASYNC: lambda data=data: runner.run(_async_round_trip(async_client, data)),
            _TCP: partial(_seconds, partial(tcp_sink.send, connection, payload.data)),
            _MEMCPY: partial(_seconds, partial(np.copyto, target, payload)),
        }
        if transfer_queue.is_there and isinstance(data, torch.Tensor):
            transfer_queue.ask("load", name=label, row_lengths=_row_lengths(data))
            actions[transfer_queue.name] = partial(transfer_queue.ask, "round_trip", name=label)
        cases = {how: partial(_twice, action) for how, action in actions.items()}
        repeats = options.repeats if payload.nbytes >= _DENSE_BYTES else options.repeats * 2
        times = interleave(cases, repeats)
        for trip, suffix in enumerate(("", _AGAIN)):
            of_trip = {how: [repeat[trip] for repeat in repeats] for how, repeats in times.items()}
            yield from _rows(label + suffix, payload.nbytes, of_trip, of_trip[_TCP], transfer_queue.name)


def _row_lengths(data: torch.Tensor) -> list[int]:
    return [int(length) for length in data.offsets().diff()] if data.is_nested else [data.shape[1]] * data.shape[0]


def _by_size(options: Options, stack: ExitStack, _peer: Peer | None) -> Iterator[list[Cell]]:
    address, connection = _service(stack)
    client = stack.enter_context(tq.Client(address, timeout=60.0))
    for size in _SIZES[:4:3] if options.quick else _SIZES:
        data, count = dense(size, MIB), max(1, min(_MOST_TENSORS_A_TURN, _TURN_BYTES // size))
        send = partial(tcp_sink.send, connection, data.numpy().reshape(-1).view(np.uint8).data)
        times = interleave(
            {_SERVICE: RoundTrips(client, data, count), _TCP: partial(_seconds, send, count)}, options.repeats
        )
        yield from _rows(_size_text(size), size, times, times[_TCP])


def _size_text(size: int) -> str:
    unit, name = next((unit, name) for unit, name in ((GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB")) if size >= unit)
    return f"{size // unit} {name}"


def _by_storages(options: Options, stack: ExitStack, _peer: Peer | None) -> Iterator[list[Cell]]:
    """Fill storage services evenly with puts once, and get the samples of all puts in a mixed order."""
    counts = _STORAGE_COUNTS[:2] if options.quick else _STORAGE_COUNTS
    cases = {str(count): _mixed_gets(stack.enter_context(_running_storages(count)), count) for count in counts}
    times = interleave(cases, options.repeats * 3)
    for count, repeats in times.items():
        yield from _rows(f"{count} storage services", _PUT_COUNT * _PUT_BYTES, {_SERVICE: repeats}, times["1"])


@contextmanager
def _running_storages(count: int) -> Iterator[tq.Client]:
    """Yield a client of a controller with storage services."""
    with ExitStack() as stack:
        controller = stack.enter_context(ServiceProcess("--role", "controller"))
        flags = ("--role", "storage", "--controller", controller.address, "--shared-memory", "off")
        for number in range(count):
            stack.enter_context(ServiceProcess(*flags, "--storage-id", f"storage-{number}"))
        client = stack.enter_context(tq.Client(controller.address, timeout=60.0))
        yield client


def _mixed_gets(client: tq.Client, storage_count: int) -> Callable[[], PutAndGet]:
    """Put a batch across all storage services, and return a get of it."""
    rows = torch.rand(_ROWS_A_PUT, _PUT_BYTES // _ROWS_A_PUT // 4)
    order = np.random.default_rng(0).permutation(_PUT_COUNT * _ROWS_A_PUT).tolist()
    until = time.monotonic() + _LONGEST_SECONDS
    while True:  # storage services register soon after their start
        for _ in range(_PUT_COUNT):
            client.put(PARTITION, {"x": rows})
        batch = client.get_meta(
            partition_id=PARTITION, task_name="read", data_fields=["x"], batch_size=len(order)
        ).select_samples(order)
        owners = set() if batch.locations is None else {put.storage.storage_id for put in batch.locations.puts}
        if len(owners) == storage_count:
            break
        if time.monotonic() > until:
            raise RuntimeError(f"the puts are on {len(owners)} storage services, expected {storage_count}")
        client.clear_partition(PARTITION)
        time.sleep(0.5)

    def get() -> PutAndGet:
        started = time.perf_counter()
        back = client.get_data(batch)
        seconds = time.perf_counter() - started
        if not torch.equal(back["x"][0], rows[order[0] % _ROWS_A_PUT]):
            raise RuntimeError("the get returned other values than the put sent")
        return math.nan, seconds

    return get


def _service(stack: ExitStack) -> tuple[str, Any]:
    """Return the address of a service, and a connection to a process that receives bytes."""
    server = stack.enter_context(ServiceProcess("--shared-memory", "off"))
    sink = stack.enter_context(running("benchmarks.tcp_sink"))
    return server.address, stack.enter_context(tcp_sink.connect(sink.address))


# Report

_MEASURED = {"column": _by_column, "size": _by_size, "storages": _by_storages}
_NOTES = {
    "column": (
        "at once again: the second of two round trips, before freed memory returns to the system",
        "raw TCP and memcpy move encoded bytes; puts and gets include encoding and decoding objects",
        "TransferQueue returns dense rows as a nested tensor",
    ),
    "size": (
        "dense float32, in rows of up to 1 MiB, one call at a time",
        "small puts wait for the controller's commit and the answer, small sends over TCP for one byte",
    ),
    "storages": (
        f"{_PUT_COUNT * _PUT_BYTES >> 20} MiB per batch, {_PUT_COUNT} puts of {_ROWS_A_PUT} rows; read in random order",
        "services and client share the cores of one machine: more services can only help while cores are free",
    ),
}


def _aims(rows: Sequence[Sequence[Cell]]) -> Iterator[Aim]:
    """Yield the targets of tensors."""
    for what, how, *cells in rows:
        is_dense, is_nested = str(what).startswith("dense"), str(what).endswith("a nested tensor")
        if not str(how).startswith("tq.") or str(what).endswith(_AGAIN) or not (is_dense or is_nested):
            continue
        for verb, (_, rate, of_tcp, of_peer) in (("put", cells[:4]), ("get", cells[4:])):
            figure = f"{what}, {how}, {verb}"
            if is_dense:
                yield Aim(what=f"{figure}, GB/s", measured=float(rate or 0), wanted=1.0)
            yield Aim(what=f"{figure} / raw TCP", measured=float(of_tcp or 0), wanted=_WANTED_OF_TCP)
            measured = None if of_peer is None else float(of_peer)
            yield Aim(what=f"{figure} / TransferQueue", measured=measured, wanted=_WANTED_OF_PEER[verb])


def measure(options: Options, by: str, counts: Sequence[int] = (), **chosen: Sequence[str]) -> Report:
    """Measure one variable of `BY`; `counts` applies by clients and claims, `chosen` by clients only."""
    if by == "clients":
        return bulk_by_clients.measure(options, counts, **chosen)
    if by == "claims":
        return bulk_by_claims.measure(options, counts)
    with ExitStack() as stack:
        beside = None
        if by == "column":
            beside = stack.enter_context(peer(TRANSFER_QUEUE, "benchmarks.transfer_queue_peer", options))
        rows = list(_MEASURED[by](options, stack, beside))
    of_limit = "of one service" if by == "storages" else "of raw TCP"
    heads = [
        heading for verb in ("put", "get") for heading in (f"{verb}, ms", f"{verb}, GB/s", of_limit, "of TransferQueue")
    ]
    whats = list(dict.fromkeys(str(row[0]) for row in rows if not str(row[0]).endswith(_AGAIN)))
    series = {
        f"{how}, {verb}": [(row[0], float(row[column] or 0)) for row in rows if row[1] == how and row[0] in whats]
        for how in dict.fromkeys(str(row[1]) for row in rows if row[1] != _MEMCPY)
        for verb, column in (("put", 3), ("get", 7))
        if how != _TCP or verb == "put"
    }
    name = f"bulk_by_{by}"
    title = f"Throughput by {by}"
    return Report(
        name=name,
        question=f"How fast do tensors go over the network, into the service and back, by {by}?",
        columns=["what", "how", *heads],
        rows=rows,
        notes=["GB are 10^9 bytes", *_NOTES[by], *(() if beside is None else beside.notes)],
        aims=list(_aims(rows)) if by == "column" else [],
        plots=[Plot(name=name, title=title, x_label="", y_label="GB/s", bars=True, series=series)],
        without=() if beside is None else beside.absent,
    )


def run(options: Options) -> Report:
    """Measure kinds of columns."""
    return measure(options, "column")


def main() -> int:
    """Measure the variable that `--by` chooses."""
    parser = command_line(run)
    parser.add_argument("--by", choices=BY, default="column", help="the variable")
    parser.add_argument(
        "--clients", type=_counts, default=(), help="by clients and claims: numbers of clients, such as 1,4,16"
    )
    parser.add_argument(
        "--data", action="append", choices=tuple(bulk_by_clients.DATA), help="by clients: data to measure"
    )
    parser.add_argument("--how", action="append", choices=bulk_by_clients.WAYS, help="by clients: ways to measure")
    given = parser.parse_args()
    report = measure(given_options(given), given.by, given.clients, data_names=given.data or (), hows=given.how or ())
    show(report, given)
    return 0


def _counts(text: str) -> tuple[int, ...]:
    try:
        counts = tuple(map(int, text.split(",")))
    except ValueError:
        counts = ()
    if not counts or not all(1 <= count <= bulk_by_clients.MOST_CLIENTS for count in counts):
        raise argparse.ArgumentTypeError(
            f"got {text!r}, expected numbers from 1 to {bulk_by_clients.MOST_CLIENTS} with commas, such as 1,4,16"
        )
    return counts


if __name__ == "__main__":
    sys.exit(main())
