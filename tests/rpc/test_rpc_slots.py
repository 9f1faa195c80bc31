"""Slots and the bound on staleness, through a real server with both clients."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest
from live_server import AnyClient, LiveServer

import tq_service as tq

BOUND = tq.Admission("actor", max_staleness=1, global_batch=2, unit="group")


@pytest.fixture(autouse=True)
def train(client: AnyClient) -> None:
    client.create_partition("train", admissions=[BOUND], tasks=["actor", "rollout"])


def acquire(client: AnyClient, group: str, **arguments: Any) -> tq.BatchMeta:
    options = {"group_size": 2, "lease": 60.0, "max_wait": 0.0} | arguments
    slots: tq.BatchMeta = client.acquire("train", "rollout", groups=[group], **options)
    return slots


def finish(client: AnyClient, slots: tq.BatchMeta) -> None:
    client.put(slots, {"x": np.arange(slots.size)}, ack=True)


def claim(client: AnyClient, batch_index: int, max_wait: float = 0.0) -> tq.BatchMeta:
    batch: tq.BatchMeta = client.get_meta(
        partition_id="train", task_name="actor", data_fields=["x"], batch_size=2, batch_unit="group", dp_rank=0,
        dp_size=1, batch_index=batch_index, max_wait=max_wait, explain=True,
    )  # fmt: skip
    return batch


def groups_of(client: AnyClient, batch: tq.BatchMeta) -> list[str]:
    found, _ = client.lookup_samples("train", global_indexes=batch.global_indexes)
    return list(dict.fromkeys(found.groups))


def states(client: AnyClient) -> tuple[int, int, int]:
    """Return how many samples are live, held, and failed."""
    found = client.describe_partition("train")
    return found.live_count, found.held_count, found.failed_count


def outstanding_count(client: AnyClient) -> int | None:
    tasks = {task.task_name: task for task in client.describe_partition("train").tasks}
    count: int | None = tasks["actor"].outstanding_count
    return count


def test_slots_are_leased_samples_with_the_version_they_begin_at(client: AnyClient) -> None:
    with pytest.raises(tq.errors.PolicyNotFoundError):
        acquire(client, "a")
    client.publish_version(7)
    slots = acquire(client, "a", custom_meta=[{"place": 0}, {"place": 1}])
    assert (slots.status, slots.size, slots.lease_seconds) == ("batch", 2, 60.0)
    assert list(slots.custom_meta) == [{"place": 0, "start_version": 7}, {"place": 1, "start_version": 7}]
    assert client.extend(slots, 90.0) == 2
    assert client.check_consumption("train", "rollout").consumed_count == 2
    assert outstanding_count(client) == 1
    assert states(client) == (0, 2, 0)
    finish(client, slots)
    assert states(client) == (2, 0, 0)


def test_slots_are_done_with_the_put_of_their_data(client: AnyClient) -> None:
    client.publish_version(0)
    slots = acquire(client, "a", on_lost="remove")
    for number, slot in enumerate(slots.chunk(2)):  # one member after the other
        client.put(slot, {"x": np.arange(1)}, state="live", ack=True)
        assert states(client) == (number + 1, 1 - number, 0)
    status = client.check_consumption("train", "rollout")
    assert (status.consumed_count, status.leased_count, outstanding_count(client)) == (2, 0, 1)
    with pytest.raises(tq.errors.PreconditionError, match="no leased samples"):
        client.extend(slots, 60.0)
    client.put(acquire(client, "b"), {"x": np.arange(2)}, state="live", ack=True)
    assert groups_of(client, claim(client, 0, max_wait=5.0)) == ["a", "b"]


def test_slots_wait_for_capacity_and_end_with_the_seal(client: AnyClient) -> None:
    client.publish_version(0)
    taken = [acquire(client, str(number)) for number in range(4)]
    assert acquire(client, "x").status == "not_yet"
    began_at = time.monotonic()
    assert acquire(client, "x", max_wait=0.3).status == "not_yet"
    assert time.monotonic() - began_at >= 0.3
    client.release(taken[0])  # without data they are gone
    assert client.lookup_samples("train")[0].size == 6
    assert acquire(client, "x", max_wait=5.0).status == "batch"
    with pytest.raises(tq.errors.AdmissionLimitError, match="most 4"):
        client.acquire("train", "rollout", count=5, lease=60.0)
    client.seal_partition("train")
    end = acquire(client, "y")
    assert (end.status, end.size) == ("end", 0)


def test_a_batch_waits_for_what_would_be_too_old_and_says_so(client: AnyClient) -> None:
    client.publish_version(0)
    old, *others = (acquire(client, name) for name in "abcd")
    for slots in others[:2]:
        finish(client, slots)
    assert groups_of(client, claim(client, 0)) == ["b", "c"]
    with pytest.raises(tq.errors.VersionError, match="trained 0 batches"):
        client.publish_version(1)
    client.publish_version(1, trained={("train", "actor"): 0})
    finish(client, acquire(client, "e"))
    finish(client, others[2])
    waiting = claim(client, 1)
    assert waiting.status == "not_yet"
    assert waiting.waiting_for is not None
    assert waiting.waiting_for.code == "STALENESS_BOUNDED"
    assert "2 are awaited" in waiting.waiting_for.text
    assert "group 'a', begun at version 0" in waiting.waiting_for.text
    finish(client, old)
    assert groups_of(client, claim(client, 1, max_wait=5.0)) == ["a", "d"]


@pytest.mark.parametrize("on_lost", ["requeue", "fail", "remove"])
def test_what_becomes_of_slots_whose_lease_runs_out(client: AnyClient, on_lost: str) -> None:
    client.publish_version(0)
    lost = acquire(client, "a", lease=0.2, on_lost=on_lost)
    client.put(lost, {"x": np.arange(2)}, state="held")
    deadline = time.monotonic() + 20
    while client.check_consumption("train", "rollout").consumed_count and time.monotonic() < deadline:
        time.sleep(0.02)
    assert states(client) == {"requeue": (0, 2, 0), "fail": (0, 0, 2), "remove": (0, 0, 0)}[on_lost]
    with pytest.raises((tq.errors.LeaseExpiredError, tq.errors.SampleNotFoundError)):
        client.put(lost, {"x": np.arange(2)}, state="live")
    assert outstanding_count(client) == (1 if on_lost == "requeue" else 0)
    if on_lost == "requeue":
        goes_on = client.get_meta(
            partition_id="train", task_name="rollout", data_fields=[], batch_size=2, held=True, lease=60.0, max_wait=5.0
        )
        assert goes_on.global_indexes == lost.global_indexes
        finish(client, goes_on)
        assert claim(client, 0).status == "not_yet"  # a second group is needed


def test_held_samples_are_for_those_that_ask_for_them(client: AnyClient) -> None:
    client.publish_version(0)
    client.release(client_slots := acquire(client, "a"))
    assert client_slots.size == 2
    asks = {"partition_id": "train", "task_name": "rollout", "batch_size": 1, "max_wait": 0.0}
    with pytest.raises(tq.errors.InvalidArgumentError, match="lease is unset"):
        client.get_meta(**asks, data_fields=[], held=True)
    with pytest.raises(tq.errors.InvalidArgumentError, match="data_fields is empty"):
        client.get_meta(**asks, data_fields=[])
    assert client.get_meta(**asks, data_fields=[], held=True, lease=5.0).status == "not_yet"


def test_new_samples_without_a_slot_are_refused(client: AnyClient) -> None:
    with pytest.raises(tq.errors.PreconditionError, match="without slots") as refused:
        client.put("train", {"x": np.arange(2)})
    assert refused.value.reason == "STALENESS_BOUNDED"
    with pytest.raises(tq.errors.PreconditionError, match="without slots"):
        client.insert("train", 2)
    client.publish_version(0)
    with pytest.raises(tq.errors.InvalidArgumentError, match="start_version"):
        acquire(client, "a", custom_meta=[{"start_version": 3}] * 2)
    with pytest.raises(tq.errors.InvalidArgumentError, match="expected 'default'"):
        acquire(client, "a", policy="other")
    with pytest.raises(tq.errors.InvalidArgumentError, match="on_lost"):
        acquire(client, "a", on_lost="never")
    assert client.lookup_samples("train")[0].size == 0


def test_slots_without_a_bound(client: AnyClient) -> None:
    with pytest.raises(tq.errors.PartitionNotFoundError):
        client.acquire("eval", "rollout", lease=5.0)
    client.create_partition("eval")
    slots = client.acquire("eval", "rollout", keys=["a", "b"], lease=5.0)
    assert (slots.keys, list(slots.custom_meta)) == (["a", "b"], [{}, {}])
    with pytest.raises(tq.errors.AlreadyExistsError):
        client.acquire("eval", "rollout", keys=["a"], lease=5.0)
    client.publish_version(3, policy="judge")
    assert list(client.acquire("eval", "rollout", lease=5.0, policy="judge").custom_meta) == [{"start_version": 3}]


def test_policies_of_slots_are_in_the_namespace(server: LiveServer, client: AnyClient) -> None:
    inner = server.client(client.kind, namespace="run")
    inner.create_partition("train", admissions=[BOUND])
    inner.publish_version(2)
    slots = acquire(inner, "a")
    assert slots.partition_id == "train"
    assert [each["start_version"] for each in slots.custom_meta] == [2, 2]


# Slots of workers that hold something


def claim_prompts(client: AnyClient, lease: float = 60.0) -> tq.BatchMeta:
    client.put("prompts", {"x": np.arange(2)}, keys=["a", "b"])
    prompts: tq.BatchMeta = client.get_meta(
        partition_id="prompts", task_name="rollout", data_fields=["x"], batch_size=2, lease=lease, max_wait=0
    )
    return prompts


def test_slots_are_made_as_long_as_the_worker_holds_its_samples(client: AnyClient) -> None:
    client.publish_version(0)
    prompts = claim_prompts(client)
    first = acquire(client, "a", holding=prompts)
    assert acquire(client, "b", holding=first.select_samples([1])).status == "batch"
    client.ack(prompts.select_samples([0]))
    assert (
        acquire(client, "c", holding=prompts.select_samples([0])).status == "batch"
    )  # acknowledged: nobody else has it
    client.release(prompts.select_samples([1]))
    before = states(client)
    with pytest.raises(tq.errors.LeaseExpiredError):
        acquire(client, "d", holding=prompts)
    client.clear_samples(prompts.select_samples([0]))
    with pytest.raises(tq.errors.SampleNotFoundError):
        acquire(client, "d", holding=prompts.select_samples([0]))
    assert states(client) == before


def test_a_prompt_is_acknowledged_in_the_change_that_makes_its_slots(client: AnyClient) -> None:
    client.publish_version(0)
    prompts = claim_prompts(client)
    taken = [acquire(client, name) for name in "wxyz"]
    assert acquire(client, "a", holding=prompts, ack=True).status == "not_yet"
    assert client.check_consumption("prompts", "rollout").leased_count == 2
    client.release(taken[0])
    assert acquire(client, "a", holding=prompts.select_samples([0]), ack=True).status == "batch"
    assert client.check_consumption("prompts", "rollout").leased_count == 1
    client.release(prompts.select_samples([1]))
    client.release(taken[1])
    with pytest.raises(tq.errors.LeaseExpiredError):
        acquire(client, "b", holding=prompts.select_samples([1]), ack=True)
    assert "b" not in set(client.lookup_samples("train")[0].groups)


def test_what_is_held_has_to_be_of_a_leased_claim(client: AnyClient) -> None:
    client.publish_version(0)
    put = client.put("prompts", {"x": np.arange(2)})
    with pytest.raises(tq.errors.InvalidArgumentError, match="metadata does not come from a single leased claim"):
        acquire(client, "a", holding=put)
    with pytest.raises(tq.errors.InvalidArgumentError, match=r"holding is missing claim\. Pass the leased"):
        acquire(client, "a", ack=True)
    assert states(client) == (0, 0, 0)
