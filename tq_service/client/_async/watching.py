"""Watches: streams of changes to partitions."""

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
    """An endless iterator over changes; see `watch`. Use it in a `with` block, or close it after use.

    The watch resumes automatically after a lost connection, a service restart or a change of leader. A watch must have
    only one reader. `aclose` ends the iteration. One thread can close a blocking watch while another is reading it.

    Args:
        calls: object that makes the client's calls.
        request: prefix to watch, options and start revision.
        timeout: number of seconds that the service may be unavailable before the iterator fails.

    Attributes:
        revision: revision of the last complete update, from which the watch resumes. None before the first update.
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
                # A DeadlineError here was raised by the service, which ends streams whose reader is too slow.
                failure = UnavailableError(error.message) if isinstance(error, DeadlineError) else error
                backoff = backoff or Backoff(Deadline.after(self._timeout))
                await async_sleep(backoff.after(failure))
                continue
            if answer is not None:
                return self._update(answer)
            self._call = None  # the service ended the stream at its time limit, or is shutting down
        raise StopAsyncIteration

    async def _read(self, remaining_seconds: float) -> pb.WatchResponse | None:
        endpoint = self._calls.endpoint()
        # A stream that breaks after an hour does not indicate an hour-long outage, so only log failures to open a
        # stream.
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
        """End the watch and cancel its call."""
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
    """Client calls that watch partitions. See `AsyncClient`."""

    def watch(
        self,
        prefix: str = "",
        *,
        revision: Revision | None = None,
        samples: bool = True,
        tasks: bool = True,
        progress_interval: float = _PROGRESS_SECONDS,
        timeout: float | None = None,
    ) -> AsyncWatch:
        """Return an iterator over changes to partitions, samples, custom_meta and tasks.

        Each update contains the latest state of everything that changed, without intermediate states, so a slow reader
        receives fewer updates. A large set of changes is split into several updates. Only the last of these updates has
        a `revision`. A watch receives about ten updates per second at most, and fewer if there are very many watches.

        Args:
            prefix: name prefix of the partitions to watch. If empty, all partitions are watched.
            revision: revision to start from, as returned by `list_partitions`, `lookup_samples`, `describe_partition`
                or an update. If None, the watch starts with the complete state. If changes were missed, for example
                after a restart of the service, the complete state is sent again, in updates with `is_reset` set.
            samples: whether to watch samples.
            tasks: whether to watch tasks. If True, claims trigger updates.
            progress_interval: number of seconds without changes, at least 0.1, after which an empty update is sent.
            timeout: number of seconds that the service may be unavailable before the iterator fails. Defaults to the
                client's `timeout`.

        Raises, from the iterator:
            CompactedError: the changes since `revision` are no longer stored. To recover, list the partitions again, or
                watch without a revision.
            UnavailableError: the service was unavailable for longer than the timeout.
        """
        request = request_of(
            pb.WatchRequest,
            prefix=self._namespace.prefix + prefix,
            omit_samples=not samples,
            omit_tasks=not tasks,
            progress_interval=to_duration(seconds("progress_interval", progress_interval)),
        )
        if revision is not None:
            request.revision.CopyFrom(to_message(pb.Revision, revision))
        return AsyncWatch(self._calls, request, self.timeout if timeout is None else seconds("timeout", timeout))
