"""The status of the service, page by page: what it is, its storage services, its partitions, and what is waited for."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from itertools import chain
from typing import Final

from tq_service.config import ServeSettings
from tq_service.results import ControllerStatus, PartitionWait, ServiceInfo
from tq_service.server.storages import StorageRegistry
from tq_service.serving.backlogs import Backlogs, tasks_with_versions
from tq_service.serving.catalog import Catalog
from tq_service.serving.explain import Explainer
from tq_service.serving.lookup import find_names, name_token
from tq_service.serving.slices import Slices
from tq_service.serving.status import description_of
from tq_service.state.ledger import TaskLedger
from tq_service.state.partition import Partition
from tq_service.v1 import controller_service_pb2 as pb
from tq_service.version import BUILD
from tq_service.wire.messages import to_message

_MOST_PAGE_BYTES: Final = 1 << 20  # but for the last partition of the page
_MOST_WAITS: Final = 32  # of a partition
_TASKS_A_TURN: Final = 4  # with their last batches a millisecond's work at most


class Identity:
    """What this process is, from its start on.

    Args:
        settings: how it runs.
        shared_memory: whether clients of its host share memory with it.
    """

    def __init__(self, settings: ServeSettings, *, shared_memory: bool) -> None:
        self._settings = settings
        self._shared_memory = shared_memory
        self._started_at = time.monotonic()

    def info(self, instance_id: bytes, *, for_all_partitions: bool) -> ServiceInfo:
        """Return it, for a caller that may know of all partitions, or of some; the id is that of its history."""
        settings = self._settings
        return ServiceInfo(
            version=BUILD,
            instance_id=instance_id,
            role=settings.role,
            uptime_seconds=time.monotonic() - self._started_at,
            durability=settings.effective_durability,
            data_dir=str(settings.data_dir) if settings.data_dir is not None and for_all_partitions else "",
            tls=settings.tls_cert is not None,
            client_certificates=settings.tls_client_ca is not None,
            auth=settings.auth_tokens_file is not None,
            shared_memory=self._shared_memory,
        )


async def described(catalog: Catalog, backlogs: Backlogs, partition: Partition) -> pb.DescribePartitionResponse:
    """Return a partition with its fields and tasks; other work of the event loop has its turns meanwhile."""
    description = await description_of(catalog, backlogs, partition)
    await asyncio.sleep(0)
    tasks = []
    for task in description.tasks:
        tasks.append(to_message(pb.TaskStatus, task))
        if len(tasks) % _TASKS_A_TURN == 0:
            await asyncio.sleep(0)
    return to_message(pb.DescribePartitionResponse, description, tasks=tasks)


class StatusPages:
    """Makes pages of the status; other work of the event loop has its turns meanwhile.

    Args:
        catalog: has the partitions, and what waits for those that are not there.
        backlogs: know how old is what tasks have left.
        explainer: says why claims wait.
        storages: the storage services.
        identity: what this process is.
        controllers: returns those of the cluster, none where the controller is alone.
    """

    def __init__(
        self,
        catalog: Catalog,
        backlogs: Backlogs,
        explainer: Explainer,
        storages: StorageRegistry,
        identity: Identity,
        *,
        controllers: Callable[[], Sequence[ControllerStatus]] = tuple,
    ) -> None:
        self._controllers = controllers
        self._catalog = catalog
        self._backlogs = backlogs
        self._explainer = explainer
        self._storages = storages
        self._identity = identity

    async def page(self, request: pb.GetStatusRequest, is_shown: Callable[[str], bool]) -> pb.GetStatusResponse:
        """Return a page.

        Args:
            request: which one.
            is_shown: whether the caller may know of a partition.

        Raises:
            InvalidArgumentError: the size of the page, or its token.
        """
        answer, list_name = pb.GetStatusResponse(), f"status/{request.prefix}"
        all_names = chain(self._catalog.names(), self._catalog.awaited_names())
        names = {name for name in all_names if name.startswith(request.prefix) and is_shown(name)}
        page, answer.next_page_token = find_names(names, of=list_name, size=request.page_size, token=request.page_token)
        if not request.page_token:
            revision = self._catalog.history.revision()
            answer.revision.CopyFrom(to_message(pb.Revision, revision))
            info = self._identity.info(revision.instance_id, for_all_partitions=is_shown(""))
            answer.service.CopyFrom(to_message(pb.ServiceInfo, info))
            answer.controllers.extend(to_message(pb.ControllerStatus, each) for each in self._controllers())
            answer.storages.extend(to_message(pb.StorageStatus, each) for each in self._storages.statuses())
        known = list(filter(is_shown, self._catalog.names())) if request.explain else []
        await self._look_at_versions(page)
        size_bytes = 0
        for name in page:
            if size_bytes > _MOST_PAGE_BYTES:
                answer.next_page_token = name_token(list_name, name)
                break
            partition = self._catalog.find(name, missing_ok=True)
            if partition is not None:
                answer.partitions.append(await described(self._catalog, self._backlogs, partition))
                size_bytes += answer.partitions[-1].ByteSize()
            for wait in await self._waits(name, known, explain=request.explain):
                answer.waits.append(to_message(pb.PartitionWait, wait))
                size_bytes += answer.waits[-1].ByteSize()
            await asyncio.sleep(0)
        return answer

    async def _look_at_versions(self, names: Sequence[str]) -> None:
        """Look at the versions of what tasks of partitions have left."""
        slices, tasks = Slices(), list[tuple[Partition, TaskLedger]]()
        for name in names:
            if (partition := self._catalog.find(name, missing_ok=True)) is not None:
                tasks += tasks_with_versions(partition)
                await slices.turn()
        await self._backlogs.refresh(tasks)

    async def _waits(self, name: str, known: list[str], *, explain: bool) -> list[PartitionWait]:
        if explain:
            reasons = await self._explainer.explain_waiting(name, "", known, most=_MOST_WAITS)
        else:
            reasons = await self._explainer.waiting(name, most=_MOST_WAITS)
        return [PartitionWait(partition_id=name, reason=reason) for reason in reasons]
