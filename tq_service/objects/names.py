"""Names of objects: never used twice, and grouped by their beginning.

`<cluster>/<storage_id>/<instance>/<put_id>/<piece>.<attempt>`: of a put, which has pieces, of an instance of a storage
service, of a cluster. A retry has another attempt, so that it never meets what a killed writer or a late answer has
left under the name before it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Final

from tq_service.errors import InvalidArgumentError

_SEGMENT: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:-]*")
_SEGMENT_CHARACTERS: Final = 128
_LAST: Final = re.compile(r"([0-9]+)\.([0-9]+)")


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectName:
    """Name of an object; `str` of it is what an engine is given.

    Attributes:
        cluster: what shares an engine without seeing each other's objects.
        storage_id: storage service that wrote it.
        instance: its process, as hex digits (`boot_id` in its messages).
        put_id: the put, as hex digits; or what else the writer gathers objects under.
        piece: number of the piece of the put, from 0.
        attempt: number of the attempt to write the piece, from 0; never the same for two attempts.
    """

    cluster: str
    storage_id: str
    instance: str
    put_id: str
    piece: int = 0
    attempt: int = 0

    def __post_init__(self) -> None:
        for field in ("cluster", "storage_id", "instance", "put_id"):
            check_segment(field, getattr(self, field))
        if self.piece < 0 or self.attempt < 0:
            raise InvalidArgumentError(f"piece and attempt: got {self.piece} and {self.attempt}, expected 0 or more")

    def __str__(self) -> str:
        return f"{self.put_prefix}{self.piece}.{self.attempt}"

    @property
    def put_prefix(self) -> str:
        """Beginning of the names of all pieces and attempts of the put."""
        return f"{instance_prefix(self.cluster, self.storage_id, self.instance)}{self.put_id}/"

    def retried(self) -> ObjectName:
        """Return the name of the next attempt at the same piece."""
        return replace(self, attempt=self.attempt + 1)

    @classmethod
    def parse(cls, name: str) -> ObjectName:
        """Return what a name says.

        Raises:
            InvalidArgumentError: it is not a name of this form.
        """
        segments = name.split("/")
        last = _LAST.fullmatch(segments[-1])
        if len(segments) != 5 or last is None:
            raise InvalidArgumentError(
                f"object name: got {name!r}, expected <cluster>/<storage_id>/<instance>/<put_id>/<piece>.<attempt>",
                field="name",
            )
        cluster, storage_id, instance, put_id = segments[:4]
        return cls(
            cluster=cluster,
            storage_id=storage_id,
            instance=instance,
            put_id=put_id,
            piece=int(last[1]),
            attempt=int(last[2]),
        )


def storage_prefix(cluster: str, storage_id: str) -> str:
    """Return the beginning of the names of all objects of a storage service, of any of its instances."""
    return f"{check_segment('cluster', cluster)}/{check_segment('storage_id', storage_id)}/"


def instance_prefix(cluster: str, storage_id: str, instance: str) -> str:
    """Return the beginning of the names of all objects of one instance of a storage service."""
    return f"{storage_prefix(cluster, storage_id)}{check_segment('instance', instance)}/"


def check_segment(field: str, value: str) -> str:
    """Return a part of a name as it is.

    Raises:
        InvalidArgumentError: it has characters with a meaning for an engine or a file system, or is too long.
    """
    if len(value) > _SEGMENT_CHARACTERS or not _SEGMENT.fullmatch(value):
        raise InvalidArgumentError(
            f"{field}: got {value[:_SEGMENT_CHARACTERS]!r}, expected 1 to {_SEGMENT_CHARACTERS} letters, digits, '.', "
            "'_', ':' and '-', the first a letter or digit",
            field=field,
        )
    return value
