"""The plain model of leases: what must be true of what queue workers received, given the answers to their calls."""

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
"""By so much may the clock of the service's event loop be behind that of the workers."""


@dataclass(slots=True, kw_only=True, eq=False)
class Delivery:
    """Samples that a worker was handed.

    Attributes:
        asked_at: when it asked; the service answered between this and `got_at`.
        acked_at: when it said that they are done; infinite where it did not, or was refused.
        is_acked: whether that was acknowledged; where not, the worker may have died before.
        is_released: whether it asked to give them back.
        grade: what it put with its acknowledgement; None: nothing.
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
        """Whether the two were made within one lease, whenever exactly the service made them."""
        most_apart = max(self.got_at - other.asked_at, other.got_at - self.asked_at)
        return most_apart < LEASE_SECONDS - _CLOCK_SECONDS


def worker_violations(directory: Path, live: set[int] | None) -> Iterator[str]:
    """Yield what is wrong with what the queue workers got; with `live`, what they must have acknowledged."""
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
    """Yield which stored samples have another grade than they got with their acknowledgement.

    Args:
        directory: where the logs are.
        grades: that of each sample by index; None: it has none.
    """
    of_sample = _deliveries_by_sample(directory)
    for index, got in sorted(grades.items()):
        deliveries = of_sample[index]
        possible = {each.grade for each in deliveries if each.is_acked}
        if not possible:  # by a worker that was killed before it was answered, or by none
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
    """Yield what is wrong with the deliveries of one sample, in order."""
    acked = [each for each in deliveries if each.is_acked]
    yield from (
        f"sample {index} was acknowledged by {one.worker} and by {other.worker}" for one, other in pairwise(acked)
    )
    for done in acked:  # a worker that acknowledges has had it from the claim on
        later = [each.worker for each in deliveries if each.asked_at > done.got_at]
        yield from (
            f"sample {index} was leased to {worker} after {done.worker}, which acknowledged it" for worker in later
        )
    for one, other in pairwise(deliveries):
        if not one.is_released and other.certainly_within_lease_of(one):
            yield f"sample {index} was leased to {other.worker} within the lease of {one.worker}"
