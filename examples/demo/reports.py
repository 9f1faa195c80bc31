"""Reports from the workers to the display, also sent through the service, as objects in a separate partition.

A report is the summary of a step, or an event: `{"event": text}`.
"""

from __future__ import annotations

from typing import Any

import tq_service as tq
from examples.demo.settings import REPORTS_PARTITION

FIELD = "report"
TASK = "display"
EVENT = "event"
JOINED_STEP = "joined_step"  # in an event: the first step of a trainer rank that joined
Report = dict[str, Any]


class Reporter:
    """A worker's side."""

    def __init__(self, client: tq.Client) -> None:
        self._client = client

    def send(self, report: Report) -> None:
        """Send a report as one row."""
        self._client.put(REPORTS_PARTITION, {FIELD: [report]})

    def send_event(self, text: str) -> None:
        """Send a text about an event."""
        self.send({EVENT: text})


class ReportReader:
    """The display's side."""

    def __init__(self, client: tq.Client) -> None:
        self._client = client

    def read(self, max_wait: float) -> list[Report]:
        """Wait up to `max_wait` seconds for reports, clear them and return them."""
        meta = self._client.claim(
            partition_id=REPORTS_PARTITION,
            task_name=TASK,
            data_fields=[FIELD],
            batch_size=256,
            min_batch_size=1,
            max_wait=max_wait,
        )
        if meta.status != "batch":
            return []
        reports = list(self._client.get_data(meta)[FIELD])
        self._client.clear_samples(meta)
        return reports
