"""Client and service of different protocols: refused with both versions; probes and other clients are not."""

from __future__ import annotations

import grpc
import pytest
from grpc_health.v1.health_pb2 import HealthCheckRequest
from grpc_health.v1.health_pb2_grpc import HealthStub
from live_server import CLIENT_KINDS, ClientKind, StartServer
from rpc_samples import reason_of

import tq_service as tq
from tq_service.v1 import controller_service_pb2 as pb
from tq_service.v1.controller_service_pb2_grpc import ControllerServiceStub
from tq_service.version import BUILD, PROTOCOL, USER_AGENT

OTHER = f"tq-service/0.2.0+abc (protocol {PROTOCOL + 1})"


def with_agent(agent: str) -> tuple[tuple[str, str], ...]:
    return (("grpc.primary_user_agent", agent),)


@pytest.mark.parametrize("kind", CLIENT_KINDS)
def test_a_client_of_another_protocol_is_refused(
    start_server: StartServer, kind: ClientKind, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = start_server()
    for name in ("sync", "async"):
        monkeypatch.setattr(f"tq_service.client._{name}.calls.CHANNEL_OPTIONS", with_agent(OTHER))
    client = server.client(kind)
    assert client.health()
    with pytest.raises(tq.errors.PreconditionError) as refused:
        client.list_partitions()
    assert refused.value.reason == "PROTOCOL_MISMATCH"
    facts = {"got": str(PROTOCOL + 1), "expected": str(PROTOCOL), "version": BUILD}
    assert facts.items() <= refused.value.metadata.items()
    assert "tq-service 0.2.0+abc" in str(refused.value)
    assert BUILD in str(refused.value)


@pytest.mark.parametrize(
    "agent", [USER_AGENT, f"tq-service/9.9 (protocol {PROTOCOL})", "grpc-node-js/1.12", f"x {OTHER}", ""]
)
def test_other_callers_are_served(start_server: StartServer, agent: str) -> None:
    server = start_server()
    with grpc.insecure_channel(server.address, options=with_agent(agent)) as channel:
        assert not ControllerServiceStub(channel).ListPartitions(pb.ListPartitionsRequest()).partitions


def test_probes_of_another_protocol_are_answered(start_server: StartServer) -> None:
    server = start_server()
    with grpc.insecure_channel(server.address, options=with_agent(OTHER)) as channel:
        assert HealthStub(channel).Check(HealthCheckRequest()).status
        with pytest.raises(grpc.RpcError) as refused:
            ControllerServiceStub(channel).ListPartitions(pb.ListPartitionsRequest())
    assert reason_of(refused.value) == "PROTOCOL_MISMATCH"
