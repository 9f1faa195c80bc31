"""Client processes that put, get and push concurrently, for `bulk`: each process has a connection of each kind.

They start together, and their work ends when the last one has finished.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import grpc
import numpy as np
import torch

import tq_service as tq
from benchmarks import tcp_sink
from benchmarks.harness import run_async
from tq_service.v1.controller_service_pb2 import GetMetaRequest
from tq_service.v1.controller_service_pb2_grpc import ControllerServiceStub
from tq_service.wire.connection import Tls

LONGEST_SECONDS = 120.0
CLAIMING_RANKS = 32
_CLAIMED_SAMPLES = 262_144
_CLAIM_BATCH_SIZE = 8
_CLAIMS = "claims"
_FLOAT_BYTES = 4
_JAGGED_BYTES = (2 << 10, 6 << 10)


@dataclass(frozen=True, slots=True)
class Target:
    """A service and its address."""

    address: str
    tls: Tls | None = None


@dataclass(frozen=True, slots=True)
class Data:
    """The column of a put: its bytes, and those of each row; None: rows of 2 to 6 KiB."""

    size_bytes: int
    row_bytes: int | None

    def make(self, seed: int) -> torch.Tensor:
        """Create the column, as float32."""
        random = np.random.default_rng(seed)
        values = torch.from_numpy(random.random(self.size_bytes // _FLOAT_BYTES, np.float32))
        if self.row_bytes is not None:
            return values.view(-1, self.row_bytes // _FLOAT_BYTES)
        low, high = (size // _FLOAT_BYTES for size in _JAGGED_BYTES)
        half = random.integers(low, high, len(values) // (low + high), endpoint=True)
        lengths = random.permutation(np.concatenate([half, low + high - half]))  # their sum is known
        offsets = np.concatenate([[0], np.cumsum(lengths)])
        return torch.nested.nested_tensor_from_jagged(values[: offsets[-1]], torch.from_numpy(offsets))


class Clients:
    """The client processes.

    Args:
        pipes: one pipe to each client.
    """

    def __init__(self, pipes: Sequence[Connection]) -> None:
        self._pipes = pipes

    def begin(self, count: int, action: str, *given: object) -> None:
        """Start an action in the first `count` clients."""
        for pipe in self._pipes[:count]:
            pipe.send((action, *given))

    def results(self, count: int) -> list[Any]:
        """Wait until the first `count` clients have finished, and return their results."""
        results = []
        for pipe in self._pipes[:count]:
            if not pipe.poll(LONGEST_SECONDS):
                raise RuntimeError(f"a client did not finish its work in {LONGEST_SECONDS:g} s")
            results.append(pipe.recv())
        return results

    def seconds(self, count: int, action: str, *given: object) -> float:
        """Return the seconds until the first `count` clients have all finished an action."""
        started = time.perf_counter()
        self.begin(count, action, *given)
        self.results(count)
        return time.perf_counter() - started


@contextmanager
def running_clients(count: int, sink_address: str) -> Iterator[Clients]:
    """Run client processes, and end them with the block."""
    with _processes(_Client, [(number, sink_address) for number in range(count)]) as pipes:
        yield Clients(pipes)


@contextmanager
def _processes(make: Callable[..., Any], arguments: Sequence[tuple[Any, ...]]) -> Iterator[list[Connection]]:
    # A fork server that has imported torch starts processes quickly, without channels that they could inherit.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "tensordict", __name__])
    pipes, processes = [], []
    for given in arguments:
        ours, theirs = context.Pipe()
        processes.append(context.Process(target=_work, args=(theirs, make, *given), daemon=True))
        processes[-1].start()
        theirs.close()
        pipes.append(ours)
    try:
        yield pipes
    finally:
        for pipe in pipes:
            with suppress(BrokenPipeError):  # it ended with an error, printed on stderr
                pipe.send(None)
        for process in processes:
            process.join(LONGEST_SECONDS)


def _work(pipe: Connection, make: Callable[..., Any], *given: object) -> None:
    """Carry out jobs from the pipe until it ends."""
    torch.set_num_threads(1)
    with ExitStack() as stack:
        worker = make(stack, *given)
        while (job := pipe.recv()) is not None:
            action, *arguments = job
            pipe.send(getattr(worker, action)(*arguments))


class _Client:
    """The work of a client process: the methods are the actions of `Clients`."""

    def __init__(self, stack: ExitStack, number: int, sink_address: str) -> None:
        self._stack = stack
        self._number = number
        self._name = f"client-{number}"
        self._connection = stack.enter_context(tcp_sink.connect(sink_address))
        self._clients: dict[Target, tq.Client] = {}
        self._data = torch.empty(0)
        self._metas: list[tq.BatchMeta] = []
        self._last: tuple[Any, np.ndarray[Any, Any] | None] | None = None
        self._memory = torch.empty(0, dtype=torch.uint8)

    def load(self, data: Data) -> None:
        self._data = data.make(self._number)
        self._memory = torch.zeros(data.size_bytes, dtype=torch.uint8)

    def connect(self, target: Target) -> None:
        if target not in self._clients:
            client = tq.Client(target.address, tls=target.tls or False, timeout=LONGEST_SECONDS)
            self._clients[target] = self._stack.enter_context(client)

    def put(self, target: Target, count: int) -> None:
        client = self._clients[target]
        self._metas += [client.put(self._name, {"x": self._data}) for _ in range(count)]

    def get(self, target: Target) -> None:
        for meta in self._metas:
            self._last = self._clients[target].get_data(meta)["x"], None

    def shuffle(self) -> None:
        """Choose a random order for the next gets, outside the timed part."""
        self._order = np.random.default_rng(0).permutation(len(self._metas[0]))
        self._metas = [meta.select_samples(self._order) for meta in self._metas]

    def get_shuffled(self, target: Target) -> None:
        self.get(target)
        if self._last is not None:
            self._last = self._last[0], self._order

    def clear(self, target: Target) -> None:
        """Check the last result, and clear the partition."""
        if self._last is not None:
            _check(*self._last, self._data)
        self._metas, self._last = [], None
        self._clients[target].clear_partition(self._name)

    def push(self, target: Target, seconds: float) -> int:
        """Put, get and clear at full rate; return the bytes moved in and out."""
        client, moved, until = self._clients[target], 0, time.perf_counter() + seconds
        while time.perf_counter() < until:
            meta = client.put(self._name, {"x": self._data})
            client.get_data(meta)
            client.clear_samples(meta)
            moved += 2 * len(self._memory)
        return moved

    def send(self, count: int) -> None:
        for _ in range(count):
            tcp_sink.send(self._connection, self._memory.numpy().data)

    def fetch(self, count: int) -> None:
        for _ in range(count):
            tcp_sink.fetch(self._connection, self._memory.numpy().data)


def _check(back: torch.Tensor, order: np.ndarray[Any, Any] | None, data: torch.Tensor) -> None:
    """Raise unless the last row came back; comparing all rows would disturb the next measurement."""
    row = len(back) - 1 if order is None else int(order[-1])
    if not data.is_nested:
        is_right = torch.equal(back[-1], data[row])
    else:  # taking a row of a nested tensor creates all rows
        ours, theirs = data.offsets(), back.offsets()
        is_right = torch.equal(back.values()[theirs[-2] : theirs[-1]], data.values()[ours[row] : ours[row + 1]])
    if not is_right:
        raise RuntimeError("the get returned other values than the put sent")


class Claims(NamedTuple):
    """Results of claims."""

    latencies: Sequence[float]
    """Seconds of each claim."""
    seconds: float
    """Seconds until the last claim was answered."""


@contextmanager
def running_claimer() -> Iterator[Callable[[str, float], Claims]]:
    """Run a separate process that claims; yield a function that lets it claim for some seconds."""
    with _processes(_Claimer, [()]) as (pipe,):

        def claim(address: str, seconds: float) -> Claims:
            pipe.send(("claim", address, seconds))
            found: Claims = pipe.recv()
            return found

        yield claim


class _Claimer:
    """Ranks in one process, each claiming one batch after another."""

    def __init__(self, stack: ExitStack) -> None:
        self._prepared: set[str] = set()

    def claim(self, address: str, seconds: float) -> Claims:
        if address not in self._prepared:
            with tq.Client(address, timeout=LONGEST_SECONDS) as client:
                client.put(_CLAIMS, {"x": np.arange(_CLAIMED_SAMPLES)})
            self._prepared.add(address)
        return run_async(_claim(address, seconds)) if seconds else Claims([], 0.0)


async def _claim(address: str, seconds: float) -> Claims:
    async with grpc.aio.insecure_channel(address) as channel:
        stub, task, found = ControllerServiceStub(channel), secrets.token_hex(8), list[float]()
        began_at = time.perf_counter()

        async def consume(rank: int) -> None:
            batch_index = 0
            # Each rank makes at least one claim: on a busy machine, all the time may have passed before the first one.
            while (started := time.perf_counter()) < began_at + seconds or not batch_index:
                request = GetMetaRequest(
                    request_id=os.urandom(16),
                    partition_id=_CLAIMS,
                    task_name=task,
                    data_fields=["x"],
                    batch_size=_CLAIM_BATCH_SIZE,
                    dp_rank=rank,
                    dp_size=CLAIMING_RANKS,
                    batch_index=batch_index,
                    max_wait={"seconds": 30},
                )
                answer = await stub.GetMeta(request)
                if len(answer.meta.global_indexes) != _CLAIM_BATCH_SIZE:
                    raise RuntimeError(f"got {len(answer.meta.global_indexes)} samples, expected {_CLAIM_BATCH_SIZE}")
                found.append(time.perf_counter() - started)
                batch_index += 1

        await asyncio.gather(*map(consume, range(CLAIMING_RANKS)))
        return Claims(found, time.perf_counter() - began_at)
