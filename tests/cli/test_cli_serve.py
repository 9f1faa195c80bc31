"""`tq-service serve` as a process: what it prints, how it ends."""

import signal
import socket
import subprocess
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import psutil
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tq_service.testing import COMMAND, ServiceProcess
from tq_service.v1 import controller_service_pb2 as controller_pb
from tq_service.v1 import metadata_pb2 as metadata_pb
from tq_service.v1.controller_service_pb2_grpc import ControllerServiceStub

ServingStatus = health_pb2.HealthCheckResponse


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*COMMAND, *arguments], capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.parametrize("signal_number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_it_with_exit_code_0(signal_number: signal.Signals) -> None:
    with ServiceProcess() as service:
        assert service.port > 0
        assert run("health", "-a", service.address).stdout == "SERVING\n"
        service.send_signal(signal_number)
        assert service.wait(20) == 0


def test_sigterm_tells_health_and_ends_waits() -> None:
    # A watched health stream lasts as long as the grace does.
    with ServiceProcess("--grace-seconds", "1") as service, grpc.insecure_channel(service.address) as channel:
        seen: list[int] = []
        not_serving = threading.Event()

        def watch() -> None:
            try:
                for answer in health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest()):
                    seen.append(answer.status)
                    if answer.status == ServingStatus.NOT_SERVING:
                        not_serving.set()
            except grpc.RpcError:
                return  # the server ends the stream

        def wait_for_a_batch() -> str:
            request = controller_pb.GetMetaRequest(
                request_id=bytes(16),
                partition_id="train",
                task_name="update",
                data_fields=["x"],
                batch_size=1,
                max_wait={"seconds": 50},
            )
            try:
                answer = controller.GetMeta(request, timeout=60.0)
            except grpc.RpcError as error:
                return error.code().name
            return metadata_pb.BatchStatus.Name(answer.meta.status)

        controller = ControllerServiceStub(channel)
        controller.CreatePartition(controller_pb.CreatePartitionRequest(request_id=b"1" * 16, partition_id="train"))
        with ThreadPoolExecutor(2) as threads:
            watching = threads.submit(watch)
            waiting = threads.submit(wait_for_a_batch)
            described = controller_pb.DescribePartitionRequest(partition_id="train")
            while not any(task.waiting_count for task in controller.DescribePartition(described).tasks):
                assert not waiting.done(), waiting.result()
            service.send_signal(signal.SIGTERM)
            assert waiting.result(30) in {"UNAVAILABLE", "BATCH_STATUS_NOT_YET"}
            assert not_serving.wait(30)
            watching.result(30)
        assert seen == [ServingStatus.SERVING, ServingStatus.NOT_SERVING]
        assert service.wait(20) == 0


def test_a_taken_port_is_one_line_and_exit_code_1() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        result = run("serve", "--port", str(taken.getsockname()[1]))
    assert result.returncode == 1
    (line,) = result.stderr.splitlines()
    assert (
        "Address already in use; another process listens on this address: stop that process, or choose another --port"
        in line
    )


def test_wrong_settings_are_one_line_and_exit_code_1() -> None:
    result = run("serve", "--role", "storage")
    assert result.returncode == 1
    assert result.stderr.startswith("error: role is storage, but controller is not set")
    assert len(result.stderr.splitlines()) == 1


def test_an_idle_server_is_small() -> None:
    with ServiceProcess() as service:
        assert psutil.Process(service.pid).memory_info().rss < 100 * 2**20


def test_roles_can_be_processes_of_their_own() -> None:
    with (
        ServiceProcess("--role", "controller") as controller,
        ServiceProcess("--role", "storage", "--controller", controller.address, "--storage-id", "s1") as storage,
        grpc.insecure_channel(controller.address) as channel,
    ):
        stub = ControllerServiceStub(channel)
        while True:  # until the storage service has announced itself
            try:
                placed = stub.PlacePut(controller_pb.PlacePutRequest(partition_id="p", size_bytes=100), timeout=20.0)
                break
            except grpc.RpcError as error:
                assert error.code() is grpc.StatusCode.UNAVAILABLE
        assert placed.storages[0].storage_id == "s1"
        assert not placed.embedded
        for process in (storage, controller):
            assert process.stop() == 0


def test_a_misspelt_variable_is_warned_of_once(tmp_path: Path) -> None:
    log = tmp_path / "log"
    with ServiceProcess(env={"TQ_MAX_BYTE": "1GiB"}, log=log) as service:
        service.send_signal(signal.SIGTERM)
        assert service.wait(20) == 0
    (line,) = [line for line in log.read_text().splitlines() if "match no setting" in line]
    assert "ignored environment variables that match no setting" in line
    assert "TQ_MAX_BYTE (did you mean TQ_MAX_BYTES?)" in line
