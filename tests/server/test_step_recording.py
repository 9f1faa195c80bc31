"""A service that records: what fails in its recorder is seen in its status, and stops nobody."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from live_server import AnyClient, LiveServer, StartServer

import tq_service as tq
from tq_service.config import load_settings
from tq_service.recording import places
from tq_service.results import RecordingStatus
from tq_service.server import recording


def until(holds: Callable[[], bool], seconds: float = 20.0) -> None:
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.01)


def claim(client: AnyClient, index: int, task: str = "train") -> tq.BatchMeta:
    meta: tq.BatchMeta = client.get_meta(
        partition_id="p", task_name=task, data_fields=["x"], batch_size=2, dp_rank=0, dp_size=1, batch_index=index
    )
    return meta


def status_of(client: AnyClient) -> RecordingStatus:
    found: RecordingStatus | None = client.status(explain=False).service.recording
    assert found is not None
    return found


@pytest.fixture
def recording_server(start_server: StartServer, tmp_path: Path) -> LiveServer:
    return start_server(record=str(tmp_path / "recording"), shared_memory="off")


def test_status_counts_the_steps(recording_server: LiveServer) -> None:
    client = recording_server.client()
    client.put("p", {"x": np.arange(8.0)})
    for index in range(3):
        claim(client, index)
    client.get_meta(partition_id="p", task_name="queue", data_fields=["x"], batch_size=2)  # which is not recorded
    until(lambda: status_of(client).recorded_step_count == 3)
    status = status_of(client)
    assert (status.is_recording, status.step_count, status.skipped_step_count) == (True, 3, 0)
    assert status.copied_bytes == 64
    assert status.pending_bytes == 0
    assert status.processor_seconds > 0


def test_a_full_disk_stops_the_recording_alone(recording_server: LiveServer, monkeypatch: pytest.MonkeyPatch) -> None:
    client = recording_server.client()
    client.put("p", {"x": np.arange(8.0)})
    claim(client, 0)
    until(lambda: status_of(client).recorded_step_count == 1)
    monkeypatch.setattr(places.shutil, "disk_usage", lambda _path: SimpleNamespace(free=1000))
    assert claim(client, 1).global_indexes == [2, 3]
    until(lambda: not status_of(client).is_recording)
    assert "the disk has only 1000 bytes free" in status_of(client).error
    assert claim(client, 2).global_indexes == [4, 5]
    client.clear_partition("p")
    assert recording_server.app.storage is not None
    assert recording_server.app.storage.engine.stat().used_bytes == 0


def test_a_fault_of_the_recorder_stops_the_recording_alone(
    recording_server: LiveServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise ZeroDivisionError("of the recorder")

    client = recording_server.client()
    client.put("p", {"x": np.arange(8.0)})
    monkeypatch.setattr(recording, "samples_meta", fail)
    assert claim(client, 0).global_indexes == [0, 1]
    assert status_of(client).error == "ZeroDivisionError: of the recorder"
    assert claim(client, 1).global_indexes == [2, 3]


def test_an_object_store_that_does_not_answer_is_no_reason_not_to_start(
    start_server: StartServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fail(*_: Any, **__: Any) -> None:
        raise tq.errors.UnavailableError("the bucket does not answer")

    monkeypatch.setattr(places.Directory, "open", fail)
    server = start_server(record=str(tmp_path / "recording"))
    client = server.client()
    client.put("p", {"x": np.arange(8.0)})
    assert claim(client, 0).global_indexes == [0, 1]
    assert status_of(client).error == "the bucket does not answer"


def test_a_directory_that_cannot_be_used_is(start_server: StartServer, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(tq.errors.DataDirError, match="could not create a recording at"):
        start_server(record=str(tmp_path / "file"))


def test_a_service_that_records_nothing_says_so(server: LiveServer) -> None:
    assert server.client().status(explain=False).service.recording is None


@pytest.mark.parametrize(
    ("flags", "error"),
    [
        ({"record": "r", "role": "controller"}, "record is set, but role is controller; expected role all"),
        ({"record": "r", "role": "storage", "controller": "localhost:1"}, "expected role all"),
        ({"record_steps": 3}, "record_steps is set, but record is not"),
        ({"record_bytes": "1GiB"}, "record_bytes is set, but record is not"),
        ({"record": "r", "record_steps": 0}, "--record-steps: got 0"),
    ],
)
def test_settings_that_do_not_fit(flags: dict[str, Any], error: str) -> None:
    with pytest.raises(tq.errors.InvalidArgumentError, match=error):
        load_settings(flags)
