"""Data service for RL post-training of language models.

The service stores samples in columns and delivers balanced batches to data-parallel ranks over gRPC. `Client` and
`AsyncClient` call the service, and `tq_service.data` feeds trainers. The samplers are in `tq_service.samplers`, the
errors in `tq_service.errors`, and the result types in `tq_service.types`.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

from tq_service.errors import TqError
from tq_service.version import VERSION

if TYPE_CHECKING:
    from tq_service import errors, samplers, types
    from tq_service.client import AsyncClient, BatchMeta, Client
    from tq_service.client.slices import RowSlice
    from tq_service.client.traces import trace
    from tq_service.custom_meta import JSON_NULL
    from tq_service.observe.clients import instrument
    from tq_service.schema import Admission, Admit, FieldSpec, Published, Release
    from tq_service.step_times import StepTimer
    from tq_service.wire.connection import Tls
    from tq_service.wire.objects import register_object_codec

__version__ = VERSION

__all__ = [
    "JSON_NULL",
    "Admission",
    "Admit",
    "AsyncClient",
    "BatchMeta",
    "Client",
    "FieldSpec",
    "Published",
    "Release",
    "RowSlice",
    "StepTimer",
    "Tls",
    "TqError",
    "__version__",
    "errors",
    "instrument",
    "register_object_codec",
    "samplers",
    "trace",
    "types",
]

# These names are imported on first use. The core, samplers and balancing do not need grpc. The command line, which also
# runs health probes, needs neither the clients nor numpy.
_LAZY: Final = {
    **dict.fromkeys(("AsyncClient", "BatchMeta", "Client"), "tq_service.client"),
    **dict.fromkeys(("Admission", "Admit", "FieldSpec", "Published", "Release"), "tq_service.schema"),
    "StepTimer": "tq_service.step_times",
    "JSON_NULL": "tq_service.custom_meta",
    "RowSlice": "tq_service.client.slices",
    "Tls": "tq_service.wire.connection",
    "instrument": "tq_service.observe.clients",
    "trace": "tq_service.client.traces",
    "register_object_codec": "tq_service.wire.objects",
}
_LAZY_MODULES: Final = frozenset({"samplers", "types"})


def __getattr__(name: str) -> Any:
    if name not in _LAZY and name not in _LAZY_MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    is_module = name in _LAZY_MODULES
    value = import_module(f"{__name__}.{name}") if is_module else getattr(import_module(_LAZY[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    # List only public names. Omit the imports of this file, and submodules that happen to be loaded.
    return sorted(__all__)
