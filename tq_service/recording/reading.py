"""Reads from a recording: the list of steps, a single step, one rank's part of a step, or the bytes of puts."""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
import xxhash

from tq_service.errors import DataLossError, FieldNotFoundError, InvalidArgumentError, NotFoundError, TqError
from tq_service.objects.base import LARGEST_OBJECT_BYTES
from tq_service.recording.layout import STEPS, PutPlace, RecordedStep, decode_step
from tq_service.recording.places import Place
from tq_service.state.ledger import RecordedPlan
from tq_service.state.plan import Indexes, RankPlan
from tq_service.storage.blobs.memory import Blob, MemoryBlobs
from tq_service.storage.index.put_table import Backing, RecoveredPut
from tq_service.v1 import metadata_pb2
from tq_service.wire.metadata import (
    CellRuns,
    decode_meta_columns,
    encode_meta_columns,
    fill_packed,
    read_indexes,
    set_indexes,
)

_MOST_NAMED: Final = 20
_NO_PLAN: Final = RecordedPlan(rows=np.zeros(0, np.int64), sizes=())


async def read_step(place: Place, name: str) -> tuple[RecordedStep, int]:
    """Read a step, and return the step and the size of its object in bytes.

    Raises:
        DataLossError: the step is missing or damaged.
        NewerVersionError: a newer version recorded the step.
        UnavailableError: the step cannot be read at the moment.
    """
    data = await place.read(name)

    def decoded() -> RecordedStep:
        try:
            return decode_step(name, memoryview(zlib.decompress(data)))
        except zlib.error as error:
            raise DataLossError(f"{name} of the recording is damaged and cannot be decompressed: {error}") from error

    return await asyncio.to_thread(decoded), len(data)


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """A filter for recorded steps; an attribute that is None matches any value.

    Attributes:
        incarnation: leading hexadecimal digits of the partition's incarnation.
    """

    task_name: str | None = None
    batch_index: int | None = None
    partition_id: str | None = None
    epoch: int | None = None
    incarnation: str | None = None

    def means(self, step: RecordedStep) -> bool:
        """Whether a step matches the selection."""
        return (
            self.task_name in {None, step.task_name}
            and self.batch_index in {None, step.batch_index}
            and self.partition_id in {None, step.partition_id}
            and self.epoch in {None, step.epoch}
            and (self.incarnation is None or step.incarnation.hex().startswith(self.incarnation))
        )

    def __str__(self) -> str:
        words = {
            "task": self.task_name,
            "step": self.batch_index,
            "partition": self.partition_id,
            "epoch": self.epoch,
            "incarnation": self.incarnation,
        }
        return ", ".join(f"{name} {value}" for name, value in words.items() if value is not None) or "any step"


class Recording:
    """The steps of a recording, loaded into memory without the bytes of their puts.

    A recording must be used from a single event loop.

    Attributes:
        place: storage location of the recording.
        steps: steps sorted by number. If a batch was recorded twice, only the last step recorded for the batch is
            included.
        damaged: error message for each damaged step, by object name.
    """

    def __init__(self, place: Place) -> None:
        self.place = place
        self.steps: list[RecordedStep] = []
        self.damaged: dict[str, str] = {}

    async def open(self, wanted: Asked | None = None) -> None:
        """Open the recording and read all steps.

        Args:
            wanted: selection of the steps whose plans and metadata are kept in memory, or None for all steps. The plans
                and metadata of unselected steps are discarded, because a recording may contain thousands of steps.

        Raises:
            TqError: `place` is not a recording, or cannot be read.
        """
        await self.place.open(for_writing=False)
        try:
            found: dict[tuple[object, ...], RecordedStep] = {}
            for name in await self.place.names(STEPS):
                try:
                    step, _ = await read_step(self.place, name)
                except DataLossError as error:
                    self.damaged[name] = error.message
                    continue
                if wanted is not None and not wanted.means(step):
                    step = replace(step, plan=_NO_PLAN, meta=b"", empty_fields=(), puts=())
                found[step.incarnation, step.task_name, step.epoch, step.batch_index] = step
            self.steps = sorted(found.values(), key=lambda step: step.number)
        except BaseException:
            await self.place.close()
            raise

    def select(self, asked: Asked) -> list[RecordedStep]:
        """Return the selected steps, all of which must match the `wanted` argument of `open`.

        If the selected steps of a task are from several incarnations or epochs, only the steps of the last incarnation
        and epoch are returned.

        Raises:
            NotFoundError: no step matches.
        """
        found = [step for step in self.steps if asked.means(step)]
        if not found:
            damaged = f"; {len(self.damaged)} steps are damaged" if self.damaged else ""
            raise NotFoundError(
                f"the recording at {self.place.name} does not contain {asked}; available: "
                f"{summary_of(self.steps) or 'no steps'}{damaged}"
            )
        last = {(step.partition_id, step.task_name): (step.incarnation, step.epoch) for step in found}
        return [step for step in found if (step.incarnation, step.epoch) == last[step.partition_id, step.task_name]]

    def one(self, asked: Asked) -> RecordedStep:
        """Return the single step that matches a selection.

        Raises:
            NotFoundError: no step matches.
            InvalidArgumentError: more than one step matches.
        """
        found = self.select(asked)
        if len(found) > 1:
            raise InvalidArgumentError(
                f"{asked} matches {len(found)} steps: {summary_of(found)}; select one step with --task, --partition "
                "and --epoch"
            )
        return found[0]

    async def read_put(self, place: PutPlace) -> memoryview:
        """Read the tables and values of a put, and verify their checksum.

        Raises:
            DataLossError: the bytes are missing or damaged.
            UnavailableError: the bytes cannot be read at the moment.
        """
        size, at, parts = place.record.size_bytes, place.start, []
        left = size
        for name in place.names:
            held = LARGEST_OBJECT_BYTES if name != place.names[-1] else left + at
            if left and at < held:
                count = min(left, held - at)
                parts.append(await self.place.read_part(name, at, count))
                left -= count
            at = max(0, at - held)
        data = parts[0] if len(parts) == 1 else memoryview(b"".join(parts))
        found = await asyncio.to_thread(xxhash.xxh3_64_intdigest, data)
        if found != place.record.checksum:
            raise DataLossError(
                f"put {place.record.put_id.hex()} in {', '.join(place.names)} of the recording has the checksum "
                f"{found:016x}; expected {place.record.checksum:016x}. The file is damaged"
            )
        return data

    async def close(self) -> None:
        """Close the recording's storage location."""
        await self.place.close()


def summary_of(steps: Sequence[RecordedStep]) -> str:
    """Summarize steps for a message, grouped by task, partition and epoch."""
    by_task: dict[tuple[str, str, int], list[int]] = {}
    for step in steps:
        by_task.setdefault((step.task_name, step.partition_id, step.epoch), []).append(step.batch_index)
    named = [
        f"{_ranges(sorted(set(indexes)))} of task {task!r} in partition {partition!r}"
        + (f", epoch {epoch}" if epoch else "")
        for (task, partition, epoch), indexes in by_task.items()
    ]
    return "; ".join(named[:_MOST_NAMED]) + (
        f"; and {len(named) - _MOST_NAMED} more" if len(named) > _MOST_NAMED else ""
    )


def _ranges(numbers: Sequence[int]) -> str:
    """Format ascending numbers as ranges, for example "0 to 3, 5"."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ", ".join(str(first) if first == last else f"{first} to {last}" for first, last in runs)


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names[:_MOST_NAMED]) + (
        f" and {len(names) - _MOST_NAMED} more" if len(names) > _MOST_NAMED else ""
    )


class RecordedPuts(Backing[PutPlace]):
    """The read-only puts of recorded steps. Each put is loaded from the recording on first use.

    Args:
        recording: recording that contains the bytes of the puts.
    """

    is_volatile = False

    def __init__(self, recording: Recording) -> None:
        super().__init__(MemoryBlobs())
        self._recording = recording

    def add(self, steps: Sequence[RecordedStep]) -> None:
        """Add the puts of the given steps. This object must already serve as the backing of a storage engine."""
        places = {place.record.put_id: place for step in steps for place in step.puts}
        self._unfetched.update(places)
        self.on_recovered(
            {put_id: RecoveredPut(Blob(self.store, 0), each.record.owner) for put_id, each in places.items()}
        )

    def partition_of(self, put_id: bytes) -> str | None:
        """Return a put's partition if the put has not been loaded yet, and None otherwise."""
        place = self._unfetched.get(put_id)
        return None if place is None else place.record.partition_id

    async def _fetch(self, put_id: bytes, source: PutPlace) -> None:
        try:
            data = await self._recording.read_put(source)
        except DataLossError as error:
            if self._forget_unfetched(put_id):
                self.mark_damaged(put_id, error.message)
            return
        except TqError as error:
            self.fetch_error = error.message
            return
        if self._forget_unfetched(put_id):
            self.on_fetched(source.record, data)


# Per-rank parts


def samples_of(
    meta: metadata_pb2.BatchMeta, positions: Indexes, empty_fields: Sequence[bytes] = ()
) -> metadata_pb2.BatchMeta:
    """Return a copy of a response that contains only the selected samples.

    Args:
        meta: complete response, with the metadata of all samples.
        positions: positions of the selected samples in the response.
        empty_fields: serialized field specs to return if no samples are selected.
    """
    indexes = read_indexes(meta)
    part = metadata_pb2.BatchMeta(
        status=meta.status, partition_id=meta.partition_id, incarnation=meta.incarnation, epoch=meta.epoch
    )
    set_indexes(part, indexes[positions])
    for name in ("keys", "groups", "rollouts"):
        names = getattr(meta, name)
        some = [names[position] for position in positions.tolist()] if names else []
        if any(some):
            getattr(part, name).extend(some)
    columns = [column.at(positions) for column in decode_meta_columns(meta.custom_meta, indexes.size)]
    part.custom_meta.extend(encode_meta_columns(column for column in columns if bool(column.has_value.any())))
    if positions.size or not empty_fields:
        part.fields.extend(meta.fields)
    else:
        part.fields.extend(map(metadata_pb2.FieldSpec.FromString, empty_fields))
    part.locations.CopyFrom(_locations_of(meta.locations, positions))
    return part


def _locations_of(locations: metadata_pb2.Locations, positions: Indexes) -> metadata_pb2.Locations:
    part = metadata_pb2.Locations(storages=locations.storages)
    if not positions.size:
        return metadata_pb2.Locations()
    numbers: dict[int, int] = {}
    for message in locations.runs:
        runs = CellRuns.of_samples(message).select(positions)
        used = [numbers.setdefault(index, len(numbers)) for index in runs.put_indexes.tolist()]
        new = part.runs.add(field_names=runs.field_names)
        for name, values in (
            ("put_indexes", np.array(used)),
            ("first_rows", runs.first_rows),
            ("row_counts", runs.row_counts),
            ("extent_counts", runs.extent_counts),
            ("extent_lengths", runs.extent_lengths),
        ):
            fill_packed(new, name, values.astype(np.uint32))
    for index in numbers:
        part.puts.add().CopyFrom(locations.puts[index])
    return part


def only_fields(meta: metadata_pb2.BatchMeta, names: Sequence[str]) -> None:
    """Modify a response in place so that it contains only the named fields, in the given order.

    Raises:
        FieldNotFoundError: the response does not contain one of the fields.
    """
    specs = {spec.name: spec for spec in meta.fields}
    if missing := [name for name in names if name not in specs]:
        raise FieldNotFoundError(
            f"field {missing[0]!r} was not recorded; the samples of this step have the fields {_listed(sorted(specs))}",
            metadata={"partition_id": meta.partition_id, "field_name": missing[0]},
        )
    chosen = [specs[name] for name in names]
    kept = []
    for run in meta.locations.runs:
        some = [name for name in names if name in run.field_names]
        if some:
            copied = metadata_pb2.CellRuns()
            copied.CopyFrom(run)
            del copied.field_names[:]
            copied.field_names.extend(some)
            kept.append(copied)
    copies = [metadata_pb2.FieldSpec.FromString(spec.SerializeToString()) for spec in chosen]
    del meta.fields[:]
    meta.fields.extend(copies)
    del meta.locations.runs[:]
    meta.locations.runs.extend(kept)


def positions_of_rank(step: RecordedStep, dp_rank: int) -> Indexes:
    """Return the positions of a rank's samples in a step."""
    start = sum(step.plan.sizes[:dp_rank])
    return np.arange(start, start + step.plan.sizes[dp_rank])


def parts_of(step: RecordedStep) -> Iterator[RankPlan]:
    """Yield each rank's part of a step's plan."""
    return (step.plan.part(dp_rank) for dp_rank in range(step.dp_size))
