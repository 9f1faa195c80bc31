"""Rows of object columns are looked at when their put is whole: the first byte of each, in all ways they come."""

import dataclasses

import numpy as np
import pytest
from engine_driver import PARTITION, begin, put, put_id, read, runs

from tq_service.errors import InvalidArgumentError
from tq_service.storage.engine import StorageEngine
from tq_service.wire import shared_memory
from tq_service.wire.encoding import encode_columns

DATA = {"x": np.arange(5), "text": ["a", "bb", "ccc", "dd", "e"], "other": [{"row": row} for row in range(5)]}


@pytest.fixture
def engine():
    return StorageEngine(max_bytes=None)


def with_row(row, first_byte):
    """Return the columns of DATA with a row of `text` that begins with another byte, or is empty for None."""
    columns = encode_columns(DATA)
    (at,) = (index for index, column in enumerate(columns) if column.spec.name == "text")
    column, rows = columns[at], []
    data, offsets = b"".join(column.chunks), column.row_offsets()
    rows = [data[offsets[index] : offsets[index + 1]] for index in range(5)]
    rows[row] = b"" if first_byte is None else bytes([first_byte]) + rows[row][1:]
    columns[at] = dataclasses.replace(
        column,
        chunks=(memoryview(b"".join(rows)),),
        value_bytes=sum(map(len, rows)),
        extents=np.array([[len(each)] for each in rows], np.int64),
    )
    return columns


async def reserve(engine, columns, *, shared=False):
    return await engine.reserve(
        put_id(1), columns, partition_id=PARTITION, for_existing_rows=False, deadline=None, shared=shared
    )


@pytest.mark.parametrize("shared", [False, True], ids=["frames", "shared memory"])
@pytest.mark.parametrize("row", [0, 2, 4])
@pytest.mark.parametrize(
    ("first_byte", "reason"), [(None, "has no bytes"), (0, "begins with byte 0x00"), (0x7B, "begins with byte 0x7b")]
)
async def test_a_row_that_is_no_object_is_refused_by_its_number(engine, shared, row, first_byte, reason):
    if shared and not shared_memory.is_supported():
        pytest.skip("sealed memfds are there on Linux only")
    columns = with_row(row, first_byte)
    pending = None
    with pytest.raises(InvalidArgumentError, match=f"row {row} of field 'text' {reason}") as caught:
        pending = await reserve(engine, columns, shared=shared)
        if shared:
            await pending.adopt(shared_memory.write_columns(columns))
        for chunk in () if shared else (chunk for column in columns for chunk in column.chunks):
            await pending.write(chunk)
    assert caught.value.metadata["row"] == str(row)
    assert (pending is None) == (first_byte is None)  # what the header says is refused before the bytes come
    if pending is not None:
        with pytest.raises(InvalidArgumentError, match="ended"):
            pending.finish()
        pending.abort()
    assert (engine.stat().used_bytes, engine.stat().put_count) == (0, 0)
    await put(engine, 1, DATA)
    assert read(engine, [1], runs(["text"], (0, 0, 5)))["text"] == DATA["text"]


async def test_bytes_that_are_missing_are_said_first(engine):
    pending, chunks = await begin(engine, 1, DATA)
    await pending.write(chunks[0])
    with pytest.raises(InvalidArgumentError, match="the stream ended"):
        pending.finish()
    pending.abort()
