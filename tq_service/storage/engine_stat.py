"""What an engine tells of itself."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStat:
    """Sizes and counts of an engine.

    Attributes:
        max_bytes: the quota; None: no bound.
        used_bytes: bytes stored and reserved: values, and the extents of jagged and object rows.
        pooled_bytes: bytes of memory held for reuse, besides `used_bytes`.
        put_count: complete puts held.
        uncommitted_put_count: those of them that are not confirmed yet.
        damaged_put_count: those whose bytes are lost, as far as that is known.
    """

    max_bytes: int | None
    used_bytes: int
    pooled_bytes: int
    put_count: int
    uncommitted_put_count: int
    damaged_put_count: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Reconciled:
    """What came of telling an engine which puts are known.

    Attributes:
        missing_put_ids: some of the known puts that are not here, or damaged.
        missing_count: number of all of them.
        dropped_count: number of confirmed puts that are not known, and were dropped.
    """

    missing_put_ids: Sequence[bytes]
    missing_count: int
    dropped_count: int
