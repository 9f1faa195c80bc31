"""What the engine tests share: putting, reading and decoding as the services do it."""

import asyncio

import numpy as np

from tq_service.client.reads import decode_columns
from tq_service.storage.blobs.shared import MemfdBlob
from tq_service.storage.index.put import PutCells
from tq_service.wire import shared_memory
from tq_service.wire.columns import ColumnReceiver, iter_frames
from tq_service.wire.encoding import encode_columns
from tq_service.wire.metadata import CellRuns

PARTITION = "train@0"


def put_id(number):
    return number.to_bytes(16, "big")


def indexes(*values):
    return np.array(values, np.int64)


def reconcile(engine, cells=(), staying=(), *, owner=b""):
    """Say at once which puts of an owner are known."""
    state = engine.begin_reconciliation(owner)
    engine.reconcile(state, cells=cells, staying=staying)
    for _ in engine.finish_reconciliation(state):
        pass
    return state


def expire(engine, owner=b""):
    """Drop the overdue puts of a controller that knows none of them; return how many there were."""
    asked = engine.puts.overdue(owner)
    return engine.on_answer(asked, asked.put_ids)


async def begin(engine, number, data, *, existing=False, deadline=None, owner=b"", partition_id=PARTITION, token=""):
    columns = encode_columns(data)
    pending = await engine.reserve(
        put_id(number),
        columns,
        partition_id=partition_id,
        for_existing_rows=existing,
        deadline=deadline,
        owner=owner,
        token=token,
    )
    return pending, [chunk for column in columns for chunk in column.chunks]


async def begin_shared(engine, number, data, *, deadline=None, is_own_user=True):
    columns = encode_columns(data)
    pending = await engine.reserve(
        put_id(number),
        columns,
        partition_id=PARTITION,
        for_existing_rows=False,
        deadline=deadline,
        store=engine.shared_store(is_own_user=is_own_user),
    )
    return pending, columns


async def share(pending, columns):
    """Give a put its bytes as a client of the host does: in its region, or in sealed memory."""
    blob = pending.require_open().values
    if isinstance(blob, MemfdBlob):
        await pending.map_fd(shared_memory.write_sealed(columns))
    else:
        shared_memory.fill(np.frombuffer(blob.view(), np.uint8), columns)
        await pending.end_filling()


async def put_shared(engine, number, data, *, is_own_user=True):
    pending, columns = await begin_shared(engine, number, data, is_own_user=is_own_user)
    await share(pending, columns)
    pending.finish()
    engine.confirm(put_id(number))


async def put(engine, number, data, *, existing=False, deadline=None, confirm=True, owner=b"", partition_id=PARTITION):
    pending, chunks = await begin(
        engine, number, data, existing=existing, deadline=deadline, owner=owner, partition_id=partition_id
    )
    for parts in iter_frames(chunks, 1 << 16):
        await pending.write(b"".join(parts))
    pending.finish()
    if confirm:
        engine.confirm(put_id(number))


async def compacted(engine):
    """Wait until no put is being compacted, or is to be."""
    while (compaction := engine._compaction) is not None:
        await asyncio.wait([compaction])


def runs(fields, *triples):
    puts, firsts, counts = zip(*triples, strict=True) if triples else ((), (), ())
    return CellRuns(
        field_names=tuple(fields), put_indexes=indexes(*puts), first_rows=indexes(*firsts), row_counts=indexes(*counts)
    )


def receive(reading):
    """Decode what a reading sends, as numpy arrays."""
    receiver = ColumnReceiver(reading.headers)
    for parts in iter_frames(reading.chunks(), 1 << 12):
        receiver.write(memoryview(b"".join(parts)))
    return decode_columns(reading.headers, receiver.finish(), as_torch=False)


def read(engine, puts, *fields):
    with engine.open_read(list(fields), [put_id(number) for number in puts]) as reading:
        return receive(reading)


def cells(number, *rows, fields=()):
    if not rows:
        return PutCells(put_id=put_id(number), field_names=tuple(fields))
    return PutCells(
        put_id=put_id(number),
        field_names=tuple(fields),
        rows=indexes(*rows),
    )
