"""Every method of both services, with random messages, changed real ones and bytes that are no message at all.

No call may crash the service, hang, or end in an error that is not in the table; a refused call changes nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import grpc
import pytest
from fuzz_messages import BOOT_ID, EXAMPLES, FRESH_ID, Call, changed, garbled, messages
from fuzz_service import METHODS, STORAGE_ONLY, FuzzedService, HealthWatch, changes_state, is_internal, reason_of
from google.protobuf.descriptor import MethodDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tq_service.v1 import commit_pb2
from tq_service.v1 import controller_service_pb2 as pb
from tq_service.v1 import storage_service_pb2 as storage_pb
from tq_service.v1.metadata_pb2 import Int64Values, MetaColumn

CALLS_A_ROUND = 10
TRAIN: dict[str, Any] = {"request_id": FRESH_ID, "partition_id": "train"}
CHANGES: dict[str, Message] = {
    "Insert": pb.InsertRequest(request_id=FRESH_ID, write=commit_pb2.SampleWrite(partition_id="train", row_count=1)),
    "SetCustomMeta": pb.SetCustomMetaRequest(
        **TRAIN,
        global_indexes=[0],
        custom_meta=[MetaColumn(name="version", int64_values=Int64Values(values=[9]))],
    ),
    "ClearSamples": pb.ClearSamplesRequest(**TRAIN, global_indexes=[1]),
    "SealPartition": pb.SealPartitionRequest(**TRAIN),
}


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FuzzedService]:
    service = FuzzedService(tmp_path_factory.mktemp("fuzz"))
    yield service
    service.close()


@pytest.fixture(scope="module")
def storage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FuzzedService]:
    """A storage service without a controller."""
    service = FuzzedService(tmp_path_factory.mktemp("fuzz"), "--role", "storage", "--controller", "127.0.0.1:1")
    service.ids = {BOOT_ID: service.storage.Stat(storage_pb.StatRequest()).storage.boot_id}
    yield service
    service.close()


@pytest.fixture(scope="module")
def traffic(service: FuzzedService) -> dict[str, list[Call]]:
    return service.traffic()


def calls(method: MethodDescriptor, real: list[Call]) -> st.SearchStrategy[Call]:
    """Return calls of a method, some of which are what a client has sent, changed."""
    kind = GetMessageClass(method.input_type)
    well_typed = messages(method.input_type).map(lambda message: message.SerializeToString())
    anything = st.one_of(well_typed, st.binary(max_size=60))
    made_up = st.lists(anything, min_size=1, max_size=3 if method.client_streaming else 1)
    if not real:
        return made_up.map(Call)

    @st.composite
    def changed_call(draw: st.DrawFn) -> Call:
        call = list(draw(st.sampled_from(real)))
        place = draw(st.integers(0, len(call) - 1))
        how = draw(st.integers(0, 3 if method.client_streaming else 1))
        if how == 0:
            call[place] = draw(changed(kind.FromString(call[place])))
        elif how == 1:
            call[place] = draw(garbled(call[place]))
        elif how == 2:
            del call[place:]
        else:
            call.insert(place, draw(anything))
        return call

    return st.one_of(changed_call(), changed_call(), made_up).map(Call)


@pytest.mark.parametrize("method", METHODS, ids=lambda method: method.name)
def test_odd_calls(service: FuzzedService, traffic: dict[str, list[Call]], method: MethodDescriptor) -> None:
    real = traffic.get(method.name, [])
    service.set_up()

    @settings(
        max_examples=max(1, EXAMPLES // CALLS_A_ROUND),
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(st.lists(calls(method, real), min_size=CALLS_A_ROUND, max_size=CALLS_A_ROUND))
    def attack(round_: list[Call]) -> None:
        before = service.digest()
        is_one = method.name != "CallMany"  # of whose calls some may be made before it is refused
        if (is_one and all(check(service, method, call) for call in round_)) or not changes_state(method):
            assert service.digest() == before
            return
        # Some were accepted: all again from a known state, with a look after each that is refused.
        service.set_up()
        before = service.digest()
        for call in round_:
            if check(service, method, call) and is_one:
                assert service.digest() == before, f"a refused call changed the state: {call}"
            else:
                service.digest()  # asks for claims, and so repeats those that an accepted call has taken away
                before = service.digest()
        service.set_up()

    service.faults()  # those of a method before are that test's
    with HealthWatch(service.address) as health:
        attack()
    assert health.failures == []
    assert health.answer_count
    assert service.process.exit_code is None
    assert service.faults() == ""


@pytest.mark.parametrize("method", STORAGE_ONLY, ids=lambda method: method.name)
def test_odd_calls_between_services(storage: FuzzedService, method: MethodDescriptor) -> None:
    @settings(max_examples=EXAMPLES, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(calls(method, []))
    def attack(call: Call) -> None:
        check(storage, method, call)

    with HealthWatch(storage.address) as health:
        attack()
    assert health.failures == []
    assert storage.process.exit_code is None
    assert storage.faults(but="found a damaged put") == ""  # a controller that knows of puts which are not here says so


def check(service: FuzzedService, method: MethodDescriptor, call: Call) -> bool:
    """Make a call and check that it ends as calls must; return whether it was refused."""
    error: Any = service.call(method, call)
    if error is None:
        return False
    assert error.code() not in {grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN}, f"{call}: {error.details()}"
    assert reason_of(error), f"{call}: {error.code()} {error.details()}"
    return True


def test_methods_between_services_are_among_those_called() -> None:
    names = {method.name for method in (*METHODS, *STORAGE_ONLY) if is_internal(method)}
    assert names == {"RegisterStorage", "Adopt", "ReconcilePuts", "UpdatePuts"}


@pytest.mark.parametrize("method", STORAGE_ONLY, ids=lambda method: method.name)
def test_a_call_between_services_is_read(storage: FuzzedService, method: MethodDescriptor) -> None:
    """Were its secret not accepted, no odd call would come further than that."""
    error: Any = storage.call(method, [b"\xff"])
    assert error is not None and error.code() is grpc.StatusCode.INVALID_ARGUMENT, error


def test_real_traffic_is_there_to_be_changed(traffic: dict[str, list[Call]]) -> None:
    """A method that is new should be used by the traffic, or be named here."""
    assert {method.name for method in METHODS} - traffic.keys() <= {
        "RegisterStorage", "Commit", "Checkpoint", "ListCheckpoints", "Restore",
    }  # fmt: skip


@pytest.mark.parametrize("name", ["Insert", "SetCustomMeta", "ClearSamples", "SealPartition"])
def test_a_change_is_seen_in_the_digest(service: FuzzedService, name: str) -> None:
    (method,) = (one for one in METHODS if one.name == name)
    service.set_up()
    before = service.digest()
    assert service.digest() == before
    assert service.call(method, [CHANGES[name].SerializeToString()]) is None
    assert service.digest() != before
