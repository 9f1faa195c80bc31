"""A service that cannot be reached: the error says why in plain words, and the time until then is not silent."""

import asyncio
import logging
import re
import socket
from types import SimpleNamespace

import pytest
from client_support import make_client
from fake_server import FakeController, Script, serving
from fault_seconds import FAULT_SECONDS

import tq_service as tq
from tq_service.client import transport as module
from tq_service.client.transport import Outage
from tq_service.v1 import controller_service_pb2 as pb


@pytest.fixture(params=["async", "sync"])
def kind(request):
    return request.param


REFUSED = tq.errors.UnavailableError("cannot reach h:1: connection refused", metadata={"address": "h:1"})
DRAINING = tq.errors.UnavailableError("the server is draining")


@pytest.fixture
def log(caplog):
    caplog.set_level(logging.INFO, "tq_service.client")
    return lambda: [
        (record.levelname, record.getMessage())
        for record in caplog.records
        if record.name.startswith("tq_service.client")
    ]


@pytest.fixture
def free_port():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1]


@pytest.fixture
def clock(monkeypatch):
    clock = SimpleNamespace(now=1000.0)
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: clock.now))
    return clock


def test_an_outage_is_logged_after_five_seconds_then_each_minute_and_at_its_end(clock, log):
    outage = Outage("h:1")
    logged_at = []
    for _ in range(2 * 150):
        before = len(log())
        outage.lasts(clock.now, REFUSED, 1060 - clock.now)
        if len(log()) > before:
            logged_at.append(clock.now - 1000)
        clock.now += 0.5
    assert logged_at == [5, 65, 125]
    assert log()[0] == (
        "WARNING",
        "the service is unavailable; retrying address=h:1 retry_seconds=55 "
        'error="cannot reach h:1: connection refused"',
    )
    outage.is_over()
    assert log()[-1] == ("INFO", "the service is available again address=h:1 after_seconds=150")
    outage.is_over()
    assert len(log()) == 4


def test_a_short_outage_is_not_logged_and_the_next_one_counts_from_its_own_beginning(clock, log):
    outage = Outage("h:1")
    outage.lasts(clock.now, REFUSED, 60)
    clock.now += 4.9
    outage.lasts(clock.now, REFUSED, 59)
    outage.is_over()
    clock.now += 4.9
    outage.lasts(clock.now, REFUSED, 58)
    assert log() == []


def test_a_try_that_took_long_is_logged_when_it_has_failed(clock, log):
    clock.now += 5
    Outage("h:1").lasts(clock.now - 5, REFUSED, 55)
    assert len(log()) == 1


def test_a_service_that_says_itself_that_it_is_unavailable_is_named(clock, log):
    outage = Outage("h:1")
    outage.lasts(clock.now - 5, DRAINING, 3)
    assert log() == [
        ("WARNING", 'the service is unavailable; retrying address=h:1 retry_seconds=3 error="the server is draining"')
    ]


async def test_calls_that_cannot_connect_warn_once_for_all_and_tell_of_the_end(kind, free_port, log, monkeypatch):
    monkeypatch.setattr(module, "_WARN_AFTER_SECONDS", 0.0)
    address = f"127.0.0.1:{free_port}"
    client = make_client(kind, address, timeout=20)
    partitions = Script(pb.ListPartitionsResponse())
    calls = [asyncio.ensure_future(client.list_partitions()) for _ in range(3)]
    with pytest.raises(tq.errors.UnavailableError):
        await client.list_partitions(timeout=FAULT_SECONDS)
    async with serving(FakeController(ListPartitions=partitions), port=free_port):
        assert await asyncio.gather(*calls) == [[]] * 3
        await client.aclose()
    (level, warning), (_, end) = log()
    assert level == "WARNING"
    assert re.fullmatch(
        rf"the service is unavailable; retrying address={address} retry_seconds=\d+ "
        rf'error="cannot reach {address}: connection refused"',
        warning,
    )
    assert re.fullmatch(rf"the service is available again address={address} after_seconds=\d+", end)


async def test_the_final_error_says_why_first_and_keeps_the_words_of_grpc(kind, free_port):
    address = f"127.0.0.1:{free_port}"
    client = make_client(kind, address, timeout=FAULT_SECONDS)
    with pytest.raises(tq.errors.UnavailableError) as raised:
        await client.list_partitions()
    await client.aclose()
    assert re.fullmatch(
        rf"cannot reach {address}: connection refused; tried for {FAULT_SECONDS:g} s \(\d+ times\); "
        r"is the service running there, and do both sides agree on TLS and certificates\? "
        r"\(gRPC: .*Connection refused\)",
        str(raised.value),
    )
    assert raised.value.metadata["address"] == address
    assert "Connection refused" in raised.value.metadata["grpc_message"]


async def test_one_try_says_why_and_warns_of_nothing(kind, free_port, log, monkeypatch):
    monkeypatch.setattr(module, "_WARN_AFTER_SECONDS", 0.0)
    client = make_client(kind, f"127.0.0.1:{free_port}")
    with pytest.raises(
        tq.errors.UnavailableError, match=rf"^cannot reach 127\.0\.0\.1:{free_port}: connection refused$"
    ):
        await client.health()
    await client.aclose()
    assert log() == []


async def test_a_name_that_nobody_knows(kind):
    client = make_client(kind, "no-such-host.invalid")
    with pytest.raises(tq.errors.UnavailableError, match=r"^cannot reach no-such-host\.invalid:50051: name not found$"):
        await client.health()
    await client.aclose()
