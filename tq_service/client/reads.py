"""Reads of a batch: which storage service is asked for what, and how the answers become one batch again."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Final, TypeVar

import numpy as np

from tq_service.client.locations import CellLocations, FieldRuns, Indexes, StorageRef
from tq_service.dataplane.receive_buffers import RECEIVE_BUFFERS
from tq_service.dataplane.shared_memory.client import FdChannel, receive_columns
from tq_service.errors import InternalError, InvalidArgumentError
from tq_service.schema import FieldSpec, Layout
from tq_service.v1 import metadata_pb2
from tq_service.v1.storage_service_pb2 import GetHeader, GetRequest, SharedColumns
from tq_service.wire.columns import ColumnShape, decode_headers, fixed_row_bytes, merge_specs, widen_extents
from tq_service.wire.dtypes import Bytes
from tq_service.wire.frames import ColumnReceiver, Garbled

T = TypeVar("T")

Received = tuple[ColumnShape, Bytes]

# Slices of fewer items on average are copied by an index of all items: a step in Python costs more than so many.
_SCATTER_BELOW_ITEMS: Final = 64


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StorageRead:
    """What one storage service is asked for.

    Attributes:
        storage: the instance of a storage service.
        positions: `(n,)`, which samples of the batch, ascending.
        request: the cells.
    """

    storage: StorageRef
    positions: Indexes
    request: GetRequest

    @property
    def field_names(self) -> list[str]:
        """The fields that are read."""
        return [name for runs in self.request.runs for name in runs.field_names]


def plan_reads(locations: CellLocations, data_fields: Sequence[str]) -> list[StorageRead]:
    """Return the reads that fetch these fields: one for each storage service and set of samples it has fields of."""
    storages, of_put = _number_storages(locations)
    groups: dict[tuple[int, bytes], tuple[Indexes, list[FieldRuns]]] = {}
    for runs in locations.select_fields(data_fields).runs:
        for storage, positions, part in _split_by_storage(runs, of_put[runs.put_indexes]):
            groups.setdefault((storage, positions.tobytes()), (positions, []))[1].append(part)
    return [
        StorageRead(
            storage=storages[storage], positions=positions, request=_request(locations, storages[storage], parts)
        )
        for (storage, _), (positions, parts) in groups.items()
    ]


def _number_storages(locations: CellLocations) -> tuple[list[StorageRef], Indexes]:
    """Return the storage services, each once, and for each put the position of its own among them."""
    numbers: dict[StorageRef, int] = {}
    of_put = [numbers.setdefault(put.storage, len(numbers)) for put in locations.puts]
    return list(numbers), np.array(of_put, np.int64)


def _split_by_storage(runs: FieldRuns, owners: Indexes) -> list[tuple[int, Indexes, FieldRuns]]:
    """Return for each storage service the positions that it has and their runs; `owners` tells where each run is."""
    storages = np.unique(owners).tolist()
    if len(storages) == 1:
        return [(storages[0], np.arange(runs.row_count), runs)]
    puts, rows = runs.expand()
    of_row = np.repeat(owners, runs.row_counts)
    parts = []
    for storage in storages:
        mine = np.flatnonzero(of_row == storage)
        parts.append((storage, mine, FieldRuns.of_rows(runs.field_names, puts[mine], rows[mine])))
    return parts


def _request(locations: CellLocations, storage: StorageRef, parts: Sequence[FieldRuns]) -> GetRequest:
    used = np.unique(np.concatenate([part.put_indexes for part in parts]))
    return GetRequest(
        boot_id=storage.boot_id,
        put_ids=[locations.puts[put].put_id for put in used.tolist()],
        runs=[
            metadata_pb2.CellRuns(
                field_names=part.field_names,
                put_indexes=np.searchsorted(used, part.put_indexes).tolist(),
                first_rows=part.first_rows.tolist(),
                row_counts=part.row_counts.tolist(),
            )
            for part in parts
        ],
    )


class AnswerReader:
    """Takes the messages of one get, frame by frame into the memory that the caller's tensors will share.

    Args:
        expected_rows: number of rows asked for.
        fd_channel: the session of the get, in which the service may offer columns as shared memory.

    Attributes:
        sent_bytes: bytes of values that were sent, those in shared memory apart.
    """

    def __init__(self, expected_rows: int, fd_channel: FdChannel | None = None) -> None:
        self._expected_rows = expected_rows
        self._fd_channel = fd_channel
        self._columns: list[ColumnShape] = []
        self._receiver: ColumnReceiver | None = None
        self._offer: SharedColumns | None = None
        self._shared: dict[int, Bytes] = {}
        self.sent_bytes = 0

    @property
    def has_offer(self) -> bool:
        """Whether columns are to be received, by `receive_shared`, before the get can end."""
        return self._offer is not None

    def receive_shared(self) -> None:
        """Take the columns that are in shared memory.

        Raises:
            UnavailableError: the session has ended.
            InternalError: the offer is not what a storage service may make.
        """
        offer, self._offer = self._offer, None
        if offer is None or self._fd_channel is None:
            raise InternalError("a storage service offered shared memory without a session")
        self._shared = receive_columns(self._columns, offer, self._fd_channel)

    def take(self, part: GetHeader | memoryview | Garbled) -> None:
        """Take the next message.

        Raises:
            InternalError: it is not what a storage service may send.
        """
        if isinstance(part, Garbled):
            raise InternalError(f"a storage service sent what cannot be read: {part.reason}")
        if isinstance(part, memoryview):
            self.sent_bytes += len(part)
            self._checked(lambda: self._started().write(part))
        else:
            self._checked(lambda: self._start(part))

    def finish(self) -> list[Received]:
        """Return the columns with their bytes, in the order of the request.

        Raises:
            InternalError: bytes are missing.
        """
        sent = iter(self._checked(lambda: self._started().finish()))
        return [
            (column, self._shared[index] if index in self._shared else next(sent))
            for index, column in enumerate(self._columns)
        ]

    def _start(self, header: GetHeader) -> None:
        if header.row_count != self._expected_rows:
            raise InternalError(f"a storage service sent {header.row_count} rows, expected {self._expected_rows}")
        self._columns = decode_headers(header.columns, header.row_count)
        in_memory = {column.column_index for column in header.shared.columns}
        self._receiver = ColumnReceiver(
            [column for index, column in enumerate(self._columns) if index not in in_memory], RECEIVE_BUFFERS.take
        )
        if in_memory:
            self._offer = header.shared

    def _started(self) -> ColumnReceiver:
        if self._receiver is None:
            raise InternalError("a storage service sent no header")
        return self._receiver

    @staticmethod
    def _checked(action: Callable[[], T]) -> T:
        try:
            return action()
        except InvalidArgumentError as error:
            raise InternalError(f"a storage service sent what does not agree: {error}") from None


def merge_answers(
    reads: Sequence[StorageRead],
    answers: Sequence[Sequence[Received]],
    data_fields: Sequence[str],
    specs: Mapping[str, FieldSpec],
) -> list[Received]:
    """Return one column for each field, its rows in the order of the batch.

    Args:
        reads: what was asked for.
        answers: for each read its columns.
        data_fields: the fields, in the order wanted.
        specs: what is known of the fields: rows put dense into a field that is jagged come back jagged.

    Raises:
        InternalError: an answer lacks a field.
        FieldMismatchError: storage services hold different kinds of one field.
    """
    parts: dict[str, list[tuple[Indexes, Received]]] = {name: [] for name in data_fields}
    for read, answer in zip(reads, answers, strict=True):
        for column, buffer in answer:
            if column.spec.name in parts:
                parts[column.spec.name].append((read.positions, (column, buffer)))
    missing = [name for name, pieces in parts.items() if not pieces]
    if missing:
        raise InternalError(f"no storage service sent field {missing[0]!r}")
    return [_merge(pieces, specs.get(name)) for name, pieces in parts.items()]


def _merge(pieces: Sequence[tuple[Indexes, Received]], declared: FieldSpec | None) -> Received:
    shapes = [column for _, (column, _) in pieces]
    if declared is not None and declared.layout is Layout.JAGGED and declared.row_shape is not None:
        shapes = [_narrow(column, declared) for column in shapes]
        spec = merge_specs([*(column.spec for column in shapes), declared])
    else:
        spec = merge_specs([column.spec for column in shapes])
    shapes = [_widen(column, spec) for column in shapes]
    if len(pieces) == 1:
        return shapes[0], pieces[0][1][1]
    return _gather([(positions, shape, buffer) for (positions, (_, buffer)), shape in zip(pieces, shapes, strict=True)])


def _narrow(column: ColumnShape, declared: FieldSpec) -> ColumnShape:
    """Return a jagged column without the ragged dimensions in which all rows have the size that the field declares."""
    if column.extents is None or column.spec.layout is not Layout.JAGGED:
        return column
    shape = list(column.spec.row_shape or ())
    fixed = declared.row_shape or ()
    kept = []
    for position, dim in enumerate(column.spec.ragged_dims):
        if len(fixed) == len(shape) and fixed[dim] >= 0 and bool((column.extents[:, position] == fixed[dim]).all()):
            shape[dim] = fixed[dim]
        else:
            kept.append(position)
    if len(kept) == len(column.spec.ragged_dims):
        return column
    layout = Layout.JAGGED if kept else Layout.DENSE
    spec = replace(column.spec, layout=layout, row_shape=tuple(shape))
    return replace(column, spec=spec, extents=column.extents[:, kept] if kept else None)


def _widen(column: ColumnShape, spec: FieldSpec) -> ColumnShape:
    if column.spec == spec:
        return column
    return replace(column, spec=spec, extents=widen_extents(column.extents, column.spec, spec, column.row_count))


def _gather(pieces: Sequence[tuple[Indexes, ColumnShape, Bytes]]) -> Received:
    """Return the rows of several columns of one spec in the order of the batch."""
    first = pieces[0][1]
    row_count = sum(positions.size for positions, _, _ in pieces)
    extents = None if first.extents is None else np.empty((row_count, first.extents.shape[1]), np.int64)
    sizes = np.empty(row_count, np.int64)
    for positions, column, _ in pieces:
        sizes[positions] = column.row_bytes()
        if extents is not None and column.extents is not None:
            extents[positions] = column.extents
    offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(sizes)])
    values = RECEIVE_BUFFERS.take(int(offsets[-1]))
    for positions, column, buffer in pieces:
        if buffer.size:
            _place(values, offsets[positions], positions, column, buffer)
    column = ColumnShape(spec=first.spec, row_count=row_count, extents=extents, value_bytes=values.size)
    return column, values


def _place(values: Bytes, targets: Indexes, positions: Indexes, column: ColumnShape, buffer: Bytes) -> None:
    """Copy the rows of one part to their places: fixed rows at once, others slice by slice where these are large."""
    row_bytes = fixed_row_bytes(column.spec)
    if row_bytes is not None:
        row = np.dtype((np.void, row_bytes))
        values.view(row)[positions] = buffer.view(row)
        return
    heads = np.flatnonzero(np.diff(positions, prepend=-2) != 1)
    item_bytes = column.spec.itemsize
    if buffer.size < _SCATTER_BELOW_ITEMS * item_bytes * heads.size:
        item = np.dtype(f"u{item_bytes}" if item_bytes <= 8 else (np.void, item_bytes))
        sizes = column.row_bytes() // item_bytes
        starts = targets // item_bytes - (np.cumsum(sizes) - sizes)
        values.view(item)[np.repeat(starts, sizes) + np.arange(int(sizes.sum()))] = buffer.view(item)
        return
    bounds = column.row_offsets()[np.append(heads, positions.size)].tolist()
    for target, (start, end) in zip(targets[heads].tolist(), pairwise(bounds), strict=True):
        values[target : target + end - start] = buffer[start:end]


def empty_columns(specs: Sequence[FieldSpec]) -> list[Received]:
    """Return columns without rows, typed by their specs; what no put has fixed yet is dense float32 scalars."""
    nothing = np.empty(0, np.uint8)
    return [(_empty_column(spec), nothing) for spec in specs]


def _empty_column(spec: FieldSpec) -> ColumnShape:
    layout = spec.layout or Layout.DENSE
    shape = spec.row_shape or ()
    if layout is Layout.OBJECT:
        known = FieldSpec(spec.name, layout=layout, row_shape=())
        return ColumnShape(spec=known, row_count=0, extents=np.empty((0, 1), np.int64), value_bytes=0)
    if layout is Layout.JAGGED and not any(size < 0 for size in shape):
        shape = (-1, *shape[1:])
    known = FieldSpec(spec.name, dtype=spec.dtype or "float32", layout=layout, row_shape=shape)
    extents = np.empty((0, len(known.ragged_dims)), np.int64) if layout is Layout.JAGGED else None
    return ColumnShape(spec=known, row_count=0, extents=extents, value_bytes=0)
