"""Users of the service: producers, trainer ranks, named callers and queue workers. Each resumes from its log."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import numpy as np

import tq_service as tq
from chaos.content import FIELDS, GRADE, REWARD, TAGS, columns_of, key_of, rewards_of, version_of, wrong_fields
from chaos.events import EventLog, read_events

RANK_COUNT: Final = 8
RANK_TASK: Final = "update_actor"
NAMED_TASK: Final = "replay"
WORKER_TASK: Final = "reward"
USES: Final = 2
LEASE_SECONDS: Final = 3.0

_ALL_FIELDS: Final = [*FIELDS, REWARD]
_MAX_WAIT_SECONDS: Final = 20.0
_MOST_ROWS: Final = 6
_GATHERED_SHARE: Final = 0.2
_GATHERED_PUTS: Final = 16
_LONGEST_PAUSE_SECONDS: Final = 0.06


class Actor:
    """A user of the service.

    Args:
        client: the actor's own client.
        partition_id: the partition of the scenario.
        number: index among the actors of its kind.
        directory: directory of its log.
        seed: seed of its random numbers.
        stopping: function that returns whether producers must stop.
    """

    kind: str

    def __init__(
        self,
        *,
        client: tq.AsyncClient,
        partition_id: str,
        number: int,
        directory: Path,
        seed: int,
        stopping: Callable[[], bool],
    ) -> None:
        path = directory / f"{self.kind}-{number}.jsonl"
        self.client = client
        self.partition_id = partition_id
        self.number = number
        self.past = read_events(path)
        self.log = EventLog(path)
        self.rng = random.Random(f"{seed} {self.kind} {number} {len(self.past)}")
        self.stopping = stopping

    async def run(self) -> None:
        """Work until there is nothing left to do."""
        raise NotImplementedError


class Producer(Actor):
    """Puts samples and tags some of them. Some get their reward in a second put; some are held, and may be cleared.

    In some rounds it puts many single samples at once, which the client gathers.
    """

    kind = "producer"

    async def run(self) -> None:
        """Put until told to stop."""
        begun = sum(event["what"] == "put" for event in self.past)
        while not self.stopping():
            is_gathered = self.rng.random() < _GATHERED_SHARE
            tag, count = begun % len(TAGS), _GATHERED_PUTS if is_gathered else 1
            async with asyncio.TaskGroup() as puts:
                for serial in range(begun, begun + count):
                    row_count = 1 if is_gathered else self.rng.randint(1, _MOST_ROWS)
                    puts.create_task(self._put_one(serial, row_count, tag))
            begun += count
            await asyncio.sleep(self.rng.uniform(0, _LONGEST_PAUSE_SECONDS))

    async def _put_one(self, serial: int, row_count: int, tag: int) -> None:
        keys = [key_of(self.number, serial, row) for row in range(row_count)]
        is_held = self.rng.random() < 0.15
        has_reward = is_held or self.rng.random() < 0.7
        data = columns_of(keys) | ({REWARD: rewards_of(keys)} if has_reward else {})
        self.log.write("put", keys=keys, is_held=is_held, tag=tag)
        meta = await self.client.put(
            self.partition_id,
            data,
            keys=keys,
            key_mode="new",
            state="held" if is_held else "live",
            custom_meta=[{"version": version_of(key), "tag": TAGS[tag]} for key in keys],
        )
        self.log.write("put_done", keys=keys, indexes=list(meta.global_indexes))
        if not has_reward:
            await self.client.put(meta, {REWARD: rewards_of(keys)})
        self.log.write("reward_done", keys=keys)
        if self.rng.random() < 0.4:
            for other in self.rng.sample(range(len(TAGS)), 2):
                self.log.write("tag", keys=keys, tag=other)
                await self.client.set_custom_meta(meta, [{"tag": TAGS[other]}] * len(keys))
                self.log.write("tag_done", keys=keys)
        if is_held and self.rng.random() < 0.5:
            self.log.write("clear", keys=keys)
            await self.client.clear_samples(meta)
            self.log.write("clear_done", keys=keys)


class Rank(Actor):
    """Takes the batches of one rank in order and reads them."""

    kind = "rank"

    async def run(self) -> None:
        """Take and read batches until the end."""
        claimed = {event["batch_index"]: event["claim"] for event in self.past if event["what"] == "claim"}
        batch_index = sum(event["what"] == "read" for event in self.past)
        while True:
            meta = await self.client.get_meta(**REQUESTS[self.kind](self.partition_id, self.number, batch_index))
            if meta.status == "not_yet":
                continue
            claim = described(meta)
            if batch_index not in claimed:
                self.log.write("claim", batch_index=batch_index, claim=claim)
            elif claimed[batch_index] != claim:
                self.log.write("changed", batch_index=batch_index, before=claimed[batch_index], after=claim)
            if meta.status == "end":
                return
            wrong = await read(self.client, meta)
            self.log.write("read", batch_index=batch_index, wrong=wrong)
            batch_index += 1


class Named(Rank):
    """Claims batches by name, one after another, and reads them. Each sample is used twice."""

    kind = "named"


class Worker(Actor):
    """Leases samples, reads them, and acknowledges most, some late. Releases some, and lets some leases expire.

    It grades half of the samples it acknowledges, in the same change. The grade shows which acknowledgement counted.
    """

    kind = "worker"

    async def run(self) -> None:
        """Lease and acknowledge samples until the end."""
        while True:
            self.log.write("ask")
            try:
                meta = await self.client.get_meta(
                    partition_id=self.partition_id,
                    task_name=WORKER_TASK,
                    data_fields=_ALL_FIELDS,
                    batch_size=12,
                    min_batch_size=1,
                    lease=LEASE_SECONDS,
                    max_wait=_MAX_WAIT_SECONDS,
                )
            except (
                tq.errors.LeaseExpiredError
            ):  # the answer was lost, and the service was away for longer than the lease
                self.log.write("lease_lost")
                continue
            if meta.status == "end":
                self.log.write("end")
                return
            if meta.status == "batch":
                await self._work(meta)

    async def _work(self, meta: tq.BatchMeta) -> None:
        indexes = list(meta.global_indexes)
        self.log.write("leased", indexes=indexes)
        self.log.write("read", wrong=await read(self.client, meta))
        fate = self.rng.random()
        if fate < 0.02:
            return  # the lease expires
        if fate < 0.05:
            await asyncio.sleep(LEASE_SECONDS * self.rng.uniform(0.5, 1.5))
        elif fate < 0.15:
            self.log.write("release", indexes=indexes)
            try:
                await self.client.release(meta)
            except tq.errors.LeaseExpiredError as late:
                self.log.write("release_late", indexes=indexes, error=str(late))
            else:
                self.log.write("released", indexes=indexes)
            return
        grade = self.rng.getrandbits(62) if self.rng.random() < 0.5 else None
        self.log.write("ack", indexes=indexes, grade=grade)
        try:
            if grade is None:
                await self.client.ack(meta)
            else:
                await self.client.put(meta, {GRADE: np.full(meta.size, grade)}, ack=True)
        except tq.errors.LeaseExpiredError as late:
            self.log.write("ack_late", indexes=indexes, error=str(late))
        else:
            self.log.write("ack_done", indexes=indexes)


ACTORS: Final[dict[str, type[Actor]]] = {one.kind: one for one in (Producer, Rank, Named, Worker)}


def rank_request(partition_id: str, rank: int, batch_index: int, max_wait: float = _MAX_WAIT_SECONDS) -> dict[str, Any]:
    """Return the arguments of a rank's claim for a batch."""
    return {
        "partition_id": partition_id,
        "task_name": RANK_TASK,
        "data_fields": _ALL_FIELDS,
        "batch_size": 4,
        "micro_batch_size": 2,
        "dp_rank": rank,
        "dp_size": RANK_COUNT,
        "batch_index": batch_index,
        "max_wait": max_wait,
    }


def named_request(
    partition_id: str, number: int, batch_index: int, max_wait: float = _MAX_WAIT_SECONDS
) -> dict[str, Any]:
    """Return the arguments of a claim by name."""
    return {
        "partition_id": partition_id,
        "task_name": NAMED_TASK,
        "data_fields": _ALL_FIELDS,
        "batch_size": 4,
        "micro_batch_size": 2,
        "claim_name": f"{number}/{batch_index}",
        "max_uses": USES,
        "max_wait": max_wait,
    }


REQUESTS: Final[dict[str, Callable[..., dict[str, Any]]]] = {"rank": rank_request, "named": named_request}


def described(meta: tq.BatchMeta) -> dict[str, Any]:
    """Return, as JSON values, the parts of an answer that must not change when the claim is repeated."""
    return {
        "status": meta.status,
        "indexes": list(meta.global_indexes),
        "keys": list(meta.keys),
        "versions": [one["version"] for one in meta.custom_meta],
        "micro_batches": [list(positions) for positions in meta.micro_batches],
        "epoch": meta.epoch,
        "incarnation": meta.incarnation.hex(),
    }


async def read(client: tq.AsyncClient, meta: tq.BatchMeta) -> list[str]:
    """Read a batch and return the wrong values as "key: field"."""
    if not meta.size:
        return []
    return wrong_fields([str(key) for key in meta.keys], await client.get_data(meta))
