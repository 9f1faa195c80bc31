"""The name of TransferQueue's storage units, which callers configure: the service stores, and there are none."""

from __future__ import annotations

from typing import Any, NoReturn


class SimpleStorageUnit:
    """Cannot be made."""

    @classmethod
    def options(cls, **options: Any) -> type[SimpleStorageUnit]:
        """Return the class: there is nothing that options could be for."""
        return cls

    @classmethod
    def remote(cls, *arguments: Any, **keywords: Any) -> NoReturn:
        """Raise RuntimeError."""
        raise RuntimeError("there are no storage units: the service of controller.address stores; leave them out")
