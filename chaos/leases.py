"""The plain model of leases: checks the samples that queue workers received against the answers to their calls."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Final

from chaos.actors import LEASE_SECONDS
from chaos.events import Event, all_events
from chaos.model import wrong_reads

_CLOCK_SECONDS: Final = 0.05
"""The clock of the service's event loop may be this many seconds behind the workers' clock."""


@dataclass(slots=True, kw_only=True, eq=False)
class Delivery:
    """Samples delivered to a worker.

    Attributes:
        asked_at: time of the worker's request; the service answered between this time and `got_at`.
        acked_at: time at which the worker sent its acknowledgement, or infinity if it sent none or the acknowledgement
            was refused.
        is_acked: whether the acknowledgement was answered; if not, the worker may have died first.
        is_released: whether the worker asked to release the samples.
        grade: grade put with the acknowledgement, or None if there is no grade.
    """

    worker: str
    indexes: Sequence[int]
    asked_at: float
    got_at: float
    acked_at: float = math.inf
    is_acked: bool = False
    is_released: bool = False
    grade: int | None = None

    def certainly_within_lease_of(self, other: Delivery) -> bool:
        """Whether both deliveries were made within one lease, regardless of the exact times at the service."""
        most_apart = max(self.got_at - other.asked_at, other.got_at - self.asked_at)
        return most_apart < LEASE_SECONDS - _CLOCK_SECONDS


def worker_violations(directory: Path, live: set[int] | None) -> Iterator[str]:
    """Yield violations in the deliveries to queue workers; with `live`, also missing acknowledgements."""
    yield from wrong_reads(directory, "worker")
    of_sample = _deliveries_by_sample(directory)
    for index, deliveries in sorted(of_sample.items()):
        deliveries.sort(key=lambda delivery: delivery.got_at)
        yield from _sample_violations(index, deliveries)
    if live is None:
        return
    done_at = {index: min(each.acked_at for each in of_sample[index]) for index in sorted(live & of_sample.keys())}
    lost = [index for index in sorted(live) if done_at.get(index, math.inf) == math.inf]
    yield from (f"sample {index} was acknowledged by no worker" for index in lost)
    for name, events in all_events(directory, "worker"):
        for ended_at in (event["at"] for event in events if event["what"] == "end"):
            early = [index for index, at in done_at.items() if ended_at < at < math.inf]
            yield from (f"{name} got the end before sample {index} was acknowledged" for index in early)


def grade_violations(directory: Path, grades: Mapping[int, int | None]) -> Iterator[str]:
    """Yield stored samples whose grade differs from the one put with their acknowledgement.

    Args:
        directory: directory of the logs.
        grades: grade of each sample by index; None if it is ungraded.
    """
    of_sample = _deliveries_by_sample(directory)
    for index, got in sorted(grades.items()):
        deliveries = of_sample[index]
        possible = {each.grade for each in deliveries if each.is_acked}
        if not possible:  # acknowledged by a killed worker, or not at all
            possible = {None, *(each.grade for each in deliveries if each.acked_at < math.inf)}
        if got not in possible:
            yield f"sample {index} has the grade {got}, expected one of {possible}"


def _deliveries_by_sample(directory: Path) -> dict[int, list[Delivery]]:
    of_sample: dict[int, list[Delivery]] = defaultdict(list)
    for name, events in all_events(directory, "worker"):
        for delivery in _deliveries(name, events):
            for index in delivery.indexes:
                of_sample[index].append(delivery)
    return of_sample


def _deliveries(worker: str, events: Sequence[Event]) -> Iterator[Delivery]:
    asked_at = 0.0
    current: Delivery | None = None
    for event in events:
        match event["what"], current:
            case "ask", _:
                asked_at = event["at"]
            case "leased", _:
                current = Delivery(worker=worker, indexes=event["indexes"], asked_at=asked_at, got_at=event["at"])
                yield current
            case "release", Delivery():
                current.is_released = True
            case "ack", Delivery():
                current.acked_at, current.grade = event["at"], event["grade"]
            case "ack_done", Delivery():
                current.is_acked = True
            case "ack_late", Delivery():
                current.acked_at = math.inf


def _sample_violations(index: int, deliveries: Sequence[Delivery]) -> Iterator[str]:
    """Yield violations in the deliveries of one sample, given in order."""
    acked = [each for each in deliveries if each.is_acked]
    yield from (
        f"sample {index} was acknowledged by {one.worker} and by {other.worker}" for one, other in pairwise(acked)
    )
    for done in acked:  # the acknowledging worker holds it from its claim on
        later = [each.worker for each in deliveries if each.asked_at > done.got_at]
        yield from (
            f"sample {index} was leased to {worker} after {done.worker}, which acknowledged it" for worker in later
        )
    for one, other in pairwise(deliveries):
        if not one.is_released and other.certainly_within_lease_of(one):
            yield f"sample {index} was leased to {other.worker} within the lease of {one.worker}"
