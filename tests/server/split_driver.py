"""A controller and a storage service in one event loop, whose calls to each other get lost or late as a test says."""

import asyncio
import contextlib
import os
from collections import deque
from types import SimpleNamespace

import grpc
import numpy as np

from tq_service.config import ServeSettings
from tq_service.errors import PutNotFoundError
from tq_service.internal.v1 import storage_control_pb2
from tq_service.samplers import PlanRunner
from tq_service.server import heartbeat
from tq_service.server.controller_servicer import ControllerServicer
from tq_service.server.receipts import ReceiptKeys
from tq_service.server.rpc.inbox import WaitingCalls
from tq_service.server.storage_servicer import StorageServicer, endpoint_of
from tq_service.server.storages import StorageRegistry
from tq_service.serving.catalog import Catalog
from tq_service.state.cells import live_cells
from tq_service.storage.engine import StorageEngine
from tq_service.v1 import commit_pb2, metadata_pb2
from tq_service.v1 import controller_service_pb2 as pb
from tq_service.v1 import storage_service_pb2 as pb_storage
from tq_service.wire.columns import encode_header
from tq_service.wire.connection import Credentials
from tq_service.wire.encoding import encode_columns
from tq_service.wire.metadata import CellRuns

TTL_SECONDS = 10.0
_PATIENCE_SECONDS = 60.0
_NO_CREDENTIALS = Credentials(None, None, None)


def lost():
    """Return what a call raises whose request or answer does not arrive."""
    return grpc.aio.AioRpcError(grpc.StatusCode.UNAVAILABLE, grpc.aio.Metadata(), grpc.aio.Metadata())


def _seen(task):
    """Take note of the error of a call whose caller may have gone."""
    if not task.cancelled():
        task.exception()


class Fault:
    """What becomes of one call: its request, then its answer, each wait until they are let go, or get lost."""

    def __init__(self, *, hold_request=False, hold_answer=False, lose_request=False, lose_answer=False, error=None):
        self.request, self.answer = asyncio.Event(), asyncio.Event()
        self.is_made = False
        self.loses = (lose_request, lose_answer)
        self.error = error or lost()
        if not hold_request:
            self.request.set()
        if not hold_answer:
            self.answer.set()

    async def call(self, method, request):
        """Call the other service; as a network does, also where the caller has gone meanwhile."""
        answering = asyncio.ensure_future(self._answer(method, request))
        answering.add_done_callback(_seen)
        return await asyncio.shield(answering)

    async def _answer(self, method, request):
        await self.request.wait()
        if self.loses[0]:
            raise self.error
        answer = await method(request, None)
        self.is_made = True
        await self.answer.wait()
        if self.loses[1]:
            raise self.error
        return answer


class Stream:
    """A call of ReconcilePuts: what is written comes one after the other; one that is cancelled just ends there."""

    def __init__(self, method, fault):
        self.written = []
        self._parts = asyncio.Queue()
        self._fault = fault
        self._has_begun = asyncio.Event()
        self._answering = asyncio.ensure_future(fault.call(method, self._received()))
        self._answering.add_done_callback(lambda _: self._has_begun.set())
        self._answering.add_done_callback(_seen)
        self.is_done = False

    async def _received(self):
        while (part := await self._parts.get()) is not None:
            yield part

    async def send_initial_metadata(self, _):
        self._has_begun.set()

    async def initial_metadata(self):
        await self._has_begun.wait()

    async def write(self, part):
        if self._answering.done():
            raise asyncio.InvalidStateError
        self.written.append(part)
        await asyncio.sleep(0)
        self._parts.put_nowait(storage_control_pb2.ReconcilePutsRequest.FromString(part.SerializeToString()))

    async def done_writing(self):
        self._parts.put_nowait(None)

    def cancel(self):
        self._parts.put_nowait(None)

    def __await__(self):
        return self._await().__await__()

    async def _await(self):
        answer = await self._answering
        self.is_done = True
        return answer


class Link:
    """The stub of a service: each method takes its next fault, and works without one."""

    def __init__(self, servicer):
        self._servicer = servicer
        self.faults = {}
        self.calls = []
        self.streams = []

    def add(self, method, **fault):
        """Have the next call of a method that has none yet go so."""
        added = Fault(**fault)
        self.faults.setdefault(method, deque()).append(added)
        return added

    def ReconcilePuts(self, **_):  # noqa: N802  (the name of the rpc)
        self.calls.append("ReconcilePuts")
        waiting = self.faults.get("ReconcilePuts")
        fault = waiting.popleft() if waiting else Fault()
        stream = Stream(lambda parts, _: self._servicer.ReconcilePuts(parts, stream), fault)
        self.streams.append(stream)
        return stream

    def __getattr__(self, name):
        async def call(request, **_):
            self.calls.append(name)
            waiting = self.faults.get(name)
            fault = waiting.popleft() if waiting else Fault()
            return await fault.call(getattr(self._servicer, name), request)

        return call


class Split:
    """The two services; `restart_controller` begins another one that knows nothing."""

    def __init__(self, monkeypatch, reconcile_seconds):
        self.now = 1000.0
        self.engine = StorageEngine(max_bytes=None, storage_id="s", put_ttl_seconds=TTL_SECONDS, clock=lambda: self.now)
        self.keys = ReceiptKeys()
        self.storage = StorageServicer(self.engine, endpoint_of(self.engine, ""), keys=self.keys)
        self.link = Link(self.storage)
        self.to_controller = Link(None)
        monkeypatch.setattr(heartbeat, "Peer", lambda *_: self._peer(self.to_controller))
        monkeypatch.setattr(heartbeat, "_RETRY_SECONDS", 0.0)
        monkeypatch.setattr("tq_service.server.remote_storage.Peer", lambda *_: self._peer(self.link))
        monkeypatch.setattr("tq_service.server.remote_storage._FIRST_RETRY_SECONDS", 0.0)
        monkeypatch.setattr("tq_service.server.remote_storage._RECONCILE_SECONDS", reconcile_seconds)
        monkeypatch.setattr("tq_service.server.remote_storage._CONFIRM_SECONDS", 0.0)
        self.gates = {}
        self.is_stable = True
        self.directories = []
        self._closing = []
        self.restart_controller()
        self._announcing = asyncio.ensure_future(
            heartbeat.register_storage(
                self.engine, self.keys, endpoint_of(self.engine, "localhost:1"), "localhost:2", _NO_CREDENTIALS
            )
        )

    @staticmethod
    def _peer(stub):
        async def aclose():
            pass

        return SimpleNamespace(stub=stub, metadata=lambda: None, follow_files=lambda: None, aclose=aclose)

    def restart_controller(self):
        """Begin a controller, with nothing from the one before but calls that are still on their way."""
        if self.directories:
            self._closing.append(asyncio.ensure_future(self.directories[-1].close()))
        self._first_stream = len(self.link.streams)
        self.catalog = Catalog(None)
        # Heartbeats come in every turn of the loop.
        self.directory = StorageRegistry(
            None,
            0.0,
            _NO_CREDENTIALS,
            snapshot_cells=self.catalog.snapshot_cells,
            controller_id=b"c" * 16 if self.is_stable else None,
        )
        self.directories.append(self.directory)
        self.catalog.on_freed = self.directory.puts.free
        self.controller = ControllerServicer(
            ServeSettings(max_wait_cap_seconds=1.0), self.catalog, PlanRunner(), self.directory, WaitingCalls()
        )
        self.commits = self.controller.commits
        self._admitted = self.commits.admitted
        self.commits.admitted = self._admitted_later
        self.to_controller._servicer = self.controller

    @contextlib.asynccontextmanager
    async def _admitted_later(self, request, *args):
        admitted = self._admitted  # of the controller that got the call
        if (gate := self.gates.get(request.request_id)) is not None:
            await gate.wait()
        async with admitted(request, *args) as names:
            yield names

    def hold(self, request):
        """Have the commits of a request wait, as for capacity, until the event is set that this returns."""
        self.gates[request.request_id] = asyncio.Event()
        return self.gates[request.request_id]

    async def close(self):
        """End what runs."""
        self._announcing.cancel()
        await asyncio.wait([self._announcing])
        await asyncio.gather(self.directory.close(), *self._closing)

    async def registered(self):
        """Wait until the controller knows the storage service, and that it what is known."""
        await self.until(lambda: self.directory.count == 1)
        await self.heartbeats()

    async def store(self, put_id=None, *, partition_id="p", rows=2):
        """Put a column; return the commit that is to make it visible."""
        put_id = put_id or os.urandom(16)
        columns = encode_columns({"x": np.arange(rows)})
        owner = self.directory.controller_id
        pending = await self.engine.reserve(
            put_id, columns, partition_id=partition_id, for_existing_rows=False, deadline=None, owner=owner
        )
        if pending is not None:
            await pending.write(np.arange(rows).tobytes())
            pending.finish()
        endpoint = metadata_pb2.StorageEndpoint(storage_id="s", boot_id=self.engine.boot_id)
        header = pb_storage.PutHeader(put_id=put_id, partition_id=partition_id, controller_id=owner)
        receipt = self.storage._receipt(header)
        return commit_pb2.CommitRequest(
            request_id=os.urandom(16),
            write=commit_pb2.SampleWrite(partition_id=partition_id, row_count=rows),
            placement=commit_pb2.PutPlacement(storage=endpoint, put_id=put_id, receipt=receipt),
            columns=[encode_header(column) for column in columns],
        )

    def commit(self, request):
        """Start a call of Commit."""
        return asyncio.ensure_future(self.commits.commit(request, None))

    async def clear(self, partition_id="p"):
        """Clear a partition."""
        request = pb.ClearPartitionRequest(request_id=os.urandom(16), partition_id=partition_id)
        await self.controller.ClearPartition(request, None)

    async def clear_some(self, rng):
        """Clear one sample of each partition."""
        for name in list(self.catalog.names()):
            indexes = self.catalog.get(name).table.index.data[: self.catalog.get(name).table.count]
            request = pb.ClearSamplesRequest(request_id=os.urandom(16), partition_id=name)
            request.global_indexes.append(int(rng.choice(indexes.tolist() or [0])))
            await self.controller.ClearSamples(request, None)

    async def turns(self, count):
        """Let others run."""
        for _ in range(count):
            await asyncio.sleep(0)

    async def until(self, is_so):
        """Let others run until something is so, threads included."""
        async with asyncio.timeout(_PATIENCE_SECONDS):
            while not is_so():  # noqa: ASYNC110  (what is awaited has no event)
                await asyncio.sleep(0)

    def begin_reconciling(self):
        """Have the storage service register as one that has restarted: it is told which puts are known."""
        self.engine.run_id = os.urandom(16)

    async def reconciled(self):
        """Have it said again which puts are known; return the answer."""
        count = len(self.link.streams)
        self.begin_reconciling()
        await self.until(lambda: len(self.link.streams) > count and self.link.streams[-1].is_done)
        return await self.link.streams[-1]

    async def heartbeats(self, count=3):
        """Wait until the storage service has been heard of so often again by a controller that it knows."""
        await self.until(lambda: any(stream.is_done for stream in self.link.streams[self._first_stream :]))
        heard = self.to_controller.calls.count("RegisterStorage")
        await self.until(lambda: self.to_controller.calls.count("RegisterStorage") >= heard + count)

    async def settled(self):
        """Let the time pass after which nothing may be left that no sample needs; return how many puts there are."""
        for _ in range(3):
            await self.heartbeats()
            await self.turns(50)
            self.now += TTL_SECONDS + 1
        await self.heartbeats()
        return self.engine.stat().put_count

    def live(self):
        """Return the cells that samples have."""
        return [cells for each in self.catalog.snapshot_cells() for cells in live_cells(each)]

    def lost_puts(self):
        """Return the puts that samples need and the storage service does not have, all cells they need of them."""
        return [cells.put for cells in self.live() if not self._has(cells)]

    def _has(self, cells):
        put = self.engine.puts.get(cells.put.put_id)
        if put is None:
            return False
        rows = np.arange(put.row_count) if cells.rows is None else np.sort(cells.rows)
        run = CellRuns(
            field_names=("x",), put_indexes=np.zeros_like(rows), first_rows=rows, row_counts=np.ones_like(rows)
        )
        try:
            with self.engine.open_read([run], [cells.put.put_id]) as reading:
                got = np.frombuffer(b"".join(reading.chunks()), np.int64)
        except PutNotFoundError:
            return False
        return got.tolist() == rows.tolist()


@contextlib.asynccontextmanager
async def split_service(monkeypatch, reconcile_seconds=3600.0):
    """Run the two for the time of a `with`."""
    split = Split(monkeypatch, reconcile_seconds)
    try:
        await split.registered()
        yield split
    finally:
        await split.close()
