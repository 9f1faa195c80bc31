"""The loop of a queue worker: every sample is worked on once, whatever its body does."""

import asyncio
import contextlib

import pytest
from client_support import next_item

import tq_service as tq
from tq_service.client import AsyncWork


@pytest.fixture(params=["async", "sync"])
def kind(request):
    return request.param


PARTITION = "train"
TEXTS = [f"answer {number}" for number in range(7)]


@pytest.fixture
async def filled(client):
    await client.put(PARTITION, {"text": TEXTS})
    await client.seal_partition(PARTITION)
    return client


def loop_of(client, **options):
    return client.work(PARTITION, "reward", ["text"], **{"batch_size": 3, "lease": 30, **options})


async def close(work):
    await (work.aclose() if isinstance(work, AsyncWork) else asyncio.to_thread(work.close))


async def texts_left(client, **options):
    """Return what another worker still gets, until the end."""
    work, found = loop_of(client, **options), []
    while (item := await next_item(work)) is not None:
        found += item.data["text"]
        assert set(item.meta.delivery_counts) <= {1, 2}
    return found


async def task_of(client):
    (task,) = (await client.describe_partition(PARTITION)).tasks
    return task


async def test_each_sample_is_scored_and_acknowledged_once(filled):
    work, found = loop_of(filled), []
    while (item := await next_item(work)) is not None:
        found += item.data["text"]
        await item.put(
            {"reward": [float(len(text)) for text in item.data["text"]]},
            custom_meta=[{"by": "me"}] * len(item.data["text"]),
        )
        task = await task_of(filled)
        assert (task.leased_count, task.consumed_count) == (0, len(found)), "put acknowledges at once"
    assert found == TEXTS
    assert await next_item(work) is None, "it has ended for good"
    assert (await filled.check_production(PARTITION, ["reward"])).complete
    scored, _ = await filled.lookup_samples(PARTITION)
    assert scored.custom_meta == [{"by": "me"}] * len(TEXTS)


async def test_an_item_without_results_is_acknowledged_by_the_next_iteration(filled):
    work = loop_of(filled)
    await next_item(work)
    assert ((await task_of(filled)).leased_count, (await task_of(filled)).consumed_count) == (3, 3)
    await next_item(work)
    assert (await task_of(filled)).leased_count == 3
    while await next_item(work) is not None:
        pass
    assert (await task_of(filled)).leased_count == 0
    assert await texts_left(filled) == []


async def test_several_results_of_an_item_end_with_the_one_that_acknowledges(filled):
    item = await next_item(loop_of(filled))
    await item.put({"reward": [0.0] * 3}, ack=False)
    assert (await task_of(filled)).leased_count == 3
    await item.put({"length": [1.0] * 3})
    assert (await task_of(filled)).leased_count == 0


async def test_the_lease_lasts_as_long_as_the_body(filled):
    work = loop_of(filled, lease=3)
    item = await next_item(work)
    await asyncio.sleep(3.5)
    other = await filled.get_meta(
        partition_id=PARTITION, task_name="reward", data_fields=["text"], batch_size=7, min_batch_size=1, max_wait=0
    )
    assert other.size == len(TEXTS) - 3
    await item.put({"reward": [0.0] * 3})
    assert await next_item(work) is None


async def test_a_body_that_raises_leaves_its_samples_to_others(filled):
    with contextlib.suppress(ZeroDivisionError):
        async with closing(loop_of(filled, lease=0.5)) as work:
            item = await next_item(work)
            raise ZeroDivisionError
    assert len(item.data["text"]) == 3
    assert sorted(await texts_left(filled, max_deliveries=2)) == TEXTS, "redelivered once the lease has expired"


async def test_a_loop_that_is_dropped_does_not_extend_its_lease(filled):
    await next_item(loop_of(filled, lease=0.5))
    assert sorted(await texts_left(filled)) == TEXTS


@contextlib.asynccontextmanager
async def closing(work):
    """A `with` block of either form."""
    if isinstance(work, AsyncWork):
        async with work:
            yield work
        return
    try:
        yield work
    except BaseException as error:
        await asyncio.to_thread(work.__exit__, type(error), error, None)
        raise
    await asyncio.to_thread(work.__exit__, None, None, None)


async def test_a_break_releases_the_current_item_alone(filled):
    async with closing(loop_of(filled)) as work:
        await next_item(work)
        second = await next_item(work)
    assert (await task_of(filled)).leased_count == 0
    assert await texts_left(filled) == [*second.data["text"], TEXTS[-1]]


async def test_samples_may_be_returned_or_failed(filled):
    work = loop_of(filled)
    first = await next_item(work)
    await first.release()
    second = await next_item(work)
    assert second.data["text"] == first.data["text"], "at once, and as if it had not been delivered"
    assert set(second.meta.delivery_counts) == {1}
    await second.fail()
    assert await texts_left(filled) == TEXTS[3:]


async def test_results_after_the_lease_are_refused_and_counted(filled):
    work = loop_of(filled, lease=0.4, max_lease=0)
    late = await next_item(work)
    await asyncio.sleep(0.5)
    other = loop_of(filled)
    assert (await next_item(other)).data["text"] == late.data["text"]
    with pytest.raises(tq.errors.LeaseExpiredError):
        await late.put({"reward": [0.0] * 3})
    assert work.lost_count == 0
    assert (await next_item(work)).data["text"] == TEXTS[3:6]
    assert work.lost_count == 1


async def test_what_cannot_be_fetched_is_claimable_again(filled):
    work = loop_of(filled, fetch=["nothing"])
    with pytest.raises(tq.errors.NotFoundError, match="nothing"):
        await next_item(work)
    assert await texts_left(filled) == TEXTS


async def test_a_lease_of_no_time_is_refused(client):
    with pytest.raises(tq.errors.InvalidArgumentError, match="lease is 0"):
        client.work(PARTITION, "reward", ["text"], lease=0)


async def test_closing_a_loop_that_has_not_begun_does_nothing(filled):
    await close(loop_of(filled))
    assert await texts_left(filled) == TEXTS


async def test_the_sync_loop_reads_as_a_loop(service):
    def run():
        with tq.Client(service, timeout=20) as client:
            client.put("sync", {"text": TEXTS})
            client.seal_partition("sync")
            for item in client.work("sync", "reward", ["text"], batch_size=2):
                item.put({"reward": [float(len(text)) for text in item.data["text"]]})
            return client.check_consumption("sync", "reward").consumed_count

    assert await asyncio.to_thread(run) == len(TEXTS)


async def test_a_batch_comes_with_its_data(filled):
    ask = {"batch_size": 4, "dp_rank": 0, "dp_size": 1, "max_wait": 0}
    data, batch = await filled.get_batch(PARTITION, "train", ["text"], **ask, batch_index=0)
    assert (data["text"], batch.status) == (TEXTS[:4], "batch")
    assert (await filled.claim(PARTITION, "train", ["text"], **ask, batch_index=0)).global_indexes == [0, 1, 2, 3]
    data, batch = await filled.get_batch(PARTITION, "train", ["reward"], **ask, batch_index=1)
    assert (data, batch.status) == (None, "not_yet")


async def test_a_batch_has_the_fields_that_are_asked_for(filled):
    everything, _ = await filled.lookup_samples(PARTITION)
    await filled.put(everything, {"reward": [0.5] * len(TEXTS)})
    ask = {"batch_size": 7, "dp_rank": 0, "dp_size": 1, "batch_index": 0}
    data, _ = await filled.get_batch(PARTITION, "train", ["text", "reward"], fetch=["reward"], **ask)
    assert set(data.keys()) == {"reward"}
    with pytest.raises(tq.errors.InvalidArgumentError, match="get_batch does not accept batch_count"):
        await filled.get_batch(PARTITION, "train", ["text"], **ask, batch_count=2)


async def test_tags_are_the_custom_meta_of_samples_by_key(client):
    await client.put("p", {"x": [1, 2]}, keys=["a", "b"], custom_meta=[{"score": 1}, {"score": 2}])
    await client.put("p", {"x": [3]})
    assert await client.tags("p") == {"a": {"score": 1}, "b": {"score": 2}}
    assert await client.tags("p", ["b", "c"]) == {"b": {"score": 2}}
    with pytest.raises(tq.errors.PartitionNotFoundError):
        await client.tags("q")
