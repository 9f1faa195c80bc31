"""Each loop of examples/async has the semantics of the framework whose names it has, and at most 40 lines of code."""

from __future__ import annotations

import ast
import asyncio
import importlib.util
import random
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import tq_service as tq
from tq_service.testing import ServiceProcess

LOOPS = Path(__file__).parents[2] / "examples" / "async"
FRAMEWORKS = ["areal", "nemo_rl", "prime_rl", "torchtitan", "verl"]
MOMENT = 0.2


def load(framework: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"loop_of_{framework}", LOOPS / f"{framework}.py")
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)  # dataclasses look there
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    with ServiceProcess(env={"PYTHONPATH": str(LOOPS)}) as process:  # where it imports the sampler from
        yield process.address


@pytest.fixture
def client(address: str, request: pytest.FixtureRequest) -> Iterator[tq.Client]:
    with tq.Client(address, namespace=request.node.name.partition("[")[0]) as client:
        yield client


def test_each_has_at_most_40_lines_of_code() -> None:
    assert sorted(path.stem for path in LOOPS.glob("*.py")) == FRAMEWORKS
    assert {
        name: count for name in FRAMEWORKS if (count := lines_of_code((LOOPS / f"{name}.py").read_text())) > 40
    } == {}


def lines_of_code(source: str) -> int:
    """Return how many lines are neither blank, nor a comment, an import or a docstring."""
    left_out = {line for line, text in enumerate(source.splitlines(), 1) if not text.split("#")[0].strip()}
    for node in ast.walk(ast.parse(source)):
        is_docstring = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        if isinstance(node, ast.stmt) and (is_docstring or isinstance(node, ast.Import | ast.ImportFrom)):
            left_out |= set(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return len(source.splitlines()) - len(left_out)


# AReaL


@pytest.mark.parametrize(("max_staleness", "concurrent", "seed"), [(0, 100, 1), (1, 100, 2), (2, 5, 3), (4, 7, 4)])
def test_areal_capacity_is_that_of_its_formula(address: str, max_staleness: int, concurrent: int, seed: int) -> None:
    """Random submissions, results, rejections and versions; batches of 4, one for each version."""
    areal, rng, batch_size, version, accepted = load("areal"), random.Random(seed), 4, 0, 0
    with tq.Client(address, namespace=f"areal-{seed}") as client:
        client.publish_version(0)
        manager = areal.StalenessManager(client, concurrent, batch_size, max_staleness)
        assert manager.get_pending_limit() == (max_staleness + 1) * batch_size
        running: list[tq.BatchMeta] = []
        for _ in range(150):
            formula = (max_staleness + version + 1) * batch_size - (accepted + len(running))
            capacity = min(concurrent - len(running), formula)
            assert manager.get_capacity() == capacity
            fate = rng.random()
            if fate < 0.5:
                slot = manager.on_rollout_submitted()
                assert (slot is not None) == (capacity > 0)
                running += [slot] if slot is not None else []
            elif fate < 0.9 and running:
                slot = running.pop(rng.randrange(len(running)))
                if rng.random() < 0.7:
                    manager.on_rollout_accepted(slot, {"x": [0]})
                    accepted += 1
                else:
                    manager.on_rollout_rejected(slot)
            else:
                batch = client.get_meta(
                    partition_id=areal.PARTITION, task_name=areal.ACTOR, data_fields=["x"], batch_size=batch_size,
                    dp_rank=0, dp_size=1, batch_index=version, max_wait=0,
                )  # fmt: skip
                if batch.status == "batch":
                    assert all(version - row["start_version"] <= max_staleness for row in batch.custom_meta)
                    client.publish_version(version + 1, trained={(areal.PARTITION, areal.ACTOR): version})
                    version += 1
        assert version > 3


# torchtitan


def test_torchtitan_places_come_back_with_the_release_alone(address: str) -> None:
    async def scene() -> None:
        async with tq.AsyncClient(address, namespace="titan-places") as client:
            buffer = load("torchtitan").RolloutGroupWorkBuffer(client, group_size=2)
            await buffer.open(2)
            for group_id in range(2):
                await buffer.add_work(group_id, f"question {group_id}")
            with pytest.raises(tq.errors.AdmissionLimitError):
                await buffer.add_work(2, "question 2", timeout=MOMENT)
            taken = []
            for group_id in range(2):
                work = await buffer.claim_next()
                assert work.groups == [str(group_id)] * 2
                assert (await client.get_data(work))["sample"] == [f"question {group_id}"] * 2
                await buffer.finalize_work(work, {"response": [[group_id], [1, 2]]})
                taken.append(await buffer.take_finalized(["response"]))
            third = asyncio.ensure_future(buffer.add_work(2, "question 2"))
            await asyncio.sleep(MOMENT)
            assert not third.done()  # taking a group frees no place
            await buffer.release_active_groups(taken[0])
            await third
            with pytest.raises(tq.errors.AdmissionLimitError):
                await buffer.add_work(3, "question 3", timeout=MOMENT)

    asyncio.run(scene())


@pytest.mark.parametrize(("window_size", "takeable"), [(1, []), (2, [1]), (3, [1, 2])])
def test_torchtitan_window_is_anchored_at_the_oldest_group(address: str, window_size: int, takeable: list[int]) -> None:
    """Groups 1 to 4 are finalized, group 0 is not; taking a group does not move the window."""

    async def scene() -> None:
        async with tq.AsyncClient(address, namespace=f"titan-window-{window_size}") as client:
            buffer = load("torchtitan").RolloutGroupWorkBuffer(client, group_size=2, window_size=window_size)
            await buffer.open(5)
            for group_id in range(5):
                await buffer.add_work(group_id, "")
            works = [await buffer.claim_next() for _ in range(5)]
            for work in works[:0:-1]:
                await buffer.finalize_work(work, {"response": [0, 0]})
            assert await taken(buffer) == takeable
            await buffer.finalize_work(works[0], {"response": [0, 0]})
            assert await taken(buffer) == [each for each in range(5) if each not in takeable]

    async def taken(buffer: Any) -> list[int]:
        ids = []
        while (group := await buffer.take_finalized(["response"], max_wait=0)) is not None:
            ids.append(group.custom_meta[0]["group_id"])
        return ids

    asyncio.run(scene())


def test_torchtitan_close_ends_all_waits(address: str) -> None:
    async def scene() -> None:
        async with tq.AsyncClient(address, namespace="titan-close") as client:
            buffer = load("torchtitan").RolloutGroupWorkBuffer(client, group_size=2)
            await buffer.open(2)
            await buffer.add_work(0, "")
            work = await buffer.claim_next()
            waits = [asyncio.ensure_future(each) for each in (buffer.claim_next(), buffer.take_finalized(["response"]))]
            await asyncio.sleep(MOMENT)
            await buffer.close()
            assert await asyncio.gather(*waits) == [None, None]
            await buffer.finalize_work(work, {"response": [0, 0]})  # dropped
            assert (await client.describe_partition("work")).live_count == 0

    asyncio.run(scene())


# verl


def put_prompts(client: tq.Client, count: int) -> None:
    names = [f"p{number}" for number in range(count)]
    client.put("prompts", {"prompt": list(range(count))}, keys=names)


def start(client: tq.Client, rollout_n: int = 2) -> tq.BatchMeta:
    """Claim the next prompt, with the slots of its trajectories."""
    return client.get_meta(
        partition_id="prompts", task_name="rollout", data_fields=["prompt"], batch_size=1, lease=60.0, max_wait=0,
        admit=tq.Admit("train", group_size=rollout_n, on_lost="remove"),
    )  # fmt: skip


def finish(client: tq.Client, prompt: tq.BatchMeta, **meta: float) -> None:
    assert prompt.admitted is not None
    size = prompt.admitted.size
    client.put(prompt.admitted, {"response": [0] * size}, custom_meta=[meta] * size if meta else None, ack=True)


def make_buffer(client: tq.Client, strategy: str, threshold: int, **options: Any) -> Any:
    return load("verl").ReplayBuffer(
        client,
        batch_size=1,
        rollout_n=2,
        max_off_policy_threshold=threshold,
        max_off_policy_strategy=strategy,
        **options,
    )


def groups_of(batch: tq.BatchMeta) -> list[str | None]:
    return list(dict.fromkeys(batch.groups))


def test_verl_waits_for_prompts_at_the_threshold(client: tq.Client) -> None:
    buffer = make_buffer(client, "wait", threshold=2)
    put_prompts(client, 3)
    slow, first = start(client), start(client)
    finish(client, first)
    batch, _ = buffer.sample(1, ["response"], 10)
    assert groups_of(batch) == ["p1"]  # step 1: p0 would span one version
    second = start(client)
    assert second.status == "not_yet"  # two batches are outstanding
    assert buffer.sample(2, ["response"], 0)[0].status == "not_yet"
    finish(client, start(client))
    assert buffer.sample(2, ["response"], 0)[0].status == "not_yet"  # p2 is finished, but p0 spans two versions
    finish(client, slow)
    batch, evicted = buffer.sample(2, ["response"], 10)
    assert (groups_of(batch), evicted) == (["p0"], {})


def test_verl_drops_and_refills_what_is_too_late(client: tq.Client) -> None:
    buffer = make_buffer(client, "drop", threshold=2)
    put_prompts(client, 3)
    slow, first = start(client), start(client)
    finish(client, first)
    assert groups_of(buffer.sample(1, ["response"], 10)[0]) == ["p1"]
    assert buffer.sample(2, ["response"], 0)[0].status == "not_yet"
    finish(client, start(client))
    batch, evicted = buffer.sample(2, ["response"], 10)
    assert (groups_of(batch), evicted) == (["p2"], {"training/off_policy/evicted_samples": 1})
    with pytest.raises(tq.errors.NotFoundError):
        finish(client, slow)
    client.release(slow)
    finish(client, start(client))
    batch, evicted = buffer.sample(3, ["response"], 10)
    assert (groups_of(batch), evicted) == (["p0"], {})
    assert {row["start_version"] for row in batch.custom_meta} == {2}


def test_verl_replaces_failed_and_filtered_groups(client: tq.Client) -> None:
    buffer = make_buffer(client, "drop", threshold=3, filter_groups_metric="reward_std")
    put_prompts(client, 3)
    failed, equal, good = (start(client) for _ in range(3))
    assert failed.admitted is not None
    client.put(failed.admitted.select_samples([0]), state="failed")
    rest = failed.admitted.select_samples([1])
    client.put(rest, {"response": [0]}, custom_meta=[{"reward_std": 1.0}], ack=True)
    client.ack(failed)  # with a failed slot it is not finished by itself
    finish(client, equal, reward_std=0.0)
    finish(client, good, reward_std=0.5)
    batch, evicted = buffer.sample(1, ["response"], 10)
    assert groups_of(batch) == ["p2"]
    assert evicted == {
        "training/rollout_failure/evicted_samples": 1, "training/filter_groups/evicted_samples": 1,
    }  # fmt: skip
    again = [start(client) for _ in range(2)]
    assert sorted(prompt.keys[0] or "" for prompt in again) == ["p0", "p1"]


# prime-rl


def test_prime_rl_holds_gate_and_batch_until_the_version(address: str) -> None:
    async def scene() -> None:
        async with tq.AsyncClient(address, namespace="prime-hold") as client:
            orchestrator = load("prime_rl").Orchestrator(client, batch_size=2, max_off_policy_steps=8)
            await client.create_partition("train")
            await orchestrator.on_new_version(0)
            for number in range(3):  # ready before the gate closes
                await orchestrator.finish(await orchestrator.dispatch(f"g{number}", 2), {"trace": [0, 0]})
            assert await orchestrator.finalize_train_batch(["trace"]) is not None  # batches 1 and 2 need version 0
            assert await orchestrator.finalize_train_batch(["trace"]) is not None
            assert orchestrator.step == 3
            assert await orchestrator.dispatch("g3", 2, max_wait=0) is None
            assert await orchestrator.finalize_train_batch(["trace"], max_wait=0) is None
            held = asyncio.ensure_future(orchestrator.finalize_train_batch(["trace"]))
            await asyncio.sleep(MOMENT)
            assert not held.done()
            await orchestrator.on_new_version(1)
            assert (await held).size == 2

    asyncio.run(scene())


def test_prime_rl_sweeps_traces_that_are_too_stale(address: str) -> None:
    """Batch N takes traces from version N - 1 - 2 on: also ones that finish late."""

    async def scene() -> None:
        async with tq.AsyncClient(address, namespace="prime-sweep") as client:
            orchestrator = load("prime_rl").Orchestrator(client, batch_size=2, max_off_policy_steps=2)
            await client.create_partition("train")
            await orchestrator.on_new_version(0)
            late = await orchestrator.dispatch("late", 2)
            queued = await orchestrator.dispatch("queued", 4)
            for step in range(1, 4):
                fresh = await orchestrator.dispatch(f"fresh{step}", 2)
                await orchestrator.finish(fresh, {"trace": [0, 0]})
                assert (await orchestrator.finalize_train_batch(["trace"])).groups == [f"fresh{step}"] * 2
                await orchestrator.on_new_version(step)
            await orchestrator.finish(queued, {"trace": [0] * 4})
            assert await orchestrator.finalize_train_batch(["trace"], max_wait=0) is None
            assert (await client.describe_partition("train")).held_count == 2
            await orchestrator.finish(late, {"trace": [0, 0]})
            assert await orchestrator.finalize_train_batch(["trace"], max_wait=0) is None
            evicted = (await client.take_evicted("train", "train")).units
            assert sorted({unit.group for unit in evicted}) == ["late", "queued"]
            assert {unit.reason for unit in evicted} == {"unmatched"}

    asyncio.run(scene())


# NeMo-RL


async def generated(client: tq.AsyncClient, sampler: Any, group: str, target_step: int | None = None) -> None:
    slots = await sampler.reserve(group, 2, target_step)
    await client.put(slots, {"x": [0, 0]}, ack=True)


async def selected(sampler: Any, current: int, most: int = 9) -> list[str | None]:
    batch = await sampler.select(current, 1, most, ["x"])
    return [] if batch is None else groups_of(batch)


@asynccontextmanager
async def sampler_of(
    address: str, name: str, policy: str, window: int, **options: Any
) -> AsyncIterator[tuple[Any, tq.AsyncClient]]:
    async with tq.AsyncClient(address, namespace=f"nemo-{name}") as client:
        await client.create_partition("train", tasks=["train", "rollout"])
        await client.publish_version(0)
        yield load("nemo_rl").PromptGroupSampler(client, policy, window, **options), client


async def at_versions(client: tq.AsyncClient, sampler: Any, count: int) -> None:
    """Generate group v<n> at each version n, and reserve one that is not finished."""
    for version in range(count):
        await client.publish_version(version)
        await generated(client, sampler, f"v{version}")
        await sampler.reserve(f"unfinished{version}", 2, None)


@pytest.mark.parametrize(
    ("options", "order"), [({}, ["v1", "v2", "v3"]), ({"freshest_first": True}, ["v3", "v2", "v1"])]
)
def test_nemo_rl_windowed(address: str, options: dict[str, bool], order: list[str]) -> None:
    async def scene() -> None:
        async with sampler_of(address, f"windowed-{len(options)}", "windowed", 2, **options) as (sampler, client):
            assert [await sampler.admit(max_wait=0) for _ in range(5)] == [None] * 5  # never waits
            await at_versions(client, sampler, 4)
            assert await sampler.select(3, 4, 9, ["x"]) is None  # three are in the window
            assert await sampler.evict(3) == 2  # v0, not what is unfinished
            assert [sampler.should_abort_inflight(version, 3) for version in range(3)] == [True, False, False]
            assert await selected(sampler, 3, most=2) == order[:2]
            assert await selected(sampler, 3) == order[2:]

    asyncio.run(scene())


@pytest.mark.parametrize("policy", ["ready_first", "weight_fifo", "in_order"])
def test_nemo_rl_admits_one_batch_for_each_version(address: str, policy: str) -> None:
    async def scene() -> None:
        async with sampler_of(address, f"admits-{policy}", policy, 1) as (sampler, client):
            steps = [await sampler.admit(max_wait=0) for _ in range(2)]
            assert steps == ([0, 1] if policy == "in_order" else [None, None])
            with pytest.raises(TimeoutError):
                await sampler.admit(max_wait=0)
            assert sampler.dispatch_index == 1
            waiting = asyncio.ensure_future(sampler.admit())
            await asyncio.sleep(MOMENT)
            assert not waiting.done()
            await client.publish_version(1)
            await waiting
            assert sampler.dispatch_index == 2

    asyncio.run(scene())


def test_nemo_rl_ready_first_drops_nothing(address: str) -> None:
    async def scene() -> None:
        async with sampler_of(address, "drops-nothing", "ready_first", 1) as (sampler, client):
            await at_versions(client, sampler, 4)
            assert await sampler.evict(9) == 0
            assert await selected(sampler, 9) == ["v0", "v1", "v2", "v3"]

    asyncio.run(scene())


def test_nemo_rl_weight_fifo_drains_one_version_after_the_other(address: str) -> None:
    async def scene() -> None:
        async with sampler_of(address, "fifo", "weight_fifo", 1) as (sampler, client):
            await generated(client, sampler, "old")
            slow = await sampler.reserve("slow", 2, None)
            await client.publish_version(1)
            await generated(client, sampler, "new")
            assert await selected(sampler, 1) == ["old"]
            assert await selected(sampler, 1) == []  # "slow" is of the oldest version, and not ready
            await client.put(slow, {"x": [0, 0]}, ack=True)
            assert await selected(sampler, 1) == ["slow"]
            assert await selected(sampler, 1) == ["new"]
            await client.publish_version(2)
            await generated(client, sampler, "late")
            assert await sampler.evict(4) == 2

    asyncio.run(scene())


def test_nemo_rl_in_order_takes_the_batch_of_its_step(address: str) -> None:
    async def scene() -> None:
        async with sampler_of(address, "order", "in_order", 2) as (sampler, client):
            for group in ("a", "b", "c"):
                await generated(client, sampler, group, await sampler.admit(max_wait=0))
            assert await selected(sampler, 1) == ["b"]
            assert await sampler.evict(1) == 2  # that of step 0
            assert await selected(sampler, 0) == []
            assert await selected(sampler, 2) == ["c"]

    asyncio.run(scene())
