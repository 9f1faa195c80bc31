"""Receipts of puts: what a storage service gives a client, and its controller takes for the put itself.

    storage service: put is complete -> sealed receipt -> client -> Commit -> controller: opened, no call to anybody

The controller makes a random key for each registration of a storage service and tells it in the answer. So a key
belongs to one process of each of the two: what was sealed for another controller, by another storage service, or before
either restarted opens nowhere. A receipt says when it was given, by the clock of its storage service, which tells now
and then since when receipts are valid. A put that is freed has its receipts revoked for as long as one that it had may
be valid: its id is not used for another one.
"""

from __future__ import annotations

import hashlib
import hmac
import math
import secrets
from collections.abc import Iterable
from itertools import takewhile
from typing import Final

from google.protobuf.message import DecodeError

from tq_service.errors import InvalidArgumentError, PreconditionError, PutNotFoundError, UnavailableError
from tq_service.internal.v1.put_receipt_pb2 import PutReceipt
from tq_service.schema import check_passed_on

KEY_BYTES: Final = 32
_SEAL_BYTES: Final = 32


class ReceiptKeys:
    """The keys with which a storage service seals receipts, one for each controller that it is registered with."""

    def __init__(self) -> None:
        self._keys: dict[bytes, bytes] = {}
        self._current: dict[bytes, bytes] = {}  # by controller: what names the key of its last registration
        self._superseded: set[bytes] = set()  # and those of earlier ones: one for each that was replaced
        self._epochs: dict[bytes, int] = {}  # by controller: the highest that was seen

    @property
    def is_registered(self) -> bool:
        """Whether a controller has registered the storage service since it started."""
        return bool(self._keys)

    def check_epoch(self, controller_id: bytes, epoch: int) -> None:
        """Refuse a controller of a cluster that another one has superseded; a higher epoch is remembered.

        Raises:
            PreconditionError: a higher one was seen.
        """
        highest = self._epochs.get(controller_id, 0)
        if epoch < highest:
            raise PreconditionError(
                f"a controller of epoch {epoch} called, and one of epoch {highest} leads its cluster by now; it has to "
                "start again as a standby"
            )
        if epoch:
            self._epochs[controller_id] = epoch

    def renew(self, controller_id: bytes, key: bytes) -> None:
        """Take the key of a controller, which has just answered with it."""
        self._keys[controller_id] = key
        self._superseded.discard(key_id(key))
        self.expect(controller_id, key_id(key))

    def expect(self, controller_id: bytes, key: bytes) -> None:
        """Learn the `key_id` of a registration, maybe before its key: `check_key` takes no other one from now on.

        Raises:
            UnavailableError: a later registration is known.
        """
        if not key or key in self._superseded:
            raise _unknown_key(controller_id)
        if (current := self._current.get(controller_id, key)) != key:
            self._superseded.add(current)
        self._current[controller_id] = key

    def check_key(self, controller_id: bytes, key: bytes) -> None:
        """Refuse a controller that is not registered with a key of this `key_id`, as one that has started again since.

        Raises:
            UnavailableError: this service does not know the key, any more or yet.
        """
        if not key or self._current.get(controller_id) != key:
            raise _unknown_key(controller_id)

    def check_registered(self, controller_id: bytes) -> None:
        """Refuse a put that could not be given a receipt.

        Raises:
            UnavailableError: this service is not registered with its controller.
            InvalidArgumentError: it names none.
        """
        if controller_id not in self._keys:
            check_passed_on("controller_id", controller_id)
            raise not_registered(controller_id)

    def seal(self, controller_id: bytes, receipt: PutReceipt) -> bytes:
        """Return the receipt of a put."""
        self.check_registered(controller_id)
        key = self._keys[controller_id]
        receipt.key_id = key_id(key)
        content = receipt.SerializeToString()
        return _seal(key, content) + content


class ReceiptBook:
    """Opens the receipts of one process of a storage service, and knows which of them are of no use any more.

    Attributes:
        key: what they are sealed with.
    """

    def __init__(self) -> None:
        self.key = secrets.token_bytes(KEY_BYTES)
        self._valid_from = 0.0
        self._revoked: dict[bytes, float] = {}  # puts that are to be freed, or were: when, if it is known

    def void_before(self, valid_from: float) -> None:
        """Take no receipts any more that were given before."""
        self._valid_from = max(self._valid_from, valid_from)
        for put_id in list(takewhile(lambda put_id: self._revoked[put_id] < self._valid_from, self._revoked)):
            del self._revoked[put_id]

    def revoke(self, put_id: bytes) -> None:
        """Take no receipt of a put any more that is to be freed."""
        self._revoked[put_id] = math.inf

    def on_freed(self, put_ids: Iterable[bytes], freed_at: float) -> None:
        """Take note that puts were freed, so that their receipts were given until then."""
        for put_id in put_ids:
            self._revoked.pop(put_id, None)
            self._revoked[put_id] = freed_at

    def open(self, receipt: bytes, put_id: bytes, partition_id: str) -> PutReceipt:
        """Return what a receipt says.

        Args:
            receipt: what the storage service has answered, or anything else.
            put_id: the put that it must be of.
            partition_id: what the put must be for.

        Raises:
            InvalidArgumentError: its seal is wrong, or it is for another put or partition.
            PutNotFoundError: it was given before this controller or the storage service started, is expired or revoked;
                or there is none, as where the put was committed before.
        """
        seal, content = receipt[:_SEAL_BYTES], receipt[_SEAL_BYTES:]
        if not receipt:
            raise PutNotFoundError(
                f"put {put_id.hex()} has no receipt: either it was committed before, or placement.receipt is not what "
                "Put answered; put the data again under another put_id",
                metadata={"put_id": put_id.hex()},
            )
        try:
            said = PutReceipt.FromString(content)
        except DecodeError:
            said = PutReceipt()
        if said.key_id and said.key_id != key_id(self.key):
            raise PutNotFoundError(
                f"the receipt of put {put_id.hex()} is not of this run of its storage service and this controller; put "
                "it again",
                metadata={"put_id": put_id.hex()},
            )
        if not hmac.compare_digest(seal, _seal(self.key, content)) or said.put_id != put_id:
            raise InvalidArgumentError(
                f"the receipt of put {put_id.hex()} is not the one that its storage service gave; send what Put "
                "answered, as it is",
                field="receipt",
            )
        if said.partition_id != partition_id:
            raise InvalidArgumentError(
                f"put {put_id.hex()} was not put for partition {partition_id!r}; commit it to the partition that its "
                "header named",
                field="partition_id",
            )
        if said.given_at < self._valid_from or put_id in self._revoked:
            why = "was freed" if put_id in self._revoked else "waited for too long for its commit"
            raise PutNotFoundError(
                f"put {put_id.hex()} {why}; put the data again under another put_id",
                metadata={"put_id": put_id.hex()},
            )
        return said


def not_registered(controller_id: bytes) -> UnavailableError:
    """Return the error for a put that belongs to a controller of which this storage service does not know."""
    return UnavailableError(
        f"this storage service is not registered with controller {controller_id.hex()}, to which the put belongs; ask "
        "the controller where to put (PlacePut), and try again"
    )


def _unknown_key(controller_id: bytes) -> UnavailableError:
    return UnavailableError(
        f"this storage service is not registered with controller {controller_id.hex() or '(none given)'} under such a "
        "key; try again after its next heartbeat"
    )


def key_id(key: bytes) -> bytes:
    """Return what names a key without telling it."""
    return hashlib.sha256(key).digest()[:8]


def _seal(key: bytes, content: bytes) -> bytes:
    return hmac.digest(key, content, "sha256")
