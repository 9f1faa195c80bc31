"""Rows of objects are looked at as their put comes in: text is UTF-8, msgpack has a byte; in all ways they come."""

import dataclasses
import random
import tracemalloc

import numpy as np
import pytest
from engine_driver import PARTITION, begin, put, put_id, read, runs, share

from tq_service.errors import InvalidArgumentError
from tq_service.schema import Encoding
from tq_service.storage.engine import StorageEngine
from tq_service.storage.index.put import TextCheck
from tq_service.wire import shared_memory
from tq_service.wire.encoding import encode_columns

DATA = {
    "x": np.arange(5),
    "text": ["a", "", "caf\N{LATIN SMALL LETTER E WITH ACUTE}", "dd", "e"],
    "other": [{"row": row} for row in range(5)],
    "bytes": [b"", b"\xff", b"\x80\xc3", b"1", b""],
}


@pytest.fixture
def engine():
    return StorageEngine(max_bytes=None)


def with_row(name, row, data):
    """Return the columns of DATA with other bytes in one row of a field."""
    columns = encode_columns(DATA)
    (at,) = (index for index, column in enumerate(columns) if column.spec.name == name)
    columns[at] = with_rows(columns[at], {row: data})
    return columns


def with_rows(column, others):
    data, offsets = b"".join(column.chunks), column.row_offsets()
    rows = [data[offsets[index] : offsets[index + 1]] for index in range(column.row_count)]
    for row, replaced in others.items():
        rows[row] = replaced
    return dataclasses.replace(
        column,
        chunks=(memoryview(b"".join(rows)),),
        value_bytes=sum(map(len, rows)),
        extents=np.array([[len(each)] for each in rows], np.int64),
    )


async def store(engine, columns, *, shared, piece=1 << 20):
    pending = await engine.reserve(
        put_id(1),
        columns,
        partition_id=PARTITION,
        for_existing_rows=False,
        deadline=None,
        store=engine.shared_store(is_own_user=shared == "regions") if shared else None,
    )
    try:
        if shared:
            await share(pending, columns)
        else:
            data = b"".join(chunk for column in columns for chunk in column.chunks)
            for start in range(0, len(data), piece):
                await pending.write(data[start : start + piece])
        await engine.flush(pending)
        pending.finish()
    except BaseException:
        pending.abort()
        raise


@pytest.mark.parametrize("shared", [None, "regions", "sealed"])
@pytest.mark.parametrize("row", [0, 2, 4])
@pytest.mark.parametrize(
    "case",
    [
        ("text", b"\xff", "has invalid UTF-8 at byte 0"),
        ("text", b"ab\xc3", "has invalid UTF-8 at byte 2"),
        ("text", b"\x80", "has invalid UTF-8 at byte 0"),
        ("text", b"ok\xed\xa0\x80", "has invalid UTF-8 at byte 2"),
        ("other", b"", "has no bytes; expected one msgpack value"),
    ],
)
async def test_a_row_that_is_not_what_its_encoding_says_is_refused_by_its_number(engine, shared, row, case):
    name, data, reason = case
    if shared and not shared_memory.is_supported():
        pytest.skip("sealed memfds are there on Linux only")
    with pytest.raises(InvalidArgumentError, match=f"row {row} of field '{name}' {reason}") as caught:
        await store(engine, with_row(name, row, data), shared=shared)
    assert (caught.value.metadata["row"], caught.value.metadata["field_name"]) == (str(row), name)
    assert (engine.stat().used_bytes, engine.stat().put_count) == (0, 0)
    await put(engine, 1, DATA)
    assert read(engine, [1], runs(["text"], (0, 0, 5)))["text"] == DATA["text"]


@pytest.mark.parametrize("piece", [1, 2, 3, 4, 5, 6, 1000])
@pytest.mark.parametrize(
    ("rows", "wrong"),
    [
        ({2: b"caf\xc3", 3: b"\xa9dd"}, (2, 3)),  # the column is valid UTF-8 as a whole
        ({0: b"\xf0\x9f", 1: b"", 2: b"\x98", 3: b"\x80"}, (0, 0)),
        ({0: b"\xc3\xa9", 3: b"\xa9dd"}, (3, 0)),
        ({0: b"a\xff", 3: b"\xa9dd"}, (0, 1)),
        ({0: b"\xe4\xb8", 3: b"\xff"}, (0, 0)),
    ],
)
async def test_the_first_row_that_is_not_text_is_named(engine, rows, wrong, piece):
    columns = encode_columns(DATA)
    columns[1] = with_rows(columns[1], rows)
    row, byte = wrong
    with pytest.raises(InvalidArgumentError, match=f"row {row} of field 'text' has invalid UTF-8 at byte {byte};"):
        await store(engine, columns, shared=None, piece=piece)


@pytest.mark.parametrize("piece", [1, 2, 3, 5, 1000])
async def test_text_is_looked_at_however_its_bytes_are_cut(engine, piece):
    rows = ["\N{GREEK SMALL LETTER ALPHA}\N{GRINNING FACE}z", "", "\N{CJK UNIFIED IDEOGRAPH-4E2D}" * 3, "plain"]
    good = encode_columns({"x": np.arange(4), "text": rows, "after": np.arange(4)})
    await store(engine, good, shared=None, piece=piece)
    assert read(engine, [1], runs(["text"], (0, 0, 4)))["text"] == rows
    random_source = random.Random(piece)
    for _ in range(20):
        row = random_source.choice([0, 2, 3])
        at = random_source.randrange(len(rows[row].encode()))
        data = bytearray(rows[row].encode())
        data[at] = 0xFF
        bad = [good[0], with_rows(good[1], {row: bytes(data)}), good[2]]
        with pytest.raises(InvalidArgumentError, match=f"row {row} of field 'text'"):
            await store(StorageEngine(max_bytes=None), bad, shared=None, piece=piece)


def test_parts_without_text_are_not_looked_at():
    check = TextCheck("text", np.array([0, 2, 4]), 100)
    check.look_at(b"\xff" * 100, 0)
    assert check.next == 100
    check.look_at(b"ab" * 2 + b"\xff" * 10, 100)
    assert check.next == check.end == 104
    check.look_at(b"\xff" * 10, 114)


def test_a_check_of_text_copies_no_table():
    offsets = np.arange(1 << 18)
    tracemalloc.start()
    try:
        check = TextCheck("text", offsets, 0)
        check.look_at(b"a" * 1000, 0)
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert most < 1 << 17


async def test_encodings_of_several_puts_come_back_row_by_row(engine):
    await put(engine, 1, {"mixed": ["text", "more"]})
    await put(engine, 2, {"mixed": [b"\xff", b""]})
    await put(engine, 3, {"mixed": [None, {"a": 1}]})
    assert read(engine, [1], runs(["mixed"], (0, 0, 2)))["mixed"] == ["text", "more"]
    got = read(engine, [1, 2, 3], runs(["mixed"], (2, 1, 1), (0, 0, 2), (1, 0, 2), (2, 0, 1)))["mixed"]
    assert got == [{"a": 1}, "text", "more", b"\xff", b"", None]


def test_what_a_column_of_objects_is_encoded_as():
    def encoding_of(values):
        (column,) = encode_columns({"x": values})
        return column.spec.encoding

    assert encoding_of(["a", ""]) is Encoding.TEXT
    assert encoding_of([b"a", bytearray(b"b"), memoryview(b"cd")[::2]]) is Encoding.BYTES
    assert encoding_of(["a", None]) is Encoding.MSGPACK
    assert encoding_of(["a", b"b"]) is Encoding.MSGPACK
    assert encoding_of(["a", "\ud800"]) is Encoding.MSGPACK
    assert encoding_of([{"a": 1}]) is Encoding.MSGPACK


async def test_bytes_that_are_missing_are_said_first(engine):
    pending, chunks = await begin(engine, 1, DATA)
    await pending.write(chunks[0])
    with pytest.raises(InvalidArgumentError, match="the stream ended"):
        pending.finish()
    pending.abort()
