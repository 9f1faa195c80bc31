"""Names that programs import from TransferQueue's storage package: an error and a placeholder for the storage unit."""

from __future__ import annotations

from typing import Any, NoReturn


class StorageKeyNotFoundError(KeyError):
    """Raised if a sample was cleared before its data was read.

    Programs that read and clear samples concurrently catch this error.
    """


class SimpleStorageUnit:
    """A placeholder that cannot be instantiated, because the service stores the data."""

    @classmethod
    def options(cls, **options: Any) -> type[SimpleStorageUnit]:
        """Ignore the options and return this class."""
        return cls

    @classmethod
    def remote(cls, *arguments: Any, **keywords: Any) -> NoReturn:
        """Raise RuntimeError, because there are no storage units."""
        raise RuntimeError(
            "cannot create a storage unit, because the service at controller.address stores the data. Remove this call"
        )
