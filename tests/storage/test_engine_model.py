"""Random puts, frees and reads against a dict of what should be there."""

import asyncio

import numpy as np
import pytest
from engine_driver import cells, compacted, put, put_shared, read, runs
from hypothesis import given
from hypothesis import strategies as st
from property_settings import examples

from tq_service.errors import PutNotFoundError
from tq_service.storage.engine import StorageEngine
from tq_service.wire import shared_memory

FIELDS = ("dense", "jagged", "object", "empty")
STEPS = st.lists(
    st.sampled_from(["put", "free_rows", "free_rows", "free_field", "free_put", "read", "read", "hold"]),
    min_size=10,
    max_size=60,
)


class Model:
    """The engine, and beside it what each live cell holds."""

    def __init__(self):
        self.engine = StorageEngine(max_bytes=None)
        self.cells = {}
        self.held = []
        self.put_count = 0

    async def put(self, rng):
        rows = int(rng.integers(1, 12))
        data = {
            "dense": rng.integers(0, 1 << 40, (rows, 3)),
            "jagged": [rng.random((int(n), 2)) for n in rng.integers(0, 4, rows)],
            "object": [{"n": rng.integers(0, 9, int(n)).tolist()} for n in rng.integers(0, 40, rows)],
            "empty": np.zeros((rows, 0)),
        }
        await (put_shared if rng.random() < 0.4 else put)(self.engine, self.put_count, data)
        for field, values in data.items():
            for row in range(rows):
                self.cells[field, self.put_count, row] = values[row]
        self.put_count += 1

    async def free_rows(self, rng):
        if not self.put_count:
            return
        number = int(rng.integers(self.put_count))
        rows = rng.integers(0, 13, int(rng.integers(1, 12))).tolist()
        fields = [field for field in FIELDS if rng.random() < 0.5] if rng.random() < 0.5 else []
        self.engine.free([cells(number, *rows, fields=fields)])
        for field in fields or FIELDS:
            for row in rows:
                self.cells.pop((field, number, row), None)

    async def free_field(self, rng):
        if not self.put_count:
            return
        number, field = int(rng.integers(self.put_count)), FIELDS[int(rng.integers(len(FIELDS)))]
        self.engine.free([cells(number, fields=[field])])
        self._forget(lambda key: key[0] == field and key[1] == number)

    async def free_put(self, rng):
        if not self.put_count:
            return
        number = int(rng.integers(self.put_count))
        self.engine.free([cells(number)])
        self._forget(lambda key: key[1] == number)

    def _forget(self, matches):
        self.cells = {key: value for key, value in self.cells.items() if not matches(key)}

    def _choose(self, rng):
        field = FIELDS[int(rng.integers(len(FIELDS)))]
        keys = [key for key in self.cells if key[0] == field]
        chosen = [keys[i] for i in rng.integers(0, len(keys), int(rng.integers(1, 30)))] if keys else []
        return field, chosen

    async def read(self, rng):
        field, chosen = self._choose(rng)
        if not chosen:
            return
        back = read(self.engine, range(self.put_count), runs([field], *((number, row, 1) for _, number, row in chosen)))
        self._compare(back[field], chosen)
        gone = [
            (field, number, row)
            for number in range(self.put_count)
            for row in range(3)
            if (field, number, row) not in self.cells
        ]
        for _, number, row in gone[:2]:
            with pytest.raises((PutNotFoundError, ValueError)):
                read(self.engine, range(self.put_count), runs([field], (number, row, 1)))

    async def hold(self, rng):
        field, chosen = self._choose(rng)
        if not chosen:
            return
        names = [number.to_bytes(16, "big") for number in range(self.put_count)]
        reading = self.engine.open_read([runs([field], *((number, row, 1) for _, number, row in chosen))], names)
        self.held.append((reading, b"".join(bytes(chunk) for chunk in reading.chunks())))

    def _compare(self, values, chosen):
        for value, key in zip(values, chosen, strict=True):
            expected = self.cells[key]
            assert value == expected if key[0] == "object" else np.array_equal(value, expected)
            assert key[0] == "object" or value.shape == expected.shape

    async def close(self):
        for reading, expected in self.held:
            assert b"".join(bytes(chunk) for chunk in reading.chunks()) == expected
            reading.close()
        live_puts = {number for _, number, _ in self.cells}
        assert self.engine.stat().put_count == len(live_puts)
        self.engine.free([cells(number) for number in range(self.put_count)])
        await compacted(self.engine)  # a copy that was under way is given up
        assert not self.engine._holed
        return self.engine.stat()


@pytest.fixture(scope="module", autouse=True)
def _small_segments():
    """Memory in several memfds, small as it is."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shared_memory, "_PIECE_BYTES", 4096)
        yield


@examples(60)
@given(STEPS, st.integers(0, 2**32 - 1))
def test_the_engine_holds_what_the_model_holds(steps, seed):
    async def run():
        model, rng = Model(), np.random.default_rng(seed)
        await model.put(rng)
        for name in steps:
            await getattr(model, name)(rng)
        for _ in FIELDS:
            await model.read(rng)
        return await model.close()

    stat = asyncio.run(run())
    assert (stat.used_bytes, stat.put_count, stat.uncommitted_put_count) == (0, 0, 0)
