"""Leases through a real server, with both clients: done, given back, extended, run out, dead-lettered."""

from __future__ import annotations

import asyncio
import math
import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import grpc
import numpy as np
import pytest
import torch
from live_server import AnyClient, LiveServer, StartServer
from rpc_samples import violations_of

import tq_service as tq
from tq_service.v1 import commit_pb2
from tq_service.v1 import controller_service_pb2 as pb
from tq_service.wire.messages import read_seconds, to_duration

ASKS: dict[str, Any] = {"partition_id": "train", "task_name": "t", "data_fields": ["x"], "min_batch_size": 1}
LONG = 600.0
SHORT = 0.15

CRASHES = """
import os, signal, sys
import tq_service as tq

client = tq.Client(sys.argv[1])
taken = 0
while taken < 1000:
    taken += client.get_meta(partition_id="train", task_name="t", data_fields=["x"], batch_size=10, lease=3.0).size
print(taken, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def put_rows(client: AnyClient, count: int, **arguments: Any) -> None:
    client.put("train", {"x": torch.arange(count)}, **arguments)
    client.seal_partition("train")


def task_of(client: AnyClient) -> Any:
    (task,) = client.describe_partition("train").tasks
    return task


def test_what_is_acknowledged_stays_done_and_the_last_one_brings_the_end(server: LiveServer, client: AnyClient) -> None:
    put_rows(client, 4)
    meta = client.get_meta(**ASKS, batch_size=4, lease=LONG)
    assert meta == pickle.loads(pickle.dumps(meta))
    assert (meta.task_name, meta.delivery_counts) == ("t", (1, 1, 1, 1))
    assert 0 < meta.lease_seconds <= LONG
    status = client.check_consumption("train", "t")
    assert (status.consumed_count, status.leased_count, status.complete) == (4, 4, False)
    first, second = meta.chunk(2)
    assert [client.ack(first), client.ack(first)] == [2, 0]
    assert client.get_meta(**ASKS, batch_size=1, max_wait=0).status == "not_yet"  # the rest may come back
    with ThreadPoolExecutor(1) as pool:
        other = server.client()
        waiting = pool.submit(other.get_meta, **ASKS, batch_size=1, max_wait=20.0)
        while task_of(client).waiting_count == 0:
            pass
        assert client.ack(tq.BatchMeta.concat([first, second])) == 2
        assert waiting.result().status == "end"
    status = client.check_consumption("train", "t")
    assert (status.consumed_count, status.leased_count, status.skipped_count, status.complete) == (4, 0, 0, True)


def test_what_is_not_acknowledged_in_time_goes_to_another(server: LiveServer, client: AnyClient) -> None:
    put_rows(client, 3)
    slow = client.get_meta(**ASKS, batch_size=3, lease=SHORT)
    assert client.ack(slow.select_samples([1])) == 1
    again = server.client().get_meta(**ASKS, batch_size=3, lease=LONG, max_wait=20.0)
    assert (again.global_indexes, again.delivery_counts) == ([0, 2], (2, 2))
    with pytest.raises(tq.errors.LeaseExpiredError, match="0, 2") as refused:
        client.ack(slow)
    assert refused.value.metadata == {
        "task_name": "t", "global_indexes": "0, 2", "method": "/tq_service.v1.ControllerService/AckClaim",
    }  # fmt: skip
    with pytest.raises(tq.errors.LeaseExpiredError):
        client.ack(slow.select_samples([0, 1]))
    assert client.ack(slow.select_samples([1])) == 0
    with pytest.raises(tq.errors.LeaseExpiredError):
        client.extend(slow, LONG)
    with pytest.raises(tq.errors.LeaseExpiredError, match="0, 2"):
        client.release(slow)
    assert client.release(slow.select_samples([1])) == 0
    assert client.check_consumption("train", "t").leased_count == 2
    assert client.ack(again) == 2
    assert client.get_meta(**ASKS, batch_size=1).status == "end"


def test_what_is_handed_out_too_often_is_dead_lettered(client: AnyClient) -> None:
    put_rows(client, 3)
    # Longer than SHORT: the acknowledgement must be in time on a busy machine, too.
    asks = {**ASKS, "batch_size": 3, "lease": 1.0, "max_deliveries": 2, "max_wait": 20.0}
    assert client.ack(client.get_meta(**asks).select_samples([0])) == 1
    assert client.get_meta(**asks).delivery_counts == (2, 2)
    end = client.get_meta(**asks)
    assert (end.status, end.skipped_count) == ("end", 2)
    assert end.end.skipped_counts == {"dead_lettered_count": 2}
    status = client.check_consumption("train", "t")
    assert (status.consumed_count, status.skipped_count, status.dead_lettered_count, status.leased_count) == (
        1,
        2,
        2,
        0,
    )
    assert status.complete
    assert (task_of(client).dead_lettered_count, task_of(client).dead_lettered_indexes) == (2, (1, 2))
    assert client.get_meta(**{**ASKS, "task_name": "other"}, batch_size=3).size == 3  # dead-lettered for one task only
    client.reset_consumption("train", "t", 0, keep_consumed=True)
    back = client.get_meta(**asks)
    assert (back.global_indexes, back.delivery_counts) == ([1, 2], (1, 1))


def test_what_is_given_back_is_claimable_at_once_and_counts_as_no_delivery(client: AnyClient) -> None:
    put_rows(client, 4)
    meta = client.get_meta(**ASKS, batch_size=4, lease=LONG, max_deliveries=1)
    assert client.release(meta.select_samples([1, 2])) == 2
    again = client.get_meta(**ASKS, batch_size=4, lease=LONG, max_deliveries=1)
    assert (again.global_indexes, again.delivery_counts) == ([1, 2], (1, 1))
    assert client.ack(meta.select_samples([0, 3])) == 2
    with pytest.raises(tq.errors.LeaseExpiredError, match="1, 2"):
        client.ack(meta)
    assert client.release(again) == 2
    assert client.get_meta(**ASKS, batch_size=4).global_indexes == [1, 2]


def test_a_claim_without_a_lease_is_given_back_whole(client: AnyClient) -> None:
    put_rows(client, 4)
    meta = client.get_meta(**ASKS, batch_size=4)
    assert (meta.lease_seconds, meta.delivery_counts) == (None, ())
    with pytest.raises(tq.errors.InvalidArgumentError, match="expected all of them"):
        client.release(meta.select_samples([0]))
    for call in (client.ack, lambda metadata: client.extend(metadata, 1.0)):
        with pytest.raises(tq.errors.InvalidArgumentError, match="does not come from a single leased claim"):
            call(meta)
    assert client.release(meta) == 4


def test_a_lease_can_be_extended(client: AnyClient) -> None:
    put_rows(client, 2)
    meta = client.get_meta(**ASKS, batch_size=2, lease=1.0)
    assert client.extend(meta, LONG) == 2
    assert client.ack(meta.select_samples([0])) == 1
    assert client.extend(meta, SHORT) == 1
    assert client.get_meta(**ASKS, batch_size=2, max_wait=20.0).global_indexes == [1]


def test_a_retry_gets_the_same_claim_while_it_is_leased(server: LiveServer) -> None:
    client = server.client()
    put_rows(client, 4)
    request = pb.GetMetaRequest(
        request_id=os.urandom(16), **{**ASKS, "batch_size": 2}, lease=to_duration(LONG), max_wait={"seconds": 5}
    )
    first = server.controller.GetMeta(request).meta
    second = server.controller.GetMeta(request).meta
    assert first.claim_request_id == second.claim_request_id == request.request_id
    assert 0 < read_seconds("lease", second.lease) < read_seconds("lease", first.lease) <= LONG
    assert list(first.global_indexes) == list(second.global_indexes) == [0, 1]
    server.controller.AckClaim(
        pb.AckClaimRequest(
            request_id=os.urandom(16), partition_id="train", task_name="t", claim_request_id=request.request_id
        )
    )
    third = server.controller.GetMeta(request).meta
    assert (list(third.global_indexes), read_seconds("lease", third.lease)) == ([0, 1], 0.0)
    assert client.check_consumption("train", "t").consumed_count == 2


def test_a_retry_after_the_lease_is_told_so(server: LiveServer) -> None:
    client = server.client()
    put_rows(client, 1)
    request = pb.GetMetaRequest(request_id=os.urandom(16), **{**ASKS, "batch_size": 1}, lease=to_duration(SHORT))
    assert server.controller.GetMeta(request).meta.global_indexes == [0]
    meta = client.get_meta(**ASKS, batch_size=1, lease=LONG, max_wait=20.0)
    with pytest.raises(Exception, match="expired") as refused:
        server.controller.GetMeta(request)
    assert "FAILED_PRECONDITION" in str(refused.value)
    assert client.ack(meta) == 1


def test_groups_are_acknowledged_and_come_back_whole(client: AnyClient) -> None:
    put_rows(client, 6, groups=list("aabbcc"), group_size=2)
    asks = {**ASKS, "batch_unit": "group", "sampler": "grpo_group_n", "sampler_config": {"n_samples_per_prompt": 2}}
    meta = client.get_meta(**asks, batch_size=3, lease=LONG)
    for call in (client.ack, client.release):
        with pytest.raises(tq.errors.InvalidArgumentError, match="2, 3 form one group"):
            call(meta.select_samples([0, 1, 2]))
    assert client.check_consumption("train", "t").leased_count == 6
    assert client.ack(meta.select_samples([0, 1])) == 2
    client.put(meta.select_samples([2]), state="failed")
    assert client.extend(meta, SHORT) == 3  # the failed one is done
    again = client.get_meta(**asks, batch_size=3, lease=LONG, max_wait=20.0)
    assert again.groups == ["c", "c"]  # of "b" one has failed: the other is skipped
    assert client.ack(again) == 2
    end = client.get_meta(**asks, batch_size=3)
    assert (end.status, end.skipped_count) == ("end", 1)


def test_the_rest_of_a_group_with_a_failed_member_is_handed_out_where_asked(client: AnyClient) -> None:
    put_rows(client, 3, groups=list("aaa"), group_size=3)
    asks = {**ASKS, "batch_unit": "group", "batch_size": 1, "sampler": "grpo_group_n", "max_wait": 20.0}
    asks["sampler_config"] = {"n_samples_per_prompt": 3, "incomplete_groups": "take"}
    meta = client.get_meta(**asks, lease=LONG)
    client.put(meta.select_samples([1]), state="failed")
    assert client.extend(meta, SHORT) == 2
    again = client.get_meta(**asks, lease=LONG)
    assert (again.global_indexes, again.delivery_counts) == ([0, 2], (2, 2))
    assert client.ack(again) == 2


def test_samples_that_failed_or_were_cleared_can_be_acknowledged(client: AnyClient) -> None:
    put_rows(client, 4)
    meta = client.get_meta(**ASKS, batch_size=4, lease=LONG)
    client.put(meta.select_samples([0]), state="failed")
    client.clear_samples(meta.select_samples([1]))
    assert client.check_consumption("train", "t").leased_count == 2
    assert client.ack(meta) == 2
    client.clear_samples(meta)
    assert client.ack(meta) == 0
    client.clear_partition("train")
    with pytest.raises(tq.errors.PartitionNotFoundError):
        client.ack(meta)
    assert client.release(meta) == 0


def test_a_reset_ends_the_leases(client: AnyClient) -> None:
    put_rows(client, 2)
    meta = client.get_meta(**ASKS, batch_size=2, lease=LONG)
    assert client.ack(meta.select_samples([0])) == 1
    client.reset_consumption("train", "t", 0, keep_consumed=True)
    with pytest.raises(tq.errors.LeaseExpiredError):
        client.ack(meta.select_samples([1]))
    again = client.get_meta(**ASKS, batch_size=2, lease=LONG)
    assert (again.global_indexes, again.delivery_counts) == ([1], (1,))


# What a worker may do with the batch that it got.
CHANGES: dict[str, Callable[[AnyClient, tq.BatchMeta], Any]] = {
    "values": lambda c, meta: c.put(meta, {"y": torch.full((meta.size,), 7)}),
    "a new column": lambda c, meta: c.put(meta, {"z": torch.full((meta.size,), 7)}),
    "values and state": lambda c, meta: c.put(meta, {"y": torch.full((meta.size,), 7)}, state="held"),
    "values, acknowledged": lambda c, meta: c.put(meta, {"y": torch.full((meta.size,), 7)}, ack=True),
    "acknowledged by a put": lambda c, meta: c.put(meta, ack=True),
    "custom_meta with a put": lambda c, meta: c.put(meta, custom_meta={"reward": np.full(meta.size, 7.0)}),
    "custom_meta": lambda c, meta: c.set_custom_meta(meta, {"reward": np.full(meta.size, 7.0)}),
    "held": lambda c, meta: c.put(meta, state="held"),
    "failed": lambda c, meta: c.put(meta, state="failed"),
    "a cleared column": lambda c, meta: c.clear_fields(meta, data_fields=["y"]),
    "cleared": lambda c, meta: c.clear_samples(meta),
    "cleared where": lambda c, meta: c.clear_samples(meta, where=[("reward", ">", 0)]),
    "acknowledged": lambda c, meta: c.ack(meta),
    "extended": lambda c, meta: c.extend(meta, LONG),
    "released": lambda c, meta: c.release(meta),
}


@pytest.fixture(params=["memory", "data_dir", "split"])
def service(request: pytest.FixtureRequest, start_server: StartServer, tmp_path: Any) -> LiveServer:
    """A service that keeps samples in memory, on disk, or with a storage service of its own."""
    if request.param == "data_dir":
        return start_server(data_dir=str(tmp_path))
    if request.param == "memory":
        return start_server()
    controller = start_server(role="controller")
    start_server(role="storage", controller=controller.address)
    return controller


def stored(client: AnyClient) -> Any:
    """Return all that writes change."""
    meta, _ = client.lookup_samples("train")
    partition = client.describe_partition("train")
    data = client.get_data(meta, data_fields=["x", "y"])
    counts = partition.live_count, partition.held_count, partition.failed_count
    return data["x"].tolist(), data["y"].tolist(), meta.custom_meta, sorted(meta.data_fields), counts


def test_a_worker_whose_lease_ran_out_changes_nothing(service: LiveServer, client_kind: Any) -> None:
    client, other = service.client(client_kind), service.client()
    client.put("train", {"x": torch.arange(3)}, custom_meta={"reward": np.ones(3)})
    slow = client.get_meta(**ASKS, batch_size=3, lease=SHORT)
    successor = other.get_meta(**ASKS, batch_size=3, lease=LONG, max_wait=20.0)
    other.put(successor, {"y": torch.full((3,), 2)}, custom_meta={"reward": np.full(3, 2.0)})
    assert other.ack(successor.select_samples([0])) == 1
    before = stored(other)
    for name, change in CHANGES.items():
        for part in (slow, slow.select_samples([0]), slow.chunk(2)[1], tq.BatchMeta.concat(slow.chunk(3))):
            with pytest.raises(tq.errors.LeaseExpiredError, match="no longer leased to this worker"):
                change(client, part)
            assert stored(other) == before, name
    assert other.check_consumption("train", "t").leased_count == 2
    for change in CHANGES.values():  # the successor may do all of it
        change(other, successor.select_samples([2]))
    assert other.ack(successor.select_samples([1])) == 1
    assert service.client().put(successor.select_samples([0, 1]), {"y": torch.full((2,), 5)}).size == 2


def test_a_claim_that_was_lost_in_another_way_changes_nothing(client: AnyClient) -> None:
    put_rows(client, 2, custom_meta={"reward": np.ones(2)})
    client.put(client.lookup_samples("train")[0], {"y": torch.arange(2)})

    def claim(task_name: str, lease: float, **more: Any) -> tq.BatchMeta:
        return client.get_meta(**{**ASKS, "task_name": task_name}, batch_size=2, lease=lease, max_wait=20.0, **more)

    released = claim("released", LONG)
    client.release(released)
    dead = claim("dead", SHORT, max_deliveries=1)
    while not client.check_consumption("train", "dead").dead_lettered_count:
        pass
    redelivered = claim("redelivered", SHORT)
    assert claim("redelivered", LONG).delivery_counts == (2, 2)  # to the same worker
    reset = claim("reset", LONG)
    client.reset_consumption("train", "reset")
    unknown = replace(claim("unknown", LONG), claim_id=os.urandom(16))  # the service lost it
    before = stored(client)
    for lost in (released, dead, redelivered, reset, unknown):
        for name, change in CHANGES.items():
            if name != "released":  # which is what is wanted, for those that did not expire
                with pytest.raises(tq.errors.LeaseExpiredError):
                    change(client, lost)
                assert stored(client) == before, name


def test_a_write_to_a_part_that_is_lost_writes_nothing(client: AnyClient) -> None:
    put_rows(client, 4, custom_meta={"reward": np.ones(4)})
    client.put(client.lookup_samples("train")[0], {"y": torch.zeros(4, dtype=torch.int64)})
    meta = client.get_meta(**ASKS, batch_size=4, lease=LONG)
    assert client.ack(meta.select_samples([0])) == 1
    assert client.release(meta.select_samples([3])) == 1
    before = stored(client)
    for name in ("values", "a new column", "custom_meta", "failed", "cleared"):
        with pytest.raises(tq.errors.LeaseExpiredError, match="samples 3 are no longer"):
            CHANGES[name](client, meta)
        assert stored(client) == before, name
    client.put(meta.select_samples([0, 1, 2]), {"y": torch.full((3,), 4)})  # acknowledged, and leased
    assert client.clear_samples(meta.select_samples([0, 1])) == 2
    assert client.clear_samples(meta.select_samples([0, 1, 2])) == 1  # those that are gone are no reason to refuse it
    assert client.get_meta(**ASKS, batch_size=1).global_indexes == [3]


def test_writes_that_name_no_leased_claim_are_not_checked(client: AnyClient) -> None:
    put_rows(client, 4, keys=list("abcd"))
    unleased = client.get_meta(**ASKS, batch_size=2)
    named = client.get_meta(**ASKS, batch_size=2, claim_name="n")
    rank = client.get_meta(**{**RANKED, "task_name": "ranks", "batch_size": 4})
    leased = client.get_meta(**{**ASKS, "task_name": "leased"}, batch_size=4, lease=LONG)
    for task_name in ("t", "ranks", "leased"):
        client.reset_consumption("train", task_name)
    for value, meta in enumerate((unleased, named, rank)):
        client.put(meta, {"y": torch.full((meta.size,), value)})
        client.set_custom_meta(meta, [{"v": value}] * meta.size)
    with pytest.raises(tq.errors.LeaseExpiredError):
        client.put(leased, {"y": torch.full((4,), 8)})
    found, _ = client.lookup_samples("train", leased.keys)
    client.put(found, {"y": torch.full((4,), 9)})
    client.put("train", {"z": torch.full((4,), 9)}, keys=leased.keys, key_mode="existing")
    assert client.get_data(found, data_fields=["y"])["y"].tolist() == [9] * 4


# Writes that are meant to pass, whoever has the samples.
UNFENCED: dict[str, Callable[[AnyClient, tq.BatchMeta], Any]] = {
    "values": lambda c, meta: c.put(meta, {"y": torch.full((meta.size,), 7)}, fenced=False),
    "a new column": lambda c, meta: c.put(meta, {"z": torch.full((meta.size,), 7)}, fenced=False),
    "a cleared column": lambda c, meta: c.clear_fields(meta, data_fields=["z"], fenced=False),
    "custom_meta": lambda c, meta: c.set_custom_meta(meta, {"reward": np.full(meta.size, 7.0)}, fenced=False),
    "held": lambda c, meta: c.put(meta, state="held", fenced=False),
    "failed": lambda c, meta: c.put(meta, state="failed", fenced=False),
    "cleared": lambda c, meta: c.clear_samples(meta, fenced=False),
}


def test_a_write_that_is_not_fenced_is_made_without_the_lease(client: AnyClient) -> None:
    put_rows(client, 2, custom_meta={"reward": np.ones(2)})
    client.put(client.lookup_samples("train")[0], {"y": torch.zeros(2, dtype=torch.int64)})
    meta = client.get_meta(**ASKS, batch_size=2, lease=LONG)
    client.release(meta)
    for name, change in UNFENCED.items():
        before = stored(client)
        with pytest.raises(tq.errors.LeaseExpiredError):
            CHANGES[name](client, meta)
        assert stored(client) == before, name
        change(client, meta)
        if name == "failed":
            assert client.describe_partition("train").failed_count == 2
            break
        assert stored(client) != before, name
    UNFENCED["cleared"](client, meta)
    assert client.describe_partition("train").summary.present_count == 0


def test_puts_of_one_moment_are_gathered_by_claim_and_fence(server: LiveServer) -> None:
    """One whose lease is over harms none that is not fenced."""
    client = server.client("async")
    put_rows(client, 8)
    lost = client.get_meta(**ASKS, batch_size=8, lease=LONG)
    client.release(lost.select_samples([5]))

    async def put_all() -> list[Any]:
        puts = [
            client.real.put(lost.select_samples([number]), {"y": torch.tensor([number])}, fenced=number != 5)
            for number in range(8)
        ]
        late = client.real.put(lost.select_samples([5]), {"y": torch.tensor([9])})
        return await asyncio.gather(*puts, late, return_exceptions=True)

    *made, refused = server.loop.run(put_all())
    assert [meta.global_indexes for meta in made] == [[number] for number in range(8)]
    assert isinstance(refused, tq.errors.LeaseExpiredError)
    assert client.get_data(lost, data_fields=["y"])["y"].tolist() == list(range(8))


def test_a_worker_goes_on_after_a_restart_if_its_lease_did_not_run_out(
    start_server: StartServer, tmp_path: Any
) -> None:
    server = start_server(data_dir=str(tmp_path))
    client = server.client()
    put_rows(client, 3)
    request = pb.GetMetaRequest(request_id=os.urandom(16), batch_size=1, lease=to_duration(LONG), **ASKS)
    server.controller.GetMeta(request)
    held = client.get_meta(**ASKS, batch_size=1, lease=LONG)
    client.put(held, {"y": torch.tensor([1])})
    lost = client.get_meta(**ASKS, batch_size=1, lease=SHORT)
    while task_of(client).leased_count > 2:
        pass
    server.stop()
    server = start_server(data_dir=str(tmp_path))
    client = server.client()
    retried = server.controller.GetMeta(request).meta
    batch = tq.BatchMeta.from_proto(retried, claim_id=retried.claim_request_id, task_name="t")
    for meta in (batch, held):
        client.put(meta, {"y": torch.tensor([2])})
        assert client.ack(meta) == 1
    with pytest.raises(tq.errors.LeaseExpiredError):
        client.put(lost, {"y": torch.tensor([3])})


def test_a_claim_is_named_with_the_indexes_of_its_samples(server: LiveServer, client: AnyClient) -> None:
    put_rows(client, 2, keys=["a", "b"])
    meta = client.get_meta(**ASKS, batch_size=1, lease=LONG)
    claim = {"task_name": "t", "claim_request_id": meta.claim_id}
    where = {"partition_id": "train", "incarnation": meta.incarnation}
    write = {**where, "row_count": 1, "claim": claim}
    calls: dict[str, Callable[[], object]] = {
        "by key": lambda: server.controller.ClearSamples(
            pb.ClearSamplesRequest(request_id=os.urandom(16), **where, keys=["a"], claim=claim)
        ),
        "of no samples": lambda: server.controller.Commit(
            commit_pb2.CommitRequest(request_id=os.urandom(16), write=write)
        ),
        "another sample": lambda: server.controller.SetCustomMeta(
            pb.SetCustomMetaRequest(request_id=os.urandom(16), **where, global_indexes=[1], claim=claim)
        ),
        "no id": lambda: server.controller.Commit(
            commit_pb2.CommitRequest(
                request_id=os.urandom(16), write={**write, "global_indexes": [0], "claim": {"task_name": "t"}}
            )
        ),
    }
    for name, call in calls.items():
        with pytest.raises(grpc.RpcError) as refused:
            call()
        assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT, name
    assert client.describe_partition("train").summary.present_count == 2


REFUSED: dict[str, tuple[Callable[[AnyClient], object], str]] = {
    "rank": (lambda c: c.get_meta(**RANKED, lease=1.0), "for queue workers"),
    "no lease": (lambda c: c.get_meta(**ASKS, batch_size=1, max_deliveries=2), "lease is not set"),
    "zero": (lambda c: c.get_meta(**ASKS, batch_size=1, lease=0), "positive"),
    "negative": (lambda c: c.get_meta(**ASKS, batch_size=1, lease=-1), "expected a finite number of seconds >= 0"),
    "infinite": (lambda c: c.get_meta(**ASKS, batch_size=1, lease=math.inf), "finite"),
    "too long": (lambda c: c.get_meta(**ASKS, batch_size=1, lease=86_401), "a day"),
    "never": (lambda c: c.get_meta(**ASKS, batch_size=1, lease=1.0, max_deliveries=0), "at least 1"),
}
RANKED = {**ASKS, "min_batch_size": None, "batch_size": 1, "dp_rank": 0, "dp_size": 1, "batch_index": 0}


@pytest.mark.parametrize("name", REFUSED)
def test_leases_that_mean_nothing_are_refused(client: AnyClient, name: str) -> None:
    call, says = REFUSED[name]
    put_rows(client, 1)
    with pytest.raises(tq.errors.InvalidArgumentError, match=says):
        call(client)
    assert client.describe_partition("train").tasks == ()


@pytest.mark.parametrize(
    ("lease", "says"),
    [
        (None, "lease is 0.0; expected a positive number of seconds"),
        ({}, "lease is 0.0"),
        ({"seconds": -1}, "lease is -1.0"),
        ({"nanos": -1}, "lease is -1e-09"),
        ({"seconds": 86_400, "nanos": 1}, "at most 86400"),
        ({"seconds": 315_576_000_001}, "lease has 315576000001 seconds and 0 nanos"),
        ({"seconds": 5, "nanos": -1}, "both with the same sign"),
        ({"seconds": 5, "nanos": 10**9}, "fewer than 1000000000 nanos"),
    ],
)
def test_an_extension_is_checked_by_the_service(server: LiveServer, lease: dict[str, int] | None, says: str) -> None:
    client = server.client()
    put_rows(client, 1)
    meta = client.get_meta(**ASKS, batch_size=1, lease=LONG)
    request = pb.ExtendClaimRequest(
        request_id=os.urandom(16), partition_id="train", task_name="t", claim_request_id=meta.claim_id,
        lease=lease,
    )  # fmt: skip
    with pytest.raises(grpc.RpcError, match="INVALID_ARGUMENT") as caught:
        server.controller.ExtendClaim(request)
    assert says in caught.value.details()
    assert violations_of(caught.value) == ["lease"]
    assert client.ack(meta) == 1


def test_parts_of_two_claims_are_acknowledged_one_by_one(client: AnyClient) -> None:
    put_rows(client, 4)
    parts = [client.get_meta(**ASKS, batch_size=2, lease=LONG) for _ in range(2)]
    both = tq.BatchMeta.concat(parts)
    assert (both.lease_seconds, both.delivery_counts, both.task_name) == (None, (), "")
    with pytest.raises(tq.errors.InvalidArgumentError, match="extend the parts separately"):
        client.ack(both)
    assert [client.ack(part) for part in parts] == [2, 2]
    assert client.ack(parts[0].select_samples([])) == 0


def test_a_killed_worker_with_1000_leased_samples_loses_none(server: LiveServer) -> None:
    client = server.client()
    put_rows(client, 1000)
    worker = subprocess.run(
        [sys.executable, "-c", CRASHES, server.address], capture_output=True, text=True, timeout=100, check=False
    )
    assert worker.stdout == "1000\n", worker.stderr
    assert worker.returncode < 0
    status = client.check_consumption("train", "t")
    assert (status.leased_count, status.complete) == (1000, False)
    got: list[int] = []
    counts: set[int] = set()
    while (meta := client.get_meta(**ASKS, batch_size=64, lease=LONG, max_wait=30.0)).status == "batch":
        got += meta.global_indexes
        counts |= set(meta.delivery_counts)
        assert client.ack(meta) == meta.size
    assert meta.status == "end"
    assert meta.skipped_count == 0
    assert np.array_equal(np.sort(got), np.arange(1000))
    assert counts == {2}
