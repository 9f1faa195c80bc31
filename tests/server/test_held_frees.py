"""When cells are given back: not while a checkpoint may still read them, nor while a crash could bring them back."""

import asyncio
import os

import numpy as np
import pytest

from tq_service.domain.cells import FreedCells
from tq_service.domain.puts import Put
from tq_service.errors import InvalidArgumentError, PutNotFoundError, UnavailableError
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
    directory.free([FreedCells(put=first)])
    directory.free([FreedCells(put=second, field_names=("x",), rows=np.array([2]))])
    assert storage.freed == []
    assert directory.is_committed(first)
    assert PutCells(put_id=first.put_id) in directory._known("s", b"b" * 16)  # nor may it be taken for unknown
    journal.sync()
    assert storage.freed == [(first.put_id, None), (second.put_id, [2])]
    assert not directory.is_committed(first)
    assert directory._known("s", b"b" * 16) == []


def test_an_uncommitted_put_elsewhere_goes_at_once():
    journal = Journal()
    directory, storage = elsewhere(journal)
    refused = Put("s", b"b" * 16, os.urandom(16))
    directory.free([FreedCells(put=refused)])
    assert storage.freed == [(refused.put_id, None)]


class Unsure(FakeStorage):
    """A storage service whose answers to confirmations get lost, or come when the test says so."""

    def __init__(self):
        super().__init__()
        self.failure = UnavailableError("no answer")

    async def confirm(self, put_id, partition_id):
        if self.failure is None:
            await asyncio.Event().wait()
        raise self.failure


def unsure_directory(doubt_seconds=0.0):
    storage = Unsure()
    directory = StorageDirectory(None, 2.0, Credentials(None, None, None), doubt_seconds=doubt_seconds)
    directory._storages["s"] = storage
    return directory, storage, Put("s", b"b" * 16, os.urandom(16))


async def test_a_put_whose_confirmation_got_lost_is_given_back_once_nobody_can_commit_it_any_more():
    directory, storage, put = unsure_directory()
    with pytest.raises(UnavailableError):
        await directory.confirm(put, "p")
    directory._doubt_seconds = 60.0
    assert directory.free_doubtful() == 0
    directory._doubt_seconds = 0.0
    assert directory.free_doubtful() == 1
    assert storage.freed == [(put.put_id, None)]
    assert directory.free_doubtful() == 0


async def test_a_put_whose_client_left_while_it_was_confirmed_is_given_back_too():
    directory, storage, put = unsure_directory()
    storage.failure = None
    confirming = asyncio.ensure_future(directory.confirm(put, "p"))
    await asyncio.sleep(0)
    assert directory.free_doubtful() == 0
    confirming.cancel()
    await asyncio.wait([confirming])
    assert directory.free_doubtful() == 1
    assert storage.freed == [(put.put_id, None)]


async def test_a_put_that_is_committed_or_confirmed_again_is_not_given_back():
    directory, storage, put = unsure_directory()
    with pytest.raises(UnavailableError):
        await directory.confirm(put, "p")
    storage.failure = None
    again = asyncio.ensure_future(directory.confirm(put, "p"))
    await asyncio.sleep(0)
    assert directory.free_doubtful() == 0
    with directory.committing(put):
        pass
    again.cancel()
    await asyncio.wait([again])
    assert directory.free_doubtful() == 0
    assert storage.freed == []
    assert directory.is_committed(put)


@pytest.mark.parametrize("error", [PutNotFoundError("gone"), InvalidArgumentError("of another partition")])
async def test_a_put_that_was_refused_by_its_storage_service_is_left_to_it(error):
    directory, storage, put = unsure_directory()
    storage.failure = error
    with pytest.raises(type(error)):
        await directory.confirm(put, "p")
    assert directory.free_doubtful() == 0
    assert storage.freed == []
