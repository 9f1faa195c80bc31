"""Whatever happens to a catalog, its changes written down and made again give the same catalog."""

import asyncio
from unittest import mock

import pytest
from digest import digest
from domain_support import claim_rows, new_write, task_of, write_to
from hypothesis import given
from property_settings import examples
from test_claims_property import SEEDS, Interleaving, Reusing, sequences

from tq_service.machine.state_machine import decode_group
from tq_service.samplers import PlanRunner
from tq_service.serving.catalog import Catalog
from tq_service.state import ledger
from tq_service.state.plan import LeasedClaim, LeaseTerms

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


def test_a_write_and_its_acknowledgement_are_one_record_and_made_again_together():
    async def write():
        catalog, journal = Catalog(PlanRunner()), Journal()
        catalog.machine.log, catalog.machine.fatal = journal, fail
        catalog.write("train", b"", new_write(4, ("x",)))
        task = task_of(catalog, "t")
        held = claim_rows(catalog, task, [0, 1, 2], lease=LeaseTerms(seconds=60.0)).request_id
        before = len(journal)
        leased = LeasedClaim(task_name="t", request_id=held)
        write_to(catalog, new_write(2, ("y",), indexes=[0, 2], acks=leased))
        write_to(catalog, new_write(1, ("y",), indexes=[1], claim=leased))
        return catalog, journal, before

    catalog, journal, before = asyncio.run(write())
    changes = [decode_group(record)[1] for record in journal[before:]]
    assert [[type(change).__name__ for change in group] for group in changes] == [["SamplesWritten"]] * 2
    assert [group[0].write.claim for group in changes] == [None, None]  # it was checked, and need not be again
    assert [group[0].write.acks is not None for group in changes] == [True, False]
    again = replayed(journal)
    assert again.get("train").tasks["t"].leased_count == 1
    assert digest(again.get("train")) == digest(catalog.get("train"))


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
