"""What callers import from TransferQueue's storage: the service stores, so nothing of it is to be configured."""

from transfer_queue.storage.simple_storage import SimpleStorageUnit, StorageKeyNotFoundError

__all__ = ["SimpleStorageUnit", "StorageKeyNotFoundError"]
