"""Look-ups that wait for a number of samples: they end when there are so many, and look at few rows until then."""

import asyncio

import numpy as np
import pytest
from domain_support import meta, new_write, seal, set_meta, turns
from hypothesis import given
from hypothesis import strategies as st
from property_settings import examples

from tq_service.errors import InvalidArgumentError, PartitionClearedError, UnavailableError
from tq_service.machine.samples import SamplesCleared
from tq_service.samplers import PlanRunner
from tq_service.serving.catalog import Catalog
from tq_service.serving.lookup import LookupWait, Selection, wait_for_samples
from tq_service.state.plan import Condition

NEW = Selection(is_all=True, where=(Condition("version", ">=", (2,)),))
FOREVER = 1e6


@pytest.fixture
def catalog():
    return Catalog(PlanRunner())


def put(catalog, versions, **more):
    return catalog.write("train", b"", new_write(len(versions), meta=[{"version": each} for each in versions], **more))


def clear(catalog, indexes):
    catalog.commit(SamplesCleared(partition_id="train", global_indexes=np.array(indexes, np.int64)))


def waits(catalog, selection=NEW, min_count=3, seconds=FOREVER):
    return asyncio.ensure_future(wait_for_samples(catalog, "train", selection, min_count, seconds))


async def test_it_ends_with_the_sample_that_was_missing(catalog):
    put(catalog, [1, 2])
    wait = waits(catalog)
    for versions in ([1, 1], [5], [0]):
        put(catalog, versions)
        await turns(5)
        assert not wait.done()
    set_meta(catalog, np.array([0]), meta([{"version": 9}]))
    assert await wait is False
    assert not catalog.get("train").on_rows


async def test_it_ends_at_once_where_there_are_enough(catalog):
    put(catalog, [2, 3, 4])
    assert await waits(catalog, seconds=0.0) is False


async def test_what_stops_to_match_or_is_cleared_does_not_count(catalog):
    put(catalog, [2, 3])
    wait = waits(catalog)
    await turns(3)
    set_meta(catalog, np.array([0]), meta([{"version": 0}]))
    clear(catalog, [1])
    put(catalog, [4])
    put(catalog, [5])
    await turns(5)
    assert not wait.done()
    put(catalog, [6])
    assert await wait is False


async def test_it_waits_for_the_partition(catalog):
    wait = waits(catalog)
    await turns(3)
    put(catalog, [1, 2, 3, 4])
    assert await wait is False


@pytest.mark.parametrize("selection", [NEW, Selection(indexes=np.arange(3), where=NEW.where)])
async def test_it_ends_with_its_time_though_rows_are_written_all_the_time(catalog, selection):
    put(catalog, [0] * 3)
    wait = waits(catalog, selection, min_count=2, seconds=0.01)
    for _ in range(20_000):
        if wait.done():
            break
        set_meta(catalog, np.array([1]), meta([{"version": 0}]))
        put(catalog, [1])
        await turns(1)
    assert await wait is True


@pytest.mark.parametrize("count", [10, 40_000])
async def test_it_ends_with_enough_though_rows_are_written_all_the_time(catalog, count):
    put(catalog, [2] * count)
    wait = waits(catalog, min_count=count + 5)
    for _ in range(60):
        put(catalog, [2])
        await turns(1)
    assert wait.done()
    assert wait.result() is False


@pytest.mark.parametrize("there", [False, True])
async def test_it_ends_with_its_time(catalog, there):
    if there:
        put(catalog, [2, 2, 1, 1])
    assert await waits(catalog, seconds=0.01) is True


async def test_it_ends_where_a_sealed_partition_has_too_few(catalog):
    put(catalog, [2, 2, 1, 1])
    few, enough = waits(catalog, min_count=5), waits(catalog, min_count=4)
    await turns(3)
    seal(catalog)
    assert await few is False
    await turns(5)
    assert not enough.done()  # metadata of the samples that are there may still change
    set_meta(catalog, np.array([2, 3]), meta([{"version": 2}] * 2))
    assert await enough is False


async def test_it_ends_where_samples_of_a_sealed_partition_are_cleared(catalog):
    put(catalog, [2, 2, 1, 1])
    seal(catalog)
    wait = waits(catalog, min_count=4)
    await turns(3)
    clear(catalog, [3])
    assert await wait is False


async def test_named_samples_and_groups_are_waited_for(catalog):
    keyed = waits(catalog, Selection(keys=["a", "b"]), min_count=2)
    grouped = waits(catalog, Selection(groups=["g"], where=NEW.where), min_count=2)
    indexed = waits(catalog, Selection(indexes=np.array([3, 1]), where=NEW.where), min_count=2)
    put(catalog, [2], keys=["a"], groups=["g"])
    put(catalog, [2], keys=["c"], groups=["h"])
    put(catalog, [1], keys=["d"], groups=["g"])
    await turns(9)
    assert not any(wait.done() for wait in (keyed, grouped, indexed))
    put(catalog, [2], keys=["b"], groups=["g"])
    assert [await wait for wait in (keyed, grouped, indexed)] == [False] * 3


async def test_it_ends_with_its_partition_and_with_the_service(catalog):
    put(catalog, [2])
    wait = waits(catalog)
    await turns(3)
    catalog.remove("train", b"")
    with pytest.raises(PartitionClearedError):
        await wait
    put(catalog, [2])
    wait, arrival = waits(catalog), asyncio.ensure_future(wait_for_samples(catalog, "other", NEW, 1, FOREVER))
    await turns(3)
    catalog.drain()
    for each in (wait, arrival, waits(catalog)):
        with pytest.raises(UnavailableError):
            await each


async def test_a_condition_that_does_not_fit_ends_it(catalog):
    wait = waits(catalog, Selection(is_all=True, where=(Condition("version", "==", ("new",)),)))
    put(catalog, [2])
    with pytest.raises(InvalidArgumentError, match="version"):
        await wait


async def test_who_leaves_leaves_nothing_behind(catalog):
    put(catalog, [2])
    partition = catalog.get("train")
    listeners = len(partition.on_rows), len(partition.on_change)
    wait = waits(catalog)
    await turns(3)
    assert (len(partition.on_rows), len(partition.on_change)) == (listeners[0] + 1, listeners[1] + 1)
    wait.cancel()
    await turns(3)
    assert (len(partition.on_rows), len(partition.on_change)) == listeners
    assert not catalog.enders(partition)


async def test_rows_are_looked_at_in_large_lots_and_large_ones_in_parts(catalog, monkeypatch):
    """A partition that fills row by row has a few looks, whose rows are together about as many as were written."""
    looks = []
    among = Selection.among

    def counted(selection, partition, positions):
        looks.append(positions.size)
        return among(selection, partition, positions)

    monkeypatch.setattr(Selection, "among", counted)
    put(catalog, [0] * 40_000)
    wait = waits(catalog, min_count=1000)
    await turns(8)
    assert looks == [16_384, 16_384, 40_000 - 2 * 16_384]
    looks.clear()
    for number in range(3000):
        put(catalog, [2 if number % 2 else 0])
        await asyncio.sleep(0)
    assert await wait is False
    assert sum(looks) <= 3000
    await turns(3)


async def test_what_it_remembers_is_bounded_by_what_is_stored(catalog, monkeypatch):
    monkeypatch.setattr("tq_service.serving.lookup._MOST_UNSEEN", 50)
    put(catalog, [2, 2, 2])
    partition = catalog.get("train")
    with LookupWait(partition, NEW, 10**6) as lookup:
        wait = asyncio.ensure_future(lookup.until_enough(FOREVER))
        for number in range(600):
            set_meta(catalog, np.array([0]), meta([{"version": number}]))  # the same one again and again
            put(catalog, [5])
            clear(catalog, [3 + number])
            await asyncio.sleep(0)
        await turns(5)
        assert sum(map(len, lookup._unseen)) <= 50
        assert len(lookup._found) <= 150
        wait.cancel()


@examples(60)
@given(st.lists(st.tuples(st.sampled_from(["put", "set", "clear", "turn"]), st.integers(0, 5)), max_size=40),
       st.integers(1, 6))  # fmt: skip
def test_it_ends_in_the_step_in_which_there_are_enough_and_not_before(steps, min_count):
    async def run():
        catalog = Catalog(PlanRunner())
        put(catalog, [0])
        partition = catalog.get("train")
        with LookupWait(partition, NEW, min_count) as lookup:
            wait = asyncio.ensure_future(lookup.until_enough(FOREVER))
            for step, value in steps:
                indexes = partition.table.index.data[partition.table.present_positions()]
                match step:
                    case "put":
                        put(catalog, [value] * (1 + value % 3))
                    case "set" if indexes.size:
                        set_meta(
                            catalog, indexes[:: 1 + value], meta([{"version": value}] * len(indexes[:: 1 + value]))
                        )
                    case "clear" if indexes.size > 1:
                        clear(catalog, indexes[value : value + 2])
                await turns(6)
                count = NEW.part(partition, 0, 10_000).positions.size
                assert wait.done() == (count >= min_count)
                if wait.done():
                    return
            wait.cancel()

    asyncio.run(run())


async def test_a_wait_for_named_samples_looks_at_these_alone(catalog):
    put(catalog, [1] * 1000)
    partition = catalog.get("train")
    with LookupWait(partition, Selection(indexes=np.array([5, 7, 2000, 5])), 3) as wait:
        assert wait._unseen_count == 2
        assert not await wait.until_enough(asyncio.get_running_loop().time())
        assert wait._found == {5, 7}
