"""Conversion of errors to and from gRPC statuses.

An error is sent as a `google.rpc.Status` with `ErrorInfo` (reason and metadata). The status also contains `BadRequest`
if the error concerns an argument, and `RetryInfo` if a later retry may succeed. The client raises an error of the class
that corresponds to the reason. If the reason is unknown, the status code determines the class instead.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any, Final

import grpc
from google.protobuf.any_pb2 import Any as AnyMessage
from google.protobuf.message import DecodeError, Message
from google.rpc.error_details_pb2 import BadRequest, ErrorInfo, RetryInfo
from google.rpc.status_pb2 import Status

from tq_service import errors
from tq_service.wire.messages import to_duration

DOMAIN: Final = "tq_service"
STATUS_TRAILER: Final = "grpc-status-details-bin"

# By default, HTTP/2 trailers are limited to 8 KiB. They contain each message twice, once percent-encoded.
MAX_MESSAGE_BYTES: Final = 1024
MAX_METADATA_VALUE_BYTES: Final = 256
MAX_METADATA_BYTES: Final = 1024

_CODE: Final = grpc.StatusCode

ERROR_CLASSES: Final = frozenset(
    kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, errors.TqError)
)

_CLASS_BY_REASON: Final = {kind.reason: kind for kind in ERROR_CLASSES - {errors.TqError}}

# gRPC, a proxy or a newer server may send a code without a known reason. The name of the code is then used as the
# reason, with these exceptions.
_LIKE: Final = {_CODE.OUT_OF_RANGE: "INVALID_ARGUMENT", _CODE.ABORTED: "FAILED_PRECONDITION"}

_CLOSED_HERE: Final = "Channel closed!"
"""gRPC's error message for a call whose channel was closed in this process."""
_TOO_LARGE: Final = re.compile(r"message larger than max \((\d+) vs\. (\d+)\)")
"""Pattern of gRPC's error text for a message that the receiver rejects because of its size."""


def code_of(error: errors.TqError) -> grpc.StatusCode:
    """Return the gRPC status code of an error."""
    return _CODE[error.code]


def to_status(error: errors.TqError, **facts: str) -> Status:
    """Convert an error to a `google.rpc.Status`. Long texts are truncated so that they fit in gRPC trailers.

    Args:
        error: error to send to the client.
        **facts: additional metadata for `ErrorInfo`.
    """
    message = _cut(error.message, MAX_MESSAGE_BYTES)
    details: list[Message] = [
        ErrorInfo(reason=error.reason, domain=DOMAIN, metadata=_fit(facts | error.metadata | facts))
    ]
    if isinstance(error, errors.InvalidArgumentError) and error.field:
        violation = BadRequest.FieldViolation(
            field=_cut(error.field, MAX_METADATA_VALUE_BYTES), description=_cut(message, MAX_METADATA_VALUE_BYTES)
        )
        details.append(BadRequest(field_violations=[violation]))
    if isinstance(error, errors.ResourceExhaustedError) and error.retry_after_seconds is not None:
        details.append(RetryInfo(retry_delay=to_duration(max(0.0, error.retry_after_seconds))))
    status = Status(code=code_of(error).value[0], message=message)
    for detail in details:
        packed = AnyMessage()
        packed.Pack(detail)
        status.details.append(packed)
    return status


def status_from_trailers(trailers: Iterable[Any] | None) -> Status | None:
    """Return the `google.rpc.Status` in a call's trailing metadata, or None if it is missing or unreadable."""
    for key, value in trailers or ():
        if key == STATUS_TRAILER and isinstance(value, bytes):
            try:
                return Status.FromString(value)
            except DecodeError:
                return None
    return None


def from_rpc_error(code: grpc.StatusCode, details: str | None, status: Status | None) -> errors.TqError:
    """Convert the status of a failed call to an error.

    Args:
        code: status code of the call.
        details: error message of the call.
        status: status from the trailers (see `status_from_trailers`). None if gRPC or a proxy rejected the call; the
            code then determines the error class.
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
    kind = _CLASS_BY_REASON.get(info.reason) or _class_of(code)
    error = kind(message, reason=info.reason or None, metadata=metadata)
    if isinstance(error, errors.ResourceExhaustedError) and has_retry:
        error.retry_after_seconds = retry.retry_delay.seconds + retry.retry_delay.nanos / 1e9
    return error


def _class_of(code: grpc.StatusCode) -> type[errors.TqError]:
    return _CLASS_BY_REASON.get(_LIKE.get(code, code.name), errors.InternalError)


def _from_code(code: grpc.StatusCode, message: str) -> errors.TqError:
    if code is _CODE.CANCELLED and message != _CLOSED_HERE:
        # When the grace period ends, a service that is shutting down cancels the calls that are still running.
        return errors.UnavailableError(f"the call was interrupted in transit or by a stopping service ({message})")
    if code is _CODE.UNIMPLEMENTED:
        return errors.InternalError(
            f"the server does not support this call ({message}). The client and server have different versions, or "
            "the address belongs to another service"
        )
    if code is _CODE.RESOURCE_EXHAUSTED and (sizes := _TOO_LARGE.search(message)) is not None:
        return errors.ResourceExhaustedError(
            f"a message in this call has {sizes[1]} bytes, but its receiver accepts at most {sizes[2]} bytes. Request "
            "or send less per call, send a large request in parts (docs/protocol.md), or increase the client's "
            f"grpc.max_receive_message_length ({message})",
            metadata={"limit_name": "message size", "got": sizes[1], "limit": sizes[2]},
        )
    kind = _class_of(code)
    if kind is errors.InternalError:
        return errors.InternalError(f"the call failed with {code.name}: {message}")
    return kind(message)


def _cut(text: str, max_bytes: int) -> str:
    raw = text.encode("utf-8", "replace")
    return text if len(raw) <= max_bytes else raw[: max_bytes - 3].decode("utf-8", "ignore") + "..."


def _fit(metadata: Mapping[str, str]) -> dict[str, str]:
    fitting: dict[str, str] = {}
    free_bytes = MAX_METADATA_BYTES
    for key, value in metadata.items():
        cut = _cut(value, MAX_METADATA_VALUE_BYTES)
        free_bytes -= len(key.encode()) + len(cut.encode())
        if free_bytes < 0:
            break
        fitting[key] = cut
    return fitting
