"""When cells are given back: not while a checkpoint may still read them, nor while a crash could bring them back."""

import os

import numpy as np

from tq_service.domain.tables.cells import CellSet, Put
from tq_service.server.storages import StorageRegistry
from tq_service.storage.cells import PutCells
from tq_service.wire.credentials import Credentials


class FakeStorage:
    storage_id, boot_id, address = "s", b"b" * 16, ""

    def __init__(self):
        self.freed, self.confirmed = [], []

    def confirm(self, put_id):
        self.confirmed.append(put_id)

    def free(self, cells):
        self.freed += [(each.put_id, None if each.first_rows is None else each.first_rows.tolist()) for each in cells]


def registry_of(storage):
    return StorageRegistry(storage, 2.0, Credentials(None, None, None))


def committed(registry):
    put = Put("s", b"b" * 16, os.urandom(16))
    with registry.committing(put):
        pass
    return put


def test_what_is_freed_meanwhile_is_given_back_at_the_end_of_the_last_hold():
    storage = FakeStorage()
    registry = registry_of(storage)
    whole, part = committed(registry), committed(registry)
    with registry.holding_frees():
        with registry.holding_frees():
            registry.free([CellSet(put=whole)])
        registry.free([CellSet(put=part, field_names=("x",), rows=np.array([4, 7]))])
        assert storage.freed == []
        assert registry.is_committed(whole)  # lest it is committed again, and then given back
        assert PutCells(put_id=whole.put_id) in list(registry._known("s", b"b" * 16).parts())
    assert storage.freed == [(whole.put_id, None), (part.put_id, [4, 7])]
    assert not registry.is_committed(whole)


def test_a_put_that_was_refused_goes_at_once_since_it_may_be_sent_again():
    storage = FakeStorage()
    registry = registry_of(storage)
    refused = Put("s", b"b" * 16, os.urandom(16))
    with registry.holding_frees():
        registry.free([CellSet(put=refused)])
        assert storage.freed == [(refused.put_id, None)]


class Journal:
    """Something that becomes durable when the test says so."""

    def __init__(self):
        self.waiting = []

    def after_durable(self, callback):
        self.waiting.append(callback)

    def sync(self):
        waiting, self.waiting = self.waiting, []
        for callback in waiting:
            callback()


def elsewhere(journal):
    """Return a registry whose only storage service is in another process, and that storage service."""
    storage = FakeStorage()
    registry = StorageRegistry(None, 2.0, Credentials(None, None, None), after_durable=journal.after_durable)
    registry._storages["s"] = storage
    return registry, storage


def test_cells_elsewhere_stay_until_a_crash_cannot_bring_back_the_samples_that_had_them():
    journal = Journal()
    registry, storage = elsewhere(journal)
    first, second = committed(registry), committed(registry)
    registry.free([CellSet(put=first)])
    registry.free([CellSet(put=second, field_names=("x",), rows=np.array([2]))])
    assert storage.freed == []
    assert registry.is_committed(first)
    assert PutCells(put_id=first.put_id) in list(
        registry._known("s", b"b" * 16).parts()
    )  # nor may it be taken for unknown
    journal.sync()
    assert storage.freed == [(first.put_id, None), (second.put_id, [2])]
    assert not registry.is_committed(first)
    assert list(registry._known("s", b"b" * 16).parts()) == []


def test_a_put_elsewhere_is_confirmed_once_its_commit_cannot_be_lost_any_more():
    journal = Journal()
    registry, storage = elsewhere(journal)
    kept, cleared = committed(registry), committed(registry)
    registry.free([CellSet(put=cleared)])
    assert storage.confirmed == []
    journal.sync()
    assert storage.confirmed == [kept.put_id, cleared.put_id]
    assert storage.freed == [(cleared.put_id, None)]


def test_an_uncommitted_put_elsewhere_goes_at_once():
    journal = Journal()
    registry, storage = elsewhere(journal)
    refused = Put("s", b"b" * 16, os.urandom(16))
    registry.free([CellSet(put=refused)])
    assert storage.freed == [(refused.put_id, None)]
