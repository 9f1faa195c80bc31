"""Clients for the service: `AsyncClient` and `Client`. `Client` is generated from `AsyncClient`."""

from __future__ import annotations

from tq_service.client._async.client import AsyncClient
from tq_service.client._async.watching import AsyncWatch
from tq_service.client._async.work import AsyncWork, AsyncWorkItem
from tq_service.client._sync.client import Client
from tq_service.client._sync.watching import Watch
from tq_service.client._sync.work import Work, WorkItem
from tq_service.client.batch_meta import BatchMeta

__all__ = [
    "AsyncClient",
    "AsyncWatch",
    "AsyncWork",
    "AsyncWorkItem",
    "BatchMeta",
    "Client",
    "Watch",
    "Work",
    "WorkItem",
]
