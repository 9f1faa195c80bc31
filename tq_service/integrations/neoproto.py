"""Adapter for verl's NeoProto: a `StorageEngine` that stores values in the service, activated by `install`.

`docs/integrations/neoproto.md` describes the settings and semantics. The engine implements the interface of
`verl/experimental/neoproto/storage` at commits 68ee5fa and 40c4bd1 of the verl repository. No release of verl includes
NeoProto yet.
"""

from __future__ import annotations

import atexit
import os
import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, Final, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from verl.experimental.neoproto.storage.engine import Ref

import tq_service as tq

BACKEND: Final = "tq_service"
"""The `backend` of refs to values stored by this engine."""

_PARTITION: Final = "neoproto"
# Minimum row size for storing each row of a tensor as a separate sample.
_LEAST_ROW_BYTES: Final = 1 << 10
_MOST_ROWS: Final = 1 << 16
_SMALL_BYTES: Final = 1 << 18  # `put_many` combines values smaller than this in one put
_GATHERED_BYTES: Final = 8 << 20
_MOST_NAMED: Final = 1 << 16  # maximum number of samples per call
_OBJECTS: Final = "object"
_VALUE: Final = "value"
_NUMBERS: Final = frozenset(
    f"{kind}{bits}" for kind, sizes in
    (("int", (8, 16, 32, 64)), ("uint", (8, 16, 32, 64)), ("float", (16, 32, 64)), ("complex", (64, 128)))
    for bits in sizes
) | {"bool"}  # fmt: skip


@dataclass(frozen=True, slots=True)
class StoredValue:
    """The location of a value, used as the `dataptr` of a ref.

    A location can be pickled, compared and stored, but does not keep the value alive.

    Attributes:
        namespace: namespace of the client that put the value.
        partition_id: partition that contains the value, within the namespace.
        incarnation: incarnation of the partition. The incarnation distinguishes the value from values in a later
            partition with the same name.
        first_index: index of the value's first sample.
        row_count: number of samples in which the value is stored. This is the number of rows if `is_split`, otherwise
            1.
        field: name of the field that stores the value.
        form: whether the original value is a tensor, an array or an object.
        shape: shape of the tensor or array; () for an object.
        is_split: whether each row of the value is stored in a separate sample.
    """

    namespace: str
    partition_id: str
    incarnation: bytes
    first_index: int
    row_count: int
    field: str
    form: Literal["tensor", "array", "object"]
    shape: tuple[int, ...]
    is_split: bool

    def __reduce__(self) -> tuple[Any, ...]:
        values = (getattr(self, name) for name in self.__slots__)
        return _received, tuple(values)


def _received(*values: Any) -> StoredValue:
    """Rebuild a location from the values of its attributes.

    This function is called when a location from another process is unpickled.

    The call also ensures that an engine for refs to the value is registered with verl.
    """
    _register(None)
    return StoredValue(*values)


@dataclass(frozen=True, slots=True)
class _Column:
    """A value converted to rows of a field.

    Attributes:
        value: location of the value; its samples are not known yet.
        rows: tensor or array of shape `(row_count, ...)`, or a list with one object.
        size_bytes: size of the rows in bytes; 0 for objects.
    """

    value: StoredValue
    rows: Any
    size_bytes: int


class TqServiceStorageEngine:
    """A storage engine that stores NeoProto values in a partition of the service.

    ::

        put, put_many ──> put: one sample per value, or per row of a tensor with large rows; small values share a put
        get, get_many ──> get_data: for tensors stored by row, only the rows selected by the ref
        get_rows_many ──> get_data: the same rows of several columns of a batch together
        consolidate   ──> get and put: the values of refs, joined along the first dimension, stored as one value
        apply         ──> get and put: the result of calling a function on a value in this process
        release       ──> clear_samples

    Any process may get and release values that other processes have put. As in verl's own engines, `release` frees
    values immediately, even if other processes still have refs to them.

    Several threads and forked processes can share an engine. The engine connects on first use. A pickled engine
    contains only its settings.

    Args:
        address: address of the service, "host:port", or several addresses. Defaults to `TQ_ADDRESS`.
        partition_id: partition for new values. Refs to values in other partitions also work.
        namespace: namespace that isolates runs that share a service. Defaults to `TQ_NAMESPACE`.
        ttl_seconds: seconds after which the service frees unreleased values. If None, values are never freed
            automatically. The limit applies only if this engine creates the partition. The engine does so when it
            connects, and after it clears the partition.
    """

    backend = BACKEND

    def __init__(
        self,
        address: str | Sequence[str] | None = None,
        *,
        partition_id: str = _PARTITION,
        namespace: str | None = None,
        ttl_seconds: float | None = None,
    ) -> None:
        self._address = address
        self.partition_id = partition_id
        self._namespace = namespace
        self._ttl_seconds = ttl_seconds
        self._connected: tuple[int, tq.Client] | None = None
        self._connecting = threading.Lock()

    def __reduce__(self) -> tuple[Any, ...]:
        return _engine_of, (self._address, self.partition_id, self._namespace, self._ttl_seconds)

    @property
    def client(self) -> tq.Client:
        """The client of this process, which is created on first use."""
        connected = self._connected
        if connected is not None and connected[0] == os.getpid():
            return connected[1]
        if connected is not None:  # the client belongs to the parent, and its lock may have been held during the fork
            self._connecting = threading.Lock()
        with self._connecting:
            if self._connected is None or self._connected[0] != os.getpid():
                client = tq.Client(self._address, namespace=self._namespace)
                self._create_partition(client)
                self._connected = os.getpid(), client
            return self._connected[1]

    def _create_partition(self, client: tq.Client) -> None:
        if self._ttl_seconds is not None:  # otherwise, the first put creates the partition
            with suppress(tq.errors.AlreadyExistsError):
                client.create_partition(self.partition_id, release=tq.Release(ttl_seconds=self._ttl_seconds))

    # Values

    def to_wire(self, value: Any) -> Any:
        """Return the value unchanged, because the service accepts tensors, arrays and objects."""
        return value

    def from_wire(self, value: Any) -> Any:
        """Return the value unchanged."""
        return value

    def put(self, value: Any, *, key_hint: str | None = None, spec: Any = None) -> Ref:
        """Store a value and return a ref to it.

        Args:
            value: a tensor on any device, an array, or an object whose type is allowed in object fields.
            key_hint: prefix of the ref's `uid`.
            spec: a verl `FieldSpec`. The spec determines the ref's dtype. If the value has no shape, the spec also
                determines the ref's shape.

        Raises:
            UnsupportedObjectError: the type of the object cannot be stored.
            QuotaExceededError, ResourceExhaustedError: the service does not have enough capacity.
        """
        return self.put_many([value], key_hint=key_hint, spec=spec)[0]

    def put_many(self, values: Iterable[Any], *, key_hint: str | None = None, spec: Any = None) -> list[Ref]:
        """Store values and return refs to them, in order. If any value cannot be stored, no value is stored.

        Large values are stored one by one as the iterable yields them, so they need not all be in memory at once. Small
        values with the same dtype share a put.
        """
        stored: dict[int, StoredValue] = {}
        described: list[tuple[str, tuple[int, ...] | None]] = []
        gathered: dict[str, list[tuple[int, _Column]]] = {}
        gathered_bytes = 0
        try:
            for number, value in enumerate(values):
                column = _column_of(value, self.partition_id)
                described.append(_described(value, spec))
                if column.size_bytes >= _SMALL_BYTES:
                    self._store([(number, column)], stored)
                    continue
                gathered.setdefault(column.value.field, []).append((number, column))
                gathered_bytes += column.size_bytes
                if gathered_bytes >= _GATHERED_BYTES:
                    self._store_all(gathered, stored)
                    gathered_bytes = 0
            self._store_all(gathered, stored)
        except BaseException:
            with suppress(tq.TqError):  # the original error is more useful
                self._clear(stored.values())
            raise
        return [
            Ref(
                backend=BACKEND,
                uid=_uid(stored[number], key_hint),
                dataptr=stored[number],
                dtype=dtype,
                shape=shape,
            )
            for number, (dtype, shape) in enumerate(described)
        ]

    def _store_all(self, gathered: dict[str, list[tuple[int, _Column]]], stored: dict[int, StoredValue]) -> None:
        while gathered:
            self._store(gathered.pop(next(iter(gathered))), stored)

    def _store(self, columns: Sequence[tuple[int, _Column]], stored: dict[int, StoredValue]) -> None:
        """Put several columns of one field, and record the locations of their values."""
        field = columns[0][1].value.field
        rows = _joined([column.rows for _, column in columns])
        put = self.client.put(self.partition_id, {field: rows})
        at = 0
        for number, column in columns:
            first = int(put.indexes[at])
            stored[number] = replace(
                column.value, namespace=put.namespace, incarnation=put.incarnation, first_index=first
            )
            at += column.value.row_count

    def get(self, ref: Ref) -> Any:
        """Return the value of a ref, after applying the ref's slice and operations.

        Raises:
            SampleNotFoundError, PartitionNotFoundError: the value was released or cleared. Both errors are KeyErrors.
            ValueError: the ref belongs to a different backend.
            DataLossError: the storage service that stored the value has restarted and lost the value.
        """
        return self.get_many([ref])[0]

    def get_many(self, refs: Sequence[Ref | None], apply_ops: bool = True) -> list[Any]:
        """Return the values of refs in order, with None for each ref that is None.

        Values of the same kind are fetched in one call.

        Args:
            refs: the refs. Several refs may select different rows of the same value.
            apply_ops: whether to apply the refs' slices and operations instead of returning complete values.

        Raises:
            SampleNotFoundError, PartitionNotFoundError, ValueError, DataLossError: see `get`.
        """
        wanted = [None if ref is None else _Wanted(ref, apply_ops=apply_ops) for ref in refs]
        together: dict[Any, list[_Wanted]] = {}
        for each in wanted:
            if each is not None:
                together.setdefault(each.alike, []).append(each)
        for group in together.values():
            self._fetch(group)
        return [None if each is None else each.result() for each in wanted]

    def _fetch(self, group: Sequence[_Wanted]) -> None:
        """Fetch values of one field that are either all rows of one shape or all complete values."""
        first = group[0].value
        indexes = np.concatenate([each.indexes for each in group])
        column: Any
        if indexes.size:
            try:
                found = self.client.get_data(self._meta(first, indexes), data_fields=[first.field], layout="auto")
            except tq.errors.StaleIncarnationError as error:
                raise tq.errors.SampleNotFoundError(
                    error.message,
                    metadata={"partition_id": first.partition_id, "global_index": str(indexes[0])},
                ) from error
            column = found[first.field] if first.is_split else _each_row(found[first.field])
        else:
            dtype = getattr(torch, first.field.partition(".")[0])
            column = torch.empty((0, *first.shape[1:]), dtype=dtype)
        at = 0
        for each in group:
            each.rows = column[at : at + each.indexes.size]
            at += each.indexes.size

    def _meta(self, value: StoredValue, indexes: NDArray[np.int64]) -> tq.BatchMeta:
        return tq.BatchMeta(
            status="batch",
            partition_id=value.partition_id,
            namespace=value.namespace,
            incarnation=value.incarnation,
            indexes=indexes,
        )

    def get_rows(self, ref: Ref, rows: Any) -> Any:
        """Return rows of a value. `rows` are positions within the ref's selection.

        NeoProto calls this method to get the rows of a rank.
        """
        return self.get_rows_many([ref], rows)[0]

    def get_rows_many(self, refs: Sequence[Ref], rows: Any) -> list[Any]:
        """Return rows of several values. If a tensor is stored by row, only the selected rows are fetched."""
        numbers = np.asarray(rows)
        wanted = [_Wanted(ref, apply_ops=True, rows=numbers) for ref in refs]
        together: dict[Any, list[_Wanted]] = {}
        for each in wanted:
            together.setdefault(each.alike, []).append(each)
        for group in together.values():
            self._fetch(group)
        return [each.result() for each in wanted]

    def consolidate(self, old_engine: Any, refs: Sequence[Ref]) -> Ref:
        """Join the values of refs along the first dimension, and store the result as one value. The refs remain valid.

        Tensors and arrays without dimensions are stacked, and objects form an array of objects. One call can then fetch
        data that was previously distributed across several puts and storage services.

        Args:
            old_engine: the engine that stores the values of the refs. Defaults to this engine.
            refs: one or more refs, whose values are joined in the given order.

        Raises:
            ValueError: `refs` is empty or contains None, or the values differ in dtype or row shape.
        """
        if not refs or any(ref is None for ref in refs):
            raise ValueError(f"refs is {list(refs)!r}; expected at least one ref and no None values")
        engine = self if old_engine is None else old_engine
        return self.put(_consolidated(engine.get_many(list(refs))), key_hint="consolidated")

    def release(self, refs: Ref | Iterable[Ref | None]) -> None:
        """Free the values of refs, even if other refs to the values exist. Values already freed are ignored.

        Raises:
            ValueError: a ref belongs to a different backend. In this case, no value is freed.
        """
        named = [refs] if isinstance(refs, Ref) else [ref for ref in refs if ref is not None]
        self._clear([_value_of(ref) for ref in named])

    def _clear(self, values: Iterable[StoredValue]) -> None:
        together: dict[tuple[str, str, bytes], list[StoredValue]] = {}
        for value in dict.fromkeys(values):
            together.setdefault((value.namespace, value.partition_id, value.incarnation), []).append(value)
        for group in together.values():
            indexes = np.concatenate([_indexes(value) for value in group])
            for begin in range(0, len(indexes), _MOST_NAMED):
                with suppress(
                    tq.errors.StaleIncarnationError, tq.errors.PartitionNotFoundError
                ):  # the entire partition was cleared
                    self.client.clear_samples(self._meta(group[0], indexes[begin : begin + _MOST_NAMED]))

    def apply(self, ref: Ref, fn: Callable[[Any], Any], *, key_hint: str | None = None, spec: Any = None) -> Ref:
        """Apply a function to the value of a ref, store the result, and return a ref to the result.

        The original value does not change.

        The function runs in this process, because the service does not execute client code.
        """
        return self.put(fn(self.get(ref)), key_hint=key_hint, spec=spec)

    # Cleanup

    def clear(self) -> None:
        """Free all values in the partition, including values put by other processes."""
        client = self.client
        client.clear_partition(self.partition_id, missing_ok=True)
        self._create_partition(client)

    def close(self) -> None:
        """Close the client of this process. Stored values remain, and the next call reconnects."""
        connected, self._connected = self._connected, None
        if connected is not None and connected[0] == os.getpid():
            connected[1].close()


def _engine_of(
    address: str | Sequence[str] | None, partition_id: str, namespace: str | None, ttl_seconds: float | None
) -> TqServiceStorageEngine:
    return TqServiceStorageEngine(address, partition_id=partition_id, namespace=namespace, ttl_seconds=ttl_seconds)


class _Wanted:
    """A ref and the value to fetch for it.

    Attributes:
        value: location of the value.
        indexes: indexes of the samples to fetch.
        alike: key shared by all refs whose values are fetched together.
        rows: the fetched rows of these samples; None before the fetch.
    """

    def __init__(self, ref: Ref, *, apply_ops: bool, rows: NDArray[Any] | None = None) -> None:
        self._ref = ref
        self._apply_ops = apply_ops
        self._selected = rows
        self.value = value = _value_of(ref)
        self._spec: Sequence[Any] = tuple(ref.slice_spec or ()) if apply_ops else ()
        self.rows: Any = None
        self.indexes = _indexes(value)
        self._takes_first = False
        # The operations of the ref may change the rows, so `rows` are selected from the result of the operations.
        self._late_rows = rows if ref.apply_funcs else None
        early_rows = None if ref.apply_funcs else rows
        if value.is_split and (self._spec or early_rows is not None):
            kept = _axis_indices(self._spec[0] if self._spec else None, value.row_count)
            if early_rows is not None:
                kept = np.atleast_1d(kept)[_plain(early_rows)]
            self.indexes = value.first_index + np.atleast_1d(kept)
            self._takes_first = np.ndim(kept) == 0
            is_paired = any(isinstance(dim, (list, tuple, np.ndarray)) for dim in self._spec[1:])
            # Lists for several axes select pairs of indices, so the selector of the first axis must remain a list.
            first: Any = 0 if self._takes_first else slice(None)
            if is_paired and isinstance(self._spec[0], (list, tuple, np.ndarray)):
                first = list(range(self.indexes.size))
            self._spec = (first, *self._spec[1:])
        elif not value.is_split:
            self._late_rows = rows
        self.alike = (
            value.namespace, value.partition_id, value.incarnation, value.field,
            value.shape[1:] if value.is_split else None,
        )  # fmt: skip

    def result(self) -> Any:
        """Build and return the value from the fetched rows."""
        value: Any = self.rows if self.value.is_split else self.rows[0]
        if self.value.form == "array":
            value = value.numpy()
        elif self.value.form == "object":
            value = value[_VALUE]
        if self._spec:
            value = apply_slice(value, self._spec)
        if self._apply_ops:
            value = self._ref.apply_ops(value)
        if self._late_rows is not None:
            value = apply_slice(value, (self._late_rows,))
        return value


def apply_slice(value: Any, spec: Sequence[Any]) -> Any:
    """Apply a verl `SliceSpec`, which has one selector per axis, to a value.

    For lists and objects, only the first selector applies.
    """
    if not isinstance(value, (torch.Tensor, np.ndarray)):
        picked = _axis_indices(spec[0], len(value))
        return value[int(picked)] if np.ndim(picked) == 0 else [value[int(each)] for each in picked]
    return value[tuple(_selector(dim, length) for dim, length in zip(spec, value.shape, strict=False))]


def _selector(dim: Any, length: int) -> Any:
    """Convert an axis selector to a form that torch and numpy accept. A composed selector becomes a single list."""
    if dim is None:
        return slice(None)
    if isinstance(dim, (int, np.integer)):
        return int(dim)
    if isinstance(dim, slice) and (dim.step is None or dim.step > 0):
        return dim
    picked = _axis_indices(dim, length)
    return int(picked) if np.ndim(picked) == 0 else picked.tolist()


def _axis_indices(dim: Any, length: int) -> NDArray[np.int64]:
    """Return the indices selected on an axis, or a scalar if the selector removes the axis.

    Raises:
        IndexError: an index is out of range.
    """
    indices: Any = np.arange(length, dtype=np.int64)
    is_composed = isinstance(dim, tuple) and not all(isinstance(each, (int, np.integer)) for each in dim)
    for each in dim if is_composed else (dim,):  # verl passes two selectors for an axis if it cannot combine them
        indices = indices[_plain(each)]
    return np.asarray(indices, np.int64)


def _plain(dim: Any) -> Any:
    if dim is None:
        return slice(None)
    if isinstance(dim, torch.Tensor):
        dim = dim.cpu().numpy()
    if isinstance(dim, (list, tuple, np.ndarray)):
        chosen = np.asarray(dim)
        return chosen if chosen.dtype == np.bool_ else chosen.astype(np.int64)
    return dim


def _column_of(value: Any, partition_id: str) -> _Column:
    """Convert a value to rows of a field that matches its dtype and number of dimensions."""
    form: Literal["tensor", "array", "object"] = "object"
    dtype, size_bytes = "", 0
    if isinstance(value, torch.Tensor) and value.layout == torch.strided and not value.is_nested:
        form, value = "tensor", value.detach()
        dtype, size_bytes = str(value.dtype).removeprefix("torch."), value.numel() * value.element_size()
    elif isinstance(value, np.ndarray) and value.dtype.name in _NUMBERS and value.dtype.isnative:
        form, dtype, size_bytes = "array", value.dtype.name, value.nbytes
    shape = tuple(value.shape) if form != "object" else ()
    if form == "object" or not all(shape):  # a put needs at least one row
        stored = StoredValue("", partition_id, b"", 0, 1, _OBJECTS, "object", (), is_split=False)
        return _Column(stored, [{_VALUE: value}], size_bytes)  # in a dict: a list of numbers would become numeric
    is_split = len(shape) > 1 and 1 < shape[0] <= _MOST_ROWS and size_bytes >= _LEAST_ROW_BYTES * shape[0]
    field = f"{dtype}.{len(shape) - is_split}"
    stored = StoredValue("", partition_id, b"", 0, shape[0] if is_split else 1, field, form, shape, is_split=is_split)
    return _Column(stored, value if is_split else value[None], size_bytes)


def _joined(columns: Sequence[Any]) -> Any:
    """Concatenate the rows of several columns for one field."""
    if len(columns) == 1:
        return columns[0]
    if isinstance(columns[0], list):
        return [row for column in columns for row in column]
    tensors = [torch.from_numpy(np.array(each)) if isinstance(each, np.ndarray) else each for each in columns]
    if len({(each.shape[1:], each.device) for each in tensors}) == 1:
        return torch.cat(tensors)
    return [row for each in tensors for row in each.cpu()]


def _each_row(column: Any) -> Sequence[Any]:
    """Return the rows of a column, which is a tensor, a nested tensor or a list."""
    return column.unbind() if isinstance(column, torch.Tensor) else list(column)


def _consolidated(values: Sequence[Any]) -> Any:
    kinds = {torch.Tensor if isinstance(each, torch.Tensor) else type(each) for each in values}
    if kinds <= {torch.Tensor} or kinds <= {np.ndarray}:
        has_no_rows = {each.ndim == 0 for each in values}
        alike = {(each.dtype, tuple(each.shape[1:])) for each in values}
        if len(has_no_rows) > 1 or len(alike) > 1:
            shapes = [f"{each.dtype} {tuple(each.shape)}" for each in values[:8]]
            raise ValueError(f"the refs' values are {shapes}; expected the same dtype and row shape for all values")
        if kinds == {torch.Tensor}:
            return torch.stack(list(values)) if has_no_rows == {True} else torch.cat(list(values))
        return np.stack(values) if has_no_rows == {True} else np.concatenate(values)
    column = np.empty(len(values), object)
    for number, value in enumerate(values):
        column[number] = value
    return column


def _described(value: Any, spec: Any) -> tuple[str, tuple[int, ...] | None]:
    """Return the dtype and shape to set in a ref, determined in the same way as in verl's own engines."""
    given = getattr(spec, "dtype", None)
    is_column = isinstance(value, (torch.Tensor, np.ndarray))
    if given not in {None, "object"}:
        dtype = str(given)
    elif is_column:
        dtype = str(value.dtype).removeprefix("torch.")
    elif isinstance(value, (bytes, bytearray)):
        dtype = "bytes"
    else:
        dtype = type(value).__name__ if isinstance(value, (int, float, bool)) else "object"
    shape = tuple(value.shape) if is_column else getattr(spec, "shape", None)
    return dtype, tuple(shape) if shape else () if is_column else None


def _uid(value: StoredValue, key_hint: str | None) -> str:
    hint = "".join(each if each.isalnum() or each in "_.-" else "_" for each in key_hint or "")[:64]
    return f"{hint or 'neo'}-{value.incarnation.hex()}-{value.first_index}"


def _indexes(value: StoredValue) -> NDArray[np.int64]:
    return np.arange(value.first_index, value.first_index + value.row_count, dtype=np.int64)


def _value_of(ref: Ref) -> StoredValue:
    if ref.backend != BACKEND or not isinstance(ref.dataptr, StoredValue):
        raise ValueError(
            f"ref has backend {ref.backend!r} and a dataptr of type {type(ref.dataptr).__name__}; expected a ref with "
            f"backend {BACKEND!r}. Use the engine that created the ref"
        )
    return ref.dataptr


# Selection


def install(engine: TqServiceStorageEngine | None = None, *, clear_at_exit: bool = False) -> TqServiceStorageEngine:
    """Set verl's default engine for this process. NeoProto then stores its values in the service.

    Processes that only receive refs need not call `install`. Unpickling a ref creates an engine for the service at
    `TQ_ADDRESS`.

    Args:
        engine: the engine to use. Defaults to a new engine for `TQ_ADDRESS`.
        clear_at_exit: whether to free all values in the engine's partition when this process exits. Set this option
            only in the driver of a run.

    Returns:
        The new default engine.
    """
    from verl.experimental.neoproto.storage import default  # noqa: PLC0415  (verl's module imports the engine module)

    engine = TqServiceStorageEngine() if engine is None else engine
    default.set_default_storage_engine(engine)
    _register(engine)
    if clear_at_exit:
        atexit.register(_clear_quietly, engine)
    return engine


def _clear_quietly(engine: TqServiceStorageEngine) -> None:
    with suppress(tq.TqError):  # the service may already have stopped
        engine.clear()
    engine.close()


def _register(engine: TqServiceStorageEngine | None) -> None:
    """Register an engine with verl for refs whose backend is this module's `BACKEND`.

    If `engine` is None, register a new engine for `TQ_ADDRESS`, unless an engine is already registered.

    verl looks up engines in a dict. However, verl's function for releasing refs supports only verl's own backends, so
    this module replaces it.
    """
    from verl.experimental.neoproto import neo  # noqa: PLC0415  (verl's module imports the engine module)
    from verl.experimental.neoproto.storage import default  # noqa: PLC0415  (as above)

    if engine is not None:
        neo.GLOBAL_ENGINE_DICT[BACKEND] = engine
    elif BACKEND not in neo.GLOBAL_ENGINE_DICT:
        neo.GLOBAL_ENGINE_DICT[BACKEND] = TqServiceStorageEngine()
    find = default.get_engine_for_backend
    if getattr(find, "knows_tq_service", False):
        return

    def find_engine(backend: str | None = None) -> Any:
        return neo.GLOBAL_ENGINE_DICT[BACKEND] if backend == BACKEND else find(backend)

    find_engine.knows_tq_service = True  # type: ignore[attr-defined]
    default.get_engine_for_backend = find_engine
