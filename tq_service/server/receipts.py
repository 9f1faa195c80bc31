"""Receipts for puts. A storage service issues a receipt to prove to the controller that a put is complete.

    storage service completes put and seals receipt -> client -> Commit -> controller opens receipt, without a call

The controller creates a random key for each registration of a storage service and sends the key in its response. Each
key is therefore tied to one controller process and one storage service process. A receipt sealed for another controller
or by another storage service is invalid. A restart of either process also invalidates all earlier receipts. Each
receipt contains its issue time, according to the storage service's clock. The storage service regularly reports the
earliest issue time of receipts that are still valid. When a put is freed, its receipts are revoked, and the revocation
is remembered until they would have expired. The ids of freed puts are not reused.
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
    """The keys that a storage service uses to seal receipts, one for each controller that has registered it."""

    def __init__(self) -> None:
        self._keys: dict[bytes, bytes] = {}
        self._current: dict[bytes, bytes] = {}  # `key_id` of the latest registration, by controller
        self._superseded: set[bytes] = set()  # `key_id`s of earlier registrations
        self._epochs: dict[bytes, int] = {}  # highest epoch seen, by controller

    @property
    def is_registered(self) -> bool:
        """Whether the storage service has registered with a controller since it started."""
        return bool(self._keys)

    def check_epoch(self, controller_id: bytes, epoch: int) -> None:
        """Record the epoch of a cluster's controller, or reject the controller if it has been superseded.

        Raises:
            PreconditionError: a controller with a higher epoch has already called.
        """
        highest = self._epochs.get(controller_id, 0)
        if epoch < highest:
            raise PreconditionError(
                f"the calling controller has epoch {epoch}, but its cluster is now led by a controller with epoch "
                f"{highest}. Restart the calling controller as a standby"
            )
        if epoch:
            self._epochs[controller_id] = epoch

    def renew(self, controller_id: bytes, key: bytes) -> None:
        """Record the key that a controller sent in response to the latest registration."""
        self._keys[controller_id] = key
        self._superseded.discard(key_id(key))
        self.expect(controller_id, key_id(key))

    def expect(self, controller_id: bytes, key: bytes) -> None:
        """Record the `key_id` of the latest registration. The key itself may not be known yet.

        After this call, `check_key` accepts only that key.

        Raises:
            UnavailableError: a later registration is already known.
        """
        if not key or key in self._superseded:
            raise _unknown_key(controller_id)
        if (current := self._current.get(controller_id, key)) != key:
            self._superseded.add(current)
        self._current[controller_id] = key

    def check_key(self, controller_id: bytes, key: bytes) -> None:
        """Reject a call whose key does not belong to the latest registration, for example after a restart.

        Raises:
            UnavailableError: this service does not yet know the key, or the key has been replaced.
        """
        if not key or self._current.get(controller_id) != key:
            raise _unknown_key(controller_id)

    def check_registered(self, controller_id: bytes) -> None:
        """Reject a put for which this storage service cannot issue a receipt.

        Raises:
            UnavailableError: this service is not registered with the put's controller.
            InvalidArgumentError: the put does not specify a controller.
        """
        if controller_id not in self._keys:
            check_passed_on("controller_id", controller_id)
            raise not_registered(controller_id)

    def seal(self, controller_id: bytes, receipt: PutReceipt) -> bytes:
        """Seal a put's receipt and return the sealed bytes."""
        self.check_registered(controller_id)
        key = self._keys[controller_id]
        receipt.key_id = key_id(key)
        content = receipt.SerializeToString()
        return _seal(key, content) + content


class ReceiptBook:
    """Opens the receipts that a storage service process issues, and tracks which of them are no longer valid.

    Attributes:
        key: key that seals the receipts.
    """

    def __init__(self) -> None:
        self.key = secrets.token_bytes(KEY_BYTES)
        self._valid_from = 0.0
        self._revoked: dict[bytes, float] = {}  # time at which each put was freed, or infinity while it is being freed

    def void_before(self, valid_from: float) -> None:
        """Invalidate all receipts issued before a given time."""
        self._valid_from = max(self._valid_from, valid_from)
        for put_id in list(takewhile(lambda put_id: self._revoked[put_id] < self._valid_from, self._revoked)):
            del self._revoked[put_id]

    def revoke(self, put_id: bytes) -> None:
        """Invalidate the receipts of a put that is about to be freed."""
        self._revoked[put_id] = math.inf

    def on_freed(self, put_ids: Iterable[bytes], freed_at: float) -> None:
        """Record the time at which puts were freed. All receipts for these puts were issued before that time."""
        for put_id in put_ids:
            self._revoked.pop(put_id, None)
            self._revoked[put_id] = freed_at

    def open(self, receipt: bytes, put_id: bytes, partition_id: str) -> PutReceipt:
        """Check a receipt and return its contents.

        Args:
            receipt: untrusted bytes sent by the client.
            put_id: id of the put for which the receipt must have been issued.
            partition_id: partition to which the put must belong.

        Raises:
            InvalidArgumentError: the seal is invalid, or the receipt was issued for another put or another partition.
            PutNotFoundError: the receipt predates a restart of this controller or the storage service, has expired, was
                revoked, or is empty because the put is already committed.
        """
        seal, content = receipt[:_SEAL_BYTES], receipt[_SEAL_BYTES:]
        if not receipt:
            raise PutNotFoundError(
                f"put {put_id.hex()} was sent without a receipt. The put was already committed, or placement.receipt "
                "was not copied from the response to Put. Put the data again under another put_id",
                metadata={"put_id": put_id.hex()},
            )
        try:
            said = PutReceipt.FromString(content)
        except DecodeError:
            said = PutReceipt()
        if said.key_id and said.key_id != key_id(self.key):
            raise PutNotFoundError(
                f"the receipt of put {put_id.hex()} was issued before its storage service or this controller "
                "restarted. Put the data again",
                metadata={"put_id": put_id.hex()},
            )
        if not hmac.compare_digest(seal, _seal(self.key, content)) or said.put_id != put_id:
            raise InvalidArgumentError(
                f"the receipt of put {put_id.hex()} was not issued by its storage service; send the receipt unchanged, "
                "as returned by Put",
                field="receipt",
            )
        if said.partition_id != partition_id:
            raise InvalidArgumentError(
                f"put {put_id.hex()} does not belong to partition {partition_id!r}. Commit it to the partition named "
                "in its header",
                field="partition_id",
            )
        if said.given_at < self._valid_from or put_id in self._revoked:
            why = "was freed" if put_id in self._revoked else "expired without a commit"
            raise PutNotFoundError(
                f"put {put_id.hex()} {why}. Put the data again under another put_id",
                metadata={"put_id": put_id.hex()},
            )
        return said


def not_registered(controller_id: bytes) -> UnavailableError:
    """Create the error for a put to a storage service that is not registered with the put's controller."""
    return UnavailableError(
        f"this storage service is not registered with controller {controller_id.hex()}, the put's controller; "
        "request a placement from that controller (PlacePut), and retry"
    )


def _unknown_key(controller_id: bytes) -> UnavailableError:
    return UnavailableError(
        f"this storage service is not registered with controller {controller_id.hex() or '(none given)'} under the "
        "key of this call; retry after the next heartbeat"
    )


def key_id(key: bytes) -> bytes:
    """Return an id that identifies a key without revealing it."""
    return hashlib.sha256(key).digest()[:8]


def _seal(key: bytes, content: bytes) -> bytes:
    return hmac.digest(key, content, "sha256")
