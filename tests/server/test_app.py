"""A service inside another program: one that cannot start leaves nothing behind."""

import threading

import pytest

from tq_service.config import ServeSettings
from tq_service.errors import JournalDamagedError
from tq_service.server.app import running


async def test_a_service_that_cannot_start_gives_back_its_data_folder_and_its_threads(tmp_path):
    settings = ServeSettings(host="127.0.0.1", port=0, shared_memory="off", data_dir=tmp_path / "data")
    async with running(settings):
        pass
    log = tmp_path / "data" / "journal-00000099.sqlite3-wal"
    log.touch()
    before = {thread.name for thread in threading.enumerate()}
    with pytest.raises(JournalDamagedError, match="journal-00000099"):
        async with running(settings):
            raise AssertionError("it started")
    assert {thread.name for thread in threading.enumerate()} <= before
    log.unlink()
    async with running(settings) as app:
        assert app.port > 0
