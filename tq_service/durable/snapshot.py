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
    with RecordWriter(path) as writer:
        for record in _records(frozen):
            writer.write(record.SerializeToString())
        writer.write(pb.SnapshotRecord(end=pb.SnapshotEnd(record_count=writer.count)).SerializeToString())


def read_snapshot(path: Path) -> FrozenService:
    """Return what a snapshot holds, for the domain to thaw once.

    Raises:
        SnapshotDamagedError: the file does not hold what was written, or is of a later version.
        OSError: it cannot be read.
    """
    reader = SnapshotReader(path)
    try:
        with _collecting_later():
            return _read(reader)
    except (DecodeError, ValueError, LookupError, AttributeError, TypeError) as error:
        if isinstance(error, TqError):
            raise
        raise reader.damaged(f"{type(error).__name__}: {error}") from error


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
    yield pb.SnapshotRecord(header=pb.SnapshotHeader(format_version=FORMAT_VERSION))
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


def _read(reader: SnapshotReader) -> FrozenService:
    version = reader.take("header").format_version
    if version != FORMAT_VERSION:
        raise ValueError(f"its format has version {version}, this service reads version {FORMAT_VERSION}")
    partitions: list[FrozenPartition] = []
    answers: list[Sequence[Entry[Any]]] = []
    puts: list[bytes] = []
    while reader.kind != "end":
        match reader.kind:
            case "partition":
                partitions.append(decode_partition(reader))
            case "answers":
                answers.append(
                    decode_answers(reader.take("answers"), lambda name: getattr(controller_service_pb2, name))
                )
            case "puts":
                puts.extend(reader.take("puts").records)
            case kind:
                raise ValueError(f"a record of kind {kind!r} is out of place")
    expected = reader.count
    if reader.take("end").record_count != expected or reader.kind is not None:
        raise ValueError("its end is not where it should be")
    return FrozenService(partitions=partitions, answers=FrozenLog(blocks=answers), puts=puts)
