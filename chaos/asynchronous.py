"""Bounded staleness with real processes that are killed at random: `python -m chaos.asynchronous --runs 100`.

In each run rollout workers in two processes claim prompts with slots for their groups, append to these in steps, and
finish them late, never, or reject them; others continue what was left unfinished, or begin it again. A trainer claims
batches and publishes a version for each. In some runs it evicts groups that are late, and their prompts are claimed
again. Processes of each kind are killed and started again at random moments; the trainer goes on with another number of
ranks. In the end each prompt was trained once, with what its workers have appended, and none later than the bound
allows.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import signal
import sys
import time
import zlib
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, Final, get_args

import numpy as np
from numpy.typing import NDArray

import tq_service as tq
from chaos.cluster import Cluster, Process, wait_until, without_torch
from chaos.events import EventLog, read_events
from tq_service.schema import Late

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
_TOKENS: Final = (16, 21)
_MOST_PER_STEP: Final = 5
_CONTINUED: Final = "continued"


# What the processes do


async def roll_out(namespace: str, address: str, seed: int) -> None:
    """Generate the groups of prompts until there are none left, with several workers."""
    own = tq.AsyncClient(address, namespace=namespace, timeout=_TIMEOUT_SECONDS)
    async with own as client, asyncio.TaskGroup() as workers:
        for number in range(_WORKERS_PER_PROCESS):
            workers.create_task(_work(client, random.Random(f"{seed} {number} {time.time_ns()}")))


async def _work(client: tq.AsyncClient, rng: random.Random) -> None:
    while True:
        held_count = (await client.describe_partition(_TRAIN)).held_count  # first: slots may be left without a prompt
        try:
            if held_count and await _continue(client, rng):
                continue
            prompt = await client.get_meta(
                partition_id=_PROMPTS, task_name=_ROLLOUT, data_fields=["x"], batch_size=1, lease=_SLOT_SECONDS,
                admit=tq.Admit(_TRAIN, group_size=_GROUP_SIZE, on_lost=rng.choice(("remove", "requeue"))),
                max_wait=_POLL_SECONDS,
            )  # fmt: skip
            if prompt.admitted is not None:
                await _generate(client, prompt, prompt.admitted, rng)
        except (tq.LeaseExpiredError, tq.SamplesClearedError):  # too late: another worker has it now, or nobody
            continue
        if prompt.status == "end":
            if not held_count:
                return
            await asyncio.sleep(_POLL_SECONDS / 10)


async def _continue(client: tq.AsyncClient, rng: random.Random) -> bool:
    """Finish slots that another worker has left; return whether there were some."""
    slots = await client.get_meta(
        partition_id=_TRAIN, task_name=_ROLLOUT, data_fields=[], batch_size=_GROUP_SIZE, min_batch_size=1, held=True,
        lease=_SLOT_SECONDS, max_wait=0,
    )  # fmt: skip
    if slots.status != "batch":
        return False
    with suppress(tq.SampleNotFoundError):  # evicted
        await _grow(client, slots, rng)
        await _finish(client, slots)
    return True


async def _generate(client: tq.AsyncClient, prompt: tq.BatchMeta, slots: tq.BatchMeta, rng: random.Random) -> None:
    """Make the group of a prompt, or give the prompt back."""
    fate = rng.random()
    try:
        await _grow(client, slots, rng)
        if fate < 0.05:
            await asyncio.sleep(_SLOT_SECONDS * 1.5)  # too late, which is for the service to say
        if fate >= 0.3:
            await _finish(client, slots)
            return
    except tq.SampleNotFoundError:  # evicted
        pass
    await client.release(prompt)


async def _grow(client: tq.AsyncClient, slots: tq.BatchMeta, rng: random.Random) -> None:
    """Append to samples until they have all of their tokens; a part of what they have already may be discarded."""
    lengths = await _lengths(client, slots)
    if any(lengths):
        print(_CONTINUED, slots.global_indexes, lengths, flush=True)
    if rng.random() < 0.2:
        lengths = [rng.randint(0, length) for length in lengths]
        await client.truncate(metadata=slots, to=lengths, data_fields=["tokens"])
    wanted = [_tokens_of(index) for index in slots.global_indexes]
    pause = rng.uniform(0.001, 0.01) * (20 if rng.random() < 0.08 else 1)
    while any(length < len(tokens) for length, tokens in zip(lengths, wanted, strict=True)):
        await asyncio.sleep(pause)
        ends = [length + rng.randint(0, _MOST_PER_STEP) for length in lengths]
        added = [tokens[start:end] for tokens, start, end in zip(wanted, lengths, ends, strict=True)]
        await client.append({"tokens": added}, metadata=slots, at=lengths)
        lengths = [length + len(some) for length, some in zip(lengths, added, strict=True)]


async def _lengths(client: tq.AsyncClient, slots: tq.BatchMeta) -> list[int]:
    """Return how many tokens samples have."""
    lengths = []
    for index in slots.global_indexes:
        found = await client.get_data(
            partition_id=_TRAIN, global_indexes=[index], data_fields=["tokens"], missing="skip", missing_fields="skip"
        )
        tokens = found["tokens"][0].tolist() if found and len(found["tokens"]) else []
        if tokens != _tokens_of(index)[: len(tokens)].tolist():
            raise ValueError(f"sample {index} has the tokens {tokens}")
        lengths.append(len(tokens))
    return lengths


async def _finish(client: tq.AsyncClient, slots: tq.BatchMeta) -> None:
    await client.put({"x": np.array(slots.global_indexes)}, metadata=slots, ack=True)


def _tokens_of(index: int) -> NDArray[np.int64]:
    """Return the tokens of a sample: others for each."""
    return zlib.crc32(str(index).encode()) + np.arange(_TOKENS[index % len(_TOKENS)])


def train(namespace: str, address: str, log_path: Path, seed: int, late: Late) -> None:
    """Train batches until the end, as other ranks than those before."""
    rng, log = random.Random(f"{seed} {time.time_ns()}"), EventLog(log_path)
    evicting: dict[str, Any] = {"unmatched": "clear", "refill": (_PROMPTS, _ROLLOUT), "max_refills": _PROMPT_COUNT}
    evicting = evicting if late == "evict" else {}
    with tq.Client(address, namespace=namespace, timeout=_TIMEOUT_SECONDS) as client:
        dp_size = rng.choice(_RANK_COUNTS)
        try:
            restarted = client.restart_ranks(_TRAIN, _ACTOR, dp_size=dp_size)
            batch_index, epoch = restarted.batch_index, restarted.epoch
        except tq.TaskNotFoundError:
            batch_index, epoch = 0, 0
        while True:
            groups, versions = [], []
            for rank in range(dp_size):
                meta = client.get_meta(
                    partition_id=_TRAIN, task_name=_ACTOR, data_fields=["x", "tokens"],
                    batch_size=_GLOBAL_BATCH // dp_size, batch_unit="group", dp_rank=rank, dp_size=dp_size,
                    batch_index=batch_index, epoch=epoch, max_wait=_RUN_SECONDS, **evicting,
                )  # fmt: skip
                if meta.status != "batch":
                    log.write("end", batch_index=batch_index, status=meta.status)
                    return
                if meta.size and not _is_whole(meta, client.get_data(meta)):
                    log.write("wrong", batch_index=batch_index)
                groups += meta.groups[::_GROUP_SIZE]
                versions += [int(each["start_version"]) for each in meta.custom_meta]
            published = client.get_version()
            log.write("batch", batch_index=batch_index, groups=groups, versions=versions, published=published)
            time.sleep(rng.uniform(0.005, 0.05))
            client.publish_version(published + 1, trained={(_TRAIN, _ACTOR): batch_index})
            batch_index += 1


def _is_whole(meta: tq.BatchMeta, data: Any) -> bool:
    """Whether samples are those of whole groups, and their data is what workers have put and appended."""
    groups = [group for group in meta.groups[::_GROUP_SIZE] for _ in range(_GROUP_SIZE)]
    tokens = [row.tolist() for row in data["tokens"]]
    return bool(
        meta.groups == groups
        and data["x"].tolist() == meta.global_indexes
        and tokens == [_tokens_of(index).tolist() for index in meta.global_indexes]
    )


# A run


class Run:
    """One partition of prompts, and one that is trained, from the first prompt to the last.

    Args:
        cluster: the running service.
        number: of the run.
        directory: gets the logs.
        rng: chooses the bound, moments and victims.

    Attributes:
        kills: processes that were killed.
        max_staleness: the bound.
        late: what becomes of groups that would become too stale.
        evicted_count: groups that were evicted for that.
        staleness: the most versions that a sample was late.
        continued: claims of samples that had tokens of another worker.
    """

    def __init__(self, cluster: Cluster, number: int, directory: Path, rng: random.Random) -> None:
        directory.mkdir(parents=True)
        self._cluster = cluster
        self._rng = rng
        self._log_path = directory / "trainer.jsonl"
        self.max_staleness = rng.choice((0, 1, 2, 4))
        self.late: Late = "evict" if rng.random() < _EVICTING_SHARE else "wait"
        self._namespace = f"run-{number}"
        module = [sys.executable, "-m", "chaos.asynchronous", "--late", self.late]
        module += [self._namespace, cluster.address, str(self._log_path)]
        seed = str(rng.randrange(1 << 30))
        self._workers = [
            Process(name, [*module, f"{seed}{place}", "--as", "workers"], directory / f"{name}.log")
            for place, name in enumerate(("workers-0", "workers-1"))
        ]
        self._trainer = Process("trainer", [*module, seed, "--as", "trainer"], directory / "trainer.log")
        self.kills = self.staleness = self.evicted_count = self.continued = 0

    def run(self) -> Iterator[str]:
        """Run to the end, and yield what is wrong."""
        admission = tq.Admission(
            _ACTOR, max_staleness=self.max_staleness, global_batch=_GLOBAL_BATCH, unit="group", late=self.late
        )
        with tq.Client(self._cluster.address, namespace=self._namespace, timeout=_TIMEOUT_SECONDS) as client:
            client.publish_version(0)
            client.create_partition(_TRAIN, admissions=[admission])
            names = [f"prompt{number}" for number in range(_PROMPT_COUNT)]
            client.put({"x": np.arange(_PROMPT_COUNT)}, partition_id=_PROMPTS, keys=names)
            client.seal_partition(_PROMPTS)
            for process in (*self._workers, self._trainer):
                process.start()
            try:
                for _ in range(self._rng.randint(1, 3)):
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
            yield from self._violations(names)
            self.evicted_count = len(client.take_evicted(_TRAIN, _ACTOR).units)
            for name in (_PROMPTS, _TRAIN):
                client.clear_partition(name)
            client.remove_policy()

    def _kill(self) -> Iterator[str]:
        self.kills += 1
        victim = self._rng.choice(("service", "workers", "trainer"))
        if victim == "service":
            yield from self._cluster.inject_fault(list(self._cluster.processes), signal.SIGKILL)
            return
        process = self._rng.choice(self._workers) if victim == "workers" else self._trainer
        if code := process.end():
            yield f"{process.name} had ended with {code} ({process.log})"
        process.start()

    def _join(self, processes: Sequence[Process]) -> Iterator[str]:
        deadline = time.monotonic() + _RUN_SECONDS
        for process in processes:
            code = process.exit_code(max(0.1, deadline - time.monotonic()))
            if code != 0:
                yield f"{process.name} ended with {code} within {_RUN_SECONDS:g} s ({process.log})"

    def _violations(self, names: Sequence[str]) -> Iterator[str]:
        """Yield what is wrong with the batches that count: the last one of each index."""
        events = read_events(self._log_path)
        yield from (f"batch {event['batch_index']} had wrong bytes" for event in events if event["what"] == "wrong")
        batches = {event["batch_index"]: event for event in events if event["what"] == "batch"}
        trained = [group for _, event in sorted(batches.items()) for group in event["groups"]]
        yield from (f"{name} was trained {trained.count(name)} times" for name in names if trained.count(name) != 1)
        for index, event in sorted(batches.items()):
            if event["published"] != index:
                yield f"batch {index} was trained at version {event['published']}"
            staleness = event["published"] - min(event["versions"])
            self.staleness = max(staleness, self.staleness)
            if staleness > self.max_staleness:
                yield f"batch {index} was {staleness} versions late, at most {self.max_staleness} expected"


def _say(text: str) -> None:
    print(text, flush=True)


def _trial(given: argparse.Namespace) -> int:
    rng, broken, latest = random.Random(given.seed), 0, dict[int, int]()
    kills = evicted = continued = 0
    cluster = Cluster("embedded", "process", given.output)
    given.output.mkdir(parents=True, exist_ok=True)
    try:
        cluster.start()
        wait_until(partial(_is_up, cluster.address), _TIMEOUT_SECONDS)
        for number in range(given.runs):
            run = Run(cluster, number, given.output / f"run-{number}", rng)
            violations = list(run.run())
            kills += run.kills
            evicted += run.evicted_count
            continued += run.continued
            latest[run.max_staleness] = max(run.staleness, latest.get(run.max_staleness, 0))
            for violation in violations:
                broken += 1
                _say(f"run {number}: VIOLATION {violation}")
        for line in cluster.failures():
            broken += 1
            _say(f"VIOLATION log of {line}")
    finally:
        cluster.close()
    _say("; ".join(f"at most {bound} versions late: {latest[bound]} was the most" for bound in sorted(latest)))
    counts = f"{given.runs} runs, {kills} kills, {evicted} groups evicted, {continued} claims continued"
    _say(f"{counts}, {broken} violations; seed {given.seed}; logs and data in {given.output}")
    return 1 if broken else 0


def _is_up(address: str) -> bool:
    try:
        with tq.Client(address, timeout=1.0) as client:
            return client.health()
    except tq.TqError:
        return False


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what the command line asks for and return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m chaos.asynchronous", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--runs", type=int, default=100, help="runs, one after the other (default: 100)")
    parser.add_argument("--seed", type=int, default=int.from_bytes(os.urandom(3)), help="repeats the faults of a trial")
    parser.add_argument("--output", type=Path, default=Path("chaos-output"), help="directory for logs and data")
    parser.add_argument("--as", dest="role", choices=("workers", "trainer"), help=argparse.SUPPRESS)
    parser.add_argument("--late", choices=get_args(Late), default="wait", help=argparse.SUPPRESS)
    parser.add_argument("place", nargs="*", help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    if given.role is None:
        return _trial(given)
    namespace, address, log_path, seed = given.place
    if given.role == "workers":
        asyncio.run(roll_out(namespace, address, int(seed)))
    else:
        train(namespace, address, Path(log_path), int(seed), given.late)
    return 0


if __name__ == "__main__":
    without_torch()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that what was started is ended
    sys.exit(main())
