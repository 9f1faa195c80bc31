"""Results from the record of a training run: the trained samples, the fate of each prompt, and the effects of a kill.

A batch counts as trained if it is in the weights. Updates after the last saved weights of a killed run are lost with
it and made again from the checkpoint.
"""

from __future__ import annotations

import hashlib
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgpack

from compat.differences import Entry
from compat.recorder import entries

CALLS = {
    "put": frozenset({"kv_batch_put", "async_kv_batch_put", "client.async_put"}),
    "get": frozenset({"kv_batch_get", "client.async_get_data"}),
    "poll": frozenset({"kv_list"}),
}
"""The recorder's names of the calls that put, get and poll."""

_GOOD = "good"
_PADDING = "pad"
_STEP_METRIC = "training/global_step"

Sample = tuple[int, int, bytes]


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """The batches that are in the weights.

    Attributes:
        batches: a digest of each batch with all its fields and rows, by worker, in order.
        byte_count: bytes of the rows of all batches.
        samples: how often each sample was trained. A sample is the prompt's number in its data set, session, and
            tokens.
        lost_batch_count: batches whose weights were lost.
    """

    batches: Mapping[str, Sequence[str]]
    byte_count: int
    samples: Counter[Sample]
    lost_batch_count: int

    @property
    def batch_count(self) -> int:
        """The number of batches."""
        return sum(len(digests) for digests in self.batches.values())

    @property
    def trained_twice(self) -> list[Sample]:
        """Samples that were trained more than once."""
        return [sample for sample, count in self.samples.items() if count > 1]


def training(directory: Path) -> Training:
    """Return the training of a record with one or more runs, each from the checkpoint of the previous one."""
    batches: defaultdict[str, list[str]] = defaultdict(list)
    samples: Counter[Sample] = Counter()
    byte_count = lost_count = 0
    for role, calls in _processes(directory):
        if not role.startswith("rank-"):
            continue
        saved = max((n for n, entry in enumerate(calls) if entry["call"] == "weights saved"), default=0)
        for number, entry in enumerate(calls):
            if entry["call"] != "train":
                continue
            if number > saved:
                lost_count += 1
                continue
            batches[role].append(_digest(entry["answer"]))
            samples.update(_samples(entry["answer"]["fields"]))
            byte_count += _byte_count(entry["answer"])
    return Training(batches=dict(batches), byte_count=byte_count, samples=samples, lost_batch_count=lost_count)


def equal_batch_count(left: Training, right: Training) -> int:
    """Return how many batches are the same in both, bit for bit and at the same position."""
    return sum(
        one == other
        for role in left.batches.keys() & right.batches.keys()
        for one, other in zip(left.batches[role], right.batches[role], strict=False)
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompts:
    """The fate of the prompts that a trainer took from its data set, by their numbers there.

    Attributes:
        taken: all of them, including those taken by a killed run after its last checkpoint.
        trained: those that are in the weights.
        waiting: those in the queue at the end.
        dropped: those that verl should drop: one of their sessions fails, they are too late, or they have a single
            reward.
    """

    taken: frozenset[int]
    trained: frozenset[int]
    waiting: frozenset[int]
    dropped: frozenset[int]

    @property
    def lost(self) -> frozenset[int]:
        """Prompts that are neither trained, waiting nor dropped."""
        return self.taken - self.trained - self.waiting - self.dropped


def prompts(directory: Path, trained: Training) -> Prompts:
    """Return the fate of the prompts of a record."""
    numbers: dict[str, int] = {}
    bad: set[int] = set()
    listed: Mapping[str, Any] = {}
    for role, calls in _processes(directory):
        if role != "trainer":
            continue
        for entry in calls:
            if entry["call"] == "kv_list" and "answer" in entry:
                listed = _partition(entry["answer"], "train")
            for name, number, fate in _submitted(entry):
                numbers[name] = number
                bad |= {number} if fate != _GOOD else set()
    found = frozenset(number for number, _, _ in trained.samples)
    waiting = frozenset(number for name, number in numbers.items() if name in listed)
    return Prompts(
        taken=frozenset(numbers.values()), trained=found, waiting=waiting, dropped=frozenset(bad - found - waiting)
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Outage:
    """The effect of an outage on the calls of a record.

    Attributes:
        met_count: calls that were made during it, or were unanswered when it began.
        answered_seconds: from its beginning to the first answer after it.
        step_seconds: from its beginning to the end of the next training step.
    """

    met_count: int
    answered_seconds: float
    step_seconds: float


def outage(directory: Path, *, since: float, until: float) -> Outage:
    """Return the effect of an outage on the calls of a record; both times are seconds since the epoch."""
    calls = [entry for _, process in _processes(directory) for entry in process]
    made = [entry for entry in calls if entry["seconds"]]
    met = [entry for entry in made if entry["at"] - entry["seconds"] <= until and since < entry["at"]]
    steps = [entry for entry in calls if entry["call"] == "metrics" and _STEP_METRIC in entry["answer"]["items"]]
    return Outage(
        met_count=len(met),
        answered_seconds=_first_end(made, until) - since,
        step_seconds=_first_end(steps, until) - since,
    )


def failed_calls(directory: Path) -> list[str]:
    """Return the failed calls of a record, each as name and error."""
    calls = [entry for _, process in _processes(directory) for entry in process]
    return [f"{entry['call']}: {entry['error']}" for entry in calls if "error" in entry]


def end_of(call: str, directory: Path, *, after: float) -> float:
    """Return when a call with that name was first answered after a time, in seconds since the epoch."""
    calls = [entry for _, process in _processes(directory) for entry in process if entry["call"] == call]
    return _first_end(calls, after)


def median_seconds(directory: Path) -> dict[str, tuple[int, float]]:
    """Return the number and the median seconds of the calls that put, get and poll."""
    calls = [entry for _, process in _processes(directory) for entry in process if "answer" in entry]
    seconds = {kind: [entry["seconds"] for entry in calls if entry["call"] in names] for kind, names in CALLS.items()}
    return {kind: (len(values), statistics.median(values)) for kind, values in seconds.items()}


def _processes(directory: Path) -> list[tuple[str, list[Entry]]]:
    """Return the role and the calls of each process, in the order of their first calls."""
    found = [(path.name.split(".")[0], list(entries(path))) for path in directory.glob("*.msgpack")]
    return sorted(((role, calls) for role, calls in found if calls), key=lambda process: float(process[1][0]["at"]))


def _digest(value: Any) -> str:
    return hashlib.sha256(bytes(msgpack.packb(_in_order(value)))).hexdigest()


def _in_order(value: Any) -> Any:
    """Return plain data with the keys of its dicts sorted."""
    if isinstance(value, dict):
        return {name: _in_order(value[name]) for name in sorted(value)}
    return [_in_order(item) for item in value] if isinstance(value, list) else value


def _byte_count(value: Any) -> int:
    if isinstance(value, dict):
        return sum(_byte_count(item) for item in value.values())
    if isinstance(value, list):
        return sum(_byte_count(item) for item in value)
    return len(value) if isinstance(value, bytes) else 0


def _samples(fields: Mapping[str, Any]) -> Iterator[Sample]:
    columns = [fields[name]["rows"] for name in ("uid", "index", "session_id", "input_ids")]
    for name, number, session, tokens in zip(*columns, strict=True):
        if not name.startswith(_PADDING):
            yield number, session, tokens["data"]


def _submitted(entry: Entry) -> Iterator[tuple[str, int, str]]:
    """Yield the prompts that a trainer submits to its agents with a call: name, number in the data set, and fate."""
    given = entry["given"].get("items", {})
    if entry["call"] != "kv_batch_put" or given["partition_id"] != "train" or not given.get("fields"):
        return
    fields = given["fields"]["fields"]
    if "extra_info" in fields and "input_ids" not in fields:
        for name, info in zip(given["keys"], fields["extra_info"]["rows"], strict=True):
            yield name, info["items"]["index"], info["items"]["fate"]


def _partition(listed: Any, name: str) -> Mapping[str, Any]:
    partition = (listed or {}).get("items", {}).get(name, {})
    found: Mapping[str, Any] = partition.get("items", {})
    return found


def _first_end(calls: Iterable[Entry], after: float) -> float:
    return min((float(entry["at"]) for entry in calls if entry["at"] > after), default=float("inf"))
