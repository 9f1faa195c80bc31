"""Bounded staleness with real processes that are killed at random: `python -m chaos.asynchronous --runs 100`.

In each run rollout workers in two processes claim prompts with slots for their groups and append to the slots in steps.
The workers finish some slots, a few of them too late, and abandon or reject others; other workers continue or restart
unfinished slots. A trainer claims batches and publishes a version for each.

In some runs the trainer evicts late groups, and their prompts are claimed again. In some runs samples are released once
they are trained. In agent runs, the members of a group are multi-turn rollouts with one slot per turn; some rollouts
fail, and their prompts are dropped. In ordered runs, nothing is late, released or dropped, and batches contain the same
prompts as in a run without kills. The samples of a prompt share a field.

Processes of each kind are killed and restarted at random moments; the trainer resumes with a different number of ranks.
At the end, each prompt must have been trained once, with the data that its workers appended and within the staleness
bound, or must have been dropped with a reason.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import os
import random
import signal
import sys
import time
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final, get_args

import numpy as np
from numpy.typing import NDArray

import tq_service as tq
from chaos.cluster import Cluster, Process, wait_until, without_torch
from chaos.events import EventLog, read_events
from tq_service.schema import FieldScope, Late, OnLost

_PROMPTS, _TRAIN, _ROLLOUT, _ACTOR = "prompts", "train", "rollout", "actor"
_PROMPT_COUNT: Final = 40
_GROUP_SIZE: Final = 2
_GLOBAL_BATCH: Final = 4
_RANK_COUNTS: Final = (1, 2, 4)
_WORKERS_PER_PROCESS: Final = 6
_SLOT_SECONDS: Final = 1.5
_TIMEOUT_SECONDS: Final = 60.0
_RUN_SECONDS: Final = 120.0
_POLL_SECONDS: Final = 0.5
_EVICTING_SHARE: Final = 0.4
_RELEASING_SHARE: Final = 0.5
_AGENTS_SHARE: Final = 0.5
_ORDERED_SHARE: Final = 0.3
_FAILING_SHARE: Final = 0.05
_MOST_TURNS: Final = 3
_TOKENS: Final = (16, 21)
_MOST_PER_STEP: Final = 5
_IMAGE_SIZE: Final = 64
_CONTINUED: Final = "continued"


@dataclass(frozen=True, slots=True)
class Kind:
    """The variant of a run.

    Attributes:
        late: what happens to groups that would become too stale.
        agents: whether the members of a group are multi-turn rollouts.
        ordered: whether batches must be the same as in a run without kills.
    """

    late: Late = "wait"
    agents: bool = False
    ordered: bool = False


# Roles of the processes


async def roll_out(namespace: str, address: str, seed: int, kind: Kind) -> None:
    """Generate the groups of prompts with several workers until no prompts are left."""
    own = tq.AsyncClient(address, namespace=namespace, timeout=_TIMEOUT_SECONDS)
    async with own as client, asyncio.TaskGroup() as workers:
        for number in range(_WORKERS_PER_PROCESS):
            workers.create_task(_work(client, random.Random(f"{seed} {number} {time.time_ns()}"), kind))


async def _work(client: tq.AsyncClient, rng: random.Random, kind: Kind) -> None:
    asks: dict[str, Any] = {}
    if kind.agents and kind.ordered:  # slots are acquired after the prompt's claim, so those of later batches must wait
        asks["where"] = [("batch", "<=", tq.Published())]
    while True:
        held_count = (
            await client.describe_partition(_TRAIN)
        ).held_count  # read first: slots may remain without a prompt
        try:
            if held_count and await _continue(client, rng, kind):
                continue
            if not kind.agents:
                on_lost: OnLost = "requeue" if kind.ordered else rng.choice(("remove", "requeue"))
                asks["admit"] = tq.Admit(_TRAIN, group_size=_GROUP_SIZE, on_lost=on_lost)
            prompt = await client.get_meta(
                partition_id=_PROMPTS, task_name=_ROLLOUT, data_fields=["x"], batch_size=1, lease=_SLOT_SECONDS,
                max_wait=_POLL_SECONDS, **asks,
            )  # fmt: skip
            if prompt.admitted is not None:
                await _generate(client, prompt, prompt.admitted, rng, gives_up=not kind.ordered)
            elif prompt.status == "batch":
                await _begin(client, prompt, rng)
        except (
            tq.errors.LeaseExpiredError,
            tq.errors.SamplesClearedError,
            tq.errors.SampleNotFoundError,
        ):  # too late: another worker may have it now
            continue
        if prompt.status == "end":
            if not held_count:
                return
            await asyncio.sleep(_POLL_SECONDS / 10)


async def _continue(client: tq.AsyncClient, rng: random.Random, kind: Kind) -> bool:
    """Finish slots that another worker abandoned; return whether there were any."""
    slots = await client.get_meta(
        partition_id=_TRAIN, task_name=_ROLLOUT, data_fields=[], batch_size=_GROUP_SIZE, min_batch_size=1, held=True,
        lease=_SLOT_SECONDS, max_wait=0,
    )  # fmt: skip
    if slots.status != "batch":
        return False
    if kind.agents:
        await _play(client, slots, rng)
        return True
    with suppress(tq.errors.SampleNotFoundError):  # evicted
        await _grow(client, slots, rng)
        await _finish(client, slots)
    return True


async def _generate(
    client: tq.AsyncClient, prompt: tq.BatchMeta, slots: tq.BatchMeta, rng: random.Random, *, gives_up: bool
) -> None:
    """Generate the group of a prompt, or release the prompt."""
    fate = rng.random()
    try:
        await _grow(client, slots, rng)
        if fate < 0.05:
            await asyncio.sleep(_SLOT_SECONDS * 1.5)  # too late: the service must refuse it
        if fate >= 0.3 or not gives_up:
            await _finish(client, slots)
            return
    except tq.errors.SampleNotFoundError:  # evicted
        pass
    await client.release(prompt)


async def _begin(client: tq.AsyncClient, prompt: tq.BatchMeta, rng: random.Random) -> None:
    """Acquire the slots for the first turns of a prompt's rollouts, and play them."""
    (name,) = prompt.keys
    rollouts = _rollouts_of(str(name))
    slots = await client.acquire(
        _TRAIN, _ROLLOUT, keys=[f"{rollout}/0" for rollout in rollouts], groups=[str(name)], group_size=_GROUP_SIZE,
        rollouts=rollouts, lease=_SLOT_SECONDS, max_wait=_POLL_SECONDS, holding=prompt, ack=True,
    )  # fmt: skip
    if slots.status != "batch":
        await client.release(prompt)
        return
    await _play(client, slots, rng)


async def _play(client: tq.AsyncClient, slots: tq.BatchMeta, rng: random.Random) -> None:
    """Generate the turns of some slots, and all later turns of their rollouts."""
    for at in range(slots.size):
        slot: tq.BatchMeta | None = slots.select_samples([at])
        while slot is not None:
            slot = await _make_turn(client, slot, rng)


async def _make_turn(client: tq.AsyncClient, slot: tq.BatchMeta, rng: random.Random) -> tq.BatchMeta | None:
    """Generate a turn after acquiring the slot of the next turn, so a rollout has a slot until it ends.

    Returns:
        The slot of the next turn, or None if this was the last turn or another worker generates the next turn.
    """
    rollout, _, turn = str(slot.keys[0]).rpartition("/")
    is_last, following = int(turn) + 1 == _turns_of(rollout), None
    if is_last and _is_failing(rollout):
        await client.put(slot, state="failed", ack=True)
        return None
    if not is_last:
        with suppress(tq.errors.AlreadyExistsError):
            following = await client.acquire(
                _TRAIN,
                _ROLLOUT,
                keys=[f"{rollout}/{int(turn) + 1}"],
                rollouts=[rollout],
                lease=_SLOT_SECONDS,
                holding=slot,
            )
    await _grow(client, slot, rng)
    await _finish(client, slot, ends_rollouts=is_last)
    return following


async def _grow(client: tq.AsyncClient, slots: tq.BatchMeta, rng: random.Random) -> None:
    """Append to samples until they have all their tokens, perhaps after truncating some."""
    lengths = await _lengths(client, slots)
    if any(lengths):
        print(_CONTINUED, slots.global_indexes, lengths, flush=True)
    if rng.random() < 0.2:
        lengths = [rng.randint(0, length) for length in lengths]
        await client.truncate(slots, to=lengths, data_fields=["tokens"])
    wanted = [_tokens_of(index) for index in slots.global_indexes]
    pause = rng.uniform(0.001, 0.01) * (20 if rng.random() < 0.08 else 1)
    while any(length < len(tokens) for length, tokens in zip(lengths, wanted, strict=True)):
        await asyncio.sleep(pause)
        ends = [length + rng.randint(0, _MOST_PER_STEP) for length in lengths]
        added = [tokens[start:end] for tokens, start, end in zip(wanted, lengths, ends, strict=True)]
        await client.append(slots, {"tokens": added}, at=lengths)
        lengths = [length + len(some) for length, some in zip(lengths, added, strict=True)]


async def _lengths(client: tq.AsyncClient, slots: tq.BatchMeta) -> list[int]:
    """Return the number of tokens of each sample."""
    lengths = []
    for index in slots.global_indexes:
        found = await client.get_data(
            _TRAIN, global_indexes=[index], data_fields=["tokens"], missing="skip", missing_fields="skip"
        )
        tokens = found["tokens"][0].tolist() if found and len(found["tokens"]) else []
        if tokens != _tokens_of(index)[: len(tokens)].tolist():
            raise ValueError(f"sample {index} has wrong tokens: {tokens}")
        lengths.append(len(tokens))
    return lengths


async def _finish(client: tq.AsyncClient, slots: tq.BatchMeta, **arguments: Any) -> None:
    names = [str(name) for name in dict.fromkeys(slots.groups) if name]
    images = np.array([_image_of(name) for name in names])
    with suppress(tq.errors.NotFoundError):  # evicted: the put below fails too
        await client.put_groups(_TRAIN, {"image": images}, groups=names, existing=True)
    indexes = np.array(slots.global_indexes)
    await client.put(slots, {"x": indexes}, custom_meta={"index": indexes}, ack=True, **arguments)


def _tokens_of(index: int) -> NDArray[np.int64]:
    """Return the tokens of a sample, different for each."""
    return zlib.crc32(str(index).encode()) + np.arange(_TOKENS[index % len(_TOKENS)])


def _image_of(name: str) -> NDArray[np.int64]:
    """Return the value that the samples of a prompt share."""
    return zlib.crc32(name.encode()) + np.arange(_IMAGE_SIZE)


def _rollouts_of(name: str) -> list[str]:
    """Return the rollouts of a prompt."""
    return [f"{name}/{member}" for member in range(_GROUP_SIZE)]


def _turns_of(rollout: str) -> int:
    """Return the number of turns of a rollout."""
    return 1 + zlib.crc32(rollout.encode()) % _MOST_TURNS


def _is_failing(rollout: str) -> bool:
    """Whether a rollout fails, in every attempt."""
    return random.Random(rollout).random() < _FAILING_SHARE


def train(namespace: str, address: str, log_path: Path, seed: int, kind: Kind) -> None:
    """Train batches until the end, with a new random number of ranks."""
    rng, log = random.Random(f"{seed} {time.time_ns()}"), EventLog(log_path)
    evicting: dict[str, Any] = {}
    if kind.agents:  # failed groups and their names stay, so late workers cannot restart them
        evicting = {"unmatched": "fail", "least_members": _GROUP_SIZE}
    elif kind.late == "evict":
        evicting = {"unmatched": "clear", "refill": (_PROMPTS, _ROLLOUT), "max_refills": _PROMPT_COUNT}
    with tq.Client(address, namespace=namespace, timeout=_TIMEOUT_SECONDS) as client:
        dp_size = rng.choice(_RANK_COUNTS)
        try:
            restarted = client.restart_ranks(_TRAIN, _ACTOR, dp_size=dp_size)
            batch_index, epoch = restarted.batch_index, restarted.epoch
        except tq.errors.TaskNotFoundError:
            batch_index, epoch = 0, 0
        while True:
            metas = []
            for rank in range(dp_size):
                meta = client.get_meta(
                    partition_id=_TRAIN, task_name=_ACTOR, data_fields=["x", "tokens", "image"],
                    batch_size=_GLOBAL_BATCH // dp_size, batch_unit="group", dp_rank=rank, dp_size=dp_size,
                    batch_index=batch_index, epoch=epoch, totals=["index"], max_wait=_RUN_SECONDS, **evicting,
                )  # fmt: skip
                if meta.status != "batch":
                    log.write("end", batch_index=batch_index, status=meta.status)
                    return
                if meta.size and not _is_whole(meta, client.get_data(meta), kind):
                    log.write("wrong", batch_index=batch_index, part="samples")
                metas.append(meta)
            if not _are_totals(metas):
                log.write("wrong", batch_index=batch_index, part="totals")
            groups = [group for meta in metas for group in dict.fromkeys(meta.groups)]
            versions = [int(each["start_version"]) for meta in metas for each in meta.custom_meta]
            published = client.get_version()
            log.write("batch", batch_index=batch_index, groups=groups, versions=versions, published=published)
            time.sleep(rng.uniform(0.005, 0.05))
            client.publish_version(published + 1, trained={(_TRAIN, _ACTOR): batch_index})
            batch_index += 1


def _is_whole(meta: tq.BatchMeta, data: Any, kind: Kind) -> bool:
    """Whether samples form complete groups and have the data that workers put and appended."""
    names = [str(name) for name in dict.fromkeys(meta.groups)]
    if kind.agents:
        rollouts = [rollout for name in names for rollout in _rollouts_of(name)]
        got: dict[str | None, list[str | None]] = {rollout: [] for rollout in rollouts}
        for rollout, key in zip(meta.rollouts, meta.keys, strict=True):
            got.setdefault(rollout, []).append(key)
        is_whole = got == {each: [f"{each}/{turn}" for turn in range(_turns_of(each))] for each in rollouts}
    else:
        is_whole = meta.groups == [name for name in names for _ in range(_GROUP_SIZE)]
    tokens, images = ([row.tolist() for row in data[name]] for name in ("tokens", "image"))
    return bool(
        is_whole
        and data["x"].tolist() == meta.global_indexes
        and tokens == [_tokens_of(index).tolist() for index in meta.global_indexes]
        and images == [_image_of(str(name)).tolist() for name in meta.groups]
    )


def _are_totals(metas: Sequence[tq.BatchMeta]) -> bool:
    """Whether all ranks got the totals of the global batch."""
    indexes = [index for meta in metas for index in meta.global_indexes]
    groups = {group for meta in metas for group in meta.groups}
    rollouts = [
        rollout or index for meta in metas for rollout, index in zip(meta.rollouts, meta.global_indexes, strict=True)
    ]
    expected = len(indexes), len(set(rollouts)), len(groups), {"index": float(sum(indexes))}
    return all(
        [(each.sample_count, each.rollout_count, each.group_count, each.sums) for each in meta.totals] == [expected]
        for meta in metas
    )


# Driver


class Run:
    """A partition of prompts and a training partition, from the first prompt to the last.

    Args:
        cluster: the running service.
        number: index of the run.
        directory: directory for the logs.
        rng: chooses the kind, the bound, and the time and victim of each kill.
        kill_count: number of processes to kill; None: 1 to 3.

    Attributes:
        kills: number of kills that ended running processes.
        max_staleness: the staleness bound, in versions.
        kind: the variant of the run.
        evicted_count: groups that were evicted and generated again.
        dropped_count: groups that were evicted for good.
        staleness: the largest staleness of a sample, in versions.
        continued: number of claims of samples that already had tokens from another worker.
    """

    def __init__(
        self, cluster: Cluster, number: int, directory: Path, rng: random.Random, kill_count: int | None
    ) -> None:
        directory.mkdir(parents=True)
        self._cluster = cluster
        self._rng = rng
        self._log_path = directory / "trainer.jsonl"
        self._kill_count = rng.randint(1, 3) if kill_count is None else kill_count
        ordered, agents = rng.random() < _ORDERED_SHARE, rng.random() < _AGENTS_SHARE
        evicts = rng.random() < _EVICTING_SHARE and not (ordered or agents)
        self.kind = Kind("evict" if evicts else "wait", agents=agents, ordered=ordered)
        self.max_staleness = 0 if ordered else rng.choice((0, 1, 2, 4))
        releases = rng.random() < _RELEASING_SHARE
        self._release = tq.Release("trained", [_ACTOR]) if releases else None
        self._namespace = f"run-{number}"
        module = [sys.executable, "-m", "chaos.asynchronous", "--late", self.kind.late]
        module += [flag for flag, is_set in (("--agents", agents), ("--ordered", ordered)) if is_set]
        module += [self._namespace, cluster.address, str(self._log_path)]
        seed = str(rng.randrange(1 << 30))
        self._workers = [
            Process(name, [*module, f"{seed}{place}", "--as", "workers"], directory / f"{name}.log")
            for place, name in enumerate(("workers-0", "workers-1"))
        ]
        self._trainer = Process("trainer", [*module, seed, "--as", "trainer"], directory / "trainer.log")
        self.kills = self.staleness = self.evicted_count = self.dropped_count = self.continued = 0

    def run(self) -> Iterator[str]:
        """Run to the end and yield each violation."""
        admission = tq.Admission(
            _ACTOR, max_staleness=self.max_staleness, global_batch=_GLOBAL_BATCH, unit="group", late=self.kind.late
        )
        with tq.Client(self._cluster.address, namespace=self._namespace, timeout=_TIMEOUT_SECONDS) as client:
            client.publish_version(0)
            image = tq.FieldSpec("image", scope=FieldScope.GROUP)
            client.create_partition(_TRAIN, fields=[image], admissions=[admission], release=self._release)
            names = self._names()
            numbers = np.arange(_PROMPT_COUNT)
            batches = {"batch": numbers // _GLOBAL_BATCH}
            client.put(_PROMPTS, {"x": numbers}, keys=names, custom_meta=batches)
            client.seal_partition(_PROMPTS)
            for process in (*self._workers, self._trainer):
                process.start()
            try:
                for _ in range(self._kill_count):
                    time.sleep(self._rng.uniform(0.3, 1.5))
                    yield from self._kill()
                yield from self._join(self._workers)
                client.seal_partition(_TRAIN)
                yield from self._join([self._trainer])
            finally:
                for process in (*self._workers, self._trainer):
                    process.end()
            logs = [process.log.read_text() for process in self._workers]
            self.continued = sum(log.count(_CONTINUED) for log in logs)
            evicted = client.take_evicted(_TRAIN, _ACTOR).units
            dropped = {unit.group: unit.reason for unit in evicted if unit.refill not in {"refilled", "pending"}}
            self.dropped_count, self.evicted_count = len(dropped), len(evicted) - len(dropped)
            yield from self._violations(names, dropped)
            left_count = client.describe_partition(_TRAIN).summary.present_count
            if self._release is not None and left_count:
                yield f"{left_count} samples were not released"
            for name in (_PROMPTS, _TRAIN):
                client.clear_partition(name)
            client.remove_policy()

    def _names(self) -> list[str]:
        """Return the prompts. Ordered runs omit prompts with failing rollouts, which other prompts would replace."""
        names = (f"prompt{number}" for number in itertools.count())
        if self.kind.agents and self.kind.ordered:
            names = (name for name in names if not any(map(_is_failing, _rollouts_of(name))))
        return list(itertools.islice(names, _PROMPT_COUNT))

    def _kill(self) -> Iterator[str]:
        victim = self._rng.choice(("service", "workers", "trainer"))
        if victim == "service":
            self.kills += 1
            yield from self._cluster.inject_fault(list(self._cluster.processes), signal.SIGKILL)
            return
        process = self._rng.choice(self._workers) if victim == "workers" else self._trainer
        code = process.end()
        self.kills += code is None
        if code:
            yield f"{process.name} had ended with {code} ({process.log})"
        process.start()

    def _join(self, processes: Sequence[Process]) -> Iterator[str]:
        deadline = time.monotonic() + _RUN_SECONDS
        for process in processes:
            code = process.exit_code(max(0.1, deadline - time.monotonic()))
            if code != 0:
                yield f"{process.name} ended with {code} within {_RUN_SECONDS:g} s ({process.log})"

    def _violations(self, names: Sequence[str], dropped: Mapping[str | None, str]) -> Iterator[str]:
        """Yield violations in the last batch of each index and in the dropped groups."""
        events = read_events(self._log_path)
        wrong = (event for event in events if event["what"] == "wrong")
        yield from (f"batch {event['batch_index']} had wrong {event['part']}" for event in wrong)
        batches = {event["batch_index"]: event for event in events if event["what"] == "batch"}
        trained = [group for _, event in sorted(batches.items()) for group in event["groups"]]
        for name in names:
            fails = self.kind.agents and any(map(_is_failing, _rollouts_of(name)))
            reasons = {"too_small" if fails else None}
            if fails and self._release is not None:  # a failed group may be released before it is evicted
                reasons.add(None)
            if trained.count(name) != int(not fails) or dropped.get(name) not in reasons:
                yield f"{name} was trained {trained.count(name)} times, dropped as {dropped.get(name)}, not {reasons}"
        for index, event in sorted(batches.items()):
            expected = names[index * _GLOBAL_BATCH : (index + 1) * _GLOBAL_BATCH]
            if self.kind.ordered and sorted(event["groups"]) != sorted(expected):
                yield f"batch {index} has {event['groups']}; without kills it has {expected}"
            if event["published"] != index:
                yield f"batch {index} was trained at version {event['published']}"
            staleness = event["published"] - min(event["versions"])
            self.staleness = max(staleness, self.staleness)
            if staleness > self.max_staleness:
                yield f"batch {index} was {staleness} versions late, expected at most {self.max_staleness}"


def _say(text: str) -> None:
    print(text, flush=True)


def _trial(given: argparse.Namespace) -> int:
    rng, broken, latest = random.Random(given.seed), 0, dict[int, int]()
    kills = evicted = dropped = continued = agents = ordered = 0
    cluster = Cluster("embedded", "process", given.output)
    given.output.mkdir(parents=True, exist_ok=True)
    try:
        cluster.start()
        wait_until(partial(_is_up, cluster.address), _TIMEOUT_SECONDS)
        for number in range(given.runs):
            run = Run(cluster, number, given.output / f"run-{number}", rng, given.kills)
            violations = list(run.run())
            kills += run.kills
            evicted += run.evicted_count
            dropped += run.dropped_count
            agents += run.kind.agents
            ordered += run.kind.ordered
            continued += run.continued
            latest[run.max_staleness] = max(run.staleness, latest.get(run.max_staleness, 0))
            for violation in violations:
                broken += 1
                _say(f"run {number} ({run.kind}): VIOLATION {violation}")
        for line in cluster.failures():
            broken += 1
            _say(f"VIOLATION log of {line}")
    finally:
        cluster.close()
    _say("; ".join(f"at most {bound} versions late: largest was {latest[bound]}" for bound in sorted(latest)))
    counts = f"{given.runs} runs ({agents} of agents, {ordered} ordered), {kills} kills, {evicted} groups evicted and "
    counts += f"generated again, {dropped} dropped, {continued} claims continued"
    _say(f"{counts}, {broken} violations; seed {given.seed}; logs and data in {given.output}")
    return 1 if broken else 0


def _is_up(address: str) -> bool:
    try:
        with tq.Client(address, timeout=1.0) as client:
            return client.health()
    except tq.TqError:
        return False


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m chaos.asynchronous", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--runs", type=int, default=100, help="number of consecutive runs (default: 100)")
    parser.add_argument("--kills", type=int, help="processes killed in each run (default: 1 to 3)")
    parser.add_argument("--seed", type=int, default=int.from_bytes(os.urandom(3)), help="repeats the faults of a trial")
    parser.add_argument("--output", type=Path, default=Path("chaos-output"), help="directory for logs and data")
    parser.add_argument("--as", dest="role", choices=("workers", "trainer"), help=argparse.SUPPRESS)
    parser.add_argument("--late", choices=get_args(Late), default="wait", help=argparse.SUPPRESS)
    parser.add_argument("--agents", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--ordered", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("place", nargs="*", help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    if given.role is None:
        return _trial(given)
    namespace, address, log_path, seed = given.place
    kind = Kind(given.late, agents=given.agents, ordered=given.ordered)
    if given.role == "workers":
        asyncio.run(roll_out(namespace, address, int(seed), kind))
    else:
        train(namespace, address, Path(log_path), int(seed), kind)
    return 0


if __name__ == "__main__":
    without_torch()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # ends the started processes
    sys.exit(main())
