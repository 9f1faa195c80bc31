"""Names that callers import from TransferQueue's storage: its units, which do not exist here, and an error."""

from __future__ import annotations

from typing import Any, NoReturn


class StorageKeyNotFoundError(KeyError):
    """A sample was cleared before its data was read; callers that clear and read concurrently catch it."""


class SimpleStorageUnit:
    """Cannot be created: the service stores the data."""

    @classmethod
    def options(cls, **options: Any) -> type[SimpleStorageUnit]:
        """Return the class; options are ignored."""
        return cls

    @classmethod
    def remote(cls, *arguments: Any, **keywords: Any) -> NoReturn:
        """Raise RuntimeError."""
        raise RuntimeError("storage units do not exist: the service at controller.address stores the data; omit them")
