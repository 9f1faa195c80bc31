"""Storage services and controllers that start anew over their data folders: who is told which puts are known."""

import time
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch
from live_server import LiveServer, StartServer
from rpc_samples import new_id

import tq_service as tq
from tq_service.v1 import metadata_pb2
from tq_service.v1 import storage_service_pb2 as pb
from tq_service.v1.controller_service_pb2 import LocateRequest
from tq_service.wire.columns import encode_header
from tq_service.wire.encoding import encode_columns

ROWS = 16


class Deployment:
    """A controller and a storage service, each with a data folder, each started again by name."""

    def __init__(self, start_server: StartServer, folder: Path) -> None:
        self._start = start_server
        self._folder = folder
        self.controller = self._start_controller(0)
        self.storage = self._start_storage()

    def _start_controller(self, port: int) -> LiveServer:
        return self._start(port=port, role="controller", data_dir=self._folder / "controller", durability="process")

    def _start_storage(self) -> LiveServer:
        return self._start(
            role="storage",
            controller=self.controller.address,
            data_dir=self._folder / "storage",
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


def store_unconfirmed(server: LiveServer, boot_id: bytes) -> bytes:
    columns = encode_columns({"x": torch.arange(4)})
    header = pb.PutHeader(
        put_id=new_id(),
        row_count=4,
        columns=[encode_header(column) for column in columns],
        size_bytes=32,
        partition_id="train",
    )
    values = b"".join(bytes(chunk) for column in columns for chunk in column.chunks)
    answer = server.storage.PutSmall(pb.PutSmallRequest(header=header, values=values))
    assert answer.put.storage.boot_id == boot_id
    return header.put_id


def test_a_storage_service_that_starts_anew_is_told_what_is_known(deployment: Deployment) -> None:
    client = deployment.controller.client()
    meta = client.put({"x": torch.randn(ROWS, 3000), "y": torch.arange(ROWS)}, partition_id="train")
    gone = client.put({"x": torch.randn(ROWS, 3000), "y": torch.arange(ROWS)}, partition_id="gone")
    client.put({"y": torch.arange(ROWS) + 100}, metadata=meta)
    client.clear_samples(meta.select_samples([0, 5]))
    rest = meta.select_samples([1, 2, 3, 4, *range(6, ROWS)])
    expected = client.get_data(rest)
    before = deployment.stat()
    waiting = store_unconfirmed(deployment.storage, before.storage.boot_id)

    deployment.storage.stop()
    client.clear_partition("gone")  # nobody can tell the storage service now
    deployment.restart_storage()
    after = deployment.wait(lambda stat: stat.put_count == 4 and stat.uncommitted_put_count == 2)
    assert after.storage.boot_id == before.storage.boot_id
    again = client.get_data(rest)
    assert torch.equal(again["x"], expected["x"])
    assert torch.equal(again["y"], expected["y"])
    with pytest.raises(tq.PartitionNotFoundError):
        client.get_data(gone)
    # What waits for its commit goes on doing so.
    confirm = pb.ConfirmPutRequest(boot_id=after.storage.boot_id, put_id=waiting, partition_id="train")
    deployment.storage.storage.ConfirmPut(confirm)
    assert deployment.stat().uncommitted_put_count == 1
    client.clear_partition("train")
    deployment.wait(lambda stat: stat.put_count == 2)


def test_a_controller_that_starts_anew_tells_what_it_knows(deployment: Deployment) -> None:
    client = deployment.controller.client()
    meta = client.put({"x": torch.arange(ROWS)}, partition_id="train")
    boot_id = deployment.stat().storage.boot_id
    deployment.controller.stop()
    stray = store_unconfirmed(deployment.storage, boot_id)
    confirm = pb.ConfirmPutRequest(boot_id=boot_id, put_id=stray, partition_id="train")
    deployment.storage.storage.ConfirmPut(confirm)  # by a controller that ended before it committed
    assert deployment.stat().put_count == 2
    deployment.restart_controller()
    deployment.wait(lambda stat: stat.put_count == 1)
    assert client.get_data(meta)["x"].tolist() == list(range(ROWS))
    more = client.put({"x": torch.arange(ROWS)}, partition_id="train")
    assert more.global_indexes[0] == ROWS


def test_puts_that_the_storage_service_has_lost_are_told_and_named(deployment: Deployment) -> None:
    client = deployment.controller.client()
    lost = client.put({"x": torch.randn(ROWS, 3000)}, partition_id="train")
    kept = client.put({"x": torch.ones(ROWS)[:, None].expand(ROWS, 3000)}, partition_id="train")
    boot_id = deployment.stat().storage.boot_id
    locate = LocateRequest(partition_id="train", global_indexes=[0], data_fields=["x"])
    located = deployment.controller.controller.Locate(locate)
    cells = pb.PutCells(put_id=located.meta.locations.puts[0].put_id)
    deployment.storage.storage.FreeCells(pb.FreeCellsRequest(boot_id=boot_id, cells=[cells]))
    deployment.restart_storage()
    deployment.wait(lambda stat: stat.damaged_put_count == 1)
    with pytest.raises(tq.DataLossError, match="'x' of samples 0, 1, 2"):
        client.get_data(lost)
    assert client.get_data(kept)["x"].eq(1).all()
    client.clear_samples(lost)
    deployment.wait(lambda stat: stat.damaged_put_count == 0)


def test_keeping_puts_of_another_boot_is_refused(deployment: Deployment) -> None:
    with pytest.raises(grpc.RpcError) as caught:
        deployment.storage.storage.KeepPuts(pb.KeepPutsRequest(boot_id=new_id()))
    call: Any = caught.value
    assert call.code() == grpc.StatusCode.DATA_LOSS
    endpoint: metadata_pb2.StorageEndpoint = deployment.stat().storage
    request = pb.KeepPutsRequest(boot_id=endpoint.boot_id, cells=[pb.PutCells(put_id=b"unknown")])
    answers = [deployment.storage.storage.KeepPuts(request) for _ in range(2)]
    assert answers[0] == answers[1] == pb.KeepPutsResponse(missing_put_ids=[b"unknown"])


@pytest.mark.parametrize("counts", [[], [1, 1]])
@pytest.mark.parametrize("name", ["KeepPuts", "FreeCells"])
def test_cells_whose_rows_and_counts_do_not_fit_are_refused_and_nothing_is_dropped(start_server, name, counts):
    server = start_server()
    client = server.client()
    meta = client.put({"x": torch.arange(4)}, partition_id="train")
    boot_id = server.storage.Stat(pb.StatRequest()).storage.boot_id
    cells = [pb.PutCells(put_id=b"p" * 16, first_rows=[0], row_counts=counts)]
    request = getattr(pb, f"{name}Request")(boot_id=boot_id, cells=cells)
    with pytest.raises(grpc.RpcError) as refused:
        getattr(server.storage, name)(request)
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert torch.equal(client.get_data(meta)["x"], torch.arange(4))
