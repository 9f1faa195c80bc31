"""One client's connection to the handover socket: what it may deposit and collect.

A session takes deposits for puts, and gives out what gets offer, only while a Put or Get call with its session_id is
under way, or for some seconds after a GetSmall: what may be read and written is decided there, and what a client leaves
behind goes with its call or its connection.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
from collections.abc import Callable, Iterator, Sequence
from typing import Final

from tq_service.errors import InvalidArgumentError, TqError, UnavailableError
from tq_service.v1.handover_pb2 import (
    Collected,
    Collection,
    Deposited,
    HandoverAnswer,
    HandoverRequest,
    Refusal,
    Welcome,
)
from tq_service.wire import handover
from tq_service.wire.shared_memory import close_all

_log = logging.getLogger(__name__)
_LENT_SECONDS: Final = 10.0


class Session:
    """One connection of a client: greeted, then requests and answers in turn.

    Args:
        connection: does not block.
        boot_id: what the client must name.
        on_open: called when the client has greeted.
        on_close: called once, when the connection is gone.
    """

    def __init__(
        self,
        connection: socket.socket,
        boot_id: bytes,
        on_open: Callable[[Session], None],
        on_close: Callable[[Session], None],
    ) -> None:
        self.session_id = os.urandom(16)
        self._connection = connection
        self._boot_id = boot_id
        self._on_open = on_open
        self._on_close = on_close
        self._is_open = True
        self._is_greeted = False
        self._awaited: dict[bytes, Parcel] = {}
        self._offers: dict[bytes, Offer] = {}
        asyncio.get_running_loop().add_reader(connection, self._read)

    @contextlib.contextmanager
    def awaiting(self, put_id: bytes) -> Iterator[Parcel]:
        """Take the deposit of a put within the `with`; what has come and is not taken is closed at its end."""
        parcel = Parcel()
        self._awaited[put_id] = parcel
        try:
            yield parcel
        finally:
            if self._awaited.get(put_id) is parcel:
                del self._awaited[put_id]
            parcel.discard()

    @contextlib.contextmanager
    def offering(self, fds: Sequence[int]) -> Iterator[Offer]:
        """Give file descriptors out within the `with`, during which they must stay open."""
        offer = self._offer(fds)
        try:
            yield offer
        finally:
            offer.end()

    def lend(self, fds: Sequence[int], take_back: Callable[[], None]) -> Offer:
        """Give file descriptors out until all were collected, at most for some seconds.

        Args:
            fds: they must stay open until then.
            take_back: called when nobody needs them any more.
        """
        offer = self._offer(fds)
        timer = asyncio.get_running_loop().call_later(_LENT_SECONDS, offer.end)
        offer.on_end(timer.cancel)
        offer.on_end(take_back)
        return offer

    def _offer(self, fds: Sequence[int]) -> Offer:
        offer = Offer(fds)
        self._offers[offer.offer_id] = offer
        offer.on_end(lambda: self._offers.pop(offer.offer_id, None))
        if not self._is_open:
            offer.end()
        return offer

    def close(self) -> None:
        """End the session; a second call does nothing."""
        if not self._is_open:
            return
        self._is_open = False
        asyncio.get_running_loop().remove_reader(self._connection)
        self._connection.close()
        self.end_offers()
        self._on_close(self)

    def end_offers(self) -> None:
        """Take back what has been offered and not collected."""
        for offer in list(self._offers.values()):
            offer.end()

    def _read(self) -> None:
        try:
            received = handover.receive(self._connection, HandoverRequest)
        except BlockingIOError:
            return  # a wake-up without a message
        except (OSError, TqError) as error:
            self._fail(error)
            return
        if received is None:
            self.close()
            return
        request, fds = received
        try:
            answer, answer_fds = self._answer(request, fds)
            handover.send(self._connection, answer, answer_fds)
        except BlockingIOError:
            # The socket is full of answers. A later answer would be taken for the one that cannot be sent.
            self._fail("its client does not read the answers")
        except (OSError, TqError) as error:
            self._fail(error)
        else:
            if request.HasField("collection"):
                self._note_collected(request.collection, len(answer_fds))

    def _fail(self, reason: object) -> None:
        _log.info("a session of shared memory ends: %s", reason)
        self.close()

    def _answer(self, request: HandoverRequest, fds: list[int]) -> tuple[HandoverAnswer, Sequence[int]]:
        kind = request.WhichOneof("request")
        if kind == "deposit" and self._is_greeted:
            return self._deposit(request.deposit.put_id, fds), ()
        close_all(fds)
        if kind == "greeting":
            return self._greet(request.greeting.boot_id), ()
        if kind == "collection" and self._is_greeted:
            return self._collect(request.collection.offer_id, request.collection.received_count)
        raise InvalidArgumentError(f"got {kind or 'nothing known'} as the next request; expected a greeting first")

    def _greet(self, boot_id: bytes) -> HandoverAnswer:
        if boot_id != self._boot_id:
            return _refuse("another storage service listens here")
        if not self._is_greeted:
            self._is_greeted = True
            self._on_open(self)
        return HandoverAnswer(welcome=Welcome(session_id=self.session_id))

    def _deposit(self, put_id: bytes, fds: list[int]) -> HandoverAnswer:
        parcel = self._awaited.get(put_id)
        if parcel is None or not fds or parcel.has_come:
            close_all(fds)
            return _refuse(
                f"no put waits for a deposit of {len(fds)} file descriptors; expected those of a put in progress, once"
            )
        parcel.put(fds)
        return HandoverAnswer(deposited=Deposited())

    def _collect(self, offer_id: bytes, received_count: int) -> tuple[HandoverAnswer, Sequence[int]]:
        offer = self._offers.get(offer_id)
        fds = () if offer is None else offer.fds[received_count : received_count + handover.MOST_FDS]
        if offer is None or not fds:
            return _refuse("no get of this session offers that; it may be over"), ()
        return HandoverAnswer(collected=Collected(count=len(fds))), fds

    def _note_collected(self, collection: Collection, count: int) -> None:
        """End an offer of which all was sent."""
        offer = self._offers.get(collection.offer_id)
        if offer is not None and collection.received_count + count == len(offer.fds):
            offer.end()


class Parcel:
    """File descriptors on their way from the socket to the put that waits for them."""

    def __init__(self) -> None:
        self._fds: list[int] = []

    @property
    def has_come(self) -> bool:
        """Whether they are here."""
        return bool(self._fds)

    def put(self, fds: list[int]) -> None:
        """Leave them here."""
        self._fds = fds

    def take(self) -> list[int]:
        """Return them; they are the caller's now.

        Raises:
            UnavailableError: they have not come, or their session has ended.
        """
        if not self._fds:
            raise UnavailableError("the shared memory of the put was not handed over; it is tried again over gRPC")
        fds, self._fds = self._fds, []
        return fds

    def discard(self) -> None:
        """Close them unless they were taken."""
        close_all(self._fds)
        self._fds = []


class Offer:
    """File descriptors that a client may collect.

    Attributes:
        offer_id: names it.
        fds: what is given out.
    """

    def __init__(self, fds: Sequence[int]) -> None:
        self.offer_id = os.urandom(16)
        self.fds = fds
        self._ended = asyncio.Event()
        self._on_end: list[Callable[[], object]] = []

    def on_end(self, call: Callable[[], object]) -> None:
        """Have a function called at the end, at once where that is over."""
        if self._ended.is_set():
            call()
        else:
            self._on_end.append(call)

    def end(self) -> None:
        """Take note that all was given out, or that nobody can come for it any more; a second call does nothing."""
        self._ended.set()
        calls, self._on_end = self._on_end, []
        for call in calls:
            call()

    async def wait(self) -> None:
        """Wait until nothing more is to be given out."""
        await self._ended.wait()


def _refuse(reason: str) -> HandoverAnswer:
    return HandoverAnswer(refusal=Refusal(reason=reason))
