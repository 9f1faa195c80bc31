"""Names of TransferQueue's storage that callers know: its units, of which there are none, and an error."""

from __future__ import annotations

from typing import Any, NoReturn


class StorageKeyNotFoundError(KeyError):
    """A sample was cleared before its data was read; callers that clear and read at a time catch it."""


class SimpleStorageUnit:
    """Cannot be made: the service stores."""

    @classmethod
    def options(cls, **options: Any) -> type[SimpleStorageUnit]:
        """Return the class: there is nothing that options could be for."""
        return cls

    @classmethod
    def remote(cls, *arguments: Any, **keywords: Any) -> NoReturn:
        """Raise RuntimeError."""
        raise RuntimeError("there are no storage units: the service of controller.address stores; leave them out")
