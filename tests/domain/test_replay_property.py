"""Whatever happens to a catalog, its changes written down and made again give the same catalog."""

import asyncio
import contextlib

from digest import digest
from hypothesis import given
from property_settings import examples
from test_claims_property import SEEDS, Interleaving, sequences

from tq_service.domain.catalog import Catalog
from tq_service.durable.records import decode_change, encode_change
from tq_service.samplers import PlanRunner
from tq_service.v1.journal_pb2 import JournalRecord


@contextlib.contextmanager
def written_down(change, journal):
    data = encode_change(change).SerializeToString()
    yield
    journal.append(data)


def replayed(journal):
    """Return the catalog that a journal makes, as after a crash."""
    catalog = Catalog(PlanRunner())
    for data in journal:
        catalog.apply(decode_change(JournalRecord.FromString(data)))
    return catalog


async def drive(seed, steps):
    """Return a catalog after some steps, and its journal."""
    interleaving = Interleaving(seed)
    driver, journal = interleaving.driver, []
    created = driver.partition
    driver.catalog.remove(created.partition_id, b"")  # it was made before there was a journal
    driver.catalog.start_telling(lambda change: written_down(change, journal))
    driver.open_life()
    for name, step_seed in steps:
        await interleaving.step(name, step_seed)
        if step_seed % 3:
            await driver.check()
    for call in driver.calls:
        call.future.cancel()
    await driver.settle()
    return driver.catalog, journal


@examples(50, derandomize=True)
@given(SEEDS, sequences(60))
def test_changes_made_again_give_the_same_state(seed, steps):
    catalog, journal = asyncio.run(drive(seed, steps))
    again = replayed(journal)
    assert sorted(again.names()) == sorted(catalog.names())
    for name in catalog.names():
        assert digest(again.get(name)) == digest(catalog.get(name))
