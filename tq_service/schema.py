"""Types shared by all layers, such as field specs and sample states, and functions that check names and numbers."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, asdict, dataclass, field
from enum import IntEnum, StrEnum
from typing import TYPE_CHECKING, Final, Literal, get_args

from tq_service.errors import InvalidArgumentError


class Layout(StrEnum):
    """Layout of a field's rows.

    `AUTO` is for declarations only: an auto field is dense until its rows differ in shape, and jagged from then on.
    """

    AUTO = "auto"
    DENSE = "dense"
    JAGGED = "jagged"
    OBJECT = "object"


class Encoding(StrEnum):
    """Encoding of the rows of an object field."""

    TEXT = "text"
    MSGPACK = "msgpack"
    BYTES = "bytes"


class FieldScope(StrEnum):
    """Scope of a field's values: either each sample has a value, or all samples in a group share one."""

    ROW = "row"
    GROUP = "group"


class SampleState(StrEnum):
    """State of a sample. The state of a failed sample never changes again."""

    LIVE = "live"
    HELD = "held"
    FAILED = "failed"


# Types of arguments that accept an enum member or its string value.
LayoutGiven = Layout | Literal["auto", "dense", "jagged", "object"]
EncodingGiven = Encoding | Literal["text", "msgpack", "bytes"]
ScopeGiven = FieldScope | Literal["row", "group"]
StateGiven = SampleState | Literal["live", "held", "failed"]


class SampleConsumption(IntEnum):
    """Consumption state of a sample for a particular task. The numbers match the enum in the protos."""

    LEFT = 1
    LEASED = 2
    CONSUMED = 3
    DEAD_LETTERED = 4
    DROPPED = 5


class EvictionCode(IntEnum):
    """Reason why a sample or group was evicted. The numbers match the enum in the protos."""

    UNMATCHED = 1
    TOO_SMALL = 2
    LATE = 3
    OVERFLOW = 4


BatchUnit = Literal["sample", "group", "rollout"]
Blocks = Literal["aligned", "anywhere"]
EvictionReason = Literal["unmatched", "too_small", "late", "overflow"]
GivenBack = Literal["delivered", "trained", "published"]
OnLost = Literal["requeue", "fail", "remove"]
Overflow = Literal["wait", "drop_lowest"]
KeyMode = Literal["upsert", "new", "existing"]
Late = Literal["wait", "evict"]
ReleaseWhen = Literal["trained", "saved"]
RefillOutcome = Literal["refilled", "pending", "unknown", "used_up", "given_up"]
Unmatched = Literal["wait", "fail", "clear"]
ReadLayout = Literal["auto", "dense", "jagged"]
Operator = Literal["==", "!=", "<", "<=", ">", ">=", "in"]
Scalar = int | float | bool | str
DEFAULT_POLICY: Final = "default"
START_VERSION: Final = "start_version"
"""Name of the custom_meta column that stores the policy version published when the sample's slot was created."""

# Bytes per element, keyed by torch dtype name. Sub-byte dtypes are unsupported because rows may not end on a byte
# boundary.
DTYPE_SIZES: dict[str, int] = {
    "bool": 1, "uint8": 1, "int8": 1, "float8_e4m3fn": 1, "float8_e5m2": 1, "float8_e4m3fnuz": 1, "float8_e5m2fnuz": 1,
    "float8_e8m0fnu": 1, "uint16": 2, "int16": 2, "float16": 2, "bfloat16": 2,
    "uint32": 4, "int32": 4, "float32": 4, "complex32": 4,
    "uint64": 8, "int64": 8, "float64": 8, "complex64": 8, "complex128": 16,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Published:
    """A policy's published version plus an offset, for use as the right-hand side of a condition.

    Attributes:
        policy: name of the policy.
        offset: number added to the version. With ">=", an offset of -2 selects samples that are at most two versions
            old.
    """

    policy: str = DEFAULT_POLICY
    offset: int = 0


@dataclass(frozen=True, slots=True)
class FieldSpec:
    """The name, dtype, layout and row shape of a column.

    Attributes:
        name: name of the field, unique within the partition.
        dtype: name of a torch dtype, such as "float32" or "bfloat16", or "" for objects and for fields whose first put
            determines the dtype.
        layout: dense, jagged or object. Declarations may also use "auto", which is dense until rows differ in shape,
            and jagged from then on. If None, the partition's `default_layout` applies.
        row_shape: shape of a row, with -1 for ragged dimensions and () for scalars. If None, the first put determines
            the shape.
        encoding: how objects are encoded: as UTF-8 text, as raw bytes, or in msgpack, which can represent any object. A
            field declared as text or bytes rejects all other values. With None or msgpack, the field accepts any object
            and stores it in the encoding chosen by the put.
        write_once: whether each sample's value can be written only once. Until the value or the sample is cleared, a
            second write fails with AlreadyExistsError.
        scope: "row" if each sample has its own value, or "group" if all samples in a group share a value. `put_groups`
            stores a shared value, such as the image in a prompt, only once. Group fields must be declared when the
            partition is created.
    """

    name: str
    dtype: str = ""
    layout: Layout | None = None
    row_shape: tuple[int, ...] | None = None
    encoding: Encoding | None = None
    _: KW_ONLY
    write_once: bool = False
    scope: FieldScope = FieldScope.ROW

    if TYPE_CHECKING:  # the constructor also accepts enum values as text; attributes are always enum members

        def __init__(
            self,
            name: str,
            dtype: str = "",
            layout: LayoutGiven | None = None,
            row_shape: Sequence[int] | None = None,
            encoding: EncodingGiven | None = None,
            *,
            write_once: bool = False,
            scope: ScopeGiven = FieldScope.ROW,
        ) -> None: ...

    def __post_init__(self) -> None:
        if not self.name:
            raise InvalidArgumentError("a field has an empty name; specify a name for every field", field="name")
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
        if type(self.scope) is not FieldScope:
            self._check_scope()
        if self.encoding is not None and self.layout is not Layout.OBJECT:
            raise InvalidArgumentError(
                f"field {self.name!r}: encoding {self.encoding.value!r} applies only to objects, but the layout is "
                f"{self.layout or 'not given'}; set the layout to object",
                field="encoding",
                metadata={"field_name": self.name},
            )
        if self.dtype and self.dtype not in DTYPE_SIZES:
            raise InvalidArgumentError(
                f"field {self.name!r}: dtype {self.dtype!r} is unknown; use one of these torch dtypes: "
                f"{', '.join(sorted(DTYPE_SIZES))}",
                field="dtype",
                metadata={"field_name": self.name},
            )
        if self.row_shape is not None:
            object.__setattr__(self, "row_shape", tuple(int(size) for size in self.row_shape))

    def _check_scope(self) -> None:
        if self.scope is None:
            raise InvalidArgumentError(
                f"field {self.name!r}: scope is None; expected 'row' or 'group'. Omit scope for the default, 'row'",
                field="scope",
                metadata={"field_name": self.name},
            )
        self._check_word("scope", FieldScope)

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
        """Size of one element in bytes, or 1 for objects."""
        return DTYPE_SIZES[self.dtype] if self.dtype else 1

    @property
    def ragged_dims(self) -> tuple[int, ...]:
        """Dimensions in which rows may differ in size.

        The tuple is empty for a jagged field as long as all of its rows have the same shape.
        """
        return tuple(dim for dim, size in enumerate(self.row_shape or ()) if size < 0)

    def describe(self) -> str:
        """Return the spec as text for messages, such as `int64 jagged [-1]` or `object (text)`."""
        if self.layout is Layout.OBJECT:
            return f"object ({self.encoding or 'any encoding'})"
        shape = "any shape" if self.row_shape is None else str(list(self.row_shape))
        return f"{self.dtype or 'any dtype'} {self.layout or 'any layout'} {shape}"


@dataclass(frozen=True, slots=True)
class Admission:
    """Limit on a task's outstanding work in a partition. Puts that add samples wait until the limit permits them.

    A sample is outstanding from its insertion until its capacity is returned, which by default happens on delivery. The
    capacity is also returned if the sample fails, is cleared before delivery, is dead-lettered, or is skipped with its
    group.

    Attributes:
        task_name: name of the task to limit. Until the task's first claim, all samples are pending.
        most: maximum number of outstanding units, at least 1.
        unit: what `most` counts: samples, rollouts or groups. A sample without a rollout or group counts as a unit.
            Adding members to a group or rollout does not increase the count.
        given_back: event after which a unit is no longer outstanding. "delivered": the unit is delivered. "trained":
            the unit's batch has been trained on, or the unit's samples are acknowledged. "published": the next version
            of `policy` is published after the training or acknowledgement.
        policy: policy for `given_back="published"`, which waits for the policy's next version. The name is relative to
            the client's namespace.
        max_staleness: maximum number of versions that may be published after a sample's slot is created and before the
            sample is trained on. This setting also sets `most` to `(max_staleness + 1) * global_batch`, and
            `given_back` to "published". Batches are planned so that no sample exceeds this limit. Samples can then be
            created only with `acquire` or `claim(admit=)`. None means unbounded.
        global_batch: number of units that all ranks together consume per version. Used with `max_staleness`.
        late: with `max_staleness`, what happens to unfinished units that delay a batch. "wait": batches wait for these
            units. "evict": the units are evicted, even if a worker is processing them; see `claim(unmatched=,
            refill=)`.
        most_running: maximum number of held units, that is, units whose generation is in progress. When the limit is
            reached, `acquire`, `claim(admit=)` and puts of held samples wait until other units finish. A group counts
            as held while any of its samples is held. If `most_running` is 0, there is no limit.
        overflow: what happens to a put that would raise the number of outstanding units above `most`. "wait": the put
            waits. "drop_lowest": the put also clears the pending units with the lowest priority. The put never clears a
            unit that is held, leased, in a batch that ranks have yet to train on (`advance`), or in an incomplete
            group.
        priority_key: custom_meta column with each sample's priority, for `overflow="drop_lowest"`. The priority of a
            group or rollout is the mean of its samples' priorities. Units in which a sample has no priority are dropped
            last. Among units of equal priority, the oldest are dropped first. If `priority_key` is empty, the oldest
            units are dropped first.
        samples_per_insert: target ratio of deliveries to inserted samples. The task's batches wait if the ratio is too
            high, and puts wait if the ratio is too low. 0 means that the ratio is unbounded.
        min_size_to_sample: with `samples_per_insert`, the number of samples that must be inserted before the first
            batch. Only samples inserted later count toward the ratio. A value of 0 is treated as 1.
        error_buffer: with `samples_per_insert`, the maximum deviation from the ratio, as a number of deliveries.
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
    overflow: Overflow = "wait"
    priority_key: str = ""
    samples_per_insert: float = 0.0
    min_size_to_sample: int = 0
    error_buffer: int = 0

    def __post_init__(self) -> None:
        check_name("task_name", self.task_name)
        check_name("policy", self.policy)
        check_words: tuple[tuple[str, str, tuple[str, ...]], ...] = (
            ("unit", self.unit, get_args(BatchUnit)),
            ("given_back", self.given_back, get_args(GivenBack)),
            ("late", self.late, get_args(Late)),
            ("overflow", self.overflow, get_args(Overflow)),
        )
        for name, word, words in check_words:
            if word not in words:
                raise InvalidArgumentError(
                    f"{name} in the admission of task {self.task_name!r} is {word!r}; expected one of "
                    f"{', '.join(words)}",
                    field="admissions",
                )
        self._set_by_staleness()
        if self.most < 1:
            raise InvalidArgumentError(
                f"most in the admission of task {self.task_name!r} is {self.most}; expected 1 or more. To have most "
                "calculated, set max_staleness and global_batch instead",
                field="admissions",
            )
        check_range("most_running", self.most_running, 0, hint="; 0 means no limit")
        self._check_replay()

    def _check_replay(self) -> None:
        """Raise InvalidArgumentError if the replay-buffer options are not valid together."""
        ratio, least = self.samples_per_insert, max(1.0, self.samples_per_insert)
        given_ratio = self.min_size_to_sample != 0 or self.error_buffer != 0
        for is_wrong, name, expected in (
            (
                self.priority_key and self.overflow == "wait",
                "priority_key",
                "no value unless overflow is 'drop_lowest'",
            ),
            (
                self.max_staleness is not None and (ratio or self.overflow != "wait"),
                "max_staleness",
                "no value with overflow 'drop_lowest' or samples_per_insert, which deliver samples repeatedly",
            ),
            (not 0 <= ratio < math.inf, "samples_per_insert", "a positive finite number, or 0 for no limit"),
            (self.min_size_to_sample < 0, "min_size_to_sample", "0 or more"),
            (given_ratio and not ratio, "samples_per_insert", "a number above 0 with error_buffer"),
            (
                ratio and self.error_buffer < least,
                "error_buffer",
                f"{least:g} or more with samples_per_insert {ratio:g}",
            ),
        ):
            if is_wrong:
                raise InvalidArgumentError(
                    f"{name} in the admission of task {self.task_name!r} is {getattr(self, name)!r}; expected "
                    f"{expected}",
                    field="admissions",
                )
        object.__setattr__(self, "min_size_to_sample", max(1, self.min_size_to_sample) if ratio else 0)

    def _set_by_staleness(self) -> None:
        """Set the values that `max_staleness` implies, and reject explicit values that contradict them."""
        whose = f"in the admission of task {self.task_name!r}"
        if self.max_staleness is None:
            for name, value in (("global_batch", self.global_batch), ("late", self.late)):
                if value not in {0, "wait"}:
                    raise InvalidArgumentError(
                        f"{name} {whose} is {value!r}, but max_staleness is not set; set both, or set most instead",
                        field="admissions",
                    )
            return
        if self.max_staleness < 0 or self.global_batch < 1:
            raise InvalidArgumentError(
                f"max_staleness {whose} is {self.max_staleness}, and global_batch is {self.global_batch}; expected a "
                "max_staleness of at least 0 versions, and a global_batch of at least 1 unit across all ranks",
                field="admissions",
            )
        most = (self.max_staleness + 1) * self.global_batch
        for name, given, implied, unset in (
            ("most", self.most, most, 0), ("given_back", self.given_back, "published", "delivered")
        ):  # fmt: skip
            if given not in (implied, unset):
                raise InvalidArgumentError(
                    f"{name} {whose} is {given!r}, but its max_staleness implies {implied!r}; omit {name}",
                    field="admissions",
                )
            object.__setattr__(self, name, implied)


@dataclass(frozen=True, slots=True)
class Release:
    """Rules for clearing a partition's samples automatically.

    A sample is cleared by the same change that makes it due for release. Released samples are counted by reason. All
    samples in a group are released together. A sample is never released while it is held, or leased by a worker of any
    task. After a release, keys and group names can be reused, just as after a clear.

    Attributes:
        when: event that completes a sample consumed by ranks: "trained", or "saved" if a trainer checkpoint must cover
            the sample's batch (`advance`). A queue worker completes a sample by acknowledging it. A sample that failed
            or was skipped with its group also counts as completed. The sample is released once all of `tasks` have
            completed it. If None, consumption does not release samples.
        tasks: tasks that must complete a sample before it is released. Queue claims for these tasks must be leased. If
            this list is empty, every task declared in the partition's `tasks` must complete the sample.
        ttl_seconds: time after which a sample is released, even if tasks have not completed it. The time is measured
            from when the sample is put or becomes live. It restarts when the service restarts. A sample is kept for as
            long as one of `tasks` has yet to train on or save the sample's batch. If None, samples do not expire.
    """

    when: ReleaseWhen | None = None
    tasks: Sequence[str] = ()
    ttl_seconds: float | None = None

    def __post_init__(self) -> None:
        problem = ""
        if self.when not in {None, *get_args(ReleaseWhen)}:
            problem = f"when is {self.when!r}; expected one of {', '.join(get_args(ReleaseWhen))}"
        elif self.ttl_seconds is not None and not 0 < self.ttl_seconds < math.inf:
            problem = f"ttl_seconds is {self.ttl_seconds}; expected more than 0"
        elif self.when is None and self.ttl_seconds is None:
            problem = "neither when nor ttl_seconds is given; set at least one of them"
        elif self.when is None and self.tasks:
            problem = f"tasks is {', '.join(self.tasks)}, but when is not set; set when, or omit tasks"
        if problem:
            raise InvalidArgumentError(f"release: {problem}", field="release")
        for name in self.tasks:
            check_name("release", name)
        check_unique("release", self.tasks)
        object.__setattr__(self, "tasks", tuple(sorted(self.tasks)))


@dataclass(frozen=True, slots=True)
class Admit:
    """Request for slots that rollout workers receive together with the prompts they claim; see `claim(admit=)`.

    Attributes:
        partition_id: name of the existing partition that receives the slots.
        group_size: number of slots per prompt. If this number is greater than 1, the slots form a group named after the
            prompt's key. If this number is 1 or None, each prompt gets a single slot, which has the same key as the
            prompt.
        on_lost: what happens to slots that are still held when the lease expires. "remove": the slots are removed, and
            their prompts can be claimed again. "requeue": workers can claim the slots with `claim(held=True)`. "fail":
            the slots fail. With "requeue" and "fail", the prompts themselves count as done.
        policy: policy whose published version is stored as `start_version` in the slots' custom_meta. If None, the
            policy of the admission with a `max_staleness` is used. If no admission sets `max_staleness`,
            `start_version` is not set.
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
            raise InvalidArgumentError(f"on_lost is {self.on_lost!r}; expected one of {words}", field="on_lost")

    @property
    def slot_count(self) -> int:
        """Number of slots per prompt."""
        return 1 if self.group_size is None else self.group_size


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTotals:
    """Totals for an optimizer step, summed over all ranks.

    Attributes:
        sample_count: number of samples. A sample that is delivered several times is counted each time.
        rollout_count: number of rollouts. A sample without a rollout counts as a rollout.
        group_count: number of groups. A rollout or sample without a group counts as a group. A group that is split
            across several steps is counted in each step.
        token_count: number of tokens, computed from pack lengths if available, otherwise from sample lengths. The count
            is None if any length is unknown.
        sums: sum of each requested custom_meta column.
    """

    sample_count: int
    rollout_count: int
    group_count: int
    token_count: int | None = None
    sums: Mapping[str, float] = field(default_factory=dict)


_CONSUMED: Final = ("consumed_count", "kept_count")


@dataclass(frozen=True, slots=True, kw_only=True)
class EndCounts:
    """Sample counts by outcome, taken when a task reached the end of a partition.

    All ranks receive the same counts.

    Attributes:
        consumed_count: number of samples that the task consumed in this epoch, including cleared samples.
        cleared_count: number of samples that were cleared before they were delivered to the task.
        failed_count: number of samples that failed before they were delivered to the task.
        dead_lettered_count: number of samples delivered `max_deliveries` times without being acknowledged, including
            cleared samples.
        excluded_count: number of samples excluded by the task's `where`.
        in_incomplete_groups_count: number of samples whose groups can no longer become complete.
        left_over_count: number of ready samples that were never planned. Either the last batch was too short
            (`drop_last`), or the sampler omitted these samples.
        overlong_count: number of samples that the sampler dropped from a batch, for example with `overlong="drop"`,
            including cleared samples.
        kept_count: number of samples in `consumed_count` that were consumed in earlier epochs, before
            `reset_consumption(keep_consumed=True)` began this epoch.
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
        """Counts of samples that the task will never receive, keyed by attribute name. Zero counts are omitted."""
        return {name: count for name, count in asdict(self).items() if count and name not in _CONSUMED}

    @property
    def skipped_count(self) -> int:
        """Number of samples that the task will never receive."""
        return sum(self.skipped_counts.values())


# Stateless validation of requests

MOST_SAMPLES: Final = 2**24
"""Maximum number of samples that one request may write or claim."""
MOST_NAMED_PER_WRITE: Final = 2**14
"""Maximum number of samples with keys or groups in a single write request."""
LARGEST_EXACT: Final = 1 << 53
"""Largest integer n such that a float can represent every integer from 0 to n exactly."""
WHOLE_EXTENT: Final = (1 << 32) - 1
"""Extent length that stands for the entire row."""
_LARGEST: Final = sys.float_info.max


def check_range(name: str, value: float, least: int, most: float = _LARGEST, hint: str = "") -> None:
    """Raise InvalidArgumentError if a number is out of range. `hint` is appended to the message."""
    if not least <= value <= most:  # also true for NaN and infinity
        expected = f"{least} or more" if most == _LARGEST else f"{least} to {most}"
        raise InvalidArgumentError(
            f"{name} is {value}; expected {expected}{hint}",
            field=name,
            metadata={"got": str(value), "expected": expected},
        )


def check_named_rows(name: str, count: int) -> None:
    """Reject a write that contains too many samples with keys or groups.

    Such a write would block the event loop for too long.
    """
    if count > MOST_NAMED_PER_WRITE:
        raise InvalidArgumentError(
            f"{name} contains {count} samples; expected at most {MOST_NAMED_PER_WRITE} per call. Write them in several "
            f"calls of at most {MOST_NAMED_PER_WRITE} samples each, or without keys and groups.",
            field=name,
            metadata={"got": str(count), "limit": str(MOST_NAMED_PER_WRITE)},
        )


def check_unique(name: str, names: Sequence[str]) -> None:
    """Raise InvalidArgumentError if a list contains any name more than once."""
    if len(set(names)) != len(names):
        raise InvalidArgumentError(f"{name} contains duplicates: {list(names)}; list each name only once", field=name)


def check_name(what: str, name: str) -> None:
    """Raise InvalidArgumentError if a name is empty, too long or not printable."""
    if not name or len(name) > 512 or not name.isprintable():
        raise InvalidArgumentError(
            f"{what} is {name[:64]!r}; expected 1 to 512 printable characters",
            field=what,
            metadata={"got": name[:64], "expected": "1 to 512 printable characters"},
        )


CONTROLLER_NAME_BYTES: Final = 8
"""Number of leading bytes in a controller id that identify the controller and stay the same across restarts.

A controller with persistent state keeps its entire id across restarts. If a controller has no persistent state, the
remaining bytes of its id are random.
"""


def check_id(name: str, value: bytes, hint: str = "send 16 random bytes, and the same bytes in retries") -> None:
    """Raise InvalidArgumentError if an id is not 16 bytes long. `hint` is appended to the message."""
    if len(value) != 16:
        raise InvalidArgumentError(
            f"{name} has {len(value)} bytes, expected 16; {hint}",
            field=name,
            metadata={"got": str(len(value)), "expected": "16"},
        )


def check_passed_on(name: str, value: bytes) -> None:
    """Raise InvalidArgumentError if an id is malformed. Callers must send ids exactly as the service returned them."""
    check_id(name, value, "send the id as returned by the service")
