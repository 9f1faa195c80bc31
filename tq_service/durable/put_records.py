"""The puts of a storage engine as records of the journal, and back."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Final, overload

from tq_service.storage.engine import StorageEngine
from tq_service.storage.kept import KeptPut
from tq_service.v1 import journal_pb2 as pb
from tq_service.wire.collection import no_collection
from tq_service.wire.frames import encode_varint

# Field number and wire type 2, a length and so many bytes: written by hand, since that copies the bytes of a put once.
_PUT_KEPT_TAG: Final = encode_varint(pb.JournalRecord.PUT_KEPT_FIELD_NUMBER << 3 | 2)
Append = Callable[[bytes], None]
AfterDurable = Callable[[Callable[[], None]], None]


class PutRecords:
    """Writes down what becomes of the puts of an engine, and brings them back.

    recover -> start -> kept_records, as often as snapshots are taken

    Args:
        engine: has files, and no puts yet.
    """

    def __init__(self, engine: StorageEngine) -> None:
        self._engine = engine

    def recover(self, records: Iterable[bytes]) -> int:
        """Take over the puts of records, in order; return how many there are."""
        left: dict[bytes, pb.PutKept] = {}
        with no_collection():  # so many new objects, none of them garbage
            for data in records:
                record = pb.JournalRecord.FromString(data)
                if record.HasField("put_kept"):
                    left.pop(record.put_kept.put_id, None)  # in the order in which they were written down
                    left[record.put_kept.put_id] = record.put_kept
                elif record.HasField("put_dropped"):
                    left.pop(record.put_dropped.put_id, None)
            return self._engine.recover(left.values())

    def start(self, append: Append, after_durable: AfterDurable) -> None:
        """Write down what becomes of puts from now on.

        Args:
            append: writes down a record.
            after_durable: calls something once all that was written down before cannot be lost any more.
        """
        self._engine.start_keeping(_Journaled(append, after_durable))

    def kept_records(self) -> Sequence[bytes]:
        """Return a record of each put, as of now; they are encoded as they are read, which any thread may do."""
        return EncodedPuts(self._engine.kept_puts())


class EncodedPuts(Sequence[bytes]):
    """Records of puts, each encoded when it is read."""

    def __init__(self, puts: Sequence[KeptPut]) -> None:
        self._puts = puts

    @overload
    def __getitem__(self, index: int) -> bytes: ...

    @overload
    def __getitem__(self, index: slice) -> EncodedPuts: ...

    def __getitem__(self, index: int | slice) -> bytes | EncodedPuts:
        if isinstance(index, slice):
            return EncodedPuts(self._puts[index])
        return encode_put(self._puts[index])

    def __len__(self) -> int:
        return len(self._puts)


class _Journaled:
    """The engine's way to the journal."""

    def __init__(self, append: Append, after_durable: AfterDurable) -> None:
        self._append = append
        self.after_durable = after_durable

    def keep(self, put: KeptPut) -> None:
        self._append(encode_put(put))

    def drop(self, put_id: bytes) -> None:
        self._append(pb.JournalRecord(put_dropped=pb.PutDropped(put_id=put_id)).SerializeToString())


def encode_put(put: KeptPut) -> bytes:
    """Return the record of a put."""
    parts = put.parts()
    return b"".join((_PUT_KEPT_TAG, encode_varint(sum(map(len, parts))), *parts))
