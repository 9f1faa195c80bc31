"""Asks Mooncake's master over HTTP, on the port of its metrics, for the segments of its pool."""

from __future__ import annotations

import http.client
import json
import time
from collections.abc import Sequence
from typing import Final

from tq_service.errors import UnavailableError

_KEPT_SECONDS: Final = 2.0


class MooncakeAdmin:
    """Asks the leader of one or several masters; blocking, for any thread."""

    def __init__(self, addresses: Sequence[str], *, timeout_seconds: float) -> None:
        self._addresses = tuple(addresses)
        self._timeout_seconds = timeout_seconds
        self._segments: tuple[float, list[str]] = (float("-inf"), [])

    def segments(self) -> list[str]:
        """Return the memory that processes offer, each as `HOST:PORT`, as of some seconds ago.

        Raises:
            UnavailableError: no master answers.
        """
        asked, segments = self._segments
        if time.monotonic() - asked > _KEPT_SECONDS:
            found = json.loads(self._get("/get_segments_detail"))["segments"]
            segments = [each["segment_name"] for each in found if each.get("status", "OK") == "OK"]
            self._segments = (time.monotonic(), segments)
        return segments

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
