"""The service that is fuzzed: a process with some state, a digest of all that can be seen of it, and real traffic."""

from __future__ import annotations

import contextlib
import hashlib
import os
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import grpc
import numpy as np
from fuzz_messages import BOOT_ID, CLAIM_ID, FRESH_ID, INCARNATION, OTHER_PUT_ID, PUT_ID
from google.protobuf.descriptor import MethodDescriptor, ServiceDescriptor
from google.protobuf.descriptor_pb2 import MethodOptions
from google.rpc.error_details_pb2 import ErrorInfo
from grpc_health.v1 import health_pb2, health_pb2_grpc
from recording_proxy import RecordingProxy

import tq_service as tq
from tq_service.internal.v1 import storage_control_pb2, storage_registry_pb2
from tq_service.server.credential_files import INTERNAL_KEY, InternalSecret, own_secret_path
from tq_service.server.rpc.methods import METHODS as TABLE
from tq_service.testing import ServiceProcess
from tq_service.v1 import commit_pb2
from tq_service.v1 import controller_service_pb2 as pb
from tq_service.v1 import storage_service_pb2 as storage_pb
from tq_service.v1.controller_service_pb2_grpc import ControllerServiceStub
from tq_service.v1.storage_service_pb2_grpc import StorageServiceStub
from tq_service.wire.columns import encode_header
from tq_service.wire.encoding import encode_columns
from tq_service.wire.error_table import status_from_trailers

SERVICES: list[ServiceDescriptor] = [
    service
    for file in (pb, storage_pb, storage_registry_pb2, storage_control_pb2)
    for service in file.DESCRIPTOR.services_by_name.values()
]
STORAGE_CONTROL = storage_control_pb2.DESCRIPTOR.services_by_name["StorageControlService"]


def is_internal(method: MethodDescriptor) -> bool:
    """Whether it is for other services alone."""
    return TABLE[path_of(method)].is_internal


def changes_state(method: MethodDescriptor) -> bool:
    """Whether it may change what others see."""
    return method.GetOptions().idempotency_level != MethodOptions.NO_SIDE_EFFECTS


def path_of(method: MethodDescriptor) -> str:
    """Return its full name."""
    return f"/{method.containing_service.full_name}/{method.name}"


_ALL: list[MethodDescriptor] = [method for service in SERVICES for method in service.methods]
METHODS = [method for method in _ALL if method.containing_service is not STORAGE_CONTROL]
"""What the service has, its storage service being embedded."""
STORAGE_ONLY = [method for method in _ALL if method.containing_service is STORAGE_CONTROL]
CALL_SECONDS = 10.0
"""By then every call has an answer: the service lets a claim wait for a hundredth of a second."""

_RANKED = {"task_name": "update_actor", "data_fields": ["input_ids"], "batch_size": 1, "dp_size": 2}


class FuzzedService:
    """A service process; what it logs goes to a file."""

    def __init__(self, directory: Path, *more_flags: str) -> None:
        self.directory = directory
        self.log = directory / "service.log"
        flags = ["--max-bytes", "1GiB", "--max-wait-cap-seconds", "0.01", "--shared-memory", "off"]
        flags += ["--put-ttl-seconds", "86400"]  # what expires by itself would be taken for the work of a refused call
        flags += ["--storage-id", "fuzzed", "--no-allow-sampler-import", *more_flags]
        self.process = ServiceProcess(*flags, log=self.log, cwd=directory)
        self.process.start()
        self.address = self.process.address
        self.channel = grpc.insecure_channel(self.address, options=[("grpc.use_local_subchannel_pool", 1)])
        self.controller = ControllerServiceStub(self.channel)
        self.storage = StorageServiceStub(self.channel)
        self.ids: dict[bytes, bytes] = {}
        self._read_bytes = 0

    def close(self) -> None:
        """End it."""
        self.channel.close()
        self.process.kill()

    def faults(self, *, but: str = "\0") -> str:
        """Return what the service has logged since this was asked last, where it tells of faults of its own.

        Args:
            but: lines with this in them tell of none.
        """
        with self.log.open() as log:
            log.seek(self._read_bytes)
            text = log.read()
            self._read_bytes = log.tell()
        text = "".join(line for line in text.splitlines(keepends=True) if but not in line)
        return text if "ERROR" in text or "Traceback" in text else ""

    # State

    def set_up(self) -> None:
        """Clear everything, then make a partition with samples, groups, a planned batch and a claim of a worker."""
        for partition in self.controller.ListPartitions(pb.ListPartitionsRequest()).partitions:
            self.controller.ClearPartition(
                pb.ClearPartitionRequest(request_id=os.urandom(16), partition_id=partition.partition_id)
            )
        stat = self.storage.Stat(storage_pb.StatRequest())
        self.ids = {BOOT_ID: stat.storage.boot_id, PUT_ID: os.urandom(16), OTHER_PUT_ID: os.urandom(16)}
        write = commit_pb2.SampleWrite(partition_id="train", row_count=4, group_size=2)
        write.keys.extend(["k0", "k1", "k2", "k3"])
        write.groups.extend(["g0", "g0", "g1", "g1"])
        write.custom_meta.add(name="total_lengths").int64_values.values.extend([5, 3, 8, 2])
        write.custom_meta.add(name="version").int64_values.values.extend([3, 3, 4, 4])
        rows = {
            "input_ids": [np.arange(length) for length in (5, 3, 8, 2)],
            "score": np.arange(12, dtype=np.float32).reshape(4, 3),
            "text": ["a", "bb", "", "dddd"],
        }
        answer = self._put(PUT_ID, rows, commit_pb2.CommitRequest(request_id=os.urandom(16), write=write))
        self.ids[INCARNATION] = answer.put.commit.meta.incarnation
        self._put(OTHER_PUT_ID, {"score": np.zeros((2, 3), np.float32)}, None)
        self._claim(0)
        claim = {"partition_id": "train", "task_name": "reward", "data_fields": ["text"], "batch_size": 2}
        self.controller.GetMeta(pb.GetMetaRequest(**claim, request_id=CLAIM_ID))

    def _put(self, put_id: bytes, data: Any, commit: commit_pb2.CommitRequest | None) -> storage_pb.PutInlineResponse:
        columns = encode_columns(data)
        header = storage_pb.PutHeader(
            put_id=self.ids[put_id],
            partition_id="train",
            row_count=columns[0].row_count,
            columns=[encode_header(column) for column in columns],
            size_bytes=sum(column.value_bytes for column in columns),
            commit=commit,
        )
        values = b"".join(bytes(chunk) for column in columns for chunk in column.chunks)
        return self.storage.PutInline(storage_pb.PutInlineRequest(header=header, values=values))

    def _claim(self, rank: int) -> pb.GetMetaResponse:
        request = pb.GetMetaRequest(
            request_id=os.urandom(16), partition_id="train", dp_rank=rank, batch_index=0, **_RANKED
        )
        return self.controller.GetMeta(request, timeout=CALL_SECONDS)

    def digest(self) -> bytes:
        """Return a digest of all that can be seen of the service and that a refused call must not change."""
        digest = hashlib.blake2b()
        listed = self.controller.ListPartitions(pb.ListPartitionsRequest(), timeout=CALL_SECONDS)
        listed.ClearField("revision")  # counts what changes nothing that is seen, too
        digest.update(listed.SerializeToString(deterministic=True))
        for partition in listed.partitions:
            for part in self._described(partition.partition_id):
                digest.update(part)
        stat = self.storage.Stat(storage_pb.StatRequest(), timeout=CALL_SECONDS)
        stat.ClearField("pooled_bytes")
        digest.update(stat.SerializeToString(deterministic=True))
        return digest.digest()

    def _described(self, name: str) -> Iterator[bytes]:
        described = self.controller.DescribePartition(
            pb.DescribePartitionRequest(partition_id=name), timeout=CALL_SECONDS
        )
        # A task that has asked and got nothing is no change; nor are calls that wait.
        tasks = [task for task in described.tasks if task.consumed_count or task.planned_batch_count or task.epoch]
        described.ClearField("tasks")
        described.ClearField("waiting_put_count")
        described.ClearField("revision")
        yield described.SerializeToString(deterministic=True)
        for task in tasks:
            task.ClearField("waiting_count")
            task.ClearField("leases")  # how long ago they were delivered, and how long they last
            task.ClearField("delivered_per_second")  # which falls with time
            task.ClearField("oldest_version")  # of a backlog that was looked at a moment before
            task.ClearField("staleness_versions")
            yield task.SerializeToString(deterministic=True)
        samples = pb.LookupSamplesRequest(partition_id=name, all_samples=True)
        found = self.controller.LookupSamples(samples, timeout=CALL_SECONDS)
        found.ClearField("revision")
        yield found.SerializeToString(deterministic=True)
        if name == "train":
            for rank in range(2):
                with contextlib.suppress(grpc.RpcError):  # an accepted call has changed the task
                    yield self._claim(rank).SerializeToString(deterministic=True)

    # Calls

    def call(self, method: MethodDescriptor, sent: Sequence[bytes]) -> grpc.RpcError | None:
        """Make a call of bytes; return its error, None where it was accepted."""
        path = path_of(method)
        metadata = as_service() if is_internal(method) else None
        data = [self._with_ids(message) for message in sent]
        try:
            if method.client_streaming and method.server_streaming:
                list(self.channel.stream_stream(path)(iter(data), timeout=CALL_SECONDS, metadata=metadata))
            elif method.client_streaming:
                self.channel.stream_unary(path)(iter(data), timeout=CALL_SECONDS, metadata=metadata)
            elif method.server_streaming:
                answers = self.channel.unary_stream(path)(data[0], timeout=CALL_SECONDS, metadata=metadata)
                if method.name == "Watch":  # which has no end
                    next(answers)
                    answers.cancel()
                else:
                    list(answers)
            else:
                self.channel.unary_unary(path)(data[0], timeout=CALL_SECONDS, metadata=metadata)
        except grpc.RpcError as error:
            return error
        return None

    def _with_ids(self, data: bytes) -> bytes:
        for token, value in self.ids.items():
            data = data.replace(token, value)
        while FRESH_ID in data:
            data = data.replace(FRESH_ID, os.urandom(16), 1)
        return data

    def traffic(self) -> dict[str, list[list[bytes]]]:
        """Return by method the messages of calls that a client made, ids of the service replaced by their tokens."""
        self.set_up()
        with RecordingProxy(self.address) as proxy, tq.Client(proxy.address) as client:
            _use_all_of(client)
        incarnation = self.controller.ListPartitions(pb.ListPartitionsRequest()).partitions[0].incarnation
        tokens = {**{value: token for token, value in self.ids.items()}, incarnation: INCARNATION}
        found = {
            method: [[_with_tokens(message, tokens) for message in call] for call in calls]
            for method, calls in proxy.calls.items()
        }
        return found | {"CallMany": [_together(found)]}


def _together(traffic: dict[str, list[list[bytes]]]) -> list[bytes]:
    """Return a stream of all calls that may go in one, each method in a message of its own."""
    batched = {method.short_name: traffic[method.short_name] for method in TABLE.values() if method.is_batched}
    messages = [
        pb.CallManyRequest(
            calls=[
                pb.BatchedCall(call_id=number, method=name, request=request)
                for number, (request,) in enumerate(calls, 100 * place)
            ],
            cancelled_call_ids=[100 * place],
        )
        for place, (name, calls) in enumerate(batched.items())
    ]
    return [message.SerializeToString() for message in messages]


def as_service() -> tuple[tuple[str, str], ...]:
    """Return what the services of this machine show each other."""
    return ((INTERNAL_KEY, InternalSecret(own_secret_path(), is_made=True, is_own=True).proof),)


def reason_of(error: Any) -> str:
    """Return the reason of docs/errors.md in a call's error; empty where it is none of ours."""
    status = status_from_trailers(error.trailing_metadata() or ())
    info = ErrorInfo()
    return info.reason if status is not None and any(detail.Unpack(info) for detail in status.details) else ""


def _with_tokens(data: bytes, tokens: dict[bytes, bytes]) -> bytes:
    for value, token in tokens.items():
        data = data.replace(value, token)
    return data


def _use_all_of(client: tq.Client) -> None:
    """Make the calls of a short training; what comes of it does not matter here."""
    client.create_partition("train@1", expected_samples=100, fields=[tq.FieldSpec("x", dtype="int64", layout="dense")])
    meta = client.put("train@1", {"x": np.arange(4)}, keys=list("abcd"), groups=list("gghh"), group_size=2)
    client.put(meta, {"y": np.zeros((4, 100_000))})
    client.put("train", {"score": np.zeros((2, 3), np.float32)}, keys=["n5", "n6"])
    client.put(meta, custom_meta=[{"version": 1}] * 4)
    client.put("train", {"score": np.ones((2, 3), np.float32)}, keys=["k0", "n7"], return_meta="all")
    client.insert("train", 2, keys=["i0", "i1"], state="held")
    client.set_custom_meta(meta, [{"tag": "t"}, {"tag": ["t", None]}, {"tag": tq.JSON_NULL}, {"tag": None}])
    client.close_groups("train", ["g0"])
    client.create_partition("train@2", tasks=["critic", "scorer"], samples_per_round=4)
    client.get_data(client.lookup_samples("train", ["k0", "k1"])[0])
    client.lookup_samples("train", global_indexes=[0, 3], where=[("version", ">=", 1)])
    client.lookup_samples("train", where=[("version", ">=", 1)], min_count=2, max_wait=0.01)
    client.get_data("train@1", keys=["a", "d"], data_fields=["y"])
    client.get_data("train", keys=["k0", "k1"], missing_fields="skip")
    asked = {"partition_id": "train", "data_fields": ["score"], "max_wait": 0.0}
    client.get_meta(**asked, task_name="critic", batch_size=1, dp_rank=0, dp_size=2, batch_index=0,
                    where=[("version", ">=", 1)], order_by=["-version"])  # fmt: skip
    claim = client.get_meta(**asked, task_name="scorer", batch_size=2, min_batch_size=1)
    client.release(claim)
    leased = client.get_meta(**asked, task_name="scorer", batch_size=2, min_batch_size=1, lease=8e4, max_deliveries=3)
    client.extend(leased, 8.5e4)
    client.ack(leased)
    client.publish_version(1)
    ranked = {**asked, "task_name": "ranked", "batch_size": 1, "dp_rank": 0, "dp_size": 1, "batch_index": 0}
    client.get_meta(**ranked, where=[("version", ">=", tq.Published(offset=-9))], not_before_version=1)
    if client.describe_partition("train").tasks[-1].planned_batch_count:
        client.advance("train", "ranked", trained=0, saved=0)
    client.restart_ranks("train", "ranked", dp_size=2)
    client.take_evicted("train", "ranked")
    client.fail_samples("train", keys=["not there"])
    slots = client.acquire("train", "rollout", lease=8e4)
    client.append(slots, {"tokens": [[1, 2]]}, at=[0])
    client.append(slots, {"tokens": [[3]]}, at=[2])
    client.truncate(slots, to=[1], data_fields=["tokens"])
    client.truncate(slots, to=[0], data_fields=["tokens"])
    client.release(slots)
    client.create_partition("train@4", admissions=[tq.Admission("critic", most=8, unit="group", most_running=4)])
    client.create_partition("train@5", tasks=["critic"], release=tq.Release("saved", ttl_seconds=600.0))
    admit = tq.Admit("train@4", group_size=2)
    prompts = client.get_meta(**asked, task_name="rollout", batch_size=2, min_batch_size=1, lease=8e4, admit=admit)
    client.extend(prompts, 8.5e4)
    client.release(prompts)
    client.publish_version(2)
    client.get_version(at_least=3, max_wait=0.01)
    client.remove_policy()
    client.check_consumption("train", "critic")
    client.check_consumption("train@3", "critic", missing_ok=True)
    client.check_production("train", ["score"])
    client.lookup_samples("train", groups=["g0", "g1"], task_name="critic")
    client.reset_consumption("train", "critic", 0)
    client.requeue_dead_lettered("train", "scorer", [0])
    with client.watch("tr", revision=client.list_partitions("tr").revision, progress_interval=0.1) as watch:
        next(watch)
    client.describe_partition("train")
    client.explain("train")
    client.status("tr")
    client.list_samplers()
    client.storage_stat()
    client.seal_partition("train@1")
    client.clear_fields("train", keys=["k3"], data_fields=["score"], missing_ok=True)
    client.clear_samples("train", keys=["k3"])
    client.clear_samples("train", groups=["g1"], where=[("version", ">", 100)])
    client.clear_partition("train@1")


class HealthWatch:
    """Asks for the health of the service all the time, beside whatever else it does."""

    def __init__(self, address: str) -> None:
        self._channel = grpc.insecure_channel(address, options=[("grpc.use_local_subchannel_pool", 1)])
        self._stopping = threading.Event()
        self.answer_count = 0
        self.failures: list[str] = []
        self._thread = threading.Thread(target=self._watch)

    def __enter__(self) -> HealthWatch:
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._stopping.set()
        self._thread.join()
        self._channel.close()

    def _watch(self) -> None:
        health = health_pb2_grpc.HealthStub(self._channel)
        while True:
            try:
                status = health.Check(health_pb2.HealthCheckRequest(), timeout=CALL_SECONDS).status
            except grpc.RpcError as error:
                self.failures.append(str(error))
            else:
                self.answer_count += 1
                if status != health_pb2.HealthCheckResponse.SERVING:
                    self.failures.append(f"health is {status}")
            if self._stopping.wait(0.05):
                return
