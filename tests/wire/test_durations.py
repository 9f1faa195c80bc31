"""Spans of time in messages: both ways, to the nanosecond, and what is no span is refused by the name of its field."""

from __future__ import annotations

import math

import pytest
from google.protobuf.duration_pb2 import Duration
from hypothesis import given
from hypothesis import strategies as st

from tq_service.errors import InvalidArgumentError
from tq_service.wire.messages import MOST_SECONDS, read_seconds, to_duration


@pytest.mark.parametrize(
    ("seconds", "parts"),
    [
        (0.0, (0, 0)),
        (1.5, (1, 500_000_000)),
        (-1.5, (-1, -500_000_000)),
        (-0.25, (0, -250_000_000)),
        (1e-9, (0, 1)),
        (0.9999999999, (1, 0)),
        (-0.9999999999, (-1, 0)),
        (float(MOST_SECONDS), (MOST_SECONDS, 0)),
        (-float(MOST_SECONDS), (-MOST_SECONDS, 0)),
    ],
)
def test_both_ways(seconds: float, parts: tuple[int, int]) -> None:
    span = to_duration(seconds)
    assert (span.seconds, span.nanos) == parts
    assert read_seconds("span", span) == pytest.approx(seconds, abs=1e-9)


@given(st.floats(-MOST_SECONDS, MOST_SECONDS))
def test_what_is_sent_is_valid_and_comes_back(seconds: float) -> None:
    span = to_duration(seconds)
    span.ToJsonString()  # protobuf's own check
    assert read_seconds("span", span) == pytest.approx(seconds, abs=1e-9)


def test_an_unset_span_is_zero() -> None:
    assert read_seconds("span", Duration()) == 0


@pytest.mark.parametrize("seconds", [math.inf, MOST_SECONDS + 1.0, 1e300])
def test_what_is_longer_becomes_the_longest(seconds: float) -> None:
    assert to_duration(seconds) == Duration(seconds=MOST_SECONDS)
    assert to_duration(-seconds) == Duration(seconds=-MOST_SECONDS)


def test_what_is_no_number_is_not_sent() -> None:
    with pytest.raises(ValueError, match="NaN"):
        to_duration(math.nan)


@pytest.mark.parametrize(
    ("seconds", "nanos"),
    [
        (MOST_SECONDS + 1, 0),
        (-MOST_SECONDS - 1, 0),
        (2**63 - 1, 0),
        (0, 10**9),
        (0, -(10**9)),
        (0, 2**31 - 1),
        (1, -1),
        (-1, 1),
    ],
)
def test_what_is_no_duration_is_refused(seconds: int, nanos: int) -> None:
    message = f"lease has {seconds} seconds and {nanos} nanos; expected at most"
    with pytest.raises(InvalidArgumentError, match=message) as caught:
        read_seconds("lease", Duration(seconds=seconds, nanos=nanos))
    assert caught.value.field == "lease"
