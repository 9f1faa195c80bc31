"""What a service does beside its calls goes on whatever happens to it once."""

import asyncio
import logging

import pytest

from tq_service.server.background import regularly


async def test_a_failure_is_logged_and_the_next_time_comes(caplog: pytest.LogCaptureFixture) -> None:
    outcomes = iter([None, RuntimeError("once"), None])
    is_over = asyncio.Event()

    async def work() -> None:
        outcome = next(outcomes, is_over)
        if outcome is is_over:
            is_over.set()
        elif isinstance(outcome, Exception):
            raise outcome

    with caplog.at_level(logging.ERROR):
        task = asyncio.ensure_future(regularly(0.0, work))
        async with asyncio.timeout(60):
            await is_over.wait()
    task.cancel()
    (record,) = caplog.records
    assert "periodic work failed" in record.getMessage()
    assert record.exc_info
