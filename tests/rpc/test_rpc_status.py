"""The status of the service in one call: what it is, its partitions and tasks, and what is waited for."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from certificates import add_token
from live_server import AnyClient, LiveServer, LoopThread, StartServer
from rpc_samples import violations_of

import tq_service as tq
from tq_service.config import load_settings
from tq_service.results import ServiceStatus, TaskStatus, WaitCode
from tq_service.server import controller_servicer
from tq_service.server.app import running
from tq_service.serving.planner import DeliveryRate
from tq_service.v1 import controller_service_pb2 as pb
from tq_service.version import BUILD

ASKED: dict[str, Any] = {"task_name": "t", "data_fields": ["x"], "batch_size": 4}


@contextmanager
def waiting(server: LiveServer, **asked: Any) -> Iterator[None]:
    """Have a claim wait for as long as the `with` lasts; it ends with the server's or the client's close."""
    with ThreadPoolExecutor(1) as threads, tq.Client(server.address, timeout=30.0, namespace=False) as client:
        claim = threads.submit(client.get_meta, **{**ASKED, "max_wait": 20.0, **asked})
        until(lambda: bool(client.explain(asked["partition_id"], asked.get("task_name", "t"))))
        assert not claim.done()
        yield
        client.close()
        with pytest.raises(tq.errors.CallCancelledError):
            claim.result(20)


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def task_in(status: ServiceStatus) -> TaskStatus:
    (partition,) = status.partitions
    (task,) = partition.tasks
    return task


def waits_of(status: ServiceStatus) -> list[tuple[str, str, str, int]]:
    return [
        (wait.partition_id, wait.reason.task_name, wait.reason.code, wait.reason.waiting_count) for wait in status.waits
    ]


def test_an_empty_service_says_what_it_is(client: AnyClient, server: LiveServer) -> None:
    status = client.status()
    service = status.service
    assert (service.version, service.role, service.durability, service.data_dir) == (BUILD, "all", "memory", "")
    assert (service.tls, service.auth, service.client_certificates) == (False, False, False)
    assert len(service.instance_id) == 16
    assert status.revision == client.list_partitions().revision
    assert status.revision.instance_id == service.instance_id
    assert client.status().service.instance_id == service.instance_id
    assert 0 <= service.uptime_seconds < client.status().service.uptime_seconds
    (storage,) = status.storages
    assert (storage.storage_id, storage.address, storage.heard_ago_seconds) == ("test-storage", "", None)
    assert (storage.used_bytes, storage.put_count, storage.is_silent) == (0, 0, False)
    assert storage.max_bytes
    assert (status.partitions, status.waits) == ((), ())


def test_what_survives_and_where(start_server: StartServer, tmp_path: Path) -> None:
    service = start_server(data_dir=tmp_path, shared_memory="off").client().status().service
    assert (service.durability, service.data_dir, service.shared_memory) == ("process", str(tmp_path), False)


def test_partitions_are_described_as_by_themselves(client: AnyClient) -> None:
    for name in ("b", "a"):
        client.put(name, {"x": np.arange(8)}, custom_meta=[{"v": 1}] * 8)
    client.get_meta(partition_id="a", **ASKED)
    status = client.status()
    assert [each.summary.partition_id for each in status.partitions] == ["a", "b"]
    described = [client.describe_partition(name) for name in ("a", "b")]
    assert [each.summary for each in status.partitions] == [each.summary for each in described]
    assert [each.fields for each in status.partitions] == [each.fields for each in described]
    task = status.partitions[0].tasks[0]
    assert (task.consumed_count, task.pending_count, task.redelivered_count) == (4, 4, 0)
    assert status.storages[0].put_count == 2
    assert [each.summary.partition_id for each in client.status("b").partitions] == ["b"]


def test_how_old_is_what_a_task_has_left(client: AnyClient) -> None:
    client.create_partition("p", tasks=["update", "score"])
    meta = [{"version": version} for version in (3, 4, 8, 5)]
    client.put("p", {"x": np.arange(4)}, custom_meta=meta)
    seen = {task.task_name: task for task in client.describe_partition("p").tasks}
    assert (seen["update"].oldest_version, seen["update"].staleness_versions) == (3, 5)
    assert (seen["score"].oldest_version, seen["score"].staleness_versions) == (3, 5)
    client.get_meta(partition_id="p", **ASKED | {"task_name": "update", "batch_size": 2})
    until(lambda: _versions_left(client) == (5, 3))
    client.get_meta(partition_id="p", **ASKED | {"task_name": "update", "batch_size": 2})
    assert _versions_left(client) == (None, None)


def _versions_left(client: AnyClient) -> tuple[float | None, float | None]:
    (task,) = (each for each in client.status().partitions[0].tasks if each.task_name == "update")
    return task.oldest_version, task.staleness_versions


def test_the_claims_that_lease_samples_are_named(client: AnyClient) -> None:
    client.put("p", {"x": np.arange(30)})
    asked = {"partition_id": "p", "task_name": "t", "data_fields": ["x"], "batch_size": 1, "lease": 60.0}
    metas = [client.get_meta(**asked, claim_name=f"w{number}") for number in range(25)]
    client.ack(metas[1])
    (task,) = client.describe_partition("p").tasks
    assert (task.leased_count, task.leasing_claim_count) == (24, 24)
    assert [each.claim_name for each in task.leases] == ["w0", *(f"w{number}" for number in range(2, 21))]
    first = task.leases[0]
    assert re.fullmatch("[0-9a-f]{8}", first.claim_id)
    assert first.leased_count == 1
    assert 0 <= first.delivered_ago_seconds < 60
    assert first.delivered_ago_seconds + first.ends_in_seconds == pytest.approx(60.0)
    client.reset_consumption("p", "t", 0)
    (task,) = client.status().partitions[0].tasks
    assert (task.leasing_claim_count, task.leases) == (0, ())


def test_samples_without_versions_have_no_age(client: AnyClient) -> None:
    client.put("p", {"x": np.arange(8)}, custom_meta=[{"version": "a"}] * 8)
    client.get_meta(partition_id="p", **ASKED)
    task = task_in(client.status())
    assert (task.oldest_version, task.staleness_versions) == (None, None)


def test_samples_whose_leases_ran_out_are_counted_until_they_are_cleared(client: AnyClient) -> None:
    client.put("p", {"x": np.arange(6)})
    asked = ASKED | {"batch_size": 2, "partition_id": "p"}
    client.release(client.get_meta(**asked, lease=60.0))
    first = client.get_meta(**asked, lease=0.05, max_deliveries=2)
    assert task_in(client.status()).redelivered_count == 0
    again = client.get_meta(**asked, lease=0.05, max_deliveries=2)
    until(lambda: task_in(client.status()).leased_count == 0)
    while not set(first.global_indexes) & set(again.global_indexes):
        again = client.get_meta(**asked, lease=0.05, max_deliveries=2)
    until(lambda: task_in(client.status()).dead_lettered_count >= 2)
    task = task_in(client.status())
    assert task.redelivered_count >= task.dead_lettered_count
    assert set(task.dead_lettered_indexes) <= set(range(6))
    assert task.pending_count + task.consumed_count + task.dead_lettered_count == 6
    client.clear_samples("p", global_indexes=range(6))
    cleared = task_in(client.status())
    assert (cleared.redelivered_count, cleared.dead_lettered_indexes, cleared.pending_count) == (0, (), 0)


def test_a_rate_rises_with_deliveries_and_falls_without() -> None:
    rate = DeliveryRate()
    assert rate.per_second(7.0) == 0.0
    for second in range(100):
        rate.add(50, float(second))
    assert rate.per_second(99.0) == pytest.approx(50.0, rel=0.06)
    assert rate.per_second(109.0) == pytest.approx(rate.per_second(99.0) / np.e)
    assert rate.per_second(1e6) == 0.0


def test_the_rate_of_a_task_is_that_of_its_deliveries(client: AnyClient) -> None:
    client.put("p", {"x": np.arange(100)})
    assert client.get_meta(partition_id="p", **ASKED | {"batch_size": 40}).size == 40
    first = task_in(client.status()).delivered_per_second
    assert 0 < first <= 4.0
    ranked = ASKED | {"task_name": "r", "batch_size": 20}
    client.get_meta(partition_id="p", **ranked, dp_rank=0, dp_size=2, batch_index=0)
    client.get_meta(partition_id="p", **ranked, dp_rank=1, dp_size=2, batch_index=0)
    (partition,) = client.status().partitions
    rates = {task.task_name: task.delivered_per_second for task in partition.tasks}
    assert 0 < rates["t"] < first
    assert 0 < rates["r"] <= 4.0  # one plan for both ranks
    client.clear_partition("p")
    client.put("p", {"x": np.arange(1)})
    client.get_meta(partition_id="p", **ASKED, max_wait=0.0)
    assert task_in(client.status()).delivered_per_second == 0.0


def test_what_is_waited_for_is_said_with_its_reason(client: AnyClient, server: LiveServer) -> None:
    client.put("train", {"x": np.arange(2)})
    with (
        waiting(server, partition_id="train"),
        waiting(server, partition_id="trian", task_name="u"),
        waiting(server, partition_id="trian", task_name="u"),
    ):
        until(lambda: sum(wait[3] for wait in waits_of(client.status())) == 3)  # two of them ask alike
        status = client.status()
        assert waits_of(status) == [
            ("train", "t", WaitCode.TOO_FEW_READY, 1),
            ("trian", "u", WaitCode.PARTITION_NOT_FOUND, 2),
        ]
        few, absent = (wait.reason for wait in status.waits)
        assert (few.ready_count, few.needed_count, few.data_fields) == (2, 4, ("x",))
        assert absent.text == "there is no partition 'trian'; known: 'train'"
        assert waits_of(client.status("tri")) == waits_of(status)[1:]
        assert [each.summary.partition_id for each in status.partitions] == ["train"]
        unexplained = client.status(explain=False)
        assert waits_of(unexplained) == [("train", "t", "", 1), ("trian", "u", "", 2)]
        assert {wait.reason.text for wait in unexplained.waits} == {""}
        assert [(reason.task_name, reason.waiting_count) for reason in client.explain("trian")] == [("u", 2)]
        assert client.explain("trian", "t") == []
    assert client.status().waits == ()


def test_a_look_up_that_waits_for_a_partition_has_no_task(client: AnyClient, server: LiveServer) -> None:
    with ThreadPoolExecutor(1) as threads, tq.Client(server.address) as other:
        found = threads.submit(other.lookup_samples, "p", keys=["a"], max_wait=20.0)
        until(lambda: bool(client.status().waits))
        assert waits_of(client.status()) == [("p", "", WaitCode.PARTITION_NOT_FOUND, 1)]
        client.insert("p", keys=["a"])
        assert found.result(20)[0].keys == ["a"]


def test_a_namespace_has_its_own_names(server: LiveServer, client_kind: Any) -> None:
    run = server.client(client_kind, namespace="run-7")
    run.insert("train", 1)
    server.client().insert("eval", 1)
    with waiting(server, partition_id="run-7/trian"), waiting(server, partition_id="trian"):
        status = run.status()
        assert [each.summary.partition_id for each in status.partitions] == ["train"]
        assert [wait.partition_id for wait in status.waits] == ["trian"]


def test_a_token_sees_what_it_is_for(start_server: StartServer, tmp_path: Path) -> None:
    tokens = tmp_path / "tokens.toml"
    boss, mine = add_token(tokens, "boss", ["admin"]), add_token(tokens, "mine", ["read"], ("mine/",))
    server = start_server(auth_tokens_file=tokens, data_dir=tmp_path / "data")
    admin, reader = server.client(token=boss), server.client(token=mine)
    for name in ("mine/train", "yours/train"):
        admin.insert(name, 1)
    with ExitStack() as stack:
        threads = stack.enter_context(ThreadPoolExecutor(2))
        for name in ("mine/trian", "yours/trian"):
            waiter = stack.enter_context(tq.Client(server.address, token=boss))
            threads.submit(waiter.get_meta, partition_id=name, **ASKED, max_wait=20.0)
        until(lambda: len(admin.status().waits) == 2)
        status = reader.status()
        assert [each.summary.partition_id for each in status.partitions] == ["mine/train"]
        assert waits_of(status) == [("mine/trian", "t", WaitCode.PARTITION_NOT_FOUND, 1)]
        assert "yours" not in status.waits[0].reason.text
        assert (status.service.auth, status.service.data_dir) == (True, "")
        assert admin.status().service.data_dir == str(tmp_path / "data")


def pages(server: LiveServer, **request: Any) -> list[pb.GetStatusResponse]:
    asked, answers = pb.GetStatusRequest(**request), list[pb.GetStatusResponse]()
    while not answers or asked.page_token:
        answers.append(server.controller.GetStatus(asked, timeout=20))
        asked.page_token = answers[-1].next_page_token
    return answers


def test_pages_end_by_number_and_by_size(
    server: LiveServer, client: AnyClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in "abde":
        client.create_partition(name)
    with waiting(server, partition_id="c"):
        by_two = pages(server, page_size=2)
        assert [[each.summary.partition_id for each in page.partitions] for page in by_two] == [
            ["a", "b"], ["d"], ["e"]
        ]  # fmt: skip
        assert [[wait.partition_id for wait in page.waits] for page in by_two] == [[], ["c"], []]
        assert [page.HasField("service") for page in by_two] == [True, False, False]
        assert [len(page.storages) for page in by_two] == [1, 0, 0]
        whole = client.status()
        monkeypatch.setattr(controller_servicer, "_MOST_STATUS_BYTES", 1)
        assert len(pages(server)) == 5
        assert client.status().partitions == whole.partitions
        monkeypatch.setattr(controller_servicer, "_MOST_WAITS", 1)
        with waiting(server, partition_id="c", data_fields=["y"], task_name="u"):
            assert waits_of(client.status(explain=False)) == [("c", "t", "", 1)]


@pytest.mark.parametrize(("field", "value"), [("page_size", -1), ("page_token", "zzz")])
def test_pages_of_the_status_that_are_none_are_refused(server: LiveServer, field: str, value: Any) -> None:
    with pytest.raises(grpc.RpcError) as caught:
        server.controller.GetStatus(pb.GetStatusRequest(**{field: value}), timeout=20)
    assert violations_of(caught.value) == [field]


def test_storage_services_that_run_apart_are_listed(loop_thread: LoopThread) -> None:
    async def watch() -> None:
        controller = load_settings({"port": 0, "role": "controller"}).settings
        async with running(controller) as app, tq.AsyncClient(f"127.0.0.1:{app.port}", timeout=20.0) as client:
            settings = load_settings(
                {"port": 0, "role": "storage", "controller": client.address, "storage_id": "apart", "max_bytes": "1GiB"}
            ).settings
            assert (await client.status()).storages == ()
            async with running(settings) as storage:
                meta = await client.put("p", {"x": np.arange(4)})
                (status,) = (await client.status()).storages
                assert meta.size == 4
                assert (status.storage_id, status.max_bytes, status.version) == ("apart", 1 << 30, BUILD)
                assert status.address == f"127.0.0.1:{storage.port}"
                assert status.heard_ago_seconds is not None
                assert not status.is_silent
                assert app.controller is not None
                known: Any = app.controller.storages._storages["apart"]
                known._heard_at -= 60.0
                (status,) = (await client.status()).storages
                assert status.is_silent
                assert (await client.status()).service.role == "controller"

    loop_thread.run(watch())


def test_dead_lettered_samples_are_delivered_again(client: AnyClient) -> None:
    client.put("p", {"x": np.arange(4)})
    asked = ASKED | {"partition_id": "p", "lease": 0.02, "max_deliveries": 1}
    client.get_meta(**asked)
    until(lambda: task_in(client.status()).dead_lettered_count == 4)
    assert client.requeue_dead_lettered("p", "t", []) == 0
    assert client.requeue_dead_lettered("p", "t", [1, 9]) == 1
    assert client.requeue_dead_lettered("p", "t", [1]) == 0
    task = task_in(client.status())
    assert (task.dead_lettered_indexes, task.pending_count, task.redelivered_count) == ((0, 2, 3), 1, 0)
    meta = client.get_meta(**asked | {"batch_size": 1, "lease": 60.0})
    assert (meta.global_indexes, meta.delivery_counts) == ([1], (1,))
    assert client.requeue_dead_lettered("p", "t") == 3
    assert task_in(client.status()).pending_count == 3
    with pytest.raises(tq.errors.StaleIncarnationError):
        client.requeue_dead_lettered("p", "t", incarnation=bytes(16))
    with pytest.raises(tq.errors.TaskNotFoundError):
        client.requeue_dead_lettered("p", "u")


def test_samples_of_a_task_at_its_end_are_not_requeued(client: AnyClient) -> None:
    client.put("p", {"x": np.arange(2)})
    client.get_meta(partition_id="p", **ASKED | {"batch_size": 1}, lease=0.02, max_deliveries=1)
    until(lambda: task_in(client.status()).dead_lettered_count == 1)
    client.seal_partition("p")
    ranked = ASKED | {"partition_id": "p", "batch_size": 1, "dp_rank": 0, "dp_size": 1}
    assert client.get_meta(**ranked, batch_index=0).size == 1
    assert client.get_meta(**ranked, batch_index=1).status == "end"
    with pytest.raises(tq.errors.PreconditionError, match="keep_consumed"):
        client.requeue_dead_lettered("p", "t")
    client.reset_consumption("p", "t", keep_consumed=True)
    assert client.get_meta(**ranked, batch_index=0).global_indexes == [0]
