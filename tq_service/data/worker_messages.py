"""What a worker process and its parent tell each other."""

from __future__ import annotations

import traceback
from dataclasses import dataclass
from multiprocessing.reduction import ForkingPickler

from tq_service.data.batch import Life
from tq_service.data.end import End
from tq_service.data.transport import Parcel


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """To a worker: fetch a batch.

    Attributes:
        stream: number of the stream that wants it; orders of earlier streams are void.
        partition_id: the partition.
        batch_index: which batch.
        life: the life that the batch must belong to, where known.
        released: blocks of the worker that are free again.
    """

    stream: int
    partition_id: str
    batch_index: int
    life: Life | None
    released: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Stop:
    """To a worker: nothing ordered by `stream` or an earlier one is wanted any more."""

    stream: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """What a worker sends instead of a batch: the error, or a stand-in where it cannot travel, and where it was."""

    error: Exception
    worker_traceback: str

    @classmethod
    def of(cls, error: Exception) -> Failure:
        """Return the failure of an exception that is being handled."""
        text = "".join(traceback.format_exception(error))
        try:
            ForkingPickler.loads(ForkingPickler.dumps(error))
        except Exception:  # an exception class may fail in any way to be copied
            error = RuntimeError(f"{type(error).__name__}: {error}")
        return cls(error=error, worker_traceback=text)


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """From a worker: what became of an order.

    Attributes:
        stream: of the order.
        batch_index: of the order.
        content: the batch, whose descriptor follows if its block is new; an error; the end of the partition.
    """

    stream: int
    batch_index: int
    content: Parcel | Failure | End
