"""The complete puts of an engine by name. Recovered ones are loaded when they are first needed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Final

from tq_service.storage.blobs.base import Blob
from tq_service.storage.index.put import StoredPut

Load = Callable[[bytes, Blob], StoredPut]
_SHARDS: Final = 1024


class PutTable(Mapping[bytes, StoredPut]):
    """Puts by name; a service that has just been started has many that nobody may ever ask for again.

    They are in many small dicts, so that all can be looked at in slices while others come and go.
    """

    def __init__(self) -> None:
        self._shards: list[dict[bytes, StoredPut | Blob]] = [{} for _ in range(_SHARDS)]
        self._count = 0
        self._owners: Mapping[bytes, bytes] = {}
        self._load: Load | None = None

    def add_lazy(self, blobs: Mapping[bytes, Blob], owners: Mapping[bytes, bytes], load: Load) -> None:
        """Add recovered puts.

        Args:
            blobs: the bytes of each.
            owners: the controllers of those that have one.
            load: makes the put of a blob when it is needed.
        """
        self._owners = owners
        self._load = load
        for put_id, blob in blobs.items():
            self._shard(put_id)[put_id] = blob
        self._count = sum(map(len, self._shards))

    def __getitem__(self, put_id: bytes) -> StoredPut:
        shard = self._shard(put_id)
        put = shard[put_id]
        if isinstance(put, Blob):
            if self._load is None:
                raise KeyError(put_id)
            put = shard[put_id] = self._load(put_id, put)
        return put

    def __setitem__(self, put_id: bytes, put: StoredPut) -> None:
        shard = self._shard(put_id)
        self._count += put_id not in shard
        shard[put_id] = put

    def pop(self, put_id: bytes) -> Blob:
        """Remove a put and return the blob of its values."""
        put = self._shard(put_id).pop(put_id)
        self._count -= 1
        return put if isinstance(put, Blob) else put.values

    def owner_of(self, put_id: bytes) -> bytes:
        """Return the controller that owns a put, b"" for none."""
        put = self._shard(put_id)[put_id]
        return self._owners.get(put_id, b"") if isinstance(put, Blob) else put.owner

    def slices(self) -> Iterator[list[bytes]]:
        """Yield the names of all puts, some at a time; of those that come or go meanwhile some."""
        for shard in self._shards:
            yield list(shard)

    def __contains__(self, put_id: object) -> bool:
        return put_id in self._shard(put_id)

    def __iter__(self) -> Iterator[bytes]:
        for shard in self._shards:
            yield from shard

    def __len__(self) -> int:
        return self._count

    def _shard(self, put_id: object) -> dict[bytes, StoredPut | Blob]:
        return self._shards[hash(put_id) & (_SHARDS - 1)]
