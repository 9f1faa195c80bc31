"""Another service of the same deployment, reached with the token and the certificate of this one."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Generic, TypeVar

import grpc

from tq_service.errors import InvalidArgumentError
from tq_service.log_message import LogMessage
from tq_service.wire.connection import CONNECTION_OPTIONS
from tq_service.wire.credentials import Credentials, Metadata, async_open_channel

_log = logging.getLogger(__name__)
Stub = TypeVar("Stub")


class Peer(Generic[Stub]):
    """A channel to another service, and the calls on it. Confined to one event loop.

    Args:
        address: where it is.
        credentials: what this service shows.
        make_stub: returns the calls on a channel.

    Attributes:
        stub: the calls; each takes the metadata of `metadata()`.

    Raises:
        InvalidArgumentError: the credentials cannot be used for this address.
    """

    def __init__(self, address: str, credentials: Credentials, make_stub: Callable[[grpc.aio.Channel], Stub]) -> None:
        self._address = address
        self._credentials = credentials
        self._make_stub = make_stub
        self._closing: set[asyncio.Task[None]] = set()
        self._opened_with = credentials.signature()
        self._channel = self._open()
        self.stub = make_stub(self._channel)

    def _open(self) -> grpc.aio.Channel:
        return async_open_channel(self._address, self._credentials, CONNECTION_OPTIONS)

    def metadata(self) -> Metadata | None:
        """Return what carries the token, None without one.

        Raises:
            UnauthenticatedError: the token's file cannot be used.
        """
        return self._credentials.metadata()

    def follow_files(self) -> None:
        """Open a new channel if the certificates have been replaced; to be called when a call has failed."""
        signature = self._credentials.signature()
        if signature == self._opened_with:
            return
        try:
            channel = self._open()
        except InvalidArgumentError as error:  # they are being replaced; the next failure finds them
            _log.warning(
                LogMessage("the connection keeps the certificates read before", address=self._address, error=error)
            )
            return
        # Not supervised: nothing depends on how the old channel ends.
        closing = asyncio.get_running_loop().create_task(self._channel.close())
        self._closing.add(closing)
        closing.add_done_callback(self._closing.discard)
        self._opened_with, self._channel, self.stub = signature, channel, self._make_stub(channel)

    async def aclose(self) -> None:
        """Close the channel; calls that are under way are cancelled."""
        await asyncio.gather(self._channel.close(), *self._closing)
