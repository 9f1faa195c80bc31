"""Dataset and data loader that stream the micro-batches of a DP rank, with prefetching and replay."""

from __future__ import annotations

import itertools
import logging
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from multiprocessing.context import BaseContext
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Generic, Literal, Self, get_args

from torch.utils.data import IterableDataset, get_worker_info

from tq_service.client.read_form import check_read_options, with_shares
from tq_service.client.requests import SamplerGiven, name_and_options
from tq_service.client.slices import CpLayout, RowSlice
from tq_service.client.transport import resolve_address, warn_of_wait
from tq_service.client_probes import Stage, collected_here, timed
from tq_service.data.columns import Item, ItemOptions, ProcessBatch, micro_batch_count, split_micro_batches
from tq_service.data.on_device import ArrivingItem, DeviceFeed, Split, UploadingFetcher, pinned
from tq_service.data.packs import PackOptions, split_packs
from tq_service.data.replicas import ReplicaGroup, ReplicaStream, rank_and_size, world_group
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
from tq_service.step_times import StepTimer
from tq_service.wire.device import find_device

if TYPE_CHECKING:
    import torch

    from tq_service.client.batch_meta import BatchMeta
    from tq_service.data.replicas import Ranks
    from tq_service.wire.connection import Tls

_log = logging.getLogger(__name__)
_NONE_LEFT: Final = object()

_MAY_CHANGE_WITH_RANKS: Final = {"dp_size", "batch_size", "micro_batch_size"}

OpenRest = Callable[[BatchSource, int, StreamIdentity | None], BatchStream]
"""Function that takes a source, the first batch_index and the expected identity or None, and opens a batch stream."""


class StreamingDataset(IterableDataset[Item]):
    """An iterable dataset that yields the micro-batches of one DP rank.

    Each item is a pair `(micro_batch, meta)` of a TensorDict and the `BatchMeta` of its samples. With `pack`, each item
    is a `PackedMicroBatch`. With `process_batch_fn`, the dataset yields the items returned by this function. Type
    checkers infer the item type.

    Iterating over the dataset itself fetches each batch in the consumer's thread. To prefetch batches, use
    `StreamingDataLoader`. Lifecycle::

        __init__ ──> batch_index = start_batch_index
                        │
          ┌─────────────┴── iter ──> (micro_batch, meta), ... of batch 0, batch 1, ... ──> end
          │                 │
          │                 ├─ break, then iter:   continues after the last delivered batch
          │                 ├─ reset():            restarts at batch 0, from the replay buffer or by fetching again
          │                 └─ step(partition_id): moves to batch 0 of another partition, clears the buffer
          └─────────────────┘

    After `reset()` or `step()`, active iterators continue at the new position. A batch counts as delivered when its
    first micro-batch is yielded. `batch_index` then advances to the next batch. To resume later, save `batch_index` in
    a checkpoint and pass it as `start_batch_index`.

    If the partition contains samples but the task receives none of them, all ranks raise `NothingDeliveredError` at the
    end of the partition. If only some samples were skipped, the dataset logs a warning with the counts and reasons at
    the end of the partition.

    All DP ranks yield the same number of micro-batches, so that collectives match across ranks. An empty micro-batch
    has 0 rows and the same fields, dtypes and layouts as other micro-batches. An undeclared field is dense until a row
    with a different shape is put, so its layout may change to jagged between two fetches. To prevent this, declare the
    field or pass `layout`.

    Args:
        address: service address, as in `Client(address)`: "host:port", "host" (port 50051), or several addresses as a
            list or a comma-separated string. Defaults to `TQ_ADDRESS` if set, otherwise to localhost:50051.
        batch_size: number of samples (or rollouts or groups, see `batch_unit`) per batch and rank.
        micro_batch_size: number of samples per micro-batch. By default, the batch is a single micro-batch unless the
            sampler splits it.
        data_fields: fields to fetch. A sample is ready when all of these fields are stored.
        partition_id: partition to consume. If the partition does not exist yet, the dataset waits for it.
        task_name: name of the consuming task. Each task consumes the partition independently.
        dp_rank: DP rank of this process. All replicas of a rank must pass the same number, and they all receive the
            same batches. If `dp_rank`, `dp_size` and `dp_group` are all None and torch.distributed is initialized, the
            rank and size in torch.distributed's world group are used. With a replica or context-parallel group, this
            default does not apply, and an error is raised instead. Without torch.distributed, the default is 0.
        dp_size: number of DP ranks. Defaults to the size of the world group in the case described for `dp_rank`, and to
            1 otherwise.
        dp_group: `DeviceMesh` or process group of the DP ranks, which determines `dp_rank` and `dp_size`. A mesh with
            several dimensions, such as a mesh for hybrid sharding, is flattened.
        replica_group: process group, or one-dimensional `DeviceMesh`, of the processes that share this DP rank. The
            first process fetches each batch and broadcasts it to the group. Without a group, each process fetches the
            batches itself. The broadcast is a collective that runs in the consumer's thread, so all processes must
            iterate, reset, step and stop in the same order. If the group has no backend for CPU tensors, the data is
            broadcast through the accelerator.
        cp_rank: rank of this process in its context-parallel group. All ranks of the group have the same `dp_rank` and
            therefore receive the same batches. Each rank fetches only its share of the fields in `cp_fields`. All
            remaining fields are fetched in full.
        cp_size: number of ranks in the context-parallel group.
        cp_group: process group or `DeviceMesh` that determines `cp_rank` and `cp_size`.
        cp_fields: fields with one value per token, whose rows are split among the ranks of the context-parallel group.
            Micro-batches contain an additional field, `cp_positions`, with the position of each token in its full row.
        cp_layout: how rows are split into shares; see `RowSlice.share`.
        cp_align: each chunk is padded to a multiple of this number of tokens. With `pack`, this number is derived from
            `pack.align`.
        cp_fill: padding value used to make all shares of a row equally long. Pass a single value for all `cp_fields`,
            or one value per field.
        read_options: additional arguments for `Client.get_data`: slices, padded, pad_value, length, side, mask and
            truncate.
        sampler: name of the sampler, or a sampler object such as
            `tq.samplers.SeqlenBalancedSampler(n_samples_per_prompt=8)`.
        sampler_config: options of a sampler given by name.
        finite: whether iteration ends when all samples inserted so far have been consumed. If false, the dataset waits
            for more batches until the partition is sealed.
        fetch_batch_fn: function that replaces `fetch_batch`; see its docstring for the keyword arguments. The function
            runs in the prefetching thread or worker process, and must be picklable if worker processes are started with
            spawn or forkserver. If the function claims batches as a queue worker, use at most one loader worker,
            because the loader delivers batches in index order, not in arrival order.
        process_batch_fn: function that replaces `split_micro_batches`, called in the consumer's thread as
            `process_batch_fn(data, meta, micro_batch_size=...)`. The function returns an iterable of the items to
            yield.
        pack: packing options. If given, the dataset yields a `PackedMicroBatch` of `pack.pack_max_length` tokens for
            each planned pack, as `split_packs` does. Use the `packed` sampler with this option. With `cp_fields`, each
            rank of the context-parallel group receives its share of each padded sequence. With `pack`, `cp_fields` must
            list all fields with one value per token.
        layout: layout of the fetched fields; see `Client.get_data`. By default, each field has its own layout.
        max_uses: number of times each sample is delivered before it counts as consumed; see `Client.claim`. By default,
            each sample is delivered once.
        unmatched: how to treat samples that do not match `where`; see `Client.claim`.
        least_members: minimum number of members in a group; if fewer remain, the group is evicted; see `Client.claim`.
            By default, groups are not evicted.
        refill: `(partition_id, task_name)` of the task that regenerates evicted units; see `Client.claim`. By default,
            evicted units are not regenerated.
        max_refills: maximum number of refills per sample, if `refill` is given.
        totals: custom_meta columns whose sums over all ranks are returned in `BatchMeta.totals`; see `Client.claim`.
        start_batch_index: index of the first batch to fetch when resuming from a checkpoint.
        where: conditions on custom_meta, such as `("version", ">=", 3)`. A sample must meet all conditions.
        order_by: custom_meta columns by which ready samples are sorted.
        drop_last: whether to drop an incomplete last batch.
        batch_unit: whether `batch_size` counts samples, rollouts or groups.
        version_lag: how many batches may be planned ahead of the published version of `policy`, regardless of
            prefetching. A lag of 0 means on-policy training. The trainer publishes a version after each batch
            (`Client.publish_version`). By default, the lag is unlimited.
        first_version: version that `policy` has when it is trained on batch `start_batch_index`. Used only with
            `version_lag`.
        policy: name of the policy that is being trained.
        replay_buffer_bytes: maximum total size of the batches kept in memory for `reset()`, from the first batch
            onward. Only tensors, arrays, strings and images are counted. With 0, no batches are kept, so all batches
            are fetched again after `reset()`.
        max_wait: number of seconds that a call waits for a batch. The call is then repeated. Values above 10 have no
            additional effect.
        timeout: seconds that a call may take beyond `max_wait`, including retries. Outages up to this long are
            tolerated.
        client_factory: function called with `address` to open the sync client. It replaces `Client(address, ...)`. This
            function must itself pass `token`, `tls`, `insecure` and `namespace` to the client.
        token: bearer token, or path of a token file, as in `Client(token=...)`. The token is also passed to worker
            processes.
        tls: TLS settings of the connection, as in `Client(tls=...)`.
        insecure: whether the token may be sent in plaintext, as in `Client(insecure=...)`.
        namespace: namespace of the partition, as in `Client(namespace=...)`.
        on_wait: function called with the `WaitReason` after 10 s of waiting, and every minute thereafter. The function
            runs in the thread or worker process that fetches batches, and must be picklable to run in a worker process.
            By default, the reason is logged as a warning.

    Raises:
        InvalidArgumentError: an argument is invalid.
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
        dp_rank: int | None = None,
        dp_size: int | None = None,
        dp_group: Ranks | None = None,
        replica_group: Ranks | None = None,
        cp_rank: int = 0,
        cp_size: int = 1,
        cp_group: Ranks | None = None,
        cp_fields: Sequence[str] = (),
        cp_layout: CpLayout = "zigzag",
        cp_align: int = 1,
        cp_fill: Any = 0,
        read_options: Mapping[str, Any] | None = None,
        sampler: SamplerGiven = "sequential",
        sampler_config: Mapping[str, Any] | None = None,
        finite: bool = False,
        fetch_batch_fn: FetchBatch | None = None,
        process_batch_fn: ProcessBatch[Item] | None = None,
        pack: ItemOptions[Item] | None = None,
        layout: ReadLayout | None = None,
        max_uses: int | None = None,
        unmatched: Unmatched = "wait",
        least_members: int | None = None,
        refill: tuple[str, str] | None = None,
        max_refills: int = 3,
        totals: Sequence[str] = (),
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
        _check_data_fields(data_fields)
        sampler_name, options = name_and_options(sampler, sampler_config)
        if address is not None and client_factory is None:
            address = resolve_address(address)
        is_shared = replica_group is not None or cp_group is not None or cp_size > 1
        dp_rank, dp_size = _dp_rank_and_size(dp_rank, dp_size, dp_group, is_shared=is_shared)
        if cp_group is not None:
            _require(
                (cp_rank, cp_size) == (0, 1), "cp_group", "a group as well as cp_rank or cp_size", "only one of the two"
            )
            cp_rank, cp_size = rank_and_size(cp_group)
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
        _require(0 <= cp_rank < cp_size, "cp_rank", cp_rank, f"0 to {cp_size - 1}, below cp_size")
        _require(
            cp_size == 1 or len(cp_fields) > 0, "cp_fields", "no fields, but a cp_size", "fields to split among ranks"
        )
        share = RowSlice.share(cp_rank, cp_size, cp_layout, align=cp_align, fill=0) if len(cp_fields) else None
        process_batch: ProcessBatch[Any] = process_batch_fn or split_micro_batches
        _require(pack is None or isinstance(pack, PackOptions), "pack", repr(pack), "PackOptions")
        if isinstance(pack, PackOptions):
            _require(process_batch_fn is None, "pack", "pack as well as process_batch_fn", "only one of the two")
            _require(not read_options, "pack", "pack as well as read_options", "cp_fields instead, to fetch shares")
            _require_agreement(pack, options or {})
            if share is not None:
                chunks = share.chunk_count
                _require(cp_align == 1, "cp_align", cp_align, "no cp_align with pack; set pack.align")
                _require(cp_fill == 0, "cp_fill", cp_fill, "no cp_fill with pack; set pack.pad_values")
                _require(
                    pack.align % chunks == 0, "pack", f"align {pack.align}", f"a multiple of {chunks}, the chunk count"
                )
                share = replace(share, align=pack.align // chunks)
            process_batch = partial(split_packs, options=pack, share=share)
        read_options = check_read_options(read_options)
        if share is not None:
            read_options = with_shares(read_options, data_fields, cp_fields, share, cp_fill, positions=pack is None)
        _require(0 <= dp_rank < dp_size, "dp_rank", dp_rank, f"0 to {dp_size - 1}, below dp_size")
        _require(layout in (None, *get_args(ReadLayout)), "layout", repr(layout), "None, 'auto', 'dense' or 'jagged'")
        _require(unmatched in get_args(Unmatched), "unmatched", repr(unmatched), "'wait', 'fail' or 'clear'")
        _require(max_wait > 0, "max_wait", max_wait, "more than 0 seconds")
        _require(timeout > 0, "timeout", timeout, "more than 0 seconds")
        client_options = {"token": token, "tls": tls, "insecure": insecure, "namespace": namespace}
        for name, value in client_options.items():
            got = "one" if name == "token" else repr(value)
            _require(value is None or client_factory is None, name, got, "none, since client_factory must pass it")
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
                sampler=sampler_name,
                sampler_config=options,
                where=list(where),
                order_by=list(order_by),
                drop_last=drop_last,
                batch_unit=batch_unit,
                finite=finite,
                max_wait=max_wait,
                timeout=timeout,
                layout=layout,
                max_uses=max_uses,
                unmatched=None if unmatched == "wait" else unmatched,
                least_members=least_members,
                refill=refill,
                max_refills=max_refills,
                totals=list(totals) or None,
                read_options=read_options or None,
                version_lag=version_lag,
                first_version=first_version - start_batch_index,
                policy=policy,
            ),
            fetch_batch_fn=fetch_batch_fn or fetch_batch,
            client_factory=client_factory,
            client_options=client_options,
            on_wait=on_wait or warn_of_wait,
        )
        self._process_batch = process_batch
        self._follows_plan = process_batch is split_micro_batches
        self._buffer = ReplayBuffer(replay_buffer_bytes)
        self._replicas = None if replica_group is None else ReplicaGroup(replica_group)
        self._batch_index = start_batch_index
        # The current batch and its number of delivered micro-batches, or (next batch_index, 0) between two batches.
        self._delivered = (start_batch_index, 0)
        self._identity: StreamIdentity | None = None
        self._warned_of: StreamIdentity | None = None
        self._warned_of_dropped: StreamIdentity | None = None
        # Number of reset(), step() and load_state_dict() calls. Active iterators compare it to detect a move.
        self._moves = 0
        self._step_timer = StepTimer()

    @property
    def step_timer(self) -> StepTimer:
        """Breakdown of the trainer's step times, displayed by `print(dataset.step_timer)`."""
        return self._step_timer

    @property
    def source(self) -> BatchSource:
        """The service that provides the batches, and the request sent to it."""
        return self._source

    @property
    def move_count(self) -> int:
        """Number of times that `reset`, `step` or `load_state_dict` has changed the dataset's position."""
        return self._moves

    @property
    def batch_index(self) -> int:
        """Index of the batch after the last delivered batch."""
        return self._batch_index

    @property
    def partition_id(self) -> str:
        """Id of the partition that the dataset consumes."""
        return self._source.request.partition_id

    def __iter__(self) -> Iterator[Item]:
        if get_worker_info() is not None:
            raise RuntimeError(
                "a StreamingDataset was iterated in a worker of torch's DataLoader, whose workers would all yield the "
                "same batches; use StreamingDataLoader(dataset, num_workers=...)"
            )
        return self.iterate(lambda dataset: dataset.open_stream(dataset.open_inline), self.split)

    def open_inline(self, source: BatchSource, batch_index: int, identity: StreamIdentity | None) -> InlineStream:
        """Return a stream that fetches each batch in the thread that reads it."""
        return InlineStream(source, batch_index, identity, self.step_timer.take_report)

    def iterate(self, open_stream: Callable[[StreamingDataset[Item]], BatchStream], split: Split) -> Iterator[Item]:
        """Yield the micro-batches of the next batch and all later batches.

        Args:
            open_stream: function that takes this dataset and opens a stream of its batches.
            split: function that splits a batch if the stream has not already done so.
        """
        return timed(self._iterate(open_stream, split), self.step_timer)

    def _iterate(self, open_stream: Callable[[StreamingDataset[Item]], BatchStream], split: Split) -> Iterator[Item]:
        stream: BatchStream | None = None
        if self._delivered[0] < self._batch_index:  # another iterator began a batch: skip the rest of it
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
                    _noted(split(batch)) if batch.micro_batches is None else batch.micro_batches,
                    micro_batch_count(batch.meta, size) if self._follows_plan else None,
                )
                del batch  # do not keep the batch alive while waiting for the next one
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
        """Return a stream that yields the buffered batches, starting at the next batch, and then fetched batches.

        Args:
            open_rest: function that opens the stream of fetched batches.
            device: device to which batches are uploaded; see `may_upload_ahead`. By default, batches stay on the CPU.
        """
        kept = self._buffer.following(self._batch_index)
        first = self._batch_index + len(kept)

        def open_fetched() -> BatchStream:
            return open_rest(self._source, first, self._identity)

        rest = open_fetched() if self._replicas is None else ReplicaStream(self._replicas, open_fetched, first, device)
        return ReplayStream(kept, rest) if kept else rest

    def split(self, batch: FetchedBatch) -> Iterator[Any]:
        """Return an iterator that creates the micro-batches of a batch lazily."""
        return iter(self._process_batch(batch.data, batch.meta, micro_batch_size=self._source.request.micro_batch_size))

    @property
    def may_split_ahead(self) -> bool:
        """Whether a background thread may split batches.

        Splitting in the background is not allowed with `process_batch_fn`, `pack` or a replica group.
        """
        return self._replicas is None and self._follows_plan

    def may_upload_ahead(self, device: torch.device) -> bool:
        """Return whether batches may be uploaded to the device before they are read.

        With a replica group, early uploads are possible only if the replicas send batches directly from this device.
        """
        return self._replicas is None or self._replicas.sends_from(device)

    def _accept(self, batch: FetchedBatch) -> None:
        """Mark a batch as begun, compare its identity with that of earlier batches, and add it to the replay buffer."""
        if (collected := collected_here.get()) is not None:
            collected.add(batch.spans, batch_count=1)
        if batch.on_consumed is not None:
            batch.on_consumed()
        got = StreamIdentity.of(batch.meta)
        expected = self._identity or got
        if got.incarnation != expected.incarnation:
            raise StaleIncarnationError(
                f"batch {batch.index} belongs to a different incarnation of partition {self.partition_id!r} than the "
                "previous batches, because the partition was cleared and created again. Call step() to start over",
                metadata={
                    "partition_id": self.partition_id,
                    "got": got.incarnation.hex(),
                    "expected": expected.incarnation.hex(),
                },
            )
        if got.epoch != expected.epoch:
            raise StaleEpochError(
                f"batch {batch.index} belongs to epoch {got.epoch} of the task, but previous batches belong to epoch "
                f"{expected.epoch}, because the task's consumption was reset. Call step() to start over",
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
        """Log a warning for the first batch with dropped samples. The total is logged at the end of the stream."""
        dropped: Any = getattr(batch.meta, "dropped_indexes", ())  # fetch_batch_fn may return a meta without it
        if len(dropped) and self._warned_of_dropped != self._identity:
            self._warned_of_dropped = self._identity
            _log.warning(
                "batch %s of partition %r drops %s samples that are too long for sampler %r (the first is %s); task %r "
                "never receives these samples. A warning at the end of the stream reports the total",
                batch.index, self.partition_id, len(dropped), self._source.request.sampler, dropped[0],
                self._source.request.task_name,
            )  # fmt: skip

    def _check_end(self, end: End) -> None:
        """Log a warning if samples were skipped, at most once per epoch.

        Raises:
            NothingDeliveredError: all samples were skipped.
        """
        if (collected := collected_here.get()) is not None:
            collected.add(end.spans)
        warning = end_warning(end, self._source.request)
        if warning is not None and self._warned_of != end.identity:
            self._warned_of = end.identity
            _log.warning("%s", warning)

    def _deliver(self, index: int, micro_batches: Iterator[Any], count: int | None) -> Iterator[Any]:
        """Yield a batch's micro-batches, skipping those delivered before the loaded state was saved.

        The batch counts as delivered when its first micro-batch is yielded. If splitting fails, the batch is not
        delivered.

        Args:
            index: batch_index of the batch.
            micro_batches: all micro-batches of the batch, in order.
            count: number of micro-batches, or None if unknown.
        """
        delivered_before = self._delivered[1] if self._delivered[0] == index else 0
        number = 0
        for micro_batch in micro_batches:
            number += 1  # noqa: SIM113  (enumerate keeps the last item alive)
            if number > delivered_before:
                self._batch_index = index + 1
                self._delivered = (index, number) if number != count else (index + 1, 0)
                yield micro_batch.receive() if isinstance(micro_batch, ArrivingItem) else micro_batch
            del micro_batch  # release the micro-batch before the next is created
        # Do not move back, because another iterator may have advanced further.
        if self._delivered[0] <= index:
            self._batch_index = index + 1
            self._delivered = (index + 1, 0)

    def state_dict(self) -> dict[str, Any]:
        """Return the position after the last delivered micro-batch as a dict of plain numbers and strings.

        DP ranks and replicas that have delivered the same number of micro-batches return identical states. Batches that
        were only prefetched are not included. On resume, a partly delivered batch is fetched and split again.
        `process_batch_fn` must therefore be deterministic, and the samples of a partly delivered batch must not be
        cleared until a later state is saved.
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

    def load_state_dict(self, state_dict: Mapping[str, Any], *, restart: bool = False) -> None:
        """Resume after the last micro-batch that was delivered before the state was saved.

        All ranks must load the same state. If `dp_size` differs from the saved value, the ranks restart after the last
        complete batch (`Client.restart_ranks`). In that case, batch sizes may also differ from the saved values. The
        service plans new batches when the first rank restarts. Without a restart, the ranks receive the same batches as
        before.

        If the partition was cleared or the task reset after the state was saved, the next batch raises
        `StaleIncarnationError` or `StaleEpochError`.

        Args:
            state_dict: a state returned by `state_dict()`.
            restart: whether to restart the ranks even if `dp_size` is unchanged. If the task has a `max_staleness`, a
                restart is required once training has continued past the saved state.

        Raises:
            InvalidArgumentError: the state is malformed, or was saved with a different task or batch size.
            StaleIncarnationError, StaleEpochError: the ranks cannot restart because the partition was cleared or the
                task was reset.
        """
        dp_size = state_dict.get("dp_size")
        _require(isinstance(dp_size, int), "state_dict", f"dp_size {dp_size!r}", "an integer number of ranks")
        restarts = restart or dp_size != self._source.request.dp_size
        for name, expected in self._state_must_fit().items():
            if restarts and name in _MAY_CHANGE_WITH_RANKS:
                continue
            got = state_dict.get(name)
            _require(got == expected, "state_dict", f"{name} {got!r}", f"{expected!r}, as in this dataset")
        try:
            partition_id = str(state_dict["partition_id"])
            incarnation = bytes.fromhex(state_dict["incarnation"])
            epoch = int(state_dict["epoch"])
            position = int(state_dict["batch_index"]), int(state_dict["micro_batch_index"])
            first_version = 0 if self._source.request.version_lag is None else int(state_dict["first_version"])
        except (KeyError, TypeError, ValueError) as error:
            raise InvalidArgumentError(
                f"state_dict: got {dict(state_dict)!r}; expected a value that state_dict() returned", field="state_dict"
            ) from error
        _require(min(position) >= 0, "state_dict", f"position {position}", "non-negative numbers")
        if restarts:
            epoch, position = self._restart_ranks(partition_id, incarnation, epoch, *position), (position[0], 0)
        self.step(partition_id)
        self._source = self._source.of_version(first_version)
        self._identity = StreamIdentity(incarnation, epoch) if incarnation else None
        self._batch_index, _ = self._delivered = position

    def _restart_ranks(
        self, partition_id: str, incarnation: bytes, epoch: int, batch_index: int, micro_batch_index: int
    ) -> int:
        """Restart the task's ranks at a batch, using the `dp_size` of this dataset, and return the new epoch."""
        request = self._source.request
        if micro_batch_index:
            _log.warning(
                "the state was saved in the middle of batch %s. Because the ranks restart, this batch is planned "
                "again, and its first %s micro-batches are used for training again",
                batch_index, micro_batch_index,
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
            return epoch  # no rank had claimed a batch of this partition when the state was saved
        if restarted.repeated_batch_count:
            _log.warning(
                "training continued after the state was saved, so %s samples of batches %s to %s are used for training "
                "again",
                restarted.repeated_sample_count, batch_index, batch_index + restarted.repeated_batch_count - 1,
            )  # fmt: skip
        return int(restarted.epoch)

    def _state_must_fit(self) -> dict[str, Any]:
        """Return the arguments that a saved position depends on. They must match when the state is loaded."""
        names = ("task_name", "dp_size", "batch_size", "batch_unit", "micro_batch_size")
        return {name: getattr(self._source.request, name) for name in names}

    def reset(self) -> None:
        """Restart at the first batch. Batches are replayed from the buffer or fetched again.

        Fetching a batch again raises `SamplesClearedError` if any of its samples have been cleared.
        """
        request = self._source.request  # policy versions continue, whereas batch indexes restart at 0
        self._source = self._source.of_version(request.first_version + self._batch_index)
        self._batch_index = 0
        self._delivered = (0, 0)
        self._moves += 1

    def step(self, partition_id: str) -> None:
        """Move to the first batch of another partition, and clear the replay buffer.

        If `partition_id` is the current partition, move to its next incarnation, or to the next epoch if the task was
        reset.
        """
        self._source = self._source.of_partition(partition_id)
        self._buffer.clear()
        self._identity = None
        self.reset()

    def get_buffer(self) -> list[tuple[Any, BatchMeta]]:
        """Return a `(data, meta)` pair for each batch in the replay buffer, in order; see `replay_buffer_bytes`."""
        return self._buffer.pairs()


def _noted(micro_batches: Iterator[Any]) -> Iterator[Any]:
    """Yield micro-batches, and record how long it takes to create each one."""
    while True:
        began_at = time.perf_counter()
        found = next(micro_batches, _NONE_LEFT)
        if (collected := collected_here.get()) is not None:
            collected.note(Stage.HOST, began_at)
        if found is _NONE_LEFT:
            return
        yield found
        del found  # release the micro-batch before the next is created


def _dp_rank_and_size(
    dp_rank: int | None, dp_size: int | None, dp_group: Ranks | None, *, is_shared: bool
) -> tuple[int, int]:
    """Return the DP rank of this process and the number of DP ranks.

    Args:
        dp_rank: the rank passed by the user, if any.
        dp_size: the number of ranks passed by the user, if any.
        dp_group: the group passed by the user, if any.
        is_shared: whether several processes share a DP rank.
    """
    if dp_rank is not None or dp_size is not None:
        _require(dp_group is None, "dp_group", "a group as well as dp_rank or dp_size", "only one of the two")
        return dp_rank or 0, 1 if dp_size is None else dp_size
    if dp_group is None and (dp_group := world_group()) is not None:
        got, expected = (
            "none, but a replica or context-parallel group",
            "the group of the DP ranks, or dp_rank and dp_size",
        )
        _require(not is_shared, "dp_group", got, expected)
    return (0, 1) if dp_group is None else rank_and_size(dp_group)


def _require(holds: bool, name: str, got: object, expected: str) -> None:
    if not holds:
        raise InvalidArgumentError(f"{name}: got {got}; expected {expected}", field=name)


def _check_data_fields(data_fields: Sequence[str]) -> None:
    """Raise InvalidArgumentError unless `data_fields` is a non-empty list of distinct field names."""
    is_list = not isinstance(data_fields, str) and len(data_fields) > 0
    _require(is_list, "data_fields", repr(data_fields), "a list of at least one field name")
    _require(len(set(data_fields)) == len(data_fields), "data_fields", list(data_fields), "each field once")


def _require_agreement(pack: PackOptions, options: Mapping[str, Any]) -> None:
    """Raise InvalidArgumentError if the packing options contradict the sampler's options."""
    planned = options.get("pack_max_length", pack.pack_max_length)
    _require(
        planned == pack.pack_max_length,
        "pack",
        f"pack_max_length {pack.pack_max_length}",
        f"{planned}, the sampler's pack_max_length",
    )
    truncates = options.get("overlong", pack.overlong) == "truncate"
    _require(
        truncates == (pack.overlong == "truncate"),
        "pack",
        f"overlong {pack.overlong!r}",
        f"{'truncate' if truncates else 'error'!r}, to match the sampler",
    )


class ReplayBuffer:
    """A buffer that keeps the first batches in memory for replay, up to the first batch that does not fit.

    Because a replay starts with the first batch, a buffer of the latest batches would drop each batch just before it is
    replayed. Batches beyond the limit are fetched again, and the service returns the same batches to the same ranks.

    Args:
        max_bytes: maximum sum of `FetchedBatch.size_bytes` over the kept batches. With 0, no batches are kept.
    """

    def __init__(self, max_bytes: int) -> None:
        self._batches: dict[int, FetchedBatch] = {}
        self._max_bytes = self._left_bytes = max_bytes

    def following(self, batch_index: int) -> list[FetchedBatch]:
        """Return the kept batches from `batch_index` up to the first missing batch."""
        indexes = itertools.takewhile(self._batches.__contains__, itertools.count(batch_index))
        return [self._batches[index] for index in indexes]

    def add(self, batch: FetchedBatch) -> None:
        """Keep the batch if it and all earlier batches fit. A replay stops at the first missing batch."""
        if not self._left_bytes or batch.index in self._batches:
            return
        size_bytes = batch.size_bytes
        if size_bytes > self._left_bytes:
            self._left_bytes = 0
            return
        self._left_bytes -= size_bytes
        self._batches[batch.index] = replace(batch, micro_batches=None, on_consumed=None, spans=())

    def pairs(self) -> list[tuple[Any, BatchMeta]]:
        """Return a `(data, meta)` pair for each kept batch, in order of batch_index."""
        return [(batch.data, batch.meta) for _, batch in sorted(self._batches.items())]

    def clear(self) -> None:
        """Remove all batches from the buffer."""
        self._batches.clear()
        self._left_bytes = self._max_bytes


class ReplayStream:
    """A stream that yields replayed batches first, and then the batches of another stream."""

    def __init__(self, kept: Sequence[FetchedBatch], rest: BatchStream) -> None:
        self._kept = deque(kept)
        self._rest = rest

    @property
    def next_index(self) -> int:
        """Index of the batch that `read` returns next."""
        return self._kept[0].index if self._kept else self._rest.next_index

    @property
    def closed(self) -> bool:
        """Whether the stream has been closed."""
        return self._rest.closed

    def read(self) -> FetchedBatch | End | None:
        """Return the next batch, the end marker, or None if the stream is closed."""
        return self._kept.popleft() if self._kept else self._rest.read()

    def close(self) -> None:
        """Stop fetching. Idempotent."""
        self._rest.close()


class StreamingDataLoader(Generic[Item]):
    """An iterable that yields the items of a `StreamingDataset` and prefetches batches.

    ::

        num_workers=0   thread ── batches, in order ──────────────┐
                                                                  ├──> thread that splits them ─> for ... in loader
        num_workers=2   worker 0 ── batches 0, 2, 3, ... ──┐      │
                        worker 1 ── batches 1, 4, 5, ... ──┴──────┘   (in order, no duplicates, no gaps)

    When a loop over the loader ends, breaks or raises, the iterator stops fetching and drops all prefetched batches. No
    data is lost, because the next iterator requests these batches again. Worker processes keep running between
    iterators, until `close()` is called or the loader is garbage-collected.

    The length is not known in advance, so `len()` raises TypeError.

    Args:
        dataset: the dataset to iterate over.
        num_workers: number of worker processes that fetch batches. With 0, a background thread fetches the batches.
        prefetch_factor: number of batches to prefetch per worker, or in total if there are no workers. 0 is valid only
            without workers. Batches are then fetched in the consumer's thread, which is required if fetch_batch_fn
            takes part in collectives.
        multiprocessing_context: how workers are started: "fork", "spawn", "forkserver" or a context. Defaults to
            forkserver, or to fork if fetch_batch_fn cannot be pickled. Each worker opens its own sync client. Forking
            is safe even if this process has open clients, provided that no thread is making a call when the workers
            start.
        prefetch_bytes: maximum number of bytes prefetched or in flight across all workers. A batch of unknown size is
            assumed to be as large as the largest batch so far. If no batch is prefetched or in flight, the next batch
            is fetched regardless of its size.
        persistent_workers: whether worker processes keep running between iterators.
        device: CUDA device, such as "cuda:0", for micro-batches and packs. Non-tensor data stays on the CPU. While a
            training step runs, the next batch is uploaded from pinned memory in a single copy and split on the device.
            The consumer's current CUDA stream waits until the tensors that the consumer receives have been uploaded.
            Prefetched batches and the replay buffer occupy device memory. By default, batches stay on the CPU.
        pin_memory: whether to copy micro-batches to pinned memory, for trainers that upload the data themselves.
            Ignored with `device`.

    Raises:
        InvalidArgumentError: an argument is invalid.
    """

    def __init__(
        self,
        dataset: StreamingDataset[Item],
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
            find_device("cuda")  # pinning memory requires CUDA
            self._split = pinned(dataset.split)
        self._stream: BatchStream | None = None
        # The stream that fetches batches, and the dataset's move_count at the time the stream was opened.
        self._fetching: tuple[InlineStream | PrefetchStream, int] | None = None
        self._pool: WorkerPool | None = None

    @property
    def batch_index(self) -> int:
        """Index of the batch after the last delivered batch."""
        return self.dataset.batch_index

    def __iter__(self) -> Iterator[Item]:
        """Yield micro-batches, starting with the batch after the last delivered batch.

        Raises:
            RuntimeError: a worker process died. The next iterator starts new workers and continues.
            Exception: a batch could not be fetched; the original error is raised. The next iterator requests the batch
                again.
        """
        try:
            yield from self.dataset.iterate(self._open_stream, self._split)
        except Exception:
            self._end_workers()
            raise
        finally:
            if not self._persistent_workers:
                self._end_workers()

    def _open_stream(self, dataset: StreamingDataset[Item]) -> BatchStream:
        """Close the previous iterator's stream, if any, and open a new stream."""
        if self._stream is not None:
            self._stream.close()
        self._stream = dataset.open_stream(self._open_rest, None if self._ahead is None else self._ahead.device)
        if self.prefetch_factor and dataset.may_split_ahead:
            split = self._split if self._feed is None else self._feed.split_ahead(dataset.split)
            self._stream = MicroBatchPrefetcher(self._stream, split)
        return self._stream

    @property
    def step_timer(self) -> StepTimer:
        """Breakdown of the trainer's step times, displayed by `print(loader.step_timer)`."""
        return self.dataset.step_timer

    @property
    def _ahead(self) -> DeviceFeed | None:
        """The feed that uploads batches as soon as they are fetched, or None if batches are split on the CPU."""
        return self._feed if self._feed is not None and self.dataset.may_upload_ahead(self._feed.device) else None

    def _open_rest(self, source: BatchSource, batch_index: int, identity: StreamIdentity | None) -> BatchStream:
        stream: InlineStream | PrefetchStream
        feed = self._ahead
        here = source if feed is None else source.to_device(feed.device)
        if self.prefetch_factor:
            timer = self.dataset.step_timer
            fetchers: Sequence[Fetcher] = [BatchFetcher(here, identity, timer.take_report)]
            if self._context is not None:
                device = None if feed is None else feed.device
                self._pool = self._pool or WorkerPool(source, self.num_workers, self._context, device)
                fetchers = self._pool.fetchers(source, identity, timer)
            if feed is not None:
                fetchers = [UploadingFetcher(fetcher, feed) for fetcher in fetchers]
            limit = PrefetchLimit(self.prefetch_factor * max(self.num_workers, 1), self._prefetch_bytes)
            stream = PrefetchStream(fetchers, batch_index, limit)
        else:
            stream = self.dataset.open_inline(here, batch_index, identity)
        self._fetching = stream, self.dataset.move_count
        return stream

    def _end_workers(self) -> None:
        pool, self._pool = self._pool, None
        if pool is not None:
            if self._stream is not None:
                self._stream.close()
            pool.close()

    def reset(self) -> None:
        """Restart at the first batch. Batches are replayed from the buffer or fetched again."""
        self.dataset.reset()

    def step(self, partition_id: str) -> None:
        """Move to the first batch of another partition, and clear the replay buffer."""
        self.dataset.step(partition_id)

    def get_buffer(self) -> list[tuple[Any, BatchMeta]]:
        """Return a `(data, meta)` pair for each batch in the dataset's replay buffer, in order."""
        return self.dataset.get_buffer()

    def state_dict(self) -> dict[str, Any]:
        """Return the position after the last delivered micro-batch; see `StreamingDataset.state_dict`."""
        return self.dataset.state_dict()

    def load_state_dict(self, state_dict: Mapping[str, Any], *, restart: bool = False) -> None:
        """Resume after the last micro-batch that was delivered before the state was saved.

        The number of workers can differ from the number when the state was saved. See
        `StreamingDataset.load_state_dict`.
        """
        self.dataset.load_state_dict(state_dict, restart=restart)

    def close(self) -> None:
        """Stop fetching and shut down the background thread or worker processes. Idempotent.

        A new iterator restarts the thread or worker processes. A warning is logged if prefetched batches were not
        delivered, because the service counts their samples as consumed.
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
                "the loader of task %r of partition %r was closed before it delivered %s prefetched batches, starting "
                "with batch %s. These batches count as consumed. A loader that resumes from this loader's state "
                "receives them, but a loader that starts after reset_consumption(keep_consumed=True) does not",
                self.dataset.source.request.task_name, self.dataset.partition_id, count, self.batch_index,
            )  # fmt: skip

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
