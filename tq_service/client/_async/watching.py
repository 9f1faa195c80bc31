"""Watching: what changes of partitions, as it changes."""

from __future__ import annotations

from types import TracebackType
from typing import Any, Self

from tq_service.client._async.calls import AsyncBase, AsyncCalls
from tq_service.client.requests import request_of, seconds
from tq_service.client.transport import Backoff, Deadline, async_next_answer, async_sleep, method_of
from tq_service.client.updates import WatchUpdate
from tq_service.errors import CompactedError, DeadlineError, TqError, UnavailableError
from tq_service.results import Revision
from tq_service.v1 import controller_service_pb2 as pb
from tq_service.wire.messages import to_duration, to_message

_PROGRESS_SECONDS = 10.0


class AsyncWatch:
    """Yields what changes, without end; see `watch`. Use it in a `with` block, or close it.

    Where the connection breaks, the service restarts or another takes its place, it goes on by itself. It is for one
    reader; `aclose` may be called meanwhile, from any thread for the sync form, and ends the iteration.

    Args:
        calls: those of the client.
        request: what is watched, and from where on.
        timeout: seconds for which the service may be unavailable.

    Attributes:
        revision: from which the watch goes on: that of the last whole update, None before there was one.
    """

    def __init__(self, calls: AsyncCalls, request: pb.WatchRequest, timeout: float) -> None:
        self.revision: Revision | None = None
        self._calls = calls
        self._request = request
        self._timeout = timeout
        self._starts_over = not request.HasField("revision")
        self._is_reset = False
        self._call: Any = None
        self._is_closed = False

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> WatchUpdate:
        backoff: Backoff | None = None
        while not self._is_closed:
            try:
                answer = await self._read(self._timeout if backoff is None else backoff.deadline.remaining())
            except TqError as error:
                self._call = None
                if self._is_closed:
                    break
                if isinstance(error, CompactedError) and self._starts_over:
                    self._request.ClearField("revision")
                    continue
                # A DeadlineError is the service's, which lets go where updates are not read for long.
                failure = UnavailableError(error.message) if isinstance(error, DeadlineError) else error
                backoff = backoff or Backoff(Deadline.after(self._timeout))
                await async_sleep(backoff.after(failure))
                continue
            if answer is not None:
                return self._update(answer)
            self._call = None  # it has lasted long enough, or the service ends
        raise StopAsyncIteration

    async def _read(self, remaining_seconds: float) -> pb.WatchResponse | None:
        endpoint = self._calls.endpoint()
        # A stream that breaks after an hour is no outage of an hour: only tries to begin one are logged.
        with endpoint.errors(Deadline.after(remaining_seconds), is_retried=self._call is None):
            if self._call is None:
                self._is_reset = not self._request.HasField("revision")
                watch: Any = endpoint.channel.unary_stream(
                    method_of(pb.WatchResponse.DESCRIPTOR).name, response_deserializer=pb.WatchResponse.FromString
                )
                self._call = watch(self._request.SerializeToString(), metadata=endpoint.metadata())
            return await async_next_answer(self._call)

    def _update(self, answer: pb.WatchResponse) -> WatchUpdate:
        update = WatchUpdate.from_proto(answer, self._calls.namespace, is_reset=self._is_reset)
        self._is_reset = False
        if update.revision is not None:
            self.revision = update.revision
            self._request.revision.CopyFrom(answer.revision)
        return update

    async def aclose(self) -> None:
        """End the watch."""
        self._is_closed = True
        call, self._call = self._call, None
        if call is not None:
            call.cancel()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.aclose()


class AsyncWatchCalls(AsyncBase):
    """The part of the client that watches. See `AsyncClient`."""

    def watch(
        self,
        prefix: str = "",
        *,
        revision: Revision | None = None,
        samples: bool = True,
        tasks: bool = True,
        progress_seconds: float = _PROGRESS_SECONDS,
        timeout: float | None = None,
    ) -> AsyncWatch:
        """Return an iterator over what changes in partitions: made, sealed, cleared; samples, their tags, tasks.

        Each update has the latest state of what has changed, not every step between: a slow reader gets fewer
        and later ones. Many changes come in several updates, of which the last has a `revision`. Updates come at most
        some ten times a second; where very many watch, less often.

        Args:
            prefix: how the names of the partitions begin; empty: all.
            revision: goes on from here, as `list_partitions`, `lookup_samples`, `describe_partition` and updates have
                it. None: begins with the whole state, and again so where changes were missed, as after a restart of the
                service: such an update says `is_reset`.
            samples: whether samples are watched.
            tasks: whether tasks are, so that claims yield updates.
            progress_seconds: after which time without a change there is an update without any, 0.1 or more.
            timeout: seconds for which the service may be unavailable before the iterator fails; None: the client's.

        Raises, from the iterator:
            CompactedError: changes since `revision` are not known any more: list again, or watch without a revision.
            UnavailableError: the service could not be reached until the timeout.
        """
        request = request_of(
            pb.WatchRequest,
            prefix=self._namespace.prefix + prefix,
            omit_samples=not samples,
            omit_tasks=not tasks,
            progress_interval=to_duration(seconds("progress_seconds", progress_seconds)),
        )
        if revision is not None:
            request.revision.CopyFrom(to_message(pb.Revision, revision))
        return AsyncWatch(self._calls, request, self.timeout if timeout is None else seconds("timeout", timeout))
