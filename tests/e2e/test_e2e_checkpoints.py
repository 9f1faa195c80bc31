"""Checkpoints of a running service: whole or not at all, and restored to whatever storage services there are."""

from __future__ import annotations

import dataclasses
import errno
import threading
import time
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest
import torch
from live_server import LiveServer

import tq_service as tq
from tq_service.journal import codec
from tq_service.journal.files import RecordWriter, read_records
from tq_service.testing import ServiceProcess

PARTITION = "train@0"
FIELDS = ["ids", "image", "text", "grid"]


def put(client, first, count, **arguments):
    data = {
        "ids": [torch.arange(first + row, first + row + 1 + row % 5) for row in range(count)],
        "image": torch.arange(first * 4, (first + count) * 4, dtype=torch.bfloat16).reshape(count, 2, 2),
        "grid": torch.full((count, 2, 3 if first < 24 else 4), first),  # dense at first, and then jagged
        "text": [{"answer": f"a{first + row}", "scores": np.arange(row % 3)} for row in range(count)],
    }
    return client.put(
        PARTITION,
        data,
        keys=[f"k{first + row}" for row in range(count)],
        groups=[f"g{(first + row) // 4}" for row in range(count)],
        group_size=4,
        custom_meta=[
            {
                "total_lengths": 1 + row % 5,
                "tag": f"t{row % 2}",
                "score": row / 2,
                "any": [row, None, [row], {"a": None}, tq.JSON_NULL][row % 5],
            }
            for row in range(count)
        ],
        **arguments,
    )


def claim(client, batch_index, dp_rank=0):
    return client.get_meta(
        partition_id=PARTITION, task_name="train", data_fields=FIELDS, batch_size=4, dp_rank=dp_rank, dp_size=2,
        batch_index=batch_index, sampler="seqlen_balanced", max_wait=10.0,
    )  # fmt: skip


def take(client):
    return client.get_meta(partition_id=PARTITION, task_name="reward", data_fields=["text"], batch_size=3)


def facts(client):
    """Return what a client can know: samples with all they have, claims, counts."""
    meta, _ = client.lookup_samples(PARTITION)
    replays = [claim(client, batch_index, dp_rank) for batch_index in range(2) for dp_rank in range(2)]
    return {
        "description": _description(client.describe_partition(PARTITION)),
        "samples": (meta.global_indexes, meta.keys, meta.groups, meta.custom_meta, meta.incarnation),
        "replays": [(each.global_indexes, each.steps, each.epoch) for each in replays],
        "bytes": [_plain(client.get_data(each)) for each in replays],
        "consumed": [client.check_consumption(partition_id=PARTITION, task_name=name) for name in ("train", "reward")],
    }


def _description(description):
    """Return what is the same in another process; of a put of which a part was freed, the bytes are a guess."""
    live = {"delivered_per_second": 0.0, "recent_batches": ()}
    tasks = tuple(dataclasses.replace(task, **live) for task in description.tasks)
    return dataclasses.replace(description, used_bytes=0, revision=None, tasks=tasks)


def _plain(batch):
    ids = [row.tolist() for row in batch["ids"].unbind()]
    text = [(row["answer"], row["scores"].tolist()) for row in map(_object, list(batch["text"]))]
    grid = [row.tolist() for row in batch["grid"].unbind()]
    return ids, batch["image"].tolist(), text, grid


def _object(row):
    return getattr(row, "data", row)


def lived_in(client):
    """Put, claim, overwrite, fail and clear; leave a partition that has a bit of everything."""
    for first in range(0, 48, 8):
        put(client, first, 8)
    for batch_index in range(2):
        for dp_rank in range(2):
            claim(client, batch_index, dp_rank)
    take(client)
    client.put(PARTITION, {"image": torch.zeros(3, 2, 2, dtype=torch.bfloat16)},
               keys=["k1", "k9", "k30"], key_mode="existing")  # fmt: skip
    client.put(PARTITION, {"late": torch.arange(6)}, keys=[f"k{row}" for row in range(20, 26)],
               key_mode="existing")  # fmt: skip
    client.put(PARTITION, {"forgotten": torch.arange(2)}, keys=["k40", "k43"], key_mode="existing")
    client.clear_samples(PARTITION, keys=["k40", "k41", "k42", "k43"])


@pytest.fixture
def cluster(loop_thread, tmp_path):
    """Start a controller with so many storage services, 0 for one that has its own; its checkpoints are in tmp_path."""
    with ExitStack() as stack:

        def start(storage_count, **flags):
            if not storage_count:
                return stack.enter_context(LiveServer(loop_thread, checkpoint_dir=tmp_path, **flags))
            controller = stack.enter_context(LiveServer(loop_thread, role="controller", checkpoint_dir=tmp_path))
            for number in range(storage_count):
                stack.enter_context(
                    LiveServer(loop_thread, role="storage", controller=controller.address,
                               storage_id=f"s{number}-{storage_count}", **flags)
                )  # fmt: skip
            wait_for(lambda: storage_count_of(controller) == storage_count)
            return controller

        yield start


def storage_count_of(server):
    return server.app.controller.storages.count


def wait_for(condition):
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.parametrize(("before", "after"), [(0, 0), (2, 1), (1, 3), (2, 0)])
def test_everything_comes_back_wherever_there_is_space(cluster, tmp_path, before, after):
    client = cluster(before).client()
    lived_in(client)
    copy = client.checkpoint("made/here")
    expected = facts(client)
    next_batch = claim(client, 2).global_indexes, take(client).global_indexes
    assert (copy.partition_count, copy.sample_count) == (1, 44)
    assert [path.name for path in (tmp_path / "made" / "here").iterdir()] == ["checkpoint.tqc"]
    client = cluster(after).client()
    restored = client.restore("made/here")
    assert (restored.sample_count, restored.value_bytes) == (copy.sample_count, copy.value_bytes)
    assert facts(client) == expected
    assert (claim(client, 2).global_indexes, take(client).global_indexes) == next_batch
    late = client.get_data(PARTITION, keys=["k22", "k20"], data_fields=["late"])["late"]
    assert late.tolist() == [2, 0]
    client.clear_partition(PARTITION)
    put(client, 0, 8)


def test_a_restored_service_frees_what_is_cleared(cluster, tmp_path):
    server = cluster(0)
    client = server.client()
    put(client, 0, 16)
    client.checkpoint("one")
    other = cluster(0)
    client = other.client()
    client.restore("one")
    assert client.storage_stat().used_bytes > 0
    client.clear_samples(PARTITION, keys=[f"k{row}" for row in range(16)])
    assert client.storage_stat().used_bytes == 0


def test_a_checkpoint_under_load_is_one_moment_of_the_history(cluster, tmp_path):
    server = cluster(0)
    driver, other = server.client(), server.client()
    history, stop = [(0, 0, 0)], threading.Event()
    put(driver, 0, 8)
    history.append((8, 0, 0))

    def drive():
        step = inserted = claimed = cleared = 0
        inserted = 8
        while not stop.is_set():
            step += 1
            match step % 3:
                case 0:
                    put(driver, inserted, 8)
                    inserted += 8
                case 1:
                    driver.get_meta(partition_id=PARTITION, task_name="one", data_fields=FIELDS, batch_size=4,
                                    dp_rank=0, dp_size=1, batch_index=claimed, max_wait=10.0)  # fmt: skip
                    claimed += 1
                case 2:
                    driver.clear_samples(PARTITION, keys=[f"k{cleared}", f"k{cleared + 1}"])
                    cleared += 2
            history.append((inserted, claimed, cleared))

    thread = threading.Thread(target=drive)
    thread.start()
    try:
        for number in range(4):
            wait_for(lambda: len(history) > 10 * (number + 1))  # noqa: B023
            earliest = len(history) - 1
            other.checkpoint(str(number))
            latest = len(history) + 1
            wait_for(lambda: len(history) >= latest)  # noqa: B023
            check_moment(cluster, str(number), history[earliest:latest])
    finally:
        stop.set()
        thread.join()


def check_moment(cluster, name, moments):
    client = cluster(0).client()
    client.restore(name)
    total = client.describe_partition(PARTITION)
    meta = client.lookup_samples(PARTITION)[0]
    inserted = meta.global_indexes[-1] + 1
    cleared = meta.global_indexes[0]
    assert meta.global_indexes == list(range(cleared, inserted))
    claimed = next((task.consumed_count for task in total.tasks if task.task_name == "one"), 0) // 4
    assert (inserted, claimed, cleared) in moments
    batch = client.get_data(meta, data_fields=FIELDS)
    assert [row[0].item() for row in batch["ids"].unbind()] == meta.global_indexes


def test_only_an_empty_service_takes_a_checkpoint(cluster, tmp_path):
    client = cluster(0).client()
    put(client, 0, 8)
    client.checkpoint("one")
    with pytest.raises(tq.errors.PreconditionError, match="has 1 partitions"):
        client.restore("one")
    assert client.lookup_samples(PARTITION)[0].size == 8


NO_NAMES = [
    "", ".", "..", "/", "//", "/etc/tq", "../out", "a/../../out", "a/..", "./a", "a/./b", "a//b", "/a", "a/", "~",
    "~root/a", "a\\..\\b", "C:\\a", "a b", "a\0b", "\0", "a\nb", "a:b", "$HOME", "ä", "\u2025/a",
    ".hidden", "a/.hidden", "-rf", "a" * 201, "a/" * 100 + "b", "a" * 1_000_000,
]  # fmt: skip


@pytest.fixture
def guarded(start_server, tmp_path):
    """A client of a service whose checkpoints are in tmp_path/inside, beside tmp_path/outside, where none may get."""
    for name in ("inside", "outside"):
        (tmp_path / name).mkdir()
    client = start_server(checkpoint_dir=tmp_path / "inside").client()
    put(client, 0, 8)
    return client


def refused(client, name):
    """Ask for a checkpoint and a restore, both of which are refused; return what is said of the first."""
    with pytest.raises(tq.errors.InvalidArgumentError) as restored:
        client.restore(name)
    with pytest.raises(tq.errors.InvalidArgumentError) as written:
        client.checkpoint(name)
    assert restored.value.field == written.value.field == "name"
    return str(written.value)


@pytest.mark.parametrize("name", NO_NAMES, ids=lambda name: ascii(name[:20]))
def test_what_is_no_name_is_refused_and_nothing_is_written(guarded, tmp_path, name):
    assert f"({len(name)} characters); expected 1 to 200" in refused(guarded, name)
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["inside", "outside"]
    assert guarded.lookup_samples(PARTITION)[0].size == 8


@pytest.mark.parametrize("link", ["here", "here/there", "a/b/c"])
@pytest.mark.parametrize("target", ["outside", "outside/missing", ".", "inside-too", "/tmp"])
def test_no_symlink_leads_out_of_the_directory(guarded, tmp_path, link, target):
    (tmp_path / "inside-too").mkdir()  # begins like the directory, and is another
    path = tmp_path / "inside" / link
    path.parent.mkdir(parents=True, exist_ok=True)
    path.symlink_to(tmp_path / target)
    before = sorted(tmp_path.rglob("*"))
    for name in (link, f"{link}/further"):
        assert "symlink that points outside the service's checkpoint_dir" in refused(guarded, name)
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize("file", ["checkpoint.tqc", "checkpoint.tqc.partial"])
@pytest.mark.parametrize("exists", [True, False])
def test_no_file_of_a_checkpoint_is_a_symlink(guarded, tmp_path, file, exists):
    guarded.checkpoint("good")
    target = tmp_path / "outside" / "file"
    if exists:
        target.write_bytes((tmp_path / "inside" / "good" / "checkpoint.tqc").read_bytes())
    (tmp_path / "inside" / "one").mkdir()
    (tmp_path / "inside" / "one" / file).symlink_to(target)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    assert f"its {file} is a symlink" in refused(guarded, "one")
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


def test_links_in_a_circle_and_files_in_the_way_are_refused(guarded, tmp_path):
    (tmp_path / "inside" / "circle").symlink_to(tmp_path / "inside" / "circle")
    (tmp_path / "inside" / "file").touch()
    for name in ("circle", "file", "file/one"):
        with pytest.raises(tq.errors.InvalidArgumentError, match="could not write a checkpoint to"):
            guarded.checkpoint(name)


def test_links_that_stay_inside_and_one_to_the_directory_itself_are_the_operators(start_server, tmp_path):
    (tmp_path / "disk").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "disk")
    server = start_server(checkpoint_dir=tmp_path / "link")
    client = server.client()
    put(client, 0, 8)
    assert client.checkpoint("nightly/2026-11-21").name == "nightly/2026-11-21"
    (tmp_path / "disk" / "latest").symlink_to("nightly/2026-11-21")
    assert (tmp_path / "disk" / "nightly" / "2026-11-21" / "checkpoint.tqc").exists()
    other = start_server(checkpoint_dir=tmp_path / "disk").client()
    assert other.restore("latest").sample_count == 8


def test_without_a_directory_for_checkpoints_both_calls_name_the_setting(start_server):
    client = start_server().client()
    for call in (client.checkpoint, client.restore):
        with pytest.raises(tq.errors.PreconditionError, match=r"TQ_CHECKPOINT_DIR.*data_dir"):
            call("one")


def test_the_default_is_a_directory_of_the_data_directory(start_server, tmp_path):
    with start_server(data_dir=tmp_path / "data") as server:
        put(server.client(), 0, 8)
        server.client().checkpoint("one")
    assert (tmp_path / "data" / "checkpoints" / "one" / "checkpoint.tqc").exists()
    assert start_server(data_dir=tmp_path / "data").client().lookup_samples(PARTITION)[0].size == 8
    other = start_server(checkpoint_dir=tmp_path / "data" / "checkpoints").client()
    assert other.restore("one").sample_count == 8


def test_damaged_files_are_refused_and_nothing_changes(cluster, tmp_path):
    client = cluster(0).client()
    put(client, 0, 8)
    client.checkpoint("one")
    whole = (tmp_path / "one" / "checkpoint.tqc").read_bytes()
    client = cluster(0).client()
    flips = [(at, bytes((whole[at] ^ 0x40,))) for at in range(0, len(whole), max(1, len(whole) // 60))]
    for at, byte in flips:
        (tmp_path / "one" / "checkpoint.tqc").write_bytes(whole[:at] + byte + whole[at + 1 :])
        with pytest.raises(tq.errors.SnapshotDamagedError, match=r"checkpoint\.tqc is damaged at byte"):
            client.restore("one")
    for size in (0, 5, len(whole) // 2, len(whole) - 1):
        (tmp_path / "one" / "checkpoint.tqc").write_bytes(whole[:size])
        with pytest.raises(tq.errors.SnapshotDamagedError):
            client.restore("one")
    (tmp_path / "one" / "checkpoint.tqc").unlink()
    with pytest.raises(tq.errors.InvalidArgumentError, match="could not read a checkpoint"):
        client.restore("one")
    assert client.list_partitions() == []
    assert client.storage_stat().put_count == 0
    (tmp_path / "one" / "checkpoint.tqc").write_bytes(whole)
    assert client.restore("one").sample_count == 8


def test_without_space_nothing_is_restored(cluster, tmp_path):
    client = cluster(0).client()
    client.put(PARTITION, {"x": torch.zeros(8, 1 << 18)})
    client.checkpoint("one")
    client = cluster(0, max_bytes=6 << 20).client()
    with pytest.raises(tq.errors.QuotaExceededError):
        client.restore("one")
    assert client.list_partitions() == []
    assert client.storage_stat().used_bytes == 0
    put(client, 0, 8)


def test_a_full_disk_leaves_the_checkpoint_before_it(cluster, tmp_path, monkeypatch):
    client = cluster(0).client()
    put(client, 0, 8)
    client.checkpoint("one")
    whole = (tmp_path / "one" / "checkpoint.tqc").read_bytes()
    put(client, 8, 8)

    def fail(self):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(RecordWriter, "commit", fail)
    with pytest.raises(tq.errors.DiskFullError, match="has no space"):
        client.checkpoint("one")
    assert [path.name for path in (tmp_path / "one").iterdir()] == ["checkpoint.tqc"]
    assert (tmp_path / "one" / "checkpoint.tqc").read_bytes() == whole


def with_a_column_more(path):
    """Have a checkpoint as a newer version writes it, in which samples have a priority."""
    records = [found.data for found in read_records(path)]
    with RecordWriter(path) as writer:
        for data in records:
            if b"PartitionHeader" in data:
                kind, header = codec.unpack(data)
                rows = header["tables"]["rows"]
                rows["columns"] += ("priority",)
                writer.write(codec.encode((kind, header)))
                part = {"table": "rows", "column": "priority", "values": np.full(rows["size"], 7, np.int32)}
                writer.write(codec.encode(("ColumnPart", part)))
            else:
                writer.write(data)


def test_a_checkpoint_of_a_newer_version_is_refused_before_anything_of_it_is_stored(loop_thread, tmp_path, monkeypatch):
    with LiveServer(loop_thread, checkpoint_dir=tmp_path) as server:
        put(server.client(), 0, 8)
        server.client().checkpoint("newer")
    with LiveServer(loop_thread, checkpoint_dir=tmp_path) as server:
        placed = []
        monkeypatch.setattr(server.app.controller.storages, "place", placed.append)
        with_a_column_more(tmp_path / "newer" / "checkpoint.tqc")
        with pytest.raises(tq.errors.NewerVersionError, match=r"'train@0' was written by a newer version.*'priority'"):
            server.client().restore("newer")
        assert placed == []
        assert server.client().list_partitions() == []


def test_lost_bytes_are_named_and_the_checkpoint_before_them_stays(cluster, loop_thread, tmp_path):
    controller = LiveServer(loop_thread, role="controller", checkpoint_dir=tmp_path)
    with controller:
        storage = LiveServer(loop_thread, role="storage", controller=controller.address, storage_id="s")
        client = controller.client()
        wait_for(lambda: storage_count_of(controller) == 1)
        put(client, 0, 8)
        client.checkpoint("one")
        whole = (tmp_path / "one" / "checkpoint.tqc").read_bytes()
        storage.__exit__()
        with LiveServer(loop_thread, role="storage", controller=controller.address, storage_id="s"):
            storages, before = controller.app.controller.storages, storage.app.storage.engine.boot_id
            wait_for(lambda: storages._storages["s"].boot_id != before)
            with pytest.raises(tq.errors.DataLossError, match="samples 0, 1, 2, 3, 4 and 3 more"):
                client.checkpoint("one")
        assert (tmp_path / "one" / "checkpoint.tqc").read_bytes() == whole


def test_a_killed_checkpoint_leaves_the_one_before_it(tmp_path):
    directory = tmp_path / "one"
    flags = ("--checkpoint-dir", str(tmp_path))
    with ServiceProcess(*flags) as server, tq.Client(server.address, timeout=60) as client:
        client.put("small", {"x": torch.arange(8)})
        client.checkpoint("one")
        for number in range(4):
            client.put("large", {"x": torch.full((8, 1 << 20), number)})
        with pytest.raises(tq.TqError), tq.Client(server.address, timeout=20) as doomed:
            killer = threading.Thread(target=_kill_when_under_way, args=(server, directory, doomed))
            killer.start()
            try:
                doomed.checkpoint("one", timeout=20)
            finally:
                killer.join()
    assert {path.name for path in directory.iterdir()} == {"checkpoint.tqc", "checkpoint.tqc.partial"}
    with ServiceProcess(*flags) as server, tq.Client(server.address, timeout=60) as client:
        assert client.restore("one").sample_count == 8
        client.checkpoint("one")
    assert {path.name for path in directory.iterdir()} == {"checkpoint.tqc"}


def _kill_when_under_way(server, directory: Path, client: tq.Client) -> None:
    partial = directory / "checkpoint.tqc.partial"
    wait_for(lambda: partial.exists() and partial.stat().st_size > 1 << 20)
    server.kill()
    client.close()  # else its call asks again and again until its time is over


def test_what_a_durable_service_restored_outlives_it(tmp_path):
    where = ("--checkpoint-dir", str(tmp_path / "checkpoints"))
    with ServiceProcess(*where) as server, tq.Client(server.address, timeout=60) as client:
        lived_in(client)
        client.checkpoint("one")
        expected = facts(client)
    flags = (*where, "--data-dir", str(tmp_path / "data"), "--durability", "process")
    with ServiceProcess(*flags) as server, tq.Client(server.address, timeout=60) as client:
        client.restore("one")
        server.restart()
        assert facts(client) == expected


def test_a_lease_runs_out_in_the_restored_service_though_nobody_asks(start_server, tmp_path):
    before = start_server(checkpoint_dir=tmp_path).client()
    before.put("train", {"x": torch.arange(4)})
    before.get_meta(partition_id="train", task_name="t", data_fields=["x"], batch_size=4, lease=0.5)
    before.checkpoint("one")
    after = start_server(checkpoint_dir=tmp_path).client()
    after.restore("one")
    for _ in range(600):
        if after.describe_partition("train").tasks[0].leased_count == 0:
            break
        time.sleep(0.05)
    assert after.describe_partition("train").tasks[0].leased_count == 0
    again = after.get_meta(partition_id="train", task_name="t", data_fields=["x"], batch_size=4, lease=60.0)
    assert (again.global_indexes, again.delivery_counts) == ([0, 1, 2, 3], (2, 2, 2, 2))
