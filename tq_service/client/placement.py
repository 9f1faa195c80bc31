"""Where puts go without being placed each: what the last answer of PlacePut grants."""

from __future__ import annotations

import time

from tq_service.v1.controller_service_pb2 import PlacePutResponse
from tq_service.v1.metadata_pb2 import StorageEndpoint


class PlacementGrant:
    """The storage services that may take further puts, in turn, for some bytes and some seconds.

    It ends early where one of them fails, so that a service that is gone or full is left at once. Calls may share it:
    the bytes of a few may be counted late.
    """

    def __init__(self) -> None:
        self._answer = PlacePutResponse()
        self._until = 0.0
        self._used_bytes = 0
        self._turn = 0

    def place(self, size_bytes: int) -> PlacePutResponse | None:
        """Return the answer with the grant, None where it does not go so far; `endpoint` follows."""
        used_bytes = self._used_bytes + size_bytes
        if size_bytes > self._answer.max_granted_put_bytes or used_bytes > self._answer.grant_bytes:
            return None
        if time.monotonic() >= self._until:
            return None
        self._used_bytes = used_bytes
        self._turn += 1
        return self._answer

    def renew(self, answer: PlacePutResponse) -> None:
        """Take a new grant, whose first storage service gets the put that was asked for."""
        self._answer = answer
        self._until = time.monotonic() + answer.grant_seconds
        self._used_bytes = self._turn = 0

    def endpoint(self, answer: PlacePutResponse) -> StorageEndpoint:
        """Return whose turn it is."""
        return answer.storages[self._turn % len(answer.storages)]

    def end(self) -> None:
        """Have the next put placed."""
        self._until = 0.0
