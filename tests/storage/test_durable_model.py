"""Random puts, frees, flushes and crashes against a dict of what should be there."""

import asyncio
import tempfile
from pathlib import Path

import numpy as np
import pytest
from durable_driver import Directory, put, settled
from engine_driver import cells, put_id, read, reconcile, runs
from hypothesis import given
from hypothesis import strategies as st
from property_settings import examples

from tq_service.storage.blobs import memory, segments
from tq_service.wire import shared_memory

FIELDS = ("dense", "jagged", "object")
STEPS = st.lists(
    st.sampled_from(["put", "put", "put_shared", "free_rows", "free_rows", "free_field", "free_put", "flush", "settle",
                     "snapshot", "crash", "crash", "read"]),
    min_size=5,
    max_size=40,
)  # fmt: skip


class Model:
    """The engine over its directory, and beside it what each live cell holds: now, and after a crash."""

    def __init__(self, path, rng):
        self.directory = Directory(path, put_ttl_seconds=1e6)
        self.engine = self.directory.open()
        self.rng = rng
        self.cells = {}
        self.durable = {}
        self.put_count = 0

    async def put(self, *, shared=False):
        rows = int(self.rng.integers(1, 12))
        scale = int(self.rng.integers(1, 4)) ** 5
        data = {
            "dense": self.rng.integers(0, 1 << 40, (rows, scale)),
            "jagged": [self.rng.random((int(n), 2)) for n in self.rng.integers(0, 4 * scale, rows)],
            "object": [{"n": self.rng.integers(0, 9, int(n)).tolist()} for n in self.rng.integers(0, 40, rows)],
        }
        await put(self.engine, self.put_count, data, shared=shared)
        for field, values in data.items():
            for row in range(rows):
                self.cells[field, self.put_count, row] = values[row]
        self.put_count += 1

    async def put_shared(self):
        await self.put(shared=shared_memory.is_supported())

    async def free_rows(self):
        number = int(self.rng.integers(self.put_count + 1))
        rows = self.rng.integers(0, 13, int(self.rng.integers(1, 12))).tolist()
        fields = [field for field in FIELDS if self.rng.random() < 0.5] if self.rng.random() < 0.5 else []
        self.engine.free([cells(number, *rows, fields=fields)])
        for field in fields or FIELDS:
            for row in rows:
                self.cells.pop((field, number, row), None)

    async def free_field(self):
        number, field = int(self.rng.integers(self.put_count + 1)), FIELDS[int(self.rng.integers(len(FIELDS)))]
        self.engine.free([cells(number, fields=[field])])
        self._forget(lambda key: key[0] == field and key[1] == number)

    async def free_put(self):
        number = int(self.rng.integers(self.put_count + 1))
        self.engine.free([cells(number)])
        self._forget(lambda key: key[1] == number)

    def _forget(self, matches):
        self.cells = {key: value for key, value in self.cells.items() if not matches(key)}

    async def flush(self):
        self.directory.flush()
        self.durable = dict(self.cells)

    async def settle(self):
        self.directory.flush()
        await settled(self.directory)
        self.durable = dict(self.cells)

    async def snapshot(self):
        self.directory.snapshot()
        self.durable = dict(self.cells)

    async def crash(self):
        """What was durable comes back; the controller, whose state is as old, tells which cells of it it knows."""
        self.engine = self.directory.open()
        self.cells = dict(self.durable)
        known = {}
        for field, number, row in self.cells:
            known.setdefault((number, field), []).append(row)
        kept = reconcile(self.engine, [cells(number, *rows, fields=[field]) for (number, field), rows in known.items()])
        assert kept.missing_put_ids == []
        self.engine.free([cells(number) for number in range(self.put_count) if (number, "dense") not in known
                          and (number, "jagged") not in known and (number, "object") not in known])  # fmt: skip
        await self.engine.check([put_id(number) for number in range(self.put_count)])

    async def read(self):
        for field in FIELDS:
            keys = [key for key in self.cells if key[0] == field]
            if keys:
                back = read(
                    self.engine, range(self.put_count), runs([field], *((number, row, 1) for _, number, row in keys))
                )
                for value, key in zip(back[field], keys, strict=True):
                    assert value == self.cells[key] if field == "object" else np.array_equal(value, self.cells[key])

    async def close(self):
        await self.read()
        live = {number for _, number, _ in self.cells}
        assert self.engine.stat().put_count == len(live)
        assert not self.engine.damaged
        self.engine.free([cells(number) for number in range(self.put_count)])
        await settled(self.directory)
        return self.engine.stat()


@pytest.fixture(scope="module", autouse=True)
def _small_segments():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(memory, "SMALL_BYTES", 2048)
        patch.setattr(segments, "SMALL_BYTES", 2048)
        patch.setattr(shared_memory, "_PIECE_BYTES", 4096)
        yield


@examples(30)
@given(STEPS, st.integers(0, 2**32 - 1))
def test_a_crash_takes_nothing_that_was_durable(steps, seed):
    async def run(path):
        model = Model(path, np.random.default_rng(seed))
        for name in steps:
            await getattr(model, name)()
            await asyncio.sleep(0)
        await model.crash()
        return await model.close()

    with tempfile.TemporaryDirectory() as path:
        stat = asyncio.run(run(Path(path)))
    assert (stat.used_bytes, stat.put_count, stat.uncommitted_put_count) == (0, 0, 0)
