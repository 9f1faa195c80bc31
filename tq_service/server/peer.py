"""Connections to other services in the deployment, and logging of their outages."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from typing import Any, Final, Generic, TypeVar

import grpc

from tq_service.addresses import cause_of
from tq_service.errors import InvalidArgumentError
from tq_service.log_message import LogMessage
from tq_service.wire.connection import CONNECTION_OPTIONS, Credentials, Metadata, open_channel

_log = logging.getLogger(__name__)
Stub = TypeVar("Stub")
_NO_ANSWER: Final = {grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED}


class Peer(Generic[Stub]):
    """A gRPC channel and stub for another service in the deployment. Use each peer from a single event loop.

    Args:
        address: address of the other service.
        credentials: credentials of this service.
        make_stub: the generated stub class, which is typed for sync channels.
        options: gRPC options for the channel.

    Attributes:
        stub: current stub. Pass `metadata()` with each call through the stub.

    Raises:
        InvalidArgumentError: the credentials must not be sent to this address, for example because the connection is
            plaintext.
    """

    def __init__(
        self,
        address: str,
        credentials: Credentials,
        make_stub: Callable[[grpc.aio.Channel], Any],
        options: Sequence[tuple[str, Any]] = CONNECTION_OPTIONS,
    ) -> None:
        self._address = address
        self._options = options
        self._credentials = credentials
        self._make_stub = make_stub
        self._closing: set[asyncio.Task[None]] = set()
        self._opened_with = credentials.signature()
        self._channel = open_channel(grpc.aio, address, credentials, options)
        self.stub: Stub = make_stub(self._channel)

    def metadata(self) -> Metadata | None:
        """Return call metadata that contains the credentials, or None if there are no credentials.

        Raises:
            UnauthenticatedError: the token file is unusable.
        """
        return self._credentials.metadata()

    def follow_files(self) -> None:
        """Open a new channel if the certificates have changed. Call this method after each failed call."""
        signature = self._credentials.signature()
        if signature == self._opened_with:
            return
        try:
            channel = open_channel(grpc.aio, self._address, self._credentials, self._options)
        except InvalidArgumentError as error:  # the files are being replaced, so retry after the next failed call
            _log.warning(
                LogMessage(
                    "could not use the new certificates; the old ones stay in use", address=self._address, error=error
                )
            )
            return
        # Not supervised, because nothing depends on closing the old channel.
        closing = asyncio.get_running_loop().create_task(self._channel.close())
        self._closing.add(closing)
        closing.add_done_callback(self._closing.discard)
        self._opened_with, self._channel, self.stub = signature, channel, self._make_stub(channel)

    async def aclose(self) -> None:
        """Close the channel and cancel running calls."""
        await asyncio.gather(self._channel.close(), *self._closing)


class PeerOutage:
    """Logs when another service's outages start and end, and each new problem during an outage.

    Args:
        log: logger that receives the messages.
        peer: name that log messages use for the other service.
        fields: fields added to each log message, such as the address.
    """

    def __init__(self, log: logging.Logger, peer: str, **fields: str) -> None:
        self._log = log
        self._peer = peer
        self._fields = fields
        self._began: float | None = None
        self._problem = ""

    def lasts(self, problem: str, error: Exception, level: int = logging.WARNING) -> None:
        """Record that a call failed. Log the failure if it is the first of an outage or its problem is new.

        Args:
            problem: verb phrase that describes the problem, such as "does not answer".
            error: error raised by the call. The error's text may differ between attempts.
            level: severity of the log message.
        """
        if self._began is None:
            self._began = time.monotonic()
        if problem != self._problem:
            self._problem = problem
            reason = str(error)
            if isinstance(error, grpc.aio.AioRpcError):
                reason = error.details() or error.code().name
                reason = cause_of(reason) if error.code() in _NO_ANSWER else reason
            self._log.log(level, LogMessage(f"{self._peer} {problem}", **self._fields, error=reason))

    def is_over(self) -> None:
        """Record that a call succeeded, and log the end of the outage if there was one."""
        if self._began is not None:
            seconds = round(time.monotonic() - self._began, 1)
            self._log.info(LogMessage(f"{self._peer} is responding again", **self._fields, after_seconds=seconds))
            self._began, self._problem = None, ""
