"""Every decoder of what comes from elsewhere, with odd bytes: a value that can be used, or the error it promises."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fuzz_messages import EXAMPLES, changed, garbled, messages
from google.protobuf.message import DecodeError, Message
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from one_object import encode_object
from open_files import open_files

from tq_service.client.reads import decode_columns
from tq_service.dataplane.shared_memory import messages as fd_channel
from tq_service.errors import InvalidArgumentError
from tq_service.internal.v1 import shared_memory_pb2
from tq_service.v1 import metadata_pb2
from tq_service.v1.storage_service_pb2 import GetResponse, PutHeader, PutRequest
from tq_service.wire.columns import (
    ColumnReceiver,
    Garbled,
    decode_get_response,
    decode_headers,
    decode_put_request,
    encode_header,
    encode_part,
)
from tq_service.wire.encoding import encode_columns
from tq_service.wire.metadata import decode_meta_columns, decode_spec
from tq_service.wire.objects import decode_object

IN_ONE = 20
"""Inputs that hypothesis makes at once: it takes longer to begin an example than to make some bytes."""

MOST_BYTES = 64 << 20
"""No header of a few bytes may make a decoder take more memory than this."""


def fuzz(count: int) -> Any:
    """Settings for so many examples of `IN_ONE` inputs each."""
    return settings(
        max_examples=max(2, count // IN_ONE), deadline=None, database=None, suppress_health_check=list(HealthCheck)
    )


def varint(value: int, padding: int = 0) -> bytes:
    """Return a varint, longer than it has to be by some bytes."""
    encoded = bytearray()
    while value > 0x7F or padding:
        padding -= value <= 0x7F
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes((*encoded, value))


@st.composite
def wire_parts(draw: st.DrawFn) -> bytes:
    """Return one part of a message as the wire has it: known and unknown fields, lengths that lie, long varints."""
    number = draw(st.sampled_from([1, 2, 2, 2, 3, 4, 99]))
    kind = draw(st.sampled_from([0, 1, 2, 2, 2, 2, 3, 4, 5, 6, 7]))
    tag = varint(number << 3 | kind, draw(st.sampled_from([0, 0, 0, 0, 1, 9])))
    if kind != 2:
        return tag + draw(st.binary(max_size=9))
    data = draw(st.binary(max_size=12))
    length = draw(st.sampled_from([len(data), len(data), len(data), len(data) + 1, 0, 2**31, 2**63, 2**70 - 1]))
    return tag + varint(length, draw(st.sampled_from([0, 0, 0, 1, 8]))) + data


FRAMES = st.one_of(
    st.binary(max_size=30),
    st.lists(wire_parts(), max_size=4).map(b"".join),
    st.binary(max_size=30).flatmap(lambda data: garbled(encode_part([data]))),
    messages(PutRequest.DESCRIPTOR).map(lambda message: message.SerializeToString()),
)
CODECS = [(decode_put_request, PutRequest), (decode_get_response, GetResponse)]


def check_is_as_protobuf_reads(decode: Any, kind: type[Message], data: bytes) -> None:
    ours = decode(data)
    try:
        theirs: Any = kind.FromString(data)
    except DecodeError:
        assert isinstance(ours, Garbled), data
        return
    part = theirs.WhichOneof("part")
    if part is None:
        assert isinstance(ours, Garbled), data
    elif part == "frame":
        assert bytes(ours) == theirs.frame, data
    else:
        assert ours.SerializeToString() == getattr(theirs, part).SerializeToString(), data


@fuzz(10 * EXAMPLES)
@given(st.lists(FRAMES, min_size=IN_ONE, max_size=IN_ONE))
def test_frames_are_read_as_protobuf_reads_them(inputs: list[bytes]) -> None:
    for decode, kind in CODECS:
        for data in inputs:
            check_is_as_protobuf_reads(decode, kind, data)


@fuzz(EXAMPLES)
@given(
    st.lists(st.tuples(messages(PutHeader.DESCRIPTOR), st.binary(max_size=64)), min_size=IN_ONE, max_size=IN_ONE),
)
def test_headers_of_streams(inputs: list[tuple[Any, bytes]]) -> None:
    for header, data in inputs:
        try:
            columns = decode_headers(header.columns, header.row_count)
        except InvalidArgumentError:
            continue
        if sum(column.value_bytes for column in columns) > MOST_BYTES:
            continue  # what a quota refuses
        receiver = ColumnReceiver(columns)
        try:
            receiver.write(memoryview(data))
            buffers = receiver.finish()
            values = decode_columns(columns, buffers, as_torch=False)
        except InvalidArgumentError:
            continue
        assert len(data) == sum(column.value_bytes for column in columns)
        assert list(values) == [column.spec.name for column in columns]
        assert all(len(rows) == header.row_count for rows in values.values())


ROWS: dict[str, Any] = {
    "dense": np.arange(12, dtype=np.float32).reshape(4, 3),
    "jagged": [np.arange(length) for length in (2, 0, 3, 1)],
    "object": ["a", {"b": [1, 2.5, None]}, np.arange(3), (b"c", 2**70)],
}


@pytest.mark.parametrize("name", ROWS)
def test_columns_whose_header_or_bytes_are_changed(name: str) -> None:
    (column,) = encode_columns({name: ROWS[name]})
    values = b"".join(map(bytes, column.chunks))
    header = encode_header(column)
    odd = st.one_of(
        st.tuples(changed(header), st.just(values)), st.tuples(st.just(header.SerializeToString()), garbled(values))
    )

    @fuzz(EXAMPLES)
    @given(st.lists(odd, min_size=IN_ONE, max_size=IN_ONE))
    def attack(inputs: list[tuple[bytes, bytes]]) -> None:
        for header_bytes, data in inputs:
            try:
                shapes = decode_headers([metadata_pb2.ColumnHeader.FromString(header_bytes)], 4)
                if shapes[0].value_bytes != len(data):
                    continue
                (rows,) = decode_columns(shapes, [np.frombuffer(bytearray(data), np.uint8)], as_torch=False).values()
            except InvalidArgumentError:
                continue
            assert len(rows) == 4

    attack()


OBJECTS = st.one_of(
    st.binary(max_size=40).map(lambda data: encode_object(None)[:1] + data),
    st.sampled_from(
        [
            encode_object(value)
            for value in (
                ROWS["object"],
                {1: (2, {3})},
                "é" * 9,
                [[[[2**65]]]],
                1j,
                np.array([1, {"a": (2,)}], object),
            )
        ]
    ).flatmap(garbled),
    st.integers(1, 4000).map(lambda depth: encode_object(None)[:1] + b"\x91" * depth + b"\x00"),
)


@fuzz(EXAMPLES)
@given(st.lists(OBJECTS, min_size=IN_ONE, max_size=IN_ONE))
def test_objects(inputs: list[bytes]) -> None:
    for data in inputs:
        try:
            value = decode_object(data, as_torch=False)
        except InvalidArgumentError:
            continue
        assert repr(decode_object(encode_object(value), as_torch=False)) == repr(value)


@fuzz(EXAMPLES)
@given(
    st.lists(
        st.tuples(st.lists(messages(metadata_pb2.MetaColumn.DESCRIPTOR), max_size=3), st.sampled_from(range(5))),
        min_size=IN_ONE,
        max_size=IN_ONE,
    )
)
def test_custom_meta(inputs: list[tuple[list[Any], int]]) -> None:
    for columns, row_count in inputs:
        try:
            decoded = decode_meta_columns(columns, row_count)
        except InvalidArgumentError:
            continue
        assert all(column.values.shape == column.present.shape == (row_count,) for column in decoded)


@fuzz(EXAMPLES)
@given(st.lists(messages(metadata_pb2.FieldSpec.DESCRIPTOR), min_size=IN_ONE, max_size=IN_ONE))
def test_specs(inputs: list[Any]) -> None:
    for message in inputs:
        try:
            assert decode_spec(message).name == message.name
        except InvalidArgumentError:
            continue


CHANNEL_MESSAGES = st.one_of(
    st.binary(max_size=60),
    messages(shared_memory_pb2.SharedMemoryRequest.DESCRIPTOR).map(lambda message: message.SerializeToString()),
    st.sampled_from([bytes(4096), bytes(4097), b"\xff" * 5000]),
)


@fuzz(EXAMPLES)
@given(st.lists(st.tuples(CHANNEL_MESSAGES, st.integers(0, 5)), min_size=IN_ONE, max_size=IN_ONE))
def test_messages_with_file_descriptors_close_what_they_refuse(inputs: list[tuple[bytes, int]]) -> None:
    with Path(os.devnull).open("rb") as file:
        before = open_files()
        for data, fd_count in inputs:
            mine, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            with mine, theirs:
                socket.send_fds(mine, [data], [file.fileno()] * fd_count)
                try:
                    received = fd_channel.receive(theirs, shared_memory_pb2.SharedMemoryRequest, most_fds=3)
                except InvalidArgumentError:
                    continue
                if received is not None:
                    assert len(received[1]) == fd_count
                    for fd in received[1]:
                        os.close(fd)
        assert open_files() <= before
