"""Defines `BatchMeta`: the samples of a batch, with cell locations, optimizer steps and packs.

This module also defines the parts of a BatchMeta: namespace, cell locations, steps, and sample columns (custom_meta,
keys, groups and rollouts). Each column is declared once, and the same code selects, concatenates and overwrites all
columns.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import partial
from itertools import chain
from typing import Any, Final, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tq_service.custom_meta import MetaColumn, concatenated, laid_over, no_values
from tq_service.errors import InvalidArgumentError, StaleIncarnationError, TqError
from tq_service.results import Revision, WaitReason
from tq_service.schema import WHOLE_EXTENT, EndCounts, FieldSpec, Layout, SampleConsumption, StepTotals
from tq_service.v1 import metadata_pb2 as pb
from tq_service.wire.columns import merge_specs
from tq_service.wire.messages import read_message, read_seconds
from tq_service.wire.metadata import (
    CellRuns,
    Indexes,
    decode_integers,
    decode_meta_columns,
    decode_produced,
    decode_spec,
    meta_columns_to_rows,
    read_indexes,
)

Status = Literal["batch", "not_yet", "end"]

_STATUSES: Final[dict[int, Status]] = {pb.BATCH_STATUS_NOT_YET: "not_yet", pb.BATCH_STATUS_END: "end"}
NAMED_AT_ONCE: Final = 16_384
NAMESPACE_VARIABLE: Final = "TQ_NAMESPACE"
SEPARATOR: Final = "/"
_NO_INDEXES: Final = np.zeros(0, np.int64)
_NO_INDEXES.setflags(write=False)


@dataclass(frozen=True, slots=True)
class Namespace:
    """A prefix for the names of a client's partitions, which lets several runs share a service.

    On the service, the partition "train" of the namespace "run-7" is named "run-7/train". This partition is separate
    from "train" and "run-8/train", has its own `max_bytes`, and is accessible to tokens with the prefix "run-7/".

    Attributes:
        name: name of the namespace, such as "run-7". If empty, partition names are not changed.
    """

    name: str = ""

    @classmethod
    def of(cls, given: str | Literal[False] | None) -> Namespace:
        """Return the namespace for a `namespace` argument. None selects `TQ_NAMESPACE`; False selects none.

        Raises:
            InvalidArgumentError: the name is not allowed in partition names.
        """
        source, name = (
            ("namespace", given or "")
            if given is not None
            else (NAMESPACE_VARIABLE, os.environ.get(NAMESPACE_VARIABLE, ""))
        )
        is_name = isinstance(name, str) and name.isprintable() and name == name.strip(SEPARATOR)
        if not is_name or given == "":
            raise InvalidArgumentError(
                f"{source} is {name!r}; expected printable text such as 'run-7' or 'team/run-7' that neither begins "
                f"nor ends with {SEPARATOR!r}. Pass False for no namespace",
                field="namespace",
            )
        return cls(name)

    @property
    def prefix(self) -> str:
        """Prefix of the full names of partitions in this namespace."""
        return self.name + SEPARATOR if self.name else ""

    def full_name(self, partition_id: str) -> str:
        """Return the full name of a partition on the service. Invalid names are returned unchanged."""
        return (
            self.prefix + partition_id if self.name and isinstance(partition_id, str) and partition_id else partition_id
        )

    def own_name(self, full_name: str) -> str:
        """Return a partition's name within this namespace. Names in other namespaces are returned unchanged."""
        return full_name.removeprefix(self.prefix)

    def holds(self, full_name: str) -> bool:
        """Return whether the partition with this full name is in the namespace."""
        return full_name.startswith(self.prefix)

    def explain(self, failure: TqError) -> TqError:
        """Convert full names in an error's metadata, but not in its message, to names in this namespace."""
        if self.name:
            for named in {"partition_id", "policy"} & failure.metadata.keys():
                failure.metadata[named] = self.own_name(failure.metadata[named])
            if self.prefix in failure.message:
                failure.message += f" ({self.prefix!r} is this client's namespace)"
        return failure


NO_NAMESPACE: Final = Namespace()


class StorageRef(NamedTuple):
    """Reference to one instance of a storage service.

    Attributes:
        storage_id: name of the storage service.
        boot_id: id of the instance.
        address: address of the instance, or empty if it is the controller's address.
        is_away: whether the instance's current address is unknown to the controller.
    """

    storage_id: str
    boot_id: bytes
    address: str = ""
    is_away: bool = False


class PutRef(NamedTuple):
    """Reference to a put stored by a storage service."""

    storage: StorageRef
    put_id: bytes


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CellLocations:
    """The cell locations of a batch: for each located field, one cell per sample, in batch order.

    A cell consists of one row of a put, or of several rows if data was appended to the cell; see
    `CellRuns.extent_counts`.
    """

    puts: tuple[PutRef, ...] = ()
    runs: tuple[CellRuns, ...] = ()

    @classmethod
    def from_proto(cls, message: pb.Locations) -> CellLocations:
        """Return the locations contained in a message."""
        storages = [StorageRef(one.storage_id, one.boot_id, one.address, one.is_away) for one in message.storages]
        return cls(
            puts=tuple(PutRef(storages[put.storage_index], put.put_id) for put in message.puts),
            runs=tuple(map(CellRuns.of_samples, message.runs)),
        )

    @property
    def field_names(self) -> set[str]:
        """Names of the fields whose locations are known."""
        return {name for runs in self.runs for name in runs.field_names}

    def covers(self, field_names: Iterable[str]) -> bool:
        """Return whether the locations of all these fields are known."""
        return self.field_names.issuperset(field_names)

    def select(self, positions: Indexes) -> CellLocations:
        """Return the locations of the samples at `positions`, in the order of `positions`."""
        return CellLocations(puts=self.puts, runs=tuple(runs.select(positions) for runs in self.runs))

    def select_fields(self, field_names: Sequence[str]) -> CellLocations:
        """Return the locations, limited to the given fields."""
        selected = [
            replace(runs, field_names=names)
            for runs in self.runs
            if (names := tuple(name for name in runs.field_names if name in field_names))
        ]
        return CellLocations(puts=self.puts, runs=tuple(selected))

    @staticmethod
    def concat(parts: Sequence[CellLocations]) -> CellLocations:
        """Concatenate the locations of several batches. Fields whose locations are unknown in any batch are omitted."""
        puts: dict[PutRef, int] = {}
        per_part: list[dict[str, _Rows]] = []
        for part in parts:
            numbers = np.array([puts.setdefault(put, len(puts)) for put in part.puts], np.int64)
            cells: dict[str, _Rows] = {}
            for runs in part.runs:
                own, rows = runs.expand()
                found = _Rows(numbers[own], rows, runs.extent_counts, runs.extent_lengths)
                cells.update(dict.fromkeys(runs.field_names, found))
            per_part.append(cells)
        alike: dict[tuple[bytes, ...], tuple[list[str], _Rows]] = {}
        for name in per_part[0] if per_part else ():
            if not all(name in cells for cells in per_part):
                continue
            rows_of_field = [cells[name] for cells in per_part]
            if any(rows.counts.size for rows in rows_of_field):  # then all parts need explicit counts
                rows_of_field = [rows.with_counts() for rows in rows_of_field]
            whole = _Rows(*map(np.concatenate, zip(*rows_of_field, strict=True)))
            alike.setdefault(tuple(each.tobytes() for each in whole), ([], whole))[0].append(name)
        joined = [CellRuns.of_rows(tuple(names), *whole) for names, whole in alike.values()]
        return CellLocations(puts=tuple(puts), runs=tuple(joined))


class _Rows(NamedTuple):
    """The cells of a field as individual rows, each with its put and its position in that put. See `CellRuns`."""

    puts: Indexes
    rows: Indexes
    counts: Indexes
    lengths: Indexes

    def with_counts(self) -> _Rows:
        """Return the same cells, with `counts` and `lengths` filled in for every cell."""
        if self.counts.size:
            return self
        return self._replace(counts=np.ones_like(self.rows), lengths=np.full_like(self.rows, WHOLE_EXTENT))


@dataclass(frozen=True, slots=True, kw_only=True)
class Pack:
    """The input of one forward and backward pass: a micro-batch, or samples packed into one sequence.

    Attributes:
        positions: positions of the samples in the batch's `global_indexes`.
        lengths: token counts of these samples, or None if the sampler does not use lengths.
        padding_tokens: number of tokens that pad the pack to its full length.
    """

    positions: tuple[int, ...]
    lengths: tuple[int, ...] | None = None
    padding_tokens: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """The packs of one optimizer step. All ranks that share a batch have the same number of packs."""

    packs: tuple[Pack, ...]

    @classmethod
    def from_proto(cls, message: pb.Step) -> Step:
        """Return the step contained in a message."""
        return cls(
            packs=tuple(
                Pack(
                    positions=tuple(pack.rows),
                    lengths=tuple(pack.lengths) if pack.rows and len(pack.lengths) == len(pack.rows) else None,
                    padding_tokens=pack.padding_tokens,
                )
                for pack in message.packs
            )
        )


@dataclass(frozen=True, slots=True)
class SampleColumn:
    """A batch attribute with one value per sample, stored as a tuple, or as () if no sample has a value.

    Operations on the samples of a batch apply to all of these attributes. To add an attribute, declare it in
    `BatchMeta`.

    Attributes:
        message_field: name of the message field that contains the column. The property that returns one value per
            sample has the same name. Empty if there is no such field.
        blank: value used in place of a missing value.
        is_of_sample: whether the value is part of the sample itself, as set by writes. If False, the value describes
            the sample's state for a task.
    """

    message_field: str = ""
    blank: Any = ""
    is_of_sample: bool = True

    def decode(self, values: Iterable[Any], _size: int) -> Any:
        """Decode the column from the values in a message. `_size` is the number of samples."""
        return tuple(values)

    def select(self, column: Any, positions: Indexes) -> Any:
        """Return the values of the samples at `positions`."""
        return select(column, positions)

    def concat(self, columns: Sequence[Any], sizes: Sequence[int]) -> Any:
        """Concatenate the columns of several batches, whose sizes are `sizes`."""
        if not any(columns):
            return ()
        parts = (column or (self.blank,) * size for column, size in zip(columns, sizes, strict=True))
        return tuple(chain.from_iterable(parts))

    def overwrite(self, old: Any, new: Any) -> Any:
        """Return the column's values after a write."""
        return new if any(new) else old


class MetaColumns(SampleColumn):
    """The custom_meta of a batch: a tuple of columns, each of which has values for some or all samples."""

    def decode(self, values: Iterable[pb.MetaColumn], size: int) -> tuple[MetaColumn, ...]:
        """Decode the custom_meta of `size` samples from a message."""
        return tuple(decode_meta_columns(values, size))

    def select(self, column: Sequence[MetaColumn], positions: Indexes) -> tuple[MetaColumn, ...]:
        """Return the custom_meta of the samples at `positions`."""
        return tuple(one.at(positions) for one in column)

    def concat(self, columns: Sequence[Sequence[MetaColumn]], sizes: Sequence[int]) -> tuple[MetaColumn, ...]:
        """Concatenate the custom_meta of several batches, omitting columns without values."""
        by_name = [{one.name: one for one in column if one.has_value.any()} for column in columns]
        return tuple(
            concatenated([part.get(name) or no_values(name, size) for part, size in zip(by_name, sizes, strict=True)])
            for name in dict.fromkeys(chain.from_iterable(by_name))
        )

    def overwrite(self, old: Sequence[MetaColumn], new: Sequence[MetaColumn]) -> tuple[MetaColumn, ...]:
        """Return the custom_meta after a write.

        New values replace old values, and values that the write removes are omitted.
        """
        merged = {column.name: column for column in old}
        for column in new:
            before = merged.get(column.name)
            merged[column.name] = column if before is None or column.present.all() else laid_over(before, column)
        return tuple(merged.values())


class Numbers(SampleColumn):
    """An array with one number per sample, or None if any number is unknown."""

    def concat(self, columns: Sequence[NDArray[Any] | None], sizes: Sequence[int]) -> NDArray[Any] | None:
        """Concatenate the arrays of several batches, or return None if an array is missing."""
        known = [column for column in columns if column is not None]
        return np.concatenate(known) if len(known) == len(sizes) else None


class _Unread(partial[Any]):
    """A function that decodes an attribute of a batch from its message on first access."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
class BatchMeta:
    """An immutable, comparable and picklable sequence of samples from one partition, with their metadata.

    Two batches are equal if they have the same samples with the same metadata, fields and steps. The comparison ignores
    `locations` and `produced`.

    Attributes:
        status: "batch", "not_yet" if no batch was available in time and the caller should try again, or "end" if there
            are no more batches.
        partition_id: name of the partition in `namespace`.
        namespace: the namespace of `partition_id`; empty if there is no namespace. Clients of any namespace can use the
            batch.
        incarnation: incarnation of the partition, as 16 random bytes. The value changes if the partition is cleared and
            created again.
        epoch: epoch of the task. Each reset increments the epoch, which is 0 for batches without a task.
        indexes: global indexes of the samples, as a read-only int64 array of shape `(size,)`.
        dropped_indexes: int64 global indexes of samples that the sampler dropped from this rank's batch, for example
            because of the option `overlong="drop"`. Dropped samples are not in `indexes`. If the batch is split, each
            part still contains all dropped indexes. If `clear_samples`, `ack` or `release` is called with part of the
            batch, the call also applies to the dropped samples.
        fields: specs of the batch's fields. The result of a claim has the fields that were requested, and the result of
            a put has the fields that were written. The results of `lookup_samples` and `put(return_meta="all")` have
            every field that is present in at least one sample.
        steps: the optimizer steps in which the samples are used, with their packs. Plain micro-batches form a single
            step.
        totals: in a rank's batch, the totals of each step across all ranks. Every rank receives the same totals. A
            loader's micro-batch has only the totals of its step. Otherwise ().
        end: number of samples per outcome if the status is "end", or None otherwise.
        locations: cell locations known to the client. `get_data` looks up the locations of other fields.
        claim_id: id of the queue worker's claim, used by `ack`, `extend` and `release`, or empty if the batch is not
            from a queue worker's claim.
        task_name: the task that claimed the batch, or empty if the batch was not claimed.
        lease_seconds: seconds remaining on the lease when the service responded, or None if the samples are not leased.
        delivery_counts: for leased samples, the number of times that each sample was delivered to the task, including
            this delivery.
        consumption: each sample's state for the task of the lookup, as a uint8 array `(size,)` of `SampleConsumption`
            values. None unless the batch is from a lookup with a task. See `consumed`.
        waiting_for: the reason for the wait if the status is "not_yet", or None if the call did not request the reason.
            See `explain` in `claim`.
        revision: for a lookup, the revision from which `watch` can continue; otherwise None.
        admitted: the slots of the claimed prompts, in prompt order, if the claim used `admit`; otherwise None.
    """

    status: Status = "batch"
    partition_id: str = ""
    namespace: str = ""
    incarnation: bytes = b""
    epoch: int = 0
    indexes: NDArray[np.int64] = field(default_factory=lambda: _NO_INDEXES)
    dropped_indexes: NDArray[np.int64] = field(default_factory=lambda: _NO_INDEXES)
    fields: tuple[FieldSpec, ...] = ()
    steps: tuple[Step, ...] = ()
    totals: tuple[StepTotals, ...] = ()
    end: EndCounts | None = None
    locations: CellLocations = CellLocations()
    claim_id: bytes = b""
    task_name: str = ""
    lease_seconds: float | None = None
    waiting_for: WaitReason | None = None
    revision: Revision | None = None
    admitted: BatchMeta | None = None
    delivery_counts: tuple[int, ...] = field(
        default=(), metadata={"column": SampleColumn("delivery_counts", 0, is_of_sample=False)}
    )
    consumption: NDArray[np.uint8] | None = field(default=None, metadata={"column": Numbers(is_of_sample=False)})
    key_column: tuple[str, ...] = field(default=(), metadata={"column": SampleColumn("keys")})
    group_column: tuple[str, ...] = field(default=(), metadata={"column": SampleColumn("groups")})
    rollout_column: tuple[str, ...] = field(default=(), metadata={"column": SampleColumn("rollouts")})
    meta_columns: tuple[MetaColumn, ...] = field(default=(), metadata={"column": MetaColumns("custom_meta")})
    # For each entry of `fields`, an array that shows which samples have the field. Empty if unknown.
    produced_columns: tuple[NDArray[np.bool_], ...] = ()

    def __post_init__(self) -> None:
        self.indexes.setflags(write=False)
        self.dropped_indexes.setflags(write=False)

    @classmethod
    def from_proto(
        cls,
        message: pb.BatchMeta,
        namespace: Namespace = NO_NAMESPACE,
        *,
        claim_id: bytes = b"",
        task_name: str = "",
        consumption: NDArray[np.uint8] | None = None,
        waiting_for: WaitReason | None = None,
        revision: Revision | None = None,
        admitted: BatchMeta | None = None,
    ) -> BatchMeta:
        """Create a batch from a message that was sent to a client with this namespace.

        Do not modify the message afterward.

        Steps, locations and columns are decoded on first access, because few callers need all of these attributes.
        """
        indexes = read_indexes(message)
        unread: dict[str, Any] = {
            name: _Unread(column.decode, values, indexes.size)
            for name, column in SAMPLE_COLUMNS.items()
            if column.message_field and (values := getattr(message, column.message_field))
        }
        if message.steps:
            unread["steps"] = _Unread(_read_steps, message.steps)
        if message.totals:
            unread["totals"] = _Unread(_read_totals, message.totals)
        if message.HasField("locations"):
            unread["locations"] = _Unread(CellLocations.from_proto, message.locations)
        return cls(
            status=_STATUSES.get(message.status, "batch"),
            partition_id=namespace.own_name(message.partition_id),
            namespace=namespace.name if namespace.holds(message.partition_id) else "",
            incarnation=message.incarnation,
            epoch=message.epoch,
            indexes=indexes,
            dropped_indexes=decode_integers(message.dropped_indexes) if message.dropped_indexes else _NO_INDEXES,
            fields=tuple(map(decode_spec, message.fields)),
            end=read_message(EndCounts, message.end) if message.HasField("end") else None,
            claim_id=claim_id,
            task_name=task_name,
            lease_seconds=read_seconds("lease", message.lease) if message.HasField("lease") else None,
            consumption=consumption,
            waiting_for=waiting_for,
            revision=revision,
            admitted=admitted,
            produced_columns=decode_produced(message.produced, indexes.size) if message.produced else (),
            **unread,
        )

    @property
    def full_partition_id(self) -> str:
        """Full name of the partition on the service, such as "run-7/train" for "train" in the namespace "run-7"."""
        return Namespace(self.namespace).full_name(self.partition_id)

    @property
    def leased_claim(self) -> pb.LeasedClaim | None:
        """The leased claim to which all samples belong, or None if there is no such claim."""
        if self.lease_seconds is None or not self.claim_id:
            return None
        return pb.LeasedClaim(task_name=self.task_name, claim_request_id=self.claim_id)

    @property
    def consumed(self) -> NDArray[np.bool_] | None:
        """For a lookup with a task, a bool array `(size,)` that marks consumed or leased samples; otherwise None."""
        return self._is_in(SampleConsumption.CONSUMED, SampleConsumption.LEASED)

    @property
    def leased(self) -> NDArray[np.bool_] | None:
        """For a lookup with a task, a bool array `(size,)` that marks unacknowledged leased samples; otherwise None."""
        return self._is_in(SampleConsumption.LEASED)

    @property
    def dead_lettered(self) -> NDArray[np.bool_] | None:
        """For a lookup with a task, a bool array `(size,)` that marks dead-lettered samples; otherwise None."""
        return self._is_in(SampleConsumption.DEAD_LETTERED)

    def _is_in(self, *states: SampleConsumption) -> NDArray[np.bool_] | None:
        return None if self.consumption is None else np.isin(self.consumption, states)

    @property
    def reason(self) -> str:
        """With status "not_yet", a sentence that explains the wait, or "" if the call did not request the reason."""
        return "" if self.waiting_for is None else self.waiting_for.text

    @property
    def skipped_count(self) -> int:
        """With status "end", the number of samples that the task will never receive."""
        return 0 if self.end is None else self.end.skipped_count

    @property
    def size(self) -> int:
        """Number of samples, which may be 0 for a rank's batch."""
        return int(self.indexes.size)

    def __len__(self) -> int:
        return self.size

    @property
    def global_indexes(self) -> list[int]:
        """The global indexes of the samples."""
        indexes: list[int] = self.indexes.tolist()
        return indexes

    @property
    def handled_indexes(self) -> NDArray[np.int64]:
        """Indexes of the samples, including dropped samples, as used by `clear_samples`, `ack` and `release`."""
        return np.concatenate([self.indexes, self.dropped_indexes]) if self.dropped_indexes.size else self.indexes

    @property
    def keys(self) -> list[str | None]:
        """The key of each sample, or None for a sample without a key."""
        return _names(self.key_column, self.size)

    @property
    def groups(self) -> list[str | None]:
        """The group of each sample, or None for a sample without a group."""
        return _names(self.group_column, self.size)

    @property
    def rollouts(self) -> list[str | None]:
        """The rollout of each sample, or None for a sample without a rollout."""
        return _names(self.rollout_column, self.size)

    @property
    def custom_meta(self) -> list[dict[str, Any]]:
        """The custom_meta of each sample, with JSON null decoded as None. The list is rebuilt on every access."""
        return meta_columns_to_rows(self.meta_columns, self.size)

    @property
    def data_fields(self) -> list[str]:
        """Names of the batch's fields."""
        return [spec.name for spec in self.fields]

    @property
    def produced(self) -> dict[str, NDArray[np.bool_]]:
        """For each field, a bool array `(size,)` that marks samples that had the field at the time of the call.

        The arrays are available for claimed batches, whose samples have all fields, and for results of `lookup_samples`
        and `put(return_meta="all")`. Batches selected or concatenated from such batches also have the arrays. Fields
        without an array, such as fields just written by a put, are omitted.
        """
        if self.produced_columns:
            return dict(zip(self.data_fields, self.produced_columns, strict=True))
        located = self.locations.field_names
        return {name: np.ones(self.size, np.bool_) for name in self.data_fields if name in located}

    @property
    def micro_batches(self) -> list[list[int]]:
        """One list per pack, in step order, with the positions of the pack's samples."""
        return [list(pack.positions) for step in self.steps for pack in step.packs]

    def select_samples(self, positions: Sequence[int] | NDArray[Any]) -> BatchMeta:
        """Return a batch with only the samples at `positions`, in this order. Steps are restricted to these samples.

        The new batch belongs to the same claim. If the claim is leased, the new batch can be acknowledged or released
        separately.

        Raises:
            InvalidArgumentError: a position is outside the batch or occurs more than once.
        """
        chosen = np.asarray(positions, dtype=np.int64 if len(positions) == 0 else None)
        if chosen.ndim != 1 or chosen.dtype.kind not in "iu":
            raise InvalidArgumentError(
                f"positions has dtype {chosen.dtype} and shape {chosen.shape}; expected a list of integers",
                field="positions",
            )
        chosen = chosen.astype(np.int64)
        if chosen.size and (chosen.min() < 0 or chosen.max() >= self.size):
            raise InvalidArgumentError(
                f"positions range from {chosen.min()} to {chosen.max()}; expected values from 0 to {self.size - 1}. "
                "Pass positions in the batch, not global indexes",
                field="positions",
            )
        new_position = np.full(self.size, -1, np.int64)
        new_position[chosen] = np.arange(chosen.size)
        if np.count_nonzero(new_position >= 0) != chosen.size:
            raise InvalidArgumentError("positions contains duplicates; expected distinct positions", field="positions")
        steps = _select_steps(self.steps, new_position)
        admitted = self.admitted
        if admitted is not None and self.size:
            slot_count = admitted.size // self.size
            admitted = admitted.select_samples((chosen[:, None] * slot_count + np.arange(slot_count)).ravel())
        return replace(
            self,
            indexes=self.indexes[chosen],
            admitted=admitted,
            steps=tuple(steps.values()),
            totals=tuple(self.totals[number] for number in steps) if self.totals else (),
            locations=self.locations.select(chosen),
            produced_columns=tuple(column[chosen] for column in self.produced_columns),
            **{name: column.select(getattr(self, name), chosen) for name, column in SAMPLE_COLUMNS.items()},
        )

    def select_fields(self, data_fields: Iterable[str]) -> BatchMeta:
        """Return a batch with only these fields, in this order.

        Raises:
            InvalidArgumentError: a field is not in the batch.
        """
        names = [data_fields] if isinstance(data_fields, str) else list(dict.fromkeys(data_fields))
        by_name = {spec.name: spec for spec in self.fields}
        produced = dict(zip(by_name, self.produced_columns, strict=False))
        unknown = [name for name in names if name not in by_name]
        if unknown:
            raise InvalidArgumentError(
                f"the batch has no field {unknown[0]!r}; its fields are: {', '.join(map(repr, by_name)) or 'none'}",
                field="data_fields",
            )
        return replace(
            self,
            fields=tuple(by_name[name] for name in names),
            locations=self.locations.select_fields(names),
            produced_columns=tuple(produced[name] for name in names) if produced else (),
        )

    def chunk(self, count: int) -> list[BatchMeta]:
        """Split the batch into `count` batches of adjacent samples. Batch sizes differ by at most one sample.

        Raises:
            InvalidArgumentError: `count` is less than 1.
        """
        if count < 1:
            raise InvalidArgumentError(f"count is {count}, expected at least 1", field="count")
        return [self.select_samples(part) for part in np.array_split(np.arange(self.size), count)]

    @staticmethod
    def concat(parts: Sequence[BatchMeta]) -> BatchMeta:
        """Concatenate several batches.

        If all parts come from one claim, the result also belongs to that claim. A batch concatenated from several
        claims does not belong to any claim, so acknowledge or release its parts separately. A field that is dense in
        one part and jagged in a later part becomes jagged. The same sample can occur several times, for example in
        batches drawn with replacement.

        Raises:
            InvalidArgumentError: there are no parts, the parts differ in partition, incarnation, epoch or fields, or a
                part does not have the status "batch".
        """
        if not parts:
            raise InvalidArgumentError("parts is empty; expected at least one batch", field="parts")
        first = parts[0]
        for part in parts:
            for name in ("full_partition_id", "incarnation", "epoch", "data_fields"):
                if getattr(part, name) != getattr(first, name):
                    raise InvalidArgumentError(
                        f"parts differ in {name}: {getattr(first, name)!r} and {getattr(part, name)!r}. Concatenate "
                        "only batches with the same partition, incarnation, epoch and fields (see select_fields)",
                        field="parts",
                    )
            if part.status != "batch":
                raise InvalidArgumentError(f"a part has status {part.status!r}, expected 'batch'", field="parts")
        claim: dict[str, Any] = {}
        if any((part.claim_id, part.task_name) != (first.claim_id, first.task_name) for part in parts):
            claim = {"claim_id": b"", "task_name": "", "lease_seconds": None, "delivery_counts": ()}
        admitted = [part.admitted for part in parts if part.admitted is not None]
        claim["admitted"] = BatchMeta.concat(admitted) if len(admitted) == len(parts) else None
        starts = np.cumsum([0, *(part.size for part in parts[:-1])]).tolist()
        return replace(
            first,
            **(_samples_of(parts) | claim),
            steps=tuple(
                Step(
                    packs=tuple(
                        replace(pack, positions=tuple(position + start for position in pack.positions))
                        for pack in step.packs
                    )
                )
                for part, start in zip(parts, starts, strict=True)
                for step in part.steps
            ),
            totals=tuple(chain.from_iterable(part.totals for part in parts)),
        )

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, BatchMeta):
            return NotImplemented
        return (
            self._identity() == other._identity()
            and np.array_equal(self.indexes, other.indexes)
            and np.array_equal(self.dropped_indexes, other.dropped_indexes)
            # Compare the values as JSON text, in which 1, 1.0 and true differ and NaN equals NaN.
            and json.dumps(self._own_values(), sort_keys=True) == json.dumps(other._own_values(), sort_keys=True)
        )

    def _own_values(self) -> list[list[Any]]:
        return [getattr(self, SAMPLE_COLUMNS[name].message_field) for name in OWN_COLUMNS]

    def _identity(self) -> tuple[object, ...]:
        return (
            self.status, self.full_partition_id, self.incarnation, self.epoch, self.fields, self.steps,
            self.end,
        )  # fmt: skip

    def __hash__(self) -> int:
        return hash((self._identity(), self.indexes.tobytes()))

    def __repr__(self) -> str:
        return (
            f"BatchMeta(status={self.status!r}, partition_id={self.partition_id!r}, size={self.size}, "
            f"epoch={self.epoch}, data_fields={self.data_fields})"
        )


SAMPLE_COLUMNS: Final[Mapping[str, SampleColumn]] = {
    each.name: each.metadata["column"] for each in fields(BatchMeta) if "column" in each.metadata
}
OWN_COLUMNS: Final = [name for name, column in SAMPLE_COLUMNS.items() if column.is_of_sample]


class _ReadOnce:
    """An attribute of `BatchMeta` that is decoded on first access. Concurrent threads get equal values."""

    def __init__(self, slot: Any) -> None:
        self._slot = slot

    def __get__(self, batch: BatchMeta, _kind: type[BatchMeta]) -> Any:
        value = self._slot.__get__(batch)
        if type(value) is _Unread:
            value = value()
            self._slot.__set__(batch, value)
        return value

    def __set__(self, batch: BatchMeta, value: Any) -> None:
        self._slot.__set__(batch, value)


for _name in ("steps", "totals", "locations", *SAMPLE_COLUMNS):
    setattr(BatchMeta, _name, _ReadOnce(getattr(BatchMeta, _name)))


def _read_steps(messages: Iterable[pb.Step]) -> tuple[Step, ...]:
    return tuple(map(Step.from_proto, messages))


def _read_totals(totals: Iterable[pb.StepTotals]) -> tuple[StepTotals, ...]:
    return tuple(read_message(StepTotals, each, sums=dict(each.sums)) for each in totals)


def _select_steps(steps: Sequence[Step], new_position: NDArray[np.int64]) -> dict[int, Step]:
    """Restrict steps to a selection of samples, and return a dict of the steps by their numbers in the original batch.

    A pack that loses samples also loses its padding. Packs and steps that lose all samples are omitted.

    Args:
        steps: the steps of the original batch.
        new_position: for each sample of the original batch, its position in the selection, or -1.
    """
    selected = {}
    for number, step in enumerate(steps):
        packs = []
        for pack in step.packs:
            moved: list[int] = new_position[list(pack.positions)].tolist() if pack.positions else []
            kept = np.flatnonzero(np.array(moved) >= 0)
            if kept.size or not moved:
                is_whole = kept.size == len(moved)
                packs.append(
                    Pack(
                        positions=select(tuple(moved), kept),
                        lengths=None if pack.lengths is None else select(pack.lengths, kept),
                        padding_tokens=pack.padding_tokens if is_whole else 0,
                    )
                )
        if packs or not step.packs:
            selected[number] = Step(packs=tuple(packs))
    return selected


def _samples_of(parts: Sequence[BatchMeta]) -> dict[str, Any]:
    """Concatenate the samples and metadata of several batches into a dict of attributes for a new batch."""
    sizes = [part.size for part in parts]
    return {
        "indexes": np.concatenate([part.indexes for part in parts]),
        "dropped_indexes": np.unique(np.concatenate([part.dropped_indexes for part in parts])),
        "locations": CellLocations.concat([part.locations for part in parts if part.size]),
        **{
            name: column.concat([getattr(part, name) for part in parts], sizes)
            for name, column in SAMPLE_COLUMNS.items()
        },
        **_fields_of(parts),
    }


def _fields_of(parts: Sequence[BatchMeta]) -> dict[str, Any]:
    """Merge the fields of several batches. Return the merged fields and, if known, which samples have each field.

    If every batch records which samples have each field, all fields of all batches are included. Otherwise, only fields
    common to all batches are included.
    """
    found: dict[str, list[FieldSpec]] = {}
    for part in parts:
        for spec in part.fields:
            specs_of_field = found.setdefault(spec.name, [spec])
            if specs_of_field[-1] is not spec:
                specs_of_field.append(spec)
    specs = {name: _spec_of_all(each) for name, each in found.items()}
    if any(len(part.produced_columns) < len(part.fields) for part in parts):
        common = set.intersection(*(set(part.data_fields) for part in parts))
        return {"fields": tuple(spec for name, spec in specs.items() if name in common), "produced_columns": ()}
    known = [(part.produced, np.zeros(part.size, np.bool_)) for part in parts]
    columns = [np.concatenate([produced.get(name, none) for produced, none in known]) for name in specs]
    return {"fields": tuple(specs.values()), "produced_columns": tuple(columns)}


def _spec_of_all(specs: Sequence[FieldSpec]) -> FieldSpec:
    """Merge a field's specs from several batches, and return the field's current spec.

    The field may have become jagged between two batches. If the field was dropped and created again with a different
    spec, earlier batches are ignored.
    """

    def kind(spec: FieldSpec) -> object:
        return spec.dtype, spec.layout is Layout.OBJECT, len(spec.row_shape or ()), spec.row_shape is None

    return merge_specs([spec for spec in specs if spec is specs[-1] or kind(spec) == kind(specs[-1])])


def joined(parts: Sequence[BatchMeta]) -> BatchMeta:
    """Join the samples of several pages into one batch, and merge the field specs.

    Raises:
        StaleIncarnationError: the partition was cleared and created again between the reads of two pages.
    """
    if len(parts) == 1:
        return parts[0]
    last = parts[-1]
    for part in parts:
        if part.incarnation != last.incarnation:
            raise StaleIncarnationError(
                f"partition {last.partition_id!r} was cleared and created again between two pages of samples; "
                "repeat the call",
                metadata={
                    "partition_id": last.partition_id,
                    "got": part.incarnation.hex(),
                    "expected": last.incarnation.hex(),
                },
            )
    return replace(last, revision=parts[0].revision, **_samples_of(parts))


def select(values: Any, positions: Indexes) -> Any:
    """Return the values at `positions` from a tuple or array with one value per sample. Return () unchanged."""
    if isinstance(values, np.ndarray):
        return values[positions]
    return tuple(values[position] for position in positions.tolist()) if values else values


def _names(column: tuple[str, ...], size: int) -> list[str | None]:
    return [name or None for name in column] if column else [None] * size


def overwritten(old: BatchMeta, new: object) -> dict[str, Any]:
    """Return the sample columns of `old`, updated with the columns that a write set in `new`."""
    return {name: SAMPLE_COLUMNS[name].overwrite(getattr(old, name), getattr(new, name)) for name in OWN_COLUMNS}


def check_is_batch(metadata: BatchMeta) -> None:
    """Raise InvalidArgumentError if the batch contains no samples because its status is "not_yet" or "end"."""
    if metadata.status != "batch":
        raise InvalidArgumentError(
            f"metadata has status {metadata.status!r}, expected 'batch'. Check the status before using the samples",
            field="metadata",
        )


def in_parts(names: Sequence[Any] | Indexes) -> Iterator[Sequence[Any] | Indexes]:
    """Yield sample names in parts, each small enough for one call. Yield at least one part."""
    for start in range(0, max(1, len(names)), NAMED_AT_ONCE):
        yield names[start : start + NAMED_AT_ONCE]
