"""Samples and groups that claims evict, through a real server with both clients."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from live_server import AnyClient, ClientKind, LiveServer, LoopThread

import tq_service as tq
from tq_service.data import StreamingDataLoader, StreamingDataset

ASKS: dict[str, Any] = {"partition_id": "train", "task_name": "t", "data_fields": ["x"], "batch_size": 4, "max_wait": 0}
GROUPS: dict[str, Any] = {**ASKS, "batch_size": 1, "batch_unit": "group", "sampler": "seqlen_balanced"}
FRESH = [("version", ">=", 1)]


def put(client: AnyClient, versions: list[int], group: str | None = None, **arguments: Any) -> tq.BatchMeta:
    count = len(versions)
    named = {} if group is None else {"groups": [group] * count, "group_size": count}
    meta = {"version": np.array(versions), "total_lengths": np.full(count, 5)}
    return client.put("train", {"x": torch.ones(count, 5)}, custom_meta=meta, **named, **arguments)


def rank(batch_index: int, asks: dict[str, Any] = GROUPS, dp_size: int = 1) -> dict[str, Any]:
    return {**asks, "dp_rank": 0, "dp_size": dp_size, "batch_index": batch_index}


@pytest.mark.parametrize("unit", ["sample", "group"])
def test_stale_samples_cannot_make_an_admission_stand_still(client: AnyClient, unit: Any) -> None:
    most = 4 if unit == "sample" else 1
    client.create_partition("train", admissions=[tq.Admission("t", most, unit=unit)])
    put(client, [0] * 4, "old")
    got = client.get_meta(**rank(0), where=FRESH)
    assert got.status == "not_yet"
    with pytest.raises(tq.errors.AdmissionLimitError):
        put(client, [1] * 4, "new", timeout=0.5)
    # With unmatched the claim that waits makes way for the put.
    thread = threading.Timer(0.3, lambda: put(client, [1] * 4, "new", timeout=20.0))
    thread.start()
    try:
        got = client.get_meta(**{**rank(0), "max_wait": 20.0}, where=FRESH, unmatched="clear")
    finally:
        thread.join()
    assert got.status == "batch"
    assert got.global_indexes == [4, 5, 6, 7]
    assert client.lookup_samples("train", groups=["old"])[1] == ["old"]


def test_early_samples_are_kept_for_their_version(client: AnyClient) -> None:
    client.publish_version(12)
    put(client, [12] * 4)
    put(client, [13] * 4)
    now = [("version", ">=", tq.Published()), ("version", "<=", tq.Published())]
    asks = {**ASKS, "where": now, "unmatched": "fail"}
    assert client.get_meta(**rank(0, asks)).global_indexes == [0, 1, 2, 3]
    assert client.get_meta(**rank(1, asks)).status == "not_yet"
    client.publish_version(13)
    assert client.get_meta(**rank(1, asks)).global_indexes == [4, 5, 6, 7]


@pytest.mark.parametrize("incomplete_groups", ["skip", "take"])
def test_a_stale_member_takes_its_group_with_it_or_goes_alone(client: AnyClient, incomplete_groups: str) -> None:
    put(client, [0] * 4, "old")
    put(client, [0, 1, 1, 1], "mixed")
    put(client, [2] * 4, "new")
    asks = {**GROUPS, "sampler_config": {"incomplete_groups": incomplete_groups}, "where": FRESH, "unmatched": "fail"}
    got = [client.get_meta(**rank(index, asks)) for index in range(2)]
    if incomplete_groups == "skip":
        assert got[0].global_indexes == [8, 9, 10, 11]
        assert got[1].status == "not_yet"
    else:
        assert [each.global_indexes for each in got] == [[8, 9, 10, 11], [5, 6, 7]]  # the rest from the eviction on
    description = client.describe_partition("train")
    assert description.failed_count == (8 if incomplete_groups == "skip" else 5)


def test_a_run_goes_on_however_many_rollouts_fail(client: AnyClient) -> None:
    client.create_partition("train", max_bytes=2_000, admissions=[tq.Admission("t", 4, unit="group")])
    asks = {**GROUPS, "batch_size": 2, "where": FRESH, "unmatched": "clear", "least_members": 4}
    delivered: list[str] = []
    names = iter(range(1000))
    for step in range(12):
        for _ in range(3):
            name = f"g{next(names)}"
            meta = put(client, [step % 2] * 4, name, timeout=10.0)
            if step % 3 == 0:
                client.put(meta.select_samples([1]), state="failed")
        got = client.get_meta(**rank(len(delivered) // 2, asks))
        if got.status == "batch":
            delivered += dict.fromkeys(group for group in got.groups if group)
            client.clear_samples(got)
    assert len(delivered) >= 6
    task = client.describe_partition("train").tasks[0]
    assert task.outstanding_count is not None
    assert task.outstanding_count <= 4


def test_ranks_agree_on_what_is_evicted(client: AnyClient) -> None:
    put(client, [1] * 8)
    asks = {**rank(0, ASKS, dp_size=2), "where": FRESH, "unmatched": "fail"}
    client.get_meta(**asks)
    client.get_meta(**{**asks, "dp_rank": 1})
    with pytest.raises(tq.errors.RankDisagreementError, match=r"unmatched of batch_index 0 .* is fail, got clear"):
        client.get_meta(**{**asks, "dp_rank": 1, "unmatched": "clear"})
    with pytest.raises(tq.errors.RankDisagreementError, match=r"unmatched of batch_index 0 .* is fail, got wait"):
        client.get_meta(**{**asks, "dp_rank": 1, "unmatched": "wait"})


@pytest.mark.parametrize(
    ("arguments", "field", "message"),
    [
        ({"unmatched": "drop"}, "unmatched", "unmatched is 'drop'; expected one of wait, fail, clear"),
        ({"least_members": 2}, "least_members", "least_members is 2, but unmatched is 'wait'"),
        ({"least_members": 0}, "least_members", "least_members is 0, expected at least 1"),
        ({"least_members": -1, "unmatched": "fail"}, "least_members", "least_members is -1; expected 0 or more"),
    ],
)
def test_what_cannot_be_evicted_is_refused_and_changes_nothing(
    client: AnyClient, arguments: dict[str, Any], field: str, message: str
) -> None:
    put(client, [0] * 4)
    with pytest.raises(tq.errors.InvalidArgumentError, match=message) as caught:
        client.get_meta(**ASKS, where=FRESH, **arguments)
    assert caught.value.field == field
    assert client.describe_partition("train").live_count == 4


def test_the_loader_evicts_what_its_where_excludes(server: LiveServer, client: AnyClient) -> None:
    put(client, [0] * 4, "old")
    small = put(client, [1] * 4, "small")
    client.put(small.select_samples([0, 1, 2]), state="failed")
    put(client, [1] * 4, "new")
    client.seal_partition("train")
    dataset = StreamingDataset(
        server.address, batch_size=1, batch_unit="group", data_fields=["x"], partition_id="train", task_name="t",
        sampler="seqlen_balanced", sampler_config={"incomplete_groups": "take"}, where=FRESH, unmatched="fail",
        least_members=2, refill=("prompts", "rollout"), max_refills=1,
    )  # fmt: skip
    with StreamingDataLoader(dataset) as loader:
        assert [meta.global_indexes for _, meta in loader] == [[8, 9, 10, 11]]
    assert client.describe_partition("train").failed_count == 8
    assert [unit.refill for unit in client.take_evicted("train", "t").units] == ["unknown", "unknown"]
    with pytest.raises(ValueError, match="unmatched: got 'drop'; expected 'wait', 'fail' or 'clear'"):
        StreamingDataset(
            server.address, batch_size=1, data_fields=["x"], partition_id="p", task_name="t", unmatched="drop"
        )


def test_evictions_outlive_a_restart(tmp_path: Path, loop_thread: LoopThread, client_kind: ClientKind) -> None:
    with LiveServer(loop_thread, data_dir=tmp_path) as server:
        client = server.client(client_kind)
        put(client, [0] * 4, "old")
        put(client, [1] * 4, "new")
        assert client.get_meta(**rank(0), where=FRESH, unmatched="fail").global_indexes == [4, 5, 6, 7]
    with LiveServer(loop_thread, data_dir=tmp_path) as server:
        client = server.client(client_kind)
        assert client.describe_partition("train").failed_count == 4
        assert client.get_meta(**rank(0), where=FRESH, unmatched="fail").global_indexes == [4, 5, 6, 7]


def test_the_reason_of_a_wait_and_the_status_count_what_was_evicted(client: AnyClient) -> None:
    put(client, [0] * 4, "old")
    small = put(client, [1] * 4, "small")
    client.put(small.select_samples([0, 1]), state="failed")
    got = client.get_meta(**GROUPS, where=FRESH, unmatched="clear", least_members=3, explain=True)
    assert got.reason.endswith("; 2 samples or groups were evicted: 1 excluded by where, 1 with too few members left")
    task = client.status().partitions[0].tasks[0]
    assert (task.unmatched_count, task.too_small_count) == (1, 1)


ROLLOUT: dict[str, Any] = {"partition_id": "prompts", "task_name": "rollout", "data_fields": ["text"], "batch_size": 1}


def test_evicted_units_are_listed_after_a_serial(client: AnyClient) -> None:
    client.publish_version(3)
    put(client, [0, 3, 3, 3], "a", keys=["a0", "a1", "a2", "a3"])
    put(client, [0], keys=["single"])
    asks = {**rank(0), "where": [("version", ">=", tq.Published())], "unmatched": "fail"}
    assert client.get_meta(**asks).status == "not_yet"
    found = client.take_evicted("train", "t")
    assert found == tq.types.EvictedUnits(
        units=(
            tq.types.EvictedUnit(
                serial=1, unit="group", group="a", key="a0", reason="unmatched", version=3, sample_count=4
            ),
            tq.types.EvictedUnit(
                serial=2, unit="sample", group=None, key="single", reason="unmatched", version=3, sample_count=1
            ),
        )
    )
    assert client.take_evicted("train", "t", 1).units == found.units[1:]
    assert client.take_evicted("train", "t", after=0, limit=1).units == found.units[:1]
    assert client.take_evicted("train", "t", after=2) == tq.types.EvictedUnits(units=())
    task = client.describe_partition("train").tasks[0]
    assert (task.unmatched_count, task.too_small_count, task.refilled_count) == (2, 0, 0)


def test_evicted_units_of_what_is_not_there_are_errors(client: AnyClient) -> None:
    with pytest.raises(tq.errors.PartitionNotFoundError):
        client.take_evicted("train", "t")
    stale = put(client, [0])
    with pytest.raises(tq.errors.TaskNotFoundError):
        client.take_evicted("train", "t")
    client.get_meta(**ASKS, where=FRESH, unmatched="fail")
    for arguments, field in (({"after": -1}, "after"), ({"limit": 0}, "limit"), ({"limit": 1025}, "limit")):
        with pytest.raises(tq.errors.InvalidArgumentError) as caught:
            client.take_evicted("train", "t", **arguments)
        assert caught.value.field == field
    client.clear_partition("train")
    put(client, [0])
    with pytest.raises(tq.errors.StaleIncarnationError):
        client.take_evicted("train", "t", incarnation=stale.incarnation)


def test_prompts_of_evicted_groups_are_generated_again(client: AnyClient) -> None:
    client.put("prompts", {"text": ["p0", "p1"]}, keys=["p0", "p1"])
    asks = {**GROUPS, "where": FRESH, "unmatched": "clear", "refill": ("prompts", "rollout"), "max_refills": 1}
    client.get_meta(**{**ROLLOUT, "batch_size": 2})
    for expected in ("refilled", "used_up"):
        put(client, [0] * 4, "p1")
        assert client.get_meta(**rank(0, asks)).status == "not_yet"
        assert client.take_evicted("train", "t").units[-1].refill == expected
        got = client.get_meta(**ROLLOUT, max_wait=0)
        assert got.keys == ["p1"] if expected == "refilled" else got.status == "not_yet"
    assert client.describe_partition("prompts").tasks[0].refilled_count == 1
    put(client, [1] * 4, "p0")
    client.get_meta(**rank(0, asks))
    with pytest.raises(tq.errors.RankDisagreementError, match="refill of batch_index 0"):
        client.get_meta(**rank(0, {**asks, "max_refills": 2}))


def test_a_worker_that_has_not_acknowledged_its_prompt_yet_does_not_undo_the_refill(client: AnyClient) -> None:
    client.put("prompts", {"text": ["p0"]}, keys=["p0"])
    leased = client.get_meta(**ROLLOUT, lease=60.0)
    put(client, [0] * 4, "p0")
    client.get_meta(**rank(0), where=FRESH, unmatched="clear", refill=("prompts", "rollout"))
    assert client.get_meta(**ROLLOUT, max_wait=0).status == "not_yet"
    assert client.ack(leased) == 1
    assert client.get_meta(**ROLLOUT, max_wait=0).keys == ["p0"]
    assert client.ack(leased) == 0


@pytest.mark.parametrize(
    ("arguments", "field", "message"),
    [
        ({"refill": ("prompts", "rollout")}, "refill", "refill is rollout of prompts.*, but unmatched is 'wait'"),
        ({"refill": "prompts", "unmatched": "fail"}, "refill", r"refill is 'prompts', expected \(partition_id"),
        ({"refill": ("prompts", ""), "unmatched": "fail"}, "refill", "refill is ''; expected 1 to 512"),
        (
            {"refill": ("prompts", "rollout"), "max_refills": 0, "unmatched": "fail"},
            "max_refills",
            "max_refills is 0, expected at least 1",
        ),
        (
            {"refill": ("prompts", "rollout"), "max_refills": -1, "unmatched": "fail"},
            "max_refills",
            "max_refills is -1; expected 1 or more",
        ),
    ],
)
def test_a_refill_that_cannot_be_is_refused(
    client: AnyClient, arguments: dict[str, Any], field: str, message: str
) -> None:
    put(client, [0] * 4)
    with pytest.raises(tq.errors.InvalidArgumentError, match=message) as caught:
        client.get_meta(**ASKS, where=FRESH, **arguments)
    assert caught.value.field == field
    assert client.describe_partition("train").live_count == 4


@pytest.mark.parametrize("takes_snapshot", [True, False])
def test_evicted_units_and_refills_outlive_a_restart(
    takes_snapshot: bool, tmp_path: Path, loop_thread: LoopThread, client_kind: ClientKind
) -> None:
    settings: dict[str, Any] = {"data_dir": tmp_path / "data", "checkpoint_dir": tmp_path / "checkpoints"}
    asks = {**GROUPS, "where": FRESH, "unmatched": "clear", "refill": ("prompts", "rollout"), "max_refills": 2}
    with LiveServer(loop_thread, **settings) as server:
        client = server.client(client_kind)
        client.put("prompts", {"text": ["p0"]}, keys=["p0"])
        client.get_meta(**ROLLOUT)
        put(client, [0] * 4, "p0")
        client.get_meta(**rank(0, asks))
        known = client.take_evicted("train", "t")
        if takes_snapshot:
            client.checkpoint("one")
            client.restore("one", replace=True)
    with LiveServer(loop_thread, **settings) as server:
        client = server.client(client_kind)
        assert client.take_evicted("train", "t") == known
        for expected in ("refilled", "used_up"):
            client.get_meta(**ROLLOUT)
            put(client, [0] * 4, "p0")
            client.get_meta(**rank(0, asks))
            assert client.take_evicted("train", "t").units[-1].refill == expected


# Samples that callers fail or clear themselves


@pytest.mark.parametrize("verb", ["fail_samples", "clear_samples"])
def test_samples_are_failed_and_cleared_by_the_same_conditions(client: AnyClient, verb: str) -> None:
    call = getattr(client, verb)
    meta = put(client, [0, 1, 2, 3], keys=["a", "b", "c", "d"])
    put(client, [0, 9], "g")
    put(client, [5] * 4)
    assert call(meta.select_samples([0])) == 1
    assert call("train", keys=["b", "nobody"]) == 1
    assert call("train", global_indexes=[2, 2, 99]) == 1
    assert call("train", groups=["g"], where=[("version", "<", 5)]) == 1
    assert call("train", groups=["g", "nobody"]) == 1
    assert call("train", where=[("version", ">=", 5)]) == 4
    assert call("train", where=[("version", ">=", 5)]) == 0
    assert call("train", keys=[], where=[("version", ">=", 0)]) == 0
    assert call("train") == 0
    described = client.describe_partition("train")
    assert (described.live_count, described.failed_count) == (1, 9 if verb == "fail_samples" else 0)
    assert client.get_meta(**{**ASKS, "batch_size": 1}).global_indexes == [3]


@pytest.mark.parametrize("verb", ["fail_samples", "clear_samples"])
def test_only_samples_that_are_left_for_a_task_and_leased_to_nobody_go(client: AnyClient, verb: str) -> None:
    call = getattr(client, verb)
    put(client, [0] * 4)
    with pytest.raises(tq.errors.TaskNotFoundError):
        call("train", task_name="t")
    asks = {**ASKS, "batch_size": 1}
    client.get_meta(**rank(0, asks))
    client.get_meta(**{**asks, "lease": 60.0})
    leased = client.get_meta(**{**asks, "task_name": "other", "batch_size": 3, "lease": 60.0})
    client.ack(leased.select_samples([0, 1]))  # 0 and 1, which t was delivered; 2 stays leased
    assert call("train", where=[("version", "<", 1)], task_name="t") == 1  # 3
    assert call(leased, task_name="t") == 0
    client.ack(leased)
    assert call("train", task_name="t") == 1  # 2
    described = client.describe_partition("train")
    assert (described.live_count, described.failed_count) == (2, 2 if verb == "fail_samples" else 0)


def test_failing_samples_gives_places_back_and_is_checked_against_the_lease(client: AnyClient) -> None:
    client.create_partition("train", admissions=[tq.Admission("t", 4)])
    put(client, [0] * 4)
    assert client.fail_samples("train", where=[("version", "==", 0)]) == 4
    put(client, [1] * 4, timeout=10.0)
    leased = client.get_meta(**ASKS, lease=60.0)
    client.release(leased)
    with pytest.raises(tq.errors.LeaseExpiredError):
        client.fail_samples(leased)
    assert client.describe_partition("train").live_count == 4
    with pytest.raises(tq.errors.PartitionNotFoundError):
        client.fail_samples("nowhere", keys=["a"])
    with pytest.raises(tq.errors.InvalidArgumentError, match="groups and samples are both set"):
        client.fail_samples("train", keys=["a"], groups=["g"])
