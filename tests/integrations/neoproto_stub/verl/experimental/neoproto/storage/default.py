"""How verl selects engines: a default, and those of its own backends."""

from typing import Any

from verl.experimental.neoproto import neo

_default: list[Any] = []


def set_default_storage_engine(engine: Any) -> None:
    _default[:] = [] if engine is None else [engine]
    neo.GLOBAL_ENGINE_DICT.pop("default", None)
    if engine is not None:
        neo.GLOBAL_ENGINE_DICT["default"] = neo.GLOBAL_ENGINE_DICT[engine.backend] = engine


def get_engine_for_backend(backend: str | None = None) -> Any:
    if backend in {None, "default"} and _default:
        return _default[0]
    raise ValueError(f"unsupported NeoProto storage backend {backend!r}")
