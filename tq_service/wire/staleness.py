"""Staleness limits as messages and back."""

from __future__ import annotations

from tq_service.schema import StalenessLimit
from tq_service.v1 import controller_service_pb2 as pb


def encode_staleness_limit(limit: StalenessLimit) -> pb.StalenessLimit:
    """Return a limit as a message."""
    return pb.StalenessLimit(
        task_name=limit.task_name,
        max_samples=limit.max_samples,
        max_versions=limit.max_versions,
        version_column=limit.version_column,
    )


def decode_staleness_limit(message: pb.StalenessLimit) -> StalenessLimit:
    """Return the limit of a message.

    Raises:
        InvalidArgumentError: it bounds nothing, or a number of it is out of range.
    """
    return StalenessLimit(
        task_name=message.task_name,
        max_samples=message.max_samples if message.HasField("max_samples") else None,
        max_versions=message.max_versions if message.HasField("max_versions") else None,
        version_column=message.version_column or "version",
    )
