"""Names that programs import from TransferQueue's storage package. The service itself stores the data."""

from transfer_queue.storage.simple_storage import SimpleStorageUnit, StorageKeyNotFoundError

__all__ = ["SimpleStorageUnit", "StorageKeyNotFoundError"]
