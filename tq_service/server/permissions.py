"""Who may call what: for each method the roles that allow it, and the partitions that a request names.

Roles: `produce` writes samples, `consume` claims, reads and clears them, `read` reads and changes nothing, `admin` does
everything but calls between services, `service` is what the services of one deployment show each other: by a token, or
by the secret that they share. Status is for all who work with a partition; sizes and samplers are for everybody with a
token.

A method that `service` alone may call is internal: clients are refused there even by a service that asks for no tokens.
A method without a rule is refused to everybody.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

from tq_service.server.tokens import ROLES, Role
from tq_service.v1 import storage_service_pb2 as storage_pb

PartitionOf: TypeAlias = Callable[[bytes], str | None]
Named: TypeAlias = Callable[[Any], Iterable[str]]

_CONTROLLER: Final = "/tq_service.v1.ControllerService/"
_STORAGE: Final = "/tq_service.v1.StorageService/"
_REFLECTION: Final = "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"
OPEN_METHODS: Final = frozenset(f"/grpc.health.v1.Health/{name}" for name in ("Check", "Watch", "List"))
"""What probes call, without a token."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """What a call of one method needs.

    Attributes:
        roles: one of these, or admin.
        partitions: the partitions that a request names, all of which the token must be for.
        is_whole: whether the call concerns all partitions, so that the token must be for all.
        is_audited: whether a call that is let in has its line in the audit log.
        lists_partitions: whether the answer is a list of partitions, of which only the token's own are shown.
    """

    roles: frozenset[Role]
    partitions: Named
    is_whole: bool = False
    is_audited: bool = False
    lists_partitions: bool = False

    @property
    def is_internal(self) -> bool:
        """Whether services alone may call it, with tokens or without."""
        return self.roles == {"service"}

    @property
    def allowed_roles(self) -> frozenset[Role]:
        """One of these is needed."""
        return self.roles if self.is_internal else self.roles | {"admin"}


def rules(partition_of: PartitionOf) -> dict[str, Rule]:
    """Return the rule of every method but the open ones.

    Args:
        partition_of: returns the partition of a complete put of this storage service, None for one that is not here.
    """

    def of_cells(request: storage_pb.GetRequest) -> Iterator[str]:
        for put_id in request.put_ids:
            partition_id = partition_of(put_id)
            if partition_id is not None:  # else there is nothing to protect, and the call fails by itself
                yield partition_id

    anyone = _roles(*ROLES)
    status, produce = _roles("read", "produce", "consume"), _roles("produce")
    consume, read = _roles("consume"), _roles("read", "consume")
    service, admin = _roles("service"), _roles("admin")
    internal = Rule(roles=service, partitions=_none, is_whole=True)
    controller: Mapping[str, Rule] = {
        "CreatePartition": Rule(roles=produce, partitions=_of_request),
        "SealPartition": Rule(roles=produce, partitions=_of_request),
        "Insert": Rule(roles=produce, partitions=_of_write),
        "Commit": Rule(roles=produce, partitions=_of_write),
        "SetCustomMeta": Rule(roles=produce, partitions=_of_request),
        "CloseGroups": Rule(roles=produce, partitions=_of_request),
        "PlacePut": Rule(roles=produce, partitions=_of_request),
        "GetMeta": Rule(roles=consume, partitions=_of_request),
        "ReleaseClaim": Rule(roles=consume, partitions=_of_request),
        "AckClaim": Rule(roles=consume, partitions=_of_request),
        "ExtendClaim": Rule(roles=consume, partitions=_of_request),
        "ResetConsumption": Rule(roles=consume, partitions=_of_request, is_audited=True),
        "ClearSamples": Rule(roles=consume, partitions=_of_request),
        "ClearPartition": Rule(roles=consume, partitions=_of_request, is_audited=True),
        "LookupSamples": Rule(roles=read, partitions=_of_request),
        "Locate": Rule(roles=read, partitions=_of_request),
        "CheckConsumption": Rule(roles=status, partitions=_of_request),
        "CheckProduction": Rule(roles=status, partitions=_of_request),
        "DescribePartition": Rule(roles=status, partitions=_of_request),
        "ListPartitions": Rule(roles=status, partitions=_none, lists_partitions=True),
        "ListSamplers": Rule(roles=anyone, partitions=_none),
        "Checkpoint": Rule(roles=admin, partitions=_none, is_whole=True, is_audited=True),
        "Restore": Rule(roles=admin, partitions=_none, is_whole=True, is_audited=True),
        "RegisterStorage": internal,
    }
    # A controller that writes a checkpoint or restores one reads and puts like a client.
    storage: Mapping[str, Rule] = {
        "Put": Rule(roles=produce | service, partitions=_of_header),
        "PutSmall": Rule(roles=produce | service, partitions=lambda request: _of_header(request.header)),
        "Get": Rule(roles=read | service, partitions=of_cells),
        "GetSmall": Rule(roles=read | service, partitions=lambda request: of_cells(request.get)),
        "Stat": Rule(roles=anyone, partitions=_none),
        "ConfirmPut": internal,
        "KeepPuts": internal,
        "FreeCells": internal,
    }
    return {
        **{_CONTROLLER + name: rule for name, rule in controller.items()},
        **{_STORAGE + name: rule for name, rule in storage.items()},
        _REFLECTION: Rule(roles=anyone, partitions=_none),
    }


def unserved_methods(*, has_controller: bool, has_storage: bool, takes_services: bool) -> frozenset[str]:
    """Return the internal methods that a service does not have, so that nobody can call them.

    Args:
        has_controller: whether it has a controller.
        has_storage: whether it has a storage service; a controller in the same process uses it without calls.
        takes_services: whether it can tell other services from clients.
    """
    served = set()
    if takes_services and has_controller:
        served.add(_CONTROLLER)
    if takes_services and has_storage and not has_controller:
        served.add(_STORAGE)
    internal = [method for method, rule in rules(lambda _put_id: None).items() if rule.is_internal]
    return frozenset(method for method in internal if not method.startswith(tuple(served)))


def _roles(*roles: Role) -> frozenset[Role]:
    return frozenset(roles)


def _none(_request: Any) -> Iterable[str]:
    return ()


def _of_request(request: Any) -> Iterable[str]:
    return (request.partition_id,)


def _of_write(request: Any) -> Iterable[str]:
    return (request.write.partition_id,)


def _of_header(header: Any) -> Iterable[str]:
    """Return the partitions of a put; the first message of a stream may also be none, which fails by itself."""
    if not isinstance(header, storage_pb.PutHeader):
        return ()
    if not header.HasField("commit"):
        return (header.partition_id,)
    return (header.partition_id, header.commit.write.partition_id)
