"""TransferQueue's mutable, picklable references to samples by index (`BatchMeta`) and by key (`KVBatchMeta`)."""

from __future__ import annotations

import copy
import logging
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, ClassVar, Final, NamedTuple, Self

import numpy as np
import torch
from numpy.typing import NDArray
from tensordict import TensorDict

_log = logging.getLogger(__name__)

# On import, NeMo-RL's adapter patches TransferQueue's schema for one-dimensional fields, unless this flag is set. The
# patch is not needed, because rows of one-dimensional fields already have shape ().
_nrl_scalar_schema_patched = True
_IMMUTABLE: Final = (str, int, float, bytes, type(None))


class _Batch(ABC):
    """A batch of samples.

    Attributes listed in `_PER_SAMPLE` have one value per sample. The first of these attributes identifies the samples.
    """

    _PER_SAMPLE: ClassVar[tuple[str, ...]]

    @abstractmethod
    def _of(self, positions: Sequence[int]) -> Self:
        """Return the samples at the given positions, with the fields and extra_info of the batch."""

    @property
    def size(self) -> int:
        """Number of samples."""
        return len(getattr(self, self._PER_SAMPLE[0]))

    def __len__(self) -> int:
        return self.size

    def _reorder(self, indexes: Sequence[int]) -> None:
        """Reorder the samples in place. `indexes[i]` is the current position of the sample to move to position `i`.

        Raises:
            ValueError: `indexes` does not contain each position exactly once.
        """
        if sorted(indexes) != list(range(self.size)):
            raise ValueError(
                f"indexes is {list(indexes)}; expected each position from 0 to {self.size - 1} exactly once"
            )
        ordered = self._of(indexes)
        for name in self._PER_SAMPLE:
            setattr(self, name, getattr(ordered, name))

    def chunk(self, chunks: int) -> list[Self]:
        """Split the batch into `chunks` batches of consecutive samples.

        Batch sizes differ by at most one, and larger batches come first.
        """
        if self.size < chunks:
            _log.warning("split %d samples into %d parts; some parts are empty", self.size, chunks)
        return [self._of(part.tolist()) for part in np.array_split(np.arange(self.size), chunks)]


class BatchMeta(_Batch):
    """Samples identified by index, with their metadata.

    Attributes:
        global_indexes: indexes of the samples.
        partition_ids: the partition of each sample.
        field_schema: `dtype`, row `shape` (-1 for dimensions that differ between rows), `is_nested` and `is_non_tensor`
            of each field.
        production_status: int8 array of shape `(n,)` that is 1 for each sample with all fields and 0 for the others.
        extra_info: additional values for the batch.
        custom_meta: user metadata of the samples, as one mapping per sample.
    """

    _PER_SAMPLE = ("global_indexes", "partition_ids", "production_status", "custom_meta")

    # Attributes read by tq_service's loader.
    status = "batch"
    incarnation = b""
    epoch = 0

    def __init__(
        self,
        global_indexes: Iterable[int] = (),
        partition_ids: Iterable[str] = (),
        field_schema: Mapping[str, Mapping[str, Any]] | None = None,
        production_status: Any = None,
        extra_info: Mapping[str, Any] | None = None,
        custom_meta: Sequence[Mapping[str, Any]] | None = None,
        incarnations: Mapping[str, bytes] | None = None,
    ) -> None:
        self.global_indexes = list(global_indexes)
        self.partition_ids = list(partition_ids)
        self.field_schema = {name: dict(schema) for name, schema in (field_schema or {}).items()}
        self.production_status: NDArray[np.int8] = (
            np.zeros(self.size, np.int8) if production_status is None else np.array(production_status, np.int8)
        )
        self.extra_info = dict(extra_info or {})
        self.custom_meta = [dict(each) for each in custom_meta or ({} for _ in self.global_indexes)]
        # Known incarnation of each partition, used to detect that a partition was cleared and created again.
        self.incarnations = dict(incarnations or {})
        for what in self._PER_SAMPLE[1:]:
            if (count := len(getattr(self, what))) != self.size:
                raise ValueError(f"{what} has {count} values; expected {self.size}, one per sample")

    @classmethod
    def empty(cls, extra_info: Mapping[str, Any] | None = None) -> BatchMeta:
        """Return a batch without samples."""
        return cls(extra_info=extra_info)

    @property
    def field_names(self) -> list[str]:
        """Sorted names of the fields."""
        return sorted(self.field_schema)

    @property
    def is_ready(self) -> bool:
        """Whether the batch is non-empty and every sample has all fields."""
        return self.size > 0 and bool((self.production_status == 1).all())

    @property
    def samples(self) -> Sequence[SampleView]:
        """Read-only views of the samples."""
        fields = MappingProxyType({name: MappingProxyType(each) for name, each in self.field_schema.items()})
        statuses, tags = self.production_status.tolist(), map(MappingProxyType, self.custom_meta)
        columns = zip(self.global_indexes, self.partition_ids, statuses, tags, strict=True)
        return [SampleView(*known, fields) for known in columns]

    def get_dtypes(self, field_name: str) -> list[Any]:
        """Return a list that repeats the dtype of a field once per sample. Raise KeyError for an unknown field."""
        return [self._schema(field_name).get("dtype")] * self.size

    def get_shapes(self, field_name: str) -> list[Any]:
        """Return a list that repeats the row shape of a field once per sample. Raise KeyError for an unknown field."""
        return [self._schema(field_name).get("shape")] * self.size

    def _schema(self, field_name: str) -> dict[str, Any]:
        if field_name not in self.field_schema:
            raise KeyError(f"the batch has no field {field_name!r}; its fields are {self.field_names}")
        return self.field_schema[field_name]

    def get_extra_info(self, key: str, default: Any = None) -> Any:
        """Return the value of a key in `extra_info`, or the default if the key does not exist."""
        return self.extra_info.get(key, default)

    def set_extra_info(self, key: str, value: Any) -> None:
        """Set the value of a key in `extra_info`."""
        self.extra_info[key] = value

    def update_extra_info(self, info_dict: Mapping[str, Any]) -> None:
        """Set the values of several keys in `extra_info`."""
        self.extra_info.update(info_dict)

    def remove_extra_info(self, key: str) -> Any:
        """Remove a key from `extra_info` and return its value, or None if the key does not exist."""
        return self.extra_info.pop(key, None)

    def has_extra_info(self, key: str) -> bool:
        """Return whether `extra_info` contains a key."""
        return key in self.extra_info

    def get_all_extra_info(self) -> dict[str, Any]:
        """Return a deep copy of `extra_info`."""
        return copy.deepcopy(self.extra_info)

    def clear_extra_info(self) -> None:
        """Remove all values from `extra_info`."""
        self.extra_info.clear()

    def get_all_custom_meta(self) -> list[dict[str, Any]]:
        """Return a deep copy of `custom_meta`."""
        return _copied(self.custom_meta)

    def update_custom_meta(self, custom_meta: Sequence[Mapping[str, Any]] | None) -> None:
        """Merge one mapping per sample into `custom_meta`. Call `set_custom_meta` or `put` to write it to the service.

        Raises:
            ValueError: the number of mappings differs from the number of samples.
        """
        if custom_meta is None:
            return
        if len(custom_meta) != self.size:
            raise ValueError(f"custom_meta has {len(custom_meta)} values; expected {self.size}, one per sample")
        for mine, given in zip(self.custom_meta, custom_meta, strict=True):
            mine.update(given)

    def clear_custom_meta(self) -> None:
        """Remove all values from `custom_meta`."""
        self.custom_meta = [{} for _ in self.global_indexes]

    def add_fields(self, tensor_dict: TensorDict, set_all_ready: bool = True) -> BatchMeta:
        """Add the fields of a TensorDict to this object in place. The TensorDict has one row per sample.

        Raises:
            ValueError: the number of rows differs from the number of samples.
        """
        if tensor_dict.batch_size[0] != self.size:
            raise ValueError(f"tensor_dict has {tensor_dict.batch_size[0]} rows; expected {self.size}, one per sample")
        self.field_schema.update(extract_field_schema(tensor_dict))
        if set_all_ready:
            self.production_status = np.ones(self.size, np.int8)
        return self

    def select_samples(self, sample_indices: Iterable[int]) -> BatchMeta:
        """Return the samples at the given positions in the batch, in the given order.

        Raises:
            ValueError: a position is outside the batch.
        """
        positions = [int(position) for position in sample_indices]
        if any(not 0 <= position < self.size for position in positions):
            raise ValueError(f"sample_indices is {positions}; expected positions from 0 to {self.size - 1}")
        return self._of(positions)

    def select_fields(self, field_names: Iterable[str]) -> BatchMeta:
        """Return a copy of the batch with only the named fields. Unknown names are ignored."""
        selected = self.copy()
        selected.field_schema = {name: selected.field_schema[name] for name in field_names if name in self.field_schema}
        return selected

    def reorder(self, indices: Sequence[int]) -> None:
        """Reorder the samples in place. `indices` lists the samples' current positions in the new order."""
        self._reorder(indices)

    def copy(self) -> BatchMeta:
        """Return a deep copy of the batch."""
        return self._of(range(self.size))

    def _of(self, positions: Sequence[int]) -> BatchMeta:
        return BatchMeta(
            [self.global_indexes[position] for position in positions],
            [self.partition_ids[position] for position in positions],
            self.field_schema,
            self.production_status[list(positions)],
            copy.deepcopy(self.extra_info),
            _copied([self.custom_meta[position] for position in positions]),
            self.incarnations,
        )

    def __getitem__(self, item: Any) -> BatchMeta:
        if isinstance(item, slice):
            return self._of(range(self.size)[item])
        if isinstance(item, int | np.integer):
            return self._of([range(self.size)[item]])
        raise TypeError(f"the index has type {type(item).__name__}; expected an integer or a slice")

    def chunk_by_partition(self) -> list[BatchMeta]:
        """Split the batch by partition. The batches are in the order in which the partitions first occur."""
        return [self._of(positions) for positions in positions_of(self.partition_ids).values()]

    def union(self, other: BatchMeta) -> BatchMeta:
        """Merge the fields of two batches with the same samples. For fields in both batches, `other` takes precedence.

        Raises:
            ValueError: `other` has different samples.
        """
        if not other or not self:
            return (self or other).copy()
        for what in ("global_indexes", "partition_ids"):
            mine, its = getattr(self, what), getattr(other, what)
            if mine != its:
                raise ValueError(f"{what} is {its} in the other batch; expected {mine}, as in this batch")
        united = self.copy()
        united.field_schema |= copy.deepcopy(other.field_schema)
        united.production_status = united.production_status & other.production_status
        united.extra_info |= copy.deepcopy(other.extra_info)
        united.update_custom_meta(_copied(other.custom_meta))
        return united

    @classmethod
    def concat(cls, data: Sequence[BatchMeta], validate: bool = True) -> BatchMeta:
        """Concatenate batches. Empty batches are omitted.

        Raises:
            ValueError: the batches differ in `extra_info` values or, if `validate` is True, in fields or dtypes.
        """
        parts = [part for part in data if part]
        if not parts:
            return cls.empty()
        first = parts[0]
        for part in parts[1:] if validate else ():
            if part.field_names != first.field_names:
                raise ValueError(f"the batches have different fields: {first.field_names} and {part.field_names}")
            for name, schema in first.field_schema.items():
                if part.field_schema[name].get("dtype") != schema.get("dtype"):
                    raise ValueError(
                        f"the batches have different dtypes for field {name!r}: {schema.get('dtype')} and "
                        f"{part.field_schema[name].get('dtype')}"
                    )
        return cls(
            [index for part in parts for index in part.global_indexes],
            [name for part in parts for name in part.partition_ids],
            {name: _merged_schema([part.field_schema.get(name, {}) for part in parts]) for name in first.field_schema},
            np.concatenate([part.production_status for part in parts]),
            _merged_extra_info([part.extra_info for part in parts]),
            [each for part in parts for each in part.custom_meta],
            {name: known for part in parts for name, known in part.incarnations.items()},
        )

    def __str__(self) -> str:
        return (
            f"BatchMeta(size={self.size}, field_names={self.field_names}, is_ready={self.is_ready}, "
            f"global_indexes={self.global_indexes}, extra_info={self.extra_info})"
        )


class SampleView(NamedTuple):
    """A read-only view of one sample of a batch.

    Attributes:
        global_index: index of the sample.
        partition_id: partition that contains the sample.
        production_status: 1 if the sample has all fields, otherwise 0.
        custom_meta: user metadata attached to the sample.
        fields: schemas of the batch's fields.
    """

    global_index: int
    partition_id: str
    production_status: int
    custom_meta: Mapping[str, Any]
    fields: Mapping[str, Mapping[str, Any]]


@dataclass
class KVBatchMeta(_Batch):
    """Samples of one partition, identified by key.

    Attributes:
        keys: unique keys of the samples.
        tags: user metadata of the samples, as one mapping per sample.
        partition_id: partition that contains the samples, if known.
        fields: names of the fields that all samples have; None if unknown.
        extra_info: additional values for the batch.
    """

    _PER_SAMPLE = ("keys", "tags")

    keys: list[str] = field(default_factory=list)
    tags: list[dict[str, Any]] = field(default_factory=list)
    partition_id: str | None = None
    fields: list[str] | None = None
    extra_info: dict[str, Any] | None = field(default_factory=dict)

    def __post_init__(self) -> None:
        if len(self.keys) != len(self.tags):
            raise ValueError(f"got {len(self.keys)} keys and {len(self.tags)} tags; expected one tag per key")
        for what, names in (("keys", self.keys), ("fields", self.fields or ())):
            if len(set(names)) != len(names):
                raise ValueError(f"{what} contains duplicate names; list each name only once")
        # Copy the values, so that changes to a part of a batch do not affect the batch.
        self.tags = _copied(self.tags)
        self.extra_info = copy.deepcopy(self.extra_info)

    def __str__(self) -> str:
        return f"KVBatchMeta(size={self.size}, field_names={self.fields}, extra_info={self.extra_info})"

    def _of(self, positions: Sequence[int]) -> KVBatchMeta:
        keys, tags = [self.keys[at] for at in positions], [self.tags[at] for at in positions]
        return replace(self, keys=keys, tags=tags)

    def reorder(self, indexes: Sequence[int]) -> None:
        """Reorder the samples in place. `indexes` lists, in the new order, the current position of each sample."""
        self._reorder(indexes)

    def select_keys(self, keys_to_select: Sequence[str]) -> KVBatchMeta:
        """Return the samples with the given keys, in the order of the keys.

        Raises:
            ValueError: a key is selected twice.
            RuntimeError: a key is not in the batch.
        """
        if unknown := set(keys_to_select) - set(self.keys):
            raise RuntimeError(f"the batch contains no samples with the keys {sorted(unknown)}")
        position_of = {key: position for position, key in enumerate(self.keys)}
        return self._of([position_of[key] for key in keys_to_select])

    @classmethod
    def concat(cls, data: Sequence[KVBatchMeta]) -> KVBatchMeta:
        """Concatenate batches. Empty batches are omitted.

        Raises:
            ValueError: the batches differ in partition, fields or `extra_info` values.
        """
        parts = [part for part in data if part]
        if not parts:
            return cls()
        first = parts[0]
        for part in parts[1:]:
            if part.partition_id != first.partition_id:
                raise ValueError(
                    f"the batches have different partitions: {first.partition_id!r} and {part.partition_id!r}"
                )
            if part.fields is not None and set(part.fields) != set(first.fields or ()):
                raise ValueError(f"the batches have different fields: {first.fields} and {part.fields}")
        return cls(
            keys=[key for part in parts for key in part.keys],
            tags=[tag for part in parts for tag in part.tags],
            partition_id=first.partition_id,
            fields=first.fields,
            extra_info=_merged_extra_info([part.extra_info or {} for part in parts]) or None,
        )


def extract_field_schema(data: TensorDict) -> dict[str, dict[str, Any]]:
    """Return the schema of each field in a TensorDict."""
    return {str(name): _schema_of_column(data.get(name)) for name in data.keys()}  # noqa: SIM118  (data iterates rows)


def _schema_of_column(column: Any) -> dict[str, Any]:
    if not isinstance(column, torch.Tensor):
        return schema_of(None, None, is_non_tensor=True)
    shapes = [tuple(row.shape) for row in column.unbind()] if column.is_nested else [tuple(column.shape[1:])]
    return schema_of(column.dtype, _common_shape(shapes), is_nested=column.is_nested)


def schema_of(dtype: Any, shape: Any, *, is_nested: bool = False, is_non_tensor: bool = False) -> dict[str, Any]:
    """Return a field's schema as a dict."""
    return {"dtype": dtype, "shape": shape, "is_nested": is_nested, "is_non_tensor": is_non_tensor}


def _common_shape(shapes: Iterable[Sequence[int]]) -> tuple[int, ...]:
    """Return the common shape of the given shapes, with -1 for each dimension whose size varies."""
    return tuple(sizes[0] if len(set(sizes)) == 1 else -1 for sizes in zip(*shapes, strict=True))


def _merged_schema(schemas: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    shapes = {tuple(shape) if (shape := schema.get("shape")) is not None else None for schema in schemas}
    merged = dict(schemas[0])
    merged["is_nested"] = len(shapes) > 1 or any(schema.get("is_nested") for schema in schemas)
    if len(shapes) > 1 and len({shape and len(shape) for shape in shapes}) == 1:
        merged["shape"] = _common_shape([shape or () for shape in shapes])
    return merged


def _merged_extra_info(infos: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    merged: dict[str, Any] = {}
    for info in infos:
        for key, value in info.items():
            if key in merged and not _is_same(merged[key], value):
                raise ValueError(f"the batches have different extra_info {key!r}: {merged[key]!r} and {value!r}")
            merged[key] = value
    return merged


def _is_same(one: Any, other: Any) -> bool:
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    return np.array_equal(one, other) if isinstance(one, np.ndarray) else bool(one == other)


def _copied(rows: Sequence[Any]) -> list[Any]:
    """Return deep copies of tags, with a fast path for the most common case: dicts with immutable values."""
    return [
        {name: value if isinstance(value, _IMMUTABLE) else copy.deepcopy(value) for name, value in row.items()}
        if type(row) is dict
        else copy.deepcopy(row)
        for row in rows
    ]


def positions_of(names: Sequence[str]) -> dict[str, list[int]]:
    """Return the positions at which each name occurs. Names are ordered by first occurrence."""
    positions: dict[str, list[int]] = {}
    for position, name in enumerate(names):
        positions.setdefault(name, []).append(position)
    return positions
