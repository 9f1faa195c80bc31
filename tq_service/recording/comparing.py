"""Statistics of a recorded step and differences between two steps, both computed from metadata alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from tq_service.custom_meta import MetaColumn
from tq_service.recording.layout import RecordedStep
from tq_service.recording.reading import parts_of
from tq_service.state.plan import Indexes, differences, shown
from tq_service.v1 import metadata_pb2
from tq_service.wire.metadata import decode_meta_columns, decode_spec, read_indexes

_LENGTHS: Final = "total_lengths"
_VERSIONS: Final = ("start_version", "version")
_MOST_NAMED: Final = 20
_MOST_TEXTS: Final = 5
_QUANTILES: Final = (0.0, 0.5, 1.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """The distribution of a numeric value over the samples of a step.

    Attributes:
        count: number of samples that have a value.
        least, median, mean, most: minimum, median, mean and maximum, or None if no sample has a value.
    """

    count: int
    least: float | None = None
    median: float | None = None
    mean: float | None = None
    most: float | None = None

    @classmethod
    def of(cls, values: NDArray[Any]) -> Spread:
        """Return the distribution of the given numbers or booleans."""
        if not values.size:
            return cls(count=0)
        least, median, most = np.quantile(values.astype(np.float64), _QUANTILES).tolist()
        return cls(count=int(values.size), least=least, median=median, mean=float(values.mean()), most=most)

    def __str__(self) -> str:
        if self.least is None or self.median is None or self.mean is None or self.most is None:
            return "no values"
        return f"{self.least:g} / {self.median:g} / {self.mean:.6g} / {self.most:g}"


@dataclass(frozen=True, slots=True, kw_only=True)
class StepFacts:
    """Statistics of a recorded step.

    Attributes:
        number: number of the step in its recording.
        task_name, partition_id, incarnation, epoch, batch_index: identity of the recorded batch.
        recorded_at: time of recording, in seconds since 1970.
        version: version of the service that recorded the step.
        sample_count: number of delivered samples, including repeated samples.
        distinct_count: number of distinct delivered samples.
        group_count: number of named groups.
        dropped_count: number of samples that the plan dropped.
        samples_per_rank: number of samples assigned to each rank.
        packs_per_rank: number of packs or micro-batches per rank.
        optimizer_steps: number of optimizer steps.
        tokens_per_rank: number of tokens per rank, or None if lengths are unknown.
        imbalance: token count of the most heavily loaded rank, divided by the mean over all ranks, minus 1. None if
            lengths are unknown.
        padding_tokens: number of padding tokens in all packs.
        lengths: distribution of sample lengths, in tokens.
        policies: published version of each policy, by name.
        staleness: distribution of the samples' staleness: the published version minus `start_version` (or `version`).
        fields: description of each field, by name.
        custom_meta: distribution of the values in each numeric column, and counts of the most frequent values in each
            other column.
        put_bytes: total size, in bytes, of the puts that the step references.
    """

    number: int
    task_name: str
    partition_id: str
    incarnation: str
    epoch: int
    batch_index: int
    recorded_at: float
    version: str
    sample_count: int
    distinct_count: int
    group_count: int
    dropped_count: int
    samples_per_rank: tuple[int, ...]
    packs_per_rank: tuple[int, ...]
    optimizer_steps: int
    tokens_per_rank: tuple[int, ...] | None
    imbalance: float | None
    padding_tokens: int
    lengths: Spread
    policies: Mapping[str, int]
    staleness: Spread
    fields: Mapping[str, str]
    custom_meta: Mapping[str, Spread | Mapping[str, int]]
    put_bytes: int


class StepSamples:
    """The samples of a recorded step, with their metadata."""

    def __init__(self, step: RecordedStep) -> None:
        self.step = step
        meta = metadata_pb2.BatchMeta.FromString(step.meta)
        self.indexes: Indexes = read_indexes(meta)
        count = self.indexes.size
        self.keys: list[str] = list(meta.keys) or [""] * count
        self.groups: list[str] = list(meta.groups) or [""] * count
        self.columns: dict[str, MetaColumn] = {
            column.name: column for column in decode_meta_columns(meta.custom_meta, count)
        }
        self.fields = {spec.name: decode_spec(spec).describe() for spec in meta.fields}
        self.ranks: Indexes = np.repeat(np.arange(step.dp_size), step.plan.sizes)

    def lengths(self) -> Indexes | None:
        """Return the samples' token counts, from the plan or the column `total_lengths`, or None if unknown."""
        lengths = np.zeros(self.indexes.size, np.int64)
        start, is_known = 0, True
        for part in parts_of(self.step):
            for pack in (pack for packs in part.steps for pack in packs):
                if pack.lengths is None:
                    is_known = False
                else:
                    lengths[start + pack.positions] = pack.lengths
            start += part.rows.size
        if is_known and self.indexes.size:
            return lengths
        column = self.columns.get(_LENGTHS)
        if column is None or column.values.dtype.kind not in "if" or not column.present.all():
            return None
        return column.values.astype(np.int64)

    def staleness(self) -> Spread:
        """Return the distribution of the samples' staleness, in versions."""
        published = [version for _, version in self.step.policies]
        column = next((self.columns[name] for name in _VERSIONS if name in self.columns), None)
        if column is None or column.values.dtype.kind not in "if" or len(published) != 1:
            return Spread(count=0)
        return Spread.of(published[0] - column.values[column.present])

    def facts(self) -> StepFacts:
        """Return the statistics of the step."""
        step, lengths = self.step, self.lengths()
        parts = list(parts_of(step))
        tokens = imbalance = None
        if lengths is not None:
            tokens = tuple(int(lengths[self.ranks == rank].sum()) for rank in range(step.dp_size))
            imbalance = max(tokens) * len(tokens) / sum(tokens) - 1 if sum(tokens) else 0.0
        return StepFacts(
            number=step.number,
            task_name=step.task_name,
            partition_id=step.partition_id,
            incarnation=step.incarnation.hex(),
            epoch=step.epoch,
            batch_index=step.batch_index,
            recorded_at=step.recorded_at,
            version=step.version,
            sample_count=int(self.indexes.size),
            distinct_count=int(np.unique(self.indexes).size),
            group_count=len(set(filter(None, self.groups))),
            dropped_count=step.plan.dropped_count,
            samples_per_rank=step.plan.sizes,
            packs_per_rank=tuple(sum(map(len, part.steps)) for part in parts),
            optimizer_steps=max((len(part.steps) for part in parts), default=0),
            tokens_per_rank=tokens,
            imbalance=imbalance,
            padding_tokens=sum(pack.padding_tokens for part in parts for packs in part.steps for pack in packs),
            lengths=Spread(count=0) if lengths is None else Spread.of(lengths),
            policies=dict(step.policies),
            staleness=self.staleness(),
            fields=self.fields,
            custom_meta={name: _column_facts(column) for name, column in self.columns.items()},
            put_bytes=sum(place.record.size_bytes for place in step.puts),
        )


def _column_facts(column: MetaColumn) -> Spread | Mapping[str, int]:
    if column.values.dtype.kind == "O" or not column.present.any():
        given = zip(column.objects(), column.has_value.tolist(), strict=True)
        return dict(Counter(str(value) for value, has_value in given if has_value).most_common(_MOST_TEXTS))
    return Spread.of(column.values[column.present])


@dataclass(frozen=True, slots=True, kw_only=True)
class Names:
    """A list of names or indexes of samples or groups, truncated to the first few entries.

    Attributes:
        count: total number of samples or groups.
        first: the first few names or indexes of the samples or groups.
    """

    count: int
    first: tuple[str, ...] = ()

    @classmethod
    def of(cls, names: Sequence[Any]) -> Names:
        """Count the names and keep only the first few."""
        return cls(count=len(names), first=tuple(map(str, names[:_MOST_NAMED])))

    def __str__(self) -> str:
        more = f" and {self.count - len(self.first)} more" if self.count > len(self.first) else ""
        return f"{self.count}: {', '.join(self.first)}{more}" if self.count else "0"


@dataclass(frozen=True, slots=True, kw_only=True)
class ChangedColumn:
    """The differences in one custom_meta column between two steps, for samples that both steps contain.

    Attributes:
        count: number of samples whose values differ.
        examples: name and both values of a few differing samples.
    """

    count: int
    examples: tuple[tuple[str, Any, Any], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepDifference:
    """The differences between two recorded steps.

    Attributes:
        first, second: statistics of the two steps.
        matched_by: attribute by which samples are matched, "key" or "global_index". If the partitions differ and some
            samples have no key, samples cannot be matched, and the value is empty.
        common_count: number of samples that are in both steps.
        only_first, only_second: samples that are only in the first step, and samples that are only in the second step.
        groups_only_first, groups_only_second: groups that are only in the first step, and groups that are only in the
            second step.
        moved_count: number of common samples assigned to different ranks in the two steps.
        changed_columns: differences in the custom_meta of common samples, by column name.
        request: claim arguments that differ, each with both values.
        fields: fields that differ, each with its descriptions in both steps.
        policies: policies whose published versions differ between the steps, and both versions of each.
    """

    first: StepFacts
    second: StepFacts
    matched_by: str
    common_count: int
    only_first: Names
    only_second: Names
    groups_only_first: Names
    groups_only_second: Names
    moved_count: int
    changed_columns: Mapping[str, ChangedColumn]
    request: Mapping[str, tuple[str, str]]
    fields: Mapping[str, tuple[str | None, str | None]]
    policies: Mapping[str, tuple[int | None, int | None]]


def difference(first: RecordedStep, second: RecordedStep) -> StepDifference:
    """Return the differences between two recorded steps."""
    one, other = StepSamples(first), StepSamples(second)
    has_keys = all(one.keys) and all(other.keys)
    is_same_partition = first.incarnation == second.incarnation
    matched_by = "global_index" if is_same_partition else "key" if has_keys else ""
    names = [_names(samples, matched_by) for samples in (one, other)]
    places = [dict(zip(each, range(len(each)), strict=True)) for each in names]
    common = [name for name in places[0] if name in places[1]] if matched_by else []
    at = [np.array([place[name] for name in common], np.int64) for place in places]
    groups = [dict.fromkeys(filter(None, samples.groups)) for samples in (one, other)]
    specs = (first.batch_spec, second.batch_spec)
    requested = differences(*specs) if None not in specs else ()
    return StepDifference(
        first=one.facts(),
        second=other.facts(),
        matched_by=matched_by,
        common_count=len(common),
        only_first=Names.of([name for name in places[0] if name not in places[1]]),
        only_second=Names.of([name for name in places[1] if name not in places[0]]),
        groups_only_first=Names.of([name for name in groups[0] if name not in groups[1]]),
        groups_only_second=Names.of([name for name in groups[1] if name not in groups[0]]),
        moved_count=int(np.count_nonzero(one.ranks[at[0]] != other.ranks[at[1]])),
        changed_columns=dict(_changed(one, other, common, at)),
        request={name: (shown(old), shown(new)) for name, old, new in requested},
        fields=_unequal(one.fields, other.fields),
        policies=_unequal(dict(first.policies), dict(second.policies)),
    )


def _names(samples: StepSamples, matched_by: str) -> list[Any]:
    return samples.keys if matched_by == "key" else samples.indexes.tolist()


def _changed(
    one: StepSamples, other: StepSamples, common: Sequence[Any], at: Sequence[Indexes]
) -> Iterator[tuple[str, ChangedColumn]]:
    """Yield the custom_meta columns whose values differ for at least one common sample."""
    for name in dict.fromkeys((*one.columns, *other.columns)):
        values = [_values(samples, name, some) for samples, some in zip((one, other), at, strict=True)]
        changed = [
            (str(which), old, new)
            for which, old, new in zip(common, *values, strict=True)
            if old != new and not (old != old and new != new)  # noqa: PLR0124  (NaN)
        ]
        if changed:
            yield name, ChangedColumn(count=len(changed), examples=tuple(changed[:_MOST_TEXTS]))


def _values(samples: StepSamples, name: str, at: Indexes) -> list[Any]:
    column = samples.columns.get(name)
    if column is None:
        return [None] * at.size
    chosen = column.at(at)
    return [
        value if has_value else None
        for value, has_value in zip(chosen.objects(), chosen.has_value.tolist(), strict=True)
    ]


def _unequal(one: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    return {
        name: (one.get(name), other.get(name))
        for name in dict.fromkeys((*one, *other))
        if one.get(name) != other.get(name)
    }
