"""Claims of prompts with the slots of their responses, through a real server with both clients."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from live_server import AnyClient, ClientKind, LiveServer, LoopThread

import tq_service as tq
from tq_service.client.requests import get_meta_request

GROUPS = tq.Admit("train", group_size=2)


@pytest.fixture(autouse=True)
def partitions(client: AnyClient) -> None:
    admission = tq.Admission("actor", max_staleness=1, global_batch=2, unit="group", most_running=3)
    client.create_partition("train", admissions=[admission])
    client.put("prompts", {"x": np.arange(8)}, keys=[f"p{number}" for number in range(8)])
    client.publish_version(5)


def claim(client: AnyClient, **arguments: Any) -> tq.BatchMeta:
    options = {"batch_size": 1, "lease": 60.0, "admit": GROUPS, "max_wait": 0.0} | arguments
    prompts: tq.BatchMeta = client.get_meta(partition_id="prompts", task_name="rollout", data_fields=["x"], **options)
    return prompts


def slots_of(prompts: tq.BatchMeta) -> tq.BatchMeta:
    assert prompts.status == "batch"
    assert prompts.admitted is not None
    return prompts.admitted


def finish(client: AnyClient, slots: tq.BatchMeta) -> None:
    client.put(slots, {"x": np.arange(slots.size)}, ack=True)


def task(client: AnyClient, partition_id: str, name: str = "rollout") -> tq.TaskStatus:
    found: tq.TaskStatus = next(
        each for each in client.describe_partition(partition_id).tasks if each.task_name == name
    )
    return found


def states(client: AnyClient) -> tuple[int, int, int]:
    """Return how many samples of "train" are live, held, and failed."""
    found = client.describe_partition("train")
    return found.live_count, found.held_count, found.failed_count


def claimable(client: AnyClient) -> int:
    found = client.describe_partition("prompts")
    return next((each.pending_count for each in found.tasks if each.task_name == "rollout"), found.live_count)


def wait_until_lost(client: AnyClient) -> None:
    deadline = time.monotonic() + 20
    while task(client, "prompts").leased_count or task(client, "train").leased_count:
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_prompts_come_with_their_slots(client: AnyClient) -> None:
    prompts = claim(client, batch_size=2)
    slots = slots_of(prompts)
    assert (prompts.keys, slots.groups) == (["p0", "p1"], ["p0", "p0", "p1", "p1"])
    assert slots.partition_id == "train"
    assert [each["start_version"] for each in slots.custom_meta] == [5] * 4
    assert prompts.lease_seconds == pytest.approx(slots.lease_seconds, abs=5.0)
    assert states(client) == (0, 4, 0)
    second = slots_of(prompts.select_samples([1]))
    assert second.groups == ["p1", "p1"]
    finish(client, second)
    assert (task(client, "prompts").leased_count, task(client, "train").leased_count) == (1, 2)
    finish(client, slots.select_samples([0]))
    assert task(client, "prompts").leased_count == 1  # the other slot of p0 is to come
    finish(client, slots.select_samples([1]))
    assert (task(client, "prompts").leased_count, states(client)) == (0, (4, 0, 0))
    assert client.ack(prompts) == 0  # the service has done so
    assert claimable(client) == 6


def test_one_slot_for_each_prompt_has_its_key(client: AnyClient) -> None:
    client.create_partition("eval")
    slots = slots_of(claim(client, batch_size=2, admit=tq.Admit("eval", policy="default")))
    assert (slots.keys, slots.groups) == (["p0", "p1"], [None, None])
    assert [each["start_version"] for each in slots.custom_meta] == [5, 5]
    assert claim(client, admit=tq.Admit("eval", group_size=1)).keys == ["p2"]


def test_one_lease_is_extended_on_both_sides(client: AnyClient) -> None:
    prompts = claim(client, lease=5.0)
    assert client.extend(slots_of(prompts), 50.0) == 2
    (lease,) = task(client, "prompts").leases
    assert 40.0 < lease.ends_in_seconds <= 50.0
    assert client.extend(prompts, 80.0) == 1
    (lease,) = task(client, "train").leases
    assert 70.0 < lease.ends_in_seconds <= 80.0


@pytest.mark.parametrize("on_lost", ["remove", "requeue", "fail"])
def test_the_end_of_the_lease_ends_both_sides(client: AnyClient, on_lost: str) -> None:
    prompts = claim(client, batch_size=2, lease=0.3, admit=tq.Admit("train", 2, on_lost=on_lost))
    slots = slots_of(prompts)
    finish(client, slots.select_samples([0, 1, 2]))
    wait_until_lost(client)
    assert states(client) == {"remove": (2, 0, 0), "requeue": (3, 1, 0), "fail": (3, 0, 1)}[on_lost]
    assert claimable(client) == (7 if on_lost == "remove" else 6)
    with pytest.raises((tq.errors.LeaseExpiredError, tq.errors.SampleNotFoundError)):
        finish(client, slots.select_samples([3]))
    if on_lost == "remove":
        again = claim(client)
        assert again.keys == ["p1"]
        assert list(again.delivery_counts) == [2]
        finish(client, slots_of(again))
    if on_lost == "requeue":
        goes_on = client.get_meta(
            partition_id="train", task_name="rollout", data_fields=[], batch_size=1, held=True, lease=60.0, max_wait=5.0
        )
        assert goes_on.groups == ["p1"]
        finish(client, goes_on)
        assert states(client) == (4, 0, 0)


def test_a_released_prompt_has_no_slots(client: AnyClient) -> None:
    prompts = claim(client, batch_size=2)
    slots = slots_of(prompts)
    client.put(slots.select_samples([0]), {"x": np.arange(1)}, state="held")
    finish(client, slots.select_samples([2]))
    assert client.release(prompts.select_samples([0])) == 1
    assert states(client) == (1, 1, 0)
    assert client.release(prompts) == 1
    assert states(client) == (0, 0, 0)
    assert claimable(client) == 8
    again = claim(client, batch_size=2)
    assert slots_of(again).groups == ["p0", "p0", "p1", "p1"]


def test_finished_prompts_are_not_released(client: AnyClient) -> None:
    """Their samples may be trained by now: so nobody makes them a second time."""
    prompts = claim(client, batch_size=2)
    client.put(slots_of(prompts).select_samples([0, 1]), {"x": np.arange(2)}, state="live")
    assert client.release(prompts) == 1
    assert (states(client), claimable(client)) == ((2, 0, 0), 7)


def test_an_acknowledged_prompt_gives_up_what_is_not_finished(client: AnyClient) -> None:
    prompts = claim(client, batch_size=2)
    slots = slots_of(prompts)
    client.release(slots.select_samples([0, 1]))  # the worker has the prompt still
    assert (states(client), claimable(client)) == ((0, 2, 0), 6)
    client.put(slots.select_samples([2]), {"x": np.arange(1)}, state="live")
    assert client.ack(prompts) == 2
    assert (states(client), claimable(client)) == ((1, 0, 0), 6)
    assert task(client, "train").leased_count == 0


def test_a_reset_ends_both_sides(client: AnyClient) -> None:
    claim(client)
    client.reset_consumption("prompts", "rollout", keep_consumed=True)
    assert (states(client), claimable(client)) == ((0, 0, 0), 8)
    slots = slots_of(claim(client))
    client.reset_consumption("train", "rollout", keep_consumed=True)
    assert (slots.size, states(client), claimable(client)) == (2, (0, 0, 0), 8)


def test_a_call_waits_for_capacity_and_holds_no_prompt_meanwhile(client: AnyClient) -> None:
    first = [claim(client) for _ in range(3)]
    waiting = claim(client, explain=True)
    assert waiting.status == "not_yet"
    assert waiting.waiting_for is not None
    assert waiting.waiting_for.code == "NO_CAPACITY"
    assert "4 held groups, which are still being generated; its admission sets most_running to 3" in waiting.reason
    assert claimable(client) == 5
    assert task(client, "train", "actor").running_count == 3
    finish(client, slots_of(first[0]))
    fourth = claim(client, max_wait=10.0)
    assert fourth.keys == ["p3"]
    finish(client, slots_of(fourth))
    assert "5 groups outstanding" in claim(client, explain=True).reason
    assert claimable(client) == 4
    client.release(first[1])
    assert claim(client, max_wait=10.0).keys == ["p1"]


def test_waiting_calls_are_served_as_there_is_room_and_named_until_then(server: LiveServer, client: AnyClient) -> None:
    held = [claim(client) for _ in range(3)]
    others = [server.client("sync") for _ in range(2)]
    with ThreadPoolExecutor(2) as pool:
        calls = [pool.submit(claim, other, max_wait=20.0) for other in others]
        deadline = time.monotonic() + 20
        while client.describe_partition("train").waiting_put_count < 2:
            assert time.monotonic() < deadline
            time.sleep(0.02)
        (reason,) = client.explain("prompts")
        assert (reason.code, reason.waiting_count) == ("NO_CAPACITY", 2)
        finish(client, slots_of(held[0]))
        client.release(held[1])
        served = [key for call in calls for key in call.result().keys]
    assert sorted(served) == ["p1", "p3"] or sorted(served) == ["p3", "p4"]
    assert client.describe_partition("train").waiting_put_count == 0


def test_fewer_prompts_come_where_there_is_room_for_few(client: AnyClient) -> None:
    claim(client, batch_size=2)
    assert claim(client, batch_size=3).status == "not_yet"
    assert claim(client, batch_size=3, min_batch_size=1).keys == ["p2"]
    with pytest.raises(tq.errors.AdmissionLimitError, match="most 4"):
        claim(client, batch_size=5)


def test_a_wait_for_prompts_holds_no_capacity(server: LiveServer, client: AnyClient) -> None:
    other = server.client("sync")
    client.create_partition("none")
    waits = threading.Thread(
        target=other.get_meta,
        kwargs={"partition_id": "none", "task_name": "rollout", "data_fields": ["x"], "batch_size": 3, "lease": 5.0,
                "admit": GROUPS, "max_wait": 20.0},
    )  # fmt: skip
    waits.start()
    deadline = time.monotonic() + 20
    while not client.explain("none"):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    prompts = claim(client, batch_size=3)
    assert slots_of(prompts).size == 6
    client.put("none", {"x": np.arange(3)}, keys=["a", "b", "c"])
    client.release(prompts)
    waits.join()
    assert states(client) == (0, 6, 0)


def test_the_seal_of_the_slots_is_the_end(client: AnyClient) -> None:
    client.seal_partition("train")
    end = claim(client)
    assert (end.status, end.admitted, claimable(client)) == ("end", None, 8)


def test_a_retry_gets_the_same(server: LiveServer, client: AnyClient) -> None:
    request = get_meta_request(
        partition_id="prompts", task_name="rollout", data_fields=["x"], batch_size=1, sampler=None,
        sampler_config=None, where=(), order_by=(), claim_name=None, lease=60.0, admit=GROUPS,
        max_deliveries=None, max_uses=None, least_members=None,
    )  # fmt: skip
    first, again = (server.controller.GetMeta(request) for _ in range(2))
    assert list(first.admitted.global_indexes) == list(again.admitted.global_indexes) == [0, 1]
    assert (first.meta.claim_request_id, again.admitted.claim_request_id) == (request.request_id,) * 2
    assert states(client) == (0, 2, 0)
    client.clear_samples("train", global_indexes=[0])
    with pytest.raises(grpc.RpcError, match="have been cleared"):
        server.controller.GetMeta(request)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"admit": tq.Admit("elsewhere")}, tq.errors.PartitionNotFoundError, "elsewhere"),
        ({"admit": tq.Admit("prompts")}, tq.errors.InvalidArgumentError, "expected a different partition"),
        ({"admit": tq.Admit("train", 2, policy="other")}, tq.errors.InvalidArgumentError, "expected 'default'"),
        ({"admit": "train"}, tq.errors.InvalidArgumentError, r"expected Admit\("),
        ({"lease": None}, tq.errors.InvalidArgumentError, "lease is 'unset'; expected 'set'"),
        ({"claim_name": "a"}, tq.errors.InvalidArgumentError, "claim_name is 'a'; expected ''"),
        ({"max_uses": 2}, tq.errors.InvalidArgumentError, "max_uses is 2; expected 1"),
        ({"batch_unit": "group"}, tq.errors.InvalidArgumentError, "batch_unit is 'group'; expected 'sample'"),
        ({"held": True}, tq.errors.InvalidArgumentError, "held is True; expected False"),
        (
            {"sampler": "grpo_group_n", "sampler_config": {"n_samples_per_prompt": 1}},
            tq.errors.SamplerError,
            "one by one",
        ),
    ],
)
def test_what_cannot_be_is_refused_and_changes_nothing(
    client: AnyClient, arguments: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        claim(client, **arguments)
    assert (states(client), claimable(client)) == ((0, 0, 0), 8)


def test_prompts_must_have_names_that_are_free(client: AnyClient) -> None:
    with pytest.raises(tq.errors.InvalidArgumentError, match="on_lost"):
        tq.Admit("train", on_lost="never")  # type: ignore[arg-type]
    with pytest.raises(tq.errors.InvalidArgumentError, match="group_size"):
        tq.Admit("train", group_size=0)
    client.acquire("train", "other", groups=["p0"], group_size=2, lease=60.0)
    with pytest.raises(tq.errors.AlreadyExistsError, match="a group named 'p0'"):
        claim(client)
    client.put("nameless", {"x": np.arange(1)})
    with pytest.raises(tq.errors.InvalidArgumentError, match="has no key"):
        client.get_meta(
            partition_id="nameless", task_name="rollout", data_fields=["x"], batch_size=1, lease=9.0, admit=GROUPS
        )
    assert states(client) == (0, 2, 0)
    assert claimable(client) == 8


def test_slots_are_in_the_namespace(server: LiveServer, client: AnyClient) -> None:
    inner = server.client(client.kind, namespace="run")
    inner.create_partition("train")
    inner.publish_version(2)
    inner.put("prompts", {"x": np.arange(1)}, keys=["a"])
    slots = slots_of(claim(inner, admit=tq.Admit("train", 2, policy="default")))
    assert (slots.partition_id, slots.namespace) == ("train", "run")
    assert [each["start_version"] for each in slots.custom_meta] == [2, 2]


def test_released_slots_with_data_are_for_other_workers_and_stand_for_their_prompt(client: AnyClient) -> None:
    slots = slots_of(claim(client, batch_size=2))
    client.put(slots.select_samples([0]), {"x": np.arange(1)}, state="held")
    assert client.release(slots) == 0  # held ones are for those that ask for them
    assert (states(client), claimable(client), task(client, "prompts").leased_count) == ((0, 1, 0), 6, 1)
    goes_on = client.get_meta(
        partition_id="train", task_name="rollout", data_fields=[], batch_size=1, held=True, lease=60.0, max_wait=5.0
    )
    assert goes_on.groups == ["p0"]


def test_prompts_and_slots_outlive_a_restart(tmp_path: Path, loop_thread: LoopThread, client_kind: ClientKind) -> None:
    with LiveServer(loop_thread, data_dir=tmp_path) as server:
        kept = server.client(client_kind)
        kept.create_partition("train")
        kept.put("prompts", {"x": np.arange(2)}, keys=["p0", "p1"])
        prompts = claim(kept, batch_size=2)
        kept.checkpoint("before")
        finish(kept, slots_of(prompts).select_samples([0]))
    with LiveServer(loop_thread, data_dir=tmp_path) as server:
        kept = server.client(client_kind)
        finish(kept, slots_of(prompts).select_samples([1]))  # and its prompt with it
        assert kept.release(prompts) == 1
        assert (states(kept), claimable(kept)) == ((2, 0, 0), 1)
        kept.restore("before", replace=True)
        assert (states(kept), task(kept, "prompts").leased_count) == ((0, 4, 0), 2)


def test_a_checkpoint_has_both_sides_in_whichever_namespace_it_is_restored(
    tmp_path: Path, loop_thread: LoopThread, client_kind: ClientKind
) -> None:
    with LiveServer(loop_thread, data_dir=tmp_path) as server:
        before, after = (server.client(client_kind, namespace=name) for name in ("before", "after"))
        before.create_partition("train")
        before.put("prompts", {"x": np.arange(2)}, keys=["p0", "p1"])
        prompts = claim(before, batch_size=2)
        before.checkpoint("half-way")
        after.restore("half-way")
        finish(before, slots_of(prompts))
        assert (claimable(before), task(before, "prompts").leased_count) == (0, 0)
        assert (states(after), task(after, "prompts").leased_count) == ((0, 4, 0), 2)
        after.reset_consumption("prompts", "rollout", keep_consumed=True)
        assert (states(after), states(before)) == ((0, 0, 0), (4, 0, 0))
