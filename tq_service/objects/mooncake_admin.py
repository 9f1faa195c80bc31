"""What Mooncake's master says over HTTP, on the port of its metrics: segments with their capacity, and all keys."""

from __future__ import annotations

import http.client
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from tq_service.errors import UnavailableError

_KEPT_SECONDS: Final = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """Memory that a process offers.

    Attributes:
        name: what the master calls it, `HOST:PORT`.
        total_bytes: bytes that it can hold.
        used_bytes: bytes that it holds.
    """

    name: str
    total_bytes: int
    used_bytes: int

    @property
    def host(self) -> str:
        """Node that it is on."""
        return host_of(self.name)


class MooncakeAdmin:
    """Asks the master that leads, of one or several; blocking, for any thread."""

    def __init__(self, addresses: Sequence[str], *, timeout_seconds: float) -> None:
        self._addresses = tuple(addresses)
        self._timeout_seconds = timeout_seconds
        self._segments: tuple[float, list[Segment]] = (float("-inf"), [])

    def segments(self) -> list[Segment]:
        """Return the memory that processes offer, as of some seconds ago.

        Raises:
            UnavailableError: no master answers.
        """
        asked, segments = self._segments
        if time.monotonic() - asked > _KEPT_SECONDS:
            found = json.loads(self._get("/get_segments_detail"))["segments"]
            segments = [
                Segment(
                    name=each["segment_name"],
                    total_bytes=int(each["allocator_capacity_bytes"]),
                    used_bytes=int(each["allocator_used_bytes"]),
                )
                for each in found
                if each.get("status", "OK") == "OK"
            ]
            self._segments = (time.monotonic(), segments)
        return segments

    def all_names(self) -> list[str]:
        """Return the names of all objects.

        Raises:
            UnavailableError: no master answers.
        """
        return self._get("/get_all_keys").split()

    def _get(self, path: str) -> str:
        failures = []
        for address in self._addresses:
            try:
                if len(self._addresses) == 1 or self._ask(address, "/role").strip() == "leader":
                    return self._ask(address, path)
                failures.append(f"{address} does not lead")
            except (OSError, http.client.HTTPException) as error:
                failures.append(f"{address}: {error}")
        raise UnavailableError(
            f"no Mooncake master answers on its metrics_port ({'; '.join(failures)}); name it with admin=HOST:PORT"
        )

    def _ask(self, address: str, path: str) -> str:
        connection = http.client.HTTPConnection(address, timeout=self._timeout_seconds)
        try:
            connection.request("GET", path)
            answer = connection.getresponse()
            text = answer.read().decode()
        finally:
            connection.close()
        if answer.status != http.client.OK:
            raise http.client.HTTPException(f"{path} answered {answer.status}")
        return text


def host_of(endpoint: str) -> str:
    """Return the host of `HOST:PORT`, also of an IPv6 address in brackets."""
    return endpoint.rpartition(":")[0] if ":" in endpoint else endpoint
