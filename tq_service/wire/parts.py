"""A request that is larger than one message goes in several messages of its call: how it is cut.

Messages are small, so that few bytes are on their way to a service at a time. The first request of a call that takes
`PART_BYTES` or more is cut, serialized, into parts of just that size and a last one that is shorter, which may be
empty. A service joins them: what the request asks for is done whole or not at all.
"""

from __future__ import annotations

from typing import Final

from tq_service.errors import InvalidArgumentError

PART_BYTES: Final = 2 << 20
"""Size of each part but the last; a first message of this size says that more follow."""

MAX_REQUEST_BYTES: Final = 64 << 20
"""Of a request with all its parts."""


def in_parts(request: bytes, name: str) -> list[bytes]:
    """Return the messages in which a serialized request goes.

    Args:
        request: the request.
        name: of the call, for the error.

    Raises:
        InvalidArgumentError: it is larger than a service takes.
    """
    size = len(request)
    if size > MAX_REQUEST_BYTES:
        raise InvalidArgumentError(
            f"the request of {name} is {size} bytes, the values of fields apart; expected at most {MAX_REQUEST_BYTES}. "
            "Write or name fewer samples at once, or give them shorter keys, groups and custom_meta",
            metadata={"got": str(size), "limit": str(MAX_REQUEST_BYTES)},
        )
    if size < PART_BYTES:
        return [request]
    return [request[start : start + PART_BYTES] for start in range(0, size + 1, PART_BYTES)]
