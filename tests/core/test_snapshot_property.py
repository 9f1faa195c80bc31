"""Whatever happens to a catalog, a snapshot of it read back is the same catalog, and goes on in the same way."""

import asyncio
import random
from unittest import mock

import pytest
from claims_driver import NAME
from digest import digest, record_of
from domain_support import turns
from hypothesis import given
from hypothesis import strategies as st
from property_settings import examples
from test_claims_property import ROWS_ARE_MOVED, SEEDS, SHARING_STEPS, Interleaving, Reusing, Sharing, sequences

from tq_service.durable.snapshot import ServiceSnapshot, read_snapshot, write_snapshot
from tq_service.samplers import PlanRunner
from tq_service.serving.catalog import Catalog
from tq_service.state import ledger
from tq_service.state import table as table_module
from tq_service.state.ledger import Claim
from tq_service.state.partition import Partition

pytestmark = pytest.mark.usefixtures("judged_waiters")


def restored(partitions, path):
    """Return the catalog that a snapshot makes."""
    write_snapshot(path, ServiceSnapshot(partitions=partitions))
    catalog = Catalog(PlanRunner())
    catalog.adopt([Partition.restore(each) for each in read_snapshot(path).partitions])
    return catalog


def whole_digest(catalog):
    """Return everything a catalog answers from, also what journals do not bring back exactly."""
    return {name: digest(catalog.get(name), with_gaps=True) for name in catalog.names()}


class Twin:
    """Asks another catalog what was asked of a driver's."""

    def __init__(self, driver, catalog):
        self.catalog, self.model = catalog, driver.model
        self._driver = driver

    async def answer(self, call):
        """Return what the catalog answers to a call of the driver: rows, packs, or the error."""
        try:
            claimed = await self.catalog.claim(NAME, b"", call.request, 0)
        except Exception as error:
            return type(error), str(error)
        claim = claimed.answer
        if not isinstance(claim, Claim):
            return repr(claim)
        return record_of(claim)


async def settled(driver):
    for call in driver.calls:
        call.future.cancel()
    await driver.settle()


async def check_is_read_back_as_it_was(kind, seed, steps, later, path):
    interleaving = kind(seed)
    driver = interleaving.driver
    for name, step_seed in steps:
        await interleaving.step(name, step_seed)
    await settled(driver)
    before = whole_digest(driver.catalog)
    snapshot = driver.catalog.snapshot()
    calls = list(driver.calls)
    for name, step_seed in later:  # none of this is seen by who reads the snapshot
        await interleaving.step(name, step_seed)
    await settled(driver)
    first = restored(snapshot, path)
    assert whole_digest(first) == before
    second = restored(first.snapshot(), path)  # of plans that nobody asked for since they were read
    assert whole_digest(second) == before
    third = restored(second.snapshot(), path)
    await answer_alike(seed, driver, calls, first, third)
    assert whole_digest(first) == whole_digest(third)


async def answer_alike(seed, driver, calls, one, other):
    """Ask two catalogs the same: what was asked before, and what comes next."""
    rng = random.Random(seed)
    for call in rng.sample(calls, min(len(calls), 10)):
        assert await Twin(driver, one).answer(call) == await Twin(driver, other).answer(call)
        await turns(5)
    for name, ways in driver.tasks.items():
        for asking in ways:
            task = one.get(NAME).tasks.get(name)  # None: forgotten, as it had nothing on record
            next_index = 0 if task is None else task.next_batch_index
            for rank in [(dp_rank, asking.dp_size, next_index) for dp_rank in range(asking.dp_size)] or [None]:
                call = driver.ask(name, asking, rank)
                call.future.cancel()
                assert await Twin(driver, one).answer(call) == await Twin(driver, other).answer(call)
                await turns(5)


@pytest.mark.parametrize("kind", [Interleaving, Reusing])
@examples(40, derandomize=True)
@given(SEEDS, sequences(50), sequences(10) | st.just([]))
def test_a_snapshot_is_the_catalog_as_it_was(tmp_path_factory, kind, seed, steps, later):
    path = tmp_path_factory.getbasetemp() / "property.tqs"
    # fsync: hundreds of which take minutes on a busy disk
    with mock.patch("os.fsync"), mock.patch.object(ledger, "_MOST_REUSING", 3):
        asyncio.run(check_is_read_back_as_it_was(kind, seed, steps, later, path))


@examples(20, derandomize=True)
@given(SEEDS, sequences(50), sequences(10) | st.just([]))
def test_a_snapshot_is_the_catalog_as_it_was_while_rows_are_moved(tmp_path_factory, seed, steps, later):
    path = tmp_path_factory.getbasetemp() / "property.tqs"
    with mock.patch("os.fsync"), mock.patch.multiple(table_module, **ROWS_ARE_MOVED):
        asyncio.run(check_is_read_back_as_it_was(Interleaving, seed, steps, later, path))


@examples(40, derandomize=True)
@given(SEEDS, sequences(50, SHARING_STEPS), sequences(10, SHARING_STEPS) | st.just([]))
def test_a_snapshot_has_what_groups_share(tmp_path_factory, seed, steps, later):
    path = tmp_path_factory.getbasetemp() / "property.tqs"
    with mock.patch("os.fsync"):
        asyncio.run(check_is_read_back_as_it_was(Sharing, seed, steps, later, path))
