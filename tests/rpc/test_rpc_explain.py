"""Why claims wait: each cause is told by code, counts and a sentence, and only where it is asked for."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
from live_server import AnyClient, LiveServer, LoopThread, StartServer

import tq_service as tq
from tq_service.client import transport
from tq_service.data import StreamingDataset
from tq_service.results import NotReady, WaitCode, WaitReason

ASKED: dict[str, Any] = {"task_name": "t", "data_fields": ["x"], "batch_size": 4, "max_wait": 0.0}
RANK = {"dp_rank": 0, "dp_size": 1, "batch_index": 0}


def why(client: AnyClient, partition_id: str = "p", **asked: Any) -> WaitReason:
    """Return why a claim has nothing yet."""
    meta = client.get_meta(partition_id=partition_id, **{**ASKED, "explain": True, **asked})
    assert meta.status == "not_yet"
    assert meta.waiting_for is not None
    assert meta.reason == meta.waiting_for.text
    return meta.waiting_for


def lacks(reason: WaitReason) -> set[tuple[str, str, int]]:
    return {(each.kind, each.name, each.sample_count) for each in reason.not_ready}


def test_nothing_is_explained_that_nobody_asks_for(client: AnyClient) -> None:
    client.put("p", {"x": np.arange(2)})
    meta = client.get_meta(partition_id="p", **ASKED | {"max_wait": 0.05})
    assert (meta.status, meta.waiting_for, meta.reason) == ("not_yet", None, "")
    assert client.explain("p") == []
    assert client.explain("not there") == []


def test_a_partition_that_is_not_there(client: AnyClient) -> None:
    client.create_partition("train")
    reason = why(client, "trian")
    assert reason.code == WaitCode.PARTITION_NOT_FOUND
    assert reason.text == "there is no partition 'trian'; known: 'train'"
    assert (reason.task_name, reason.data_fields) == ("t", ("x",))


def test_no_samples_and_no_field(client: AnyClient) -> None:
    client.create_partition("p")
    assert why(client).code == WaitCode.NO_SAMPLES
    client.put("p", {"x": np.arange(8)})
    reason = why(client, data_fields=["x", "rewrd"])
    assert (reason.code, reason.left_count, reason.ready_count) == (WaitCode.FIELD_NEVER_PUT, 8, 0)
    assert reason.text == "no sample of partition 'p' has field 'rewrd'; known: 'x'"
    assert lacks(reason) == {("field", "rewrd", 8)}


def test_what_samples_lack_is_counted(client: AnyClient) -> None:
    meta = client.put("p", {"x": np.arange(6)}, custom_meta=[{"v": row} for row in range(6)])
    client.put(meta.select_samples([0, 1]), {"y": np.arange(2)})
    client.put("p", {"x": np.arange(3), "y": np.arange(3)}, state="held")
    client.put("p", {"x": np.arange(1), "y": np.arange(1)}, state="failed")
    reason = why(client, data_fields=["x", "y"], where=[("v", ">=", 1)])
    assert reason.code == WaitCode.TOO_FEW_READY
    assert (reason.left_count, reason.ready_count, reason.needed_count, reason.sealed) == (9, 1, 4, False)
    assert lacks(reason) == {("held", "", 3), ("field", "y", 4), ("where", "v", 1)}
    assert "1 samples are ready for task 't' of partition 'p', but 4 are needed" in reason.text
    assert "4 lack field 'y'" in reason.text


def test_lengths_that_a_sampler_needs(client: AnyClient) -> None:
    client.put("p", {"x": np.arange(3)}, custom_meta=[{"total_lengths": 3}, {"total_lengths": 4}, {}])
    reason = why(client, batch_size=3, sampler="seqlen_balanced", **RANK)
    assert (reason.code, reason.ready_count, lacks(reason)) == (
        WaitCode.TOO_FEW_READY,
        2,
        {("length", "total_lengths", 1)},
    )


def test_leases_and_what_is_consumed(client: AnyClient) -> None:
    client.put("p", {"x": np.arange(8)})
    leased = client.get_meta(partition_id="p", **ASKED, lease=30.0)
    reason = why(client, batch_size=8)
    (lease,) = reason.not_ready
    assert (reason.code, reason.ready_count, lease.kind, lease.sample_count) == ("TOO_FEW_READY", 4, "leased", 4)
    assert lease.ends_in_seconds is not None
    assert 20 < lease.ends_in_seconds <= 30
    assert client.get_meta(partition_id="p", **ASKED).status == "batch"
    reason = why(client, batch_size=1)
    assert (reason.code, reason.left_count, reason.ready_count) == (WaitCode.ALL_CONSUMED, 0, 0)
    assert "4 of them under a lease, and the partition is open; put more, or seal the partition" in reason.text
    client.seal_partition("p")
    sealed = why(client, batch_size=1)
    assert (sealed.code, sealed.sealed) == (WaitCode.ALL_CONSUMED, True)
    assert "open" not in sealed.text
    client.ack(leased)
    assert client.get_meta(partition_id="p", **ASKED).status == "end"


@pytest.mark.parametrize("unit", ["group", "sample"])
def test_groups_that_are_not_whole(client: AnyClient, unit: str) -> None:
    client.put("p", {"x": np.arange(7)}, groups=[*"aaaa", *"bbb"], group_size=4)
    options: dict[str, Any] = {"batch_size": 2, "batch_unit": "group"}
    if unit == "sample":
        options = {"batch_size": 6, "sampler": "grpo_group_n", "sampler_config": {"n_samples_per_prompt": 2}}
    reason = why(client, **options, **RANK)
    assert (reason.code, reason.counts_groups) == (WaitCode.GROUPS_INCOMPLETE, unit == "group")
    assert (reason.ready_count, reason.needed_count) == ((1, 2) if unit == "group" else (4, 6))
    (group,) = reason.not_ready
    assert (group.kind, group.sample_count) == ("group", 3)
    assert group.example == "group 'b' has 3 members, 3 of them ready, 4 expected"


@pytest.mark.parametrize("sampler", ["seqlen_balanced", "sequential"])
def test_groups_that_declared_no_size_are_named(client: AnyClient, sampler: str) -> None:
    names = [*"aabbccdd"]
    lengths = [{"total_lengths": 1}] * 8
    client.put("p", {"x": np.arange(8)}, groups=names, custom_meta=lengths)
    unit = "group" if sampler == "sequential" else "sample"
    asks: dict[str, Any] = {"batch_size": 2, "batch_unit": unit, "sampler": sampler, **RANK}
    reason = why(client, **asks)
    assert (reason.code, reason.ready_count) == (WaitCode.GROUPS_INCOMPLETE, 0)
    assert lacks(reason) == {("group", "", 8)}
    assert (
        "groups 'a', 'b', 'c' and 1 others lack a declared size, so more members may be put; put them with a "
        "group_size, close the groups, or seal the partition" in reason.text
    )
    client.close_groups("p", [*"abcd"])
    assert client.get_meta(partition_id="p", task_name="t", data_fields=["x"], max_wait=0, **asks).status == "batch"


def test_ranks_that_are_ahead_need_all_batches_before(client: AnyClient) -> None:
    client.put("p", {"x": np.arange(8)})
    reason = why(client, dp_rank=1, dp_size=2, batch_index=2)  # batch 0 is planned, batches 1 and 2 take 8 each
    assert (reason.code, reason.ready_count, reason.needed_count) == (WaitCode.ALL_CONSUMED, 0, 16)
    client.put("p", {"x": np.arange(9)})
    reason = why(client, dp_rank=1, dp_size=2, batch_index=2)
    assert (reason.code, reason.ready_count, reason.needed_count) == (WaitCode.TOO_FEW_READY, 1, 8)


def test_producers_that_wait_are_told(client: AnyClient, server: LiveServer, loop_thread: LoopThread) -> None:
    client.create_partition("p", admissions=[tq.Admission("t", 2)])
    client.put("p", {"x": np.arange(2)})
    with ThreadPoolExecutor(1) as threads, tq.Client(server.address) as producer:
        put = threads.submit(producer.put, "p", {"x": np.arange(2)})
        while client.describe_partition("p").waiting_put_count == 0:
            assert not put.done()
        reason = why(client)
        assert (reason.code, reason.waiting_put_count) == (WaitCode.TOO_FEW_READY, 1)
        assert "1 puts wait for capacity" in reason.text
        assert "samples outstanding for task" in reason.put_waits_for
        assert client.get_meta(partition_id="p", **ASKED | {"batch_size": 2}).status == "batch"
        put.result(20)


@contextmanager
def waiting(server: LiveServer, count: int, **asked: Any) -> Iterator[None]:
    """Have claims wait for as long as the `with` lasts."""
    with ThreadPoolExecutor(count) as threads, tq.Client(server.address, timeout=30.0) as client:
        claims = [threads.submit(client.get_meta, **ASKED | asked | {"max_wait": 20.0}) for _ in range(count)]
        try:
            while sum(reason.waiting_count for reason in client.explain(asked["partition_id"])) < count:
                assert not any(claim.done() for claim in claims)
                time.sleep(0.01)
            yield
        finally:
            client.put(asked["partition_id"], {"x": np.arange(4 * count)})
        assert {claim.result(20).status for claim in claims} == {"batch"}


def test_all_claims_that_wait_are_explained(client: AnyClient, server: LiveServer) -> None:
    with waiting(server, 3, partition_id="p"):
        (reason,) = client.explain("p")
        assert (reason.code, reason.waiting_count) == (WaitCode.PARTITION_NOT_FOUND, 3)
    client.clear_partition("p")
    client.put("p", {"x": np.arange(1)})
    with waiting(server, 2, partition_id="p", task_name="a"), waiting(server, 1, partition_id="p", task_name="b"):
        reasons = {reason.task_name: reason for reason in client.explain("p")}
        assert {name: reason.waiting_count for name, reason in reasons.items()} == {"a": 2, "b": 1}
        assert {(reason.code, reason.ready_count) for reason in reasons.values()} == {(WaitCode.TOO_FEW_READY, 1)}
        assert [reason.task_name for reason in client.explain("p", "b")] == ["b"]
        assert client.explain("p", "c") == []


def test_callers_hear_of_a_wait_that_lasts(client: AnyClient, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transport, "_FIRST_REPORT_SECONDS", 0.6)
    monkeypatch.setattr(transport, "_NEXT_REPORT_SECONDS", 1.0)
    heard: list[WaitReason] = []

    def hear(reason: WaitReason) -> None:
        heard.append(reason)
        if len(heard) == 2:
            raise KeyError("enough")

    with pytest.raises(KeyError, match="enough"):
        client.get_meta(partition_id="p", **ASKED | {"max_wait": 20.0}, on_wait=hear)
    assert [reason.code for reason in heard] == [WaitCode.PARTITION_NOT_FOUND] * 2


@pytest.mark.parametrize(("asked", "is_logged"), [({}, True), ({"explain": False}, False), ({"max_wait": 0.6}, False)])
def test_a_wait_that_goes_on_is_logged(
    client: AnyClient,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    asked: dict[str, Any],
    is_logged: bool,
) -> None:
    monkeypatch.setattr(transport, "_FIRST_REPORT_SECONDS", 0.6)
    meta = client.get_meta(partition_id="p", **ASKED | {"max_wait": 1.5} | asked)
    assert meta.status == "not_yet"
    assert ("there is no partition 'p'" in caplog.text) is is_logged
    assert ("there is no partition 'p'" in (meta.reason or "")) is (asked.get("explain") is None)


@pytest.mark.parametrize("has_callback", [False, True])
def test_a_loader_says_why_it_waits(
    server: LiveServer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, has_callback: bool
) -> None:
    monkeypatch.setattr(transport, "_FIRST_REPORT_SECONDS", 0.6)
    told = threading.Event()
    reasons: list[WaitReason] = []

    def tell(reason: WaitReason) -> None:
        reasons.append(reason)
        told.set()

    dataset = StreamingDataset(
        server.address, batch_size=4, data_fields=["x"], partition_id="p", task_name="t", max_wait=0.2,
        on_wait=tell if has_callback else None,
    )  # fmt: skip
    with ThreadPoolExecutor(1) as threads, caplog.at_level(logging.WARNING):
        batch = threads.submit(next, iter(dataset))
        while not (told.is_set() or "waiting for a batch" in caplog.text):
            assert not batch.done()
            time.sleep(0.01)
        with tq.Client(server.address) as client:
            client.put("p", {"x": np.arange(4)})
        assert batch.result(20)[0]["x"].tolist() == [0, 1, 2, 3]
    assert [reason.code for reason in reasons] == ["PARTITION_NOT_FOUND"] * has_callback
    assert ("there is no partition 'p'" in caplog.text) is not has_callback


def test_large_partitions_are_looked_at_in_slices(start_server: StartServer) -> None:
    """What stands in several slices is counted once, and calls that ask alike share one pass."""
    server = start_server()
    client = server.client()
    meta = client.put("p", {"x": np.arange(150_000, dtype=np.uint8)})
    client.put(meta.select_samples(range(80_000, 150_000)), {"y": np.zeros(70_000)})
    reason = why(client, data_fields=["x", "y"], batch_size=100_000)
    assert (reason.left_count, reason.ready_count) == (150_000, 70_000)
    assert reason.not_ready == (NotReady(kind="field", name="y", sample_count=80_000),)


def test_what_is_lost_with_its_group_is_called_so_counted_at_once_and_cleared_by_one_call(client: AnyClient) -> None:
    limit = tq.Admission("t", 4)
    client.create_partition("p", admissions=[limit], max_bytes=1000)
    asked = {"batch_unit": "group", "batch_size": 1, "sampler": "seqlen_balanced"}
    group: dict[str, Any] = {"group_size": 4, "custom_meta": [{"total_lengths": 1}] * 4}
    meta = client.put("p", {"x": np.arange(4)}, groups=["a"] * 4, **group)
    client.put(meta.select_samples([0]), state="failed")
    reason = why(client, **asked)
    assert (reason.code, reason.left_count, lacks(reason)) == (WaitCode.ALL_CONSUMED, 0, {("lost", "", 3)})
    assert "3 are lost, since their groups lost a member" in reason.text
    assert "not ready" not in reason.text
    status = client.check_consumption("p", "t")
    assert (status.consumed_count, status.skipped_count) == (0, 4)
    client.put("p", {"x": np.arange(4)}, groups=["b"] * 4, timeout=10.0, **group)  # which the limit lets in
    with pytest.raises(tq.errors.InvalidArgumentError, match="skipped_by is 't', but samples or groups are also set"):
        client.clear_samples("p", groups=["a"], skipped_by="t")
    with pytest.raises(tq.errors.TaskNotFoundError):
        client.clear_samples("p", skipped_by="u")
    assert client.clear_samples("p", skipped_by="t") == 4
    description = client.describe_partition("p")
    assert (description.live_count, description.failed_count, description.group_count) == (4, 0, 1)
    assert client.clear_samples("p", skipped_by="t") == 0


def test_a_put_that_waits_for_what_where_rules_out_says_so(client: AnyClient) -> None:
    limit = tq.Admission("t", 4)
    client.create_partition("p", admissions=[limit])
    client.put("p", {"x": np.arange(4)}, custom_meta=[{"version": 0}] * 4)
    asked = {**ASKED, "max_wait": 20.0, "where": [("version", ">=", 1)]}
    with ThreadPoolExecutor() as threads:
        waiting = threads.submit(client.get_meta, partition_id="p", **asked)
        newer: dict[str, Any] = {"custom_meta": [{"version": 1}] * 4, "timeout": 30.0}
        put = threads.submit(client.put, "p", {"x": np.arange(4)}, **newer)
        while not ((reasons := client.explain("p")) and reasons[0].waiting_put_count):
            time.sleep(0.01)
        assert "this is a deadlock unless samples that fit are still put" in reasons[0].put_waits_for
        assert "4 samples are excluded by the conditions in where (version); clear these" in reasons[0].put_waits_for
        assert client.clear_samples("p", where=[("version", "<", 1)]) == 4
        put.result()
        assert waiting.result().status == "batch"
