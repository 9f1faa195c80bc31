"""The objects of a recording, and their format.

    steps/000000000017-9f3c1a2b      a step: its plan, the metadata of its samples, the places of its puts
    puts/9f3c1a2b-41                 tables and values of puts that were in memory, in order
    puts/9f3c1a2b-42.seg             a file of the data directory, linked under another name: one put

Numbers of steps continue after restarts. `9f3c1a2b` names one start of a service, so no name is used twice. An object
of puts is written before the first step that names it. A put is stored once, however many steps name it. A stored step
is therefore complete, whenever the service was killed, and answers its claims without any other step.
"""

from __future__ import annotations

import re
import struct
from dataclasses import dataclass
from typing import Final

from tq_service.errors import DataLossError, NewerVersionError
from tq_service.journal import codec
from tq_service.state.ledger import RecordedPlan
from tq_service.state.plan import BatchSpec
from tq_service.storage.index.put_table import PutStored

FORMAT: Final = 1
STEPS: Final = "steps/"
PUTS: Final = "puts/"
_STEP: Final = re.compile(r"steps/(\d{12})-([0-9a-f]{8})")


@dataclass(frozen=True, slots=True, kw_only=True)
class PutPlace:
    """The place of the bytes of a put.

    Attributes:
        record: the put, with the checksum of its bytes.
        names: the objects that contain the bytes, concatenated.
        start: offset of the bytes in these objects.
    """

    record: PutStored
    names: tuple[str, ...]
    start: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedStep:
    """A batch of the ranks of a task, as it was planned.

    Attributes:
        number: number of the step in the recording, from 1.
        version: version of the service that recorded it.
        partition_id, incarnation: the partition.
        task_name, epoch, batch_index: the batch.
        recorded_at: seconds since 1970.
        plan: the parts of all ranks.
        batch_spec: the request of the ranks.
        policies: the published versions, by name.
        meta: a serialized `BatchMeta` of the samples of all ranks, in the order of `plan.rows`, with the fields that
            all of them have.
        empty_fields: serialized `FieldSpec`s for a rank without samples; empty if each rank has samples.
        puts: the places of the puts that `meta` names.
        format: format of this record.
    """

    number: int
    version: str
    partition_id: str
    incarnation: bytes
    task_name: str
    epoch: int
    batch_index: int
    recorded_at: float
    plan: RecordedPlan
    batch_spec: BatchSpec | None
    meta: bytes
    policies: tuple[tuple[str, int], ...] = ()
    empty_fields: tuple[bytes, ...] = ()
    puts: tuple[PutPlace, ...] = ()
    format: int = FORMAT

    @property
    def dp_size(self) -> int:
        """Number of ranks."""
        return len(self.plan.sizes)


def step_name(number: int, run: str) -> str:
    """Return the name of the object of a step."""
    return f"{STEPS}{number:012d}-{run}"


def step_number(name: str) -> int:
    """Return the number of the step of an object; -1 for other objects."""
    found = _STEP.fullmatch(name)
    return -1 if found is None else int(found[1])


def encode_step(step: RecordedStep) -> bytes:
    """Return the bytes of a step."""
    return codec.encode_named(step)


def decode_step(name: str, data: memoryview) -> RecordedStep:
    """Return the step of an object.

    Raises:
        DataLossError: it is damaged.
        NewerVersionError: a newer version recorded it.
    """
    try:
        kind, fields = codec.unpack(data)
        if fields.get("format", FORMAT) > FORMAT:
            raise NewerVersionError(f"{name} has format {fields['format']}; a newer version recorded it: install that")
        return codec.decode_named({RecordedStep.__name__: RecordedStep}, kind, fields)
    except (ValueError, TypeError, KeyError, AttributeError, struct.error) as error:
        raise DataLossError(f"{name} of the recording is not a step ({error}); it is damaged") from error


@dataclass(slots=True, kw_only=True, eq=False)
class Pack:
    """Objects of puts that are removed together.

    Attributes:
        names: names of the objects.
        size: size of all puts in them, in bytes.
        put_count: number of its puts that a step names.
    """

    names: tuple[str, ...]
    size: int = 0
    put_count: int = 0
