"""Pages of samples as one batch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, Final

from tq_service.client.batch_meta import BatchMeta, samples_of
from tq_service.errors import StaleIncarnationError
from tq_service.wire.runs import Indexes

NAMED_AT_ONCE: Final = 16_384


def in_parts(names: Sequence[Any] | Indexes) -> Iterator[Sequence[Any] | Indexes]:
    """Yield the names of samples in parts of what one call names; at least one part."""
    for start in range(0, max(1, len(names)), NAMED_AT_ONCE):
        yield names[start : start + NAMED_AT_ONCE]


def joined(parts: Sequence[BatchMeta]) -> BatchMeta:
    """Return the samples of several pages, with the fields as the last one has them.

    Raises:
        StaleIncarnationError: the partition was cleared and created again between two of them.
    """
    if len(parts) == 1:
        return parts[0]
    last = parts[-1]
    for part in parts:
        if part.incarnation != last.incarnation:
            raise StaleIncarnationError(
                f"partition {last.partition_id!r} was cleared and created again between two pages of samples; "
                "ask again",
                metadata={
                    "partition_id": last.partition_id,
                    "got": part.incarnation.hex(),
                    "expected": last.incarnation.hex(),
                },
            )
    return replace(last, **samples_of(parts))
