"""Bounded staleness with real processes that are killed at random: `python -m chaos.asynchronous --runs 100`.

In each run rollout workers in two processes claim prompts with slots for their groups, and put them late, never, or
reject them; a trainer claims batches and publishes a version for each. In some runs it evicts groups that are late, and
their prompts are claimed again. Processes of each kind are killed and started again at random moments; the trainer
goes on with another number of ranks. In the end each prompt was trained once, and none later than the bound allows.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, Final, get_args

import numpy as np

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
_POLL_SECONDS: Final = 5.0
_EVICTING_SHARE: Final = 0.4


# What the processes do


async def roll_out(namespace: str, address: str, seed: int) -> None:
    """Generate the groups of prompts until there are none left, with several workers."""
    own = tq.AsyncClient(address, namespace=namespace, timeout=_TIMEOUT_SECONDS)
    async with own as client, asyncio.TaskGroup() as workers:
        for number in range(_WORKERS_PER_PROCESS):
            workers.create_task(_work(client, random.Random(f"{seed} {number} {time.time_ns()}")))


async def _work(client: tq.AsyncClient, rng: random.Random) -> None:
    while True:
        try:
            prompt = await client.get_meta(
                partition_id=_PROMPTS, task_name=_ROLLOUT, data_fields=["x"], batch_size=1, lease=_SLOT_SECONDS,
                admit=tq.Admit(_TRAIN, group_size=_GROUP_SIZE), max_wait=_POLL_SECONDS,
            )  # fmt: skip
        except (tq.LeaseExpiredError, tq.SamplesClearedError):  # the answer was lost, and came too late
            continue
        if prompt.status == "end":
            return
        if prompt.admitted is not None:
            with suppress(tq.LeaseExpiredError):  # another worker has the prompt now
                await _generate(client, prompt, prompt.admitted, rng)


async def _generate(client: tq.AsyncClient, prompt: tq.BatchMeta, slots: tq.BatchMeta, rng: random.Random) -> None:
    """Make the group of a prompt, or give the prompt back."""
    await asyncio.sleep(rng.uniform(0.005, 0.06) * (20 if rng.random() < 0.08 else 1))
    fate = rng.random()
    if fate < 0.05:
        await asyncio.sleep(_SLOT_SECONDS * 1.5)  # too late, which is for the service to say
    if fate < 0.3:  # rejected
        await client.release(prompt)
        return
    try:
        await client.put({"x": np.arange(_GROUP_SIZE)}, metadata=slots, ack=True)
    except tq.SampleNotFoundError:  # evicted
        await client.release(prompt)


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
                    partition_id=_TRAIN, task_name=_ACTOR, data_fields=["x"], batch_size=_GLOBAL_BATCH // dp_size,
                    batch_unit="group", dp_rank=rank, dp_size=dp_size, batch_index=batch_index, epoch=epoch,
                    max_wait=_RUN_SECONDS, **evicting,
                )  # fmt: skip
                if meta.status != "batch":
                    log.write("end", batch_index=batch_index, status=meta.status)
                    return
                members = [place % _GROUP_SIZE for place in range(meta.size)]
                if members and client.get_data(meta)["x"].tolist() != members:
                    log.write("wrong", batch_index=batch_index)
                groups += meta.groups[::_GROUP_SIZE]
                versions += [int(each["start_version"]) for each in meta.custom_meta]
            published = client.get_version()
            log.write("batch", batch_index=batch_index, groups=groups, versions=versions, published=published)
            time.sleep(rng.uniform(0.005, 0.05))
            client.publish_version(published + 1, trained={(_TRAIN, _ACTOR): batch_index})
            batch_index += 1


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
        self.kills = self.staleness = self.evicted_count = 0

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
    rng, broken, kills, evicted, latest = random.Random(given.seed), 0, 0, 0, dict[int, int]()
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
    counts = f"{given.runs} runs, {kills} kills, {evicted} groups evicted, {broken} violations"
    _say(f"{counts}; seed {given.seed}; logs and data in {given.output}")
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
