"""Names that callers import from TransferQueue's storage: an error, and storage units, which do not exist here."""

from __future__ import annotations

from typing import Any, NoReturn


class StorageKeyNotFoundError(KeyError):
    """A sample was cleared before its data was read; callers that clear and read concurrently catch it."""


class SimpleStorageUnit:
    """A class that cannot be instantiated, since the service stores the data."""

    @classmethod
    def options(cls, **options: Any) -> type[SimpleStorageUnit]:
        """Return the class; options are ignored."""
        return cls

    @classmethod
    def remote(cls, *arguments: Any, **keywords: Any) -> NoReturn:
        """Raise RuntimeError."""
        raise RuntimeError(
            "storage units do not exist, since the service at controller.address stores the data; do not create them"
        )
