"""Samples that are delivered more than once, through a real server with both clients: counted, leased, replayed."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from live_server import AnyClient, ClientKind, LiveServer, LoopThread

import tq_service as tq
from tq_service.data import StreamingDataLoader, StreamingDataset

ASKS: dict[str, Any] = {"partition_id": "train", "task_name": "t", "data_fields": ["x"], "batch_size": 2}
RANK: dict[str, Any] = {**ASKS, "dp_rank": 0, "dp_size": 1}
LONG = 600.0
SAMPLERS = "rpc_reusing_samplers"


def put_rows(client: AnyClient, count: int) -> None:
    client.put("train", {"x": torch.arange(count)})


def status_of(client: AnyClient) -> tuple[int, int, bool]:
    status = client.check_consumption("train", "t")
    return status.consumed_count, status.leased_count, status.complete


def test_a_sample_is_consumed_once_it_was_delivered_so_often(server: LiveServer, client: AnyClient) -> None:
    put_rows(client, 4)
    client.seal_partition("train")
    got = [client.get_meta(**RANK, batch_index=index, max_uses=2).global_indexes for index in range(4)]
    assert got == [[0, 1], [0, 1], [2, 3], [2, 3]]
    for index in (3, 0, 2, 1):  # replays
        assert server.client().get_meta(**RANK, batch_index=index, max_uses=2).global_indexes == got[index]
    assert status_of(client) == (4, 0, True)
    assert client.get_meta(**RANK, batch_index=4, max_uses=2).status == "end"
    client.reset_consumption("train", "t", 0)
    assert client.get_meta(**RANK, batch_index=0).global_indexes == [0, 1]


def test_ranks_agree_how_often_samples_are_used(client: AnyClient) -> None:
    put_rows(client, 4)
    asks = {**RANK, "dp_size": 2, "batch_index": 0}
    client.get_meta(**asks, max_uses=2)
    with pytest.raises(tq.errors.RankDisagreementError, match="max_uses"):
        client.get_meta(**{**asks, "dp_rank": 1}, max_uses=3)
    with pytest.raises(tq.errors.RankDisagreementError, match="max_uses"):
        client.get_meta(**{**asks, "dp_rank": 1})


def test_queue_workers_use_samples_again(client: AnyClient) -> None:
    put_rows(client, 3)
    client.seal_partition("train")
    asks = {**ASKS, "min_batch_size": 1, "max_uses": 3}
    got = [client.get_meta(**asks).global_indexes for _ in range(3)]
    assert got == [[0, 1]] * 3
    last = client.get_meta(**asks)
    assert last.global_indexes == [2]
    assert client.release(last) == 0  # it can be claimed anyway, and was not used
    assert [client.get_meta(**asks).global_indexes for _ in range(3)] == [[2]] * 3
    assert client.get_meta(**asks).status == "end"


def test_leased_samples_are_used_one_at_a_time(server: LiveServer, client: AnyClient) -> None:
    put_rows(client, 3)
    client.seal_partition("train")
    asks = {**ASKS, "min_batch_size": 1, "max_uses": 2, "lease": LONG}
    first = client.get_meta(**asks)
    other = server.client().get_meta(**asks)
    assert (first.global_indexes, other.global_indexes) == ([0, 1], [2])
    assert status_of(client) == (3, 3, False)
    assert client.ack(first.select_samples([0])) == 1
    assert status_of(client) == (2, 2, False)  # sample 0 is ready for its second use
    again = client.get_meta(**asks)
    assert (again.global_indexes, again.delivery_counts) == ([0], (1,))
    assert client.ack(first) == 1  # of sample 0 it was acknowledged before, and the lease of another worker stays
    assert client.ack(first) == 0
    assert client.ack(again) == 1
    assert client.ack(again) == 0
    assert client.release(other) == 1  # was not used
    for expected in ([1, 2], [2]):
        meta = client.get_meta(**asks)
        assert meta.global_indexes == expected
        assert client.ack(meta) == len(expected)
    assert client.get_meta(**asks).status == "end"
    assert status_of(client) == (3, 0, True)


def test_a_lease_that_runs_out_is_no_use(client: AnyClient) -> None:
    put_rows(client, 1)
    client.seal_partition("train")
    asks = {**ASKS, "min_batch_size": 1, "max_uses": 2, "max_wait": 20.0}
    slow = client.get_meta(**asks, lease=0.1)
    again = client.get_meta(**asks, lease=LONG)
    assert again.delivery_counts == (2,)
    with pytest.raises(tq.errors.LeaseExpiredError):
        client.ack(slow)
    assert client.ack(again) == 1
    last = client.get_meta(**asks, lease=LONG)
    assert last.delivery_counts == (1,)  # counts what was not acknowledged
    assert client.ack(last) == 1
    assert client.get_meta(**asks).status == "end"


DATA: dict[str, Any] = {
    "x": torch.arange(5),
    "matrix": torch.arange(30, dtype=torch.bfloat16).reshape(5, 2, 3),
    "ids": [torch.arange(length) for length in (3, 0, 5, 1, 2)],
    "pairs": [torch.ones(length, 2, length) for length in (1, 2, 3, 1, 2)],
    "text": ["a", "", "ccc", "d", "é"],
    "mixed": [{"a": 1}, None, b"x", "text", [1, 2]],
    "empty": torch.zeros(5, 0),
}


def rows_of(column: Any) -> list[Any]:
    return [row.tolist() if isinstance(row, torch.Tensor) else row for row in column]


def test_a_sample_that_is_drawn_twice_is_fetched_once_and_given_twice(
    start_server: Any, client_kind: ClientKind
) -> None:
    server = start_server(allow_sampler_import=True)
    client = server.client(client_kind)
    client.put("train", DATA)
    asks = {**RANK, "data_fields": list(DATA), "batch_size": 9, "sampler": f"{SAMPLERS}:WithReplacement"}
    drawn = set()
    for index in range(4):
        meta = client.get_meta(**asks, batch_index=index, micro_batch_size=4)
        assert meta == pickle.loads(pickle.dumps(meta))
        assert meta == server.client().get_meta(**asks, batch_index=index, micro_batch_size=4)
        assert len(set(meta.global_indexes)) < meta.size == 9
        batch = client.get_data(meta)
        for name, column in DATA.items():
            assert rows_of(batch[name]) == [rows_of(column)[row] for row in meta.global_indexes], name
        part = tq.BatchMeta.concat(meta.chunk(3))
        assert part.global_indexes == meta.global_indexes
        assert rows_of(client.get_data(part, data_fields=["ids"])["ids"]) == rows_of(batch["ids"])
        drawn.add(tuple(meta.global_indexes))
    assert len(drawn) == 4
    assert status_of(client) == (0, 0, False)
    fetched = client.get_data("train", global_indexes=[3, 0, 3], data_fields=["ids", "x"])
    assert (rows_of(fetched["ids"]), fetched["x"].tolist()) == ([[0], [0, 1, 2], [0]], [3, 0, 3])
    assert client.clear_samples(meta) == len(set(meta.global_indexes))
    with pytest.raises(tq.errors.SamplesClearedError):
        client.get_meta(**asks, batch_index=3, micro_batch_size=4)


def test_a_plan_says_what_it_consumes(start_server: Any, client_kind: ClientKind) -> None:
    server = start_server(allow_sampler_import=True)
    client = server.client(client_kind)
    put_rows(client, 7)
    client.seal_partition("train")
    asks = {**ASKS, "batch_size": 3, "min_batch_size": 1, "sampler": f"{SAMPLERS}:Twice"}
    first = client.get_meta(**asks)
    assert first.global_indexes == [0, 1, 0]
    assert first.micro_batches == [[2], [0, 1]]
    assert status_of(client) == (3, 0, False)  # sample 2 was dropped
    assert client.release(first) == 3
    leased = client.get_meta(**asks, lease=LONG)
    assert (leased.global_indexes, leased.delivery_counts) == ([0, 1, 0], (1, 1, 1))
    assert status_of(client) == (3, 2, False)
    assert client.ack(leased.select_samples([2])) == 1  # by either position
    assert client.ack(leased.select_samples([0])) == 0
    assert client.ack(leased) == 1
    assert client.get_meta(**asks).global_indexes == [3, 4, 3]
    end = client.get_meta(**asks)
    assert end.end is not None
    assert (end.end.consumed_count, end.end.left_over_count) == (6, 1)


@pytest.mark.parametrize("name", ["RepeatsWithoutSayingSo", "ConsumesTwice", "ConsumesWhatIsNotReady"])
def test_a_plan_that_makes_no_sense_consumes_nothing(name: str, start_server: Any, client_kind: ClientKind) -> None:
    client = start_server(allow_sampler_import=True).client(client_kind)
    put_rows(client, 4)
    client.get_meta(**ASKS)
    with pytest.raises(tq.errors.SamplerError):
        client.get_meta(**ASKS, sampler=f"{SAMPLERS}:{name}")
    assert status_of(client) == (2, 0, False)


def test_the_last_batches_are_on_record(
    start_server: Any, client_kind: ClientKind, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tq_service.state.ledger._MOST_REUSING", 2)
    server = start_server(allow_sampler_import=True)
    client = server.client(client_kind)
    put_rows(client, 4)
    asks = {**RANK, "sampler": f"{SAMPLERS}:WithReplacement"}
    batches = [client.get_meta(**asks, batch_index=index) for index in range(4)]
    for index in (2, 3):
        assert client.get_meta(**asks, batch_index=index) == batches[index]
    with pytest.raises(tq.errors.BatchForgottenError, match="only for the last 2 plans") as caught:
        client.get_meta(**asks, batch_index=1)
    expected = {"task_name": "t", "next_batch_index": "4"}
    assert {name: caught.value.metadata[name] for name in expected} == expected
    named = {**ASKS, "sampler": f"{SAMPLERS}:WithReplacement"}
    for name in "abc":
        client.get_meta(**named, claim_name=name)
    with pytest.raises(tq.errors.BatchForgottenError):
        client.get_meta(**named, claim_name="a")
    assert client.get_meta(**named, claim_name="b").size == 2


def test_batches_far_ahead_are_not_planned_without_end(start_server: Any, client_kind: ClientKind) -> None:
    client = start_server(allow_sampler_import=True).client(client_kind)
    put_rows(client, 4)
    asks = {**RANK, "sampler": f"{SAMPLERS}:WithReplacement"}
    with pytest.raises(tq.errors.InvalidArgumentError, match="256 more than the next batch") as caught:
        client.get_meta(**asks, batch_index=2**40)
    assert caught.value.field == "batch_index"
    assert client.get_meta(**asks, batch_index=9).size == 2
    (task,) = client.describe_partition("train").tasks
    assert task.planned_batch_count == 10


@pytest.mark.parametrize("takes_snapshot", [False, True])
def test_uses_and_plans_outlive_a_restart(
    takes_snapshot: bool, tmp_path: Path, loop_thread: LoopThread, client_kind: ClientKind
) -> None:
    settings = {"data_dir": tmp_path, "allow_sampler_import": True}
    drawing = {**RANK, "task_name": "d", "sampler": f"{SAMPLERS}:WithReplacement", "batch_index": 0}
    leasing = {**ASKS, "task_name": "l", "max_uses": 2, "lease": LONG, "batch_size": 4}
    with LiveServer(loop_thread, **settings) as server:
        client = server.client(client_kind)
        put_rows(client, 4)
        client.seal_partition("train")
        drawn = client.get_meta(**drawing)
        got = client.get_meta(**RANK, max_uses=2, batch_index=0)
        leased = client.get_meta(**leasing)
        client.ack(leased.select_samples([0]))
        if takes_snapshot:
            server.loop.run(server.app.state_store.take_snapshot())
        client.ack(leased.select_samples([1]))
    with LiveServer(loop_thread, **settings) as server:
        client = server.client(client_kind)
        assert client.get_meta(**drawing) == drawn
        batches = [client.get_meta(**RANK, max_uses=2, batch_index=index).global_indexes for index in range(4)]
        assert batches == [got.global_indexes] * 2 + [[2, 3]] * 2
        assert client.ack(leased) == 2
        last = client.get_meta(**leasing)
        assert (last.global_indexes, client.ack(last)) == ([0, 1, 2, 3], 4)
        assert client.get_meta(**leasing).status == "end"


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_loader_uses_each_sample_so_often(server: LiveServer, num_workers: int) -> None:
    client = server.client()
    put_rows(client, 8)
    client.seal_partition("train")
    dataset = StreamingDataset(
        server.address, batch_size=4, micro_batch_size=2, data_fields=["x"], partition_id="train", task_name="t",
        max_uses=2,
    )  # fmt: skip
    seen = [batch["x"].tolist() for batch, _ in StreamingDataLoader(dataset, num_workers=num_workers)]
    assert seen == [[0, 1], [2, 3], [0, 1], [2, 3], [4, 5], [6, 7], [4, 5], [6, 7]]


def test_micro_batches_of_a_batch_with_replacement(start_server: Any) -> None:
    server = start_server(allow_sampler_import=True)
    client = server.client()
    client.put("train", {"x": torch.arange(7), "ids": [torch.arange(n) for n in range(7)]})
    client.seal_partition("train")
    dataset = StreamingDataset(
        server.address, batch_size=3, data_fields=["x", "ids"], partition_id="train", task_name="t",
        sampler=f"{SAMPLERS}:Twice",
    )  # fmt: skip
    seen = [(batch["x"].tolist(), rows_of(batch["ids"]), meta.global_indexes) for batch, meta in
            StreamingDataLoader(dataset)]  # fmt: skip
    assert seen == [
        ([0], [[]], [0]),
        ([0, 1], [[], [0]], [0, 1]),
        ([3], [[0, 1, 2]], [3]),
        ([3, 4], [[0, 1, 2], [0, 1, 2, 3]], [3, 4]),
    ]


@pytest.mark.parametrize("max_uses", [0, -1, 2**31])
def test_how_often_is_a_number(max_uses: int, client: AnyClient) -> None:
    put_rows(client, 2)
    with pytest.raises(tq.errors.InvalidArgumentError) as caught:
        client.get_meta(**ASKS, max_uses=max_uses)
    assert caught.value.field == "max_uses"
