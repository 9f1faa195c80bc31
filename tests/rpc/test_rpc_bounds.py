"""Bounded partitions over the wire: who waits, until when, what holds no memory meanwhile, and who never waits."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import grpc
import numpy as np
import pytest
from fault_seconds import FAULT_SECONDS
from live_server import AnyClient, LiveServer, StartServer
from rpc_samples import new_id

import tq_service as tq
from tq_service.testing import ServiceProcess
from tq_service.v1 import commit_pb2
from tq_service.v1 import controller_service_pb2 as pb

ROW = np.zeros((1, 1000), np.uint8)


def until(holds: Callable[[], bool], seconds: float = 20.0) -> None:
    """Wait for a condition."""
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.01)


@pytest.fixture
def threads() -> Any:
    with ThreadPoolExecutor(8) as executor:
        yield executor


def rows(count: int) -> dict[str, Any]:
    return {"x": np.zeros((count, 1000), np.uint8)}


def waiting(client: AnyClient, partition_id: str = "p") -> int:
    count: int = client.describe_partition(partition_id).waiting_put_count
    return count


def waits(client: AnyClient, threads: ThreadPoolExecutor, count: int = 1, **arguments: Any) -> Future[tq.BatchMeta]:
    """Start a put, and return once it waits."""
    before = waiting(client)
    call = threads.submit(lambda: client.put("p", rows(count), **arguments))
    until(lambda: waiting(client) == before + 1)
    return call


def claim(client: AnyClient, batch_size: int, task_name: str = "t") -> tq.BatchMeta:
    meta: tq.BatchMeta = client.get_meta(
        partition_id="p", task_name=task_name, data_fields=["x"], batch_size=batch_size, max_wait=20.0
    )
    return meta


def test_a_put_waits_until_the_task_has_consumed(client: AnyClient, threads: ThreadPoolExecutor) -> None:
    client.create_partition("p", admissions=[tq.Admission("t", 4)])
    client.put("p", rows(4))
    first, second = waits(client, threads, 2), waits(client, threads, 1)
    claim(client, 2)
    assert first.result(timeout=20).global_indexes == [4, 5]
    assert not second.done()
    claim(client, 1)
    assert second.result(timeout=20).global_indexes == [6]


def test_a_put_waits_for_bytes_without_holding_any(
    server: LiveServer, client: AnyClient, threads: ThreadPoolExecutor
) -> None:
    client.create_partition("p", max_bytes=300_000)
    full = client.put("p", rows(300))
    held = client.storage_stat().used_bytes
    call = waits(client, threads, 290)  # larger than what is sent in one message
    assert client.storage_stat().used_bytes == held
    client.put(full, {"y": np.zeros((300, 100), np.uint8)})  # columns of samples that are there never wait
    assert client.describe_partition("p").used_bytes == 330_000
    client.clear_samples(full)
    assert len(call.result(timeout=20).global_indexes) == 290
    assert client.describe_partition("p").used_bytes == 290_000


def test_an_insert_waits_and_is_refused_in_time(client: AnyClient) -> None:
    client.create_partition("p", admissions=[tq.Admission("t", 1)])
    client.insert("p", 1)
    with pytest.raises(tq.errors.AdmissionLimitError) as caught:
        client.insert("p", 1, timeout=FAULT_SECONDS)
    assert caught.value.retry_after_seconds
    assert caught.value.metadata == {
        "limit_name": "most", "got": "2", "limit": "1", "task_name": "t", "unit": "sample",
        "method": "/tq_service.v1.ControllerService/Insert",
    }  # fmt: skip
    assert client.describe_partition("p").summary.inserted_count == 1


@pytest.mark.parametrize("count", [1, 300])
def test_over_the_bound_until_the_deadline_nothing_is_left(client: AnyClient, count: int) -> None:
    client.create_partition("p", max_bytes=300_000)
    client.put("p", rows(300))
    before = client.storage_stat()
    with pytest.raises(tq.errors.QuotaExceededError, match="300000") as caught:
        client.put("p", rows(count), timeout=FAULT_SECONDS)
    assert caught.value.retry_after_seconds
    after = client.storage_stat()
    assert (after.used_bytes, after.put_count) == (before.used_bytes, before.put_count)


def test_what_never_fits_is_refused_at_once(client: AnyClient) -> None:
    client.create_partition("p", max_bytes=1500, admissions=[tq.Admission("t", 3)])
    for count, error in ((2, tq.errors.QuotaExceededError), (4, tq.errors.AdmissionLimitError)):
        with pytest.raises(error) as caught:
            client.put("p", rows(count) if count == 2 else {"x": ROW[:, :1].repeat(4, 0)}, timeout=60.0)
        assert caught.value.retry_after_seconds is None


def test_the_same_bounds_confirm_the_partition(client: AnyClient) -> None:
    limits = [tq.Admission("b", 2), tq.Admission("a", 3, "group", "published", "actor")]
    made = client.create_partition("p", max_bytes=10, admissions=limits)
    assert client.create_partition("p", max_bytes=10, admissions=limits[::-1]) == made
    with pytest.raises(tq.errors.AlreadyExistsError):
        client.create_partition("p", max_bytes=10)
    shown = client.describe_partition("p")
    assert (shown.max_bytes, shown.admissions) == (10, tuple(limits[::-1]))
    for wrong in ({"max_bytes": 0}, {"admissions": [limits[0], limits[0]]}):
        with pytest.raises(tq.errors.InvalidArgumentError):
            client.create_partition("q", **wrong)


def test_a_clear_ends_the_wait(client: AnyClient, threads: ThreadPoolExecutor) -> None:
    client.create_partition("p", admissions=[tq.Admission("t", 1)])
    client.put("p", rows(1))
    call = waits(client, threads)
    client.clear_partition("p")
    with pytest.raises(tq.errors.PartitionClearedError):
        call.result(timeout=20)


def test_a_client_that_leaves_leaves_the_line(server: LiveServer, client: AnyClient) -> None:
    client.create_partition("p", admissions=[tq.Admission("t", 1)])
    meta = client.insert("p", 1)
    request = pb.InsertRequest(request_id=new_id(), write=commit_pb2.SampleWrite(partition_id="p", row_count=1))
    call = server.controller.Insert.future(request, timeout=60)
    until(lambda: waiting(client) == 1)
    call.cancel()
    until(lambda: waiting(client) == 0)
    client.put(meta, state="failed")
    assert client.insert("p", 1).global_indexes == [1]  # the capacity and the index are not the cancelled call's


def test_a_retry_takes_the_place_of_the_call_that_it_repeats(server: LiveServer, client: AnyClient) -> None:
    client.create_partition("p", admissions=[tq.Admission("t", 1)])
    meta = client.insert("p", 1)
    request = pb.InsertRequest(request_id=new_id(), write=commit_pb2.SampleWrite(partition_id="p", row_count=1))
    first = server.controller.Insert.future(request, timeout=60)
    until(lambda: waiting(client) == 1)
    again = server.controller.Insert.future(request, timeout=60)
    assert first.code() is grpc.StatusCode.CANCELLED
    client.put(meta, state="failed")
    assert list(again.result().meta.global_indexes) == [1]
    assert list(server.controller.Insert(request, timeout=20).meta.global_indexes) == [1]
    assert client.describe_partition("p").summary.inserted_count == 2


def test_a_put_at_a_storage_service_of_its_own_waits_with_its_commit(threads: ThreadPoolExecutor) -> None:
    with (
        ServiceProcess("--role", "controller") as controller,
        ServiceProcess("--role", "storage", "--controller", controller.address) as storage,
        tq.Client(controller.address, timeout=30.0) as client,
    ):
        client.create_partition("p", admissions=[tq.Admission("t", 1)])
        client.put("p", rows(1))
        with pytest.raises(tq.errors.AdmissionLimitError):
            client.put("p", rows(1), timeout=FAULT_SECONDS)
        call = threads.submit(lambda: client.put("p", rows(1)))
        until(lambda: client.describe_partition("p").waiting_put_count == 1)
        client.get_meta(partition_id="p", task_name="t", data_fields=["x"], batch_size=1)
        assert call.result(timeout=20).global_indexes == [1]
        client.clear_partition("p")
        until(lambda: client.storage_stat(storage.address).put_count == 0)  # that of the refused commit is gone too


def test_producers_are_held_to_the_pace_of_the_consumer(start_server: StartServer, threads: ThreadPoolExecutor) -> None:
    """Under a sustained overload nothing is lost, nothing handed out twice, and never more is left than allowed."""
    server = start_server(max_bytes=400_000)
    client = server.client()
    client.create_partition("p", max_bytes=100_000, admissions=[tq.Admission("t", 64)])
    producer_count, put_count, most_left = 4, 25, []
    stop = threading.Event()

    def produce() -> None:
        for _ in range(put_count):
            client.put("p", rows(8), timeout=60.0)

    def watch() -> None:
        while not stop.is_set():
            shown = client.describe_partition("p")
            most_left.append((shown.live_count, shown.used_bytes, client.storage_stat().used_bytes))

    watching = threads.submit(watch)
    producers = [threads.submit(produce) for _ in range(producer_count)]
    seen: list[int] = []
    while len(seen) < producer_count * put_count * 8:
        meta = claim(client, 8)
        seen += meta.global_indexes
        client.clear_samples(meta)
    stop.set()
    for call in (watching, *producers):
        call.result(timeout=60)
    assert sorted(seen) == list(range(producer_count * put_count * 8))
    assert max(live for live, _, _ in most_left) <= 64 + 8  # a batch is claimed before it is cleared
    assert max(used for _, used, _ in most_left) <= 100_000
    assert max(used for _, _, used in most_left) <= 400_000
