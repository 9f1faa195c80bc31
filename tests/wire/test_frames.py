import pytest
from hypothesis import given
from hypothesis import strategies as st

from tq_service.errors import InvalidArgumentError
from tq_service.schema import FieldSpec, Layout
from tq_service.v1.storage_service_pb2 import GetHeader, GetResponse, PutHeader, PutRequest
from tq_service.wire.columns import (
    MOST_FRAME_PARTS,
    ColumnReceiver,
    ColumnShape,
    Garbled,
    decode_get_response,
    decode_put_request,
    encode_part,
    iter_frames,
)

CODECS = [
    (PutRequest, PutHeader, encode_part, decode_put_request),
    (GetResponse, GetHeader, encode_part, decode_get_response),
]


@pytest.mark.parametrize(("message", "header", "encode", "decode"), CODECS)
@pytest.mark.parametrize("size", [0, 1, 127, 128, 16383, 16384, 3 << 20])
def test_frames_are_what_protobuf_writes_and_reads(message, header, encode, decode, size):
    frame = bytes(range(256)) * (size // 256) + bytes(size % 256)
    half = size // 2
    ours = encode([memoryview(frame)[:half], memoryview(frame)[half:]])
    assert ours == message(frame=frame).SerializeToString()
    assert bytes(decode(ours)) == frame


@pytest.mark.parametrize(("message", "header", "encode", "decode"), CODECS)
def test_headers_are_what_protobuf_writes_and_reads(message, header, encode, decode):
    part = header(row_count=3)
    assert message.FromString(encode(part)).header == part
    assert decode(message(header=part).SerializeToString()) == part


def test_received_frames_are_views():
    data = encode_part([b"abc"])
    assert decode_put_request(data).obj is data


@pytest.mark.parametrize(("message", "header", "encode", "decode"), CODECS)
def test_unusual_encodings_of_a_frame_are_read_as_protobuf_reads_them(message, header, encode, decode):
    unknown_after = encode_part([b"abc"]) + b"\x98\x06\x05"  # field 99, varint 5
    unknown_before = b"\x98\x06\x05" + encode_part([b"abc"])
    long_varint = b"\x12\x83\x80\x00abc"
    twice = encode_part([b"xyz"]) + encode_part([b"abc"])
    for data in (unknown_after, unknown_before, long_varint, twice):
        assert bytes(decode(data)) == message.FromString(data).frame == b"abc"
    header_last = encode_part([b"xyz"]) + message(header=header(row_count=1)).SerializeToString()
    assert decode(header_last) == header(row_count=1)


@pytest.mark.parametrize(("message", "header", "encode", "decode"), CODECS)
@pytest.mark.parametrize(
    "data", [b"", b"\x12", b"\x12\x05abc", b"\x12\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff", b"\x0a\x7f", b"\xff"]
)
def test_garbage_is_said_and_not_raised(message, header, encode, decode, data):
    assert isinstance(decode(data), Garbled)
    assert decode(data).reason


@given(st.binary(max_size=40))
def test_any_bytes_are_read_as_protobuf_reads_them(data):
    ours = decode_put_request(data)
    try:
        theirs = PutRequest.FromString(data)
    except Exception:
        assert isinstance(ours, Garbled)
        return
    part = theirs.WhichOneof("part")
    if part is None:
        assert isinstance(ours, Garbled)
    elif part == "frame":
        assert bytes(ours) == theirs.frame
    else:
        assert ours == theirs.header


@given(st.lists(st.binary(max_size=50), max_size=20), st.integers(1, 30))
def test_frames_cut_and_join_chunks_without_loss(chunks, frame_bytes):
    frames = [b"".join(parts) for parts in iter_frames(map(memoryview, chunks), frame_bytes)]
    assert b"".join(frames) == b"".join(chunks)
    assert all(len(frame) == frame_bytes for frame in frames[:-1])
    assert all(0 < len(frame) <= frame_bytes for frame in frames)


def test_frame_size_must_be_positive():
    with pytest.raises(InvalidArgumentError, match="frame_bytes is 0"):
        list(iter_frames([memoryview(b"a")], 0))


def _bytes_column(name, size):
    return ColumnShape(
        spec=FieldSpec(name, dtype="uint8", layout=Layout.DENSE, row_shape=(size,)),
        row_count=1,
        extents=None,
        value_bytes=size,
    )


@given(st.lists(st.integers(0, 9), min_size=1, max_size=5), st.integers(1, 7))
def test_receiver_spreads_frames_over_columns(sizes, frame_bytes):
    receiver = ColumnReceiver([_bytes_column(f"f{i}", size) for i, size in enumerate(sizes)])
    data = bytes(range(sum(sizes)))
    for start in range(0, len(data), frame_bytes):
        receiver.write(memoryview(data)[start : start + frame_bytes])
    buffers = receiver.finish()
    assert [len(buffer) for buffer in buffers] == sizes
    assert b"".join(buffer.tobytes() for buffer in buffers) == data
    with pytest.raises(InvalidArgumentError, match="more bytes"):
        receiver.write(memoryview(b"x"))


def test_receiver_says_how_much_is_missing():
    receiver = ColumnReceiver([_bytes_column("a", 4), _bytes_column("b", 3)])
    receiver.write(memoryview(b"12345"))
    with pytest.raises(InvalidArgumentError, match="ended 2 bytes short of"):
        receiver.finish()


def test_a_frame_is_made_up_of_a_bounded_number_of_chunks():
    chunks = [memoryview(bytes([number % 256])) for number in range(3 * MOST_FRAME_PARTS + 5)]
    frames = list(iter_frames(chunks))
    assert [len(parts) for parts in frames] == [MOST_FRAME_PARTS] * 3 + [5]
    assert b"".join(map(b"".join, frames)) == b"".join(chunks)
    assert [len(parts) for parts in iter_frames(chunks, most_parts=None)] == [len(chunks)]
