"""All errors of the service, in one class hierarchy: clients re-raise the class that the server raised.

`code` is the name of the gRPC status code of the failed call, and `reason` is sent as `google.rpc.ErrorInfo.reason`
(`tq_service.wire.error_table`). Messages state the value, the expectation and the remedy.

An error has its own class if programs may want to catch it. Errors that only people need to distinguish share a class
and have different reasons.
"""

from __future__ import annotations

import bisect
import difflib
import itertools
from collections.abc import Collection, Mapping
from typing import ClassVar, Final


class TqError(Exception):
    """Base class of all errors of tq_service.

    Attributes:
        message: the value, the expectation and the remedy.
        reason: the class's reason, unless a more specific one is given.
        metadata: short facts for programs, such as the two values that conflict.
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
    """An argument is invalid, whatever the service's state; `metadata["field"]` names the argument."""

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
    """A put does not fit the dtype, layout or row shape of a field, or rows requested as dense differ in shape."""

    reason = "FIELD_MISMATCH"


class MissingLengthError(InvalidArgumentError):
    """A sampler needs the lengths of samples, and neither their fields nor their custom_meta have any."""

    reason = "MISSING_LENGTH"


class UnsupportedObjectError(TqError, TypeError):
    """A Python object could only be serialized with pickle, which is not used."""

    reason = "UNSUPPORTED_OBJECT"
    code = "INVALID_ARGUMENT"


class NotFoundError(TqError, KeyError):
    """Something named in the call does not exist."""

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
    """The sample exists, but lacks this field."""

    reason = "CELL_NOT_FOUND"


class PolicyNotFoundError(NotFoundError):
    """No version of the policy has been published."""

    reason = "POLICY_NOT_FOUND"


class TaskNotFoundError(NotFoundError):
    """The task has not claimed samples of the partition yet, or is not one of its declared tasks."""

    reason = "TASK_NOT_FOUND"


class PutNotFoundError(NotFoundError):
    """The put was never completed, expired without a commit, or was cleared."""

    reason = "PUT_NOT_FOUND"


class AlreadyExistsError(TqError, ValueError):
    """Something that must be new exists already."""

    reason = "ALREADY_EXISTS"
    code = "ALREADY_EXISTS"


class PreconditionError(TqError, RuntimeError):
    """The call does not fit the state of the service."""

    reason = "FAILED_PRECONDITION"
    code = "FAILED_PRECONDITION"


class StaleIncarnationError(PreconditionError):
    """The partition was cleared and created again since the caller last saw it."""

    reason = "STALE_INCARNATION"


class StaleEpochError(PreconditionError):
    """The task's consumption was reset since the caller last saw it."""

    reason = "STALE_EPOCH"


class VersionError(PreconditionError):
    """A higher version of the policy is already published, or publishing this one would skip required versions."""

    reason = "VERSION_REFUSED"


class RankDisagreementError(PreconditionError):
    """Ranks, or calls with the same claim_name, requested the same batch with different arguments."""

    reason = "RANKS_DISAGREE"


class PartitionSealedError(PreconditionError):
    """The call would add samples to a sealed partition or, with an upsert, overwrite its samples."""

    reason = "PARTITION_SEALED"


class PartitionClearedError(PreconditionError):
    """The partition was cleared while the call waited."""

    reason = "PARTITION_CLEARED"


class CompactedError(PreconditionError):
    """Changes since a revision are no longer available: the revision is too old, or the service has restarted since."""

    reason = "COMPACTED"


class SamplesClearedError(PreconditionError):
    """The batch was planned, but samples of it have been cleared since."""

    reason = "SAMPLES_CLEARED"


class BatchForgottenError(PreconditionError):
    """The batch was planned without consuming its samples, and too many such batches have been planned since."""

    reason = "BATCH_FORGOTTEN"


class NothingDeliveredError(PreconditionError):
    """A loader reached the end of a non-empty partition, but its task received no samples; raised on all ranks."""

    reason = "NOTHING_DELIVERED"


class ClaimReleasedError(PreconditionError):
    """The claim with this request_id or claim_name was released."""

    reason = "CLAIM_RELEASED"


class LeaseExpiredError(PreconditionError):
    """The lease expired, so others may do the same work; the call acknowledged, released and wrote nothing."""

    reason = "LEASE_EXPIRED"


class DataDirError(PreconditionError):
    """The data directory is unusable: in use by another process, in a newer format, damaged, or not writable."""

    reason = "DATA_DIR"


class NewerVersionError(DataDirError):
    """A data directory or checkpoint was written by a newer version, in a format that this version does not support."""

    reason = "NEWER_VERSION"


class ResourceExhaustedError(TqError, RuntimeError):
    """A limit is reached. `retry_after_seconds` is the time to wait before retrying; None: retrying is pointless."""

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
    """The available capacity is too small for the bytes of the call."""

    reason = "QUOTA_EXCEEDED"


class UnauthenticatedError(TqError, PermissionError):
    """The service requires a token, and the call had none or an invalid one."""

    reason = "UNAUTHENTICATED"
    code = "UNAUTHENTICATED"


class PermissionDeniedError(TqError, PermissionError):
    """The token of the call lacks the required role or partition prefix; `metadata` has both."""

    reason = "PERMISSION_DENIED"
    code = "PERMISSION_DENIED"


class AdmissionLimitError(ResourceExhaustedError):
    """An admission of the partition does not allow more outstanding work for a task."""

    reason = "ADMISSION_LIMIT"


class LimitExceededError(ResourceExhaustedError):
    """A limit of the service is reached; `metadata["limit_name"]` is the setting."""

    reason = "LIMIT_EXCEEDED"


class DiskFullError(ResourceExhaustedError):
    """The disk of the data directory is full; the service resumes once space is available."""

    reason = "DISK_FULL"


class DataLossError(TqError, RuntimeError):
    """Committed bytes are lost: their storage service restarted empty, or they are damaged on its disk."""

    reason = "DATA_LOSS"
    code = "DATA_LOSS"


class JournalDamagedError(DataLossError):
    """A persisted record of the journal is damaged or missing."""

    reason = "JOURNAL_DAMAGED"


class SnapshotDamagedError(DataLossError):
    """The contents of a snapshot or checkpoint file do not match its checksums."""

    reason = "SNAPSHOT_DAMAGED"


class SamplerError(TqError, RuntimeError):
    """A sampler raised an exception, or returned rows that it was not given."""

    reason = "SAMPLER_FAILED"


class SamplerTimeoutError(TqError, TimeoutError):
    """A sampler did not return in time."""

    reason = "SAMPLER_TIMEOUT"
    code = "DEADLINE_EXCEEDED"


class DeadlineError(TqError, TimeoutError):
    """The deadline of the call passed."""

    reason = "DEADLINE_EXCEEDED"
    code = "DEADLINE_EXCEEDED"


class UnavailableError(TqError, ConnectionError):
    """The service was unreachable until the deadline of the call, or is draining."""

    reason = "UNAVAILABLE"
    code = "UNAVAILABLE"


class NotLeaderError(UnavailableError):
    """Another controller of the cluster leads; its address is in `metadata["leader_address"]`, "" if unknown."""

    reason = "NOT_LEADER"


class JournalUnreachableError(UnavailableError):
    """A majority of etcd is unreachable. No acknowledged data is lost, and the service resumes when etcd returns."""

    reason = "JOURNAL_UNREACHABLE"


class SupersededError(UnavailableError):
    """Another controller has become the leader, so this one must stop; it exits, and restarts as a standby."""

    reason = "SUPERSEDED"


class ServiceFailedError(UnavailableError):
    """The service has failed and cannot continue; changes that it had not persisted are lost. Restart the service."""

    reason = "SERVICE_FAILED"


class InternalError(TqError, RuntimeError):
    """An internal error of the service; the service's log has the details."""

    reason = "INTERNAL"


class CallCancelledError(TqError, RuntimeError):
    """The call was cancelled by the server or a proxy, or its client was closed during the call."""

    reason = "CANCELLED"
    code = "CANCELLED"


# Clients choose the names, and comparing takes time on the event loop: only some of many names, and only the start of
# long ones, are compared.
_MOST_SORTED: Final = 10_000
_MOST_COMPARED: Final = 128
_MOST_COMPARED_CHARACTERS: Final = 64
_MOST_NAMED: Final = 10
_MOST_NAMED_CHARACTERS: Final = 400  # longer lists could truncate the rest of the message on the wire


def nearest(name: str, known: Collection[str], *, all_known: bool = False) -> str:
    """Return a clause with known names, the nearest first, for the end of a NOT_FOUND message.

    Args:
        name: the name given.
        known: the known names; of many, up to ten are listed and the others counted.
        all_known: whether to list all of them; for small sets.
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
