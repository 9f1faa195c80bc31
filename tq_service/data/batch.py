"""What passes between the parts of the loader: batches, the stream they belong to, errors, and the streams."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing.reduction import ForkingPickler
from typing import TYPE_CHECKING, Any, Protocol

from tensordict import TensorDict

from tq_service.data.columns import flatten, object_bytes
from tq_service.schema import EndCounts

if TYPE_CHECKING:
    from tq_service.client.batch_meta import BatchMeta


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamIdentity:
    """The incarnation of the partition and the epoch of the task: batches of different ones must not be mixed."""

    incarnation: bytes
    epoch: int


@dataclass(frozen=True, slots=True, kw_only=True)
class FetchedBatch:
    """The part of one rank of one batch.

    Attributes:
        index: its batch_index.
        data: the TensorDict, or whatever fetch_batch_fn returned.
        meta: the samples of `data`.
        micro_batches: its micro-batches, where they are split ahead of the consumer.
        on_consumed: called when the consumer begins with it, so that another batch may be fetched in its place.
    """

    index: int
    data: Any
    meta: BatchMeta
    micro_batches: Iterator[Any] | None = None
    on_consumed: Callable[[], None] | None = None

    @property
    def identity(self) -> StreamIdentity:
        """The incarnation and the epoch it belongs to."""
        return StreamIdentity(incarnation=self.meta.incarnation, epoch=self.meta.epoch)

    @property
    def size_bytes(self) -> int:
        """Bytes of its tensors, arrays, texts and images, also in plain containers; other objects are not counted."""
        return flatten(self.data).size_bytes if isinstance(self.data, TensorDict) else object_bytes(self.data)


@dataclass(frozen=True, slots=True, kw_only=True)
class End:
    """What a stream gives after its last batch.

    Attributes:
        incarnation: of the partition.
        epoch: of the task's consumption.
        counts: what became of the samples, the same for all ranks; None where fetch_batch_fn made the end itself.
    """

    incarnation: bytes = b""
    epoch: int = 0
    counts: EndCounts | None = None

    @classmethod
    def of(cls, meta: Any) -> End:
        """Return the end of a meta of status "end", whatever its type: fetch_batch_fn may have made it."""
        return cls(
            incarnation=getattr(meta, "incarnation", b""),
            epoch=getattr(meta, "epoch", 0),
            counts=getattr(meta, "end", None),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ExceptionWrapper:
    """An error of another process, or a stand-in of the same text where it cannot be pickled, and its traceback."""

    error: Exception
    traceback: str

    @classmethod
    def of(cls, error: Exception) -> ExceptionWrapper:
        """Return the wrapper of an exception that is being handled."""
        text = "".join(traceback.format_exception(error))
        try:
            ForkingPickler.loads(ForkingPickler.dumps(error))
        except Exception:  # an exception class may fail in any way to be copied
            error = RuntimeError(f"{type(error).__name__}: {error}")
        return cls(error=error, traceback=text)

    def with_note(self, origin: str) -> Exception:
        """Return the error with the traceback as a note, to be raised."""
        self.error.add_note(f"raised in {origin}:\n{self.traceback}")
        return self.error


SplitBatch = Callable[[FetchedBatch], Iterator[Any]]
"""Makes the micro-batches of a batch, each when it is asked for."""


class BatchStream(Protocol):
    """Gives batches one after the other; used by one thread."""

    @property
    def next_index(self) -> int:
        """The batch_index that `read` gives next."""
        ...

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        ...

    def read(self) -> FetchedBatch | End | None:
        """Wait for the next batch, or the end; None once it is closed. Errors of fetching are raised here."""
        ...

    def close(self) -> None:
        """Stop fetching and drop what was fetched ahead; it will be fetched again when asked for. Idempotent."""
        ...


class FetchStream(BatchStream, Protocol):
    """A stream that fetches its batches from the service."""

    @property
    def fetched_until(self) -> int:
        """The batch_index behind the last batch that was fetched; 0 before the first."""
        ...
