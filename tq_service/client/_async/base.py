"""What all parts of the client share: address, timeout, calls and their end."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Literal, Self, TypeVar

from tq_service.client._async.calls import AsyncCalls
from tq_service.client.channel import resolve_address
from tq_service.client.concurrency import AsyncBackgroundCalls
from tq_service.client.placement import PlacementGrant
from tq_service.client.requests import seconds
from tq_service.client.retry import Deadline
from tq_service.wire.credentials import Credentials, Tls

DEFAULT_TIMEOUT_SECONDS = 60.0

if TYPE_CHECKING:
    from collections.abc import Callable

    import grpc

    from tq_service.client.channel import AsyncControllerStub

    Request = TypeVar("Request")
    Response = TypeVar("Response")
    Method = Callable[[AsyncControllerStub], grpc.aio.UnaryUnaryMultiCallable[Request, Response]]


class AsyncBase:
    """Holds the calls of a client. See `AsyncClient`."""

    def __init__(
        self,
        address: str | None = None,
        timeout: float = DEFAULT_TIMEOUT_SECONDS,
        *,
        token: str | Path | Literal[False] | None = None,
        tls: Tls | Literal[False] | None = None,
        insecure: bool | None = None,
    ) -> None:
        self.address = resolve_address(address)
        self.timeout = seconds("timeout", timeout)
        self._credentials = Credentials(token, tls, insecure)
        self._calls = AsyncCalls(self.address, self._credentials)
        self._background_calls = AsyncBackgroundCalls()
        self._placement = PlacementGrant()

    def _deadline(self, timeout: float | None, more_seconds: float = 0.0) -> Deadline:
        span = self.timeout if timeout is None else seconds("timeout", timeout)
        return Deadline.after(span + more_seconds)

    async def _ask(self, pick: Method[Request, Response], request: Request, timeout: float | None) -> Response:
        """Make a call to the controller, tried again until the timeout."""
        return await self._calls.unary(lambda to: pick(to.controller), request, self._deadline(timeout))

    async def aclose(self) -> None:
        """Make the calls that are due, such as releasing claims, and close the channels."""
        await self._background_calls.drain()
        await self._calls.channels.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.aclose()

    def __reduce__(self) -> tuple[object, ...]:
        return partial(type(self), **self._credentials.arguments()), (self.address, self.timeout)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.address!r}, timeout={self.timeout:g})"
