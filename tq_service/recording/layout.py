"""Names and formats of the objects in a recording.

    steps/000000000017-9f3c1a2b      one step: its plan, the metadata of its samples, the locations of its puts
    puts/9f3c1a2b-41                 tables and values of several puts that were in memory, in order
    puts/9f3c1a2b-42.seg             one put: a file of the data directory, linked under this name

Step numbers continue after a restart. In these names, `9f3c1a2b` identifies one run of the service, so no two runs use
the same name. A put is stored only once, before the first step that references the put. Every stored step is therefore
complete, even if the service is killed. Claims for a step can be answered without reading any other step.
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
    """The location of a put's bytes in a recording.

    Attributes:
        record: the put's record, which contains the size and checksum of the put's bytes.
        names: names of the objects whose concatenation contains the bytes.
        start: offset of the bytes in the concatenated objects.
    """

    record: PutStored
    names: tuple[str, ...]
    start: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedStep:
    """A recorded step, that is, one batch as planned for a task's ranks.

    Attributes:
        number: number of the step in the recording, starting at 1.
        version: version of the service that recorded the step.
        partition_id, incarnation: name and incarnation of the batch's partition.
        task_name, epoch, batch_index: identity of the batch in its partition.
        recorded_at: time of recording, in seconds since 1970.
        plan: plan of the batch for all ranks.
        batch_spec: claim arguments passed by the ranks.
        policies: pairs of a policy name and its published version.
        meta: serialized `BatchMeta` of all ranks' samples, in the order of `plan.rows`, with the fields that all
            samples have.
        empty_fields: serialized `FieldSpec`s that ranks without samples receive. Empty if every rank has samples.
        puts: locations of the puts that `meta` references.
        format: version of the record format.
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
    """Return the name of the object that stores a step."""
    return f"{STEPS}{number:012d}-{run}"


def step_number(name: str) -> int:
    """Return the step number in the name of an object, or -1 if the object is not a step."""
    found = _STEP.fullmatch(name)
    return -1 if found is None else int(found[1])


def encode_step(step: RecordedStep) -> bytes:
    """Encode a step as the contents of its object."""
    return codec.encode_named(step)


def decode_step(name: str, data: memoryview) -> RecordedStep:
    """Decode a step from the contents of its object.

    Raises:
        DataLossError: the step is damaged.
        NewerVersionError: a newer version recorded the step.
    """
    try:
        kind, fields = codec.unpack(data)
        if fields.get("format", FORMAT) > FORMAT:
            raise NewerVersionError(
                f"{name} has format {fields['format']}, which a newer version wrote. Install the newer version."
            )
        return codec.decode_named({RecordedStep.__name__: RecordedStep}, kind, fields)
    except (ValueError, TypeError, KeyError, AttributeError, struct.error) as error:
        raise DataLossError(f"{name} of the recording is damaged and cannot be decoded as a step: {error}") from error


@dataclass(slots=True, kw_only=True, eq=False)
class Pack:
    """A set of objects that contain puts and are removed together.

    Attributes:
        names: names of the objects.
        size: total size of the puts in the objects, in bytes.
        put_count: number of puts in the objects, counting only puts that at least one step references.
    """

    names: tuple[str, ...]
    size: int = 0
    put_count: int = 0
