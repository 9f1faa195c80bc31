"""The complete puts of an engine by name. Recovered ones are brought to life when they are first needed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from tq_service.storage.region import Region
from tq_service.storage.stored_put import StoredPut

Wake = Callable[[bytes, Region], StoredPut]


class PutTable(Mapping[bytes, StoredPut]):
    """Puts by name; a service that has just been started has many that nobody may ever ask for again."""

    def __init__(self) -> None:
        self._awake: dict[bytes, StoredPut] = {}
        self._asleep: dict[bytes, Region] = {}
        self._wake: Wake | None = None

    def add_asleep(self, regions: Mapping[bytes, Region], wake: Wake) -> None:
        """Add recovered puts.

        Args:
            regions: the memory of each.
            wake: makes the put of a region when it is needed.
        """
        self._asleep |= regions
        self._wake = wake

    def __getitem__(self, put_id: bytes) -> StoredPut:
        put = self._awake.get(put_id)
        if put is None:
            region = self._asleep[put_id]
            if self._wake is None:
                raise KeyError(put_id)
            put = self._awake[put_id] = self._wake(put_id, region)
            del self._asleep[put_id]
        return put

    def __setitem__(self, put_id: bytes, put: StoredPut) -> None:
        self._asleep.pop(put_id, None)
        self._awake[put_id] = put

    def pop(self, put_id: bytes) -> Region:
        """Remove a put and return its memory."""
        put = self._awake.pop(put_id, None)
        return self._asleep.pop(put_id) if put is None else put.region

    def __contains__(self, put_id: object) -> bool:
        return put_id in self._awake or put_id in self._asleep

    def __iter__(self) -> Iterator[bytes]:
        yield from self._awake
        yield from self._asleep

    def __len__(self) -> int:
        return len(self._awake) + len(self._asleep)
