"""A client's channels, the calls made over them, and the state that all parts of the client share."""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Literal, Self, TypeVar
from weakref import WeakValueDictionary

import grpc
from google.protobuf.message import Message

from tq_service.client.allocations import Allocations
from tq_service.client.batch_meta import NO_NAMESPACE, BatchMeta, Namespace
from tq_service.client.gathering import Lines
from tq_service.client.requests import PlacementGrant, request_of, seconds
from tq_service.client.transport import (
    CHANNEL_OPTIONS,
    CLUSTER_CHANNEL_OPTIONS,
    AsyncBackgroundCalls,
    AsyncSignal,
    AsyncUnaryCalls,
    Backoff,
    Deadline,
    Outage,
    async_current_home,
    async_is_of_closing,
    async_is_over,
    async_leave,
    async_sleep,
    carried,
    error_of,
    import_tensordict,
    metadata_of,
    method_of,
    resolve_address,
)
from tq_service.dataplane.bulk.client import BulkLink
from tq_service.dataplane.driver import AsyncGrpcDriver
from tq_service.dataplane.shared_memory.client import HostLink
from tq_service.errors import CallCancelledError, PreconditionError, TqError, UnavailableError
from tq_service.schema import FieldSpec
from tq_service.v1 import controller_service_pb2 as pb
from tq_service.wire.connection import Controllers, Credentials, Metadata, Signature, Tls, open_channel
from tq_service.wire.error_table import status_from_trailers
from tq_service.wire.metadata import decode_spec

T = TypeVar("T")
Response = TypeVar("Response", bound=Message)

DEFAULT_TIMEOUT_SECONDS = 60.0

# If a server responds "not yet" sooner than this, it does not wait for results, so pause before the next call.
_SHORT_POLL_SECONDS: Final = 0.05
_MOST_REFUSALS: Final = 64
_CLOSE_SECONDS: Final = 5.0


class AsyncEndpoint:
    """A channel to an address, and the calls made on the channel."""

    def __init__(self, address: str, calls: AsyncCalls) -> None:
        self.address = address
        options = CLUSTER_CHANNEL_OPTIONS if calls.controllers.has_several else CHANNEL_OPTIONS
        self.channel = open_channel(grpc.aio, address, calls.credentials, options)
        self.driver = AsyncGrpcDriver(
            self.channel,
            metadata=self.metadata,
            errors=self.errors,
            link=HostLink(),
            bulk=BulkLink(address, calls.credentials.tls),
        )
        self.unary = AsyncUnaryCalls(self.channel, calls.credentials.metadata)
        self._calls = calls
        self._outage = Outage(address, calls.credentials.tls)

    def metadata(self) -> Metadata | None:
        """Return the metadata to send with a call: the token and the trace context."""
        return metadata_of(self._calls.credentials.metadata(), carried())

    @contextmanager
    def errors(self, deadline: Deadline, *, is_retried: bool = True) -> Iterator[None]:
        """Convert gRPC errors raised on the channel to TqError, and track whether the service is reachable."""
        began = time.monotonic()
        try:
            yield
            self._outage.is_over()
        except grpc.RpcError as error:
            failure = self._calls.namespace.explain(error_of(error, self.address, self._outage.finding))
            if isinstance(failure, UnavailableError):
                self._calls.controllers.note(self.address, failure)
                self._calls.leave_outdated()
                if is_retried:
                    self._outage.lasts(began, failure, deadline.remaining())
            elif status_from_trailers(error.trailing_metadata()) is not None:
                self._outage.is_over()
            raise failure from None
        except BaseException as error:
            if self._calls.closed and async_is_of_closing(error):
                raise CallCancelledError(f"the client was closed during a call to {self.address}") from None
            raise


async def async_close_all(endpoints: dict[Any, AsyncEndpoint]) -> None:
    """Close all channels of an event loop or process, and cancel calls in flight."""
    while endpoints:
        _, endpoint = endpoints.popitem()
        endpoint.driver.close()
        endpoint.unary.close()
        await endpoint.channel.close()


class AsyncCalls:
    """A client's channels, and the calls made on them.

    Each event loop and process opens its own channels on first use. An empty address refers to the leader.

    Attributes:
        controllers: controllers known to the client.
        closed: whether `aclose` was called.
    """

    def __init__(self, address: str, credentials: Credentials, namespace: Namespace = NO_NAMESPACE) -> None:
        self.controllers = Controllers(address)
        self.credentials = credentials
        self.namespace = namespace
        self._opening = credentials.signature(), self.controllers.has_several
        # Keyed by event loop or process, then by address and channel settings. Calls may still be in flight on outdated
        # channels.
        self._channels: dict[Any, dict[tuple[str, tuple[Signature, bool]], AsyncEndpoint]] = {}
        self.closed = False

    def endpoint(self, address: str = "") -> AsyncEndpoint:
        """Return the channel to an address.

        Raises:
            PreconditionError: the client is closed, or this process was forked and cannot open channels.
            InvalidArgumentError: the credentials cannot be used for this address.
        """
        self._check_open()
        endpoints, target = self._here(), address or self.controllers.current
        key = target, self._opening
        # Do not use a lock, because a fork could leave it locked. Racing threads may create two channels, but all
        # threads use the stored channel.
        endpoint = endpoints.get(key) or endpoints.setdefault(key, AsyncEndpoint(target, self))
        self._check_open()  # check again: another thread may have closed the client
        return endpoint

    def _here(self) -> dict[tuple[str, tuple[Signature, bool]], AsyncEndpoint]:
        """Return the channels of the current event loop or process.

        The first call in a loop or process also drops the channels of closed loops.
        """
        home = async_current_home()
        channels = self._channels.get(home)
        if channels is None:
            for other in list(self._channels):
                if async_is_over(other):
                    self._leave(other)
            channels = self._channels.setdefault(home, {})
        return channels

    def _leave(self, home: Any) -> None:
        channels = self._channels.pop(home, None)
        if channels is not None:
            async_leave(home, channels, lambda: async_close_all(channels))

    async def retried(
        self,
        attempt: Callable[[], Awaitable[T]],
        deadline: Deadline,
        note: Callable[[TqError], object] = lambda failure: None,
    ) -> T:
        """Call `attempt` and return its result. After an UnavailableError, retry with back-off until the deadline.

        `note` is called with every TqError.
        """
        backoff: Backoff | None = None
        while True:
            try:
                return await attempt()
            except TqError as failure:
                note(failure)
                backoff = backoff or Backoff(deadline)
                pause = backoff.after(failure)
            await async_sleep(pause)

    async def polled(
        self,
        attempt: Callable[[float], Awaitable[T]],
        is_not_yet: Callable[[T], bool],
        wait: Deadline,
        deadline: Deadline,
    ) -> T:
        """Call `attempt` with the seconds remaining in `wait`. Retry while the result is "not yet" and time remains."""
        backoff: Backoff | None = None
        while True:
            asked = time.monotonic()
            answer = await self.retried(lambda: attempt(wait.remaining()), deadline)
            if not is_not_yet(answer) or not wait.remaining():
                return answer
            backoff = backoff or Backoff(deadline)
            if time.monotonic() - asked < _SHORT_POLL_SECONDS:
                await async_sleep(min(backoff.pause(), wait.remaining()))

    async def unary(self, kind: type[Response], request: Message, deadline: Deadline, address: str = "") -> Response:
        """Call the unary method whose response type is `kind`, and retry until the deadline."""
        return await self.retried(lambda: self.unary_once(kind, request, deadline, address), deadline)

    async def unary_once(
        self,
        kind: type[Response],
        request: Message,
        deadline: Deadline,
        address: str = "",
        *,
        is_retried: bool = True,
    ) -> Response:
        """Make a unary call once. Set `is_retried` if the caller retries while the service is unavailable."""
        endpoint = self.endpoint(address)
        with endpoint.errors(deadline, is_retried=is_retried):
            return await endpoint.unary.make(kind, request.SerializeToString(), deadline)

    def _check_open(self) -> None:
        if self.closed:
            raise PreconditionError("the client is closed; create a new one")

    def leave_outdated(self) -> None:
        """Close channels with outdated settings. Calls in flight on these channels may finish."""
        self._opening = self.credentials.signature(), self.controllers.has_several
        for (_, opening), endpoint in list(self._here().items()):
            if opening != self._opening:
                endpoint.driver.close()

    async def aclose(self) -> None:
        """Close all channels and cancel calls in flight. Calls in other event loops are cancelled soon afterward."""
        self.closed = True
        if not self._channels:
            return
        here = async_current_home()
        for home in list(self._channels):
            if home != here:
                self._leave(home)
        await async_close_all(self._channels.pop(here, {}))


class AsyncBase:
    """Base class for the parts of a client. See `AsyncClient`."""

    def __init__(
        self,
        address: str | Sequence[str] | None = None,
        timeout: float = DEFAULT_TIMEOUT_SECONDS,
        *,
        token: str | Path | Literal[False] | None = None,
        tls: Tls | Literal[False] | None = None,
        insecure: bool | None = None,
        namespace: str | Literal[False] | None = None,
        gathers_puts: bool = True,
    ) -> None:
        self.address = resolve_address(address)
        self.timeout = seconds("timeout", timeout)
        self._credentials = Credentials(token, tls, insecure)
        self._namespace = Namespace.of(namespace)
        self._calls = AsyncCalls(self.address, self._credentials, self._namespace)
        self._background_calls = AsyncBackgroundCalls()
        self._placement = PlacementGrant()
        self._allocations: Allocations = WeakValueDictionary()
        self.gathers_puts = bool(gathers_puts)
        self._lines_of: dict[Any, Lines] = {}  # lines of puts, keyed by event loop or process
        self._apart: dict[str, float] = {}  # time after which the puts of a partition may be gathered again
        self._refused_lists: deque[str] = deque(maxlen=_MOST_REFUSALS)  # partitions that rejected lists, see `put`
        if "torch" in sys.modules:  # otherwise defer the import of torch, which takes seconds, to `get_data`
            import_tensordict()

    @property
    def namespace(self) -> str:
        """The part before the "/" in the client's full partition names. Empty if the client has no namespace."""
        return self._namespace.name

    def _deadline(self, timeout: float | None, more_seconds: float = 0.0) -> Deadline:
        span = self.timeout if timeout is None else seconds("timeout", timeout)
        return Deadline.after(span + more_seconds)

    async def _ask(
        self, kind: type[Response], timeout: float | None, *, batch: BatchMeta | None = None, **arguments: Any
    ) -> Response:
        """Call the controller, retry until the timeout, and merge the pages of a list into one response.

        Args:
            kind: the response type, which determines the call and its request type.
            timeout: seconds until the call fails. Defaults to the client's `timeout`.
            batch: a batch whose partition the call refers to. If None, `partition_id` (if passed) is a name in the
                client's namespace.
            **arguments: fields of the request; see `request_of`.
        """
        if batch is not None:
            arguments["partition_id"] = batch.full_partition_id
        elif "partition_id" in arguments:
            arguments["partition_id"] = self._namespace.full_name(arguments["partition_id"])
        request = request_of(method_of(kind.DESCRIPTOR).request, **arguments)
        answer = kind()
        async for page in self._pages(kind, request, self._deadline(timeout)):
            answer.MergeFrom(page)
        return answer

    async def _ack(self, metadata: BatchMeta, timeout: float | None) -> int:
        """Acknowledge all samples of a leased batch, and return the number of samples acknowledged by this call."""
        if not metadata.handled_indexes.size:
            return 0
        answer = await self._ask(
            pb.AckClaimResponse,
            timeout,
            batch=metadata,
            task_name=metadata.task_name,
            claim_request_id=metadata.claim_id,
            incarnation=metadata.incarnation,
            global_indexes=metadata.handled_indexes,
        )
        return answer.acked_count

    async def _fields_of(self, full_partition_id: str, deadline: Deadline) -> dict[str, FieldSpec]:
        """Return a dict of a partition's fields, keyed by name."""
        request = pb.DescribePartitionRequest(partition_id=full_partition_id)
        answer = await self._calls.unary(pb.DescribePartitionResponse, request, deadline)
        return {field.spec.name: decode_spec(field.spec) for field in answer.fields}

    async def _pages(
        self, kind: type[Response], request: Any, deadline: Deadline, first: Response | None = None
    ) -> AsyncIterator[Response]:
        """Yield the pages of a list, making one call per page. `first` is the first page, if already received."""
        answer: Any = first
        while True:
            if answer is None:
                answer = await self._calls.unary(kind, request, deadline)
            yield answer
            if not getattr(answer, "next_page_token", ""):
                return
            request.page_token, answer = answer.next_page_token, None

    async def aclose(self) -> None:
        """Send outstanding calls, such as claim releases, and close the channels.

        Gathered puts that have not been sent yet are sent first. The client waits for the responses to all puts.
        """
        await self._background_calls.drain()
        await self._send_gathered()
        await self._calls.aclose()

    async def _send_gathered(self) -> None:
        """Wait at most a few seconds for the responses to puts gathered by this event loop or process."""
        lines = self._lines_of.get(async_current_home()) if self._lines_of else None
        if lines is not None:
            lines.await_gathered(signal := AsyncSignal())
            await signal.wait_until(Deadline.after(_CLOSE_SECONDS))

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.aclose()

    def __reduce__(self) -> tuple[object, ...]:
        arguments = self._credentials.arguments()
        arguments |= {"namespace": self.namespace or False, "gathers_puts": self.gathers_puts}
        return partial(type(self), **arguments), (self.address, self.timeout)

    def __repr__(self) -> str:
        namespace = f", namespace={self.namespace!r}" if self.namespace else ""
        gathers = "" if self.gathers_puts else ", gathers_puts=False"
        return f"{type(self).__name__}({self.address!r}, timeout={self.timeout:g}{namespace}{gathers})"
