"""Names that programs import from TransferQueue's storage: an error, and a placeholder for the storage unit."""

from __future__ import annotations

from typing import Any, NoReturn


class StorageKeyNotFoundError(KeyError):
    """A sample was cleared before its data was read. Programs that clear and read concurrently catch this error."""


class SimpleStorageUnit:
    """A placeholder that cannot be instantiated, since the service stores the data."""

    @classmethod
    def options(cls, **options: Any) -> type[SimpleStorageUnit]:
        """Return the class itself; options are ignored."""
        return cls

    @classmethod
    def remote(cls, *arguments: Any, **keywords: Any) -> NoReturn:
        """Raise RuntimeError, since storage units do not exist."""
        raise RuntimeError(
            "storage units do not exist, since the service at controller.address stores the data. Do not create them"
        )
