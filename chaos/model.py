"""The plain model: what must be true of a partition, given what the actors were told."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from chaos.events import Event, all_events


@dataclass(slots=True)
class Samples:
    """What the producers know of their samples.

    Attributes:
        acknowledged: index of each key whose put was acknowledged.
        rewarded: keys whose second put was acknowledged.
        uncertain: keys whose put was asked for and never answered, since the producer died: they may be there.
        clearing: keys whose clear was asked for.
        cleared: keys whose clear was acknowledged.
        held: keys that were put as held: no task gets them as long as they are.
    """

    acknowledged: dict[str, int] = field(default_factory=dict)
    rewarded: set[str] = field(default_factory=set)
    uncertain: set[str] = field(default_factory=set)
    clearing: set[str] = field(default_factory=set)
    cleared: set[str] = field(default_factory=set)
    held: set[str] = field(default_factory=set)

    @classmethod
    def told(cls, folder: Path) -> Samples:
        """Return what the logs of the producers say."""
        samples = cls()
        for _, events in all_events(folder, "producer"):
            for event in events:
                samples._take(event)
        return samples

    def _take(self, event: Event) -> None:
        keys = event["keys"]
        match event["what"]:
            case "put":
                self.uncertain.update(keys)
                self.held.update(keys if event["is_held"] else ())
            case "put_done":
                self.uncertain.difference_update(keys)
                self.acknowledged.update(zip(keys, event["indexes"], strict=True))
            case "reward_done":
                self.rewarded.update(keys)
            case "clear":
                self.clearing.update(keys)
            case "clear_done":
                self.cleared.update(keys)

    def violations(self, present: Mapping[str, int], later: Samples) -> Iterator[str]:
        """Yield what is wrong with the samples that the service has, in which these have been told before.

        Args:
            present: index by key.
            later: what the producers know after `present` was looked up.
        """
        for key, index in self.acknowledged.items():
            if key in self.cleared:
                if key in present:
                    yield f"cleared sample {key} is back"
            elif key not in present:
                if key not in later.clearing:
                    yield f"acknowledged sample {key} is lost"
            elif present[key] != index:
                yield f"sample {key} had index {index} and has {present[key]}"
        unknown = present.keys() - later.acknowledged.keys() - later.uncertain
        yield from (f"sample {key} was never put" for key in sorted(unknown))
        twice = [index for index, count in Counter(present.values()).items() if count > 1]
        yield from (f"index {index} has two keys" for index in twice)


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """The answer that a rank was given to a batch_index."""

    rank: int
    batch_index: int
    answer: dict[str, Any]


def claims_of(folder: Path) -> list[Claim]:
    """Return all claims that ranks have logged."""
    return [
        Claim(rank=int(name.rpartition("-")[2]), batch_index=event["batch_index"], answer=event["claim"])
        for name, events in all_events(folder, "rank")
        for event in events
        if event["what"] == "claim"
    ]


def rank_violations(folder: Path, live: set[int] | None) -> Iterator[str]:
    """Yield what is wrong with what the ranks got; with `live`, the samples that all of them together must have got."""
    claims = claims_of(folder)
    times = Counter(index for claim in claims for index in claim.answer["indexes"])
    yield from (f"sample {index} was handed to {count} batches" for index, count in times.items() if count > 1)
    yield from _said_by(folder, "rank")
    for name, events in all_events(folder, "rank"):
        for event in events:
            if event["what"] == "changed":
                yield f"{name}: batch {event['batch_index']} changed from {event['before']} to {event['after']}"
    if live is None:
        return
    yield from (f"sample {index} was handed to no rank" for index in sorted(live - times.keys()))
    yield from (f"sample {index} was handed out but is not there" for index in sorted(times.keys() - live))
    ends = Counter(claim.batch_index for claim in claims if claim.answer["status"] == "end")
    if len(ends) != 1:
        yield f"the ranks saw the end at batches {dict(ends)}"


def worker_violations(folder: Path, live: set[int] | None) -> Iterator[str]:
    """Yield what is wrong with what the queue workers got; with `live`, what they must have acknowledged."""
    done: dict[int, tuple[str, float]] = {}
    asked: set[int] = set()
    yield from _said_by(folder, "worker")
    for name, events in all_events(folder, "worker"):
        for event in events:
            if event["what"] == "ack":
                asked.update(event["indexes"])
            if event["what"] == "ack_done":
                for index in event["indexes"]:
                    if index in done:
                        yield f"sample {index} was acknowledged by {done[index][0]} and by {name}"
                    done[index] = (name, event["at"])
    for name, events in all_events(folder, "worker"):
        asked_at = 0.0
        for event in events:
            if event["what"] == "ask":
                asked_at = event["at"]
            elif event["what"] == "leased":
                again = [index for index in event["indexes"] if index in done and done[index][1] < asked_at]
                yield from (f"sample {index} was leased to {name} after it was acknowledged" for index in again)
    if live is not None:
        yield from (f"sample {index} was acknowledged by no worker" for index in sorted(live - asked))


def _said_by(folder: Path, kind: str) -> Iterator[str]:
    for name, events in all_events(folder, kind):
        yield from (f"{name} read wrong bytes: {wrong}" for event in events for wrong in event.get("wrong", ()))
