"""Whatever happens to a catalog, its changes written down and made again give the same catalog."""

import asyncio
from unittest import mock

import pytest
from digest import digest
from hypothesis import given
from property_settings import examples
from test_claims_property import SEEDS, Interleaving, Reusing, sequences

from tq_service.machine.state_machine import decode_group
from tq_service.samplers import PlanRunner
from tq_service.serving.catalog import Catalog
from tq_service.state import ledger

pytestmark = pytest.mark.usefixtures("judged_waiters")


class Journal(list):
    """A log of groups in memory."""

    append = list.extend

    def check_open(self):
        """Refuse nothing."""


def fail(reason, error):
    raise AssertionError(reason) from error


def replayed(journal):
    """Return the catalog that a journal makes, as after a crash."""
    catalog = Catalog(PlanRunner())
    for record in journal:
        at_seconds, changes = decode_group(record)
        for change in changes:
            catalog.machine.replay(change, at_seconds)
    return catalog


async def drive(seed, steps, kind):
    """Return a catalog after some steps, and its journal."""
    interleaving = kind(seed)
    driver, journal = interleaving.driver, Journal()
    created = driver.partition
    driver.catalog.remove(created.partition_id, b"")  # it was made before there was a journal
    machine = driver.catalog.machine
    machine.log, machine.fatal = journal, fail
    driver.open_life()
    for name, step_seed in steps:
        await interleaving.step(name, step_seed)
        if step_seed % 3:
            await driver.check()
    for call in driver.calls:
        call.future.cancel()
    await driver.settle()
    return driver.catalog, journal


@pytest.mark.parametrize("kind", [Interleaving, Reusing])
@examples(50, derandomize=True)
@given(SEEDS, sequences(60))
def test_changes_made_again_give_the_same_state(kind, seed, steps):
    with mock.patch.object(ledger, "_MOST_REUSING", 3):
        catalog, journal = asyncio.run(drive(seed, steps, kind))
        again = replayed(journal)
    assert sorted(again.names()) == sorted(catalog.names())
    for name in catalog.names():
        assert digest(again.get(name)) == digest(catalog.get(name))
