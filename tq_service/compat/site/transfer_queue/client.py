"""`TransferQueueClient`, which sends TransferQueue's sync and `async_...` calls to the service.

Each call is implemented once, as a coroutine method of `Calls`. With an `AsyncClient`, the caller awaits the coroutine.
With a `Client`, whose calls never suspend, `finished` runs the coroutine to completion.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial, update_wrapper
from typing import TYPE_CHECKING, Any, Final, TypeVar

import numpy as np
import torch
from tensordict import TensorDict
from tensordict.tensorclass import NonTensorStack

import tq_service as tq
from tq_service.custom_meta import keeping_nulls
from transfer_queue.metadata import BatchMeta, KVBatchMeta, positions_of, schema_of
from transfer_queue.sampler import BaseSampler, service_samples
from transfer_queue.storage import StorageKeyNotFoundError

T = TypeVar("T")
_CLEARED: Final = (
    tq.errors.PartitionNotFoundError,
    tq.errors.SampleNotFoundError,
    tq.errors.CellNotFoundError,
    tq.errors.StaleIncarnationError,
)
_PAUSE_SECONDS: Final = 0.05
Row = dict[str, Any]


def finished(coroutine: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine that never suspends, and return its result."""
    try:
        coroutine.send(None)
    except StopIteration as end:
        result: T = end.value
        return result
    coroutine.close()
    raise RuntimeError("a call on a sync client tried to suspend; expected it to finish without an event loop")


async def _at_once(function: Callable[..., T], *arguments: Any, **keywords: Any) -> T:
    return function(*arguments, **keywords)


class Awaitables:
    """A wrapper that makes the calls of a sync client or module awaitable. Awaiting them never suspends the caller."""

    def __init__(self, owner: Any) -> None:
        self._owner = owner

    def __getattr__(self, name: str) -> Callable[..., Awaitable[Any]]:
        found = getattr(self._owner, name)
        return partial(_at_once, found) if callable(found) else found


@dataclass(frozen=True, slots=True, kw_only=True)
class Asking:
    """Options that `get_meta` uses to claim batches.

    Attributes:
        sampler: chooses the samples for each batch.
        sample: function that requests a batch from a custom sampler in the controller. None if this process cannot call
            custom samplers.
        polling_mode: whether `get_meta` returns an empty batch if too few samples are ready. If False, `get_meta`
            raises an error instead.
        wait_seconds: maximum number of seconds to wait for samples.
    """

    sampler: BaseSampler
    sample: Callable[..., BatchMeta] | None = None
    polling_mode: bool = False
    wait_seconds: float = 60.0


class Calls:
    """TransferQueue's calls, implemented on top of a client for the service.

    Args:
        client: an `AsyncClient`, or a `Client` wrapped in `Awaitables`.
        asking: options for `get_meta`.
        run: function that makes a blocking call and returns its result. For async clients, the call runs in a thread.

    Attributes:
        wait_seconds: maximum number of seconds that `get_meta` waits for samples. The initial value comes from
            `asking`.
    """

    def __init__(self, client: Any, *, asking: Asking, run: Callable[..., Awaitable[Any]]) -> None:
        self._client: tq.AsyncClient = client
        self._run = run
        self._asking = asking
        self.wait_seconds = asking.wait_seconds

    # Batches

    async def get_meta(
        self,
        data_fields: Sequence[str],
        batch_size: int,
        partition_id: str,
        mode: str = "fetch",
        task_name: str | None = None,
        sampling_config: Mapping[str, Any] | None = None,
    ) -> BatchMeta:
        """Return a batch for a task (mode "fetch"), new samples ("insert"), or all samples ("force_fetch").

        Raises:
            RuntimeError: too few samples were ready in time. In polling mode, the batch is empty instead.
            StorageKeyNotFoundError: a rank requested a batch again after some of the batch's samples were cleared.
        """
        if mode == "insert":
            return of_samples(await self._client.insert(partition_id, batch_size), data_fields)
        if mode == "force_fetch":
            return of_samples(await self._lookup(partition_id), data_fields)
        if mode != "fetch" or task_name is None:
            raise ValueError(
                f"mode is {mode!r} and task_name is {task_name!r}; expected 'fetch' with a task_name, or 'insert' or "
                "'force_fetch'"
            )
        claim: Row = {"partition_id": partition_id, "task_name": task_name, "data_fields": list(data_fields)}
        sampler: Any = self._asking.sampler
        try:
            if service_samples(sampler):
                wanted = sampler.claim(batch_size, sampling_config or {})
                meta = await self._client.get_meta(**claim, **wanted, max_wait=self.wait_seconds)
                batch = of_samples(meta, data_fields) if meta.status == "batch" else BatchMeta()
            else:
                batch = await self._chosen(batch_size=batch_size, config=sampling_config or {}, **claim)
        except tq.errors.SamplesClearedError as error:
            raise StorageKeyNotFoundError(str(error)) from error
        if not batch and not self._asking.polling_mode:
            raise RuntimeError(
                f"fewer than {batch_size} samples of partition {partition_id!r} were ready for task {task_name!r} "
                f"within {self.wait_seconds:g} s; put more samples, or set controller.polling_mode"
            )
        return batch

    async def _chosen(self, **wanted: Any) -> BatchMeta:
        """Call a custom sampler until it chooses samples. Return the batch, or an empty batch after a timeout."""
        sample = self._asking.sample
        if sample is None:
            raise RuntimeError("this process cannot call a custom sampler; set the loader's num_workers to 0")
        batch: BatchMeta
        waited = time.monotonic() + self.wait_seconds
        while not (batch := await self._run(sample, **wanted)) and time.monotonic() < waited:
            await self._run(time.sleep, _PAUSE_SECONDS)
        return batch

    async def get_data(self, metadata: BatchMeta) -> TensorDict:
        """Return the fields of a batch.

        Non-scalar tensor rows are returned as nested tensors, and objects as a NonTensorStack.

        Raises:
            StorageKeyNotFoundError: a sample of the batch was cleared.
        """
        if not metadata or not metadata.field_names:
            return TensorDict({}, batch_size=0)
        samples_of = self._samples(metadata)
        try:
            parts = [
                await self._client.get_data(samples, data_fields=metadata.field_names, layout="jagged")
                for _, samples in samples_of
            ]
        except _CLEARED as error:
            raise StorageKeyNotFoundError(str(error)) from error
        except tq.errors.FieldNotFoundError as error:  # a field is removed with the last sample that has the field
            found = [
                await self._lookup(samples.partition_id, global_indexes=samples.indexes) for _, samples in samples_of
            ]
            if sum(meta.size for meta in found) == len(metadata):
                raise
            raise StorageKeyNotFoundError(f"some samples of the batch were cleared: {error}") from error
        if len(parts) > 1:
            places = np.argsort(np.concatenate([positions for positions, _ in samples_of]))
            parts = [_taken(parts, places.tolist())]
        return _as_transfer_queue(parts[0])

    async def put(
        self,
        data: TensorDict,
        metadata: BatchMeta | None = None,
        partition_id: str | None = None,
        data_parser: Callable[[Row], Any] | None = None,
    ) -> BatchMeta:
        """Write fields and custom_meta to existing samples, or create samples with the given fields.

        Args:
            data: the fields, with one row per sample.
            metadata: batch of existing samples. The call also adds the fields to this batch.
            partition_id: partition for new samples, if `metadata` is None.
            data_parser: function that receives the columns as a dict and modifies them in place. The function runs in
                this process before the put.

        Raises:
            ValueError: neither `metadata` nor `partition_id` is passed.
        """
        data = _parsed(data, data_parser)
        if metadata is None:
            if partition_id is None:
                raise ValueError(
                    "got neither metadata nor partition_id; pass metadata of existing samples or a partition_id"
                )
            return of_samples(await self._put(partition_id, data, return_meta="all"))
        if not metadata:
            raise ValueError("metadata contains no samples; pass metadata with one sample per row of data")
        for positions, samples in self._samples(metadata):
            rows = data if len(positions) == len(metadata) else _taken([data], positions)
            tags = [metadata.custom_meta[position] for position in positions]
            await self._put(samples, rows, custom_meta=keeping_nulls(tags) if any(tags) else None)
        return metadata.add_fields(data)

    async def _put(self, target: str | tq.BatchMeta, data: TensorDict | None, **more: Any) -> tq.BatchMeta:
        """Put columns. If the columns do not match existing fields, convert them and retry."""
        try:
            return await self._client.put(target, data, **more)
        except tq.errors.FieldMismatchError:
            partition_id = target if isinstance(target, str) else target.partition_id
            try:
                fields = (await self._client.describe_partition(partition_id)).fields
            except tq.errors.PartitionNotFoundError:  # the partition was cleared after the put
                fields = ()
            specs = {each.spec.name: each.spec for each in fields}
            return await self._client.put(target, _fitted(data, specs), **more)

    async def set_custom_meta(self, metadata: BatchMeta) -> None:
        """Write the custom_meta of a batch to the service."""
        for positions, samples in self._samples(metadata):
            tags = [metadata.custom_meta[position] for position in positions]
            await self._client.set_custom_meta(samples, keeping_nulls(tags))

    async def clear_samples(self, metadata: BatchMeta) -> None:
        """Remove the samples of a batch. Samples that have already been removed are ignored."""
        for _, samples in self._samples(metadata):
            await self._client.clear_samples(samples, missing_ok=True)

    async def clear_partition(self, partition_id: str) -> None:
        """Remove a partition if it exists."""
        await self._client.clear_partition(partition_id, missing_ok=True)

    async def get_partition_list(self) -> list[str]:
        """Return the names of the partitions."""
        return [each.partition_id for each in await self._client.list_partitions()]

    # Progress

    async def get_consumption_status(
        self, task_name: str, partition_id: str
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Return a partition's sample indexes and, for each sample, 1 if the task has consumed it and 0 otherwise.

        Both tensors have shape `(n,)`. Both results are None if the partition does not exist.
        """
        meta = await self._lookup(partition_id, task_name=task_name)
        if not meta.incarnation:
            return None, None
        consumed: Any = meta.consumed  # not None, since a task was passed
        return torch.from_numpy(meta.indexes.copy()), torch.from_numpy(consumed.astype(np.int8))

    async def get_production_status(
        self, data_fields: Sequence[str], partition_id: str
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Return the sample indexes `(n,)`, and a tensor `(n, f)` that is 1 where a sample has a field and 0 elsewhere.

        Both results are None if `data_fields` is empty or a field does not exist.
        """
        meta = await self._lookup(partition_id)
        produced = meta.produced
        if not data_fields or not all(name in produced for name in data_fields):
            return None, None
        has_field = np.stack([produced[name] for name in data_fields], axis=1)
        return torch.from_numpy(meta.indexes.copy()), torch.from_numpy(has_field.astype(np.int8))

    async def check_consumption_status(self, task_name: str, partition_id: str) -> bool:
        """Return whether the partition has samples and the task has consumed every sample available to it."""
        status = await self._client.check_consumption(partition_id, task_name, missing_ok=True)
        return 0 < _expected(status.total_count - status.skipped_count) <= status.consumed_count

    async def check_production_status(self, data_fields: Sequence[str], partition_id: str) -> bool:
        """Return whether the partition has samples and all of them have the given fields."""
        status = await self._client.check_production(partition_id, data_fields, missing_ok=True)
        return 0 < _expected(status.total_count) <= status.produced_count

    async def reset_consumption(self, partition_id: str, task_name: str | None = None) -> bool:
        """Allow one task, or all tasks, to consume the samples of a partition again."""
        try:
            known = () if task_name else (await self._client.describe_partition(partition_id)).tasks
            for name in [task_name] if task_name else [task.task_name for task in known]:
                await self._client.reset_consumption(partition_id, name)
        except tq.errors.NotFoundError:  # no samples have been consumed
            pass
        return True

    # Keys

    async def kv_retrieve_meta(self, keys: Sequence[str] | str, partition_id: str, create: bool = False) -> BatchMeta:
        """Return the metadata of the samples with the given keys, including the fields that all of them have.

        Unknown keys are omitted. If `create` is True, samples are created for unknown keys instead.
        """
        names = _listed("keys", keys, str)
        if create:
            return of_samples(await self._client.put(partition_id, keys=names, return_meta="all"))
        return of_samples(await self._lookup(partition_id, keys=names))

    async def kv_retrieve_keys(self, global_indexes: Sequence[int] | int, partition_id: str) -> list[str | None]:
        """Return the keys of samples, with None for each sample that has no key.

        Raises:
            RuntimeError: the partition does not exist.
        """
        indexes = _listed("global_indexes", global_indexes, int)
        meta = await self._lookup(partition_id, global_indexes=indexes)
        if not meta.incarnation:
            raise RuntimeError(f"partition {partition_id!r} does not exist")
        key_of = dict(zip(meta.global_indexes, meta.keys, strict=True))
        return [key_of.get(index) for index in indexes]

    async def kv_list(self, partition_id: str | None = None) -> dict[str, dict[str, Row]]:
        """Return the samples' tags by partition and key, for one partition or for all."""
        names = [partition_id] if partition_id is not None else await self.get_partition_list()
        metas = [await self._lookup(name) for name in names]
        listed = {name: meta for name, meta in zip(names, metas, strict=True) if meta.incarnation}
        return {
            name: {key: tag for key, tag in zip(meta.keys, meta.custom_meta, strict=True) if key is not None}
            for name, meta in listed.items()
        }

    async def kv_put(
        self,
        key: str,
        partition_id: str,
        fields: TensorDict | Row | None = None,
        tag: Row | None = None,
        data_parser: Callable[[Row], Any] | None = None,
    ) -> KVBatchMeta:
        """Write one sample's fields, passed as a one-row TensorDict or a dict of values, and merge its tag.

        Raises:
            ValueError: neither `fields` nor `tag` is passed, or `fields` has several rows.
        """
        if isinstance(fields, dict):
            nested = [name for name, each in fields.items() if isinstance(each, torch.Tensor) and each.is_nested]
            if nested:
                raise ValueError(
                    f"field {nested[0]!r} is a nested tensor with several rows; expected one row. Use kv_batch_put to "
                    "put several samples"
                )
            rows = {
                name: value.unsqueeze(0) if isinstance(value, torch.Tensor) else NonTensorStack(value)
                for name, value in fields.items()
            }
            fields = TensorDict(rows, batch_size=[1])
        elif fields is not None and not isinstance(fields, TensorDict):
            raise ValueError(f"fields has type {type(fields).__name__}; expected a dict or a TensorDict")
        return await self.kv_batch_put([key], partition_id, fields, None if tag is None else [tag], data_parser)

    async def kv_batch_put(
        self,
        keys: Sequence[str],
        partition_id: str,
        fields: TensorDict | None = None,
        tags: Sequence[Row] | None = None,
        data_parser: Callable[[Row], Any] | None = None,
    ) -> KVBatchMeta:
        """Write fields to samples identified by key, and merge their tags. Samples are created for unknown keys.

        Returns:
            References to the samples, with the tags and common fields that the samples have after the put.

        Raises:
            ValueError: neither `fields` nor `tags` is passed, or the number of rows or tags differs from the number of
                keys.
        """
        names = _listed("keys", keys, str)
        if fields is None and tags is None:
            raise ValueError("got neither fields nor tags; pass fields, tags or both")
        for what, given in (("fields", fields), ("tags", tags)):
            if given is not None and len(given) != len(names):
                raise ValueError(f"{what} has {len(given)} rows; expected {len(names)}, one per key")
        meta = await self._put(
            partition_id,
            None if fields is None else _parsed(fields, data_parser),
            keys=names,
            custom_meta=None if tags is None else keeping_nulls(tags),
            return_meta="all",
        )
        return KVBatchMeta(
            keys=names,
            tags=meta.custom_meta,
            partition_id=partition_id,
            fields=sorted(name for name, column in meta.produced.items() if column.all()),
        )

    async def kv_batch_get(
        self, keys: Sequence[str] | str, partition_id: str, select_fields: Sequence[str] | str | None = None
    ) -> TensorDict:
        """Look up samples by key and return their fields. By default, return the fields that all of the samples have.

        Unknown keys are omitted.

        Raises:
            ValueError: none of the keys exists, or the samples have no field in common.
        """
        names = _listed("keys", keys, str)
        if select_fields is not None and not select_fields:
            return TensorDict({}, batch_size=0)
        try:
            data = await self._client.get_data(
                partition_id,
                keys=names,
                data_fields=None if select_fields is None else _listed("select_fields", select_fields, str),
                missing="skip",
                missing_fields="skip",
                layout="jagged",
            )
        except tq.errors.PartitionNotFoundError as error:
            raise ValueError(f"could not find the keys or the partition: {error}") from error
        if not data.batch_size[0]:
            raise ValueError(f"could not find the keys: no sample of partition {partition_id!r} has any of them")
        if data.is_empty():
            if not of_samples(await self._lookup(partition_id, keys=names)).field_names:
                raise ValueError(f"the samples of partition {partition_id!r} have no field in common")
            return TensorDict({}, batch_size=0)
        return _as_transfer_queue(data)

    async def kv_batch_get_by_meta(
        self, meta: KVBatchMeta, select_fields: Sequence[str] | str | None = None
    ) -> TensorDict:
        """Return the selected fields of the samples in `meta`. By default, return all fields listed in `meta`.

        Raises:
            ValueError: the partition of `meta` is not set, or a selected field is not in `meta`.
        """
        fields = meta.fields if select_fields is None else _listed("select_fields", select_fields, str)
        if meta.partition_id is None:
            raise ValueError("meta has no partition; set its partition_id")
        if unknown := set(fields or ()) - set(meta.fields or ()):
            raise ValueError(f"select_fields contains {sorted(unknown)}, but meta has only the fields {meta.fields}")
        return await self.kv_batch_get(meta.keys, meta.partition_id, fields)

    async def kv_clear(self, keys: Sequence[str] | str, partition_id: str) -> None:
        """Remove samples by key. Unknown keys and partitions are ignored."""
        await self._client.clear_samples(partition_id, keys=_listed("keys", keys, str), missing_ok=True)

    # Arguments for calls to the service

    async def _lookup(self, partition_id: str, **which: Any) -> tq.BatchMeta:
        meta, _ = await self._client.lookup_samples(partition_id, missing_ok=True, **which)
        return meta

    def _samples(self, metadata: BatchMeta) -> list[tuple[list[int], tq.BatchMeta]]:
        """Group a batch's samples by partition, together with their positions in the batch."""
        indexes = np.asarray(metadata.global_indexes, np.int64)
        return [
            (
                positions,
                tq.BatchMeta(
                    partition_id=name,
                    namespace=self._client.namespace,
                    incarnation=metadata.incarnations.get(name, b""),
                    indexes=indexes[positions],
                ),
            )
            for name, positions in positions_of(metadata.partition_ids).items()
        ]


def of_samples(meta: tq.BatchMeta, data_fields: Sequence[str] | None = None) -> BatchMeta:
    """Return samples as a TransferQueue `BatchMeta`, with the given fields or, by default, their common fields."""
    produced = meta.produced
    has_all = [name for name, column in produced.items() if column.all()]
    names = has_all if data_fields is None else data_fields
    specs = {spec.name: spec for spec in meta.fields}
    columns = [produced.get(name, np.zeros(meta.size, np.bool_)) for name in names]
    return BatchMeta(
        meta.global_indexes,
        [meta.partition_id] * meta.size,
        {name: _schema_of(specs.get(name)) for name in names},
        np.logical_and.reduce(columns) if columns else None,
        custom_meta=meta.custom_meta,
        incarnations={meta.partition_id: meta.incarnation},
    )


def _schema_of(spec: tq.FieldSpec | None) -> Row:
    if spec is None:
        return schema_of(None, None)
    dtype = getattr(torch, spec.dtype) if spec.dtype else None
    is_nested, is_non_tensor = spec.layout == "jagged", spec.layout == "object"
    return schema_of(dtype, spec.row_shape, is_nested=is_nested, is_non_tensor=is_non_tensor)


def _expected(total_count: int) -> int:
    """Return the minimum number of samples in a complete partition."""
    return max(total_count, int(os.environ.get("TQ_PRE_ALLOC_SAMPLE_NUM", "1")))


def _listed(what: str, values: Any, kind: type) -> list[Any]:
    """Return the values as a list. A single value becomes a list with one item.

    Raises:
        ValueError: the list is empty.
        TypeError: a value has the wrong type.
    """
    listed = [values] if isinstance(values, kind) else values
    if not isinstance(listed, list | tuple) or not all(isinstance(value, kind) for value in listed):
        raise TypeError(f"{what} is {values!r:.200}; expected a {kind.__name__} or a list of {kind.__name__} values")
    if not listed:
        raise ValueError(f"{what} is empty; expected at least one value")
    return list(listed)


def _parsed(data: TensorDict, data_parser: Callable[[Row], Any] | None) -> TensorDict:
    """Apply a parser to data. The parser receives dense columns as tensors and other columns as lists.

    Raises:
        ValueError: the parser added or removed columns, or changed the number of rows.
    """
    if data_parser is None:
        return data
    names: Any = data.keys()  # iterating over the TensorDict itself yields rows
    columns: Row = {name: data.get(name) for name in names}
    ragged = {name: getattr(column, "_ragged_idx", 1) for name, column in columns.items()}
    for name, column in columns.items():
        if not isinstance(column, torch.Tensor) or column.is_nested:
            columns[name] = list(_unbound(column))
    counts = {name: len(column) for name, column in columns.items()}
    data_parser(columns)
    if {name: len(column) for name, column in columns.items()} != counts:
        raise ValueError(
            "data_parser added or removed columns or rows; expected the same columns with the same number of rows"
        )
    return TensorDict(
        {name: _column_of(column, ragged[name]) for name, column in columns.items()}, batch_size=data.batch_size
    )


def _column_of(rows: Any, ragged_dimension: int = 1) -> Any:
    """Convert rows to a TensorDict column. Tensors become a nested tensor (jagged if possible).

    Args:
        rows: one value per sample.
        ragged_dimension: dimension to make ragged if the rows differ only in this dimension. Dimension 1 is the first
            dimension of a row.
    """
    if isinstance(rows, torch.Tensor):
        return rows
    if not all(isinstance(row, torch.Tensor) for row in rows) or len({row.dim() for row in rows}) > 1:
        return NonTensorStack(*rows)
    if not rows[0].dim():
        return torch.stack(rows)
    differing = {
        at for at, sizes in enumerate(zip(*(row.shape for row in rows), strict=True), 1) if len(set(sizes)) > 1
    }
    if len(differing) > 1 or len({row.dtype for row in rows}) > 1:
        return torch.nested.nested_tensor(rows, dtype=rows[0].dtype)
    if differing <= {ragged_dimension} and ragged_dimension > 1:
        sizes = torch.tensor([0, *(row.shape[ragged_dimension - 1] for row in rows)])
        values = torch.cat(rows, dim=ragged_dimension - 1)
        return torch.nested.nested_tensor_from_jagged(values, sizes.cumsum(0), jagged_dim=ragged_dimension)
    return torch.nested.as_nested_tensor(rows, layout=torch.jagged)


def _taken(parts: Sequence[TensorDict], places: Sequence[int]) -> TensorDict:
    """Concatenate the parts, and return the rows at the given positions."""
    columns = {}
    for name in parts[0].keys():  # noqa: SIM118  (iterating yields rows)
        of_parts = [part.get(name) for part in parts]
        rows = [row for column in of_parts for row in _unbound(column)]
        ragged_dimension = max(getattr(column, "_ragged_idx", 1) for column in of_parts)
        columns[name] = _column_of([rows[place] for place in places], ragged_dimension)
    return TensorDict(columns, batch_size=[len(places)])


def _fitted(data: TensorDict | None, specs: Mapping[str, tq.FieldSpec]) -> TensorDict | None:
    """Convert data to match existing fields.

    Tensors are converted to the dtype of the field or, for object fields, to objects. Tensors are not converted to
    integers or booleans if the conversion would change a value. Complex numbers are never converted.
    """
    if data is None:
        return None
    columns: Row = {name: data.get(name) for name in map(str, data.keys())}
    for name, column in columns.items():
        spec = specs.get(name)
        if spec is None or not isinstance(column, torch.Tensor):
            continue
        if spec.layout == "object":
            columns[name] = NonTensorStack(*column.unbind())
        elif spec.dtype and not column.is_complex():
            converted = column.to(getattr(torch, spec.dtype))
            may_round = converted.is_floating_point() or converted.is_complex()
            same = zip(converted.to(column.dtype).unbind(), column.unbind(), strict=True)
            if may_round or all(torch.equal(one, other) for one, other in same):
                columns[name] = converted
    return TensorDict(columns, batch_size=data.batch_size)


def _unbound(column: Any) -> Any:
    return column.unbind() if isinstance(column, torch.Tensor) else column.tolist()


def _as_transfer_queue(data: TensorDict) -> TensorDict:
    """Convert data to TransferQueue's format.

    Tensor rows become a nested tensor even if their shapes differ in several dimensions.
    """
    for name in list(data.keys()):
        column = data.get(name)
        if not isinstance(column, torch.Tensor) and isinstance(column[0].data, torch.Tensor):
            data[name] = _column_of(column.tolist())
    return data


class TransferQueueClient:
    """TransferQueue's low-level calls, each as a sync method `name` and an awaitable method `async_name`.

    Args:
        address: address of the service.
        asking: options for `get_meta`.
        **reached: client options `namespace`, `timeout`, `token` and `insecure`.

    Attributes:
        client_id: name of this client in logs.
        address: address of the service.
    """

    def __init__(self, address: str, *, asking: Asking, **reached: Any) -> None:
        self.client_id = f"{type(self).__name__}_{secrets.token_hex(4)}"
        self.address = address
        self._options: dict[str, Any] = {"asking": asking, **reached}
        self.sync_client, self.async_client = tq.Client(address, **reached), tq.AsyncClient(address, **reached)
        self.sync_calls = Calls(Awaitables(self.sync_client), asking=asking, run=_at_once)
        self.async_calls = Calls(self.async_client, asking=asking, run=asyncio.to_thread)

    if TYPE_CHECKING:  # the methods are added below

        def __getattr__(self, name: str) -> Callable[..., Any]: ...

    def polling(self) -> Callable[..., TransferQueueClient]:
        """Return a function that creates clients in polling mode for loader workers.

        The function takes the service's address. The function can be pickled if the service implements the sampler.
        """
        asking = replace(self._options["asking"], polling_mode=True, wait_seconds=0.0)
        if service_samples(asking.sampler):
            asking = replace(asking, sample=None)
        return partial(TransferQueueClient, **{**self._options, "asking": asking})

    def wait_at_most(self, seconds: float) -> None:
        """Set the maximum number of seconds that later `get_meta` calls wait for samples."""
        self.sync_calls.wait_seconds = self.async_calls.wait_seconds = seconds

    def close(self) -> None:
        """Close the client's channels."""
        self.sync_client.close()


def _add_forms(name: str) -> None:
    """Add a synchronous and an awaitable version of a `Calls` method to the client."""

    def call(client: TransferQueueClient, *arguments: Any, **keywords: Any) -> Any:
        return finished(getattr(client.sync_calls, name)(*arguments, **keywords))

    async def async_call(client: TransferQueueClient, *arguments: Any, **keywords: Any) -> Any:
        return await getattr(client.async_calls, name)(*arguments, **keywords)

    for form, its_name in ((call, name), (async_call, f"async_{name}")):
        update_wrapper(form, getattr(Calls, name))
        form.__name__ = form.__qualname__ = its_name
        setattr(TransferQueueClient, its_name, form)


for _name in [name for name in vars(Calls) if not name.startswith("_")]:
    _add_forms(_name)

AsyncTransferQueueClient = TransferQueueClient
