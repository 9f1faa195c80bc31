"""Puts of one client at the same moment, one of which is refused."""

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np

import tq_service as tq
from tq_service.client.transport import current_home

COUNT = 12
REFUSED = 5


def many_threads():
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(64))


class Sent:
    """What a client sends, and holds back until `let_go`."""

    def __init__(self, client, *, is_held=False):
        self.real = getattr(client, "client", client)
        self.joints = []
        self._send = self.real._send
        self._gate = asyncio.Event() if isinstance(self.real, tq.AsyncClient) else threading.Event()
        self.real._send = self._hold if isinstance(self.real, tq.AsyncClient) else self._hold_thread
        if not is_held:
            self._gate.set()

    async def _hold(self, joint, *others):
        self.joints.append(joint)
        await self._gate.wait()
        return await self._send(joint, *others)

    def _hold_thread(self, joint, *others):
        self.joints.append(joint)
        self._gate.wait()
        return self._send(joint, *others)

    def let_go(self):
        self._gate.set()

    @property
    def row_counts(self):
        return [joint.request.write.row_count for joint in self.joints]

    async def until_sent(self, count):
        """Wait until so many calls are about to be made."""
        while True:
            if len(self.joints) >= count:
                return
            await asyncio.sleep(0.001)

    def line(self):
        """Return the one line that the async client has in this loop."""
        (line,) = self.real._lines_of[asyncio.get_running_loop()]._lines.values()
        return line

    async def until(self, count):
        """Wait until so many puts are in lines, sent or not."""
        home = asyncio.get_running_loop() if isinstance(self.real, tq.AsyncClient) else current_home()
        while True:
            lines = self.real._lines_of.get(home)
            if lines is not None and _put_count(lines) == count:
                return
            await asyncio.sleep(0.001)


def _put_count(lines):
    with lines._lock:  # callers of the sync client are threads, which join and leave meanwhile
        every = lines._lines.values()
        sent = sum(len(batch.waiting) for line in every for batch in line.batches)
        return sent + sum(len(line.waiting) for line in every)


async def at_once(client, calls, *others):
    """Make calls at the same moment, so that all but the first two are gathered; return what each returns or raises."""
    many_threads()
    sent = Sent(client, is_held=True)
    tasks = []
    for number, call in enumerate(calls):
        tasks.append(asyncio.ensure_future(client.put(**call)))
        await sent.until(number + 1)
    sent.let_go()
    return sent, await asyncio.gather(*tasks, return_exceptions=True)


def seen(outcome):
    """Return what a caller sees, in which partition and at which place the samples may be."""
    if isinstance(outcome, tq.TqError):
        return type(outcome), outcome.reason
    fields = outcome.data_fields
    return outcome.size, outcome.keys, outcome.groups, outcome.custom_meta, fields, sorted(outcome.produced)


async def with_known_keys(client, name):
    return await client.put(name, {"x": np.arange(COUNT)}, keys=[f"known{number}" for number in range(COUNT)])


async def with_groups(client, name):
    return await client.put(
        name, {"x": np.arange(3)}, keys=["a", "b", "c"], groups=["full", "full", "odd"], group_size=2
    )


async def with_a_cleared_sample(client, name):
    meta = await with_known_keys(client, name)
    await client.clear_samples(meta.select_samples([REFUSED]))
    return meta


async def with_a_failed_sample(client, name):
    meta = await with_known_keys(client, name)
    await client.put(meta.select_samples([REFUSED]), state="failed")
    return meta


async def sealed(client, name):
    meta = await with_known_keys(client, name)
    await client.seal_partition(name)
    return meta


async def leased(client, name):
    await with_known_keys(client, name)
    meta = await client.get_meta(partition_id=name, task_name="t", data_fields=["x"], batch_size=COUNT, lease=60)
    await client.release(meta.select_samples([REFUSED]))
    return meta


async def with_a_written_cell(client, name):
    await client.create_partition(name, fields=[tq.FieldSpec("y", write_once=True)])
    meta = await with_known_keys(client, name)
    await client.put(meta.select_samples([REFUSED]), {"y": np.zeros((1, 2), np.int64)})
    return meta


async def with_y(client, name):
    meta = await with_known_keys(client, name)
    await client.put(meta.select_samples([REFUSED]), {"y": np.zeros((1, 2), np.int64)})
    await client.seal_partition(name)
    return meta


async def with_a_closed_group(client, name):
    await client.put(name, {"x": np.arange(1)}, groups=["closed"])
    await client.close_groups(name, ["closed"])


async def with_a_larger_group(client, name):
    await client.put(name, {"x": np.arange(1)}, groups=["larger"], group_size=3)


async def with_a_declared_field(client, name):
    await client.create_partition(name, fields=[tq.FieldSpec("y", "int64", "dense", (2,))])


async def with_an_admission(client, name):
    await client.create_partition(name, admissions=[tq.Admission("t", 1, "group")])
    await client.put(name, {"x": np.arange(1)}, groups=["begun"])


def row(number):
    return {"y": np.full((1, 2), number)}


# What is there before, and what each caller puts: the one in the middle is refused.
REFUSALS = {
    "known key": (
        with_known_keys,
        lambda n, meta: {"keys": [f"new{n}" if n != REFUSED else "known0"], "key_mode": "new"},
    ),
    "unknown key": (
        with_known_keys,
        lambda n, meta: {"keys": [f"known{n}" if n != REFUSED else "other"], "key_mode": "existing"},
    ),
    "empty key": (with_known_keys, lambda n, meta: {"keys": [f"new{n}" if n != REFUSED else ""]}),
    "key that is no text": (with_known_keys, lambda n, meta: {"keys": [f"new{n}" if n != REFUSED else "\ud800"]}),
    "full group": (with_groups, lambda n, meta: {"groups": [f"g{n}" if n != REFUSED else "full"], "group_size": 2}),
    "other group": (
        with_groups,
        lambda n, meta: {"keys": [f"k{n}" if n != REFUSED else "c"], "groups": [f"g{n}"], "group_size": 2},
    ),
    "closed group": (with_a_closed_group, lambda n, meta: {"groups": [f"g{n}" if n != REFUSED else "closed"]}),
    "other group size": (
        with_a_larger_group,
        lambda n, meta: {"groups": [f"g{n}" if n != REFUSED else "larger"], "group_size": 2},
    ),
    "key twice": (
        with_known_keys,
        lambda n, meta: {"data": {"y": np.full((2, 2), n)}, "keys": [f"a{n}", f"b{n}" if n != REFUSED else f"a{n}"]},
    ),
    "other shape": (
        with_a_declared_field,
        lambda n, meta: {"data": {"y": np.full((1, 2 if n != REFUSED else 3), n)}},
    ),
    "admission": (
        with_an_admission,
        lambda n, meta: {
            "groups": ["begun" if n != REFUSED else "one too many"],
            "timeout": 60 if n != REFUSED else 3,  # it waits for the limit; a quarter is left for the answer
        },
    ),
    "cleared": (with_a_cleared_sample, lambda n, meta: {"target": meta.select_samples([n])}),
    "failed": (with_a_failed_sample, lambda n, meta: {"target": meta.select_samples([n]), "state": "live"}),
    "sealed": (sealed, lambda n, meta: {"keys": [f"known{n}" if n != REFUSED else "new"]}),
    "sealed field": (with_y, lambda n, meta: {"keys": [f"known{n}"]}),
    "second value": (with_a_written_cell, lambda n, meta: {"target": meta.select_samples([n])}),
    "lease": (leased, lambda n, meta: {"target": meta.select_samples([n])}),
    "acknowledgement": (leased, lambda n, meta: {"target": meta.select_samples([n]), "ack": True}),
}


async def outcomes_of(client, name, partition_id, return_meta, *, gathers):
    """Return what each caller sees where one of them is refused: at the same moment, or one after the other."""
    prepare, call = REFUSALS[name]
    meta = await prepare(client, partition_id)
    calls = [
        {"data": row(number), "return_meta": return_meta, "target": partition_id, **call(number, meta)}
        for number in range(COUNT)
    ]
    getattr(client, "client", client).gathers_puts = gathers
    if gathers:
        sent, outcomes = await at_once(client, calls)
        assert max(sent.row_counts) > len(call(0, meta).get("keys", [0]))
        return outcomes
    return [(await asyncio.gather(client.put(**each), return_exceptions=True))[0] for each in calls]


async def values_of(client, outcomes):
    """Return the rows of each caller whose put was made."""
    return [
        (await client.get_data(each, data_fields=["y"]))["y"].tolist()
        for each in outcomes
        if not isinstance(each, Exception)
    ]


def assert_alike(gathered, alone):
    assert list(map(seen, gathered)) == list(map(seen, alone))
    assert [number for number, each in enumerate(gathered) if isinstance(each, Exception)] == [REFUSED]
