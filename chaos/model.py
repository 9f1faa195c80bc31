"""A plain model that checks samples and ranks' batches against the answers that the actors received."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from chaos.content import TAGS, tag_in, version_of
from chaos.events import Event, all_events


@dataclass(slots=True)
class Samples:
    """The state of the samples according to their producers.

    Attributes:
        acknowledged: index of each key whose put was acknowledged.
        rewarded: keys whose reward was acknowledged, as part of their put or in a second one.
        uncertain: keys whose put was requested but never answered because the producer died; their samples may be
            stored.
        clearing: keys whose clear was requested.
        cleared: keys whose clear was acknowledged.
        held: keys of samples that were put as held; no task may get these samples while they are held.
        tags: the tags requested for each key, in order, as positions in `TAGS`.
        tagged: for each key, the position in `tags` of the last acknowledged write.
    """

    acknowledged: dict[str, int] = field(default_factory=dict)
    rewarded: set[str] = field(default_factory=set)
    uncertain: set[str] = field(default_factory=set)
    clearing: set[str] = field(default_factory=set)
    cleared: set[str] = field(default_factory=set)
    held: set[str] = field(default_factory=set)
    tags: dict[str, list[int]] = field(default_factory=dict)
    tagged: dict[str, int] = field(default_factory=dict)

    @classmethod
    def recorded(cls, directory: Path) -> Samples:
        """Read the logs of the producers."""
        samples = cls()
        for _, events in all_events(directory, "producer"):
            for event in events:
                samples._take(event)
        return samples

    def _take(self, event: Event) -> None:
        keys = event["keys"]
        match event["what"]:
            case "put":
                self.uncertain.update(keys)
                self.held.update(keys if event["is_held"] else ())
                self.tags.update((key, [event["tag"]]) for key in keys)
                self.tagged.update(dict.fromkeys(keys, 0))
            case "put_done":
                self.uncertain.difference_update(keys)
                self.acknowledged.update(zip(keys, event["indexes"], strict=True))
            case "reward_done":
                self.rewarded.update(keys)
            case "tag":
                for key in keys:
                    self.tags[key].append(event["tag"])
            case "tag_done":
                self.tagged.update((key, len(self.tags[key]) - 1) for key in keys)
            case "clear":
                self.clearing.update(keys)
            case "clear_done":
                self.cleared.update(keys)

    def violations(self, present: Mapping[str, int], later: Samples) -> Iterator[str]:
        """Yield violations in the stored samples. This object contains only answers received before the look-up.

        Args:
            present: index by key.
            later: the producers' state after `present` was looked up.
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

    def tag_violations(self, present: Mapping[str, Mapping[str, Any]], later: Samples) -> Iterator[str]:
        """Yield violations in the stored tags. This object contains only answers received before the look-up.

        Args:
            present: custom_meta by key.
            later: the producers' state after `present` was looked up.
        """
        for key in self.acknowledged.keys() & present.keys():
            tag, possible = tag_in(present[key]), [TAGS[number] for number in later.tags[key][self.tagged[key] :]]
            if tag not in possible:
                yield f"sample {key} has the tag {tag!r}, expected one of {possible}"

    def held_violations(self, directory: Path) -> Iterator[str]:
        """Yield the samples that were delivered while held. Call this before any held sample is made live."""
        names = {index: key for key, index in self.acknowledged.items()}
        for kind, what in (("rank", "claim"), ("named", "claim"), ("worker", "leased")):
            for name, events in all_events(directory, kind):
                for event in events:
                    if event["what"] == what:
                        keys = map(names.get, event.get("claim", event)["indexes"])
                        yield from (f"held sample {key} was handed to {name}" for key in keys if key in self.held)


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """The answer that a rank, or a named caller, got for a batch_index."""

    rank: int
    batch_index: int
    answer: dict[str, Any]


def claims_of(directory: Path, kind: str = "rank") -> list[Claim]:
    """Return all claims in the logs of ranks or named callers."""
    return [
        Claim(rank=int(name.rpartition("-")[2]), batch_index=event["batch_index"], answer=event["claim"])
        for name, events in all_events(directory, kind)
        for event in events
        if event["what"] == "claim"
    ]


def rank_violations(directory: Path, live: set[int] | None, *, kind: str = "rank", uses: int = 1) -> Iterator[str]:
    """Yield violations in the batches of the ranks or named callers.

    Args:
        directory: directory of their logs.
        live: the samples that the actors must have received in total, or None if these are not yet known.
        kind: the kind of actors.
        uses: number of deliveries of each sample.
    """
    claims = claims_of(directory, kind)
    times = Counter(index for claim in claims for index in claim.answer["indexes"])
    yield from (f"sample {index} was handed to {count} batches" for index, count in times.items() if count > uses)
    yield from wrong_reads(directory, kind)
    for claim in claims:
        for key, version in zip(claim.answer["keys"], claim.answer["versions"], strict=True):
            if version != version_of(key):
                yield f"sample {key} was handed to {kind} {claim.rank} with version {version}"
    for name, events in all_events(directory, kind):
        for event in events:
            if event["what"] == "changed":
                yield f"{name}: batch {event['batch_index']} changed from {event['before']} to {event['after']}"
    if live is None:
        return
    yield from (f"sample {index} was handed to no {kind}" for index in sorted(live - times.keys()))
    few = [(index, count) for index, count in sorted(times.items()) if index in live and count < uses]
    yield from (f"sample {index} was handed to {count} batches only" for index, count in few)
    yield from (f"sample {index} was delivered but does not exist" for index in sorted(times.keys() - live))
    ends = Counter(claim.batch_index for claim in claims if claim.answer["status"] == "end")
    if kind == "rank" and len(ends) != 1:
        yield f"the ranks saw the end at batches {dict(ends)}"


def wrong_reads(directory: Path, kind: str) -> Iterator[str]:
    """Yield each value that an actor of this kind read and that differs from the value put."""
    for name, events in all_events(directory, kind):
        yield from (f"{name} read wrong bytes: {wrong}" for event in events for wrong in event.get("wrong", ()))
