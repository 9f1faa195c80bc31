"""Puts that acknowledge the samples of a leased claim: results and acknowledgement are one change, or none."""

from __future__ import annotations

import asyncio
import os
from concurrent.futures import ThreadPoolExecutor
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

ASKS: dict[str, Any] = {"partition_id": "train", "task_name": "t", "data_fields": ["x"], "min_batch_size": 1}
LONG = 600.0


def put_rows(client: AnyClient, count: int, **arguments: Any) -> None:
    client.put("train", {"x": torch.arange(count)}, **arguments)


def scores(meta: tq.BatchMeta, value: int = 1) -> dict[str, Any]:
    return {"score": torch.full((meta.size,), value)}


def progress(client: AnyClient) -> tuple[int, int]:
    """Return how many samples the task has consumed, leased ones included, and how many are leased."""
    status = client.check_consumption("train", "t")
    return status.consumed_count, status.leased_count


@pytest.mark.parametrize("role", ["all", "controller"])
def test_results_are_there_and_the_samples_done(start_server: StartServer, client_kind: Any, role: str) -> None:
    server = start_server(role=role)
    if role == "controller":
        start_server(role="storage", controller=server.address)
    client = server.client(client_kind)
    put_rows(client, 4)
    client.seal_partition("train")
    meta = client.get_meta(**ASKS, batch_size=4, lease=LONG)
    first, second = meta.chunk(2)
    written = client.put(first, scores(first), custom_meta={"good": np.ones(2)}, ack=True)
    assert written.global_indexes == [0, 1]
    assert client.get_data(written, data_fields=["score"])["score"].tolist() == [1, 1]
    assert progress(client) == (4, 2)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(server.client().get_meta, **ASKS, batch_size=1, max_wait=20.0)
        while not client.describe_partition("train").tasks[0].waiting_count:
            pass
        client.put(second, state="held", ack=True)
        assert waiting.result().status == "end"  # the last acknowledgement brings it
    assert progress(client) == (4, 0)
    assert client.ack(meta) == 0
    client.put(meta, scores(meta, 2), ack=True)  # once more is fine: the samples are the worker's own
    assert progress(client) == (4, 0)
    assert client.describe_partition("train").held_count == 0  # as no state was given
    with pytest.raises(tq.errors.PreconditionError, match="no leased samples"):
        client.extend(meta, LONG)


def test_a_put_that_is_refused_acknowledges_nothing(client: AnyClient) -> None:
    put_rows(client, 3)
    meta = client.get_meta(**ASKS, batch_size=3, lease=LONG)
    client.put(meta.select_samples([0]), {"score": torch.ones(1)})
    with pytest.raises(tq.errors.FieldMismatchError):
        client.put(meta.select_samples([1, 2]), {"score": torch.ones(2, 2)}, ack=True)
    assert progress(client) == (3, 3)
    client.release(meta.select_samples([2]))
    with pytest.raises(tq.errors.LeaseExpiredError, match="samples 2 are no longer leased"):
        client.put(meta, {"score": torch.ones(3)}, ack=True)
    assert progress(client) == (2, 2)
    assert client.lookup_samples("train")[0].produced["score"].tolist() == [True, False, False]
    assert client.get_meta(**ASKS, batch_size=3, lease=LONG).global_indexes == [2]


def not_claims(client: AnyClient) -> dict[str, tuple[dict[str, Any], str]]:
    unleased = client.get_meta(**ASKS, batch_size=1)
    leased = [client.get_meta(**ASKS, batch_size=1, lease=LONG) for _ in range(2)]
    ranked = client.get_meta(**ASKS | {"task_name": "r", "min_batch_size": None}, batch_size=1, dp_rank=0, dp_size=1,
                             batch_index=0)  # fmt: skip
    found, _ = client.lookup_samples("train")
    several = "does not come from a single leased claim; claim it with claim"
    return {
        "nothing": ({"target": "train"}, "ack is True, but the put targets a partition"),
        "keys": ({"target": "train", "keys": list("abcdef")}, "Pass the batch returned by claim"),
        "look-up": ({"target": found}, several),
        "unleased": ({"target": unleased}, several),
        "ranked": ({"target": ranked}, several),
        "no samples": ({"target": ranked.select_samples([])}, several),
        "two claims": ({"target": tq.BatchMeta.concat(leased)}, "extend the parts separately"),
        "not fenced": ({"target": leased[0], "fenced": False}, "omit one of the two"),
    }


def test_only_samples_of_one_leased_claim_can_be_acknowledged(client: AnyClient) -> None:
    put_rows(client, 6, keys=list("abcdef"))
    for name, (arguments, says) in not_claims(client).items():
        count = 6 if arguments["target"] == "train" else arguments["target"].size
        with pytest.raises(tq.errors.InvalidArgumentError, match=says):
            client.put(data={"score": torch.ones(count)}, **arguments, ack=True)
        assert client.lookup_samples("train")[0].data_fields == ["x"], name
    assert progress(client) == (3, 2)


def test_an_acknowledgement_needs_a_claim_in_the_request(server: LiveServer, client: AnyClient) -> None:
    put_rows(client, 1)
    meta = client.get_meta(**ASKS, batch_size=1, lease=LONG)
    write = commit_pb2.SampleWrite(
        partition_id="train", incarnation=meta.incarnation, row_count=1, global_indexes=[0], ack=True
    )
    with pytest.raises(grpc.RpcError, match="ack is set without a claim") as refused:
        server.controller.Commit(commit_pb2.CommitRequest(request_id=os.urandom(16), write=write))
    assert violations_of(refused.value) == ["ack"]
    write.claim.task_name, write.claim.claim_request_id = "t", meta.claim_id
    server.controller.Insert(pb.InsertRequest(request_id=os.urandom(16), write=write))
    assert progress(client) == (1, 0)


def test_a_repeat_is_answered_alike_after_the_claim_is_over(server: LiveServer, client: AnyClient) -> None:
    put_rows(client, 2)
    meta = client.get_meta(**ASKS, batch_size=2, lease=LONG)
    write = commit_pb2.SampleWrite(
        partition_id="train", incarnation=meta.incarnation, row_count=1, global_indexes=[0],
        claim={"task_name": "t", "claim_request_id": meta.claim_id}, ack=True,
    )  # fmt: skip
    fenced = commit_pb2.SampleWrite()
    fenced.CopyFrom(write)
    fenced.ack, fenced.global_indexes[:] = False, [1]
    requests = [commit_pb2.CommitRequest(request_id=os.urandom(16), write=each) for each in (write, fenced)]
    answers = [server.controller.Commit(request) for request in requests]
    assert progress(client) == (2, 1)
    client.reset_consumption("train", "t")
    assert [server.controller.Commit(request) for request in requests] == answers
    assert progress(client) == (0, 0)
    for request in requests:
        request.request_id = os.urandom(16)
        with pytest.raises(grpc.RpcError, match="no longer leased"):
            server.controller.Commit(request)


def test_a_restart_keeps_both(start_server: StartServer, tmp_path: Any) -> None:
    server = start_server(data_dir=str(tmp_path))
    client = server.client()
    put_rows(client, 3)
    meta = client.get_meta(**ASKS, batch_size=3, lease=LONG)
    done, left = meta.select_samples([0, 2]), meta.select_samples([1])
    client.put(done, scores(done, 5), ack=True)
    server.stop()
    server = start_server(data_dir=str(tmp_path))
    client = server.client()
    assert progress(client) == (3, 1)
    assert client.get_data(done, data_fields=["score"])["score"].tolist() == [5, 5]
    client.put(left, scores(left, 6), ack=True)
    assert progress(client) == (3, 0)


def test_groups_are_acknowledged_whole_also_by_puts_of_one_moment(server: LiveServer) -> None:
    client = server.client("async")
    put_rows(client, 8, groups=[f"g{number // 2}" for number in range(8)], group_size=2)
    meta = client.get_meta(**ASKS, batch_size=4, batch_unit="group", lease=LONG)
    assert meta.size == 8

    async def put_parts(parts: list[list[int]]) -> list[Any]:
        some = [meta.select_samples(part) for part in parts]
        puts = (client.real.put(each, scores(each), ack=True) for each in some)
        return await asyncio.gather(*puts, return_exceptions=True)

    parted = server.loop.run(put_parts([[number] for number in range(8)]))
    assert all(
        isinstance(each, tq.errors.InvalidArgumentError) and "only 1 of its 2 samples are listed" in str(each)
        for each in parted
    )
    assert progress(client) == (8, 8)
    whole = server.loop.run(put_parts([[0, 1], [2, 3], [4, 5], [6, 7]]))
    assert [each.global_indexes for each in whole] == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert progress(client) == (8, 0)


def test_parts_of_a_group_do_not_become_whole_by_being_gathered(server: LiveServer, client: AnyClient) -> None:
    put_rows(client, 4, groups=["a", "a", "b", "b"], group_size=2)
    meta = client.get_meta(**ASKS, batch_size=1, batch_unit="group", lease=LONG)
    write = commit_pb2.SampleWrite(
        partition_id="train", incarnation=meta.incarnation, row_count=2, global_indexes=[0, 1], rows_per_put=1,
        claim={"task_name": "t", "claim_request_id": meta.claim_id}, ack=True,
    )  # fmt: skip
    with pytest.raises(grpc.RpcError, match=r"keeps groups together\. Send each put separately") as refused:
        server.controller.Commit(commit_pb2.CommitRequest(request_id=os.urandom(16), write=write))
    assert violations_of(refused.value) == ["rows_per_put"]
    assert progress(client) == (2, 2)
    write.rows_per_put = 2  # one put
    server.controller.Commit(commit_pb2.CommitRequest(request_id=os.urandom(16), write=write))
    assert progress(client) == (2, 0)


def test_puts_of_one_moment_acknowledge_their_own_samples(server: LiveServer) -> None:
    client = server.client("async")
    put_rows(client, 64)
    meta = client.get_meta(**ASKS, batch_size=64, lease=LONG)

    async def put_all() -> None:
        parts = [meta.select_samples([number]) for number in range(60)]
        puts = [client.real.put(part, scores(part), ack=number % 3 > 0) for number, part in enumerate(parts)]
        await asyncio.gather(*puts)

    server.loop.run(put_all())
    assert progress(client) == (64, 24)
    client.release(meta)
    left = client.get_meta(**ASKS, batch_size=64, lease=LONG)
    assert left.global_indexes == [*range(0, 60, 3), 60, 61, 62, 63]
    assert client.lookup_samples("train")[0].produced["score"].sum() == 60


def test_what_the_sampler_left_out_goes_with_the_others(client: AnyClient) -> None:
    lengths = {"total_lengths": np.array([2, 900, 3, 900])}
    put_rows(client, 4, custom_meta=lengths)
    options = {"pack_max_length": 8, "overlong": "drop", "optimizer_steps": 1}
    asks = ASKS | {"sampler": "packed", "sampler_config": options}
    meta = client.get_meta(**asks, batch_size=4, lease=LONG)
    assert (meta.global_indexes, meta.dropped_indexes.tolist()) == ([0, 2], [1, 3])
    client.put(meta, scores(meta), ack=True)
    assert progress(client) == (2, 0)
    put_rows(client, 1, custom_meta={"total_lengths": np.array([900])})
    empty = client.get_meta(**asks, batch_size=4, lease=LONG)
    assert (empty.size, empty.dropped_indexes.tolist(), progress(client)) == (0, [4], (3, 1))
    assert client.put(empty, ack=True) == empty
    assert progress(client) == (2, 0)


def test_samples_that_are_used_again_are_claimable_with_their_results(client: AnyClient) -> None:
    put_rows(client, 1)
    for use in range(2):
        meta = client.get_meta(**ASKS, batch_size=1, lease=LONG, max_uses=2, max_wait=20.0)
        assert meta.global_indexes == [0]
        client.put(meta, scores(meta, use), ack=True)
        assert progress(client) == (use, 0)
        assert client.get_data(meta, data_fields=["score"])["score"].tolist() == [use]
    assert client.get_meta(**ASKS, batch_size=1, max_uses=2, max_wait=0).status == "not_yet"
