"""Cells of committed puts are not given back while a checkpoint may still read them."""

import os

import numpy as np

from tq_service.domain.cells import FreedCells, Put
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
            directory.free([FreedCells(put=whole)])
        directory.free([FreedCells(put=part, field_names=("x",), rows=np.array([4, 7]))])
        assert storage.freed == []
        assert directory.is_committed(whole)  # lest it is committed again, and then given back
        assert PutCells(put_id=whole.put_id) in directory._known("s", b"b" * 16)
    assert storage.freed == [(whole.put_id, None), (part.put_id, [4, 7])]
    assert not directory.is_committed(whole)


def test_a_put_that_was_refused_goes_at_once_since_it_may_be_sent_again():
    storage = FakeStorage()
    directory = directory_of(storage)
    refused = Put("s", b"b" * 16, os.urandom(16))
    with directory.holding_frees():
        directory.free([FreedCells(put=refused)])
        assert storage.freed == [(refused.put_id, None)]
