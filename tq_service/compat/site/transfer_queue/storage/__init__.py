"""Names that programs import from TransferQueue's storage. The service stores the data and needs no configuration."""

from transfer_queue.storage.simple_storage import SimpleStorageUnit, StorageKeyNotFoundError

__all__ = ["SimpleStorageUnit", "StorageKeyNotFoundError"]
