"""Storage services and controllers that restart over their data directories: who is told which puts are known."""

import time
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch
from live_server import LiveServer, StartServer
from rpc_samples import new_id

import tq_service as tq
from tq_service.internal.v1 import storage_control_pb2
from tq_service.server.receipts import key_id
from tq_service.v1 import metadata_pb2
from tq_service.v1 import storage_service_pb2 as pb
from tq_service.v1.controller_service_pb2 import LocateRequest
from tq_service.wire.columns import encode_header
from tq_service.wire.encoding import encode_columns

ROWS = 16


class Deployment:
    """A controller and a storage service, each with a data directory, each started again by name."""

    def __init__(self, start_server: StartServer, directory: Path) -> None:
        self._start = start_server
        self._directory = directory
        self.controller = self._start_controller(0)
        self.storage = self._start_storage()
        self.wait(lambda stat: self.storage.app.storage.keys.is_registered)

    def _start_controller(self, port: int) -> LiveServer:
        return self._start(port=port, role="controller", data_dir=self._directory / "controller", durability="process")

    def _start_storage(self) -> LiveServer:
        return self._start(
            role="storage",
            controller=self.controller.address,
            data_dir=self._directory / "storage",
            durability="process",
            shared_memory="off",
        )

    def restart_controller(self) -> None:
        self.controller.stop()
        self.controller = self._start_controller(int(self.controller.address.rpartition(":")[2]))

    def restart_storage(self) -> None:
        self.storage.stop()
        self.storage = self._start_storage()

    def stat(self) -> pb.StatResponse:
        return self.storage.storage.Stat(pb.StatRequest())

    def wait(self, is_so: Any) -> pb.StatResponse:
        deadline = time.monotonic() + 60
        while not is_so(self.stat()):
            assert time.monotonic() < deadline, self.stat()
            time.sleep(0.05)
        return self.stat()


@pytest.fixture
def deployment(start_server: StartServer, tmp_path: Path) -> Deployment:
    return Deployment(start_server, tmp_path)


def store_unconfirmed(controller: LiveServer, server: LiveServer, boot_id: bytes) -> bytes:
    columns = encode_columns({"x": torch.arange(4)})
    header = pb.PutHeader(
        put_id=new_id(),
        row_count=4,
        columns=[encode_header(column) for column in columns],
        size_bytes=32,
        partition_id="train",
        controller_id=controller.app.controller.storages.controller_id,
    )
    values = b"".join(bytes(chunk) for column in columns for chunk in column.chunks)
    answer = server.storage.PutInline(pb.PutInlineRequest(header=header, values=values))
    assert answer.put.storage.boot_id == boot_id
    return header.put_id


def test_a_storage_service_that_starts_again_is_told_what_is_known(deployment: Deployment) -> None:
    client = deployment.controller.client()
    meta = client.put("train", {"x": torch.randn(ROWS, 3000), "y": torch.arange(ROWS)})
    gone = client.put("gone", {"x": torch.randn(ROWS, 3000), "y": torch.arange(ROWS)})
    client.put(meta, {"y": torch.arange(ROWS) + 100})
    client.clear_samples(meta.select_samples([0, 5]))
    rest = meta.select_samples([1, 2, 3, 4, *range(6, ROWS)])
    expected = client.get_data(rest)
    before = deployment.stat()
    waiting = store_unconfirmed(deployment.controller, deployment.storage, before.storage.boot_id)

    deployment.storage.stop()
    client.clear_partition("gone")  # nobody can tell the storage service now
    deployment.restart_storage()
    after = deployment.wait(lambda stat: stat.put_count == 4 and stat.uncommitted_put_count == 2)
    assert after.storage.boot_id == before.storage.boot_id
    again = client.get_data(rest)
    assert torch.equal(again["x"], expected["x"])
    assert torch.equal(again["y"], expected["y"])
    with pytest.raises(tq.errors.PartitionNotFoundError):
        client.get_data(gone)
    # What waits for its commit goes on doing so.
    deployment.storage.app.storage.engine.confirm(waiting)
    assert deployment.stat().uncommitted_put_count == 1
    client.clear_partition("train")
    deployment.wait(lambda stat: stat.put_count == 2)


def test_what_is_known_is_told_in_pieces_however_much_it_is(
    deployment: Deployment, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As of millions of puts, which took more than a message may have."""
    monkeypatch.setattr("tq_service.server.puts._MOST_PUTS", 4)
    client = deployment.controller.client()
    for number in range(50):
        client.put("train", {"x": torch.arange(ROWS) + number}, keys=[f"{number}-{i}" for i in range(ROWS)])
    client.clear_samples("train", keys=[f"{number}-3" for number in range(0, 50, 2)])
    deployment.controller.stop()
    stray = store_unconfirmed(deployment.controller, deployment.storage, deployment.stat().storage.boot_id)
    deployment.storage.app.storage.engine.confirm(stray)
    deployment.restart_storage()
    deployment.restart_controller()
    deployment.wait(lambda stat: stat.uncommitted_put_count == 1)  # the stray one, which waits again after the restart
    for number in (0, 49):
        batch = client.get_data("train", keys=[f"{number}-{i}" for i in (0, 2, 4)], data_fields=["x"])
        assert batch["x"].tolist() == [number, number + 2, number + 4]
    assert deployment.stat().put_count == 51
    assert deployment.stat().damaged_put_count == 0


def test_a_controller_that_starts_again_tells_what_it_knows(deployment: Deployment) -> None:
    client = deployment.controller.client()
    meta = client.put("train", {"x": torch.arange(ROWS)})
    boot_id = deployment.stat().storage.boot_id
    deployment.controller.stop()
    stray = store_unconfirmed(deployment.controller, deployment.storage, boot_id)
    # By a controller that ended before it committed.
    deployment.storage.app.storage.engine.confirm(stray)
    assert deployment.stat().put_count == 2
    deployment.restart_controller()
    deployment.wait(lambda stat: stat.put_count == 1)
    assert client.get_data(meta)["x"].tolist() == list(range(ROWS))
    more = client.put("train", {"x": torch.arange(ROWS)})
    assert more.global_indexes[0] == ROWS


def test_a_put_that_is_never_committed_goes_and_what_is_committed_stays(start_server: StartServer) -> None:
    """As where the client is killed between the two, whatever `put_ttl_seconds` the controller was started with."""
    controller = start_server(role="controller")
    storage = start_server(role="storage", controller=controller.address, put_ttl_seconds=0.5, shared_memory="off")
    client = controller.client()
    meta = client.put("train", {"x": torch.arange(ROWS)})
    boot_id = storage.storage.Stat(pb.StatRequest()).storage.boot_id
    store_unconfirmed(controller, storage, boot_id)
    deadline = time.monotonic() + 60
    while storage.storage.Stat(pb.StatRequest()).put_count > 1:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert client.get_data(meta)["x"].tolist() == list(range(ROWS))


def test_puts_that_the_storage_service_has_lost_are_told_and_named(deployment: Deployment) -> None:
    client = deployment.controller.client()
    lost = client.put("train", {"x": torch.randn(ROWS, 3000)})
    kept = client.put("train", {"x": torch.ones(ROWS)[:, None].expand(ROWS, 3000)})
    boot_id = deployment.stat().storage.boot_id
    locate = LocateRequest(partition_id="train", global_indexes=[0], data_fields=["x"])
    located = deployment.controller.controller.Locate(locate)
    cells = storage_control_pb2.PutCells(put_id=located.meta.locations.puts[0].put_id)
    ((controller_id, key),) = deployment.storage.app.storage.keys._keys.items()
    free = storage_control_pb2.UpdatePutsRequest(
        boot_id=boot_id, freed=[cells], controller_id=controller_id, key_id=key_id(key)
    )
    deployment.storage.control.UpdatePuts(free, metadata=deployment.storage.as_service)
    deployment.restart_storage()
    deployment.wait(lambda stat: stat.damaged_put_count == 1)
    with pytest.raises(tq.errors.DataLossError, match="'x' of samples 0, 1, 2"):
        client.get_data(lost)
    assert client.get_data(kept)["x"].eq(1).all()
    client.clear_samples(lost)
    deployment.wait(lambda stat: stat.damaged_put_count == 0)


def test_keeping_puts_of_another_boot_is_refused(deployment: Deployment) -> None:
    as_service = deployment.storage.as_service
    with pytest.raises(grpc.RpcError) as caught:
        deployment.storage.control.ReconcilePuts(
            iter([storage_control_pb2.ReconcilePutsRequest(boot_id=new_id(), is_last=True)]), metadata=as_service
        )
    call: Any = caught.value
    assert call.code() == grpc.StatusCode.DATA_LOSS
    endpoint: metadata_pb2.StorageEndpoint = deployment.stat().storage
    request = storage_control_pb2.ReconcilePutsRequest(
        boot_id=endpoint.boot_id,
        controller_id=b"c" * 16,
        key_id=b"k" * 8,
        cells=[storage_control_pb2.PutCells(put_id=b"unknown")],
        is_last=True,
    )
    answers = [deployment.storage.control.ReconcilePuts(iter([request]), metadata=as_service) for _ in range(2)]
    assert (
        answers[0]
        == answers[1]
        == storage_control_pb2.ReconcilePutsResponse(missing_put_ids=[b"unknown"], missing_count=1)
    )


@pytest.mark.parametrize("counts", [[], [1, 1], [-1], [2**62]])
@pytest.mark.parametrize("name", ["ReconcilePuts", "UpdatePuts"])
def test_cells_whose_rows_and_counts_do_not_fit_are_refused_and_nothing_is_dropped(deployment, name, counts):
    server, client = deployment.storage, deployment.controller.client()
    meta = client.put("train", {"x": torch.arange(4)})
    boot_id = server.storage.Stat(pb.StatRequest()).storage.boot_id
    cells = [storage_control_pb2.PutCells(put_id=b"p" * 16, first_rows=[0], row_counts=counts)]
    field = "cells" if name == "ReconcilePuts" else "freed"
    request = getattr(storage_control_pb2, f"{name}Request")(
        boot_id=boot_id, controller_id=b"c" * 16, key_id=b"k" * 8, **{field: cells}
    )
    with pytest.raises(grpc.RpcError) as refused:
        getattr(server.control, name)(
            iter([request]) if name == "ReconcilePuts" else request, metadata=server.as_service
        )
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert torch.equal(client.get_data(meta)["x"], torch.arange(4))
