"""When cells are given back: not while a checkpoint may still read them, nor while a crash could bring them back."""

import os

import numpy as np

from tq_service.domain.tables.cells import CellSet, Put
from tq_service.server.storages import StorageDirectory
from tq_service.storage.cells import PutCells
from tq_service.wire.credentials import Credentials


class FakeStorage:
    storage_id, boot_id, address = "s", b"b" * 16, ""

    def __init__(self):
        self.freed = []

    def free(self, cells):
        self.freed += [(each.put_id, None if each.first_rows is None else each.first_rows.tolist()) for each in cells]


def directory_of(storage):
    return StorageDirectory(storage, 2.0, Credentials(None, None, None))


def committed(directory):
    put = Put("s", b"b" * 16, os.urandom(16))
    with directory.committing(put):
        pass
    return put


def test_what_is_freed_meanwhile_is_given_back_at_the_end_of_the_last_hold():
    storage = FakeStorage()
    directory = directory_of(storage)
    whole, part = committed(directory), committed(directory)
    with directory.holding_frees():
        with directory.holding_frees():
            directory.free([CellSet(put=whole)])
        directory.free([CellSet(put=part, field_names=("x",), rows=np.array([4, 7]))])
        assert storage.freed == []
        assert directory.is_committed(whole)  # lest it is committed again, and then given back
        assert PutCells(put_id=whole.put_id) in list(directory._known("s", b"b" * 16).parts())
    assert storage.freed == [(whole.put_id, None), (part.put_id, [4, 7])]
    assert not directory.is_committed(whole)


def test_a_put_that_was_refused_goes_at_once_since_it_may_be_sent_again():
    storage = FakeStorage()
    directory = directory_of(storage)
    refused = Put("s", b"b" * 16, os.urandom(16))
    with directory.holding_frees():
        directory.free([CellSet(put=refused)])
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
    """Return a directory whose only storage service is in another process, and that storage service."""
    storage = FakeStorage()
    directory = StorageDirectory(None, 2.0, Credentials(None, None, None), after_durable=journal.after_durable)
    directory._storages["s"] = storage
    return directory, storage


def test_cells_elsewhere_stay_until_a_crash_cannot_bring_back_the_samples_that_had_them():
    journal = Journal()
    directory, storage = elsewhere(journal)
    first, second = committed(directory), committed(directory)
    directory.free([CellSet(put=first)])
    directory.free([CellSet(put=second, field_names=("x",), rows=np.array([2]))])
    assert storage.freed == []
    assert directory.is_committed(first)
    assert PutCells(put_id=first.put_id) in list(
        directory._known("s", b"b" * 16).parts()
    )  # nor may it be taken for unknown
    journal.sync()
    assert storage.freed == [(first.put_id, None), (second.put_id, [2])]
    assert not directory.is_committed(first)
    assert list(directory._known("s", b"b" * 16).parts()) == []


def test_an_uncommitted_put_elsewhere_goes_at_once():
    journal = Journal()
    directory, storage = elsewhere(journal)
    refused = Put("s", b"b" * 16, os.urandom(16))
    directory.free([CellSet(put=refused)])
    assert storage.freed == [(refused.put_id, None)]
