"""The table is complete, agrees with its document, and errors survive the way over the wire."""

import builtins
import pickle
from pathlib import Path

import grpc
import pytest
from google.rpc.error_details_pb2 import BadRequest, ErrorInfo, RetryInfo

from tq_service import errors
from tq_service.wire import error_table
from tq_service.wire.error_table import ERROR_CLASSES, code_of, from_rpc_error, status_from_trailers, to_status

ERRORS_PAGE = Path(__file__).parents[2] / "docs" / "errors.md"


def all_classes(root=errors.TqError):
    return {root}.union(*(all_classes(kind) for kind in root.__subclasses__() if kind.__module__ == errors.__name__))


def over_the_wire(error):
    status = to_status(error)
    trailers = [("x-other", "1"), (error_table.STATUS_TRAILER, status.SerializeToString())]
    return from_rpc_error(code_of(error), status.message, status_from_trailers(trailers))


def test_every_class_comes_back():
    assert all_classes() == ERROR_CLASSES


def test_every_class_has_a_code_of_grpc():
    assert all(kind.code in grpc.StatusCode.__members__ for kind in ERROR_CLASSES)


def test_reasons_are_unique():
    kinds = sorted(ERROR_CLASSES - {errors.TqError}, key=repr)
    assert len({kind.reason for kind in kinds}) == len(kinds)


@pytest.mark.parametrize("kind", sorted(ERROR_CLASSES - {errors.TqError}, key=repr))
def test_same_class_message_and_metadata_come_back(kind):
    back = over_the_wire(kind("got 3, expected 4", metadata={"got": "3", "expected": "4"}))
    assert type(back) is kind
    assert back.message == str(back) == "got 3, expected 4"
    assert back.metadata == {"got": "3", "expected": "4"}
    again = pickle.loads(pickle.dumps(back))
    assert (type(again), again.message, again.metadata) == (kind, back.message, back.metadata)


def test_field_travels_as_violation():
    error = errors.InvalidArgumentError("batch_size is 0, expected at least 1", field="batch_size")
    violation = BadRequest()
    assert any(detail.Unpack(violation) for detail in to_status(error).details)
    assert violation.field_violations[0].field == "batch_size"
    assert over_the_wire(error).field == "batch_size"


def test_retry_info_travels_only_where_set():
    later = errors.QuotaExceededError("full", retry_after_seconds=1.25)
    never = errors.QuotaExceededError("too large")
    assert over_the_wire(later).retry_after_seconds == 1.25
    assert over_the_wire(never).retry_after_seconds is None
    assert not any(detail.Is(RetryInfo.DESCRIPTOR) for detail in to_status(never).details)


def test_long_texts_fit_into_trailers():
    error = errors.NotFoundError("ä" * 50_000, metadata={f"key{i}": "v" * 10_000 for i in range(100)})
    status = to_status(error)
    assert len(status.SerializeToString()) * 4 / 3 + 3 * len(status.message.encode()) < 8192
    assert over_the_wire(error).message.endswith("...")


def test_a_subclass_from_elsewhere_has_the_code_of_its_base():
    class PluginError(errors.SampleNotFoundError):
        reason = "PLUGIN"

    back = over_the_wire(PluginError("gone"))
    assert code_of(PluginError("gone")) is grpc.StatusCode.NOT_FOUND
    assert (type(back), back.reason) == (errors.NotFoundError, "PLUGIN")


def test_a_reason_without_a_class_comes_back_by_its_code():
    error = errors.PreconditionError("gone", reason="NEW_REASON", metadata={"got": "3"})
    back = pickle.loads(pickle.dumps(over_the_wire(error)))
    assert (type(back), back.reason, back.metadata) == (errors.PreconditionError, "NEW_REASON", {"got": "3"})
    assert errors.PreconditionError.reason == "FAILED_PRECONDITION"


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        ("UNAVAILABLE", errors.UnavailableError),
        ("DEADLINE_EXCEEDED", errors.DeadlineError),
        ("CANCELLED", errors.UnavailableError),
        ("RESOURCE_EXHAUSTED", errors.ResourceExhaustedError),
        ("INTERNAL", errors.InternalError),
        ("UNKNOWN", errors.InternalError),
        ("UNIMPLEMENTED", errors.InternalError),
        ("NOT_FOUND", errors.NotFoundError),
        ("INVALID_ARGUMENT", errors.InvalidArgumentError),
    ],
)
def test_plain_grpc_statuses_map_by_code(code, kind):
    back = from_rpc_error(grpc.StatusCode[code], "text", None)
    assert type(back) is kind
    assert "text" in back.message
    if code == "UNIMPLEMENTED":
        assert "versions" in back.message


def test_garbled_trailers_and_foreign_domains_fall_back_to_the_code():
    assert status_from_trailers([(error_table.STATUS_TRAILER, b"\xff\xff\xff")]) is None
    assert status_from_trailers(None) is None
    foreign = to_status(errors.KeyNotFoundError("no"))
    del foreign.details[:]
    foreign.details.add().Pack(ErrorInfo(reason="KEY_NOT_FOUND", domain="googleapis.com"))
    assert type(from_rpc_error(grpc.StatusCode.NOT_FOUND, "no", foreign)) is errors.NotFoundError


def test_document_agrees_with_the_table():
    rows = [
        [cell.strip().strip("`") for cell in line.strip().strip("|").split("|")]
        for line in ERRORS_PAGE.read_text().splitlines()
        if line.count(" | ") == 5
    ]
    said = {(name, reason): (builtin, code) for reason, code, _, _, name, builtin in rows[1:]}
    kinds = {kind.__name__: kind for kind in ERROR_CLASSES}
    own = {(name, kind.reason) for name, kind in kinds.items()}
    assert own <= said.keys()
    # What has no class of its own is of the class that its code means.
    assert {reason for _, reason in said.keys() - own}.isdisjoint(kind.reason for kind in ERROR_CLASSES)
    for (name, reason), (builtin, code) in said.items():
        kind = kinds[name]
        assert builtin == next(base for base in kind.__mro__ if base.__module__ == builtins.__name__).__name__
        assert code == kind.code
        assert (name, reason) in own or from_rpc_error(grpc.StatusCode[code], "text", None).reason == kind.reason


def test_a_call_whose_channel_was_closed_here_is_cancelled():
    assert type(from_rpc_error(grpc.StatusCode.CANCELLED, "Channel closed!", None)) is errors.CallCancelledError


def test_a_bound_may_have_a_reason_of_its_own():
    error = errors.ResourceExhaustedError("full", reason="NEW_BOUND", retry_after_seconds=2.0)
    back = over_the_wire(error)
    assert (type(back), back.reason, back.retry_after_seconds) == (errors.ResourceExhaustedError, "NEW_BOUND", 2.0)
