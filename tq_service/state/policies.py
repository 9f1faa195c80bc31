"""Policies: which version of the weights of each was published last."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeAlias


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """The published version of a policy.

    Attributes:
        name: like that of a partition, with the namespace of the client that published it.
        version: the number of the weights that are in use.
        published_at: when it was published, in seconds since 1970.
    """

    name: str
    version: int
    published_at: float


Policies: TypeAlias = Mapping[str, Policy]
