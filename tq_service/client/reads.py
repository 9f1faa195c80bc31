"""Plans how to read a batch from storage services, merges the responses into one batch, and reports lost samples.

Callers receive tensors, nested tensors and lists that share memory with the received bytes.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Final, cast

import numpy as np
from numpy.typing import NDArray

from tq_service.client.batch_meta import BatchMeta, CellLocations, StorageRef
from tq_service.client.slices import Slices, cut_received
from tq_service.client.transport import Deadline, has_tensordict
from tq_service.dataplane.receiving import Received
from tq_service.errors import (
    DataLossError,
    DeadlineError,
    FieldMismatchError,
    InternalError,
    InvalidArgumentError,
    UnavailableError,
)
from tq_service.schema import Encoding, FieldSpec, Layout, ReadLayout
from tq_service.v1.storage_service_pb2 import GetRequest, RowSlice
from tq_service.wire.columns import (
    ColumnShape,
    extent_count,
    extents_as,
    fixed_row_bytes,
    has_torch,
    is_on_device,
    make_values,
    merge_specs,
    offsets_of,
    on_cpu,
    row_shapes,
    with_ragged_dim,
)
from tq_service.wire.device import upload
from tq_service.wire.host_memory import BLOCKS
from tq_service.wire.mapping import Bytes
from tq_service.wire.metadata import ENCODINGS, NO_INTEGERS, CellRuns, Indexes, expand_runs
from tq_service.wire.objects import decode_object, no_collection
from tq_service.wire.slices import RowCut

if TYPE_CHECKING:
    import torch
    from tensordict import TensorDict

    from tq_service.client.landing import Landing

# If slices have fewer items than this on average, they are copied with one index over all items. This is cheaper than a
# Python loop over the slices.
_SCATTER_BELOW_ITEMS: Final = 64
_MOST_NAMED: Final = 20


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StorageRead:
    """A read from one storage service.

    Attributes:
        storage: the storage service instance to read from.
        positions: ascending positions of the rows to read, as an array of shape `(n,)`. A position refers to the
            batch's samples, or to the list of all extents in the batch's cells.
        request: get request to send to the storage service.
        owners: the sample of each row, as an array of shape `(n,)`. If several samples share a row, the row's entry is
            the first of these samples. If None, `positions` identifies each row's sample.
        order: if samples share rows, the row of each sample in the batch; otherwise None.
    """

    storage: StorageRef
    positions: Indexes
    request: GetRequest
    owners: Indexes | None = None
    order: Indexes | None = None

    @property
    def has_extents(self) -> bool:
        """Whether the rows are extents that the client must join."""
        return self.owners is not None and self.order is None

    @property
    def samples(self) -> Indexes:
        """The sample that owns each row, as an array of shape `(n,)`."""
        return self.positions if self.owners is None else self.owners

    def samples_of(self, rows: NDArray[np.bool_] | slice = slice(None)) -> Indexes:
        """Return the samples that own at least one of these rows, in ascending order."""
        if self.order is None:
            return np.unique(self.samples[rows])
        return np.flatnonzero(np.isin(self.order, self.positions[rows]))

    @property
    def field_names(self) -> list[str]:
        """Names of the fields to read."""
        return [name for runs in self.request.runs for name in runs.field_names]

    def size_bytes(self, specs: Mapping[str, FieldSpec]) -> int | None:
        """Return the total size of all values in bytes, or None if the rows of any field may differ in size."""
        total = 0
        for name in self.field_names:
            spec = specs.get(name)
            row_bytes = None if spec is None or spec.row_shape is None else fixed_row_bytes(spec)
            if row_bytes is None:
                return None
            total += row_bytes * self.positions.size
        return total


def plan_reads(
    locations: CellLocations,
    data_fields: Sequence[str],
    cuts: Mapping[str, RowCut] | None = None,
    joined: Collection[str] = (),
) -> list[StorageRead]:
    """Plan the reads that fetch `data_fields`, with one read per storage service and set of rows.

    Args:
        locations: locations of the cells.
        data_fields: names of the fields.
        cuts: a dict that maps fields to the requested part of each row. A cell with extents in several storage services
            is read in full, because no single service can determine its total length.
        joined: names of fields that are not in `cuts` and whose extents the storage service should join. A storage
            service can join a cell's extents only if it stores all of them.
    """
    cuts = cuts or {}
    numbers: dict[StorageRef, int] = {}
    of_put = np.array([numbers.setdefault(put.storage, len(numbers)) for put in locations.puts], np.int64)
    storages = list(numbers)
    groups: dict[tuple[int, bytes, bytes], tuple[Indexes, Indexes | None, list[CellRuns]]] = {}
    of_cells = {*cuts, *joined}
    for runs in _apart(locations.select_fields(data_fields).runs, of_cells):
        counts = runs.extent_counts
        stored = of_put[runs.put_indexes]
        if counts.size and runs.field_names[0] in of_cells and (stored == stored[0]).all():
            positions = np.arange(counts.size)
            key = int(stored[0]), positions.tobytes(), b""
            groups.setdefault(key, (positions, None, []))[2].append(runs)
            continue
        of_sample = np.repeat(np.arange(counts.size), counts) if counts.size else None
        rows = replace(runs, extent_counts=NO_INTEGERS, extent_lengths=NO_INTEGERS) if counts.size else runs
        for number, positions, part in _split_by_storage(rows, stored):
            owners = None if of_sample is None else of_sample[positions]
            key = number, positions.tobytes(), b"" if owners is None else owners.tobytes()
            groups.setdefault(key, (positions, owners, []))[2].append(part)
    reads = []
    for (number, *_), (positions, owners, parts) in groups.items():
        used = np.unique(np.concatenate([part.put_indexes for part in parts]))
        renumbered = [replace(part, put_indexes=np.searchsorted(used, part.put_indexes)) for part in parts]
        request = GetRequest(
            boot_id=storages[number].boot_id,
            put_ids=[locations.puts[put].put_id for put in used.tolist()],
            runs=[part.to_proto() for part in renumbered],
            joins_extents=any(part.extent_counts.size > 0 for part in parts),
            slices=[] if owners is not None else _slices(cuts, parts, positions),
        )
        reads.append(StorageRead(storage=storages[number], positions=positions, request=request, owners=owners))
    return reads


def _apart(all_runs: Sequence[CellRuns], names: Collection[str]) -> Iterator[CellRuns]:
    """Yield the runs. If cells have extents, separate the fields in `names` from the other fields of each run."""
    for runs in all_runs:
        inside = tuple(name for name in runs.field_names if name in names)
        if not runs.extent_counts.size or len(inside) in (0, len(runs.field_names)):
            yield runs
        else:
            yield replace(runs, field_names=inside)
            yield replace(runs, field_names=tuple(name for name in runs.field_names if name not in names))


def _slices(cuts: Mapping[str, RowCut], parts: Sequence[CellRuns], positions: Indexes) -> list[RowSlice]:
    """Return the slices to request for the rows at `positions`. Fields with the same cut share a slice."""
    alike: dict[int, tuple[RowCut, list[str]]] = {}
    for name in (name for part in parts for name in part.field_names if name in cuts):
        alike.setdefault(id(cuts[name]), (cuts[name], []))[1].append(name)
    return [cut.select(positions).to_proto(names) for cut, names in alike.values()]


def _split_by_storage(runs: CellRuns, owners: Indexes) -> list[tuple[int, Indexes, CellRuns]]:
    """Split the runs by storage service. Return each storage service's number, row positions and runs.

    `owners` contains the storage service of each run.
    """
    storages = np.unique(owners).tolist()
    if len(storages) == 1:
        return [(storages[0], np.arange(runs.row_count), runs)]
    puts, rows = runs.expand()
    of_row = np.repeat(owners, runs.row_counts)
    owned = [(storage, np.flatnonzero(of_row == storage)) for storage in storages]
    return [(storage, at, CellRuns.of_rows(runs.field_names, puts[at], rows[at])) for storage, at in owned]


def merge_answers(
    reads: Sequence[StorageRead],
    answers: Sequence[Sequence[Received]],
    data_fields: Sequence[str],
    specs: Mapping[str, FieldSpec],
    locations: CellLocations,
    *,
    slices: Slices | None = None,
) -> list[Received]:
    """Merge the responses to reads into one column per field, with rows in batch order.

    Args:
        reads: the reads whose responses are merged.
        answers: the columns received for each read.
        data_fields: names of the fields, in the requested order.
        specs: known specs of the fields. Dense rows of a jagged field are returned as jagged.
        locations: locations of the cells, including the extents to join.
        slices: the requested slices of rows, or None for full rows.

    Raises:
        InternalError: a field is missing from a response, or a response contains full rows instead of the requested
            slices.
        FieldMismatchError: storage services returned incompatible data for one field.
    """
    parts: dict[str, list[tuple[Indexes, ColumnShape, Bytes]]] = {name: [] for name in data_fields}
    if slices is not None:
        _check_parts(reads, answers)
    for read, answer in zip(reads, answers, strict=True):
        for column, buffer in answer:
            if column.spec.name in parts:
                parts[column.spec.name].append((read.positions, column, buffer))
    missing = [name for name, pieces in parts.items() if not pieces]
    if missing:
        raise InternalError(f"no storage service returned field {missing[0]!r}")
    whole = {name for read in reads if read.has_extents for name in read.field_names}
    grown = {name: runs for runs in locations.runs if runs.extent_counts.size for name in runs.field_names}
    columns = []
    for name, pieces in parts.items():
        spec, cut = specs.get(name), None if slices is None else slices.cuts.get(name)
        if name in whole:
            joined = _join_extents(_merge(pieces, spec), grown[name])
            columns.append(joined if cut is None else cut_received(joined, cut))
        else:
            columns.append(_merge(pieces, spec if spec is None or slices is None else slices.cut_spec(spec)))
    return columns


def _check_parts(reads: Sequence[StorageRead], answers: Sequence[Sequence[Received]]) -> None:
    """Raise InternalError if a storage service returned full rows because its version cannot slice rows."""
    for read, answer in zip(reads, answers, strict=True):
        sliced = {name for part in read.request.slices for name in part.field_names}
        for column, _ in answer:
            if column.spec.name in sliced and column.whole_lengths is None:
                raise InternalError(
                    f"storage service {read.storage.storage_id!r} sent full rows of field {column.spec.name!r}; "
                    "expected slices of rows. Upgrade the storage service to the client's version"
                )


def _join_extents(received: Received, runs: CellRuns) -> Received:
    """Join the extents of each cell into one row. Extents are copied only if some of them have been truncated.

    Raises:
        InternalError: the column is not ragged in its first dimension.
    """
    column, values = received
    if column.extents is None or column.spec.ragged_dims[:1] != (0,):
        raise InternalError(f"field {column.spec.name!r} is {column.spec.describe()}, but its cells have extents")
    extents = column.extents.copy()
    kept = np.minimum(extents[:, 0], runs.extent_lengths)
    if (kept < extents[:, 0]).any():
        starts, item_bytes = column.row_offsets(), column.row_bytes() // np.maximum(extents[:, 0], 1)
        ends = starts[:-1] + kept * item_bytes
        values = np.concatenate([values[start:end] for start, end in zip(starts.tolist(), ends.tolist(), strict=False)])
        extents[:, 0] = kept
    firsts = np.cumsum(runs.extent_counts) - runs.extent_counts
    joined = extents[firsts]
    joined[:, 0] = np.add.reduceat(kept, firsts)
    shape = replace(column, row_count=firsts.size, extents=joined, value_bytes=values.size)
    return shape, values


def _merge(pieces: Sequence[tuple[Indexes, ColumnShape, Bytes]], declared: FieldSpec | None) -> Received:
    covered: list[FieldSpec] = []
    if declared is not None and declared.layout is Layout.JAGGED and declared.row_shape is not None:
        covered = [declared]
        pieces = [(positions, _narrow(column, declared), buffer) for positions, column, buffer in pieces]
    spec = with_ragged_dim(merge_specs([*(column.spec for _, column, _ in pieces), *covered]))
    pieces = [(positions, _described_as(spec, column), buffer) for positions, column, buffer in pieces]
    return pieces[0][1:] if len(pieces) == 1 else _gather(pieces)


def _narrow(column: ColumnShape, declared: FieldSpec) -> ColumnShape:
    """Give each ragged dimension a fixed size if the field declares this size and all rows have it."""
    shape = list(column.spec.row_shape or ())
    fixed = declared.row_shape or ()
    for dim in column.spec.ragged_dims if len(fixed) == len(shape) else ():
        if fixed[dim] >= 0 and (row_shapes(column.spec, column.extents, column.row_count)[:, dim] == fixed[dim]).all():
            shape[dim] = fixed[dim]
    return column if tuple(shape) == column.spec.row_shape else _shaped_as(shape, column)


def _shaped_as(row_shape: Sequence[int], column: ColumnShape) -> ColumnShape:
    """Return a tensor column after replacing the row shape in its spec."""
    layout = Layout.JAGGED if -1 in row_shape else Layout.DENSE
    return _described_as(replace(column.spec, layout=layout, row_shape=tuple(row_shape)), column)


def _described_as(spec: FieldSpec, column: ColumnShape) -> ColumnShape:
    if column.spec == spec:
        return column
    return replace(column, spec=spec, extents=extents_as(spec, column.spec, column.extents, column.row_count))


def _gather(pieces: Sequence[tuple[Indexes, ColumnShape, Bytes]]) -> Received:
    """Combine several columns with equal specs into one column, with rows in batch order."""
    first = pieces[0][1]
    row_count = sum(positions.size for positions, _, _ in pieces)
    extents = None if first.extents is None else np.empty((row_count, first.extents.shape[1]), np.int64)
    whole_lengths = None if first.whole_lengths is None else np.empty(row_count, np.int64)
    sizes = np.empty(row_count, np.int64)
    for positions, column, _ in pieces:
        sizes[positions] = column.row_bytes()
        if extents is not None and column.extents is not None:
            extents[positions] = column.extents
        if whole_lengths is not None and column.whole_lengths is not None:
            whole_lengths[positions] = column.whole_lengths
    offsets = offsets_of(sizes)
    values = BLOCKS.take(int(offsets[-1]))
    for positions, column, buffer in pieces:
        if buffer.size:
            _place(values, offsets[positions], positions, column, buffer)
    column = ColumnShape(
        spec=first.spec,
        row_count=row_count,
        extents=extents,
        value_bytes=values.size,
        whole_lengths=whole_lengths,
    )
    return column, values


def _place(values: Bytes, targets: Indexes, positions: Indexes, column: ColumnShape, buffer: Bytes) -> None:
    """Copy the rows of one column to their final positions."""
    row_bytes = fixed_row_bytes(column.spec)
    if row_bytes is not None:
        row = np.dtype((np.void, row_bytes))
        values.view(row)[positions] = buffer.view(row)
        return
    heads = np.flatnonzero(np.diff(positions, prepend=-2) != 1)
    item_bytes = column.spec.itemsize
    if buffer.size < _SCATTER_BELOW_ITEMS * item_bytes * heads.size:
        item = np.dtype(f"u{item_bytes}" if item_bytes <= 8 else (np.void, item_bytes))
        values.view(item)[expand_runs(targets // item_bytes, column.row_bytes() // item_bytes)] = buffer.view(item)
        return
    bounds = column.row_offsets()[np.append(heads, positions.size)].tolist()
    for target, (start, end) in zip(targets[heads].tolist(), pairwise(bounds), strict=True):
        values[target : target + end - start] = buffer[start:end]


def each_once(metadata: BatchMeta) -> tuple[BatchMeta, Indexes | None]:
    """Return a batch without repeated samples, and an array of shape `(n,)` with each original sample's position in it.

    If no sample is repeated, return the original batch and None.
    """
    indexes = metadata.indexes
    if (indexes[1:] > indexes[:-1]).all():
        return metadata, None
    distinct, first, order = np.unique(indexes, return_index=True, return_inverse=True)
    if distinct.size == indexes.size:
        return metadata, None
    return metadata.select_samples(first), order


def take_rows(received: Received, order: Indexes) -> Received:
    """Return a column's rows at the given positions, an array of shape `(n,)` that may contain duplicates."""
    column, buffer = received
    row_bytes = fixed_row_bytes(column.spec)
    if row_bytes is not None:
        values = buffer.reshape(column.row_count, row_bytes)[order].reshape(-1)
    else:
        bounds = column.row_offsets()
        ends = zip(bounds[order].tolist(), bounds[order + 1].tolist(), strict=True)
        values = np.concatenate([buffer[start:end] for start, end in ends])
    extents, lengths = (None if each is None else each[order] for each in (column.extents, column.whole_lengths))
    taken = replace(column, row_count=order.size, extents=extents, value_bytes=values.size, whole_lengths=lengths)
    return taken, values


def empty_columns(specs: Sequence[FieldSpec]) -> list[Received]:
    """Return empty columns with these specs.

    A field without a dtype, layout and row shape becomes a column of dense float32 scalars.
    """
    return [(_empty_column(spec), np.empty(0, np.uint8)) for spec in specs]


def _empty_column(spec: FieldSpec) -> ColumnShape:
    layout, dtype, shape = spec.layout, spec.dtype or "float32", spec.row_shape or ()
    if layout is Layout.OBJECT:
        dtype, shape = "", ()
    elif layout is Layout.JAGGED:
        shape = shape or (-1,)
    else:
        layout = Layout.DENSE
    known = with_ragged_dim(FieldSpec(spec.name, dtype=dtype, layout=layout, row_shape=shape))
    extents = None if layout is Layout.DENSE else np.empty((0, extent_count(known)), np.int64)
    return ColumnShape(spec=known, row_count=0, extents=extents, value_bytes=0)


def to_batch(
    received: Sequence[Received],
    row_count: int | None,
    layout: ReadLayout | None = None,
    landing: Landing | None = None,
    arrange: Callable[[dict[str, Any]], dict[str, Any]] | None = None,
) -> TensorDict:
    """Return received columns as a TensorDict, or as a dict if torch or tensordict is not installed.

    Without torch, columns are numpy arrays or lists of numpy arrays. `layout` has the same meaning as in `get_data`. If
    None, the layout is unchanged. The batch size of the TensorDict is `[row_count]`, or `[]` if `row_count` is None.
    `arrange` converts the decoded columns to the result's columns.

    Raises:
        FieldMismatchError: a column is requested as dense, but its rows differ in shape.
        torch.OutOfMemoryError: a device has too little free memory.
    """
    columns = [column if layout is None else _laid_out(column, layout) for column, _ in received]
    buffers = [buffer for _, buffer in received]
    if landing is None:
        data = decode_columns(columns, buffers)
    else:
        data = decode_columns(columns, buffers, as_torch=True, device_of=landing.device_of)
    if arrange is not None:
        data = arrange(data)
    if landing is not None:
        landing.fill(data)
    return to_tensordict(data, row_count) if has_tensordict() else cast("TensorDict", data)


def _laid_out(column: ColumnShape, layout: ReadLayout) -> ColumnShape:
    spec, shape = column.spec, column.spec.row_shape
    if spec.layout is Layout.OBJECT or not shape:
        return column
    if not column.row_count:  # there are no rows to derive the layout from
        is_jagged = layout == "jagged" or (layout == "auto" and spec.layout is Layout.JAGGED)
        sizes = list(shape) if is_jagged else [max(size, 0) for size in shape]
    else:
        shapes = row_shapes(spec, column.extents, column.row_count)
        differs = (shapes != shapes[0]).any(axis=0)
        if layout == "dense" and differs.any():
            at = int(np.flatnonzero((shapes != shapes[0]).any(axis=1))[0])
            first, other = tuple(shapes[0].tolist()), tuple(shapes[at].tolist())
            raise FieldMismatchError(
                f"rows of field {spec.name!r} differ in shape: row 0 is {first}, row {at} is {other}; expected one "
                f"shape for layout='dense'. Set layout to 'auto' or 'jagged', and pad the rows",
                field="layout",
                metadata={"field_name": spec.name, "got": str(other), "expected": str(first)},
            )
        is_jagged = layout == "jagged" or bool(differs.any())
        sizes = np.where(differs, -1, shapes[0]).tolist()
    if is_jagged and -1 not in sizes:
        sizes[next(iter(spec.ragged_dims), 0)] = -1
    return _shaped_as(sizes, column)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RowPattern:
    """The row lengths of jagged columns. Fields with equal row lengths share a pattern.

    Attributes:
        offsets: row boundaries, as a tensor of shape `(n + 1,)` that is shared by all nested tensors with this pattern.
        bounds: the row boundaries in host memory.
        min_length: length of the shortest row, or 0 if there are no rows.
        max_length: length of the longest row, or 0 if there are no rows. Without this length, torch would pad each row
            of a nested tensor to the size of dimension 0 of the tensor's values.
    """

    offsets: torch.Tensor
    bounds: NDArray[np.int64]
    min_length: int
    max_length: int

    @classmethod
    def of_offsets(cls, offsets: torch.Tensor, bounds: NDArray[np.int64] | None = None) -> RowPattern:
        """Return the pattern of rows that have these boundaries.

        Args:
            offsets: row boundaries, as a tensor of shape `(n + 1,)`.
            bounds: the row boundaries in host memory. If None, and this module created a nested tensor with these
                offsets, the boundaries cached for that tensor are reused. Otherwise, the offsets are copied to host
                memory, which requires synchronization with their device.
        """
        if bounds is None:
            bounds = _known_bounds().get(offsets)
        if bounds is None:
            bounds = on_cpu(offsets).numpy().astype(np.int64, copy=False)
        lengths = np.diff(bounds)
        longest = int(lengths.max(initial=0))
        return cls(offsets=offsets, bounds=bounds, min_length=int(lengths.min(initial=longest)), max_length=longest)

    @classmethod
    def of_lengths(
        cls, lengths: NDArray[np.int64], *, dtype: torch.dtype | None = None, beside: torch.Tensor | None = None
    ) -> RowPattern:
        """Return the pattern of rows with the given lengths.

        Args:
            lengths: row lengths, as an array of shape `(n,)`.
            dtype: dtype of the offsets. Defaults to int64.
            beside: a tensor whose device is used for the offsets. Defaults to the CPU.
        """
        import torch  # noqa: PLC0415  (torch is optional and slow to import)

        bounds = offsets_of(lengths)
        offsets = torch.from_numpy(bounds).to(dtype)
        if beside is not None and is_on_device(beside):
            (values,) = upload([offsets.numpy().view(np.uint8)], beside.device)
            offsets = values.view(offsets.dtype)
        return cls.of_offsets(offsets if beside is None else offsets.to(beside.device), bounds)

    def nested(self, values: torch.Tensor, ragged_dim: int) -> torch.Tensor:
        """Return the rows as a nested tensor that supports padding.

        Args:
            values: the rows, concatenated along dimension `ragged_dim - 1`.
            ragged_dim: the nested tensor's ragged dimension; its batch dimension is 0.
        """
        import torch  # noqa: PLC0415  (torch is optional and slow to import)

        _hide_torch_notice()
        if is_on_device(self.offsets):
            _known_bounds()[self.offsets] = self.bounds
        return torch.nested.nested_tensor_from_jagged(
            values, self.offsets, jagged_dim=ragged_dim, min_seqlen=self.min_length, max_seqlen=self.max_length
        )


@cache
def _known_bounds() -> MutableMapping[torch.Tensor, NDArray[np.int64]]:
    """Return the cache that maps offsets on a device to row boundaries. A cache hit avoids a device synchronization."""
    from torch.utils.weak import WeakIdKeyDictionary  # noqa: PLC0415  (torch is optional and slow to import)

    return WeakIdKeyDictionary()


@cache
def _hide_torch_notice() -> None:
    """Suppress a message for torch developers that torch logs when a process creates its first nested tensor."""

    def is_worth_showing(record: logging.LogRecord) -> bool:
        return not str(record.msg).startswith("is_fx_tracing will return true")

    logging.getLogger("torch.fx._symbolic_trace").addFilter(is_worth_showing)


def decode_columns(
    columns: Sequence[ColumnShape],
    buffers: Sequence[Bytes],
    *,
    as_torch: bool | None = None,
    device_of: Callable[[ColumnShape], Any] = lambda _column: None,
) -> dict[str, Any]:
    """Decode received columns, and return their values by field name.

    Args:
        columns: the column headers.
        buffers: the bytes of each column's values. Tensors share this memory if it is writable and aligned.
        as_torch: whether to return tensors instead of numpy arrays. By default, tensors are returned if torch is
            installed.
        device_of: function that returns the device for a column's tensors, or None for the CPU.

    Returns:
        A dense column becomes a tensor or array of shape `(n, ...)`, and a column of objects becomes a list. A jagged
        column with one ragged dimension becomes a nested tensor. Other jagged columns become lists of tensors. Without
        torch, all jagged columns become lists of arrays. Nested tensors with equal row lengths share an offsets tensor.

    Raises:
        InvalidArgumentError: the bytes do not match the headers, an object is corrupt, or a dtype requires torch.
    """
    is_torch = has_torch() if as_torch is None else as_torch
    devices = list(map(device_of, columns))
    decoders = {device: _Decoder(as_torch=is_torch) for device in devices}
    values: list[Any] = list(buffers)
    for device, decoder in decoders.items():
        if device is not None:
            chosen = [index for index, each in enumerate(devices) if each == device]
            tensors = decoder.upload([columns[index] for index in chosen], [buffers[index] for index in chosen], device)
            for index, tensor in zip(chosen, tensors, strict=True):
                values[index] = tensor
    return {
        column.spec.name: decoders[device].decode(column, buffer)
        for column, buffer, device in zip(columns, values, devices, strict=True)
    }


def to_tensordict(columns: Mapping[str, Any], row_count: int | None) -> TensorDict:
    """Return decoded columns as a TensorDict. Lists in the TensorDict can be read back as lists.

    The batch size is `[row_count]`, or `[]` if `row_count` is None.
    """
    from tensordict import TensorDict  # noqa: PLC0415  (optional, slow to import)

    fields = {name: object_stack(values) if isinstance(values, list) else values for name, values in columns.items()}
    return TensorDict(fields, batch_size=[] if row_count is None else [row_count])


def object_stack(rows: Sequence[Any]) -> Any:
    """Return rows of objects as a TensorDict field.

    For an empty list, the field is a `NonTensorData`, because tensordict 0.10 cannot create an empty stack.
    """
    from tensordict import NonTensorData, NonTensorStack  # noqa: PLC0415  (optional, slow to import)

    if not rows:
        return NonTensorData([], batch_size=[0])
    with no_collection():
        return NonTensorStack(*(NonTensorData(row) for row in rows))


def _is_nested(column: ColumnShape) -> bool:
    """Return whether a tensor column has exactly one ragged dimension and thus becomes a nested tensor."""
    return len(column.spec.ragged_dims) == 1


class _Decoder:
    """A column decoder. Fields with equal row lengths share one offsets tensor."""

    def __init__(self, *, as_torch: bool) -> None:
        self._as_torch = as_torch
        self._object_decoders: dict[Encoding | None, Callable[[memoryview], Any]] = {
            Encoding.TEXT: partial(str, encoding="utf-8"),
            Encoding.BYTES: bytes,
            Encoding.MSGPACK: partial(decode_object, as_torch=as_torch),
        }
        self._patterns: dict[bytes, RowPattern] = {}

    def upload(self, columns: Sequence[ColumnShape], buffers: Sequence[Bytes], device: Any) -> list[torch.Tensor]:
        """Copy columns and their row offsets to a device, and return each column's bytes on the device."""
        lengths = [column.extents[:, 0] for column in columns if column.extents is not None and _is_nested(column)]
        bounds = {each.tobytes(): offsets_of(each) for each in lengths}
        found = upload([*buffers, *(each.view(np.uint8) for each in bounds.values())], device)
        for (key, each), offsets in zip(bounds.items(), found[len(buffers) :], strict=True):
            self._patterns[key] = RowPattern.of_offsets(make_values(offsets, "int64", each.shape, as_torch=True), each)
        return found[: len(buffers)]

    def decode(self, column: ColumnShape, buffer: Any) -> Any:
        """Decode a column's values, whose bytes may be on a device."""
        if len(buffer) != column.value_bytes:
            raise InvalidArgumentError(
                f"field {column.spec.name!r} has {len(buffer)} bytes, but its header declares {column.value_bytes} "
                f"bytes"
            )
        if column.extents is None:
            shape = (column.row_count, *(column.spec.row_shape or ()))
            return make_values(buffer, column.spec.dtype, shape, as_torch=self._as_torch)
        if column.spec.layout is Layout.OBJECT:
            return self._decode_objects(column, buffer.data)
        if not self._as_torch or not _is_nested(column):
            return self._decode_rows(column, buffer)
        return self._decode_nested(column, column.extents[:, 0], buffer, column.spec.ragged_dims[0])

    def _decode_objects(self, column: ColumnShape, buffer: memoryview) -> list[Any]:
        offsets, spec = column.row_offsets(), column.spec
        if spec.encoding is None and column.extents is not None:
            decoders = [self._object_decoders[ENCODINGS.decode(number)] for number in column.extents[:, 1].tolist()]
        else:
            decoders = [self._object_decoders[spec.encoding]] * column.row_count
        rows: list[Any] = []
        try:
            with no_collection():
                for decode, (start, end) in zip(decoders, pairwise(offsets.tolist()), strict=True):
                    rows.append(decode(buffer[start:end]))
        except (InvalidArgumentError, UnicodeDecodeError) as error:
            raise InvalidArgumentError(
                f"could not decode row {len(rows)} of field {spec.name!r}: {error}",
                field="columns",
                metadata={"row": str(len(rows)), "field_name": spec.name},
            ) from None
        return rows

    def _decode_rows(self, column: ColumnShape, values: Any) -> list[Any]:
        """Return the rows of a jagged column as views of its bytes."""
        flat = make_values(
            values, column.spec.dtype, (column.value_bytes // column.spec.itemsize,), as_torch=self._as_torch
        )
        bounds = (column.row_offsets() // column.spec.itemsize).tolist()
        shapes = row_shapes(column.spec, column.extents, column.row_count).tolist()
        return [flat[start:end].reshape(shape) for (start, end), shape in zip(pairwise(bounds), shapes, strict=True)]

    def _decode_nested(self, column: ColumnShape, lengths: NDArray[np.int64], values: Any, ragged_dim: int) -> Any:
        import torch  # noqa: PLC0415  (torch is optional and slow to import)

        row_shape = list(column.spec.row_shape or ())
        row_shape[ragged_dim] = int(lengths.sum())
        if ragged_dim == 0 or column.value_bytes == 0:
            packed = make_values(values, column.spec.dtype, tuple(row_shape), as_torch=self._as_torch)
        else:
            packed = torch.cat(self._decode_rows(column, values), dim=ragged_dim)
        key = lengths.tobytes()
        if key not in self._patterns:
            self._patterns[key] = RowPattern.of_lengths(lengths)
        return self._patterns[key].nested(packed, ragged_dim + 1)


def lost_samples(metadata: BatchMeta, read: StorageRead, error: DataLossError) -> DataLossError:
    """Return a copy of a data-loss error that also names the affected samples and fields of the batch.

    If the service lists the lost puts, only the samples of these puts are affected. Otherwise, all samples in the read
    are considered affected.
    """
    put_ids = [put_id.hex() for put_id in read.request.put_ids]
    is_lost = np.isin(put_ids, (error.metadata.get("put_ids") or ",".join(put_ids)).split(","))
    lost = np.zeros(read.positions.size, np.bool_)
    fields: list[str] = []
    for runs in map(CellRuns.from_proto, read.request.runs):
        of_row = np.repeat(is_lost[runs.put_indexes], runs.row_counts)
        if runs.extent_counts.size:
            of_row = np.logical_or.reduceat(of_row, np.cumsum(runs.extent_counts) - runs.extent_counts)
        if of_row.any():
            lost |= of_row
            fields += runs.field_names
    part = metadata.select_samples(read.samples_of(lost))
    names = [
        f"{index} ({key})" if key else str(index)
        for index, key in zip(part.global_indexes[:_MOST_NAMED], part.keys, strict=False)
    ]
    more = f" and {part.size - len(names)} more" if part.size > len(names) else ""
    keys = [key for key in part.keys if key]
    facts = {"global_indexes": ",".join(map(str, part.global_indexes))} | ({"keys": ",".join(keys)} if keys else {})
    return DataLossError(
        f"{', '.join(map(repr, fields))} of samples {', '.join(names)}{more} of partition {metadata.partition_id!r} "
        f"are lost: {error.message}",
        metadata={**error.metadata, **facts, "partition_id": metadata.partition_id, "data_fields": ",".join(fields)},
    )


def unread_samples(
    metadata: BatchMeta,
    read: StorageRead,
    storage: StorageRef,
    deadline: Deadline,
    error: DeadlineError | UnavailableError,
) -> DeadlineError | UnavailableError:
    """Return an error that names the fields and samples that an unresponsive storage service did not return.

    Args:
        metadata: the batch.
        read: the read that failed.
        storage: the storage service, with the location that the controller last returned.
        deadline: deadline of the read.
        error: the error raised by the read.
    """
    reason = error.__cause__ if isinstance(error.__cause__, UnavailableError) else error
    place = f" at {storage.address}" if storage.address else ""
    fields = ", ".join(repr(name) for name in read.field_names)
    sample_count = read.samples_of().size
    return type(error)(
        f"storage service {storage.storage_id!r}{place} did not answer within {deadline.timeout:g} s; it "
        f"stores {fields} of {sample_count} of the {metadata.size} samples of partition "
        f"{metadata.partition_id!r}: {reason.message}",
        metadata={
            **error.metadata,
            "storage_id": storage.storage_id,
            "address": storage.address,
            "sample_count": str(sample_count),
            "data_fields": ",".join(read.field_names),
        },
    )
