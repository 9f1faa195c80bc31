"""The status of the service, page by page: what it is, its storage services, its partitions, and what is waited for."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Final

from tq_service.config import ServeSettings
from tq_service.results import ControllerStatus, PartitionWait, ServiceInfo
from tq_service.server.storages import StorageRegistry
from tq_service.serving.backlogs import Backlogs, tasks_with_versions
from tq_service.serving.catalog import Catalog
from tq_service.serving.explain import Explainer
from tq_service.serving.lookup import find_names, name_token
from tq_service.serving.status import description_of
from tq_service.state.partition import Partition
from tq_service.v1 import controller_service_pb2 as pb
from tq_service.version import BUILD
from tq_service.wire.messages import to_message

_MOST_PAGE_BYTES: Final = 1 << 20  # but for the last partition of the page
_MOST_WAITS: Final = 32  # of a partition
_TASKS_A_TURN: Final = 4  # with their last batches a millisecond's work at most


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """What this process is, from its start on.

    Attributes:
        settings: how it runs.
        shared_memory: whether clients of its host share memory with it.
        started_at: when, by the monotonic clock.
    """

    settings: ServeSettings
    shared_memory: bool
    started_at: float = field(default_factory=time.monotonic)

    def info(self, instance_id: bytes, *, for_all_partitions: bool) -> ServiceInfo:
        """Return it, for a caller that may know of all partitions, or of some; the id is that of its history."""
        settings = self.settings
        return ServiceInfo(
            version=BUILD,
            instance_id=instance_id,
            role=settings.role,
            uptime_seconds=time.monotonic() - self.started_at,
            durability=settings.effective_durability,
            data_dir=str(settings.data_dir) if settings.data_dir is not None and for_all_partitions else "",
            tls=settings.tls_cert is not None,
            client_certificates=settings.tls_client_ca is not None,
            auth=settings.auth_tokens_file is not None,
            shared_memory=self.shared_memory,
        )


async def described(catalog: Catalog, backlogs: Backlogs, partition: Partition) -> pb.DescribePartitionResponse:
    """Return a partition with its fields and tasks; other work of the event loop has its turns meanwhile."""
    description = description_of(catalog, backlogs, partition)
    await asyncio.sleep(0)
    tasks = []
    for task in description.tasks:
        tasks.append(to_message(pb.TaskStatus, task))
        if len(tasks) % _TASKS_A_TURN == 0:
            await asyncio.sleep(0)
    return to_message(pb.DescribePartitionResponse, description, tasks=tasks)


@dataclass(frozen=True, slots=True, kw_only=True)
class StatusPages:
    """Makes pages of the status; other work of the event loop has its turns meanwhile.

    Attributes:
        catalog: has the partitions, and what waits for those that are not there.
        backlogs: know how old is what tasks have left.
        explainer: says why claims wait.
        storages: the storage services.
        identity: what this process is.
        controllers: returns those of the cluster, none where the controller is alone.
    """

    catalog: Catalog
    backlogs: Backlogs
    explainer: Explainer
    storages: StorageRegistry
    identity: Identity
    controllers: Callable[[], Sequence[ControllerStatus]]

    async def page(self, request: pb.GetStatusRequest, is_shown: Callable[[str], bool]) -> pb.GetStatusResponse:
        """Return a page.

        Args:
            request: which one.
            is_shown: whether the caller may know of a partition.

        Raises:
            InvalidArgumentError: the size of the page, or its token.
        """
        answer, list_name = pb.GetStatusResponse(), f"status/{request.prefix}"
        all_names = chain(self.catalog.names(), self.catalog.awaited_names())
        names = {name for name in all_names if name.startswith(request.prefix) and is_shown(name)}
        page, answer.next_page_token = find_names(names, of=list_name, size=request.page_size, token=request.page_token)
        if not request.page_token:
            revision = self.catalog.history.revision()
            answer.revision.CopyFrom(to_message(pb.Revision, revision))
            info = self.identity.info(revision.instance_id, for_all_partitions=is_shown(""))
            answer.service.CopyFrom(to_message(pb.ServiceInfo, info))
            answer.controllers.extend(to_message(pb.ControllerStatus, each) for each in self.controllers())
            answer.storages.extend(to_message(pb.StorageStatus, each) for each in self.storages.statuses())
        known = list(filter(is_shown, self.catalog.names())) if request.explain else None
        there = (each for name in page if (each := self.catalog.find(name, missing_ok=True)) is not None)
        await self.backlogs.refresh(task for partition in there for task in tasks_with_versions(partition))
        size_bytes = 0
        for name in page:
            if size_bytes > _MOST_PAGE_BYTES:
                answer.next_page_token = name_token(list_name, name)
                break
            partition = self.catalog.find(name, missing_ok=True)
            if partition is not None:
                answer.partitions.append(await described(self.catalog, self.backlogs, partition))
                size_bytes += answer.partitions[-1].ByteSize()
            for reason in await self.explainer.waiting(name, names=known, most=_MOST_WAITS):
                answer.waits.append(to_message(pb.PartitionWait, PartitionWait(partition_id=name, reason=reason)))
                size_bytes += answer.waits[-1].ByteSize()
            await asyncio.sleep(0)
        return answer
