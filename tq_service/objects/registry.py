"""Finding engines by the scheme of a URL: built in, or of installed packages."""

from __future__ import annotations

import importlib
import importlib.metadata
from collections.abc import Callable
from typing import Any, Final

from tq_service.errors import InvalidArgumentError, nearest
from tq_service.objects.base import EngineUrl, ObjectStore

ENTRY_POINT_GROUP: Final = "tq_service.object_stores"
"""Entry points of packages: the name is the scheme, the value a callable that makes an `ObjectStore` of a URL."""

_BUILT_IN: Final[dict[str, tuple[str, str, str]]] = {
    # scheme: module, class, extra that brings the packages which it imports
    **dict.fromkeys(("s3", "gs", "az", "memory"), ("tq_service.objects.buckets", "BucketObjects", "obstore")),
    "file": ("tq_service.objects.buckets", "DirectoryObjects", "obstore"),
    **dict.fromkeys(("valkey", "valkeys", "redis", "rediss"), ("tq_service.objects.valkey", "ValkeyObjects", "valkey")),
    "mooncake": ("tq_service.objects.mooncake", "MooncakeObjects", "mooncake"),
}


def make_object_store(url: str) -> ObjectStore:
    """Make the engine that a URL names, without opening it.

    Args:
        url: such as `file:///mnt/shared/tq`; docs/engines.md describes its settings.

    Raises:
        InvalidArgumentError: no engine has its scheme, the engine's package is not installed, or a setting is wrong.
    """
    parsed = EngineUrl(url)
    store = _factory(parsed)(url)
    if not isinstance(store, ObjectStore):
        raise InvalidArgumentError(
            f"{parsed.redacted}: the engine {parsed.scheme!r} made {type(store).__qualname__}, expected a subclass of "
            "tq_service.objects.base.ObjectStore"
        )
    return store


def object_store_schemes() -> list[str]:
    """Return the schemes of all engines that could be made, whether what they import is installed or not."""
    return sorted({*_BUILT_IN, *(point.name for point in _entry_points())})


def _factory(url: EngineUrl) -> Callable[[str], Any]:
    built_in = _BUILT_IN.get(url.scheme)
    if built_in is not None:
        module, name, extra = built_in
        try:
            factory: Callable[[str], Any] = getattr(importlib.import_module(module), name).from_url
        except ImportError as error:
            raise InvalidArgumentError(
                f"{url.redacted}: the engine needs a package that cannot be imported here ({error}); install "
                f"tq-service[{extra}]"
            ) from error
        return factory
    for point in _entry_points():
        if point.name == url.scheme:
            try:
                loaded: Callable[[str], Any] = point.load()
            except Exception as error:  # code of others: it may raise anything
                raise InvalidArgumentError(
                    f"{url.redacted}: the engine {point.value} cannot be loaded: {type(error).__name__}: {error}"
                ) from error
            return loaded
    raise InvalidArgumentError(
        f"{url.redacted}: no engine has the scheme {url.scheme!r}; install one as an entry point of "
        f"{ENTRY_POINT_GROUP!r}; {nearest(url.scheme, object_store_schemes(), all_known=True)}"
    )


def _entry_points() -> tuple[importlib.metadata.EntryPoint, ...]:
    return tuple(importlib.metadata.entry_points(group=ENTRY_POINT_GROUP))
