"""The words every layer shares: layouts, states, dtypes, the description of a field, what names and numbers may be."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from enum import IntEnum, StrEnum
from typing import Final, Literal, get_args

from tq_service.errors import InvalidArgumentError


class Layout(StrEnum):
    """How the rows of a field are laid out; `AUTO` in declarations only: dense until a row differs, then jagged."""

    AUTO = "auto"
    DENSE = "dense"
    JAGGED = "jagged"
    OBJECT = "object"


class Encoding(StrEnum):
    """What the bytes of a row of an object field are."""

    TEXT = "text"
    MSGPACK = "msgpack"
    BYTES = "bytes"


class SampleState(StrEnum):
    """What may happen with a sample: `failed` is final."""

    LIVE = "live"
    HELD = "held"
    FAILED = "failed"


class SampleConsumption(IntEnum):
    """What a task has done with a sample, by the numbers of the protos."""

    LEFT = 1
    LEASED = 2
    CONSUMED = 3
    DEAD_LETTERED = 4
    DROPPED = 5


class EvictionCode(IntEnum):
    """Why a claim evicted a sample or a group, by the numbers of the protos."""

    UNMATCHED = 1
    TOO_SMALL = 2
    LATE = 3


BatchUnit = Literal["sample", "group"]
Blocks = Literal["aligned", "anywhere"]
EvictionReason = Literal["unmatched", "too_small", "late"]
GivenBack = Literal["delivered", "trained", "published"]
OnLost = Literal["requeue", "fail", "remove"]
KeyMode = Literal["upsert", "new", "existing"]
Late = Literal["wait", "evict"]
RefillOutcome = Literal["refilled", "pending", "unknown", "used_up", "given_up"]
Unmatched = Literal["wait", "fail", "clear"]
ReadLayout = Literal["auto", "dense", "jagged"]
Operator = Literal["==", "!=", "<", "<=", ">", ">=", "in"]
Scalar = int | float | bool | str
DEFAULT_POLICY: Final = "default"
START_VERSION: Final = "start_version"
"""The custom_meta column with the version that was published when the slot of a sample was made."""

# Bytes of one element by torch's name of the dtype. Sub-byte dtypes have no per-row byte boundary and are left out.
DTYPE_SIZES: dict[str, int] = {
    "bool": 1, "uint8": 1, "int8": 1, "float8_e4m3fn": 1, "float8_e5m2": 1, "float8_e4m3fnuz": 1, "float8_e5m2fnuz": 1,
    "float8_e8m0fnu": 1, "uint16": 2, "int16": 2, "float16": 2, "bfloat16": 2,
    "uint32": 4, "int32": 4, "float32": 4, "complex32": 4,
    "uint64": 8, "int64": 8, "float64": 8, "complex64": 8, "complex128": 16,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Published:
    """Stands for the published version of a policy, plus an offset, in a condition.

    Attributes:
        policy: its name.
        offset: added to the version; -2 with ">=" is for samples that are at most two versions old.
    """

    policy: str = DEFAULT_POLICY
    offset: int = 0


@dataclass(frozen=True, slots=True)
class FieldSpec:
    """A column: its name, dtype, layout and the shape of its rows.

    Attributes:
        name: unique in the partition.
        dtype: torch's name of the dtype ("float32", "bfloat16"); "" for objects, or left to the first put.
        layout: dense, jagged or object. In a declaration "auto", too: dense until a row differs in shape, jagged from
            then on; None: the `default_layout` of the partition.
        row_shape: shape of one row, -1 in ragged dimensions, () for scalars; None leaves it to the first put.
        encoding: of objects: UTF-8 text, bytes as they are, or msgpack, which holds any object. A field declared as
            text or bytes takes nothing else; None, or msgpack, takes any, in the encoding that each put says.
        write_once: whether each sample takes one value only: a second one is refused (AlreadyExistsError) until the
            sample is cleared.
    """

    name: str
    dtype: str = ""
    layout: Layout | None = None
    row_shape: tuple[int, ...] | None = None
    encoding: Encoding | None = None
    write_once: bool = False

    def __post_init__(self) -> None:
        if not self.name:
            raise InvalidArgumentError("a field has an empty name; give every field a name", field="name")
        if type(self.write_once) is not bool:
            raise InvalidArgumentError(
                f"field {self.name!r}: write_once is {self.write_once!r}; expected True or False",
                field="write_once",
                metadata={"field_name": self.name},
            )
        if type(self.layout) is not Layout:
            self._check_word("layout", Layout)
        if self.encoding is not None:
            self._check_word("encoding", Encoding)
        if self.encoding is not None and self.layout is not Layout.OBJECT:
            raise InvalidArgumentError(
                f"field {self.name!r}: encoding {self.encoding.value!r} is of objects, and the layout is "
                f"{self.layout or 'not given'}; give the layout object too",
                field="encoding",
                metadata={"field_name": self.name},
            )
        if self.dtype and self.dtype not in DTYPE_SIZES:
            raise InvalidArgumentError(
                f"field {self.name!r}: dtype {self.dtype!r} is unknown; use torch's name of the dtype, one of "
                f"{', '.join(sorted(DTYPE_SIZES))}",
                field="dtype",
                metadata={"field_name": self.name},
            )
        if self.row_shape is not None:
            object.__setattr__(self, "row_shape", tuple(int(size) for size in self.row_shape))

    def _check_word(self, name: str, words: type[StrEnum]) -> None:
        given = getattr(self, name)
        if given is None or type(given) is words:
            return
        try:
            object.__setattr__(self, name, words(given))
        except ValueError:
            raise InvalidArgumentError(
                f"field {self.name!r}: {name} {given!r} is unknown; use one of "
                f"{', '.join(word.value for word in words)}",
                field=name,
                metadata={"field_name": self.name},
            ) from None

    @property
    def itemsize(self) -> int:
        """Bytes of one element; 1 for objects."""
        return DTYPE_SIZES[self.dtype] if self.dtype else 1

    @property
    def ragged_dims(self) -> tuple[int, ...]:
        """Dimensions of a row that differ between rows; none of a jagged field whose rows all were alike so far."""
        return tuple(dim for dim, size in enumerate(self.row_shape or ()) if size < 0)

    def describe(self) -> str:
        """Return the spec as it appears in messages, such as `int64 jagged [-1]` or `object (text)`."""
        if self.layout is Layout.OBJECT:
            return f"object ({self.encoding or 'any encoding'})"
        shape = "any shape" if self.row_shape is None else str(list(self.row_shape))
        return f"{self.dtype or 'any dtype'} {self.layout or 'any layout'} {shape}"


@dataclass(frozen=True, slots=True)
class Admission:
    """How much work may be outstanding for a task of a partition; puts of new samples wait for their turn.

    What a task has pending is outstanding, and what was delivered to it until it gives its place back. Samples that
    fail, are cleared before their delivery, dead-lettered, or skipped with their group, give it back at once.

    Attributes:
        task_name: the task. One that has not asked yet has all samples pending.
        most: most units that may be outstanding, 1 or more.
        unit: what `most` counts: samples, or groups; a sample without a group counts as one. Further members of a group
            that has begun take no place.
        given_back: when what was delivered gives its place back: at once ("delivered"), once its batch was trained or
            its samples were acknowledged ("trained"), or with the next version of `policy` that is published after
            that ("published").
        policy: that of `given_back="published"`, in the client's namespace.
        max_staleness: the most versions that may be published between the slot of a sample and its training. It sets
            `most` to `(max_staleness + 1) * global_batch` and `given_back` to "published", has batches planned such
            that the bound holds, and leaves it to `acquire` to make samples. None: there is no such bound.
        global_batch: with `max_staleness`: the units that all ranks take for one version.
        late: with `max_staleness`: what becomes of work that is not finished when a batch could be planned but for it:
            batches "wait" for it, or it is evicted ("evict"), whoever is at it; see `get_meta(unmatched=, refill=)`.
        most_running: most units that may be held at a time, which are being generated: `acquire`, `get_meta(admit=)`
            and puts of held samples wait for others to finish. A group is held as long as one of its samples is. 0: no
            bound.
    """

    task_name: str
    most: int = 0
    unit: BatchUnit = "sample"
    given_back: GivenBack = "delivered"
    policy: str = DEFAULT_POLICY
    max_staleness: int | None = None
    global_batch: int = 0
    late: Late = "wait"
    most_running: int = 0

    def __post_init__(self) -> None:
        check_name("task_name", self.task_name)
        check_name("policy", self.policy)
        check_words: tuple[tuple[str, str, tuple[str, ...]], ...] = (
            ("unit", self.unit, get_args(BatchUnit)),
            ("given_back", self.given_back, get_args(GivenBack)),
            ("late", self.late, get_args(Late)),
        )
        for name, word, words in check_words:
            if word not in words:
                raise InvalidArgumentError(
                    f"{name} of the admission of task {self.task_name!r} is {word!r}; give one of {', '.join(words)}",
                    field="admissions",
                )
        self._set_by_staleness()
        if self.most < 1:
            raise InvalidArgumentError(
                f"most of the admission of task {self.task_name!r} is {self.most}; give 1 or more, or max_staleness "
                f"and global_batch",
                field="admissions",
            )
        check_range("most_running", self.most_running, 0, hint="; 0 stands for no bound")

    def _set_by_staleness(self) -> None:
        """Set what follows from `max_staleness`, and refuse what contradicts it."""
        whose = f"of the admission of task {self.task_name!r}"
        if self.max_staleness is None:
            for name, value in (("global_batch", self.global_batch), ("late", self.late)):
                if value not in {0, "wait"}:
                    raise InvalidArgumentError(
                        f"{name} {whose} is {value!r}, without max_staleness; give both, or most instead",
                        field="admissions",
                    )
            return
        if self.max_staleness < 0 or self.global_batch < 1:
            raise InvalidArgumentError(
                f"max_staleness {whose} is {self.max_staleness} with a global_batch of {self.global_batch}; give 0 or "
                f"more versions, and the units of a batch over all ranks, 1 or more",
                field="admissions",
            )
        most = (self.max_staleness + 1) * self.global_batch
        for name, given, implied, unset in (
            ("most", self.most, most, 0), ("given_back", self.given_back, "published", "delivered")
        ):  # fmt: skip
            if given not in (implied, unset):
                raise InvalidArgumentError(
                    f"{name} {whose} is {given!r}, and its max_staleness sets it to {implied!r}; leave it out",
                    field="admissions",
                )
            object.__setattr__(self, name, implied)


@dataclass(frozen=True, slots=True)
class Admit:
    """The slots that rollout workers get with the prompts that they claim; see `get_meta(admit=)`.

    Attributes:
        partition_id: the partition of the slots, which must exist.
        group_size: slots of each prompt. More than 1: they are a group, named by the key of the prompt; 1 or None: one
            slot with the key of the prompt.
        on_lost: what becomes of slots that are still held when the lease runs out. "remove": their prompts can be
            claimed again. "requeue": workers claim them with `get_meta(held=True)`; "fail": they fail; then their
            prompts are done.
        policy: the published version of this policy becomes `start_version` in the custom_meta of the slots. None: that
            of the admission with a `max_staleness`; without one there is no `start_version`.
    """

    partition_id: str
    group_size: int | None = None
    on_lost: OnLost = "remove"
    policy: str | None = None

    def __post_init__(self) -> None:
        check_name("admit", self.partition_id)
        check_range("group_size", self.slot_count, 1, MOST_SAMPLES)
        if self.on_lost not in get_args(OnLost):
            words = ", ".join(get_args(OnLost))
            raise InvalidArgumentError(f"on_lost is {self.on_lost!r}, expected one of {words}", field="on_lost")

    @property
    def slot_count(self) -> int:
        """Slots of each prompt."""
        return 1 if self.group_size is None else self.group_size


_CONSUMED: Final = ("consumed_count", "kept_count")


@dataclass(frozen=True, slots=True, kw_only=True)
class EndCounts:
    """What became of the samples of a partition when a task reached its end: numbers of them, the same for all ranks.

    Attributes:
        consumed_count: consumed by the task in this epoch, cleared ones included.
        cleared_count: cleared before the task took them.
        failed_count: failed before the task took them.
        dead_lettered_count: delivered `max_deliveries` times without being acknowledged, cleared ones included.
        excluded_count: ruled out by the task's `where`.
        in_incomplete_groups_count: of groups that cannot be delivered whole any more.
        left_over_count: ready, but in no plan: a short last batch with `drop_last`, or what the sampler leaves out.
        overlong_count: left out of a batch by its sampler, as `overlong="drop"` does, cleared ones included.
        kept_count: those of `consumed_count` that were consumed in earlier epochs, before
            `reset_consumption(keep_consumed=True)` began this one.
    """

    consumed_count: int = 0
    cleared_count: int = 0
    failed_count: int = 0
    dead_lettered_count: int = 0
    excluded_count: int = 0
    in_incomplete_groups_count: int = 0
    left_over_count: int = 0
    overlong_count: int = 0
    kept_count: int = 0

    @property
    def skipped_counts(self) -> dict[str, int]:
        """The counts of samples that the task never gets, by their names; those that are 0 are left out."""
        return {name: count for name, count in asdict(self).items() if count and name not in _CONSUMED}

    @property
    def skipped_count(self) -> int:
        """How many samples the task never gets."""
        return sum(self.skipped_counts.values())


# What must hold of a request whatever the state of the service

MOST_SAMPLES: Final = 2**24
"""Most samples that one request writes or claims."""
MOST_NAMED_PER_WRITE: Final = 2**14
"""Most samples with keys or groups that one request writes."""
LARGEST_EXACT: Final = 1 << 53
"""Of the integers that floats hold."""
WHOLE_EXTENT: Final = (1 << 32) - 1
"""Stands for the length of an extent of a cell that is not cut."""
_LARGEST: Final = sys.float_info.max


def check_range(name: str, value: float, least: int, most: float = _LARGEST, hint: str = "") -> None:
    """Refuse a number that is too small or too large; `hint` ends the message."""
    if not least <= value <= most:  # which neither NaN nor infinity are
        expected = f"{least} or more" if most == _LARGEST else f"{least} to {most}"
        raise InvalidArgumentError(
            f"{name} is {value}; give {expected}{hint}",
            field=name,
            metadata={"got": str(value), "expected": expected},
        )


def check_named_rows(name: str, count: int) -> None:
    """Refuse to write so many samples with keys, or with groups, at once: it would take long in one step."""
    if count > MOST_NAMED_PER_WRITE:
        raise InvalidArgumentError(
            f"{name} names {count} samples, expected at most {MOST_NAMED_PER_WRITE} in one call. Write them in several "
            f"calls of at most {MOST_NAMED_PER_WRITE} each, or without keys and groups.",
            field=name,
            metadata={"got": str(count), "limit": str(MOST_NAMED_PER_WRITE)},
        )


def check_unique(name: str, names: Sequence[str]) -> None:
    """Refuse names of which one comes twice."""
    if len(set(names)) != len(names):
        raise InvalidArgumentError(f"{name} has one twice: {list(names)}; name each once", field=name)


def check_name(what: str, name: str) -> None:
    """Refuse names that cannot be typed or printed."""
    if not name or len(name) > 512 or not name.isprintable():
        raise InvalidArgumentError(
            f"{what} is {name[:64]!r}; give 1 to 512 printable characters",
            field=what,
            metadata={"got": name[:64], "expected": "1 to 512 printable characters"},
        )


CONTROLLER_NAME_BYTES: Final = 8
"""First bytes of the id of a controller that keeps no state, the same at each of its starts; the others are new."""


def check_id(name: str, value: bytes, hint: str = "send 16 random bytes, the same over retries") -> None:
    """Refuse ids that are not 16 bytes; `hint` ends the message."""
    if len(value) != 16:
        raise InvalidArgumentError(
            f"{name} has {len(value)} bytes, expected 16; {hint}",
            field=name,
            metadata={"got": str(len(value)), "expected": "16"},
        )


def check_passed_on(name: str, value: bytes) -> None:
    """Refuse an id that was not made by the service: for one that is not known, so that those that are cost nothing."""
    check_id(name, value, "send it as the service answered it")
