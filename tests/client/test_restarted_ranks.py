"""Ranks of a task that are replaced, or go on in another number, through a real server with both clients."""

import pytest
import torch
from client_support import make_client

import tq_service as tq
from tq_service.config import ServeSettings
from tq_service.server.app import running

CLAIM = {"partition_id": "p", "task_name": "train", "data_fields": ["x"], "max_wait": 0.0}


async def put(client, count, **arguments):
    await client.put("p", {"x": torch.arange(count)}, **arguments)
    await client.seal_partition("p")


async def batch(client, index, dp_size, size, **arguments):
    """Return the samples of each rank."""
    asks = {**CLAIM, "batch_size": size, "batch_index": index, "dp_size": dp_size, **arguments}
    return [(await client.get_meta(**asks, dp_rank=rank)).global_indexes for rank in range(dp_size)]


async def task_of(client):
    (task,) = (await client.describe_partition("p")).tasks
    return task


async def test_what_was_trained_stays_and_the_rest_is_planned_anew_for_the_new_ranks(client):
    await put(client, 24)
    assert [await batch(client, index, 2, 2) for index in range(4)] == [
        [[0, 1], [2, 3]], [[4, 5], [6, 7]], [[8, 9], [10, 11]], [[12, 13], [14, 15]]
    ]  # fmt: skip
    await client.advance("p", "train", trained=1, saved=0)
    restarted = await client.restart_ranks("p", "train", dp_size=3)
    assert (restarted.epoch, restarted.batch_index) == (1, 2)
    task = await task_of(client)
    assert (task.consumed_count, task.pending_count, task.dp_size, task.planned_batch_count) == (8, 16, 3, 2)
    assert (task.trained_batch_count, task.saved_batch_count) == (2, 1)
    assert await batch(client, 2, 3, 2, epoch=1) == [[8, 9], [10, 11], [12, 13]]
    assert await batch(client, 3, 3, 2) == [[14, 15], [16, 17], [18, 19]]
    assert await batch(client, 4, 3, 2) == [[20, 21], [22], [23]]
    end = await client.get_meta(**CLAIM, batch_size=2, batch_index=5, dp_rank=0, dp_size=3)
    assert (end.status, end.end.consumed_count, end.end.skipped_count) == ("end", 24, 0)


async def test_the_ranks_before_are_refused(client):
    await put(client, 12)
    before = await client.get_meta(**CLAIM, batch_size=2, batch_index=0, dp_rank=0, dp_size=2)
    await client.advance("p", "train", trained=0)
    await client.restart_ranks("p", "train", dp_size=2)
    with pytest.raises(tq.errors.StaleEpochError) as raised:
        await client.get_meta(**CLAIM, batch_size=2, batch_index=1, dp_rank=0, dp_size=2, epoch=before.epoch)
    assert (raised.value.metadata["got"], raised.value.metadata["expected"]) == ("0", "1")
    with pytest.raises(tq.errors.StaleEpochError):
        await client.advance("p", "train", trained=0, epoch=0)
    await client.restart_ranks("p", "train", dp_size=4)
    with pytest.raises(tq.errors.RankDisagreementError, match=r"dp_size of this epoch .* is 4, got 2"):
        await client.get_meta(**CLAIM, batch_size=2, batch_index=1, dp_rank=0, dp_size=2)
    with pytest.raises(
        tq.errors.RankDisagreementError, match=r"batch_index 0, which was planned before .* is 2, got 4"
    ):
        await client.get_meta(**CLAIM, batch_size=2, batch_index=0, dp_rank=3, dp_size=4)


async def test_each_of_the_new_ranks_may_ask_and_the_first_one_restarts_them(client):
    await put(client, 12)
    for index in range(3):
        await batch(client, index, 2, 2)
    first = await client.restart_ranks("p", "train", dp_size=1, trained=0, epoch=0)
    assert (first.epoch, first.batch_index) == (1, 1)
    assert await batch(client, 1, 1, 2) == [[4, 5]]
    late = await client.restart_ranks("p", "train", dp_size=1, trained=0, epoch=0)
    assert late == first
    assert await batch(client, 1, 1, 2) == [[4, 5]]
    other = await client.restart_ranks("p", "train", dp_size=3, trained=0, epoch=0)  # which crashed before it saved
    assert (other.epoch, other.batch_index) == (2, 1)
    assert await batch(client, 1, 3, 1) == [[4], [5], [6]]
    with pytest.raises(tq.errors.StaleEpochError):
        await client.restart_ranks("p", "train", dp_size=3, trained=0, epoch=3)


async def test_they_may_go_back_behind_what_was_trained_while_its_samples_are_stored(client):
    await put(client, 8)
    for index in range(4):
        await batch(client, index, 1, 2)
    await client.advance("p", "train", trained=3, saved=2)
    await client.clear_samples("p", global_indexes=[0, 1, 2])
    restarted = await client.restart_ranks("p", "train", dp_size=2, trained=0)
    assert restarted.batch_index == 1
    assert await batch(client, 1, 2, 1) == [[3], [4]]
    task = await task_of(client)
    assert (task.trained_batch_count, task.saved_batch_count, task.consumed_count) == (1, 1, 4)


async def test_a_batch_that_was_never_planned_is_refused_and_changes_nothing(client):
    await put(client, 8)
    await batch(client, 0, 1, 2)
    for wrong in ({"trained": 1}, {"trained": -2}):
        with pytest.raises(tq.errors.InvalidArgumentError, match="expected -1 to 0") as raised:
            await client.restart_ranks("p", "train", dp_size=2, **wrong)
        assert raised.value.field == "trained"
    with pytest.raises(tq.errors.InvalidArgumentError) as raised:
        await client.restart_ranks("p", "train", dp_size=0)
    assert raised.value.field == "dp_size"
    assert (await task_of(client)).epoch == 0
    assert (await client.restart_ranks("p", "train", dp_size=2, trained=-1)).batch_index == 0
    assert await batch(client, 0, 2, 2) == [[0, 1], [2, 3]]


async def test_groups_and_dropped_samples_come_again_whole(client):
    groups, lengths = (
        [f"g{row // 2}" for row in range(12)],
        [{"total_lengths": 100 if row == 2 else 1} for row in range(12)],
    )
    await put(client, 12, groups=groups, group_size=2, custom_meta=lengths)
    packed = {
        "sampler": "packed",
        "sampler_config": {"pack_max_length": 8, "n_samples_per_prompt": 2, "overlong": "drop", "optimizer_steps": 1},
        "batch_unit": "group",
    }
    first = await client.get_meta(**CLAIM, **packed, batch_size=3, batch_index=0, dp_rank=0, dp_size=1)
    assert list(first.dropped_indexes) == [2]
    assert (await task_of(client)).skipped_count == 1
    await client.restart_ranks("p", "train", dp_size=2, trained=-1)
    assert ((await task_of(client)).skipped_count, (await task_of(client)).pending_count) == (0, 12)
    plans = [
        await client.get_meta(**CLAIM, **packed, batch_size=3, batch_index=0, dp_rank=rank, dp_size=2)
        for rank in (0, 1)
    ]
    assert sorted(index for plan in plans for index in plan.global_indexes) == [0, 1, *range(3, 12)]
    assert [index for plan in plans for index in plan.dropped_indexes] == [2]


async def test_it_outlives_the_process(kind, tmp_path):
    settings = ServeSettings(host="127.0.0.1", port=0, data_dir=tmp_path)
    async with running(settings) as app:
        client = make_client(kind, f"127.0.0.1:{app.port}", timeout=20)
        await put(client, 12)
        for index in range(3):
            await batch(client, index, 2, 2)
        await client.restart_ranks("p", "train", dp_size=3, trained=0)
        assert await batch(client, 1, 3, 2) == [[4, 5], [6, 7], [8, 9]]
        await client.aclose()
    for _ in range(2):
        async with running(settings) as app:
            client = make_client(kind, f"127.0.0.1:{app.port}", timeout=20)
            task = await task_of(client)
            assert (task.epoch, task.dp_size, task.planned_batch_count, task.pending_count) == (1, 3, 2, 2)
            assert await batch(client, 1, 3, 2) == [[4, 5], [6, 7], [8, 9]]
            await client.aclose()
