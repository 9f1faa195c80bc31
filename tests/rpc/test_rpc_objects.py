"""Rows of object columns begin with the version of their encoding; others are refused when they are put."""

from __future__ import annotations

from typing import Any

import pytest
from live_server import StartServer

import tq_service as tq
from tq_service.wire import objects, shared_memory


@pytest.mark.parametrize("is_large", [False, True], ids=["small", "large"])
@pytest.mark.parametrize("sharing", ["off", "on"])
def test_objects_of_an_unknown_version_are_refused_and_leave_nothing(
    start_server: StartServer, tmp_path: Any, monkeypatch: pytest.MonkeyPatch, sharing: str, is_large: bool
) -> None:
    if sharing == "on" and not shared_memory.is_supported():
        pytest.skip("sealed memfds are there on Linux only")
    live = start_server(shared_memory=sharing, shared_memory_dir=str(tmp_path))
    client = live.client()
    rows = ["a text" * (200_000 if is_large else 1)] * 4
    with monkeypatch.context() as patch:
        patch.setattr(objects, "_VERSION_BYTE", b"\x02")  # of the client: the service knows the number
        with pytest.raises(tq.InvalidArgumentError, match="row 0 of field 'text' begins with byte 0x02") as caught:
            client.put({"text": rows}, partition_id="train")
    assert (caught.value.metadata["row"], caught.value.metadata["field_name"]) == ("0", "text")
    stat = client.storage_stat()
    assert (stat.used_bytes, stat.put_count, stat.uncommitted_put_count) == (0, 0, 0)
    assert client.list_partitions() == []
    meta = client.put({"text": rows}, partition_id="train")
    assert list(client.get_data(meta)["text"]) == rows
