"""Controllers of a cluster: one leads, the others refuse calls and take over with what was acknowledged."""

from __future__ import annotations

import pickle
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from certificates import Authority, request_id
from cluster_support import KEYS, running_etcd
from etcd_stand_in import EtcdStandIn
from grpc_health.v1 import health_pb2, health_pb2_grpc
from live_server import AnyClient, ClientKind, LiveServer, StartServer
from scraping import scrape

import tq_service as tq
from tq_service.cli.status import header_of
from tq_service.config import load_settings
from tq_service.internal.v1.cluster_pb2 import FetchSnapshotRequest
from tq_service.internal.v1.cluster_pb2_grpc import ClusterServiceStub
from tq_service.internal.v1.storage_control_pb2 import ReconcilePutsRequest, UpdatePutsRequest
from tq_service.server.app import CONTROLLER_SERVICE
from tq_service.server.supervisor import FAILED_EXIT_CODE
from tq_service.v1.controller_service_pb2 import CreatePartitionRequest, GetMetaRequest, ListPartitionsRequest
from tq_service.wire.error_table import from_rpc_error, status_from_trailers

SERVING, NOT_SERVING = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING
StartController = Callable[..., LiveServer]


@pytest.fixture
def etcd() -> Iterator[EtcdStandIn]:
    stand_in = EtcdStandIn()
    yield stand_in
    stand_in.stop()


@pytest.fixture
def secret(tmp_path: Path) -> Path:
    return tmp_path / "secret"


def wait_for(condition: Callable[[], Any]) -> Any:
    deadline = time.monotonic() + 60
    while not (found := condition()):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return found


@pytest.fixture
def start_controller(start_server: StartServer, tmp_path: Path, secret: Path, etcd: EtcdStandIn) -> StartController:
    def start(name: str, journal: str = "", lease_seconds: float = 10, **flags: Any) -> LiveServer:
        """Start a controller; on a busy machine a short lease ends by itself."""
        return start_server(
            role="controller",
            journal=journal or f"etcd://{etcd.address}",
            cluster="test",
            lease_seconds=lease_seconds,
            data_dir=tmp_path / name,
            internal_secret_file=secret,
            storage_id=None,
            **flags,
        )

    return start


@contextmanager
def errors_of_grpc() -> Iterator[None]:
    try:
        yield
    except grpc.RpcError as error:
        status = status_from_trailers(error.trailing_metadata())
        raise from_rpc_error(error.code(), error.details(), status) from None


def start_storage(start_server: StartServer, secret: Path, *controllers: LiveServer) -> LiveServer:
    return start_server(
        role="storage",
        controller=",".join(each.address for each in controllers),
        storage_id="s",
        internal_secret_file=secret,
        shared_memory="off",
    )


def health_of(server: LiveServer, service: str = CONTROLLER_SERVICE) -> int:
    stub: Any = health_pb2_grpc.HealthStub(server.channel)
    status: int = stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=10).status
    return status


def leads(server: LiveServer) -> bool:
    return health_of(server) == SERVING


def kill(server: LiveServer, etcd: EtcdStandIn) -> None:
    """End a leader as a kill does, so that nothing of it is flushed, and its lease."""

    cluster = server.app.cluster
    assert cluster is not None
    assert cluster._lease is not None

    async def abort() -> None:
        cluster._lease._closed.set()  # it keeps nothing alive any more
        server.app.supervisor.fatal("killed by the test")

    server.loop.run(abort())
    etcd.end_leases(cluster._lease.id)
    with pytest.raises(tq.errors.ServiceFailedError):
        server.stop()
    server._running = None


def start_two(start_controller: StartController) -> tuple[LiveServer, LiveServer]:
    """Return a controller that leads, and one that stands by."""
    both = start_controller("a"), start_controller("b")
    leader = wait_for(lambda: next(filter(leads, both), None))
    return leader, both[leader is both[0]]


def put(client: Any, number: int, rows: int = 4) -> Any:
    return client.put("train", {"x": np.full((rows, 2), number)}, keys=[f"{number}_{row}" for row in range(rows)])


def test_a_standby_lives_refuses_calls_and_says_where_the_leader_is(start_controller: StartController) -> None:
    first = start_controller("a")
    wait_for(lambda: leads(first))
    second = start_controller("b")
    assert health_of(second, "") == SERVING
    assert health_of(second) == NOT_SERVING
    wait_for(lambda: second.app.cluster.leader_address)  # type: ignore[union-attr]
    with pytest.raises(tq.errors.NotLeaderError, match="is not the leader of its cluster") as caught, errors_of_grpc():
        second.controller.ListPartitions(ListPartitionsRequest())
    assert caught.value.metadata["leader_address"] == first.address
    assert int(caught.value.metadata["epoch"]) == first.app.cluster.epoch  # type: ignore[union-attr]
    assert first.client().list_partitions() == []


def test_a_standby_takes_over_what_was_acknowledged_and_the_storage_service_goes_on(
    start_controller: StartController, start_server: StartServer, secret: Path, etcd: EtcdStandIn
) -> None:
    leader, standby = start_two(start_controller)
    storage = start_storage(start_server, secret, leader, standby)
    client = leader.client(timeout=60.0)
    metas = [put(client, number) for number in range(3)]
    claim = {
        "partition_id": "train",
        "task_name": "train",
        "data_fields": ["x"],
        "batch_size": 2,
        "dp_rank": 0,
        "dp_size": 2,
    }
    batches = client.get_meta(**claim, batch_index=0, batch_count=2)
    assert [batch.size for batch in batches] == [2, 2]
    client.clear_samples(metas[2])
    wait_for(lambda: storage.client().storage_stat(storage.address).put_count == 2)
    controller_id = leader.app.controller.storages.controller_id  # type: ignore[union-attr]
    kill(leader, etcd)
    wait_for(lambda: leads(standby))
    assert standby.app.controller.storages.controller_id == controller_id  # type: ignore[union-attr]
    client = standby.client(timeout=60.0)
    assert [client.get_meta(**claim, batch_index=index) for index in range(2)] == batches
    assert client.get_meta(**claim, batch_index=0, batch_count=2) == batches
    put(client, 3)
    got = client.get_data("train", keys=["1_0", "3_3"], data_fields=["x"])
    assert np.asarray(got["x"]).tolist() == [[1, 1], [3, 3]]
    client.clear_partition("train")
    wait_for(lambda: storage.client().storage_stat(storage.address).put_count == 0)


def test_a_standby_takes_over_versions_slots_and_rows_that_grow(
    start_controller: StartController, start_server: StartServer, secret: Path, etcd: EtcdStandIn
) -> None:
    leader, standby = start_two(start_controller)
    start_storage(start_server, secret, leader, standby)
    client = leader.client(timeout=60.0)
    client.publish_version(3)
    bound = tq.Admission("train", max_staleness=1, global_batch=2)
    client.create_partition("train", admissions=[bound])
    client.put("prompts", {"x": np.arange(1)}, keys=["p"])
    claim = {"task_name": "rollout", "data_fields": ["x"], "batch_size": 1, "lease": 60.0, "max_wait": 20.0}
    prompts = client.get_meta(partition_id="prompts", **claim, admit=tq.Admit("train", group_size=2))
    slots = client.append(prompts.admitted, {"tokens": [[1, 2], [3]]}, at=[0, 0])
    kill(leader, etcd)
    wait_for(lambda: leads(standby))

    client = standby.client(timeout=60.0)
    assert client.get_version() == 3
    with pytest.raises(tq.errors.PreconditionError, match="2"):
        client.append(slots, {"tokens": [[9], [9]]}, at=[0, 0])
    slots = client.append(slots, {"tokens": [[4], [5, 6]]}, at=[2, 1])
    client.truncate(slots, to=[3, 2], data_fields=["tokens"])
    with pytest.raises(tq.errors.AdmissionLimitError):  # 4 places, of which the slots have 2
        client.acquire("train", "rollout", count=5, lease=60.0)
    assert client.acquire("train", "rollout", count=3, lease=60.0, max_wait=0.1).status == "not_yet"
    client.put(slots, {"reward": np.ones(2)}, ack=True)
    assert client.check_consumption("prompts", "rollout").consumed_count == 1
    batch = client.get_meta(
        partition_id="train", task_name="train", data_fields=["tokens", "reward"], batch_size=2, dp_rank=0, dp_size=1,
        batch_index=0, max_wait=20.0,
    )  # fmt: skip
    assert [list(row) for row in client.get_data(batch)["tokens"]] == [[1, 2, 4], [3, 5]]
    client.publish_version(4, trained={("train", "train"): 0})
    assert client.get_version() == 4


def test_a_standby_takes_over_rollouts_totals_and_draws(
    start_controller: StartController, start_server: StartServer, secret: Path, etcd: EtcdStandIn
) -> None:
    leader, standby = start_two(start_controller)
    start_storage(start_server, secret, leader, standby)
    client = leader.client(timeout=60.0)

    def turn(rollout: str, **more: Any) -> None:
        client.put("turns",
            {"x": np.zeros(1)}, rollouts=[rollout], groups=["g"], group_size=2,
            custom_meta=[{"loss_tokens": 3}], **more,
        )  # fmt: skip

    def draw(index: int) -> Any:
        return client.get_meta(
            partition_id="buffer", task_name="train", data_fields=["x"], batch_size=4, dp_rank=0, dp_size=1,
            batch_index=index, sampler="replay", sampler_config={"fresh": 0, "priority_key": "priority"},
        )  # fmt: skip

    turn("a")
    turn("b", ends_rollouts=True)
    drops = tq.Admission("train", 6, overflow="drop_lowest", priority_key="priority")
    client.create_partition("buffer", admissions=[drops])
    for first in (0, 4):  # of which the first two go
        priorities = [{"priority": float(number)} for number in range(first, first + 4)]
        client.put("buffer", {"x": np.zeros(4)}, custom_meta=priorities)
    drawn = [draw(index).global_indexes for index in range(3)]
    kill(leader, etcd)
    wait_for(lambda: leads(standby))

    client = standby.client(timeout=60.0)
    (task,) = client.describe_partition("buffer").tasks
    assert (task.overflow_count, task.delivered_count) == (2, 12)
    assert [draw(index).global_indexes for index in range(3)] == drawn
    assert min(draw(3).global_indexes) >= 2
    turn("a", ends_rollouts=True)
    with pytest.raises(tq.errors.PreconditionError, match="closed"):
        turn("b")
    claim = {"partition_id": "turns", "task_name": "train", "data_fields": ["x"], "batch_size": 1, "dp_size": 1}
    batch = client.get_meta(**claim, batch_unit="group", dp_rank=0, batch_index=0, totals=["loss_tokens"])
    assert batch.rollouts == ["a", "b", "a"]
    (totals,) = batch.totals
    assert (totals.sample_count, totals.rollout_count, totals.group_count, totals.sums) == (3, 2, 1, {"loss_tokens": 9})


def test_a_standby_takes_over_what_groups_share(
    start_controller: StartController, start_server: StartServer, secret: Path, etcd: EtcdStandIn
) -> None:
    leader, standby = start_two(start_controller)
    start_storage(start_server, secret, leader, standby)
    client = leader.client(timeout=60.0)
    client.create_partition("shared", fields=[tq.FieldSpec("image", scope="group")])
    client.put_groups("shared", {"image": np.arange(6).reshape(2, 3)}, groups=["a", "b"])
    client.put("shared", {"x": np.arange(3)}, groups=["a", "b", "a"], group_size=2)
    kill(leader, etcd)
    wait_for(lambda: leads(standby))

    client = standby.client(timeout=60.0)
    batch = client.get_data("shared", global_indexes=[0, 1, 2])
    assert batch["image"].tolist() == [[0, 1, 2], [3, 4, 5], [0, 1, 2]]
    client.put("shared", {"x": np.arange(1)}, groups=["b"], group_size=2)
    client.put_groups("shared", {"image": np.zeros((1, 3), np.int64)}, groups=["b"], existing=True)
    claim = {"partition_id": "shared", "task_name": "train", "data_fields": ["x", "image"], "batch_size": 2}
    meta = client.get_meta(**claim, batch_unit="group", dp_rank=0, dp_size=1, batch_index=0)
    assert client.get_data(meta, expand=False)["image"].tolist() == [[0, 1, 2], [0, 0, 0]]
    client.clear_samples("shared", groups=["a", "b"])
    assert client.describe_partition("shared").used_bytes == 0


def test_what_was_released_stays_so_and_a_standby_releases_nothing(
    start_controller: StartController, start_server: StartServer, secret: Path, etcd: EtcdStandIn
) -> None:
    leader, standby = start_two(start_controller)
    start_storage(start_server, secret, leader, standby)
    client = leader.client(timeout=60.0)
    client.create_partition("train", release=tq.Release("saved", ["actor"], ttl_seconds=2.0))
    put(client, 0)
    claim = {"partition_id": "train", "task_name": "actor", "data_fields": ["x"], "batch_size": 1, "dp_rank": 0}
    for index in range(3):
        client.get_meta(**claim, dp_size=1, batch_index=index)
    client.advance("train", "actor", saved=0)
    put(client, 1)
    wait_for(lambda: client.describe_partition("train").expired_count == 5)  # those that no batch has
    catalog = standby.app.controller.catalog  # type: ignore[union-attr]
    wait_for(lambda: "train" in catalog.names() and catalog.get("train").expired_count == 5)
    assert [*catalog.expire_samples()] == []
    kill(leader, etcd)
    wait_for(lambda: leads(standby))
    client = standby.client(timeout=60.0)
    found = client.describe_partition("train")
    assert (found.released_count, found.expired_count) == (1, 5)
    with pytest.raises(tq.errors.SamplesClearedError, match="expected 1 or more"):
        client.restart_ranks("train", "actor", dp_size=2, trained=-1)
    assert client.restart_ranks("train", "actor", dp_size=1, trained=0).batch_index == 1


def test_the_status_shows_the_leader_its_epoch_and_how_far_the_others_are(start_controller: StartController) -> None:
    leader = start_controller("a")
    wait_for(lambda: leads(leader))
    standby = start_controller("b")
    client = leader.client()
    client.create_partition("train")

    def shown() -> list[tuple[str, bool, bool, int]]:
        controllers = client.status().controllers
        return [(each.address, each.is_leader, each.epoch > 0, each.lag_count) for each in controllers]

    expected = [(leader.address, True, True, 0), (standby.address, False, False, 0)]
    wait_for(lambda: shown() == expected)
    status = client.status()
    assert status.service.durability == "cluster"
    lines = "\n".join(header_of(status, leader.address))
    assert f"leader, epoch {status.controllers[0].epoch}" in lines
    assert "standby, 0 records behind" in lines


def test_a_cluster_whose_etcd_has_lost_all_goes_on_from_a_snapshot_where_that_is_accepted(
    start_controller: StartController, etcd: EtcdStandIn
) -> None:
    leader = start_controller("a")
    wait_for(lambda: leads(leader))
    controller_id = leader.app.controller.storages.controller_id  # type: ignore[union-attr]
    leader.client().create_partition("kept")
    leader.loop.run(leader.app.state_store.take_snapshot())  # type: ignore[union-attr]
    leader.client().create_partition("lost")
    leader.stop()
    etcd.restore((etcd.revision, {}))
    refused = start_controller("a")
    wait_for(lambda: refused.app.supervisor.failure)
    with pytest.raises(tq.errors.ServiceFailedError, match="restored from an older state"):
        refused.stop()
    refused._running = None
    accepting = start_controller("a", accept_journal_loss=True)
    wait_for(lambda: leads(accepting))
    assert [each.partition_id for each in accepting.client().list_partitions()] == ["kept"]
    assert accepting.app.controller.storages.controller_id == controller_id  # type: ignore[union-attr]
    accepting.client().create_partition("later")
    accepting.stop()
    again = start_controller("a")
    wait_for(lambda: leads(again))
    assert {each.partition_id for each in again.client().list_partitions()} == {"kept", "later"}


@pytest.mark.parametrize("given", ["both", "a standby alone"])
def test_a_client_follows_the_leader_and_a_call_has_one_effect(  # noqa: PLR0917  (fixtures)
    client_kind: ClientKind,
    given: str,
    start_controller: StartController,
    start_server: StartServer,
    secret: Path,
    etcd: EtcdStandIn,
) -> None:
    leader = start_controller("a")
    wait_for(lambda: leads(leader))
    standby = start_controller("b")
    start_storage(start_server, secret, leader, standby)
    addresses = standby.address if given != "both" else [leader.address, standby.address]
    client = AnyClient(client_kind, addresses, leader.loop, timeout=60.0)  # type: ignore[arg-type]
    try:
        metas = [put(client, 0)]
        assert pickle.loads(pickle.dumps(client.real)).address == client.real.address
        claim = {"partition_id": "train", "task_name": "work", "data_fields": ["x"], "batch_size": 2}
        rank = {"dp_rank": 0, "dp_size": 1, "batch_index": 0}
        claimed = client.get_meta(**claim, **rank)
        with ThreadPoolExecutor(2) as calls:
            late = {**claim, "task_name": "late", "batch_size": 12, "min_batch_size": 12}
            waiting = calls.submit(client.get_meta, **late, max_wait=60.0)
            kill(leader, etcd)
            putting = calls.submit(put, client, 1)
            assert putting.result(60).keys == [f"1_{row}" for row in range(4)]
            assert client.get_meta(**claim, **rank) == claimed
            metas.append(putting.result())
            assert client.check_production("train", ["x"]).produced_count == 8
            put(client, 2)
            assert waiting.result(60).size == 12
        got = client.get_data(metas[0])
        assert np.asarray(got["x"]).tolist() == [[0, 0]] * 4
    finally:
        client.close()


def test_a_storage_service_obeys_no_controller_that_was_superseded(
    start_controller: StartController, start_server: StartServer, secret: Path, etcd: EtcdStandIn
) -> None:
    leader = start_controller("a")
    wait_for(lambda: leads(leader))
    storage = start_storage(start_server, secret, leader)
    put(leader.client(timeout=60.0), 0)
    old = leader.app.cluster.epoch - 1  # type: ignore[union-attr]
    controller_id = leader.app.controller.storages.controller_id  # type: ignore[union-attr]
    calls = [
        (storage.control.UpdatePuts, UpdatePutsRequest(controller_id=controller_id, epoch=old)),
        (storage.control.ReconcilePuts, iter([ReconcilePutsRequest(controller_id=controller_id, epoch=old)])),
    ]
    for call, request in calls:
        with pytest.raises(tq.errors.PreconditionError, match="its cluster is now led by"), errors_of_grpc():
            call(request, metadata=storage.as_service)
    assert storage.client().storage_stat(storage.address).put_count == 1


def test_a_leader_whose_lease_has_ended_answers_nothing_more_and_ends(
    start_controller: StartController, etcd: EtcdStandIn
) -> None:
    leader = start_controller("a")
    wait_for(lambda: leads(leader))
    client = leader.client(timeout=5.0)
    client.create_partition("train")
    etcd.end_leases()
    wait_for(lambda: leader.app.supervisor.failure)
    with pytest.raises(tq.errors.UnavailableError):
        client.list_partitions(timeout=0.2)
    with pytest.raises(tq.errors.ServiceFailedError, match="lease has expired"):
        leader.stop()
    leader._running = None
    assert FAILED_EXIT_CODE == 70


def test_a_read_is_refused_once_the_lease_may_have_ended(start_controller: StartController, etcd: EtcdStandIn) -> None:
    leader = start_controller("a", lease_seconds=2)
    wait_for(lambda: leads(leader))
    client = leader.client(timeout=5.0)
    client.create_partition("train")
    lease = leader.app.cluster._lease  # type: ignore[union-attr]
    etcd.is_silent = True  # nothing keeps the lease alive
    wait_for(lambda: not lease.is_held)  # type: ignore[union-attr]
    with pytest.raises(tq.errors.NotLeaderError) as caught, errors_of_grpc():
        leader.controller.ListPartitions(ListPartitionsRequest())
    assert caught.value.metadata["leader_address"] == ""
    etcd.is_silent = False
    wait_for(lambda: lease.is_held or leader.app.supervisor.failure)  # type: ignore[union-attr]


def test_calls_that_wait_end_with_the_lease_and_clients_find_the_next_leader(
    start_controller: StartController, etcd: EtcdStandIn
) -> None:
    leader = start_controller("a", lease_seconds=2)
    wait_for(lambda: leads(leader))
    client = leader.client(timeout=60.0)
    client.create_partition("train")
    with ThreadPoolExecutor(2) as pool:
        claim = GetMetaRequest(
            request_id=request_id(), partition_id="train", task_name="t", data_fields=["x"], batch_size=4
        )
        claim.max_wait.FromSeconds(60)
        waiting = pool.submit(leader.controller.GetMeta, claim)
        wait_for(lambda: client.describe_partition("train").tasks)
        etcd.is_silent = True  # this leader is cut off from etcd, which would tell it that the lease has ended
        change = CreatePartitionRequest(request_id=request_id(), partition_id="other")
        written = pool.submit(leader.controller.CreatePartition, change)
        began = time.monotonic()
        for call in (waiting, written):
            with pytest.raises(tq.errors.NotLeaderError), errors_of_grpc():
                call.result(30)
        assert time.monotonic() - began < 8  # less than the 10 s after which etcd counts as unreachable
    assert health_of(leader) == NOT_SERVING
    assert health_of(leader, "") == SERVING
    etcd.is_silent = False
    wait_for(lambda: leads(leader) or leader.app.supervisor.failure)


def test_a_change_waits_while_etcd_is_silent_and_is_made_once(
    start_controller: StartController, etcd: EtcdStandIn
) -> None:
    leader = start_controller("a")
    wait_for(lambda: leads(leader))
    client = leader.client(timeout=60.0)
    etcd.lost_answers = 3
    client.create_partition("train", expected_samples=3)
    etcd.refusals = 2
    client.insert("train", 3)
    summary = client.describe_partition("train").summary
    assert (summary.inserted_count, summary.sealed) == (3, True)
    assert not leader.app.state_store.has_unflushed  # type: ignore[union-attr]


def test_a_standby_that_is_far_behind_gets_a_snapshot_of_the_leader(
    start_controller: StartController, etcd: EtcdStandIn
) -> None:
    leader = start_controller("a")
    wait_for(lambda: leads(leader))
    client = leader.client()
    for number in range(4):
        client.create_partition(f"p{number}")
        leader.loop.run(leader.app.state_store.take_snapshot())  # type: ignore[union-attr]
    assert min(int(key.split(b"/")[-2], 16) for key in etcd.keys(KEYS.log)) > 1
    with pytest.raises(tq.errors.UnauthenticatedError), errors_of_grpc():  # it is for services alone
        next(ClusterServiceStub(leader.channel).FetchSnapshot(FetchSnapshotRequest()))
    late = start_controller("late")
    wait_for(lambda: late.app.controller.catalog.names() >= {f"p{number}" for number in range(4)})  # type: ignore[union-attr]
    client.create_partition("followed")
    wait_for(lambda: "followed" in late.app.controller.catalog.names())  # type: ignore[union-attr]
    kill(leader, etcd)
    wait_for(lambda: leads(late))
    assert len(late.client().list_partitions()) == 5


def test_a_leader_writes_the_snapshot_that_another_one_needs(
    start_controller: StartController, etcd: EtcdStandIn
) -> None:
    leader = start_controller("a")
    wait_for(lambda: leads(leader))
    store = leader.app.state_store
    assert store is not None
    old, _ = leader.loop.run(store.newest_snapshot(0))
    leader.client().create_partition("train")
    assert leader.loop.run(store.newest_snapshot(old))[0] == old
    newer, path = leader.loop.run(store.newest_snapshot(old + 1))
    assert newer > old
    assert path.exists()


def test_a_standby_writes_snapshots_of_its_own_and_starts_from_them(
    start_controller: StartController, etcd: EtcdStandIn
) -> None:
    leader = start_controller("a")
    wait_for(lambda: leads(leader))
    client = leader.client()
    client.create_partition("before")
    standby = start_controller("b")
    wait_for(lambda: "before" in standby.app.controller.catalog.names())  # type: ignore[union-attr]
    standby.loop.run(standby.app.state_store.take_snapshot())  # type: ignore[union-attr]
    standby.stop()
    client.create_partition("after")
    again = start_controller("b")
    wait_for(lambda: again.app.controller.catalog.names() >= {"before", "after"})  # type: ignore[union-attr]
    kill(leader, etcd)
    wait_for(lambda: leads(again))
    assert {each.partition_id for each in again.client().list_partitions()} == {"before", "after"}


def test_metrics_say_which_one_leads_and_partitions_are_counted_once(
    start_controller: StartController, etcd: EtcdStandIn
) -> None:
    leader = start_controller("a", metrics_port=0)
    wait_for(lambda: leads(leader))
    leader.client().create_partition("train@0")
    standby = start_controller("b", metrics_port=0)
    wait_for(lambda: "train@0" in standby.app.controller.catalog.names())  # type: ignore[union-attr]
    of_standby = standby.app.cluster.member_id  # type: ignore[union-attr]
    wait_for(lambda: scrape(leader).get(("tq_service_standby_lag_records", "test", of_standby)) == 0)
    of_leader = scrape(leader)
    assert of_leader["tq_service_controller_leads", "test"] == 1
    assert of_leader["tq_service_partitions", "train"] == 1
    assert of_leader["tq_service_storages", "lost"] == of_leader["tq_service_storages", "available"] == 0
    found = scrape(standby)
    assert found["tq_service_controller_leads", "test"] == 0
    names = {name for name, *_ in found}
    assert not names & {"tq_service_partitions", "tq_service_samples", "tq_service_storages"}
    assert "tq_service_standby_lag_records" not in names
    kill(leader, etcd)
    wait_for(lambda: scrape(standby)["tq_service_controller_leads", "test"] == 1)
    assert scrape(standby)["tq_service_partitions", "train"] == 1


def test_what_is_restored_is_there_after_a_takeover(
    start_controller: StartController, start_server: StartServer, secret: Path, etcd: EtcdStandIn, tmp_path: Path
) -> None:
    checkpoints = tmp_path / "checkpoints"
    leader = start_controller("a", checkpoint_dir=checkpoints)
    wait_for(lambda: leads(leader))
    start_storage(start_server, secret, leader)
    client = leader.client(timeout=60.0)
    put(client, 0)
    client.checkpoint("c")
    client.clear_partition("train")
    standby = start_controller("b")
    client.create_partition("other")
    wait_for(lambda: "other" in standby.app.controller.catalog.names())  # type: ignore[union-attr]
    client.restore("c", replace=True)
    with pytest.raises(tq.errors.ServiceFailedError, match="restart from the leader's snapshot"):
        wait_for(lambda: standby.app.supervisor.failure)
        standby.stop()
    standby._running = None
    again = start_controller("b")
    wait_for(lambda: "train" in again.app.controller.catalog.names())  # type: ignore[union-attr]
    kill(leader, etcd)
    wait_for(lambda: leads(again))
    assert again.client().check_production("train", ["x"]).produced_count == 4


def test_etcd_is_reached_over_tls_and_with_a_user(start_controller: StartController, tmp_path: Path) -> None:
    authority = Authority(tmp_path / "certificates")
    own = authority.issue("controller")
    secured = EtcdStandIn(authority.issue("etcd"))
    secured.users["tq"] = "secret"
    password = tmp_path / "password"
    password.write_text("secret\n")
    try:
        flags = {
            "etcd_user": "tq",
            "etcd_password_file": password,
            "etcd_ca": own.ca,
            "etcd_cert": own.cert,
            "etcd_key": own.key,
        }
        leader = start_controller("a", f"etcd://{secured.address}", **flags)
        wait_for(lambda: leads(leader))
        leader.client().create_partition("train")
        assert secured.write_count > 2
        leader.stop()
    finally:
        secured.stop()


def test_a_leader_that_is_stopped_makes_way_at_once(start_controller: StartController, etcd: EtcdStandIn) -> None:
    first = start_controller("a")
    wait_for(lambda: leads(first))
    second = start_controller("b")
    first.client().create_partition("train")
    first.stop()
    assert KEYS.leader not in etcd.kvs or etcd.kvs[KEYS.leader].value.find(first.address.encode()) < 0
    wait_for(lambda: leads(second))
    assert [each.partition_id for each in second.client().list_partitions()] == ["train"]


def test_a_data_directory_of_another_controller_is_refused(
    start_controller: StartController, start_server: StartServer, tmp_path: Path
) -> None:
    alone = start_server(role="controller", data_dir=tmp_path / "alone", internal_secret_file=tmp_path / "secret")
    alone.client().create_partition("train")
    alone.stop()
    with pytest.raises(tq.errors.DataDirError, match=r"a controller outside cluster 'test'.*Use an empty directory"):
        start_controller("alone")


WRONG = {
    "one of journal and cluster": {"journal": "etcd://e:2379"},
    "role is all": {"journal": "etcd://e", "cluster": "c", "data_dir": "d"},
    "but data_dir is not; set": {"journal": "etcd://e", "cluster": "c", "role": "controller"},
    "leave durability out": {
        "journal": "etcd://e",
        "cluster": "c",
        "role": "controller",
        "data_dir": "d",
        "durability": "disk",
    },
    "expected etcd://": {"journal": "http://e:2379", "cluster": "c", "role": "controller", "data_dir": "d"},
    "etcd_user requires a journal in etcd": {"etcd_user": "tq"},
    "one of etcd_user and etcd_password_file": {
        "journal": "etcd://e",
        "cluster": "c",
        "role": "controller",
        "data_dir": "d",
        "etcd_user": "tq",
    },
}


@pytest.mark.parametrize("message", WRONG)
def test_settings_that_do_not_go_together_are_refused(message: str) -> None:
    with pytest.raises(tq.errors.InvalidArgumentError, match=message):
        load_settings(WRONG[message])


def test_members_of_etcd_have_its_port_where_none_is_given() -> None:
    flags = {"journal": "etcd://e1,e2:23790/", "cluster": "c", "role": "controller", "data_dir": "d"}
    settings = load_settings(flags).settings
    assert settings.etcd_members == ("e1:2379", "e2:23790")
    assert settings.effective_durability == "cluster"


@pytest.mark.parametrize("kind", ["etcd"])
def test_a_standby_takes_over_with_a_real_etcd(start_controller: StartController, tmp_path: Path, kind: str) -> None:
    with running_etcd(kind, tmp_path / "etcd") as addresses:
        journal = f"etcd://{','.join(addresses)}"
        first = start_controller("a", journal)
        wait_for(lambda: leads(first))
        second = start_controller("b", journal)
        first.client().create_partition("train")
        first.stop()  # which ends its lease
        wait_for(lambda: leads(second))
        assert [each.partition_id for each in second.client().list_partitions()] == ["train"]
        second.stop()
