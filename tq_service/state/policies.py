"""Policies: the last published version of the weights of each."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeAlias


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """The published version of a policy.

    Attributes:
        name: its name, including the namespace of the publishing client, as in a partition id.
        version: number of the weights in use.
        published_at: time of publication, in seconds since 1970.
    """

    name: str
    version: int
    published_at: float


Policies: TypeAlias = Mapping[str, Policy]
