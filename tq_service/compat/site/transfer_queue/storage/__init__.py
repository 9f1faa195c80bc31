"""Names that callers import from TransferQueue's storage; the service stores the data and needs no configuration."""

from transfer_queue.storage.simple_storage import SimpleStorageUnit, StorageKeyNotFoundError

__all__ = ["SimpleStorageUnit", "StorageKeyNotFoundError"]
