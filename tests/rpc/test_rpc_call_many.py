"""Streams of calls, message by message: what each call gets, what ends a stream, and what a stream may take."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import grpc
import numpy as np
import pytest
from call_streams import CallStream, call, claim, reason, waiting_claim
from certificates import add_token
from google.protobuf.duration_pb2 import Duration
from live_server import LiveServer, LoopThread, StartServer
from rpc_samples import new_id, reason_of, still_works

from tq_service.server.rpc import batches
from tq_service.v1 import controller_service_pb2 as pb

CODE = grpc.StatusCode


def meta_of(answer: pb.BatchedAnswer) -> Any:
    assert not answer.status, answer.status
    return pb.GetMetaResponse.FromString(answer.answer).meta


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def waiting(server: LiveServer) -> int:
    return server.app.waiting.count


@pytest.fixture
def put(server: LiveServer) -> None:
    server.client().put("train", {"x": np.arange(600)})


@pytest.fixture
def stream(server: LiveServer) -> Iterator[CallStream]:
    with CallStream(server.channel) as stream:
        yield stream


@pytest.mark.usefixtures("put")
def test_calls_of_all_kinds_have_answers_of_their_own(stream: CallStream) -> None:
    lease = Duration(seconds=60)
    stream.send(claim(1, lease=lease), claim(2), claim(3, lease=lease), claim(4, data_fields=[]))
    answers = stream.read(4)
    claimed = [meta_of(answers[number]) for number in (1, 2, 3)]
    assert len({tuple(meta.global_indexes) for meta in claimed}) == 3
    assert reason(answers[4]) == "INVALID_ARGUMENT"
    names = {"partition_id": "train", "task_name": "t"}
    ids = [(number).to_bytes(16, "big") for number in (1, 3)]
    stream.send(
        call(5, "AckClaim", pb.AckClaimRequest(**names, request_id=new_id(), claim_request_id=ids[0],
                                               incarnation=claimed[0].incarnation,
                                               global_indexes=claimed[0].global_indexes)),
        call(6, "ExtendClaim", pb.ExtendClaimRequest(**names, request_id=new_id(), claim_request_id=ids[1],
                                                     incarnation=claimed[2].incarnation, lease=lease)),
    )  # fmt: skip
    answers = stream.read(2)
    assert pb.AckClaimResponse.FromString(answers[5].answer).acked_count == 1
    assert pb.ExtendClaimResponse.FromString(answers[6].answer).leased_count == 1
    release = pb.ReleaseClaimRequest(**names, request_id=new_id(), claim_request_id=ids[1])
    stream.send(call(5, "ReleaseClaim", release))  # the id is free again
    assert pb.ReleaseClaimResponse.FromString(stream.read(1)[5].answer).released_count == 1
    stream.close()
    assert stream.failure() is None


@pytest.mark.usefixtures("put")
def test_a_request_that_cannot_be_read_is_the_error_of_its_call_alone(stream: CallStream) -> None:
    stream.send(call(1, "GetMeta", b"\xff" * 40), claim(2), call(3, "AckClaim", b"\x0a\xff\xff\xff\xff\x0f"))
    answers = stream.read(3)
    assert [reason(answers[number]) for number in (1, 2, 3)] == ["INVALID_ARGUMENT", "", "INVALID_ARGUMENT"]


ATTACKS: dict[str, tuple[Callable[[CallStream], None], str]] = {
    "no such method": (lambda stream: stream.send(call(2, "Nothing", b"")), "method is 'Nothing'; expected one of "),
    "another service": (lambda stream: stream.send(call(2, "/tq_service.v1.StorageService/Stat", b"")), "method is"),
    "a method that is not batched": (lambda stream: stream.send(call(2, "Insert", b"")), "method is 'Insert'"),
    "itself": (lambda stream: stream.send(call(2, "CallMany", b"")), "method is 'CallMany'"),
    "an id that is in use": (lambda stream: stream.send(claim(1)), "call_id 1 is already used by another open call"),
    "an id twice": (lambda stream: stream.send(waiting_claim(2), waiting_claim(2)), "call_id 2 is"),
    "257 calls": (lambda stream: stream.send(*(claim(n) for n in range(2, 259))), "contains 257 calls; expected"),
    "a timeout below 0": (lambda stream: stream.send(claim(2, seconds=-1)), "timeout"),
    "much metadata": (
        lambda stream: stream.send(call(2, "GetMeta", b"", metadata={"a": "x" * 2000})), "at most 1024"),
    "a large request": (lambda stream: stream.send(call(2, "GetMeta", bytes(20_000))), "at most 16384"),
    "no message": (lambda stream: stream.send_raw(b"\xff" * 40), "cannot be read"),
}  # fmt: skip


@pytest.mark.usefixtures("put")
@pytest.mark.parametrize("name", ATTACKS)
def test_what_cannot_be_understood_ends_the_stream_and_all_its_calls(
    server: LiveServer, stream: CallStream, name: str
) -> None:
    attack, says = ATTACKS[name]
    stream.send(waiting_claim(1))
    until(lambda: waiting(server) == 1)
    attack(stream)
    failure = stream.failure()
    assert failure.code() is CODE.INVALID_ARGUMENT
    assert reason_of(failure) == "INVALID_ARGUMENT"
    assert says in failure.details()
    until(lambda: waiting(server) == 0 and server.app.calls.count == 0)
    still_works(server.client())


@pytest.mark.usefixtures("put")
def test_a_stream_that_fails_while_answers_are_written_says_why(server: LiveServer) -> None:
    for number in range(100):
        with CallStream(server.channel) as stream:
            stream.send(*(claim(4 * number + place) for place in range(4)))
            stream.send_raw(b"\xff" * 40)
            assert "cannot be read" in stream.failure().details()


def test_a_message_that_is_too_large_ends_the_stream(server: LiveServer, stream: CallStream) -> None:
    stream.send(waiting_claim(1))
    until(lambda: waiting(server) == 1)
    stream.send_raw(pb.CallManyRequest(calls=[call(2, "GetMeta", bytes(5 << 20))]).SerializeToString())
    assert stream.failure() is not None
    until(lambda: waiting(server) == 0 and server.app.calls.count == 0)


@pytest.mark.usefixtures("put")
def test_a_call_that_is_cancelled_stops_waiting_and_is_not_answered(server: LiveServer, stream: CallStream) -> None:
    stream.send(waiting_claim(1), waiting_claim(2))
    until(lambda: waiting(server) == 2)
    stream.send(claim(3), cancelled=(1, 77))
    assert stream.read(1).keys() == {3}
    until(lambda: waiting(server) == 1)
    stream.send(waiting_claim(1), cancelled=(2,))  # in the order: cancelled first
    until(lambda: waiting(server) == 1)


def test_a_call_that_is_cancelled_before_it_begins_leaves_nothing(server: LiveServer, stream: CallStream) -> None:
    """The stream ends in the turn of the loop in which calls were started."""
    stream.send(waiting_claim(1), waiting_claim(2), claim(2))
    assert "call_id 2 is" in stream.failure().details()
    until(lambda: waiting(server) == 0 and server.app.calls.count == 0)


@pytest.mark.usefixtures("put")
def test_a_deadline_is_that_of_one_call(server: LiveServer, stream: CallStream) -> None:
    stream.send(waiting_claim(1, seconds=0.2), waiting_claim(2), waiting_claim(3, seconds=0))
    answers = stream.read(2)
    assert {number: reason(answer) for number, answer in answers.items()} == dict.fromkeys((1, 3), "DEADLINE_EXCEEDED")
    until(lambda: waiting(server) == 1)


@pytest.mark.parametrize("how", ["cancelled", "broken"])
def test_a_queue_claim_whose_answer_was_not_sent_is_released(
    start_server: StartServer, tmp_path: Path, how: str
) -> None:
    server = start_server(data_dir=str(tmp_path), durability="process")
    client = server.client()
    client.put("train", {"x": np.arange(3)})
    store = server.app.state_store
    held, is_free = threading.Event(), threading.Event()
    wait_durable = store.wait_durable

    async def held_back() -> None:
        held.set()
        while not is_free.is_set():  # noqa: ASYNC110  (set by another thread)
            await asyncio.sleep(0.01)
        await wait_durable()

    with CallStream(server.channel) as stream:
        stream.send(waiting_claim(9))
        until(lambda: waiting(server) == 1)
        with mock.patch.object(store, "wait_durable", held_back):
            stream.send(claim(1))
            assert held.wait(20)
            if how == "cancelled":
                stream.send(cancelled=(1,))
                server.settle()
                time.sleep(0.2)
            else:
                stream.call.cancel()
                until(lambda: waiting(server) == 0)
            is_free.set()
    until(lambda: client.check_consumption("train", "t").consumed_count == 0)
    metas = [client.get_meta(partition_id="train", task_name="t", data_fields=["x"], batch_size=1) for _ in range(3)]
    assert sorted(index for meta in metas for index in meta.global_indexes) == [0, 1, 2]


@pytest.mark.usefixtures("put")
def test_256_calls_may_be_open_and_those_behind_them_wait(server: LiveServer, stream: CallStream) -> None:
    stream.send(*(waiting_claim(number) for number in range(256)))
    until(lambda: waiting(server) == 256)
    stream.send(cancelled=(5,))  # is read all the same
    until(lambda: waiting(server) == 255)
    stream.send(waiting_claim(300), claim(301))
    until(lambda: waiting(server) == 256)
    stream.send(cancelled=(6,))
    time.sleep(0.3)
    assert waiting(server) == 256
    assert server.app.calls.count == 257  # with the stream
    still_works(server.client())


def test_a_client_that_reads_no_answers_is_read_no_more_and_ended(start_server: StartServer) -> None:
    server = start_server(stall_seconds=2.0)
    client = server.client()
    client.put("train", {"x": np.arange(4096)}, keys=[f"{row:0400}" for row in range(4096)])
    sent: list[int] = []

    def messages() -> Iterator[bytes]:
        for number in range(400):
            sent.append(number)
            what = {"partition_id": "train", "data_fields": ["x"], "batch_size": 2000, "request_id": new_id()}
            message = pb.GetMetaRequest(**what, task_name="t", dp_size=1, dp_rank=0, batch_index=0)
            asked = call(number, "GetMeta", message, metadata={"a": "x" * 1000})  # more than the window of the stream
            yield pb.CallManyRequest(calls=[asked]).SerializeToString()

    stream = server.channel.stream_stream("/tq_service.v1.ControllerService/CallMany")(messages(), timeout=60)
    until(lambda: len(sent) > 1)
    time.sleep(1.0)
    unread = len(sent)
    time.sleep(0.5)
    assert len(sent) == unread < 200
    assert server.app.calls.count < 50
    until(lambda: server.app.calls.count == 0)
    with pytest.raises(grpc.RpcError) as caught:
        list(stream)
    error: Any = caught.value
    assert reason_of(error) == "DEADLINE_EXCEEDED"
    assert "stall_seconds" in error.details()
    still_works(client)


def test_an_idle_stream_ends_and_one_with_a_call_that_waits_does_not(start_server: StartServer) -> None:
    server = start_server(stall_seconds=1.0)
    with CallStream(server.channel) as idle, CallStream(server.channel) as used:
        idle.send(claim(1, max_wait=Duration()))
        used.send(waiting_claim(1))
        assert idle.read(1).keys() == {1}
        failure = idle.failure()
        assert reason_of(failure) == "DEADLINE_EXCEEDED"
        time.sleep(1.5)
        used.send(claim(2))
        assert used.read(1).keys() == {2}


def test_one_connection_has_two_streams_and_the_service_as_many_as_it_may(server: LiveServer) -> None:
    with CallStream(server.channel) as first, CallStream(server.channel) as second:
        first.send(waiting_claim(1))
        second.send(waiting_claim(2))
        until(lambda: waiting(server) == 2)
        with CallStream(server.channel) as third:  # not opened before, since it might come first
            third.send(claim(3))
            failure = third.failure()
        assert reason_of(failure) == "LIMIT_EXCEEDED"
        assert "call_streams_per_client" in failure.details()
    until(lambda: server.app.calls.count == 0)
    none = mock.patch.object(server.app.controller.batches, "_places", batches.WaitingCalls(0, 2, "call_streams"))
    with none, CallStream(server.channel) as one:
        one.send(claim(1))
        assert reason_of(one.failure()) == "LIMIT_EXCEEDED"
    still_works(server.client())


def test_limits_are_those_of_each_call(start_server: StartServer) -> None:
    server = start_server(max_waiting_calls_per_client=3)
    with CallStream(server.channel) as stream:
        stream.send(*(waiting_claim(number) for number in range(3)))
        until(lambda: waiting(server) == 3)
        stream.send(waiting_claim(3), claim(4))
        assert {reason(answer) for answer in stream.read(2).values()} == {"LIMIT_EXCEEDED", ""}
    few = start_server(max_calls=2)
    with CallStream(few.channel) as stream:
        stream.send(waiting_claim(1))
        until(lambda: waiting(few) == 1)
        stream.send(claim(2))
        assert reason(stream.read(1)[2]) == "LIMIT_EXCEEDED"


def test_a_service_that_drains_answers_open_calls_and_ends_the_stream(start_server: StartServer) -> None:
    server = start_server()
    with CallStream(server.channel) as stream:
        stream.send(waiting_claim(1), waiting_claim(2))
        until(lambda: waiting(server) == 2)
        stopping = server.loop.start(server.app.stop(30.0))
        began = time.monotonic()
        assert {reason(answer) for answer in stream.read(2).values()} == {"UNAVAILABLE"}
        failure = stream.failure()
        assert failure.code() is CODE.UNAVAILABLE
        assert reason_of(failure) == "UNAVAILABLE"
        stopping.result(20)
        assert time.monotonic() - began < 15


# Tokens


@pytest.fixture
def tokens(tmp_path: Path) -> Path:
    return tmp_path / "tokens.toml"


def bearer(secret: str) -> Any:
    return (("authorization", f"Bearer {secret}"),)


def test_each_call_needs_its_role_and_its_partition(loop_thread: LoopThread, tokens: Path) -> None:
    boss = add_token(tokens, "boss", ["admin"])
    worker = add_token(tokens, "worker", ["consume"], ("train",))
    producer = add_token(tokens, "producer", ["produce"], ("",))
    with LiveServer(loop_thread, auth_tokens_file=str(tokens)) as server:
        client = server.client(token=boss)
        for name in ("train", "secret"):
            client.put(name, {"x": np.arange(4)})
        with CallStream(server.channel, bearer(worker)) as stream:
            stream.send(claim(1), claim(2, partition_id="secret"), claim(3))
            answers = stream.read(3)
            assert [reason(answers[number]) for number in (1, 2, 3)] == ["", "PERMISSION_DENIED", ""]
        with CallStream(server.channel, bearer(producer)) as stream:
            stream.send(claim(1))
            assert reason_of(stream.failure()) == "PERMISSION_DENIED"
        with CallStream(server.channel) as stream:
            stream.send(claim(1))
            assert reason_of(stream.failure()) == "UNAUTHENTICATED"
        with CallStream(server.channel, bearer(worker)) as stream:  # metadata of a call is not that of its stream
            stream.send(call(1, "GetMeta", claim(1, partition_id="secret").request,
                             metadata={"authorization": f"Bearer {boss}"}))  # fmt: skip
            assert reason(stream.read(1)[1]) == "PERMISSION_DENIED"


def test_a_token_that_is_revoked_ends_its_streams(loop_thread: LoopThread, tokens: Path) -> None:
    worker = add_token(tokens, "worker", ["consume"], ("train",))
    live = LiveServer(loop_thread, auth_tokens_file=str(tokens))
    with live as server, CallStream(server.channel, bearer(worker)) as stream:
        stream.send(waiting_claim(1))
        until(lambda: waiting(server) == 1)
        tokens.write_text("")
        add_token(tokens, "other", ["consume"], ("train",))
        assert reason_of(stream.failure()) == "UNAUTHENTICATED"
        until(lambda: waiting(server) == 0)
