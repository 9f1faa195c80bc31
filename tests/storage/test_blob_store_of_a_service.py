"""A service has segments with a data directory, else memory; any store of blobs behind it serves clients."""

import errno
import os

import numpy as np
import pytest

import tq_service as tq
from tq_service.config import ServeSettings
from tq_service.server.app import running
from tq_service.storage.blobs import segments
from tq_service.storage.blobs.memory import MemoryBlobs
from tq_service.storage.blobs.segments import SegmentBlobs


@pytest.mark.parametrize(("has_data_dir", "expected"), [(False, MemoryBlobs), (True, SegmentBlobs)])
async def test_a_service_has_the_store_that_its_durability_needs(tmp_path, has_data_dir, expected):
    directory = {"data_dir": tmp_path / "data"} if has_data_dir else {}
    async with running(ServeSettings(port=0, shared_memory="off", **directory)) as app:
        assert type(app.storage.engine._store) is expected


@pytest.mark.parametrize("row_bytes", [100, 40_000], ids=["inline", "stream"])
def test_clients_put_and_get_where_nothing_is_local(start_server, client_kind, tmp_path, row_bytes):
    server = start_server(data_dir=tmp_path / "data", shared_memory="off")
    client = server.client(client_kind)
    data = {
        "dense": np.arange(20 * row_bytes, dtype=np.uint32).astype(np.uint8).reshape(20, row_bytes),
        "jagged": [np.arange(row * 1000) for row in range(20)],
        "object": [{"row": row} for row in range(20)],
    }
    meta = client.put("train", data)
    assert len(list((tmp_path / "data").rglob("*.seg"))) == 1
    back = client.get_data(meta)
    assert np.array_equal(np.asarray(back["dense"]), data["dense"])
    assert [np.asarray(row).tolist() for row in back["jagged"]] == [row.tolist() for row in data["jagged"]]
    assert list(back["object"]) == data["object"]


def test_a_shortage_of_the_store_is_the_error_of_the_put(start_server, tmp_path, monkeypatch):
    client = start_server(data_dir=tmp_path / "data", shared_memory="off").client("sync", timeout=1.0)

    def fail(fd, data, start):
        raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))

    monkeypatch.setattr(segments.os, "pwrite", fail)
    with pytest.raises(tq.errors.UnavailableError, match="could not store"):
        client.put("train", {"x": np.zeros((20, 10_000))})
