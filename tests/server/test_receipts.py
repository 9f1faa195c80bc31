"""Receipts that are forged, altered, swapped, replayed, expired or of others are refused, each with its error."""

import os
import time

import pytest

from tq_service.errors import DataLossError, InvalidArgumentError, PutNotFoundError, UnavailableError
from tq_service.internal.v1.put_receipt_pb2 import PutReceipt
from tq_service.server.receipts import ReceiptBook, ReceiptKeys, key_id
from tq_service.server.storage_servicer import EngineDriver
from tq_service.storage.engine import StorageEngine

OWNER, PUT_ID = b"c" * 16, b"p" * 16


@pytest.fixture
def book():
    return ReceiptBook()


def sealed(book, given_at=1.0, put_id=PUT_ID, partition_id="train", *, for_existing_rows=False, columns_digest=b""):
    keys = ReceiptKeys()
    keys.renew(OWNER, book.key)
    return keys.seal(
        OWNER,
        PutReceipt(
            put_id=put_id,
            partition_id=partition_id,
            given_at=given_at,
            for_existing_rows=for_existing_rows,
            columns_digest=columns_digest,
        ),
    )


@pytest.mark.parametrize("for_existing_rows", [False, True])
def test_a_receipt_says_what_was_sealed_as_often_as_it_is_opened(book, for_existing_rows):
    receipt = sealed(book, 3.0, for_existing_rows=for_existing_rows, columns_digest=b"")
    for _ in range(2):
        said = book.open(receipt, PUT_ID, "train")
        assert (said.for_existing_rows, said.given_at) == (for_existing_rows, 3.0)


def test_no_bit_of_a_receipt_can_be_changed(book):
    receipt = sealed(book)
    for position in range(len(receipt)):
        for bit in range(8):
            altered = bytearray(receipt)
            altered[position] ^= 1 << bit
            with pytest.raises((InvalidArgumentError, PutNotFoundError)):  # another key, where its name was changed
                book.open(bytes(altered), PUT_ID, "train")


def test_what_is_no_receipt_is_refused(book):
    receipt = sealed(book)
    for garbage in (b"x", receipt[:-1], receipt + b"\0", receipt[:32], receipt[32:], os.urandom(100), b"\0" * 1000):
        with pytest.raises((InvalidArgumentError, PutNotFoundError)):
            book.open(garbage, PUT_ID, "train")
    content = PutReceipt.FromString(receipt[32:])
    content.for_existing_rows = True
    with pytest.raises(InvalidArgumentError, match="was not issued by its storage service"):
        book.open(receipt[:32] + content.SerializeToString(), PUT_ID, "train")
    with pytest.raises(PutNotFoundError, match="was sent without a receipt"):
        book.open(b"", PUT_ID, "train")


def test_the_receipt_of_another_put_or_partition_is_refused(book):
    with pytest.raises(InvalidArgumentError, match="was not issued by its storage service") as swapped:
        book.open(sealed(book, put_id=b"q" * 16), PUT_ID, "train")
    assert swapped.value.metadata["field"] == "receipt"
    with pytest.raises(InvalidArgumentError, match="does not belong to partition 'other'") as elsewhere:
        book.open(sealed(book), PUT_ID, "other")
    assert elsewhere.value.metadata["field"] == "partition_id"


def test_the_receipt_of_another_registration_is_refused(book):
    """Of another storage service or another run of it, for another controller or another run of it."""
    with pytest.raises(PutNotFoundError, match="was issued before its storage service or this controller restarted"):
        book.open(sealed(ReceiptBook()), PUT_ID, "train")
    content = PutReceipt.FromString(sealed(ReceiptBook())[32:])
    content.key_id = PutReceipt.FromString(sealed(book)[32:]).key_id
    with pytest.raises(
        InvalidArgumentError, match="was not issued by its storage service"
    ):  # who names the key does not have it
        book.open(sealed(ReceiptBook())[:32] + content.SerializeToString(), PUT_ID, "train")


def test_a_receipt_is_taken_until_it_is_void_or_revoked(book):
    put_ids = [bytes([number]) * 16 for number in range(8)]
    receipts = [sealed(book, number, put_id) for number, put_id in enumerate(put_ids)]
    for number in (3, 6):
        book.revoke(put_ids[number])

    def check():
        taken = []
        for number, (put_id, receipt) in enumerate(zip(put_ids, receipts, strict=True)):
            try:
                book.open(receipt, put_id, "train")
                taken.append(number)
            except PutNotFoundError as error:
                assert ("expired" in error.message) == (number < 2)
                assert ("was freed" in error.message) == (number in {3, 6})
        assert taken == [2, 4, 5, 7]

    book.void_before(2.0)
    book.void_before(1.0)
    check()
    book.on_freed([put_ids[3], put_ids[6]], 8.0)
    check()
    with pytest.raises(PutNotFoundError, match="was freed"):  # of bytes that were put again under its id
        book.open(sealed(book, 8.5, put_ids[3]), put_ids[3], "train")
    book.void_before(8.5)
    assert not book._revoked


def test_only_what_was_freed_since_the_oldest_valid_receipt_is_remembered(book):
    for number in range(10_000):
        put_id = number.to_bytes(16, "big")
        book.revoke(put_id)
        book.on_freed([put_id], number + 1)
        if number % 1000 == 999:
            book.void_before(number - 99)
            assert len(book._revoked) <= 101


def test_only_the_present_key_of_a_controller_is_taken():
    keys = ReceiptKeys()
    keys.renew(OWNER, b"k" * 32)
    keys.check_key(OWNER, key_id(b"k" * 32))
    keys.renew(OWNER, b"l" * 32)
    for controller_id, key in ((OWNER, b"k" * 32), (b"d" * 16, b"l" * 32)):
        with pytest.raises(UnavailableError, match="is not registered with controller"):
            keys.check_key(controller_id, key_id(key))
    keys.expect(OWNER, key_id(b"m" * 32))  # before the answer to the heartbeat, which has it
    keys.check_key(OWNER, key_id(b"m" * 32))
    with pytest.raises(UnavailableError, match="is not registered with controller"):
        keys.check_key(OWNER, key_id(b"l" * 32))
    for superseded in (key_id(b"k" * 32), b""):
        with pytest.raises(UnavailableError, match="is not registered with controller"):
            keys.expect(OWNER, superseded)
    keys.renew(OWNER, b"m" * 32)
    keys.check_key(OWNER, key_id(b"m" * 32))


def test_no_receipt_is_given_for_a_controller_that_is_not_known():
    with pytest.raises(UnavailableError, match="not registered with controller 6363"):
        ReceiptKeys().check_registered(OWNER)
    with pytest.raises(InvalidArgumentError, match="controller_id has 0 bytes, expected 16"):
        ReceiptKeys().seal(b"", PutReceipt(put_id=PUT_ID, partition_id="train"))


def test_a_receipt_costs_a_few_microseconds(book):
    keys = ReceiptKeys()
    keys.renew(OWNER, book.key)
    best = float("inf")
    for _ in range(20):
        began = time.perf_counter()
        for number in range(100):
            receipt = PutReceipt(put_id=PUT_ID, partition_id="train", given_at=number + 1)
            book.open(keys.seal(OWNER, receipt), PUT_ID, "train")
        best = min(best, time.perf_counter() - began)
    assert best / 100 < 100e-6  # 10 us when the machine is idle


def test_a_storage_service_calls_nothing_lost_before_a_controller_knows_that_it_has_started_again():
    engine, keys = StorageEngine(max_bytes=None), ReceiptKeys()
    driver = EngineDriver(engine, None, keys)
    assert driver.engine_of(engine.boot_id) is engine
    with pytest.raises(UnavailableError, match="is not yet registered with a controller"):
        driver.engine_of(b"e" * 16)
    keys.renew(b"c" * 16, b"k" * 32)
    with pytest.raises(DataLossError, match="has restarted since these cells were put"):
        driver.engine_of(b"e" * 16)
