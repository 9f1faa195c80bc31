"""Random puts, frees, failures of the mirror and lost services against a dict of what should be there."""

import asyncio

import numpy as np
import pytest
from engine_driver import cells, put_id, read, reconcile, runs
from hypothesis import given
from hypothesis import strategies as st
from mirror_driver import Nodes, put, turns_until
from property_settings import examples

from tq_service.errors import NotFoundError, UnavailableError
from tq_service.storage.index import put_table
from tq_service.storage.index.put_table import RecoveredPut
from tq_service.storage.mirror import adoption, layout, mirror, writer
from tq_service.wire import shared_memory

FIELDS = ("dense", "jagged", "object")
STEPS = st.lists(
    st.sampled_from(["put", "put", "puts", "put_shared", "free_rows", "free_rows", "free_field", "free_put", "refuse",
                     "lose", "lose", "lose_twice", "fetch", "list", "read", "spill", "spill"]),
    min_size=5,
    max_size=40,
)  # fmt: skip


class Model:
    """The engine with its mirror, and beside it what each live cell holds: all of it outlives the engine."""

    def __init__(self, rng, memory_bytes):
        self.nodes = Nodes(memory_bytes=memory_bytes)
        self.rng = rng
        self.cells = {}
        self.put_count = 0

    async def start(self):
        await self.nodes.start()

    @property
    def engine(self):
        return self.nodes.engine

    async def put(self, *, shared=False):
        rows = int(self.rng.integers(1, 12))
        scale = int(self.rng.integers(1, 4)) ** 5
        data = {
            "dense": self.rng.integers(0, 1 << 40, (rows, scale)),
            "jagged": [self.rng.random((int(n), 2)) for n in self.rng.integers(0, 4 * scale, rows)],
            "object": [{"n": self.rng.integers(0, 9, int(n)).tolist()} for n in self.rng.integers(0, 40, rows)],
        }
        number, self.put_count = self.put_count, self.put_count + 1
        await put(self.engine, number, data, shared=shared)
        for field, values in data.items():
            for row in range(rows):
                self.cells[field, number, row] = values[row]

    async def puts(self):
        await asyncio.gather(*(self.put() for _ in range(5)))

    async def put_shared(self):
        await self.put(shared=shared_memory.is_supported())

    async def refuse(self):
        """The engine refuses while a put comes, and then takes it."""
        self.nodes.pool.refusal = UnavailableError("no")
        putting = asyncio.create_task(self.put())
        await asyncio.sleep(0)
        self.nodes.pool.refusal = None
        await putting

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

    async def lose(self):
        """Another engine takes the puts over; the controller says which cells it knows."""
        await self.nodes.kill()
        await self._take_over()
        known = {}
        for field, number, row in self.cells:
            known.setdefault((number, field), []).append(row)
        kept = reconcile(
            self.engine,
            [
                cells(number, *rows, fields=[field])
                for (number, field), rows in sorted(known.items(), key=lambda item: item[0])
            ],
        )
        assert kept.missing_put_ids == []
        whole = {number for number, _ in known}
        self.engine.free([cells(number) for number in range(self.put_count) if number not in whole])

    async def lose_twice(self):
        """The one that has taken the puts over ends before it has fetched anything."""
        await self.nodes.kill()
        await self._take_over()
        await self.lose()

    async def _take_over(self):
        try:
            await self.nodes.take_over()
        except NotFoundError:  # it ended before it could take a put
            assert not self.cells
            self.nodes.pool.objects.clear()
            await self.nodes.start()

    async def fetch(self):
        """What was taken over is fetched as far as there is memory: here there is, for as long as it takes."""
        its = self.engine._admission
        limit, its._memory_bytes = its._memory_bytes, 1 << 40
        await self.engine.scrub()
        its._memory_bytes = limit

    async def spill(self):
        """What is over the memory there is leaves it, as far as the mirror has it and nothing of it is freed."""
        self.engine.trim()
        entries = {put_id: put for shard in self.engine.puts._shards for put_id, put in shard.items()}
        spilled = {
            put_id: put for put_id, put in entries.items() if isinstance(put, RecoveredPut) and put.values.charge
        }
        stat = self.engine.stat()
        assert (
            stat.mirror.spilled_bytes
            == self.engine._admission.spilled_bytes
            == sum(put.values.charge for put in spilled.values())
        )
        assert stat.used_bytes >= stat.mirror.spilled_bytes
        assert all(self.nodes.mirror.is_unfetched(each) for each in spilled)

    async def list(self):
        await self.nodes.listed()

    async def read(self):
        for field in FIELDS:
            keys = [key for key in self.cells if key[0] == field]
            if keys:
                await self.engine.check([put_id(number) for number in {number for _, number, _ in keys}])
                back = read(
                    self.engine, range(self.put_count), runs([field], *((number, row, 1) for _, number, row in keys))
                )
                for value, key in zip(back[field], keys, strict=True):
                    assert value == self.cells[key] if field == "object" else np.array_equal(value, self.cells[key])

    async def close(self):
        await self.read()
        live = {number for _, number, _ in self.cells}
        await self.fetch()
        assert self.engine.stat().put_count == len(live)
        assert not self.engine.damaged
        self.engine.free([cells(number) for number in range(self.put_count)])
        # what is being written has its memory until it is
        await turns_until(lambda: not self.engine.stat().used_bytes)
        await self.nodes.removed()
        left = self.nodes.put_objects()
        stat = self.engine.stat()
        await self.nodes.kill()
        return left, stat


@pytest.fixture(scope="module", autouse=True)
def _small():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mirror, "SMALL_PUT_BYTES", 4096)
        patch.setattr(mirror, "_GATHER_SECONDS", 0.0)
        patch.setattr(mirror, "_FIRST_PAUSE_SECONDS", 0.0)
        patch.setattr(put_table, "_LEAST_PAUSE_SECONDS", 0.0)
        patch.setattr(shared_memory, "_PIECE_BYTES", 4096)
        patch.setattr(adoption, "HEAD_BYTES", 16)
        patch.setattr(adoption, "_SECONDS_BACK", 600)
        for module in (adoption, writer):
            patch.setattr(module, "WINDOW", 64)
        patch.setattr(put_table, "_KEPT_SECONDS", 0.0)
        for module in (adoption, layout, mirror):
            patch.setattr(module, "LARGEST_OBJECT_BYTES", 3000)
        patch.setattr(layout.cut, "__defaults__", (3000,))
        yield


@examples(30)
@given(STEPS, st.integers(0, 2**32 - 1), st.sampled_from([None, 1, 5000]))
def test_a_lost_service_takes_nothing_that_was_acknowledged(steps, seed, memory_bytes):
    async def run():
        model = Model(np.random.default_rng(seed), memory_bytes)
        await model.start()
        for name in steps:
            await getattr(model, name)()
            await asyncio.sleep(0)
        await model.lose()
        return await model.close()

    left, stat = asyncio.run(run())
    assert left == []
    assert (stat.used_bytes, stat.put_count, stat.uncommitted_put_count) == (0, 0, 0)
    assert (stat.mirror.unmirrored_bytes, stat.mirror.short_put_count, stat.mirror.unfetched_put_count) == (0, 0, 0)
