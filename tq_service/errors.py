"""Every error of the service: one hierarchy, raised on the server and raised again, the same class, in the client.

`code` is the name of the gRPC status code that a call ends with, and `reason` travels as `google.rpc.ErrorInfo.reason`
(`tq_service.wire.error_table`). Messages say what was got, what was expected and what to do.

A class exists if programs may want to catch it. Errors that differ only for people share a class and have reasons.
"""

from __future__ import annotations

import bisect
import difflib
import itertools
from collections.abc import Collection, Mapping
from typing import ClassVar, Final


class TqError(Exception):
    """Base of all errors of tq_service.

    Attributes:
        message: what was got, what was expected, what to do.
        reason: that of the class, unless a narrower one is given.
        metadata: short facts for programs, such as both values of a disagreement.
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
    """An argument is wrong whatever the state of the service; `metadata["field"]` names it."""

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
        """Name of the argument that is wrong."""
        return self.metadata.get("field")


class FieldMismatchError(InvalidArgumentError):
    """A field was put with another dtype, layout or row shape than it takes, or got as dense while its rows differ."""

    reason = "FIELD_MISMATCH"


class MissingLengthError(InvalidArgumentError):
    """The `length_field` of a balancing sampler has scalars or objects, and no sample has a length."""

    reason = "MISSING_LENGTH"


class UnsupportedObjectError(TqError, TypeError):
    """A Python object that only pickle could carry."""

    reason = "UNSUPPORTED_OBJECT"
    code = "INVALID_ARGUMENT"


class NotFoundError(TqError, KeyError):
    """Something named does not exist."""

    reason = "NOT_FOUND"
    code = "NOT_FOUND"


class PartitionNotFoundError(NotFoundError):
    """No partition has this name."""

    reason = "PARTITION_NOT_FOUND"


class FieldNotFoundError(NotFoundError):
    """The partition has no such field."""

    reason = "FIELD_NOT_FOUND"


class KeyNotFoundError(NotFoundError):
    """No sample of the partition has this key."""

    reason = "KEY_NOT_FOUND"


class SampleNotFoundError(NotFoundError):
    """The sample was never inserted, or was cleared."""

    reason = "SAMPLE_NOT_FOUND"


class CellNotFoundError(NotFoundError):
    """The sample is there, but not this field of it."""

    reason = "CELL_NOT_FOUND"


class PolicyNotFoundError(NotFoundError):
    """Nobody has published a version of the policy."""

    reason = "POLICY_NOT_FOUND"


class TaskNotFoundError(NotFoundError):
    """The task has not asked for anything of the partition yet, or is not one of those it was created with."""

    reason = "TASK_NOT_FOUND"


class PutNotFoundError(NotFoundError):
    """The put was never completed, expired without a commit, or was cleared."""

    reason = "PUT_NOT_FOUND"


class AlreadyExistsError(TqError, ValueError):
    """What should be new is there already."""

    reason = "ALREADY_EXISTS"
    code = "ALREADY_EXISTS"


class PreconditionError(TqError, RuntimeError):
    """The call does not fit the state of the service."""

    reason = "FAILED_PRECONDITION"
    code = "FAILED_PRECONDITION"


class StaleIncarnationError(PreconditionError):
    """The partition was cleared and created again since the caller saw it."""

    reason = "STALE_INCARNATION"


class StaleEpochError(PreconditionError):
    """The task's consumption was reset since the caller saw it."""

    reason = "STALE_EPOCH"


class VersionError(PreconditionError):
    """A policy has a higher version than the one that was to be published, or would skip versions that it must not."""

    reason = "VERSION_REFUSED"


class RankDisagreementError(PreconditionError):
    """Ranks, or calls under one claim_name, asked for one batch with different arguments."""

    reason = "RANKS_DISAGREE"


class PartitionSealedError(PreconditionError):
    """New samples for a sealed partition, or an upsert that would overwrite samples of it."""

    reason = "PARTITION_SEALED"


class PartitionClearedError(PreconditionError):
    """The partition was cleared while the call waited."""

    reason = "PARTITION_CLEARED"


class CompactedError(PreconditionError):
    """What has changed since a revision is not known any more: it is too old, or of before a restart of the service."""

    reason = "COMPACTED"


class SamplesClearedError(PreconditionError):
    """The batch was planned, but samples of it have been cleared since."""

    reason = "SAMPLES_CLEARED"


class BatchForgottenError(PreconditionError):
    """The batch was planned without consuming its samples, and too many such batches were planned since."""

    reason = "BATCH_FORGOTTEN"


class NothingDeliveredError(PreconditionError):
    """A loader came to the end of a partition with samples, of which its task was given none; raised on all ranks."""

    reason = "NOTHING_DELIVERED"


class ClaimReleasedError(PreconditionError):
    """The claim was released under this request_id, or the claim_name."""

    reason = "CLAIM_RELEASED"


class LeaseExpiredError(PreconditionError):
    """The lease ran out, so that others may do the same work; nothing is acknowledged, released or written."""

    reason = "LEASE_EXPIRED"


class DataDirError(PreconditionError):
    """The data directory cannot be used: another process has it, it is of a later format, damaged, or not writable."""

    reason = "DATA_DIR"


class NewerVersionError(DataDirError):
    """What a data directory or a checkpoint holds was written by a newer version, which knows more than this one."""

    reason = "NEWER_VERSION"


class ResourceExhaustedError(TqError, RuntimeError):
    """A bound is reached; `retry_after_seconds` says when to try again, None that it is of no use."""

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
    """No capacity for these bytes."""

    reason = "QUOTA_EXCEEDED"


class UnauthenticatedError(TqError, PermissionError):
    """The service asks for a token, and the call had none that is valid."""

    reason = "UNAUTHENTICATED"
    code = "UNAUTHENTICATED"


class PermissionDeniedError(TqError, PermissionError):
    """The token of the call has not the role or the partition prefix for it; `metadata` names what is needed."""

    reason = "PERMISSION_DENIED"
    code = "PERMISSION_DENIED"


class AdmissionLimitError(ResourceExhaustedError):
    """More work would be outstanding for a task than an admission of the partition allows."""

    reason = "ADMISSION_LIMIT"


class LimitExceededError(ResourceExhaustedError):
    """A limit of the service is reached; `metadata["limit_name"]` is the setting."""

    reason = "LIMIT_EXCEEDED"


class DiskFullError(ResourceExhaustedError):
    """The disk of the data directory takes no more; the service goes on by itself once space is free."""

    reason = "DISK_FULL"


class DataLossError(TqError, RuntimeError):
    """Committed bytes are gone: their storage service came back empty, or they are damaged on its disk."""

    reason = "DATA_LOSS"
    code = "DATA_LOSS"


class JournalDamagedError(DataLossError):
    """A record of the journal that had been written is damaged or missing."""

    reason = "JOURNAL_DAMAGED"


class SnapshotDamagedError(DataLossError):
    """A file of a snapshot or a checkpoint does not hold what was written to it."""

    reason = "SNAPSHOT_DAMAGED"


class SamplerError(TqError, RuntimeError):
    """A sampler raised, or returned rows it was not given."""

    reason = "SAMPLER_FAILED"


class SamplerTimeoutError(TqError, TimeoutError):
    """A sampler did not return in time."""

    reason = "SAMPLER_TIMEOUT"
    code = "DEADLINE_EXCEEDED"


class DeadlineError(TqError, TimeoutError):
    """The call's deadline passed."""

    reason = "DEADLINE_EXCEEDED"
    code = "DEADLINE_EXCEEDED"


class UnavailableError(TqError, ConnectionError):
    """The service could not be reached until the call's deadline, or is draining."""

    reason = "UNAVAILABLE"
    code = "UNAVAILABLE"


class NotLeaderError(UnavailableError):
    """Another controller of the cluster leads; `metadata["leader_address"]` says where, "" where none is known."""

    reason = "NOT_LEADER"


class JournalUnreachableError(UnavailableError):
    """No majority of etcd answers for now; nothing that was acknowledged is lost, and the service goes on by itself."""

    reason = "JOURNAL_UNREACHABLE"


class SupersededError(UnavailableError):
    """Another controller leads by now, so that this one may not go on; it ends, and starts again as a standby."""

    reason = "SUPERSEDED"


class ServiceFailedError(UnavailableError):
    """The service has met a fault from which it cannot go on; what it had not written down is lost. Start it again."""

    reason = "SERVICE_FAILED"


class InternalError(TqError, RuntimeError):
    """A fault of the service itself; its log has the details."""

    reason = "INTERNAL"


class CallCancelledError(TqError, RuntimeError):
    """The call was cancelled by the server's side or a proxy, or its client was closed meanwhile."""

    reason = "CANCELLED"
    code = "CANCELLED"


# Names are chosen by clients, and comparing them is work for the event loop: of many names, or long ones, only some.
_MOST_SORTED: Final = 10_000
_MOST_COMPARED: Final = 128
_MOST_COMPARED_CHARACTERS: Final = 64
_MOST_NAMED: Final = 10
_MOST_NAMED_CHARACTERS: Final = 400  # what a message says after them is not to be cut off on the wire


def nearest(name: str, known: Collection[str], *, all_known: bool = False) -> str:
    """Return a clause that names what is known, the nearest first, for the end of a NOT_FOUND message.

    Args:
        name: what was given.
        known: what there is; of many names up to ten are shown, and the others counted.
        all_known: whether all are shown, where they are few.
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
