"""Recorded runs, replayed: every rank gets bit for bit what it got, whatever became of the service meanwhile."""

from __future__ import annotations

import json
import random
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from live_server import AnyClient, ClientKind, LoopThread

import tq_service as tq
from tq_service.testing import COMMAND, ListeningProcess, ServiceProcess

torch = pytest.importorskip("torch")

DP_SIZE = 2
Got = dict[tuple[str, int, int], tuple[tq.BatchMeta, Any]]


@contextmanager
def replayed(recording: Path, *options: str) -> Iterator[str]:
    """Serve a copy of a recording, as on another machine; yield the address."""
    copy = recording.with_name(f"{recording.name}-elsewhere")
    shutil.copytree(recording, copy, dirs_exist_ok=True)
    with ListeningProcess([*COMMAND, "replay", str(copy), *options]) as replay:
        yield replay.address


def bits(value: Any) -> Any:
    """Return what compares equal for values that have the same type, shape, layout and bytes."""
    if isinstance(value, torch.Tensor):
        if value.is_nested:
            return "nested", value.dtype, value.layout, [bits(row) for row in value.unbind()]
        return value.dtype, tuple(value.shape), value.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
    if isinstance(value, Mapping) or hasattr(value, "keys"):
        return {name: bits(value[name]) for name in value.keys()}  # noqa: SIM118  (a TensorDict iterates its rows)
    if isinstance(value, list | tuple):
        return [bits(each) for each in value]
    if hasattr(value, "tolist"):
        return value.tolist()
    return value


def facts(meta: tq.BatchMeta) -> dict[str, Any]:
    """Return all that a rank learns of its batch, but where the bytes are."""
    names = (
        "status", "partition_id", "incarnation", "epoch", "global_indexes", "keys", "groups", "rollouts", "custom_meta",
        "data_fields", "steps", "micro_batches", "totals", "size",
    )  # fmt: skip
    dropped = sorted(set(meta.handled_indexes.tolist()) - set(meta.global_indexes))
    return {name: getattr(meta, name) for name in names} | {"dropped": dropped, "fields": list(meta.fields)}


def assert_same(got: Got, claim: Callable[[str, int, int], tuple[tq.BatchMeta, Any]]) -> None:
    assert got
    for which, (meta, data) in got.items():
        again, data_again = claim(*which)
        assert facts(again) == facts(meta), which
        assert bits(data_again) == bits(data), which


def put_varied(client: Any, partition_id: str, seed: int = 0) -> None:
    """Put samples of all kinds: alone and many at once, with and without keys, groups, metadata, ragged and grown."""
    draw = random.Random(seed)
    generator = torch.Generator().manual_seed(seed)
    for put in range(12):
        count = draw.choice([1, 2, 4, 8])
        columns = {
            "ids": [torch.randint(0, 9, (draw.randint(1, 9),), generator=generator) for _ in range(count)],
            "image": torch.rand((count, 3, draw.choice([4, 96]), 32), generator=generator),
            "mask": torch.rand((count, 5), generator=generator) > 0.5,
            "half": torch.rand((count, 4), generator=generator).to(torch.bfloat16),
            "text": [f"text {put} {row} é" for row in range(count)],
            "tool": [{"name": "search", "at": [put, row], "t": torch.arange(row + 1)} for row in range(count)],
        }
        meta = [{"total_lengths": draw.randint(3, 40), "version": 5} for _ in range(count)]
        if put % 3 == 0:
            meta[0] |= {"tag": f"t{put}", "rest": {"a": [1, None]}}
        named: dict[str, Any] = {"groups": [f"g{put}"] * count, "group_size": count} if put % 2 else {}
        if put % 4 == 1:
            named["keys"] = [f"{put}-{row}" for row in range(count)]
        client.put(partition_id, columns, custom_meta=meta, **named)
    client.seal_partition(partition_id)


SAMPLERS: dict[str, dict[str, Any]] = {
    "sequential": {"micro_batch_size": 3},
    "seqlen_balanced": {"micro_batch_size": 2, "totals": ["version"]},
    "packed": {"sampler_config": {"pack_max_length": 36, "optimizer_steps": 2, "overlong": "drop"}},
}
FIELDS = ["text", "ids", "image", "mask", "half", "tool"]


def claim_from(client: Any, task: str, index: int, rank: int, partition_id: str = "train") -> tuple[tq.BatchMeta, Any]:
    meta = client.get_meta(
        partition_id=partition_id, task_name=task, data_fields=FIELDS, batch_size=5, dp_rank=rank, dp_size=DP_SIZE,
        batch_index=index, sampler=task, max_wait=30.0, **SAMPLERS[task],
    )  # fmt: skip
    return meta, client.get_data(meta) if meta.status == "batch" else None


def train(client: Any, partition_id: str = "train") -> Got:
    """Claim all batches of all tasks and ranks, with their data."""
    got: Got = {}
    for task in SAMPLERS:
        index, is_over = 0, False
        while not is_over:
            for rank in range(DP_SIZE):
                meta, data = claim_from(client, task, index, rank, partition_id)
                is_over = meta.status == "end"
                if not is_over:
                    got[task, index, rank] = meta, data
            index += 1
    return got


def test_what_groups_share_and_parts_of_rows_are_replayed(tmp_path: Path) -> None:
    recording = tmp_path / "recording"
    read: dict[str, Any] = {"slices": {"tokens": (1, 3)}, "padded": ["tokens"]}

    def claim(client: tq.Client, rank: int) -> tuple[tq.BatchMeta, Any]:
        meta = client.get_meta(
            partition_id="train", task_name="train", data_fields=["tokens", "pixels"], batch_size=4, dp_rank=rank,
            dp_size=DP_SIZE, batch_index=0, max_wait=30.0,
        )  # fmt: skip
        return meta, [client.get_data(meta, **each) for each in ({}, {"expand": False}, read)]

    with ServiceProcess("--record", str(recording)) as service, tq.Client(service.address) as client:
        client.create_partition("train", fields=[tq.FieldSpec("pixels", scope="group")])
        client.put_groups("train", {"pixels": torch.rand(4, 3, 50)}, groups=["a", "b", "c", "d"])
        tokens = [torch.arange(length) for length in (3, 1, 4, 1, 5, 9, 2, 6)]
        groups = [name for name in "abcd" for _ in range(2)]
        client.put("train", {"tokens": tokens}, groups=groups, group_size=2)
        got = [claim(client, rank) for rank in range(DP_SIZE)]
        client.clear_partition("train")
    with replayed(recording) as address, tq.Client(address) as client:
        for rank, (meta, data) in enumerate(got):
            again, data_again = claim(client, rank)
            assert facts(again) == facts(meta)
            assert bits(data_again) == bits(data)
            assert data[1]["pixels"].shape[0] == 2


@pytest.mark.parametrize("has_data_dir", [False, True], ids=["memory", "data_dir"])
def test_each_rank_gets_what_it_got_although_all_was_cleared(
    tmp_path: Path, loop_thread: LoopThread, client_kind: ClientKind, has_data_dir: bool
) -> None:
    recording = tmp_path / "recording"
    flags = ("--record", str(recording))
    with (
        ServiceProcess(*flags, data_dir=tmp_path / "data" if has_data_dir else None) as service,
        tq.Client(service.address) as client,
    ):
        client.publish_version(5)
        put_varied(client, "train")
        got = train(client)
        client.clear_partition("train")
        put_varied(client, "other", seed=1)  # in what is free again
        written = client.status(explain=False)
        assert written.service.recording is not None
        assert written.service.recording.is_recording
    with replayed(recording) as address:
        replay = AnyClient(client_kind, address, loop_thread)
        assert_same(got, lambda task, index, rank: claim_from(replay, task, index, rank))
        last = max(index for task, index, _ in got if task == "sequential")
        assert claim_from(replay, "sequential", last + 1, 0)[0].status == "end"
        assert replay.get_version() == 5
        assert [each.partition_id for each in replay.list_partitions()] == ["train"]
        meta, data = got["packed", 0, 1]
        found = replay.get_data("train", global_indexes=meta.global_indexes[:1], data_fields=["text"])
        assert found["text"] == [data["text"][0]]
        replay.close()


def test_a_loader_of_a_notebook_reads_one_step(tmp_path: Path) -> None:
    from tq_service.data import StreamingDataLoader, StreamingDataset

    def batches(address: str, **options: Any) -> list[Any]:
        dataset = StreamingDataset(
            address, batch_size=5, micro_batch_size=2, data_fields=["ids", "image"], partition_id="train",
            task_name="sequential", dp_rank=1, dp_size=DP_SIZE, **options,
        )  # fmt: skip
        return [(bits(dict(batch)), meta.global_indexes) for batch, meta in StreamingDataLoader(dataset, num_workers=0)]

    recording = tmp_path / "recording"
    with ServiceProcess("--record", str(recording)) as service, tq.Client(service.address) as client:
        put_varied(client, "train")
        got = batches(service.address)
    with replayed(recording, "--task", "sequential") as address:
        assert batches(address) == got
    with replayed(recording, "--task", "sequential", "--step", "1") as address:
        assert batches(address, start_batch_index=1) == got[3:6]
        with pytest.raises(tq.errors.BatchForgottenError, match=r"contains 1 of task .*start loaders at batch 1"):
            batches(address)


def test_a_replay_refuses_what_it_has_not(tmp_path: Path) -> None:
    recording = tmp_path / "recording"
    with ServiceProcess("--record", str(recording)) as service, tq.Client(service.address) as client:
        put_varied(client, "train")
        claim_from(client, "sequential", 0, 0)
    with replayed(recording) as address, tq.Client(address) as client:
        meta, _ = claim_from(client, "sequential", 0, 0)
        claim: dict[str, Any] = {"partition_id": "train", "task_name": "sequential", "batch_size": 5}
        changes: list[Callable[[], Any]] = [
            lambda: client.put("train", {"text": ["a"]}),
            lambda: client.put(meta, {"text": ["a"] * meta.size}),
            lambda: client.set_custom_meta(meta, {"a": [1] * meta.size}),
            lambda: client.clear_partition("train"),
            lambda: client.clear_samples(meta),
            lambda: client.reset_consumption("train", "sequential"),
            lambda: client.advance("train", "sequential", trained=0),
            lambda: client.publish_version(6),
            lambda: client.create_partition("new"),
            lambda: client.checkpoint("a"),
        ]
        for change in changes:
            with pytest.raises(
                tq.errors.PreconditionError, match="is not available, because this service only replays"
            ) as caught:
                change()
            assert caught.value.reason == "READ_ONLY"
        with pytest.raises(tq.errors.InvalidArgumentError, match="the request comes from a queue worker"):
            client.get_meta(data_fields=["text"], **claim)
        ranked = {"dp_rank": 0, "batch_index": 0, "data_fields": ["text"]}
        with pytest.raises(tq.errors.RankDisagreementError, match=r"planned for 2 ranks\. Set dp_size to 2"):
            client.get_meta(dp_size=3, **ranked, **claim)
        with pytest.raises(
            tq.errors.FieldNotFoundError, match=r"field 'texts' was not recorded; .* have the fields half, ids"
        ):
            client.get_meta(dp_size=2, **ranked | {"data_fields": ["texts"]}, **claim)
        with pytest.raises(
            tq.errors.TaskNotFoundError, match="it contains 0 of task 'sequential' in partition 'train'"
        ):
            client.get_meta(dp_size=2, **ranked, **claim | {"task_name": "other"})
        with pytest.raises(tq.errors.PartitionNotFoundError, match="this replay has no partition 'test'"):
            client.get_meta(dp_size=2, **ranked, **claim | {"partition_id": "test"})
        assert facts(claim_from(client, "sequential", 0, 0)[0]) == facts(meta)


def test_kills_cost_no_step_of_a_durable_service(tmp_path: Path) -> None:
    """It is killed within batches, between a plan and its writing, and starts with puts that were not looked at yet."""
    recording, got = tmp_path / "recording", Got()
    draw = random.Random(7)
    flags = ("--durability", "process", "--record", str(recording))
    with (
        ServiceProcess(*flags, data_dir=tmp_path / "data") as service,
        tq.Client(service.address, timeout=60.0) as client,
    ):
        put_varied(client, "train")
        for index in range(3):
            for rank in range(DP_SIZE):
                got["sequential", index, rank] = claim_from(client, "sequential", index, rank)
                if rank == index % DP_SIZE:
                    time.sleep(draw.choice([0.0, 0.002, 0.02]))
                    service.restart()
        client.clear_partition("train")
        put_varied(client, "other")
    with replayed(recording) as address, tq.Client(address) as client:
        assert_same(got, lambda task, index, rank: claim_from(client, task, index, rank))


@pytest.mark.nightly
def test_kills_leave_whole_steps_of_a_service_in_memory(tmp_path: Path) -> None:
    """What was not written is left out; what is there is whole, and the next incarnation is recorded too."""
    recording, runs = tmp_path / "recording", list[Got]()
    with (
        ServiceProcess("--record", str(recording)) as service,
        tq.Client(service.address, timeout=60.0) as client,
    ):
        for seed in range(2):
            put_varied(client, "train", seed)
            runs.append(train(client))
            service.restart()
    listed = subprocess.run(
        [*COMMAND, "replay", str(recording), "--list", "--json"], capture_output=True, check=True, text=True
    )
    document = json.loads(listed.stdout)
    assert document["damaged"] == {}
    steps = {(each["incarnation"], each["task_name"], each["batch_index"]) for each in document["steps"]}
    for got in runs:
        incarnation = next(iter(got.values()))[0].incarnation.hex()
        recorded = {which: each for which, each in got.items() if (incarnation, *which[:2]) in steps}
        if recorded:
            with replayed(recording, "--incarnation", incarnation[:12]) as address, tq.Client(address) as client:
                assert_same(recorded, lambda task, index, rank: claim_from(client, task, index, rank))
    assert steps


def test_damaged_bytes_are_told_and_not_served(tmp_path: Path) -> None:
    recording = tmp_path / "recording"
    with ServiceProcess("--record", str(recording)) as service, tq.Client(service.address) as client:
        put_varied(client, "train")
        claim_from(client, "sequential", 0, 0)
        claim_from(client, "sequential", 1, 0)
    first, *_ = sorted((recording / "puts").iterdir(), key=lambda path: -path.stat().st_size)
    data = bytearray(first.read_bytes())
    data[len(data) // 2] ^= 1
    first.write_bytes(data)
    refused = 0
    with replayed(recording) as address, tq.Client(address) as client:
        for index in (0, 1):
            for rank in range(DP_SIZE):
                try:
                    claim_from(client, "sequential", index, rank)
                except tq.errors.DataLossError as error:
                    refused += 1
                    assert "file is damaged" in str(error)
    assert refused


def test_steps_are_compared(tmp_path: Path) -> None:
    recording = tmp_path / "recording"
    with ServiceProcess("--record", str(recording)) as service, tq.Client(service.address) as client:
        client.publish_version(5)
        put_varied(client, "train")
        meta, _ = claim_from(client, "seqlen_balanced", 0, 0)
        client.publish_version(7)
        claim_from(client, "seqlen_balanced", 1, 0)
        claim_from(client, "sequential", 0, 0)

    def diff(*arguments: str) -> str:
        command = [*COMMAND, "diff", str(recording), *arguments]
        return subprocess.run(command, capture_output=True, check=True, text=True).stdout

    found = json.loads(diff("0", "1", "--task", "seqlen_balanced", "--json"))
    assert found["first"]["sample_count"] == 5 * DP_SIZE
    assert found["second"]["sample_count"] > 0
    assert found["common_count"] == 0
    assert found["policies"] == {"default": [5, 7]}
    assert (found["first"]["staleness"]["mean"], found["second"]["staleness"]["mean"]) == (0, 2)
    assert found["first"]["tokens_per_rank"][0] == sum(row["total_lengths"] for row in meta.custom_meta)
    text = diff("0", "1", "--task", "seqlen_balanced")
    assert "policy default: 5 -> 7" in text
    assert "heaviest rank above mean" in text
    wrong = subprocess.run([*COMMAND, "diff", str(recording), "0", "0"], capture_output=True, check=False, text=True)
    assert wrong.returncode == 1
    assert "step 0 matches 2 steps" in wrong.stderr
