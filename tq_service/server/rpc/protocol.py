"""Calls of another version of the protocol are refused, with both versions, instead of being misread."""

from __future__ import annotations

import re
from typing import Final

import grpc

from tq_service.errors import ProtocolMismatchError
from tq_service.server.rpc.method_table import Method
from tq_service.server.rpc.middleware import Caller, Middleware, Refusal
from tq_service.version import BUILD, PROTOCOL, USER_AGENT

_AGENT: Final = re.compile(r"tq-service/(\S+) \(protocol (\d+)\)")


class OnlyThisProtocol(Middleware):
    """Refuses callers whose user agent names another protocol; clients in other languages name none."""

    def admit(self, method: Method, details: grpc.HandlerCallDetails) -> Caller | None:
        """Return a caller to refuse; None for all others. Probes are answered whatever their version."""
        if method.is_open:
            return None
        for key, value in details.invocation_metadata or ():
            if key == "user-agent":
                agent = str(value)
                return None if agent.startswith(USER_AGENT) else _stranger(agent)
        return None


def _stranger(agent: str) -> Caller | None:
    match = _AGENT.match(agent)
    if match is None or int(match[2]) == PROTOCOL:
        return None
    build, protocol = match.groups()

    def make_error() -> ProtocolMismatchError:
        return ProtocolMismatchError(
            f"the caller is tq-service {build} with protocol {protocol}; expected protocol {PROTOCOL}, of this "
            f"service, tq-service {BUILD}. Install the same version on both sides.",
            metadata={"got": protocol, "expected": str(PROTOCOL), "version": BUILD},
        )

    return Caller(refusal=Refusal(make_error=make_error))
