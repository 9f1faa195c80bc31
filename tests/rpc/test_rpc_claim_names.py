"""Claims by name through a real server, with both clients: one answer for all that ask, until the epoch ends."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch
from live_server import AnyClient, ClientKind, LiveServer, LoopThread

import tq_service as tq
from tq_service.v1 import controller_service_pb2 as pb

ASKS: dict[str, Any] = {"partition_id": "train", "task_name": "t", "data_fields": ["x"], "batch_size": 2}
LONG = 600.0
OTHERS = {"sync": "async", "async": "sync"}


def put_rows(client: AnyClient, count: int) -> None:
    client.put("train", {"x": torch.arange(count)})


def test_each_name_takes_what_is_next_when_it_asks_and_the_same_when_it_asks_again(
    server: LiveServer, client: AnyClient, client_kind: ClientKind
) -> None:
    put_rows(client, 6)
    replica = server.client(OTHERS[client_kind])
    got = {name: client.get_meta(**ASKS, claim_name=name) for name in ("rank1/batch0", "rank0/batch0", "rank0/batch1")}
    assert [meta.global_indexes for meta in got.values()] == [[0, 1], [2, 3], [4, 5]]
    for name, meta in got.items():
        again = replica.get_meta(**ASKS, claim_name=name, max_wait=0.0)
        assert (again, again.claim_id) == (meta, meta.claim_id)
        assert replica.get_data(again)["x"].tolist() == meta.global_indexes
    assert client.check_consumption("train", "t").consumed_count == 6
    assert client.get_meta(**ASKS, claim_name="rank1/batch1", max_wait=0.0).status == "not_yet"  # is not recorded
    put_rows(client, 2)
    assert client.get_meta(**ASKS, claim_name="rank1/batch1").global_indexes == [6, 7]


def test_callers_that_wait_under_one_name_get_one_claim(server: LiveServer, client: AnyClient) -> None:
    client.create_partition("train")
    others = [server.client() for _ in range(3)]
    with ThreadPoolExecutor(4) as pool:
        waiting = [pool.submit(each.get_meta, **ASKS, claim_name="a", max_wait=20.0) for each in [*others, client]]
        while not (tasks := client.describe_partition("train").tasks) or tasks[0].waiting_count < 4:
            pass
        put_rows(client, 4)
        got = [each.result() for each in waiting]
    assert [meta.global_indexes for meta in got] == [[0, 1]] * 4
    assert client.check_consumption("train", "t").consumed_count == 2


def test_all_that_ask_under_a_name_ask_for_the_same(client: AnyClient) -> None:
    put_rows(client, 4)
    client.get_meta(**ASKS, claim_name="a")
    with pytest.raises(tq.errors.RankDisagreementError, match="claim_name 'a'") as caught:
        client.get_meta(**{**ASKS, "batch_size": 4}, claim_name="a")
    expected = {"field": "batch_size", "got": "4", "expected": "2"}
    assert {name: caught.value.metadata[name] for name in expected} == expected
    assert client.check_consumption("train", "t").consumed_count == 2


def test_the_end_is_the_answer_to_a_name_too(server: LiveServer, client: AnyClient) -> None:
    put_rows(client, 2)
    client.seal_partition("train")
    last = client.get_meta(**ASKS, claim_name="a")
    end = client.get_meta(**ASKS, claim_name="b")
    assert end.status == "end"
    client.release(last)
    assert server.client().get_meta(**ASKS, claim_name="b") == end
    assert client.get_meta(**ASKS, claim_name="c").global_indexes == [0, 1]


def test_names_are_free_again_in_the_next_epoch(client: AnyClient) -> None:
    put_rows(client, 4)
    client.get_meta(**ASKS, claim_name="a")
    client.reset_consumption("train", "t", 0, keep_consumed=True)
    with pytest.raises(tq.errors.StaleEpochError):
        client.get_meta(**ASKS, claim_name="a", epoch=0)
    again = client.get_meta(**ASKS, claim_name="a", epoch=1)
    assert (again.global_indexes, again.epoch) == ([2, 3], 1)


Loss = Callable[[AnyClient, tq.BatchMeta], object]
LOSSES: dict[str, tuple[float | None, Loss, type[tq.TqError]]] = {
    "released": (None, lambda client, meta: client.release(meta), tq.errors.ClaimReleasedError),
    "released in part": (
        LONG,
        lambda client, meta: client.release(meta.select_samples([0])),
        tq.errors.ClaimReleasedError,
    ),
    "cleared": (None, lambda client, meta: client.clear_samples(meta), tq.errors.SamplesClearedError),
    "cleared in part": (
        None,
        lambda client, meta: client.clear_samples(meta.select_samples([0])),
        tq.errors.SamplesClearedError,
    ),
    "expired": (
        0.05,
        lambda client, meta: client.get_meta(**ASKS, min_batch_size=2, max_wait=20.0),
        tq.errors.LeaseExpiredError,
    ),
}


@pytest.mark.parametrize("loss", LOSSES)
def test_a_name_whose_claim_is_not_what_it_was_is_refused(loss: str, client: AnyClient) -> None:
    put_rows(client, 2)
    lease, lose, error = LOSSES[loss]
    meta = client.get_meta(**ASKS, claim_name="a", lease=lease)
    lose(client, meta)
    put_rows(client, 2)
    for _ in range(2):
        with pytest.raises(error, match="claim_name"):
            client.get_meta(**ASKS, claim_name="a")


def test_a_leased_claim_can_be_acknowledged_by_any_of_its_callers(server: LiveServer, client: AnyClient) -> None:
    put_rows(client, 2)
    first = client.get_meta(**ASKS, claim_name="a", lease=LONG)
    replica = server.client()
    second = replica.get_meta(**ASKS, claim_name="a", lease=LONG)
    assert second.delivery_counts == first.delivery_counts == (1, 1)
    assert client.ack(first.select_samples([0])) == 1
    assert replica.ack(second) == 1
    again = client.get_meta(**ASKS, claim_name="a", lease=LONG)
    assert (again.global_indexes, again.lease_seconds) == ([0, 1], 0.0)


@pytest.mark.parametrize("takes_snapshot", [False, True])
def test_names_outlive_a_restart(
    takes_snapshot: bool, tmp_path: Path, loop_thread: LoopThread, client_kind: ClientKind
) -> None:
    with LiveServer(loop_thread, data_dir=tmp_path) as server:
        client = server.client(client_kind)
        put_rows(client, 5)
        client.seal_partition("train")
        kept = client.get_meta(**ASKS, claim_name="kept", lease=LONG)
        client.release(client.get_meta(**ASKS, claim_name="released"))
        client.get_meta(**{**ASKS, "batch_size": 3}, claim_name="rest", min_batch_size=3)
        if takes_snapshot:
            server.loop.run(server.app.state_store.take_snapshot())
    with LiveServer(loop_thread, data_dir=tmp_path) as server:
        client = server.client(client_kind)
        again = client.get_meta(**ASKS, claim_name="kept", lease=LONG)
        assert (again, again.claim_id) == (kept, kept.claim_id)
        with pytest.raises(tq.errors.ClaimReleasedError):
            client.get_meta(**ASKS, claim_name="released")
        assert client.ack(again) == 2
        assert client.get_meta(**ASKS, claim_name="late").status == "end"


@pytest.mark.parametrize(
    ("arguments", "field"),
    [
        ({"claim_name": ""}, "claim_name"),
        ({"claim_name": "a\n"}, "claim_name"),
        ({"claim_name": "a" * 513}, "claim_name"),
        ({"claim_name": "a", "dp_rank": 0, "dp_size": 1, "batch_index": 0}, "claim_name"),
    ],
)
def test_a_name_that_is_none_is_refused(arguments: dict[str, Any], field: str, client: AnyClient) -> None:
    put_rows(client, 2)
    with pytest.raises(tq.errors.InvalidArgumentError) as caught:
        client.get_meta(**ASKS, **arguments)
    assert caught.value.field == field


def test_a_request_id_is_of_one_name(server: LiveServer, client: AnyClient) -> None:
    put_rows(client, 4)
    request = pb.GetMetaRequest(request_id=os.urandom(16), **ASKS, claim_name="a")
    first = server.controller.GetMeta(request).meta
    assert server.controller.GetMeta(request).meta.claim_request_id == first.claim_request_id == request.request_id
    request.claim_name = "b"
    with pytest.raises(grpc.RpcError, match="request_id"):
        server.controller.GetMeta(request)
    assert client.check_consumption("train", "t").consumed_count == 2
