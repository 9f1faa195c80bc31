"""A file of each kind that is written to disk, as it was once made, is read by this version too.

Where one of these fails, the format of a kind has changed: it needs a reader for what is on disks already, and a file
of its own beside the old one. Until the first release, `python tests/durable/files/make.py` regenerates the files.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

sys.path.append(str(Path(__file__).parent.parent / "core"))
sys.path.append(str(Path(__file__).parent.parent / "storage"))
sys.path.append(str(Path(__file__).parent / "files"))

from digest import digest
from engine_driver import read, runs
from live_server import StartServer
from make import CHANGES, DATA, recover_puts

import tq_service as tq
from tq_service.durable.data_dir import DataDir
from tq_service.durable.state_store import StateStore, Stream
from tq_service.journal.files import FileBackend
from tq_service.journal.log import Log
from tq_service.samplers import PlanRunner
from tq_service.serving.catalog import Catalog
from tq_service.storage.engine import StorageEngine
from tq_service.storage.index.put_table import PutDropped, PutStored, decode_put

FILES = Path(__file__).parent / "files"


@pytest.fixture
def directory(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    """A data dir with the files of a kind."""
    return Path(shutil.copytree(FILES / request.param, tmp_path / request.param))


def without_times(found: dict[str, Any]) -> dict[str, Any]:
    """Leave out when claims were released or expired."""
    for task in found["tasks"].values():
        task["ended"] = sorted((request_id, is_expired) for request_id, (_, is_expired) in task["ended"])
    return found


def check_catalog(catalog: Catalog) -> None:
    expected = Catalog(PlanRunner())
    for change in CHANGES:
        expected.commit(change)
    assert sorted(catalog.names()) == ["shared", "train"]
    partition, shared = catalog.get("train"), catalog.get("shared")
    assert without_times(digest(shared)) == without_times(digest(expected.get("shared")))
    assert shared.cells.lengths("pixels", np.arange(3)).tolist() == [4, 4, 0]
    assert without_times(digest(partition)) == without_times(digest(expected.get("train")))
    assert sorted(partition.tasks["other"].batches) == [0, 1]
    assert partition.tasks["other"].batches[1].plan.consumed.tolist() == [8]
    assert list(partition.tasks["other"].claims) == [b"3" * 16, b"4" * 16]
    assert partition.tasks["other"].names == {"a": b"4" * 16}
    assert list(partition.tasks["other"].past_names) == ["b"]
    assert partition.tasks["other"].leased_count == 2
    assert partition.sealed
    keys = partition.key[partition.table.present_positions()].tolist()
    assert keys == [*(f"k{row}" for row in (1, 2, 3, 4, 5, 7, 8, 9)), "s0", "s1", *[None] * 5]
    assert sorted(partition.groups.rollout_slot_of) == ["a", "b", "c", "d", "e"]
    assert partition.cells.lengths("tokens", partition.key_index.positions_of(["s0", "s1"])).tolist() == [1, 5]
    assert len(list(catalog.answers.snapshot())) == 1


def check_puts(engine: StorageEngine) -> None:
    assert engine.stat().put_count == 2
    whole = read(engine, [1], runs(list(DATA), (0, 0, 4)))
    assert np.array_equal(whole["dense"], DATA["dense"])
    assert [row.tolist() for row in whole["jagged"]] == [row.tolist() for row in DATA["jagged"]]
    assert list(whole["object"]) == DATA["object"]
    left = read(engine, [2], runs(["dense", "jagged"], (0, 3, 1)))
    assert left["dense"].tolist() == [[9, 10, 11]]
    assert left["jagged"][0].tolist() == [0, 1, 2]
    with pytest.raises(tq.errors.PutNotFoundError):
        read(engine, [2], runs(["dense"], (0, 0, 1)))
    with pytest.raises(tq.errors.PutNotFoundError):
        read(engine, [2], runs(["object"], (0, 3, 1)))


@pytest.mark.parametrize("directory", ["changes"], indirect=True)
async def test_a_segment_of_changes(directory: Path) -> None:
    store, catalog = StateStore.open(directory, sync=False), Catalog(PlanRunner())
    recovered = store.recover(catalog=catalog)
    assert recovered.record_count == len(CHANGES)
    check_catalog(catalog)
    await store.close()


@pytest.mark.parametrize("directory", ["puts"], indirect=True)
async def test_a_segment_of_puts(directory: Path) -> None:
    data_dir = DataDir.open(directory)
    log = Log(FileBackend(directory, sync=False))
    kinds = {type(decode_put(record.data)[0]) for record in log.read(0) if record.stream == Stream.PUTS}
    assert kinds == {PutStored, PutDropped}
    log.close()
    data_dir.close()
    store = StateStore.open(directory, sync=False)
    engine, _ = recover_puts(store)
    check_puts(engine)
    await store.close()


@pytest.mark.parametrize("directory", ["snapshot"], indirect=True)
async def test_a_snapshot(directory: Path) -> None:
    store, catalog = StateStore.open(directory, sync=False), Catalog(PlanRunner())
    engine, recovered = recover_puts(store, catalog)
    assert recovered.record_count == 0
    check_catalog(catalog)
    check_puts(engine)
    await store.close()


@pytest.mark.parametrize("directory", ["checkpoint"], indirect=True)
def test_a_checkpoint(directory: Path, start_server: StartServer) -> None:
    server = start_server(checkpoint_dir=directory.parent)
    client = server.client()
    client.restore("checkpoint")
    meta, _ = client.lookup_samples("train")
    assert meta.keys == list("abcd")
    assert meta.groups == ["g", "g", "h", "h"]
    assert [each["total_lengths"] for each in meta.custom_meta] == [0, 1, 2, 3]
    data = client.get_data("train", keys=list("abcd"))
    assert np.array_equal(data["dense"].numpy(), DATA["dense"])
    assert [row.tolist() for row in data["jagged"].unbind()] == [row.tolist() for row in DATA["jagged"]]
    assert [getattr(row, "data", row) for row in data["object"]] == DATA["object"]
    again = client.get_meta(
        partition_id="train", task_name="t", data_fields=["dense"], batch_size=2, dp_rank=0, dp_size=1, batch_index=0
    )
    assert again.global_indexes == [0, 1]
    assert client.check_consumption(partition_id="train", task_name="t").consumed_count == 2
