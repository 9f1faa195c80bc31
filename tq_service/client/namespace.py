"""Namespaces: the part of partitions' names that programs of one run share, so that runs can share a service."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Final, Literal

from tq_service.errors import InvalidArgumentError, TqError

NAMESPACE_VARIABLE: Final = "TQ_NAMESPACE"
SEPARATOR: Final = "/"


@dataclass(frozen=True, slots=True)
class Namespace:
    """What the names of a client's partitions begin with on the service.

    Partition "train" of the namespace "run-7" is the service's partition "run-7/train": one of its own beside "train"
    and "run-8/train", with its own `max_bytes`, for tokens whose prefix is "run-7/".

    Attributes:
        name: "run-7"; empty: the names of the service itself.
    """

    name: str = ""

    @classmethod
    def of(cls, given: str | Literal[False] | None) -> Namespace:
        """Return the namespace of an argument: None stands for what `TQ_NAMESPACE` says, False for none.

        Raises:
            InvalidArgumentError: partitions cannot have such a name.
        """
        if given is None:
            return cls._checked(os.environ.get(NAMESPACE_VARIABLE) or "", NAMESPACE_VARIABLE)
        return cls() if given is False else cls._checked(given, "namespace", may_be_empty=False)

    @classmethod
    def _checked(cls, name: str, what: str, *, may_be_empty: bool = True) -> Namespace:
        is_name = isinstance(name, str) and name.isprintable() and name == name.strip(SEPARATOR)
        if not is_name or not (name or may_be_empty):
            raise InvalidArgumentError(
                f"{what} is {name!r}, expected printable text such as 'run-7' or 'team/run-7', without {SEPARATOR!r} "
                "at its ends; give False for no namespace",
                field="namespace",
            )
        return cls(name)

    @property
    def prefix(self) -> str:
        """What names begin with."""
        return self.name + SEPARATOR if self.name else ""

    def full_name(self, partition_id: str) -> str:
        """Return the service's name of a partition; what is no name stays as it is, for the service to refuse."""
        return (
            self.prefix + partition_id if self.name and isinstance(partition_id, str) and partition_id else partition_id
        )

    def own_name(self, full_name: str) -> str:
        """Return the name of a partition in this namespace; that of a partition of another one is its full name."""
        return full_name.removeprefix(self.prefix)

    def holds(self, full_name: str) -> bool:
        """Return whether a partition is in this namespace."""
        return full_name.startswith(self.prefix)

    def explain(self, failure: TqError) -> TqError:
        """Return an error of the service with the partition's own name in its metadata; its message has full names."""
        if self.name:
            if "partition_id" in failure.metadata:
                failure.metadata["partition_id"] = self.own_name(failure.metadata["partition_id"])
            if self.prefix in failure.message:
                failure.message += f" ({self.prefix!r} is the namespace of this client)"
        return failure


NO_NAMESPACE: Final = Namespace()
