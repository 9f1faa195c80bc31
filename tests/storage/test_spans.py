"""Reads of many puts at once: of one row and of many, of one spec and of several, whole, freed and compacted."""

import random

import numpy as np
import pytest
from engine_driver import cells, put, put_id, read, runs

from tq_service.errors import InvalidArgumentError, PutNotFoundError
from tq_service.storage.engine import StorageEngine

ROW_COUNTS = (1, 1, 1, 2, 3, 63, 64, 65, 200)  # tables of up to 64 rows are joined


def columns_of(rng, row_count):
    """Columns of all layouts; the dense rows of one put may be of another size than those of the next."""
    lengths = rng.integers(0, 4, row_count)
    return {
        "scalar": rng.integers(0, 1 << 60, row_count),
        "rows": rng.random((row_count, 3)),
        "jagged": [rng.integers(0, 1 << 60, length) for length in lengths],
        "two": [rng.random((length, 2, length + 1)) for length in lengths],
        "object": [{"n": int(length), "text": "x" * int(length)} for length in lengths],
        "mixed": rng.integers(0, 9, (row_count, int(rng.integers(1, 4)))),
    }


def equal(got, expected):
    return np.array_equal(got, expected) if isinstance(expected, np.ndarray) else got == expected


@pytest.mark.parametrize("seed", range(6))
async def test_random_runs_of_many_puts(seed):
    rng, random_ = np.random.default_rng(seed), random.Random(seed)
    engine = StorageEngine(max_bytes=None)
    data, live = {}, {}
    for number in range(40):
        row_count = random_.choice(ROW_COUNTS)
        data[number] = columns_of(rng, row_count)
        live[number] = list(range(row_count))
        await put(engine, number, data[number])
        if row_count > 2 and number % 3 == 0:  # some of them freed, most of them in the last case, which compacts
            gone = sorted(random_.sample(live[number], random_.choice([1, row_count // 2, row_count - 1])))
            engine.free([cells(number, *gone)])
            live[number] = [row for row in live[number] if row not in set(gone)]
    numbers = list(data)
    random_.shuffle(numbers)
    triples = []
    for _ in range(200):
        number = random_.randrange(len(numbers))
        first = random_.choice(live[numbers[number]])
        most = next(n for n in range(1, 300) if first + n not in live[numbers[number]])
        triples.append((number, first, random_.randint(1, most)))
    back = read(engine, numbers, runs(data[0], *triples))
    wanted = [(numbers[number], row) for number, first, count in triples for row in range(first, first + count)]
    for name, got in back.items():
        assert len(got) == len(wanted)
        assert all(equal(value, data[number][name][row]) for value, (number, row) in zip(got, wanted, strict=True)), (
            name
        )


async def test_fields_with_runs_of_their_own_and_puts_in_common():
    engine = StorageEngine(max_bytes=None)
    for number in range(5):
        await put(engine, number, {"a": [np.arange(number)], "b": np.array([number])})
    some = [(number, 0, 1) for number in (4, 2, 0)]
    others = [(number, 0, 1) for number in (1, 2, 3)]
    back = read(engine, range(5), runs(["a"], *some), runs(["b"], *others))
    assert [len(row) for row in back["a"]] == [4, 2, 0]
    assert back["b"].tolist() == [1, 2, 3]


async def test_what_is_wrong_in_one_of_many_puts_is_named():
    engine = StorageEngine(max_bytes=None)
    for number in range(20):
        await put(engine, number, {"x": np.arange(3), "y": [np.arange(2)] * 3})
    engine.free([cells(7, 0, 2, fields=["y"]), cells(9, 1, fields=["y"])])
    whole = [(number, 0, 3) for number in range(20)]
    assert read(engine, range(20), runs(["x"], *whole))["x"].tolist() == [0, 1, 2] * 20
    with pytest.raises(PutNotFoundError, match=rf"field 'y' of put {put_id(7).hex()}: rows within 0-2 were"):
        read(engine, range(20), runs(["x", "y"], *whole))
    single = [(number, row, 1) for row in (2, 1, 0) for number in range(20)]
    with pytest.raises(PutNotFoundError, match=rf"put {put_id(7).hex()}: rows within 2, 0 were"):
        read(engine, range(20), runs(["y"], *single))
    with pytest.raises(InvalidArgumentError, match=rf"rows 1 to 3 are outside put {put_id(5).hex()}, which has 3"):
        read(engine, range(20), runs(["x"], (4, 0, 3), (5, 1, 3)))
