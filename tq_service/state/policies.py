"""Policies and their latest published weight versions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeAlias


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """A policy and its published version.

    Attributes:
        name: name of the policy. Like a partition id, the name is prefixed with the publishing client's namespace.
        version: version of the published weights.
        published_at: time of publication, in seconds since 1970.
    """

    name: str
    version: int
    published_at: float


Policies: TypeAlias = Mapping[str, Policy]
