"""Exceptions raised by the service and its clients, in one class hierarchy.

Clients raise an error of the same class as the server. `code` is the name of the gRPC status code of the failed call.
`reason` is sent as `google.rpc.ErrorInfo.reason` (see `tq_service.wire.error_table`). Messages contain the actual
value, the expected value and a remedy.

Each error that programs may want to catch has its own class. Errors that only people need to tell apart share a class
but have different reasons.
"""

from __future__ import annotations

import bisect
import difflib
import itertools
from collections.abc import Collection, Mapping
from typing import ClassVar, Final


class TqError(Exception):
    """Base class of all tq_service errors.

    Attributes:
        message: text with the actual value, the expected value and a remedy.
        reason: stable code that identifies the error. Defaults to the reason of the error's class. Some errors set a
            more specific reason.
        metadata: short facts for use by programs, such as two conflicting values.
    """

    reason: str = "INTERNAL"
    code: ClassVar[str] = "INTERNAL"

    def __init__(self, message: str, *, reason: str | None = None, metadata: Mapping[str, str] | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.reason = reason or self.reason
        self.metadata: dict[str, str] = dict(metadata or {})

    def __str__(self) -> str:
        return self.message


class InvalidArgumentError(TqError, ValueError):
    """An argument is invalid, regardless of the service's state.

    `metadata["field"]` contains the name of the argument.
    """

    reason = "INVALID_ARGUMENT"
    code = "INVALID_ARGUMENT"

    def __init__(
        self,
        message: str,
        *,
        field: str | None = None,
        reason: str | None = None,
        metadata: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message, reason=reason, metadata={**(metadata or {}), **({"field": field} if field else {})})

    @property
    def field(self) -> str | None:
        """Name of the invalid argument."""
        return self.metadata.get("field")


class FieldMismatchError(InvalidArgumentError):
    """A put does not match a field's dtype, layout or row shape, or rows requested as dense differ in shape."""

    reason = "FIELD_MISMATCH"


class MissingLengthError(InvalidArgumentError):
    """A sampler needs sample lengths, but neither the fields nor custom_meta provide them."""

    reason = "MISSING_LENGTH"


class UnsupportedObjectError(TqError, TypeError):
    """A Python object could only be serialized with pickle, which is not supported."""

    reason = "UNSUPPORTED_OBJECT"
    code = "INVALID_ARGUMENT"


class NotFoundError(TqError, KeyError):
    """The call refers to an object that does not exist."""

    reason = "NOT_FOUND"
    code = "NOT_FOUND"


class PartitionNotFoundError(NotFoundError):
    """The partition does not exist."""

    reason = "PARTITION_NOT_FOUND"


class FieldNotFoundError(NotFoundError):
    """The field does not exist in the partition."""

    reason = "FIELD_NOT_FOUND"


class KeyNotFoundError(NotFoundError):
    """The key does not exist in the partition."""

    reason = "KEY_NOT_FOUND"


class SampleNotFoundError(NotFoundError):
    """The sample was never inserted, or was cleared."""

    reason = "SAMPLE_NOT_FOUND"


class CellNotFoundError(NotFoundError):
    """The sample exists but has no value for the field."""

    reason = "CELL_NOT_FOUND"


class PolicyNotFoundError(NotFoundError):
    """No version of the policy has been published."""

    reason = "POLICY_NOT_FOUND"


class TaskNotFoundError(NotFoundError):
    """The task has not claimed samples from the partition yet, or the partition does not declare the task."""

    reason = "TASK_NOT_FOUND"


class PutNotFoundError(NotFoundError):
    """The put was never completed, expired before it was committed, or was cleared."""

    reason = "PUT_NOT_FOUND"


class AlreadyExistsError(TqError, ValueError):
    """The object that the call would create already exists."""

    reason = "ALREADY_EXISTS"
    code = "ALREADY_EXISTS"


class PreconditionError(TqError, RuntimeError):
    """The current state of the service does not allow the call."""

    reason = "FAILED_PRECONDITION"
    code = "FAILED_PRECONDITION"


class StaleIncarnationError(PreconditionError):
    """The partition has been cleared and recreated since the caller last accessed it."""

    reason = "STALE_INCARNATION"


class StaleEpochError(PreconditionError):
    """The task's consumption has been reset since the caller last accessed the task."""

    reason = "STALE_EPOCH"


class VersionError(PreconditionError):
    """A higher version of the policy has been published, or publishing this version would skip required versions."""

    reason = "VERSION_REFUSED"


class RankDisagreementError(PreconditionError):
    """Ranks, or calls with the same claim_name, requested the same batch with different arguments."""

    reason = "RANKS_DISAGREE"


class PartitionSealedError(PreconditionError):
    """The call would add samples to a sealed partition, or would overwrite some of its samples with an upsert."""

    reason = "PARTITION_SEALED"


class PartitionClearedError(PreconditionError):
    """The partition was cleared while the call was waiting."""

    reason = "PARTITION_CLEARED"


class CompactedError(PreconditionError):
    """The changes since a revision are unavailable, because the revision is too old or the service has restarted."""

    reason = "COMPACTED"


class SamplesClearedError(PreconditionError):
    """Some samples of the batch have been cleared since the batch was planned."""

    reason = "SAMPLES_CLEARED"


class BatchForgottenError(PreconditionError):
    """The batch was planned without consuming its samples, and newer batches of this kind have replaced it."""

    reason = "BATCH_FORGOTTEN"


class NothingDeliveredError(PreconditionError):
    """A loader reached the end of a non-empty partition, but its task received no samples.

    All ranks raise this error.
    """

    reason = "NOTHING_DELIVERED"


class ClaimReleasedError(PreconditionError):
    """The claim with this request_id or claim_name was released."""

    reason = "CLAIM_RELEASED"


class LeaseExpiredError(PreconditionError):
    """The lease has expired, so other workers may process the samples.

    The call did not acknowledge, release or write anything.
    """

    reason = "LEASE_EXPIRED"


class DataDirError(PreconditionError):
    """The data directory is unusable because it is in use, in a newer format, damaged, or not writable."""

    reason = "DATA_DIR"


class NewerVersionError(DataDirError):
    """A data directory or checkpoint was written by a newer version, in a format that this version cannot read."""

    reason = "NEWER_VERSION"


class ResourceExhaustedError(TqError, RuntimeError):
    """A limit has been reached.

    `retry_after_seconds` is the time to wait before a retry. If None, a retry cannot succeed.
    """

    reason = "RESOURCE_EXHAUSTED"
    code = "RESOURCE_EXHAUSTED"

    def __init__(
        self,
        message: str,
        *,
        retry_after_seconds: float | None = None,
        reason: str | None = None,
        metadata: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message, reason=reason, metadata=metadata)
        self.retry_after_seconds = retry_after_seconds


class QuotaExceededError(ResourceExhaustedError):
    """There is not enough free capacity for the call's data."""

    reason = "QUOTA_EXCEEDED"


class UnauthenticatedError(TqError, PermissionError):
    """The service requires a token, but the call's token was missing or invalid."""

    reason = "UNAUTHENTICATED"
    code = "UNAUTHENTICATED"


class PermissionDeniedError(TqError, PermissionError):
    """The call's token lacks the required role or partition prefix.

    `metadata` contains the token's name and one of the following: the required roles, the required prefix, or the
    partition's name.
    """

    reason = "PERMISSION_DENIED"
    code = "PERMISSION_DENIED"


class AdmissionLimitError(ResourceExhaustedError):
    """One of the partition's admissions allows no more outstanding work for a task."""

    reason = "ADMISSION_LIMIT"


class LimitExceededError(ResourceExhaustedError):
    """A service limit has been reached. `metadata["limit_name"]` contains the name of the setting."""

    reason = "LIMIT_EXCEEDED"


class DiskFullError(ResourceExhaustedError):
    """The disk that contains the data directory is full. The service resumes when space becomes available."""

    reason = "DISK_FULL"


class DataLossError(TqError, RuntimeError):
    """Committed bytes are lost because their storage service restarted without data or has a damaged disk."""

    reason = "DATA_LOSS"
    code = "DATA_LOSS"


class JournalDamagedError(DataLossError):
    """A persisted journal record is damaged or missing."""

    reason = "JOURNAL_DAMAGED"


class SnapshotDamagedError(DataLossError):
    """The contents of a snapshot or checkpoint file do not match the file's checksums."""

    reason = "SNAPSHOT_DAMAGED"


class SamplerError(TqError, RuntimeError):
    """A sampler raised an exception, or returned rows that were not among its candidates."""

    reason = "SAMPLER_FAILED"


class SamplerTimeoutError(TqError, TimeoutError):
    """A sampler did not return within its time limit."""

    reason = "SAMPLER_TIMEOUT"
    code = "DEADLINE_EXCEEDED"


class DeadlineError(TqError, TimeoutError):
    """The deadline of the call has passed."""

    reason = "DEADLINE_EXCEEDED"
    code = "DEADLINE_EXCEEDED"


class UnavailableError(TqError, ConnectionError):
    """The service was unreachable until the deadline of the call, or is shutting down."""

    reason = "UNAVAILABLE"
    code = "UNAVAILABLE"


class NotLeaderError(UnavailableError):
    """Another controller is the leader.

    `metadata["leader_address"]` contains the address of the leader, or "" if the address is unknown.
    """

    reason = "NOT_LEADER"


class JournalUnreachableError(UnavailableError):
    """A majority of the etcd members is unreachable.

    No acknowledged data is lost. The service resumes when etcd becomes available.
    """

    reason = "JOURNAL_UNREACHABLE"


class SupersededError(UnavailableError):
    """Another controller has become the leader. This controller exits and must restart as a standby."""

    reason = "SUPERSEDED"


class ServiceFailedError(UnavailableError):
    """The service has failed and cannot continue. Changes that were not persisted are lost. Restart the service."""

    reason = "SERVICE_FAILED"


class InternalError(TqError, RuntimeError):
    """An internal error in the service. See the service's log for details."""

    reason = "INTERNAL"


class CallCancelledError(TqError, RuntimeError):
    """The call was cancelled by the server or a proxy, or the client was closed during the call."""

    reason = "CANCELLED"
    code = "CANCELLED"


# Clients choose the names, and comparing names blocks the event loop. The number of compared names and the length of
# each compared prefix are therefore limited.
_MOST_SORTED: Final = 10_000
_MOST_COMPARED: Final = 128
_MOST_COMPARED_CHARACTERS: Final = 64
_MOST_NAMED: Final = 10
_MOST_NAMED_CHARACTERS: Final = 400  # in a longer list, the end of the message could be truncated in transit


def nearest(name: str, known: Collection[str], *, all_known: bool = False) -> str:
    """Return a clause that lists known names, most similar first, for the end of a NOT_FOUND message.

    Args:
        name: the unknown name in the request.
        known: all known names. The clause lists up to ten of these names, and states how many others there are.
        all_known: whether to list all known names. Use this option only for small sets.
    """
    if not known:
        return "none is known yet"
    name = name[:_MOST_COMPARED_CHARACTERS]
    candidates = sorted(known if all_known else itertools.islice(known, _MOST_SORTED))
    place = bisect.bisect(candidates, name)
    first = max(0, place - _MOST_COMPARED // 2)
    compared = {each[:_MOST_COMPARED_CHARACTERS]: each for each in candidates[first : first + _MOST_COMPARED]}
    most = len(candidates) if all_known else _MOST_NAMED
    similar = [compared[each] for each in difflib.get_close_matches(name, compared, n=most, cutoff=0.4)]
    first = max(0, min(place - most // 2, len(candidates) - most))
    others = [each for each in candidates[first : first + most] if each not in similar]
    named = [*similar, *others][:most]
    if not all_known:
        lengths = itertools.accumulate(map(len, named))
        named = [
            each for each, end in zip(named, lengths, strict=True) if each is named[0] or end <= _MOST_NAMED_CHARACTERS
        ]
    return (
        "known: "
        + ", ".join(repr(each) for each in named)
        + (f" and {len(known) - len(named)} more" if len(known) > len(named) else "")
    )
