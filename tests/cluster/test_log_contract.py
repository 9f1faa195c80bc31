"""What a log promises, whichever it is: files of one host, or etcd."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path

import pytest
from cluster_support import Member, running_etcd

from tq_service.durable.state_store import Stream
from tq_service.errors import ServiceFailedError
from tq_service.journal.files import FileBackend
from tq_service.journal.log import Log, Record

OpenLog = Callable[[], Log]
KINDS = ["process", "disk", "stand-in", "etcd"]


@pytest.fixture(params=KINDS)
def open_log(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[OpenLog]:
    """Opens the log, which is not read yet, again and again; each is closed before the next one is opened."""
    with ExitStack() as stack:
        if request.param in {"process", "disk"}:
            directory = tmp_path / "log"
            directory.mkdir()

            def opened() -> Log:
                log = Log(FileBackend(directory, sync=request.param == "disk"))
                stack.callback(log.close)
                return log

            yield opened
            return
        etcd = stack.enter_context(running_etcd(request.param, tmp_path / "etcd"))

        def member() -> Log:
            found = Member(etcd, tmp_path / "member")
            stack.callback(found.close)
            found.lead()
            assert found.lease is not None
            found.backend.close = found.lease.close  # type: ignore[method-assign]  # the leader ends with its log
            return found.log

        yield member


def data_of(log: Log, number: int = 0) -> list[bytes]:
    return [record.data for record in log.read(number)]


async def commit_each(log: Log, records: list[bytes]) -> list[int]:
    numbers = []
    for record in records:
        numbers.append(log.append(Stream.CHANGES, record))
        await log.wait_durable()
    return numbers


async def test_records_come_back_in_order_and_each_start_adds_to_them(open_log: OpenLog) -> None:
    expected: list[bytes] = []
    for start in range(4):
        with closing(open_log()) as log:
            assert data_of(log) == expected
            new = [b"", b"%d" % start, bytes(300_000), "zwölf".encode()][: start + 1]
            await commit_each(log, new)
            assert not log.has_unflushed
            expected += new
    with closing(open_log()) as log:
        found = list(log.read(0))
        assert [record.data for record in found] == expected
        numbers = [record.number for record in found]
        assert numbers == sorted(set(numbers))


async def test_parts_are_one_record_and_both_streams_have_one_order(open_log: OpenLog) -> None:
    with closing(open_log()) as log:
        assert data_of(log) == []
        expected = [
            Record(
                log.append(Stream.PUTS if number % 3 else Stream.CHANGES, b"head", bytearray(number)),
                Stream.PUTS if number % 3 else Stream.CHANGES,
                b"head" + bytes(number),
            )
            for number in range(40)
        ]
        await log.wait_durable()
    with closing(open_log()) as log:
        assert list(log.read(0)) == expected


async def test_what_was_appended_last_is_written_at_close(open_log: OpenLog) -> None:
    with closing(open_log()) as log:
        assert data_of(log) == []
        log.append(Stream.CHANGES, b"never waited for")
        assert log.has_unflushed
        assert log.unflushed_count == 1
    with closing(open_log()) as log:
        assert data_of(log) == [b"never waited for"]


async def test_nothing_is_taken_before_what_is_there_was_read_nor_after_the_end(open_log: OpenLog) -> None:
    with closing(open_log()) as log:
        with pytest.raises(RuntimeError, match="Exhaust read"):
            log.append(Stream.CHANGES, b"too early")
        with pytest.raises(RuntimeError, match="Exhaust read"):
            log.rotate()
        assert data_of(log) == []
        await commit_each(log, [b"in time"])
        log.close()
        with pytest.raises(RuntimeError, match="before close"):
            log.append(Stream.CHANGES, b"late")


async def test_one_waits_for_a_number_and_not_for_what_came_later(open_log: OpenLog) -> None:
    with closing(open_log()) as log:
        assert data_of(log) == []
        first = log.append(Stream.CHANGES, b"first")
        await log.wait_durable(first)
        second = log.append(Stream.CHANGES, b"second")
        assert second == first + 1
        await log.wait_durable(first)
        assert log.has_unflushed
        await log.wait_durable(second)
        assert not log.has_unflushed


async def test_calls_at_once_all_become_durable(open_log: OpenLog) -> None:
    with closing(open_log()) as log:
        assert data_of(log) == []

        async def call(record: bytes) -> None:
            log.append(Stream.CHANGES, record)
            await log.wait_durable()

        expected = [b"%d" % number for number in range(200)]
        await asyncio.gather(*map(call, expected))
        assert log.unflushed_count == 0
    with closing(open_log()) as log:
        assert data_of(log) == expected


async def test_what_waits_is_called_in_order_once_it_is_durable(open_log: OpenLog) -> None:
    with closing(open_log()) as log:
        assert data_of(log) == []
        called: list[int] = []
        log.after_durable(lambda: called.append(0))
        assert called == [0]
        for number in range(1, 4):
            log.append(Stream.CHANGES, b"%d" % number)
            log.after_durable(lambda number=number: called.append(number))  # type: ignore[misc]
        assert called == [0]
        await log.wait_durable()
        assert called == [0, 1, 2, 3]


async def test_a_caller_that_is_cancelled_takes_nothing_with_it(open_log: OpenLog) -> None:
    with closing(open_log()) as log:
        assert data_of(log) == []
        log.append(Stream.CHANGES, b"its own")
        waiting = asyncio.ensure_future(log.wait_durable())
        await asyncio.sleep(0)
        waiting.cancel()
        await commit_each(log, [b"of another"])
        assert not log.has_unflushed
    with closing(open_log()) as log:
        assert data_of(log) == [b"its own", b"of another"]


async def test_a_group_of_large_records_is_there_whole(open_log: OpenLog) -> None:
    records = [bytes([number]) * 900_000 for number in range(5)] + [b"x" * 4_000_000, b"end"]
    with closing(open_log()) as log:
        assert data_of(log) == []
        for record in records:
            log.append(Stream.CHANGES, record)
        await log.wait_durable()
        await commit_each(log, [b"after"])
    with closing(open_log()) as log:
        assert data_of(log) == [*records, b"after"]


async def test_what_was_rotated_is_read_from_there_and_the_rest_can_be_given_up(open_log: OpenLog) -> None:
    with closing(open_log()) as log:
        assert data_of(log) == []
        numbers = await commit_each(log, [b"%d" % number for number in range(10)])
        beginning = log.rotate()
        assert beginning > numbers[-1]
        await commit_each(log, [b"after"])
        log.backend.sync_rotated(beginning)
        log.backend.truncate_before(beginning)
        await commit_each(log, [b"later"])
    with closing(open_log()) as log:
        assert data_of(log, beginning) == [b"after", b"later"]


async def test_a_step_that_appends_nothing_rotates_too(open_log: OpenLog) -> None:
    with closing(open_log()) as log:
        assert data_of(log) == []
        number = log.rotate()
        await log.wait_durable()
        log.backend.sync_rotated(number)
    with closing(open_log()) as log:
        assert data_of(log, number) == []
        await commit_each(log, [b"goes on"])
    with closing(open_log()) as log:
        assert data_of(log, number) == [b"goes on"]


async def test_a_log_that_was_abandoned_takes_nothing_and_answers_nothing(open_log: OpenLog) -> None:
    with closing(open_log()) as log:
        assert data_of(log) == []
        await commit_each(log, [b"before"])
        called: list[int] = []
        log.append(Stream.CHANGES, b"of this step")
        log.after_durable(lambda: called.append(1))
        waiting = asyncio.ensure_future(log.wait_durable(1 << 40))
        log.abandon(ServiceFailedError("it has failed"))
        for refused in (lambda: log.append(Stream.CHANGES, b"later"), log.rotate):
            with pytest.raises(ServiceFailedError):
                refused()
        with pytest.raises(ServiceFailedError):
            await log.wait_durable()
        with pytest.raises(ServiceFailedError):
            await waiting
        assert log.has_unflushed
        assert not called
    with closing(open_log()) as log:
        assert data_of(log) == [b"before"]
