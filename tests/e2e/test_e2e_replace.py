"""A checkpoint takes the place of what is there: all of it in one step, whatever fails or is killed meanwhile."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import random
import shutil
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

import tq_service as tq
from tq_service import cli
from tq_service.durable import state_store
from tq_service.durable.data_dir import DataDir
from tq_service.durable.state_store import StateStore
from tq_service.serving.catalog import Catalog
from tq_service.testing import ServiceProcess
from tq_service.v1 import controller_service_pb2 as pb

ASK = {"data_fields": ["x"], "max_wait": 0.0}


def put(client, partition_id, first, count):
    return client.put(
        partition_id,
        {"x": torch.arange(first, first + count)},
        keys=[f"k{number}" for number in range(first, first + count)],
        custom_meta=[{"version": number} for number in range(first, first + count)],
    )


def fill(client):
    """Make the state that a checkpoint is taken of, and then another one; return the facts of both."""
    put(client, "train", 0, 8)
    client.get_meta(partition_id="train", task_name="t", batch_size=3, **ASK)
    put(client, "kept", 0, 2)
    client.checkpoint("one", metadata={"step": 12})
    then = facts(client)
    put(client, "train", 8, 4)
    client.get_meta(partition_id="train", task_name="t", batch_size=4, lease=600.0, **ASK)
    client.clear_samples("train", keys=["k0", "k1"])
    client.clear_partition("kept")
    put(client, "late", 0, 5)
    return then, facts(client)


def facts(client):
    """Return all that a client can know, but for incarnations."""
    found = {}
    for summary in client.list_partitions():
        name = summary.partition_id
        meta, _ = client.lookup_samples(name)
        found[name] = (
            dataclasses.replace(summary, incarnation=b""),
            meta.keys,
            meta.custom_meta,
            client.get_data(meta)["x"].tolist(),
            client.check_consumption(name, "t", missing_ok=True),
        )
    return found


@pytest.fixture(params=["in memory", "durable"])
def server(request, start_server, tmp_path):
    more = {"data_dir": tmp_path / "data"} if request.param == "durable" else {}
    return start_server(checkpoint_dir=tmp_path / "checkpoints", **more)


@pytest.fixture
def client(client_kind, server):
    return server.client(client_kind)


def test_what_is_there_goes_and_what_was_comes_in_one_step(server, client):
    then, now = fill(client)
    assert then != now
    before = {each.partition_id: each.incarnation for each in client.list_partitions()}
    restored = client.restore("one", replace=True)
    assert restored.metadata == {"step": 12}
    assert (restored.partition_count, restored.sample_count) == (2, 10)
    assert facts(client) == then
    after = {each.partition_id: each.incarnation for each in client.list_partitions()}
    assert after["train"] != before["train"]
    again = client.get_meta(partition_id="train", task_name="t", batch_size=5, **ASK)
    assert again.keys == [f"k{number}" for number in range(3, 8)]
    assert put(client, "train", 8, 4).global_indexes == [8, 9, 10, 11]
    for partition_id in ("train", "kept"):
        client.clear_partition(partition_id)
    assert client.storage_stat().used_bytes == 0


def test_it_is_restored_again_and_again(server, client):
    then, _ = fill(client)
    seen = set()
    for number in range(3):
        client.restore("one", replace=True)
        assert facts(client) == then
        seen |= {each.incarnation for each in client.list_partitions() if each.partition_id == "train"}
        put(client, "train", 100 * (number + 1), 4)
    assert len(seen) == 3
    client.restore("one", replace=True)
    client.clear_partition("train")
    client.clear_partition("kept")
    assert client.storage_stat().used_bytes == 0


def test_what_is_of_the_old_state_is_stale(server, client):
    fill(client)
    meta = client.lookup_samples("train")[0]
    late = client.lookup_samples("late")[0]
    leased = client.get_meta(partition_id="train", task_name="other", batch_size=2, lease=60.0, **ASK)
    client.restore("one", replace=True)
    for call in (
        lambda: client.get_data(meta, data_fields=["x"], missing="skip"),
        lambda: client.put(meta, {"y": torch.zeros(meta.size)}),
        lambda: client.set_custom_meta(meta, [{"version": 1}] * meta.size),
        lambda: client.clear_samples(meta),
        lambda: client.ack(leased),
        lambda: client.extend(leased, 60.0),
        lambda: client.get_meta(partition_id="train", task_name="t", batch_size=1, incarnation=meta.incarnation, **ASK),
    ):
        with pytest.raises(tq.errors.StaleIncarnationError):
            call()
    with pytest.raises(tq.errors.PartitionNotFoundError):
        client.clear_samples(late)
    assert client.release(leased) == 0


def test_calls_that_wait_on_it_end_and_those_for_what_comes_are_served(server, client):
    put(client, "train", 0, 4)
    put(client, "comes", 0, 4)
    client.checkpoint("one")
    client.clear_partition("comes")
    client.create_partition("full", max_bytes=80)
    put(client, "full", 0, 8)
    waits = {"data_fields": ["x"], "batch_size": 4, "max_wait": 30.0}
    others = [server.client(timeout=30.0) for _ in range(3)]
    with ThreadPoolExecutor(3) as pool:
        claim = pool.submit(others[0].get_meta, partition_id="train", task_name="t", **(waits | {"batch_size": 5}))
        comes = pool.submit(others[1].get_meta, partition_id="comes", task_name="t", **waits)
        blocked = pool.submit(put, others[2], "full", 8, 8)
        catalog = server.app.controller.catalog
        while not (catalog._arrivals and catalog.waiting_put_count("full")):
            time.sleep(0.001)
        while catalog.waiting_count(catalog.get("train"), "t") == 0:
            time.sleep(0.001)
        client.restore("one", replace=True)
        with pytest.raises(tq.errors.PartitionClearedError):
            claim.result()
        assert comes.result().size == 4
        with pytest.raises(tq.errors.PartitionClearedError):
            blocked.result()
    assert {each.partition_id for each in client.list_partitions()} == {"train", "comes"}


def test_without_a_word_for_it_nothing_is_replaced(server, client):
    _, now = fill(client)
    with pytest.raises(tq.errors.PreconditionError, match="replace"):
        client.restore("one")
    with pytest.raises(tq.errors.InvalidArgumentError, match="could not read a checkpoint"):
        client.restore("none", replace=True)
    assert facts(client) == now


def test_a_damaged_checkpoint_replaces_nothing(server, client, tmp_path):
    _, now = fill(client)
    file = tmp_path / "checkpoints" / "one" / "checkpoint.tqc"
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    with pytest.raises(tq.errors.SnapshotDamagedError):
        client.restore("one", replace=True)
    assert facts(client) == now
    put(client, "train", 20, 4)


def test_leases_of_what_is_restored_run_out(server, client):
    put(client, "train", 0, 4)
    ask = {"partition_id": "train", "task_name": "t", "data_fields": ["x"]}
    client.get_meta(**ask, batch_size=2, lease=0.3)
    client.checkpoint("one")
    client.restore("one", replace=True)
    again = client.get_meta(**ask, batch_size=4, max_wait=30.0, lease=60.0)
    assert again.delivery_counts == (2, 2, 1, 1)


# What happens in the middle of it, in a durable service


@pytest.fixture
def durable(start_server, tmp_path):
    return start_server(checkpoint_dir=tmp_path / "checkpoints", data_dir=tmp_path / "data")


def images(monkeypatch, tmp_path, stages):
    """Have the data directory copied at many moments of a restore, as a kill would leave it; return their places."""
    taken = []

    def copy(stage):
        image = tmp_path / f"image-{len(taken)}-{stage}"
        shutil.copytree(tmp_path / "data", image, ignore=shutil.ignore_patterns("reserve"))
        taken.append(image)

    def around(owner, name):
        original = getattr(owner, name)

        def wrapped(*arguments, **named):
            copy(f"before {name}")
            result = original(*arguments, **named)
            copy(f"after {name}")
            return result

        monkeypatch.setattr(owner, name, wrapped)

    for owner, name in stages:
        around(owner, name)
    return taken


def test_a_kill_at_any_stage_leaves_what_was_there_or_what_was_restored(durable, start_server, monkeypatch, tmp_path):
    client = durable.client()
    then, now = fill(client)
    stages = [
        (Catalog, "prepare_replacement"),
        (state_store, "write_snapshot"),
        (StateStore, "_write_to_disk"),
        (Catalog, "replace"),
        (Catalog, "end_replacement"),
        (DataDir, "remove_unneeded"),
    ]
    taken = images(monkeypatch, tmp_path, stages)
    client.restore("one", replace=True)
    monkeypatch.undo()
    put(client, "train", 50, 1)
    outcomes = []
    for image in taken:
        other = start_server(data_dir=image, storage_id="test-storage", durability="process")
        found = facts(other.client())
        assert found in (then, now), image.name
        outcomes.append(found == then)
        put(other.client(), "train", 50, 1)
        other.stop()
        again = start_server(data_dir=image, storage_id="test-storage")
        assert "k50" in again.client().lookup_samples("train")[0].keys
    assert outcomes == sorted(outcomes)
    assert set(outcomes) == {False, True}
    assert len(outcomes) >= 12


@pytest.mark.nightly
def test_a_kill_at_a_random_moment_leaves_what_was_there_or_what_was_restored(tmp_path):
    flags = ("--checkpoint-dir", str(tmp_path / "checkpoints"), "--data-dir", str(tmp_path / "data"))
    rng = random.Random(0)
    with ServiceProcess(*flags) as server, tq.Client(server.address, timeout=60) as client:
        then, now = fill(client)
        for _ in range(4):
            doomed = tq.Client(server.address, timeout=20)
            killer = threading.Timer(rng.uniform(0.0, 0.03), lambda doomed=doomed: (server.kill(), doomed.close()))
            killer.start()
            with contextlib.suppress(tq.TqError):
                doomed.restore("one", replace=True, timeout=20)
            killer.join()
            server.start()
            found = facts(client)
            assert found in (then, now)
            if found == then:  # on with what differs from it
                put(client, "train", 8, 4)
                now = facts(client)


def test_changes_wait_while_what_is_restored_is_written(durable, monkeypatch):
    client, other = durable.client(), durable.client(timeout=30.0)
    then, now = fill(client)
    original, seen = StateStore._write_to_disk, []

    def write(store, number, snapshot):
        with pytest.raises(tq.errors.UnavailableError, match="is replacing partitions"):
            put(durable.client(timeout=0.2), "train", 30, 1)
        with pytest.raises(tq.errors.UnavailableError, match="is replacing partitions"):
            durable.client(timeout=0.2).get_meta(partition_id="train", task_name="t", batch_size=1, **ASK)
        seen.append(facts(client))
        seen.append(pool.submit(put, other, "train", 40, 1))
        return original(store, number, snapshot)

    monkeypatch.setattr(StateStore, "_write_to_disk", write)
    with ThreadPoolExecutor(1) as pool:
        client.restore("one", replace=True)
        assert seen[0] == now
        assert seen[1].result().global_indexes == [8]
    assert client.lookup_samples("train")[0].keys == [*then["train"][1], "k40"]


def test_a_full_disk_leaves_what_was_there_and_it_goes_on(durable, start_server, monkeypatch, tmp_path):
    client = durable.client()
    _, now = fill(client)
    ask = {"partition_id": "late", "task_name": "t", "data_fields": ["x"]}
    client.get_meta(**ask, batch_size=2, lease=0.2)
    used_bytes = client.storage_stat().used_bytes

    def full(path, snapshot):
        time.sleep(0.5)  # longer than the lease
        raise OSError(28, "full")

    monkeypatch.setattr(state_store, "write_snapshot", full)
    with pytest.raises(tq.errors.DiskFullError, match="Free some disk space"):
        client.restore("one", replace=True)
    monkeypatch.undo()
    del now["late"]
    assert {name: found for name, found in facts(client).items() if name != "late"} == now
    again = client.get_meta(**ask, batch_size=5, max_wait=30.0, lease=600.0)
    assert again.delivery_counts == (2, 2, 1, 1, 1)
    assert client.storage_stat().used_bytes == used_bytes
    put(client, "train", 60, 1)
    durable.stop()
    after = start_server(data_dir=tmp_path / "data").client()
    assert after.lookup_samples("train")[0].keys[-1] == "k60"


def test_storage_services_apart_give_the_old_bytes_back(start_server, tmp_path):
    controller = start_server(role="controller", checkpoint_dir=tmp_path / "checkpoints", data_dir=tmp_path / "data")
    storages = [
        start_server(role="storage", controller=controller.address, storage_id=f"s{number}") for number in range(2)
    ]
    client = controller.client()
    while controller.app.controller.storages.count < 2:
        time.sleep(0.01)
    then, _ = fill(client)
    client.restore("one", replace=True)
    assert facts(client) == then
    for partition_id in ("train", "kept"):
        client.clear_partition(partition_id)
    deadline = time.monotonic() + 60
    while sum(client.storage_stat(each.address).used_bytes for each in storages):
        assert time.monotonic() < deadline
        time.sleep(0.01)


# Metadata


def test_a_checkpoint_of_a_namespace_is_that_of_its_run(server, client):
    run, other = (server.client(client.kind, namespace=name) for name in ("run-7", "run-8"))
    put(client, "train", 0, 3)
    put(other, "train", 0, 4)
    then, _ = fill(run)
    untouched = {name: found for name, found in facts(client).items() if not name.startswith("run-7/")}
    incarnations = {each.partition_id: each.incarnation for each in client.list_partitions()}
    assert run.restore("one", replace=True).metadata == {"step": 12}
    assert facts(run) == then
    now = {each.partition_id: each.incarnation for each in client.list_partitions()}
    assert {name: now[name] for name in untouched} == {name: incarnations[name] for name in untouched}
    assert {name: found for name, found in facts(client).items() if not name.startswith("run-7/")} == untouched
    put(other, "train", 4, 1)
    assert run.put("train", {"x": torch.zeros(1, dtype=torch.int64)}, keys=["new"]).size == 1


def test_a_checkpoint_comes_back_in_another_namespace_or_none(server, client):
    run, other = (server.client(client.kind, namespace=name) for name in ("run-7", "run-8"))
    then, _ = fill(run)
    assert other.restore("one").partition_count == 2
    assert facts(other) == then
    with pytest.raises(tq.errors.PreconditionError, match="has 2 partitions whose names begin with 'run-8/'"):
        other.restore("one")
    there = {each.partition_id: each.incarnation for each in client.list_partitions()}
    assert len(set(there.values())) == len(there) == 4
    other.clear_partition("train")
    assert len(facts(run)["train"][1]) == 10
    client.restore("one", replace=True)
    assert facts(client) == then
    with pytest.raises(tq.errors.InvalidArgumentError, match="512 printable characters"):
        server.client(client.kind, namespace="n" * 510).restore("one")
    assert facts(client) == then


def test_a_namespace_outlives_a_restart_beside_what_was_restored(durable, start_server, tmp_path):
    run, other = (durable.client(namespace=name) for name in ("run-7", "run-8"))
    put(other, "train", 0, 4)
    then, _ = fill(run)
    run.restore("one", replace=True)
    put(other, "late", 0, 1)
    beside = facts(other)
    durable.stop()
    again = start_server(checkpoint_dir=tmp_path / "checkpoints", data_dir=tmp_path / "data")
    assert facts(again.client(namespace="run-7")) == then
    assert facts(again.client(namespace="run-8")) == beside


def test_metadata_comes_back_with_a_restore_and_in_lists(server, client):
    put(client, "train", 0, 4)
    metadata = {"step": 2**60, "loss": 0.25, "tags": ["a", None, True], "text": "ä\n", "nested": {"x": []}}
    client.checkpoint("runs/one", metadata=metadata)
    client.checkpoint("runs/two")
    client.checkpoint("other")
    listed = client.list_checkpoints()
    assert [each.name for each in listed] == ["other", "runs/one", "runs/two"]
    assert [each.metadata for each in listed] == [{}, metadata, {}]
    assert [(each.partition_count, each.sample_count, each.problem) for each in listed] == [(1, 4, "")] * 3
    assert all(abs(each.written_at - time.time()) < 600 for each in listed)
    assert all(each.file_bytes > 100 for each in listed)
    assert [each.name for each in client.list_checkpoints("runs/")] == ["runs/one", "runs/two"]
    assert client.restore("runs/one", replace=True).metadata == metadata
    assert client.restore("other", replace=True).metadata == {}


@pytest.mark.parametrize(
    "metadata", [{"x": float("nan")}, {"x": {1}}, {"x": {1: 2}}, {1: 2}, {"x": "y" * 262_144}, {"x": b"y"}]
)
def test_metadata_that_json_cannot_have_is_refused(client, metadata):
    with pytest.raises(tq.errors.InvalidArgumentError) as raised:
        client.checkpoint("one", metadata=metadata)
    assert raised.value.field == "metadata"
    assert client.list_checkpoints() == []


@pytest.mark.parametrize("text", ["[]", "{", "1", '{"x": NaN}', "{" * 100_000, '{"x": "' + "y" * 262_144 + '"}'])
def test_the_service_refuses_metadata_that_is_no_object(server, text):
    with pytest.raises(Exception, match="metadata"):
        server.controller.Checkpoint(pb.CheckpointRequest(name="one", metadata=text))
    assert server.client().list_checkpoints() == []


def test_lists_come_in_pages_and_say_what_is_damaged(server, client, tmp_path, monkeypatch):
    put(client, "train", 0, 1)
    large = {"text": "y" * 200_000}
    for number in range(12):
        client.checkpoint(f"c{number:02}", metadata=large)
    (tmp_path / "checkpoints" / "c03" / "checkpoint.tqc").write_bytes(b"tqrecs02 and no more")
    (tmp_path / "checkpoints" / "c05" / "checkpoint.tqc").unlink()
    (tmp_path / "checkpoints" / "no name").mkdir()
    (tmp_path / "checkpoints" / "no name" / "checkpoint.tqc").write_bytes(b"x")
    (tmp_path / "checkpoints" / "link").symlink_to(tmp_path / "checkpoints" / "c01")
    monkeypatch.setattr("tq_service.serving.lookup._MOST_NAMES_OF_A_PAGE", 5)
    listed = client.list_checkpoints()
    assert [each.name for each in listed] == [f"c{number:02}" for number in range(12) if number != 5]
    damaged = listed[3]
    assert (damaged.partition_count, damaged.metadata, damaged.written_at) == (0, {}, 0.0)
    assert "damaged" in damaged.problem
    assert [each.metadata for each in listed if each.name != "c03"] == [large] * 10


def test_a_service_without_a_directory_has_no_list(start_server):
    with pytest.raises(tq.errors.PreconditionError, match="checkpoint_dir"):
        start_server().client().list_checkpoints()


def test_the_command_line_shows_and_replaces(server, tmp_path, capsys):
    def run(*arguments):
        cli.app([*arguments, "--address", server.address], standalone_mode=False)
        return capsys.readouterr().out

    client = server.client()
    put(client, "train", 0, 4)
    run("checkpoint", "write", "one", "--metadata", '{"step": 3}')
    assert '{"step": 3}' in run("checkpoint", "ls")
    (listed,) = json.loads(run("checkpoint", "ls", "--json"))
    assert (listed["name"], listed["metadata"], listed["sample_count"]) == ("one", {"step": 3}, 4)
    put(client, "train", 4, 4)
    assert "4 samples of 1 partitions" in run("checkpoint", "restore", "one", "--replace")
    assert client.list_partitions()[0].present_count == 4
