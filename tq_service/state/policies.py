"""Policies and their latest published weight versions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeAlias


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """A policy's published version.

    Attributes:
        name: policy name, prefixed with the publishing client's namespace like a partition id.
        version: version number of the published weights.
        published_at: time of publication, in seconds since 1970.
    """

    name: str
    version: int
    published_at: float


Policies: TypeAlias = Mapping[str, Policy]
