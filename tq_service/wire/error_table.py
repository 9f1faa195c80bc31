"""The one table of errors: exception class, gRPC code, and both ways over the wire.

An error travels as `google.rpc.Status` with `ErrorInfo` (its reason and metadata), `BadRequest` where an argument is
named, and `RetryInfo` where trying later helps. The same class is raised again in the client.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any, Final

import grpc
from google.protobuf.any_pb2 import Any as AnyMessage
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import DecodeError, Message
from google.rpc.error_details_pb2 import BadRequest, ErrorInfo, RetryInfo
from google.rpc.status_pb2 import Status

from tq_service import errors

DOMAIN: Final = "tq_service"
STATUS_TRAILER: Final = "grpc-status-details-bin"

# HTTP/2 trailers are limited to 8 KiB by default, and a message is in them twice, once percent-encoded.
MAX_MESSAGE_BYTES: Final = 1024
MAX_METADATA_VALUE_BYTES: Final = 256
MAX_METADATA_BYTES: Final = 1024

_CODE: Final = grpc.StatusCode

ERROR_TABLE: Final[dict[type[errors.TqError], grpc.StatusCode]] = {
    errors.FieldMismatchError: _CODE.INVALID_ARGUMENT,
    errors.UnknownSamplerError: _CODE.INVALID_ARGUMENT,
    errors.MissingLengthError: _CODE.INVALID_ARGUMENT,
    errors.InvalidArgumentError: _CODE.INVALID_ARGUMENT,
    errors.UnsupportedObjectError: _CODE.INVALID_ARGUMENT,
    errors.PartitionNotFoundError: _CODE.NOT_FOUND,
    errors.FieldNotFoundError: _CODE.NOT_FOUND,
    errors.KeyNotFoundError: _CODE.NOT_FOUND,
    errors.SampleNotFoundError: _CODE.NOT_FOUND,
    errors.CellNotFoundError: _CODE.NOT_FOUND,
    errors.TaskNotFoundError: _CODE.NOT_FOUND,
    errors.GroupNotFoundError: _CODE.NOT_FOUND,
    errors.PutNotFoundError: _CODE.NOT_FOUND,
    errors.NotFoundError: _CODE.NOT_FOUND,
    errors.AlreadyExistsError: _CODE.ALREADY_EXISTS,
    errors.StaleIncarnationError: _CODE.FAILED_PRECONDITION,
    errors.StaleEpochError: _CODE.FAILED_PRECONDITION,
    errors.RankDisagreementError: _CODE.FAILED_PRECONDITION,
    errors.PartitionSealedError: _CODE.FAILED_PRECONDITION,
    errors.PartitionClearedError: _CODE.FAILED_PRECONDITION,
    errors.SamplesClearedError: _CODE.FAILED_PRECONDITION,
    errors.NothingDeliveredError: _CODE.FAILED_PRECONDITION,
    errors.SampleFailedError: _CODE.FAILED_PRECONDITION,
    errors.ClaimReleasedError: _CODE.FAILED_PRECONDITION,
    errors.LeaseExpiredError: _CODE.FAILED_PRECONDITION,
    errors.NewerVersionError: _CODE.FAILED_PRECONDITION,
    errors.DataDirError: _CODE.FAILED_PRECONDITION,
    errors.PreconditionError: _CODE.FAILED_PRECONDITION,
    errors.QuotaExceededError: _CODE.RESOURCE_EXHAUSTED,
    errors.StalenessLimitError: _CODE.RESOURCE_EXHAUSTED,
    errors.LimitExceededError: _CODE.RESOURCE_EXHAUSTED,
    errors.DiskFullError: _CODE.RESOURCE_EXHAUSTED,
    errors.ResourceExhaustedError: _CODE.RESOURCE_EXHAUSTED,
    errors.UnauthenticatedError: _CODE.UNAUTHENTICATED,
    errors.PermissionDeniedError: _CODE.PERMISSION_DENIED,
    errors.JournalDamagedError: _CODE.DATA_LOSS,
    errors.SnapshotDamagedError: _CODE.DATA_LOSS,
    errors.DataLossError: _CODE.DATA_LOSS,
    errors.SamplerError: _CODE.INTERNAL,
    errors.SamplerTimeoutError: _CODE.DEADLINE_EXCEEDED,
    errors.DeadlineError: _CODE.DEADLINE_EXCEEDED,
    errors.ServiceFailedError: _CODE.UNAVAILABLE,
    errors.DiskFailedError: _CODE.UNAVAILABLE,
    errors.UnavailableError: _CODE.UNAVAILABLE,
    errors.CallCancelledError: _CODE.CANCELLED,
    errors.ForkedClientError: _CODE.FAILED_PRECONDITION,
    errors.InternalError: _CODE.INTERNAL,
    errors.TqError: _CODE.INTERNAL,
}
"""The gRPC code of every error class, the most specific first."""

_CLASS_BY_REASON: Final[dict[str, type[errors.TqError]]] = {
    kind.reason: kind for kind in reversed(ERROR_TABLE) if kind is not errors.TqError
}

# What a code means when no reason came with it: from gRPC itself, a proxy, or a newer server.
_CLASS_BY_CODE: Final[dict[grpc.StatusCode, type[errors.TqError]]] = {
    _CODE.INVALID_ARGUMENT: errors.InvalidArgumentError,
    _CODE.OUT_OF_RANGE: errors.InvalidArgumentError,
    _CODE.NOT_FOUND: errors.NotFoundError,
    _CODE.ALREADY_EXISTS: errors.AlreadyExistsError,
    _CODE.FAILED_PRECONDITION: errors.PreconditionError,
    _CODE.ABORTED: errors.PreconditionError,
    _CODE.PERMISSION_DENIED: errors.PermissionDeniedError,
    _CODE.UNAUTHENTICATED: errors.UnauthenticatedError,
    _CODE.RESOURCE_EXHAUSTED: errors.ResourceExhaustedError,
    _CODE.DATA_LOSS: errors.DataLossError,
    _CODE.DEADLINE_EXCEEDED: errors.DeadlineError,
    _CODE.UNAVAILABLE: errors.UnavailableError,
    _CODE.CANCELLED: errors.CallCancelledError,
}

_CLOSED_HERE: Final = "Channel closed!"
"""What gRPC says of a call whose channel was closed by this process."""
_TOO_LARGE: Final = re.compile(r"message larger than max \((\d+) vs\. (\d+)\)")
"""What gRPC says of a message that its receiver does not take."""


def code_of(error: errors.TqError) -> grpc.StatusCode:
    """Return the gRPC code of an error; a class that is not in the table has the code of its base."""
    return next(ERROR_TABLE[kind] for kind in type(error).__mro__ if kind in ERROR_TABLE)


def to_status(error: errors.TqError) -> Status:
    """Return an error as `google.rpc.Status`, its texts cut to what trailers can carry."""
    message = _cut(error.message, MAX_MESSAGE_BYTES)
    details: list[Message] = [ErrorInfo(reason=error.reason, domain=DOMAIN, metadata=_fit(error.metadata))]
    if isinstance(error, errors.InvalidArgumentError) and error.field:
        violation = BadRequest.FieldViolation(
            field=_cut(error.field, MAX_METADATA_VALUE_BYTES), description=_cut(message, MAX_METADATA_VALUE_BYTES)
        )
        details.append(BadRequest(field_violations=[violation]))
    if isinstance(error, errors.ResourceExhaustedError) and error.retry_after_seconds is not None:
        nanos = max(0, round(error.retry_after_seconds * 1e9))
        details.append(RetryInfo(retry_delay=Duration(seconds=nanos // 10**9, nanos=nanos % 10**9)))
    status = Status(code=code_of(error).value[0], message=message)
    for detail in details:
        packed = AnyMessage()
        packed.Pack(detail)
        status.details.append(packed)
    return status


def status_from_trailers(trailers: Iterable[Any] | None) -> Status | None:
    """Return the `google.rpc.Status` in the trailing metadata of a call, None where there is none to be read."""
    for key, value in trailers or ():
        if key == STATUS_TRAILER and isinstance(value, bytes):
            try:
                return Status.FromString(value)
            except DecodeError:
                return None
    return None


def from_rpc_error(code: grpc.StatusCode, details: str | None, status: Status | None) -> errors.TqError:
    """Return the error that a call ended with.

    Args:
        code: the call's status code.
        details: the call's message.
        status: what came in the trailers (`status_from_trailers`); None: gRPC itself or a proxy answered, and the code
            alone decides.
    """
    info, violation, retry = ErrorInfo(), BadRequest(), RetryInfo()
    has_info = has_retry = False
    for detail in status.details if status is not None else ():
        has_info = detail.Unpack(info) or has_info
        has_retry = detail.Unpack(retry) or has_retry
        detail.Unpack(violation)
    message = (status.message if status is not None else "") or details or code.name
    if not has_info or info.domain != DOMAIN:
        return _from_code(code, message)
    metadata = dict(info.metadata)
    if violation.field_violations:
        metadata.setdefault("field", violation.field_violations[0].field)
    kind = _CLASS_BY_REASON.get(info.reason) or _CLASS_BY_CODE.get(code, errors.InternalError)
    if issubclass(kind, errors.ResourceExhaustedError):
        after = retry.retry_delay.seconds + retry.retry_delay.nanos / 1e9 if has_retry else None
        return kind(message, retry_after_seconds=after, metadata=metadata)
    return kind(message, metadata=metadata)


def _from_code(code: grpc.StatusCode, message: str) -> errors.TqError:
    if code is _CODE.CANCELLED and message != _CLOSED_HERE:
        # A service that stops takes the calls with it that are still running when its grace is over.
        return errors.UnavailableError(f"the call was broken off on its way, or by a service that stops ({message})")
    if code is _CODE.UNIMPLEMENTED:
        return errors.InternalError(
            f"the server does not know this call ({message}); client and server are of different versions, or the "
            "address is that of another service"
        )
    if code is _CODE.RESOURCE_EXHAUSTED and (sizes := _TOO_LARGE.search(message)) is not None:
        return errors.ResourceExhaustedError(
            f"a message of this call has {sizes[1]} bytes, more than the {sizes[2]} that its receiver takes; ask for "
            "or send less at once, or raise grpc.max_receive_message_length of the client, max_message_bytes of the "
            f"service ({message})",
            metadata={"limit_name": "message size", "got": sizes[1], "limit": sizes[2]},
        )
    kind = _CLASS_BY_CODE.get(code)
    if kind is None:
        return errors.InternalError(f"the call failed with {code.name}: {message}")
    return kind(message)


def _cut(text: str, max_bytes: int) -> str:
    raw = text.encode("utf-8", "replace")
    return text if len(raw) <= max_bytes else raw[: max_bytes - 3].decode("utf-8", "ignore") + "..."


def _fit(metadata: Mapping[str, str]) -> dict[str, str]:
    fitting: dict[str, str] = {}
    room = MAX_METADATA_BYTES
    for key, value in metadata.items():
        cut = _cut(value, MAX_METADATA_VALUE_BYTES)
        room -= len(key.encode()) + len(cut.encode())
        if room < 0:
            break
        fitting[key] = cut
    return fitting
