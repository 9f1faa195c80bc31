"""StreamingDataset: the micro-batches of one DP rank, from the first batch to the end."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal, get_args

from torch.utils.data import IterableDataset, get_worker_info

from tq_service.client.transport import resolve_address, warn_of_wait
from tq_service.client_probes import timed
from tq_service.data.batch import BatchStream, End, FetchedBatch, StreamIdentity
from tq_service.data.end import end_warning
from tq_service.data.micro_batches import ProcessBatch, micro_batch_count, split_micro_batches
from tq_service.data.pack_options import PackOptions
from tq_service.data.packed_batches import PackBatches
from tq_service.data.replay_buffer import ReplayBuffer, ReplayStream
from tq_service.data.replicas import ReplicaGroup, rank_and_size
from tq_service.data.source import (
    BatchRequest,
    BatchSource,
    ClientFactory,
    FetchBatch,
    InlineStream,
    OnWait,
    fetch_batch,
)
from tq_service.errors import InvalidArgumentError, StaleEpochError, StaleIncarnationError
from tq_service.schema import BatchUnit, ReadLayout

if TYPE_CHECKING:
    from tq_service.data.replicas import Ranks
    from tq_service.wire.connection import Tls

_log = logging.getLogger(__name__)

_OTHER_DP_SIZE: Final = (
    "; to resume with another number of ranks, clear each micro-batch once it is trained, call "
    "reset_consumption(partition_id, task_name) once, and start the loaders without a state (docs/data_loading.md)"
)

OpenRest = Callable[[BatchSource, int, StreamIdentity | None], BatchStream]
"""Opens a stream of a source, given the first batch_index and the identity that its batches must have."""


class StreamingDataset(IterableDataset[Any]):
    """The micro-batches of one DP rank.

    Iterating it fetches in the consumer's thread; `StreamingDataLoader` fetches ahead. Lifecycle::

        __init__ ──> batch_index = start_batch_index
                        │
          ┌─────────────┴── iter ──> (micro_batch, meta), ... of batch 0, batch 1, ... ──> end
          │                 │
          │                 ├─ break, then iter:   continues after the last batch delivered
          │                 ├─ reset():            from batch 0 again, fetched again or out of the replay buffer
          │                 └─ step(partition_id): batch 0 of another partition, buffer dropped
          └─────────────────┘

    A live iterator follows `reset()` and `step()` with its next micro-batch. A batch counts as delivered with its first
    micro-batch; `batch_index` is then the next one, and is what a checkpoint keeps for `start_batch_index`.

    An end without one micro-batch although samples were inserted is an error on all ranks, `NothingDeliveredError`; an
    end that skips some samples is logged once, as a warning with the counts and reasons.

    Every DP rank yields the same number of micro-batches, empty ones included: they have the same fields, dtypes and
    layouts and 0 rows, so that each rank can take part in each collective. Fields that are not declared, and so dense
    until a row differs, may become jagged between two fetches: declare them, or give `layout`.

    Args:
        address: where the service is, as `Client(address)` takes it: "host:port", or the host alone for port 50051,
            or several addresses, in a list or with commas between them; None: `TQ_ADDRESS`, then localhost:50051.
        batch_size: samples (or groups, see `batch_unit`) of a batch, for each rank.
        micro_batch_size: samples of a micro-batch; None: the batch is one micro-batch, unless the sampler splits it.
        data_fields: fields that make a sample ready and that are fetched.
        partition_id: the partition; one that does not exist yet is waited for.
        task_name: the consumer; tasks consume a partition independently.
        dp_rank: this rank; replicas of a rank give the same number and get the same batches.
        dp_size: number of ranks.
        dp_group: a `DeviceMesh` or process group of the DP ranks, which says `dp_rank` and `dp_size` instead; of a mesh
            of several dimensions, such as that of hybrid sharding, all of them count.
        replica_group: a process group, or `DeviceMesh` of one dimension, of the processes that hold this DP rank
            together. The first of them asks and broadcasts; without it each asks for itself and gets the same batches.
            All of them iterate, reset, step and end alike, since the broadcast is a collective, in the consumer's
            thread. In a group without a backend for CPU tensors the bytes pass through the accelerator.
        sampler: name of the sampler.
        sampler_config: its options.
        should_check_consumption_status: finite mode: end also when everything inserted so far is consumed. Otherwise
            (streaming mode) batches are waited for until the partition is sealed.
        fetch_batch_fn: fetches a batch instead of `fetch_batch`, whose docstring has the keywords; runs in the
            prefetching thread or worker, which it must be picklable for with spawn and forkserver. One that claims as a
            queue worker is for at most one worker: batches are delivered in order, whichever worker has them.
        process_batch_fn: called as `process_batch_fn(data, meta, micro_batch_size=...)` in the consumer's thread and
            process instead of `split_micro_batches`; what it returns, an iterable, is yielded item by item.
        pack: yield a `PackedMicroBatch` for each pack of the plan, one sequence of `pack.pack_max_length` tokens, as
            `split_packs` makes it; for the sampler `packed`.
        layout: of the fields that are fetched, see `Client.get_data`; None: as the fields are.
        max_uses: how often a sample is delivered before it counts as consumed, see `Client.get_meta`; None: once.
        start_batch_index: the first batch, for a rank that is restarted in the middle.
        where: conditions on custom_meta, such as `("version", ">=", 3)`, all of which must hold.
        order_by: custom_meta columns that order ready samples.
        drop_last: leave out the last batch if it is short.
        batch_unit: whether `batch_size` counts samples or groups.
        replay_buffer_bytes: most bytes of batches, the first ones, that are kept in memory for `reset()`. Tensors,
            arrays and texts count. 0: none are kept, and `reset()` fetches the same batches again.
        max_wait: seconds that one call waits for a batch before it is made again, 10 at the most.
        timeout: seconds that a call may take beyond `max_wait`, retries included: how long the server may be away.
        client_factory: opens the sync client instead of `Client(address, ...)`. It gives the client its `token`, `tls`,
            `insecure` and `namespace` itself.
        token: the bearer token, or the path of its file, as `Client(token=...)` takes it; workers get it too.
        tls: how to reach the service over TLS, as `Client(tls=...)` takes it.
        insecure: whether the token may be sent in plaintext, as `Client(insecure=...)` takes it.
        namespace: of the partition, as `Client(namespace=...)` takes it.
        on_wait: called with the `WaitReason` of a wait that has lasted 10 s, and then each minute, in the thread or
            worker that fetches, for which it must be picklable; None: the reason is logged as a warning.

    Raises:
        InvalidArgumentError: an argument cannot be right.
    """

    def __init__(
        self,
        address: str | Sequence[str] | None = None,
        *,
        batch_size: int,
        micro_batch_size: int | None = None,
        data_fields: Sequence[str],
        partition_id: str,
        task_name: str,
        dp_rank: int = 0,
        dp_size: int = 1,
        dp_group: Ranks | None = None,
        replica_group: Ranks | None = None,
        sampler: str = "sequential",
        sampler_config: Mapping[str, Any] | None = None,
        should_check_consumption_status: bool = False,
        fetch_batch_fn: FetchBatch | None = None,
        process_batch_fn: ProcessBatch | None = None,
        pack: PackOptions | None = None,
        layout: ReadLayout | None = None,
        max_uses: int | None = None,
        start_batch_index: int = 0,
        where: Sequence[tuple[str, str, Any]] = (),
        order_by: Sequence[Any] = (),
        drop_last: bool = False,
        batch_unit: BatchUnit = "sample",
        replay_buffer_bytes: int = 0,
        max_wait: float = 2.0,
        timeout: float = 120.0,
        client_factory: ClientFactory | None = None,
        token: str | Path | Literal[False] | None = None,
        tls: Tls | Literal[False] | None = None,
        insecure: bool | None = None,
        namespace: str | Literal[False] | None = None,
        on_wait: OnWait | None = None,
    ) -> None:
        super().__init__()
        _require_fields(data_fields)
        if address is not None and client_factory is None:
            address = resolve_address(address)
        _require(batch_size >= 1, "batch_size", batch_size, "at least 1")
        _require(micro_batch_size is None or micro_batch_size >= 1, "micro_batch_size", micro_batch_size, "at least 1")
        if dp_group is not None:
            _require((dp_rank, dp_size) == (0, 1), "dp_group", "dp_rank or dp_size as well", "one of the two")
            dp_rank, dp_size = rank_and_size(dp_group)
        _require(dp_size >= 1, "dp_size", dp_size, "at least 1")
        _require(0 <= dp_rank < dp_size, "dp_rank", dp_rank, f"0 to {dp_size - 1}, below dp_size")
        _require(start_batch_index >= 0, "start_batch_index", start_batch_index, "at least 0")
        _require(replay_buffer_bytes >= 0, "replay_buffer_bytes", replay_buffer_bytes, "at least 0")
        _require(max_uses is None or max_uses >= 1, "max_uses", max_uses, "at least 1")
        _require(layout in (None, *get_args(ReadLayout)), "layout", repr(layout), "None, 'auto', 'dense' or 'jagged'")
        _require(max_wait > 0, "max_wait", max_wait, "more than 0 seconds")
        _require(timeout > 0, "timeout", timeout, "more than 0 seconds")
        for name, value in {"token": token, "tls": tls, "insecure": insecure, "namespace": namespace}.items():
            got = "one" if name == "token" else repr(value)
            _require(value is None or client_factory is None, name, got, "that the client_factory gives it")
        self._source = BatchSource(
            address=address,
            request=BatchRequest(
                partition_id=partition_id,
                task_name=task_name,
                data_fields=tuple(data_fields),
                batch_size=batch_size,
                micro_batch_size=micro_batch_size,
                dp_rank=dp_rank,
                dp_size=dp_size,
                sampler=sampler,
                sampler_config=sampler_config,
                where=tuple(where),
                order_by=tuple(order_by),
                drop_last=drop_last,
                batch_unit=batch_unit,
                finite=should_check_consumption_status,
                max_wait=max_wait,
                timeout=timeout,
                layout=layout,
                max_uses=max_uses,
            ),
            fetch_batch_fn=fetch_batch_fn or fetch_batch,
            client_factory=client_factory,
            token=token,
            tls=tls,
            insecure=insecure,
            namespace=namespace,
            on_wait=on_wait or warn_of_wait,
        )
        self._process_batch = _processing(process_batch_fn, pack, sampler_config)
        self._buffer = ReplayBuffer(replay_buffer_bytes)
        self._replicas = None if replica_group is None else ReplicaGroup(replica_group)
        self._batch_index = start_batch_index
        # What was delivered last: the batch, and how many of its micro-batches; (batch_index, 0) between batches.
        self._delivered = (start_batch_index, 0)
        self._identity: StreamIdentity | None = None
        self._warned_of: StreamIdentity | None = None
        self._warned_of_dropped: StreamIdentity | None = None
        # Counts reset(), step() and load_state_dict(), so that a live iterator notices them.
        self._moves = 0

    @property
    def source(self) -> BatchSource:
        """The service and the request that it fetches by."""
        return self._source

    @property
    def move_count(self) -> int:
        """How often it was moved, by `reset`, `step` or `load_state_dict`."""
        return self._moves

    @property
    def batch_index(self) -> int:
        """The batch after the last one delivered."""
        return self._batch_index

    @property
    def partition_id(self) -> str:
        """The partition that is consumed."""
        return self._source.request.partition_id

    def __iter__(self) -> Iterator[Any]:
        if get_worker_info() is not None:
            raise RuntimeError(
                "a StreamingDataset was iterated in a worker of torch's DataLoader, where every worker would yield the "
                "same batches; use StreamingDataLoader(dataset, num_workers=...)"
            )
        return self.iterate(lambda dataset: dataset.open_stream(InlineStream))

    def iterate(self, open_stream: Callable[[StreamingDataset], BatchStream]) -> Iterator[Any]:
        """Yield the micro-batches from the next batch on, fetched by the streams that `open_stream` opens."""
        return timed(self._iterate(open_stream))

    def _iterate(self, open_stream: Callable[[StreamingDataset], BatchStream]) -> Iterator[Any]:
        stream: BatchStream | None = None
        self._skip_rest()
        try:
            while True:
                moves = self._moves
                if stream is not None and (stream.closed or stream.next_index != self._batch_index):
                    stream.close()
                    stream = None
                stream = stream or open_stream(self)
                batch = stream.read()
                if self._moves != moves:
                    stream.close()
                    continue
                if batch is None:
                    if stream.closed:
                        continue
                    return
                if isinstance(batch, End):
                    self._check_end(batch)
                    return
                if batch.on_consumed is not None:
                    batch.on_consumed()
                self._accept(batch)
                micro_batches = self._deliver(batch)
                del batch  # not kept alive while the next one is waited for
                for micro_batch in micro_batches:
                    yield micro_batch
                    if self._moves != moves:
                        break
                del micro_batches
                if self._moves != moves:
                    stream.close()
        finally:
            if stream is not None:
                stream.close()

    def open_stream(self, open_rest: OpenRest) -> BatchStream:
        """Return a stream from the next batch on: those in the buffer, and then the stream that `open_rest` opens.

        Args:
            open_rest: called with the source, the first batch_index, and the identity that its batches must have.
        """
        kept = self._buffer.following(self._batch_index)
        first = self._batch_index + len(kept)

        def open_fetched() -> BatchStream:
            return open_rest(self._source, first, self._identity)

        rest = open_fetched() if self._replicas is None else self._replicas.open_stream(open_fetched, first)
        return ReplayStream(kept, rest) if kept else rest

    def split(self, batch: FetchedBatch) -> Iterator[Any]:
        """Return the micro-batches of a batch, made one by one."""
        return iter(self._process_batch(batch.data, batch.meta, micro_batch_size=self._source.request.micro_batch_size))

    @property
    def may_split_ahead(self) -> bool:
        """Whether another thread may split batches: process_batch_fn and collectives run in the consumer's."""
        return self._replicas is None and self._follows_plan

    @property
    def _follows_plan(self) -> bool:
        return self._process_batch is split_micro_batches or isinstance(self._process_batch, PackBatches)

    def _accept(self, batch: FetchedBatch) -> None:
        """Check that a batch belongs to those before it, and keep it for a replay."""
        got, expected = batch.identity, self._identity or batch.identity
        if got.incarnation != expected.incarnation:
            raise StaleIncarnationError(
                f"batch {batch.index} belongs to another incarnation of partition {self.partition_id!r} than those "
                "before it: the partition was cleared and created again; call step() to start over",
                metadata={
                    "partition_id": self.partition_id,
                    "got": got.incarnation.hex(),
                    "expected": expected.incarnation.hex(),
                },
            )
        if got.epoch != expected.epoch:
            raise StaleEpochError(
                f"batch {batch.index} belongs to epoch {got.epoch} of the task, the batches before it to epoch "
                f"{expected.epoch}: its consumption was reset; call step() to start over",
                metadata={
                    "task_name": self._source.request.task_name,
                    "got": str(got.epoch),
                    "expected": str(expected.epoch),
                },
            )
        self._identity = got
        self._warn_of_dropped(batch)
        self._buffer.add(batch)

    def _warn_of_dropped(self, batch: FetchedBatch) -> None:
        """Log the first batch that leaves out samples; the end has the number of all."""
        dropped: Any = getattr(batch.meta, "dropped_indexes", ())  # fetch_batch_fn may have made the meta
        if len(dropped) and self._warned_of_dropped != batch.identity:
            self._warned_of_dropped = batch.identity
            _log.warning(
                "batch %s of partition %r leaves out %s samples that are too long for sampler %r, the first is %s; the "
                "task %r never gets them, and the warning at the end counts all that are left out",
                batch.index, self.partition_id, len(dropped), self._source.request.sampler, dropped[0],
                self._source.request.task_name,
            )  # fmt: skip

    def _check_end(self, end: End) -> None:
        """Log once, as a warning, what the task is never given: the cause is the data, not the program that asks."""
        warning = end_warning(end, self._source.request)
        identity = StreamIdentity(incarnation=end.incarnation, epoch=end.epoch)
        if warning is not None and self._warned_of != identity:
            self._warned_of = identity
            _log.warning("%s", warning)

    def _skip_rest(self) -> None:
        """Leave out the rest of a batch that another iterator began."""
        if self._delivered[0] < self._batch_index:
            self._delivered = (self._batch_index, 0)

    def _deliver(self, batch: FetchedBatch) -> Iterator[Any]:
        """Return the micro-batches of a batch that were not delivered before the state of this dataset was saved."""
        index = batch.index
        count = micro_batch_count(batch.meta, self._source.request.micro_batch_size) if self._follows_plan else None
        micro_batches = self.split(batch) if batch.micro_batches is None else batch.micro_batches
        return self._deliver_each(index, micro_batches, count)

    def _deliver_each(self, index: int, micro_batches: Iterator[Any], count: int | None) -> Iterator[Any]:
        """Yield micro-batches; the batch is delivered with the first, so that one that fails to split is not."""
        delivered_before = self._delivered[1] if self._delivered[0] == index else 0
        number = 0
        for micro_batch in micro_batches:
            number += 1  # noqa: SIM113  (enumerate keeps what it gave alive)
            if number > delivered_before:
                self._batch_index = index + 1
                self._delivered = (index, number) if number != count else (index + 1, 0)
                yield micro_batch
            del micro_batch  # not kept alive while the next one is made
        # Not where another iterator has gone further meanwhile.
        if self._delivered[0] <= index:
            self._batch_index = index + 1
            self._delivered = (index + 1, 0)

    def state_dict(self) -> dict[str, Any]:
        """Return the position behind the last micro-batch delivered, as plain numbers and texts.

        It is the same on all DP ranks and replicas that have delivered equally many micro-batches. Batches that are
        only fetched ahead do not count. A process_batch_fn must make the same items again, and the batch that was begun
        is asked for again: do not clear its samples before the state behind it is saved.
        """
        batch_index, micro_batch_index = self._delivered
        identity = self._identity
        return {
            **self._state_must_fit(),
            "partition_id": self.partition_id,
            "incarnation": "" if identity is None else identity.incarnation.hex(),
            "epoch": 0 if identity is None else identity.epoch,
            "batch_index": batch_index,
            "micro_batch_index": micro_batch_index,
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue behind the last micro-batch that was delivered when the state was saved.

        Where the partition was cleared or the task reset meanwhile, the next batch raises `StaleIncarnationError` or
        `StaleEpochError`.

        Raises:
            InvalidArgumentError: the state is of another task, number of ranks or size of batches, or is none.
        """
        for name, expected in self._state_must_fit().items():
            got, remedy = state_dict.get(name), _OTHER_DP_SIZE if name == "dp_size" else ""
            _require(got == expected, "state_dict", f"{name} {got!r}", f"{expected!r}, as this dataset has{remedy}")
        try:
            partition_id = str(state_dict["partition_id"])
            incarnation = bytes.fromhex(state_dict["incarnation"])
            epoch = int(state_dict["epoch"])
            position = int(state_dict["batch_index"]), int(state_dict["micro_batch_index"])
        except (KeyError, TypeError, ValueError) as error:
            raise InvalidArgumentError(
                f"state_dict: got {dict(state_dict)!r}; expected what state_dict() returned", field="state_dict"
            ) from error
        _require(min(position) >= 0, "state_dict", f"position {position}", "no negative number")
        self.step(partition_id)
        self._identity = StreamIdentity(incarnation=incarnation, epoch=epoch) if incarnation else None
        self._batch_index, _ = self._delivered = position

    def _state_must_fit(self) -> dict[str, Any]:
        """Return what must be the same where a state is loaded: otherwise its numbers mean other samples."""
        request = self._source.request
        return {
            "task_name": request.task_name,
            "dp_size": request.dp_size,
            "batch_size": request.batch_size,
            "batch_unit": request.batch_unit,
            "micro_batch_size": request.micro_batch_size,
        }

    def reset(self) -> None:
        """Start from the first batch again: the same batches, out of the replay buffer or fetched again.

        A batch that is fetched again needs its samples: `SamplesClearedError` if they were cleared meanwhile.
        """
        self._go_to_start()

    def step(self, partition_id: str) -> None:
        """Go to the first batch of another partition; the buffer is dropped.

        The name of the same partition stands for its next incarnation, or for the next epoch of a task that was reset.
        """
        self._source = self._source.of_partition(partition_id)
        self._buffer.clear()
        self._identity = None
        self._go_to_start()

    def _go_to_start(self) -> None:
        self._batch_index = 0
        self._delivered = (0, 0)
        self._moves += 1

    def get_buffer(self) -> list[tuple[Any, Any]]:
        """Return `(data, meta)` of the whole batches that `replay_buffer_bytes` keeps for `reset()`, in order."""
        return self._buffer.pairs()


def _require(holds: bool, name: str, got: object, expected: str) -> None:
    if not holds:
        raise InvalidArgumentError(f"{name}: got {got}; expected {expected}", field=name)


def _processing(
    process_batch_fn: ProcessBatch | None, pack: PackOptions | None, sampler_config: Mapping[str, Any] | None
) -> ProcessBatch:
    if pack is None:
        return process_batch_fn or split_micro_batches
    _require(process_batch_fn is None, "pack", "a process_batch_fn as well", "one of the two")
    config = sampler_config or {}
    planned = config.get("pack_max_length", pack.pack_max_length)
    _require(
        planned == pack.pack_max_length,
        "pack",
        f"pack_max_length {pack.pack_max_length}",
        f"{planned}, as the sampler has",
    )
    truncates = config.get("overlong", pack.overlong) == "truncate"
    _require(
        truncates == (pack.overlong == "truncate"),
        "pack",
        f"overlong {pack.overlong!r}",
        f"{'truncate' if truncates else 'error'!r}, as the sampler has",
    )
    return PackBatches(pack)


def _require_fields(data_fields: Sequence[str]) -> None:
    _require(
        not isinstance(data_fields, str) and len(data_fields) > 0,
        "data_fields",
        repr(data_fields),
        "a list of at least one field name",
    )
    _require(len(set(data_fields)) == len(data_fields), "data_fields", list(data_fields), "each field once")
