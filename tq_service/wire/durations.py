"""Spans of time: seconds here, `google.protobuf.Duration` in messages."""

from __future__ import annotations

from typing import Final

from google.protobuf.duration_pb2 import Duration

from tq_service.errors import InvalidArgumentError

MOST_SECONDS: Final = 315_576_000_000
"""The longest span that a Duration may have, some 10,000 years."""
_NANOS: Final = 10**9


def to_duration(seconds: float) -> Duration:
    """Return a span, rounded to nanoseconds; what is longer than a Duration may be becomes the longest there is.

    Raises:
        ValueError: it is no number.
    """
    seconds = max(min(seconds, MOST_SECONDS), -MOST_SECONDS)  # in this order, NaN stays what it is
    whole = int(seconds)  # towards 0, so that both parts have one sign
    nanos = round((seconds - whole) * _NANOS)
    if abs(nanos) == _NANOS:
        whole, nanos = whole + (1 if nanos > 0 else -1), 0
    return Duration(seconds=whole, nanos=nanos)


def read_seconds(field: str, span: Duration) -> float:
    """Return the seconds of the span in a field; one that is not set has 0.

    Raises:
        InvalidArgumentError: it is longer than a Duration may be, or its parts do not fit together.
    """
    seconds, nanos = span.seconds, span.nanos
    if abs(seconds) > MOST_SECONDS or abs(nanos) >= _NANOS or seconds * nanos < 0:
        raise InvalidArgumentError(
            f"{field} has {seconds} seconds and {nanos} nanos; give at most {MOST_SECONDS} seconds, less than {_NANOS} "
            f"nanos, and both of one sign",
            field=field,
        )
    return seconds + nanos / _NANOS
