"""The objects of a recording, and their format.

    steps/000000000017-9f3c1a2b      a step: its plan, the metadata of its samples, the places of its puts
    puts/9f3c1a2b-41                 tables and values of puts that were in memory, in order
    puts/9f3c1a2b-42.seg             a file of the data directory, linked under another name: one put

Step numbers continue after restarts. `9f3c1a2b` identifies one start of a service, so no name is used twice. An object
with puts is written before the first step that names it, and a put is stored once, however many steps name it. A stored
step is therefore complete even if the service was killed, and can answer its claims without any other step.
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
    """Location of a put's bytes.

    Attributes:
        record: the put, with the checksum of its bytes.
        names: the objects whose concatenation contains the bytes.
        start: offset of the bytes in this concatenation.
    """

    record: PutStored
    names: tuple[str, ...]
    start: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedStep:
    """A batch as it was planned for the ranks of a task.

    Attributes:
        number: number of the step in the recording, from 1.
        version: version of the service that recorded it.
        partition_id, incarnation: the partition.
        task_name, epoch, batch_index: the batch.
        recorded_at: time of recording, in seconds since 1970.
        plan: the parts of all ranks.
        batch_spec: the request of the ranks.
        policies: pairs of policy and published version.
        meta: a serialized `BatchMeta` of the samples of all ranks, in the order of `plan.rows`, with the fields that
            all of them have.
        empty_fields: serialized `FieldSpec`s for a rank without samples; empty if each rank has samples.
        puts: locations of the puts that `meta` names.
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
    """Return the object name of a step."""
    return f"{STEPS}{number:012d}-{run}"


def step_number(name: str) -> int:
    """Return the step number in an object's name, or -1 if the object is not a step."""
    found = _STEP.fullmatch(name)
    return -1 if found is None else int(found[1])


def encode_step(step: RecordedStep) -> bytes:
    """Return the encoded step."""
    return codec.encode_named(step)


def decode_step(name: str, data: memoryview) -> RecordedStep:
    """Decode a step from the bytes of its object.

    Raises:
        DataLossError: the step is damaged.
        NewerVersionError: a newer version recorded it.
    """
    try:
        kind, fields = codec.unpack(data)
        if fields.get("format", FORMAT) > FORMAT:
            raise NewerVersionError(
                f"{name} has format {fields['format']}, which a newer version recorded; install that version"
            )
        return codec.decode_named({RecordedStep.__name__: RecordedStep}, kind, fields)
    except (ValueError, TypeError, KeyError, AttributeError, struct.error) as error:
        raise DataLossError(
            f"{name} of the recording cannot be decoded as a step ({error}); the object is damaged"
        ) from error


@dataclass(slots=True, kw_only=True, eq=False)
class Pack:
    """Objects with puts, which are removed together.

    Attributes:
        names: names of the objects.
        size: total size of the puts in the objects, in bytes.
        put_count: number of puts in the objects that some step names.
    """

    names: tuple[str, ...]
    size: int = 0
    put_count: int = 0
