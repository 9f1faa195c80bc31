"""Records of puts are written by hand; the protobuf library reads them as it would its own."""

import pytest

from tq_service.durable.keeper import encode_put
from tq_service.storage.kept import KeptPut
from tq_service.v1 import journal_pb2 as pb


@pytest.mark.parametrize("data", [None, b"", b"x", bytes(range(256)) * 300])
def test_a_record_reads_as_the_library_would_have_written_it(data):
    message = pb.PutKept(put_id=b"p" * 16, partition_id="train", row_count=3, segment=0 if data else 7, checksum=2**63)
    record = pb.JournalRecord.FromString(encode_put(KeptPut.of(message, data)))
    if data is not None:
        message.data = data
    assert record == pb.JournalRecord(put_kept=message)
