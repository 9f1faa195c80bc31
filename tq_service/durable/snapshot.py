"""Snapshots: the state of a service at one moment in one file, from which it is read whole or not at all."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from google.protobuf.message import DecodeError

from tq_service.domain.aging_log import Entry, FrozenLog
from tq_service.domain.frozen import FrozenPartition
from tq_service.durable.record_file import RecordWriter
from tq_service.durable.snapshot_partitions import decode_partition, encode_partition
from tq_service.durable.snapshot_reader import SnapshotReader
from tq_service.durable.snapshot_tasks import decode_answers, encode_answers
from tq_service.errors import TqError
from tq_service.v1 import controller_service_pb2
from tq_service.v1 import snapshot_pb2 as pb

FORMAT_VERSION: Final = 1
_PUT_BYTES_A_RECORD: Final = 1 << 18


@dataclass(frozen=True, slots=True, kw_only=True)
class FrozenService:
    """All that a service has to know to go on where it was.

    Attributes:
        partitions: of the controller.
        answers: of the controller, for retries; each packed as (type of the message, bytes).
        puts: of the storage engine, a record of each as the engine gave it.
    """

    partitions: Sequence[FrozenPartition] = ()
    answers: FrozenLog = field(default_factory=FrozenLog)
    puts: Iterable[bytes] = ()


def write_snapshot(path: Path, frozen: FrozenService) -> None:
    """Write a snapshot; its file is there only once it is whole and on the disk. Runs in a thread beside the loop.

    Raises:
        OSError: it cannot be written.
    """
    try:
        with RecordWriter(path) as writer:
            write_header(writer, is_checkpoint=False)
            write_state(writer, frozen)
    except OSError:
        path.unlink(missing_ok=True)  # who is told that it failed goes on without it, and a start must do the same
        raise


def read_snapshot(path: Path) -> FrozenService:
    """Return what a snapshot holds, for the domain to thaw once.

    Raises:
        SnapshotDamagedError: the file does not hold what was written, or is of a later version.
        OSError: it cannot be read.
    """
    with reading(path) as reader:
        read_header(reader, is_checkpoint=False)
        return read_state(reader)


# What snapshots and checkpoints have in common


def write_header(writer: RecordWriter, *, is_checkpoint: bool) -> None:
    """Begin a file."""
    header = pb.SnapshotHeader(format_version=FORMAT_VERSION, is_checkpoint=is_checkpoint)
    writer.write(pb.SnapshotRecord(header=header).SerializeToString())


def write_state(writer: RecordWriter, frozen: FrozenService) -> None:
    """Write the state, and end the file."""
    for record in _records(frozen):
        writer.write(record.SerializeToString())
    writer.write(pb.SnapshotRecord(end=pb.SnapshotEnd(record_count=writer.count)).SerializeToString())


@contextlib.contextmanager
def reading(path: Path) -> Iterator[SnapshotReader]:
    """Read a file from its beginning; whatever is wrong with it becomes SnapshotDamagedError."""
    reader = SnapshotReader(path)
    try:
        with _collecting_later():
            yield reader
    except (DecodeError, ValueError, LookupError, AttributeError, TypeError, OverflowError, MemoryError) as error:
        if isinstance(error, TqError):
            raise
        raise reader.damaged(f"{type(error).__name__}: {error}") from error


def read_header(reader: SnapshotReader, *, is_checkpoint: bool) -> None:
    """Read how a file begins."""
    header = reader.take("header")
    if header.format_version != FORMAT_VERSION:
        raise ValueError(f"its format has version {header.format_version}, this service reads {FORMAT_VERSION}")
    if header.is_checkpoint != is_checkpoint:
        kinds = ("the snapshot of a data folder", "a checkpoint")
        raise ValueError(f"it is {kinds[header.is_checkpoint]}, expected {kinds[is_checkpoint]}")


def read_state(reader: SnapshotReader) -> FrozenService:
    """Read the state, to the end of the file."""
    partitions: list[FrozenPartition] = []
    answers: list[Sequence[Entry[Any]]] = []
    puts: list[bytes] = []
    while (kind := reader.kind) != "end":
        match kind:
            case "partition":
                partitions.append(decode_partition(reader))
            case "answers":
                answers.append(decode_answers(reader.take("answers"), _type_of))
            case "puts":
                puts.extend(reader.take("puts").records)
            case _:
                raise reader.damaged(f"{kind or 'the end of the file'} is out of place")
    expected = reader.count
    if reader.take("end").record_count != expected or reader.kind is not None:
        raise reader.damaged("its end is not where it should be")
    return FrozenService(partitions=partitions, answers=FrozenLog(blocks=answers), puts=puts)


@contextlib.contextmanager
def _collecting_later() -> Iterator[None]:
    """Leave out the garbage collector, which would look at a million new objects again and again, and find nothing."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _records(frozen: FrozenService) -> Iterator[pb.SnapshotRecord]:
    for partition in frozen.partitions:
        yield from encode_partition(partition)
    yield from encode_answers(frozen.answers)
    yield from _encode_puts(frozen.puts)


def _encode_puts(puts: Iterable[bytes]) -> Iterator[pb.SnapshotRecord]:
    some: list[bytes] = []
    size = 0
    for put in puts:
        some.append(put)
        size += len(put)
        if size >= _PUT_BYTES_A_RECORD:
            yield pb.SnapshotRecord(puts=pb.SnapshotPuts(records=some))
            some, size = [], 0
    if some:
        yield pb.SnapshotRecord(puts=pb.SnapshotPuts(records=some))


def _type_of(name: str) -> Any:
    return getattr(controller_service_pb2, name)
