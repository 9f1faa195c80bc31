"""The status of a service, from the pages that it comes in."""

from __future__ import annotations

from tq_service.client.namespace import Namespace
from tq_service.results import (
    ControllerStatus,
    PartitionDescription,
    PartitionWait,
    Revision,
    ServiceInfo,
    ServiceStatus,
    StorageStatus,
)
from tq_service.v1 import controller_service_pb2 as pb
from tq_service.wire.messages import read_message


class StatusReader:
    """Reads pages, the first one first; partitions get the names that a client with this namespace has for them."""

    def __init__(self, namespace: Namespace) -> None:
        self._namespace = namespace
        self._first = pb.GetStatusResponse()
        self._partitions: list[PartitionDescription] = []
        self._waits: list[PartitionWait] = []

    def add(self, page: pb.GetStatusResponse) -> None:
        """Read the next page."""
        if page.HasField("service"):
            self._first = page
        own_name = self._namespace.own_name
        for described in page.partitions:
            described.summary.partition_id = own_name(described.summary.partition_id)
        self._partitions.extend(read_message(PartitionDescription, each) for each in page.partitions)
        self._waits.extend(
            read_message(PartitionWait, each, partition_id=own_name(each.partition_id)) for each in page.waits
        )

    def status(self) -> ServiceStatus:
        """Return the status that the pages have."""
        return ServiceStatus(
            service=read_message(ServiceInfo, self._first.service),
            storages=tuple(read_message(StorageStatus, each) for each in self._first.storages),
            partitions=tuple(self._partitions),
            waits=tuple(self._waits),
            revision=read_message(Revision, self._first.revision),
            controllers=tuple(read_message(ControllerStatus, each) for each in self._first.controllers),
        )
