"""The data service for RL post-training of language models.

Samples, columns and balanced batches for data-parallel ranks over gRPC: `Client` and `AsyncClient` talk to the service,
`tq_service.data` feeds trainers.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

from tq_service.errors import (
    AdmissionLimitError,
    AlreadyExistsError,
    BatchForgottenError,
    CallCancelledError,
    CellNotFoundError,
    ClaimReleasedError,
    CompactedError,
    DataDirError,
    DataLossError,
    DeadlineError,
    DiskFullError,
    FieldMismatchError,
    FieldNotFoundError,
    InternalError,
    InvalidArgumentError,
    JournalDamagedError,
    JournalUnreachableError,
    KeyNotFoundError,
    LeaseExpiredError,
    LimitExceededError,
    MissingLengthError,
    NewerVersionError,
    NotFoundError,
    NothingDeliveredError,
    NotLeaderError,
    PartitionClearedError,
    PartitionNotFoundError,
    PartitionSealedError,
    PermissionDeniedError,
    PolicyNotFoundError,
    PreconditionError,
    PutNotFoundError,
    QuotaExceededError,
    RankDisagreementError,
    ResourceExhaustedError,
    SampleNotFoundError,
    SamplerError,
    SamplerTimeoutError,
    SamplesClearedError,
    ServiceFailedError,
    SnapshotDamagedError,
    StaleEpochError,
    StaleIncarnationError,
    SupersededError,
    TaskNotFoundError,
    TqError,
    UnauthenticatedError,
    UnavailableError,
    UnsupportedObjectError,
    VersionError,
)
from tq_service.version import VERSION

if TYPE_CHECKING:
    from tq_service.client import AsyncClient, BatchMeta, Client
    from tq_service.client.traces import trace
    from tq_service.custom_meta import JSON_NULL
    from tq_service.observe.clients import instrument
    from tq_service.schema import Admission, Admit, FieldSpec, Layout, Published, SampleState
    from tq_service.wire.connection import Tls
    from tq_service.wire.objects import register_object_codec

__version__ = VERSION

__all__ = [
    "JSON_NULL",
    "Admission",
    "AdmissionLimitError",
    "Admit",
    "AlreadyExistsError",
    "AsyncClient",
    "BatchForgottenError",
    "BatchMeta",
    "CallCancelledError",
    "CellNotFoundError",
    "ClaimReleasedError",
    "Client",
    "CompactedError",
    "DataDirError",
    "DataLossError",
    "DeadlineError",
    "DiskFullError",
    "FieldMismatchError",
    "FieldNotFoundError",
    "FieldSpec",
    "InternalError",
    "InvalidArgumentError",
    "JournalDamagedError",
    "JournalUnreachableError",
    "KeyNotFoundError",
    "Layout",
    "LeaseExpiredError",
    "LimitExceededError",
    "MissingLengthError",
    "NewerVersionError",
    "NotFoundError",
    "NotLeaderError",
    "NothingDeliveredError",
    "PartitionClearedError",
    "PartitionNotFoundError",
    "PartitionSealedError",
    "PermissionDeniedError",
    "PolicyNotFoundError",
    "PreconditionError",
    "Published",
    "PutNotFoundError",
    "QuotaExceededError",
    "RankDisagreementError",
    "ResourceExhaustedError",
    "SampleNotFoundError",
    "SampleState",
    "SamplerError",
    "SamplerTimeoutError",
    "SamplesClearedError",
    "ServiceFailedError",
    "SnapshotDamagedError",
    "StaleEpochError",
    "StaleIncarnationError",
    "SupersededError",
    "TaskNotFoundError",
    "Tls",
    "TqError",
    "UnauthenticatedError",
    "UnavailableError",
    "UnsupportedObjectError",
    "VersionError",
    "__version__",
    "instrument",
    "register_object_codec",
    "trace",
]

# These need grpc, and are imported on first use: the core, samplers and balancing do without it.
# Imported when they are asked for: the command line, health probes above all, does without clients and numpy.
_LAZY: Final = {
    **dict.fromkeys(("AsyncClient", "BatchMeta", "Client"), "tq_service.client"),
    **dict.fromkeys(("Admission", "Admit", "FieldSpec", "Layout", "Published", "SampleState"), "tq_service.schema"),
    "JSON_NULL": "tq_service.custom_meta",
    "Tls": "tq_service.wire.connection",
    "instrument": "tq_service.observe.clients",
    "trace": "tq_service.client.traces",
    "register_object_codec": "tq_service.wire.objects",
}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(_LAZY[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    # What is for users: neither what this file imports for itself, nor which submodules happen to be loaded.
    return sorted(__all__)
