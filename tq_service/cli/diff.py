"""`tq-service diff`: compares the metadata of two recorded steps."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.filesize import decimal

from tq_service.cli.options import Answer, AsJson, show, table
from tq_service.cli.replay import Epoch, Incarnation, Partition, Place, Task, with_recording

if TYPE_CHECKING:
    from tq_service.recording.comparing import StepDifference, StepFacts
    from tq_service.recording.layout import RecordedStep
    from tq_service.recording.reading import Asked, Recording

EXAMPLES = """\
  tq-service diff recording --task update_actor 11 12
  tq-service diff recording --task update_actor 12 12 --other other-run --json"""


def command(
    place: Place,
    first: Annotated[int, typer.Argument(min=0, help="batch_index of the first step.")],
    second: Annotated[int, typer.Argument(min=0, help="batch_index of the second step.")],
    *,
    task: Task = None,
    partition: Partition = None,
    epoch: Epoch = None,
    incarnation: Incarnation = None,
    other: Annotated[
        str | None, typer.Option(help="Recording of the second step. Default: the first step's recording.")
    ] = None,
    other_partition: Annotated[
        str | None, typer.Option(help="Partition of the second step. Default: the first step's partition.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Compare the metadata of two recorded steps: samples, lengths, balance, versions and plans."""
    from tq_service.recording.comparing import difference  # noqa: PLC0415  (as above)
    from tq_service.recording.reading import Asked  # noqa: PLC0415  (as above)

    asked = [
        Asked(
            task_name=task,
            batch_index=index,
            partition_id=name,
            epoch=epoch,
            incarnation=incarnation if other is None or index_of == 0 else None,
        )
        for index_of, (index, name) in enumerate(((first, partition), (second, other_partition or partition)))
    ]
    one = with_recording(place, asked[0], _one)
    two = with_recording(other or place, asked[1], _one)
    show(_shown(difference(one, two)), as_json)


async def _one(asked: Asked, recording: Recording) -> RecordedStep:
    return recording.one(asked)


def _shown(found: StepDifference) -> Answer:
    yield found
    first, second = found.first, found.second
    rows = [(name, one, two) for name, one, two in _rows(first, second) if one is not None or two is not None]
    yield table(f"min / median / mean / max if several, {_title(first)}, {_title(second)}", rows)
    yield ""
    yield from _words(found)


def _title(facts: StepFacts) -> str:
    return f"step {facts.batch_index} of {facts.partition_id}".replace(",", ";")


def _rows(one: StepFacts, two: StepFacts) -> Iterator[tuple[str, Any, Any]]:
    for name, of in (
        ("recorded (UTC)", lambda each: datetime.fromtimestamp(each.recorded_at, UTC).strftime("%Y-%m-%d %H:%M:%S")),
        ("samples", lambda each: each.sample_count),
        ("different samples", lambda each: each.distinct_count),
        ("groups", lambda each: each.group_count),
        ("left out", lambda each: each.dropped_count),
        ("ranks", lambda each: len(each.samples_per_rank)),
        ("samples per rank", lambda each: _numbers(each.samples_per_rank)),
        ("micro-batches per rank", lambda each: _numbers(each.packs_per_rank)),
        ("optimizer steps", lambda each: each.optimizer_steps),
        ("tokens per rank", lambda each: None if each.tokens_per_rank is None else _numbers(each.tokens_per_rank)),
        ("heaviest rank above mean", lambda each: None if each.imbalance is None else f"{each.imbalance:.2%}"),
        ("padding tokens", lambda each: each.padding_tokens),
        ("lengths", lambda each: each.lengths if each.lengths.count else None),
        ("published", lambda each: ", ".join(f"{name} {version}" for name, version in each.policies.items()) or None),
        ("staleness", lambda each: each.staleness if each.staleness.count else None),
        ("bytes of puts", lambda each: decimal(each.put_bytes)),
    ):
        of_step: Callable[[StepFacts], Any] = of
        yield name, of_step(one), of_step(two)
    for name in dict.fromkeys((*one.custom_meta, *two.custom_meta)):
        yield f"custom_meta {name}", _column(one.custom_meta.get(name)), _column(two.custom_meta.get(name))


def _column(facts: Any) -> str | None:
    if isinstance(facts, dict):
        return ", ".join(f"{value!r} {count} times" for value, count in facts.items()) or None
    return None if facts is None else str(facts)


def _numbers(values: Sequence[int]) -> str:
    shown = values if len(values) <= 8 else values[:8]
    return " ".join(f"{value:,}" for value in shown) + (" ..." if len(values) > len(shown) else "")


def _words(found: StepDifference) -> Iterator[str]:
    if found.matched_by:
        yield f"common samples, by {found.matched_by}: {found.common_count}, on another rank: {found.moved_count}"
        yield f"samples only in the first step: {found.only_first}"
        yield f"samples only in the second step: {found.only_second}"
    else:
        yield "samples cannot be matched, because the partitions differ and the samples do not have keys"
    for which, names in (("first", found.groups_only_first), ("second", found.groups_only_second)):
        if names.count:
            yield f"groups only in the {which} step: {names}"
    for name, changed in found.changed_columns.items():
        examples = ", ".join(f"{which}: {old!r} -> {new!r}" for which, old, new in changed.examples)
        yield f"custom_meta {name} differs for {changed.count} common samples ({examples})"
    for what, unequal in (("argument", found.request), ("field", found.fields), ("policy", found.policies)):
        pairs: dict[str, tuple[Any, Any]] = dict(unequal)
        for name, (old, new) in pairs.items():
            yield f"{what} {name}: {_or_none(old)} -> {_or_none(new)}"


def _or_none(value: Any) -> Any:
    return "none" if value is None else value
