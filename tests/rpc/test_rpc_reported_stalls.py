"""Limits that stood still or bounded nothing, as users of RL frameworks have reported, through a real server."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import numpy as np
import pytest
from live_server import AnyClient, LiveServer

import tq_service as tq

GROUPS = {"batch_size": 1, "batch_unit": "group", "sampler": "seqlen_balanced"}


def put(client: AnyClient, partition_id: str, group: str, size: int = 4, **meta: Any) -> tq.BatchMeta:
    written: tq.BatchMeta = client.put(partition_id,
        {"x": np.arange(size)}, groups=[group] * size, group_size=size,
        custom_meta={"total_lengths": np.full(size, 5)} | meta, timeout=2.0,
    )  # fmt: skip
    return written


def claim(client: AnyClient, partition_id: str, index: int = 0, task: str = "t", **arguments: Any) -> tq.BatchMeta:
    batch: tq.BatchMeta = client.get_meta(
        partition_id=partition_id, task_name=task, data_fields=["x"], dp_rank=0, dp_size=1, batch_index=index,
        **{"max_wait": 0.0} | arguments,
    )  # fmt: skip
    return batch


def fail_first(client: AnyClient, written: tq.BatchMeta) -> None:
    client.put(written.select_samples([0]), state="failed")


def test_explanations_name_groups_that_never_will_be_ready(client: AnyClient) -> None:
    client.create_partition("p", admissions=[tq.Admission("t", most=4)])
    fail_first(client, put(client, "p", "a"))
    waiting = claim(client, "p", explain=True, **GROUPS)
    assert waiting.status == "not_yet"
    assert "no samples remain" in waiting.reason
    assert "3 are lost, since their groups lost a member" in waiting.reason
    put(client, "p", "b")  # they take no places
    assert claim(client, "p", **GROUPS).size == 4


def test_several_policies_share_a_partition_and_neither_stops_the_other(client: AnyClient) -> None:
    limits = [tq.Admission("A", most=6, unit="sample"), tq.Admission("B", most=6, unit="sample")]
    client.create_partition("episodes", admissions=limits)
    names = np.array(["A", "A", "B"])
    for number in range(6):
        put(client, "episodes", f"e{number}", 3, policy=names)
        for policy, size in (("A", 2), ("B", 1)):
            batch = claim(client, "episodes", number, policy, batch_size=size, where=[("policy", "==", policy)])
            assert [each["policy"] for each in batch.custom_meta] == [policy] * size
            client.clear_samples(batch)  # what is trained takes no place of the other task
    for group in ("f/A", "f/B"):  # to have episodes whole, a group for each policy
        put(client, "whole", group, 2, policy=np.array([group[-1]] * 2))
    for policy in "AB":
        assert claim(client, "whole", 0, policy, where=[("policy", "==", policy)], **GROUPS).size == 2


@pytest.mark.parametrize("on_lost", ["remove", "fail"])
def test_slots_of_a_worker_that_was_killed_come_back(server: LiveServer, client: AnyClient, on_lost: str) -> None:
    client.create_partition("p", admissions=[tq.Admission("t", most=2)])
    code = (
        f"import tq_service as tq, time\nclient = tq.Client({server.address!r})\n"
        f"print(client.acquire('p', 'rollout', 2, lease=1.0, on_lost={on_lost!r}).status, flush=True)\ntime.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as worker:
        assert worker.stdout is not None
        assert worker.stdout.readline() == "batch\n"
        worker.kill()
    assert client.acquire("p", "rollout", 2, lease=60.0, max_wait=15.0).status == "batch"


def test_places_come_back_when_batches_are_trained_however_many_are_prefetched(client: AnyClient) -> None:
    client.create_partition("p", admissions=[tq.Admission("t", most=4, given_back="trained")])
    put(client, "p", "a")
    for index in range(2):
        assert claim(client, "p", index, batch_size=2).size == 2
    with pytest.raises(tq.errors.AdmissionLimitError, match="4 of them delivered but not yet trained"):
        client.put("p", {"x": np.arange(2)}, timeout=0.3)
    client.advance("p", "t", trained=0)
    client.put("p", {"x": np.arange(2)}, timeout=5.0)


@pytest.mark.parametrize("limit", [0, 2])
def test_no_sample_is_late_however_many_batches_are_generated_per_step(client: AnyClient, limit: int) -> None:
    client.create_partition("p", admissions=[tq.Admission("t", max_staleness=limit, global_batch=2)])
    client.publish_version(0)
    staleness = []
    for version in range(12):
        for _ in range(5):  # as many as there may be
            slots = client.acquire("p", "rollout", 2, lease=60.0, max_wait=0.0)
            if slots.status == "batch":
                client.put(slots, {"x": np.arange(2)}, ack=True)
        batch = claim(client, "p", version, batch_size=2, max_wait=5.0)
        staleness += [version - int(each["start_version"]) for each in batch.custom_meta]
        client.clear_samples(batch)
        client.publish_version(version + 1, trained={("p", "t"): version})
    assert len(staleness) == 24
    assert max(staleness) == limit


@pytest.mark.parametrize(("given_back", "late"), [("delivered", 1), ("published", 0)])
def test_a_count_of_one_batch_is_on_policy_where_places_come_back_with_the_version(
    client: AnyClient, given_back: Any, late: int
) -> None:
    client.create_partition("p", admissions=[tq.Admission("t", most=2, given_back=given_back)])
    client.publish_version(0)
    staleness = []
    for version in range(6):
        for moment in ("before", "while training"):
            slots = client.acquire("p", "rollout", 2, policy="default", lease=60.0, max_wait=0.0)
            if slots.status == "batch":
                client.put(slots, {"x": np.arange(2)}, ack=True)
            if moment == "before":
                batch = claim(client, "p", version, batch_size=2, max_wait=5.0)
        staleness += [version - int(each["start_version"]) for each in batch.custom_meta]
        client.publish_version(version + 1, trained={("p", "t"): version})
    assert max(staleness) == late


@pytest.mark.parametrize("end", ["round", "finite", "seal"])
def test_the_rest_of_a_lost_group_keeps_no_end_from_coming(client: AnyClient, end: str) -> None:
    client.create_partition("p", samples_per_round=8 if end == "round" else None, tasks=["t"])
    for group in "ab":
        written = put(client, "p", group)
    fail_first(client, written)
    if end == "seal":
        client.seal_partition("p")
    assert claim(client, "p", 0, finite=end == "finite", max_wait=5.0, **GROUPS).size == 4
    assert claim(client, "p", 1, finite=end == "finite", **GROUPS).status == ("not_yet" if end == "round" else "end")
    status = client.check_consumption("p", "t")
    assert (status.complete, status.consumed_count, status.skipped_count) == (True, 4, 4)


def test_the_bytes_of_a_lost_group_come_back(client: AnyClient) -> None:
    client.create_partition("p", max_bytes=64)
    for group in "ab":
        written = put(client, "p", group)
    fail_first(client, written)
    client.clear_samples(claim(client, "p", unmatched="clear", least_members=4, **GROUPS))
    assert client.describe_partition("p").used_bytes == 0
    put(client, "p", "c")
