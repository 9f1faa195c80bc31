"""StreamingDataset and StreamingDataLoader: the micro-batches of one DP rank, fetched ahead, kept for a replay."""

from __future__ import annotations

import itertools
import logging
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from multiprocessing.context import BaseContext
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal, get_args

from torch.utils.data import IterableDataset, get_worker_info

from tq_service.client.transport import resolve_address, warn_of_wait
from tq_service.client_probes import timed
from tq_service.data.columns import ProcessBatch, micro_batch_count, split_micro_batches
from tq_service.data.on_device import ArrivingItem, DeviceFeed, Split, UploadingFetcher, pinned
from tq_service.data.packs import PackOptions, split_packs
from tq_service.data.replicas import ReplicaGroup, ReplicaStream, rank_and_size
from tq_service.data.source import (
    BatchFetcher,
    BatchRequest,
    BatchSource,
    BatchStream,
    ClientFactory,
    End,
    FetchBatch,
    FetchedBatch,
    Fetcher,
    InlineStream,
    MicroBatchPrefetcher,
    OnWait,
    PrefetchLimit,
    PrefetchStream,
    StreamIdentity,
    end_warning,
    fetch_batch,
)
from tq_service.data.workers import WorkerPool, worker_context
from tq_service.errors import (
    InvalidArgumentError,
    PartitionNotFoundError,
    StaleEpochError,
    StaleIncarnationError,
    TaskNotFoundError,
)
from tq_service.schema import DEFAULT_POLICY, BatchUnit, ReadLayout, Unmatched
from tq_service.wire.device import find_device

if TYPE_CHECKING:
    import torch

    from tq_service.data.replicas import Ranks
    from tq_service.wire.connection import Tls

_log = logging.getLogger(__name__)

_MAY_CHANGE_WITH_RANKS: Final = {"dp_size", "batch_size", "micro_batch_size"}

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
        unmatched: what becomes of samples that `where` excludes, see `Client.get_meta`.
        least_members: a group with fewer members left is evicted, see `Client.get_meta`; None: none is too small.
        refill: `(partition_id, task_name)` where evicted units are made again, see `Client.get_meta`; None: nowhere.
        max_refills: how often, for each sample there.
        start_batch_index: the first batch, for a rank that is restarted in the middle.
        where: conditions on custom_meta, such as `("version", ">=", 3)`, all of which must hold.
        order_by: custom_meta columns that order ready samples.
        drop_last: leave out the last batch if it is short.
        batch_unit: whether `batch_size` counts samples or groups.
        version_lag: how many batches may be planned ahead of the published version of `policy`, whatever is fetched
            ahead; 0 is on-policy. The trainer publishes a version after each batch (`Client.publish_version`). None: no
            bound.
        first_version: the version with which batch `start_batch_index` is trained, for `version_lag`.
        policy: the policy that is trained.
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
        unmatched: Unmatched = "wait",
        least_members: int | None = None,
        refill: tuple[str, str] | None = None,
        max_refills: int = 3,
        start_batch_index: int = 0,
        where: Sequence[tuple[str, str, Any]] = (),
        order_by: Sequence[Any] = (),
        drop_last: bool = False,
        batch_unit: BatchUnit = "sample",
        version_lag: int | None = None,
        first_version: int = 0,
        policy: str = DEFAULT_POLICY,
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
        _require(
            not isinstance(data_fields, str) and len(data_fields) > 0,
            "data_fields",
            repr(data_fields),
            "a list of at least one field name",
        )
        _require(len(set(data_fields)) == len(data_fields), "data_fields", list(data_fields), "each field once")
        if address is not None and client_factory is None:
            address = resolve_address(address)
        if dp_group is not None:
            _require((dp_rank, dp_size) == (0, 1), "dp_group", "dp_rank or dp_size as well", "one of the two")
            dp_rank, dp_size = rank_and_size(dp_group)
        for name, count, least in (
            ("batch_size", batch_size, 1),
            ("micro_batch_size", micro_batch_size, 1),
            ("dp_size", dp_size, 1),
            ("start_batch_index", start_batch_index, 0),
            ("replay_buffer_bytes", replay_buffer_bytes, 0),
            ("max_uses", max_uses, 1),
            ("least_members", least_members, 1),
            ("max_refills", max_refills, 1),
            ("version_lag", version_lag, 0),
            ("first_version", first_version, 0),
        ):
            _require(count is None or count >= least, name, count, f"at least {least}")
        _require(0 <= dp_rank < dp_size, "dp_rank", dp_rank, f"0 to {dp_size - 1}, below dp_size")
        _require(layout in (None, *get_args(ReadLayout)), "layout", repr(layout), "None, 'auto', 'dense' or 'jagged'")
        _require(unmatched in get_args(Unmatched), "unmatched", repr(unmatched), "'wait', 'fail' or 'clear'")
        _require(max_wait > 0, "max_wait", max_wait, "more than 0 seconds")
        _require(timeout > 0, "timeout", timeout, "more than 0 seconds")
        client_options = {"token": token, "tls": tls, "insecure": insecure, "namespace": namespace}
        for name, value in client_options.items():
            got = "one" if name == "token" else repr(value)
            _require(value is None or client_factory is None, name, got, "that the client_factory gives it")
        self._source = BatchSource(
            address=address,
            request=BatchRequest(
                partition_id=partition_id,
                task_name=task_name,
                data_fields=list(data_fields),
                batch_size=batch_size,
                micro_batch_size=micro_batch_size,
                dp_rank=dp_rank,
                dp_size=dp_size,
                sampler=sampler,
                sampler_config=sampler_config,
                where=list(where),
                order_by=list(order_by),
                drop_last=drop_last,
                batch_unit=batch_unit,
                finite=should_check_consumption_status,
                max_wait=max_wait,
                timeout=timeout,
                layout=layout,
                max_uses=max_uses,
                unmatched=None if unmatched == "wait" else unmatched,
                least_members=least_members,
                refill=refill,
                max_refills=max_refills,
                version_lag=version_lag,
                first_version=first_version - start_batch_index,
                policy=policy,
            ),
            fetch_batch_fn=fetch_batch_fn or fetch_batch,
            client_factory=client_factory,
            client_options=client_options,
            on_wait=on_wait or warn_of_wait,
        )
        self._process_batch = process_batch_fn or split_micro_batches
        self._follows_plan = self._process_batch is split_micro_batches
        if pack is not None:
            _require(process_batch_fn is None, "pack", "a process_batch_fn as well", "one of the two")
            _require_agreement(pack, sampler_config or {})
            self._process_batch = partial(split_packs, options=pack)
        self._buffer = ReplayBuffer(replay_buffer_bytes)
        self._replicas = None if replica_group is None else ReplicaGroup(replica_group)
        self._batch_index = start_batch_index
        # The last delivery: the batch, and how many of its micro-batches; (batch_index, 0) between batches.
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
        return self.iterate(lambda dataset: dataset.open_stream(InlineStream), self.split)

    def iterate(self, open_stream: Callable[[StreamingDataset], BatchStream], split: Split) -> Iterator[Any]:
        """Yield the micro-batches from the next batch on.

        Args:
            open_stream: opens a stream of batches.
            split: splits the batches that the stream has not split.
        """
        return timed(self._iterate(open_stream, split))

    def _iterate(self, open_stream: Callable[[StreamingDataset], BatchStream], split: Split) -> Iterator[Any]:
        stream: BatchStream | None = None
        if self._delivered[0] < self._batch_index:  # another iterator began a batch: the rest is left out
            self._delivered = (self._batch_index, 0)
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
                self._accept(batch)
                size = self._source.request.micro_batch_size
                micro_batches = self._deliver(
                    batch.index,
                    split(batch) if batch.micro_batches is None else batch.micro_batches,
                    micro_batch_count(batch.meta, size) if self._follows_plan else None,
                )
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

    def open_stream(self, open_rest: OpenRest, device: torch.device | None = None) -> BatchStream:
        """Return a stream from the next batch on: those in the buffer, and then the stream that `open_rest` opens.

        Args:
            open_rest: called with the source, the first batch_index, and the identity that its batches must have.
            device: on which its batches are, see `may_upload_ahead`; None: the CPU.
        """
        kept = self._buffer.following(self._batch_index)
        first = self._batch_index + len(kept)

        def open_fetched() -> BatchStream:
            return open_rest(self._source, first, self._identity)

        rest = open_fetched() if self._replicas is None else ReplicaStream(self._replicas, open_fetched, first, device)
        return ReplayStream(kept, rest) if kept else rest

    def split(self, batch: FetchedBatch) -> Iterator[Any]:
        """Return the micro-batches of a batch, made one by one."""
        return iter(self._process_batch(batch.data, batch.meta, micro_batch_size=self._source.request.micro_batch_size))

    @property
    def may_split_ahead(self) -> bool:
        """Whether another thread may split batches: process_batch_fn and collectives run in the consumer's."""
        return self._replicas is None and self._follows_plan

    def may_upload_ahead(self, device: torch.device) -> bool:
        """Whether batches may be on a device as they are read: replicas must be able to broadcast them there."""
        return self._replicas is None or self._replicas.sends_from(device)

    def _accept(self, batch: FetchedBatch) -> None:
        """Count a batch as begun, check that it belongs to those before it, and keep it for a replay."""
        if batch.on_consumed is not None:
            batch.on_consumed()
        got = StreamIdentity.of(batch.meta)
        expected = self._identity or got
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
        if len(dropped) and self._warned_of_dropped != self._identity:
            self._warned_of_dropped = self._identity
            _log.warning(
                "batch %s of partition %r leaves out %s samples that are too long for sampler %r, the first is %s; the "
                "task %r never gets them, and the warning at the end counts all that are left out",
                batch.index, self.partition_id, len(dropped), self._source.request.sampler, dropped[0],
                self._source.request.task_name,
            )  # fmt: skip

    def _check_end(self, end: End) -> None:
        """Log once, as a warning, what the task is never given: the cause is the data, not the program that asks."""
        warning = end_warning(end, self._source.request)
        if warning is not None and self._warned_of != end.identity:
            self._warned_of = end.identity
            _log.warning("%s", warning)

    def _deliver(self, index: int, micro_batches: Iterator[Any], count: int | None) -> Iterator[Any]:
        """Yield the micro-batches of a batch, without those that were delivered before the state was saved.

        The batch is delivered with the first, so that one that fails to split is not; `count` tells the last one.
        """
        delivered_before = self._delivered[1] if self._delivered[0] == index else 0
        number = 0
        for micro_batch in micro_batches:
            number += 1  # noqa: SIM113  (enumerate keeps what it gave alive)
            if number > delivered_before:
                self._batch_index = index + 1
                self._delivered = (index, number) if number != count else (index + 1, 0)
                yield micro_batch.receive() if isinstance(micro_batch, ArrivingItem) else micro_batch
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
        identity, request = self._identity or StreamIdentity(), self._source.request
        versions = {} if request.version_lag is None else {"first_version": request.first_version}
        return {
            **self._state_must_fit(),
            "partition_id": self.partition_id,
            "incarnation": identity.incarnation.hex(),
            "epoch": identity.epoch,
            "batch_index": batch_index,
            "micro_batch_index": micro_batch_index,
            **versions,
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue behind the last micro-batch that was delivered when the state was saved.

        With another `dp_size`, and then maybe other sizes of batches, the ranks restart behind the last whole batch
        (`Client.restart_ranks`): all ranks load the same state, and the first one has the service plan anew.

        If the partition was cleared or the task reset since then, the next batch raises `StaleIncarnationError` or
        `StaleEpochError`.

        Raises:
            InvalidArgumentError: the state is of another task or size of batches, or is none.
            StaleIncarnationError, StaleEpochError: with another `dp_size`, the same at once.
        """
        dp_size = state_dict.get("dp_size")
        _require(isinstance(dp_size, int), "state_dict", f"dp_size {dp_size!r}", "a number of ranks")
        restarts = dp_size != self._source.request.dp_size
        for name, expected in self._state_must_fit().items():
            if restarts and name in _MAY_CHANGE_WITH_RANKS:
                continue
            got = state_dict.get(name)
            _require(got == expected, "state_dict", f"{name} {got!r}", f"{expected!r}, as this dataset has")
        try:
            partition_id = str(state_dict["partition_id"])
            incarnation = bytes.fromhex(state_dict["incarnation"])
            epoch = int(state_dict["epoch"])
            position = int(state_dict["batch_index"]), int(state_dict["micro_batch_index"])
            first_version = 0 if self._source.request.version_lag is None else int(state_dict["first_version"])
        except (KeyError, TypeError, ValueError) as error:
            raise InvalidArgumentError(
                f"state_dict: got {dict(state_dict)!r}; expected what state_dict() returned", field="state_dict"
            ) from error
        _require(min(position) >= 0, "state_dict", f"position {position}", "no negative number")
        if restarts:
            epoch, position = self._restart_ranks(partition_id, incarnation, epoch, *position), (position[0], 0)
        self.step(partition_id)
        self._source = self._source.of_version(first_version)
        self._identity = StreamIdentity(incarnation, epoch) if incarnation else None
        self._batch_index, _ = self._delivered = position

    def _restart_ranks(
        self, partition_id: str, incarnation: bytes, epoch: int, batch_index: int, micro_batch_index: int
    ) -> int:
        """Have the ranks of the task go on with a batch, in the number of this dataset; return their epoch."""
        request = self._source.request
        if micro_batch_index:
            _log.warning(
                "the state is of dp_size other than %s, and was saved within batch %s: this batch is planned anew, so "
                "samples of its first %s micro-batches are trained again",
                request.dp_size, batch_index, micro_batch_index,
            )  # fmt: skip
        try:
            with self._source.open_client() as client:
                restarted = client.restart_ranks(
                    partition_id,
                    request.task_name,
                    dp_size=request.dp_size,
                    trained=batch_index - 1,
                    incarnation=incarnation,
                    epoch=epoch,
                )
        except (PartitionNotFoundError, TaskNotFoundError):
            if incarnation:
                raise
            return epoch  # saved before the first batch of this partition, which no rank has claimed
        return int(restarted.epoch)

    def _state_must_fit(self) -> dict[str, Any]:
        """Return what must be the same where a state is loaded: otherwise its numbers mean other samples."""
        names = ("task_name", "dp_size", "batch_size", "batch_unit", "micro_batch_size")
        return {name: getattr(self._source.request, name) for name in names}

    def reset(self) -> None:
        """Start from the first batch again: the same batches, out of the replay buffer or fetched again.

        A batch that is fetched again needs its samples: `SamplesClearedError` if they were cleared meanwhile.
        """
        request = self._source.request  # the versions go on, whereas batches begin with 0 again
        self._source = self._source.of_version(request.first_version + self._batch_index)
        self._batch_index = 0
        self._delivered = (0, 0)
        self._moves += 1

    def step(self, partition_id: str) -> None:
        """Go to the first batch of another partition; the buffer is dropped.

        The name of the same partition stands for its next incarnation, or for the next epoch of a task that was reset.
        """
        self._source = self._source.of_partition(partition_id)
        self._buffer.clear()
        self._identity = None
        self.reset()

    def get_buffer(self) -> list[tuple[Any, Any]]:
        """Return `(data, meta)` of the whole batches that `replay_buffer_bytes` keeps for `reset()`, in order."""
        return self._buffer.pairs()


def _require(holds: bool, name: str, got: object, expected: str) -> None:
    if not holds:
        raise InvalidArgumentError(f"{name}: got {got}; expected {expected}", field=name)


def _require_agreement(pack: PackOptions, sampler_config: Mapping[str, Any]) -> None:
    """Raise InvalidArgumentError where packs are not those that the sampler plans."""
    planned = sampler_config.get("pack_max_length", pack.pack_max_length)
    _require(
        planned == pack.pack_max_length,
        "pack",
        f"pack_max_length {pack.pack_max_length}",
        f"{planned}, as the sampler has",
    )
    truncates = sampler_config.get("overlong", pack.overlong) == "truncate"
    _require(
        truncates == (pack.overlong == "truncate"),
        "pack",
        f"overlong {pack.overlong!r}",
        f"{'truncate' if truncates else 'error'!r}, as the sampler has",
    )


class ReplayBuffer:
    """Keeps the first batches since the start, up to the first one that does not fit into its bytes.

    A replay goes through the batches from the first, so the first ones are worth keeping: a buffer of the latest ones
    would have dropped each batch just before it is asked for. Batches beyond the bound are fetched again, and are the
    same, since claims of ranks replay.

    Args:
        max_bytes: most bytes kept, as `FetchedBatch.size_bytes` counts them; 0 keeps nothing.
    """

    def __init__(self, max_bytes: int) -> None:
        self._batches: dict[int, FetchedBatch] = {}
        self._max_bytes = self._left_bytes = max_bytes

    def following(self, batch_index: int) -> list[FetchedBatch]:
        """Return the batches that are kept from `batch_index` on, up to the first one that is not."""
        indexes = itertools.takewhile(self._batches.__contains__, itertools.count(batch_index))
        return [self._batches[index] for index in indexes]

    def add(self, batch: FetchedBatch) -> None:
        """Keep the batch if it fits; once one does not, none after it is kept, which a replay would not reach."""
        if not self._left_bytes or batch.index in self._batches:
            return
        size_bytes = batch.size_bytes
        if size_bytes > self._left_bytes:
            self._left_bytes = 0
            return
        self._left_bytes -= size_bytes
        self._batches[batch.index] = replace(batch, micro_batches=None, on_consumed=None)

    def pairs(self) -> list[tuple[Any, Any]]:
        """Return `(data, meta)` of each batch kept, in the order of their batch indexes."""
        return [(batch.data, batch.meta) for _, batch in sorted(self._batches.items())]

    def clear(self) -> None:
        """Drop all batches."""
        self._batches.clear()
        self._left_bytes = self._max_bytes


class ReplayStream:
    """Gives the batches of a replay buffer, and then those of the stream that continues after them."""

    def __init__(self, kept: Sequence[FetchedBatch], rest: BatchStream) -> None:
        self._kept = deque(kept)
        self._rest = rest

    @property
    def next_index(self) -> int:
        """The batch_index that `read` gives next."""
        return self._kept[0].index if self._kept else self._rest.next_index

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._rest.closed

    def read(self) -> FetchedBatch | End | None:
        """Return the next batch, or the end; None once it is closed."""
        return self._kept.popleft() if self._kept else self._rest.read()

    def close(self) -> None:
        """Stop fetching. Idempotent."""
        self._rest.close()


class StreamingDataLoader:
    """Iterates a `StreamingDataset` and fetches its batches ahead.

    ::

        num_workers=0   thread ── batches, in order ──────────────┐
                                                                  ├──> thread that splits them ─> for ... in loader
        num_workers=2   worker 0 ── batches 0, 2, 3, ... ──┐      │
                        worker 1 ── batches 1, 4, 5, ... ──┴──────┘   (in order, none twice, none lost)

    An iterator that ends, breaks or raises stops the fetching and drops what was fetched ahead. That is still there
    for the next iterator, which asks for the same batches again. Worker processes stay for it, until `close()` or
    until the loader is garbage.

    The length is not known beforehand: `len()` raises TypeError.

    Args:
        dataset: what is iterated.
        num_workers: worker processes that share the batches of the rank; 0: a thread of this process.
        prefetch_factor: batches fetched ahead, by each worker or by the thread. 0 with `num_workers=0` fetches in the
            consumer's thread: for a fetch_batch_fn that takes part in collectives.
        multiprocessing_context: how workers are started: "fork", "spawn", "forkserver" or a context; None: forkserver,
            or fork where fetch_batch_fn cannot be pickled. Workers use a sync client of their own. Fork works with live
            clients in this process, as long as no other thread is inside a call when the workers start.
        prefetch_bytes: most bytes fetched ahead or under way, by the thread or by all workers together, where a batch
            whose size is not known yet counts as much as the largest so far. When nothing is ahead, the next batch is
            fetched whatever its size.
        persistent_workers: keep the worker processes between iterators.
        device: a CUDA device, such as "cuda:0", on which micro-batches and packs are yielded; objects stay on the CPU.
            Batches are copied up ahead, each at once and out of pinned memory, and split there beside the step that
            runs; the current stream of the thread that iterates waits for what it is given. So batches that are ahead,
            or in the replay buffer, take memory of the device. None: the CPU.
        pin_memory: whether micro-batches that stay on the CPU are in pinned memory, for the trainer to copy them up
            itself. With `device` it makes no difference.

    Raises:
        InvalidArgumentError: an argument cannot be right.
    """

    def __init__(
        self,
        dataset: StreamingDataset,
        num_workers: int = 0,
        prefetch_factor: int = 2,
        multiprocessing_context: str | BaseContext | None = None,
        *,
        prefetch_bytes: int = 1 << 30,
        persistent_workers: bool = True,
        device: Any = None,
        pin_memory: bool = False,
    ) -> None:
        least_ahead = 1 if num_workers else 0
        for name, count, least, when in (
            ("num_workers", num_workers, 0, ""),
            ("prefetch_factor", prefetch_factor, least_ahead, ", or 0 without workers" if num_workers else ""),
            ("prefetch_bytes", prefetch_bytes, 1, ""),
        ):
            if count < least:
                raise InvalidArgumentError(f"{name}: got {count}; expected at least {least}{when}", field=name)
        self.dataset = dataset
        self.num_workers = num_workers
        self.prefetch_factor = prefetch_factor
        self._context = worker_context(multiprocessing_context, dataset.source) if num_workers else None
        self._prefetch_bytes = prefetch_bytes
        self._persistent_workers = persistent_workers
        found = find_device(device)
        self._feed = None if found is None else DeviceFeed(found)
        self._split: Split = dataset.split
        if self._feed is not None:
            self._split = self._feed.split(dataset.split)
        elif pin_memory:
            find_device("cuda")  # without one no memory can be pinned
            self._split = pinned(dataset.split)
        self._stream: BatchStream | None = None
        # The stream that fetches, and how often the dataset had been moved when it was opened.
        self._fetching: tuple[InlineStream | PrefetchStream, int] | None = None
        self._pool: WorkerPool | None = None

    @property
    def batch_index(self) -> int:
        """The batch after the last one delivered."""
        return self.dataset.batch_index

    def __iter__(self) -> Iterator[Any]:
        """Yield micro-batches, from the batch after the last one delivered.

        Raises:
            RuntimeError: a worker process died. The next iterator starts new ones and goes on.
            Exception: whatever fetching raised, with its type; the next iterator asks for the same batch again.
        """
        try:
            yield from self.dataset.iterate(self._open_stream, self._split)
        except Exception:
            self._end_workers()
            raise
        finally:
            if not self._persistent_workers:
                self._end_workers()

    def _open_stream(self, dataset: StreamingDataset) -> BatchStream:
        """Return the one stream of this loader; the stream of another iterator is closed by it."""
        if self._stream is not None:
            self._stream.close()
        self._stream = dataset.open_stream(self._open_rest, None if self._ahead is None else self._ahead.device)
        if self.prefetch_factor and dataset.may_split_ahead:
            split = self._split if self._feed is None else self._feed.split_ahead(dataset.split)
            self._stream = MicroBatchPrefetcher(self._stream, split)
        return self._stream

    @property
    def _ahead(self) -> DeviceFeed | None:
        """What copies batches up as they are fetched; None: they are on the CPU until they are split."""
        return self._feed if self._feed is not None and self.dataset.may_upload_ahead(self._feed.device) else None

    def _open_rest(self, source: BatchSource, batch_index: int, identity: StreamIdentity | None) -> BatchStream:
        stream: InlineStream | PrefetchStream
        feed = self._ahead
        here = source if feed is None else source.to_device(feed.device)
        if self.prefetch_factor:
            fetchers: Sequence[Fetcher] = [BatchFetcher(here, identity)]
            if self._context is not None:
                device = None if feed is None else feed.device
                self._pool = self._pool or WorkerPool(source, self.num_workers, self._context, device)
                fetchers = self._pool.fetchers(source, identity)
            if feed is not None:
                fetchers = [UploadingFetcher(fetcher, feed) for fetcher in fetchers]
            limit = PrefetchLimit(self.prefetch_factor * max(self.num_workers, 1), self._prefetch_bytes)
            stream = PrefetchStream(fetchers, batch_index, limit)
        else:
            stream = InlineStream(here, batch_index, identity)
        self._fetching = stream, self.dataset.move_count
        return stream

    def _end_workers(self) -> None:
        pool, self._pool = self._pool, None
        if pool is not None:
            if self._stream is not None:
                self._stream.close()
            pool.close()

    def reset(self) -> None:
        """Start from the first batch again: the same batches, out of the replay buffer or fetched again."""
        self.dataset.reset()

    def step(self, partition_id: str) -> None:
        """Go to the first batch of another partition, with fresh state."""
        self.dataset.step(partition_id)

    def get_buffer(self) -> list[tuple[Any, Any]]:
        """Return `(data, meta)` of the whole batches that the dataset's `replay_buffer_bytes` keeps, in order."""
        return self.dataset.get_buffer()

    def state_dict(self) -> dict[str, Any]:
        """Return the position behind the last micro-batch delivered; see `StreamingDataset.state_dict`."""
        return self.dataset.state_dict()

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue behind the last micro-batch delivered when the state was saved, with or without workers."""
        self.dataset.load_state_dict(state_dict)

    def close(self) -> None:
        """Stop fetching and end the thread or the workers. Idempotent; iterating starts them again.

        Batches that were fetched ahead and not handed out are logged as a warning: the service counts them as consumed.
        """
        fetching, self._fetching = self._fetching, None
        if fetching is not None and fetching[1] == self.dataset.move_count:
            self._warn_of_fetched_ahead(fetching[0].fetched_until - self.batch_index)
        if self._stream is not None:
            self._stream.close()
            self._stream = None
        self._end_workers()
        if self._feed is not None:
            self._feed.release()

    def _warn_of_fetched_ahead(self, count: int) -> None:
        if count > 0:
            _log.warning(
                "the loader of task %r of partition %r was closed with %s batches fetched ahead that it has not handed "
                "out, from batch %s on. They count as consumed: a loader that continues from its state gets them, one "
                "that starts after reset_consumption(keep_consumed=True) does not",
                self.dataset.source.request.task_name, self.dataset.partition_id, count, self.batch_index,
            )  # fmt: skip

    def __enter__(self) -> StreamingDataLoader:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
