"""`tq-service status`: shows a running service with its partitions and tasks, and explains why calls are waiting.

The output is JSON, or text with a header followed by partitions and their tasks. Lines wider than the terminal are
wrapped. Partition and task names are never truncated.
"""

from __future__ import annotations

import logging
import shutil
import sys
import textwrap
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import chain
from typing import TYPE_CHECKING, Annotated, Any, Final, TypeAlias

import typer
from rich.filesize import decimal

from tq_service.cli.options import Partitions, console, open_client, print_json, with_service
from tq_service.errors import DeadlineError, PartitionNotFoundError, TqError, UnavailableError, nearest
from tq_service.results import (
    ControllerStatus,
    PartitionDescription,
    PartitionWait,
    RecordingStatus,
    ServiceStatus,
    TaskStatus,
)

if TYPE_CHECKING:
    from tq_service.client import Client

_ANSWER_SECONDS = 5.0
_NO_SCREEN: Final = 1 << 30  # height that does not limit the output

EXAMPLES = """\
  tq-service status
  tq-service status train@3 --address controller:50051
  tq-service status --prefix train@ --watch 2
  tq-service status --json | jq '.partitions[].tasks'"""


@with_service
def command(
    partitions: Partitions = None,
    prefix: Annotated[
        str, typer.Option(help="Show only partitions whose names begin with this prefix.", show_default=False)
    ] = "",
    watch: Annotated[
        float | None,
        typer.Option(
            "--watch",
            "-w",
            metavar="SECONDS",
            min=0.1,
            help="Seconds between refreshes of the status; on a terminal, each refresh replaces the previous status.",
            show_default=False,
        ),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print JSON instead of text; with --watch, print one line per update.")
    ] = False,
    **service: Any,
) -> None:
    """Show the status of a service, its partitions and tasks, and the reasons why calls are waiting."""
    with open_client(**service) as client:
        statuses = _statuses(client, partitions or (), prefix, watch)
        if watch is not None and not as_json and _is_screen():
            _show_on_screen(client.address, statuses)
            return
        for status in statuses:
            if isinstance(status, TqError):
                typer.echo(f"error: {status.message}; retrying", err=True)
            elif as_json:
                print_json(as_document(status), indent=2 if watch is None else None)
            else:
                typer.echo("\n".join(fitting(header_of(status, client.address), *blocks_of(status), _NO_SCREEN)))
                if watch is not None:
                    typer.echo()  # flush, so that a program reading from a pipe receives each status immediately


def read(client: Client, names: list[str] | tuple[str, ...], prefix: str) -> ServiceStatus:
    """Return the status of the given partitions, or of all partitions whose names begin with `prefix`.

    Args:
        client: client connected to the service.
        names: names of the partitions. If empty, partitions are selected by `prefix`.
        prefix: prefix of partition names; used only if `names` is empty.

    Raises:
        PartitionNotFoundError: a partition in `names` neither exists nor has waiting calls.
    """
    if not names:
        return client.status(prefix)
    shown = [client.status(name) for name in dict.fromkeys(names)]
    partitions, waits = [], []
    for name, status in zip(dict.fromkeys(names), shown, strict=True):
        there = [each for each in status.partitions if each.summary.partition_id == name]
        waiting = [each for each in status.waits if each.partition_id == name]
        if not there and not waiting:
            known = [each.partition_id for each in client.list_partitions()]
            raise PartitionNotFoundError(
                f"partition {name!r} does not exist; {nearest(name, known)}", metadata={"partition_id": name}
            )
        partitions += there
        waits += waiting
    return replace(shown[0], partitions=tuple(partitions), waits=tuple(waits))


def _is_screen() -> bool:
    """Return whether stdout is a terminal on which each status can overwrite the previous one."""
    return sys.stdout.isatty() and not console().is_dumb_terminal


def _statuses(client: Client, names: Any, prefix: str, seconds: float | None) -> Iterator[ServiceStatus | TqError]:
    """Yield the status once, or every `seconds` seconds. If a repeated read fails, yield the error instead."""
    while True:
        try:
            if seconds is not None:
                client.health(timeout=_ANSWER_SECONDS)  # reports outages immediately, because it does not retry
            yield read(client, names, prefix)
        except (UnavailableError, DeadlineError, PartitionNotFoundError) as error:
            if seconds is None:
                raise
            yield error
        if seconds is None:
            return
        time.sleep(seconds)


def _show_on_screen(address: str, statuses: Iterator[ServiceStatus | TqError]) -> None:
    """Redraw the screen with each new status. During an outage, keep the last status on the screen."""
    from rich.live import Live  # noqa: PLC0415  (not needed by --json)
    from rich.text import Text  # noqa: PLC0415  (not needed by --json)

    logging.getLogger("tq_service").propagate = False  # the client's log lines would corrupt the display
    screen = console()
    header, heading, blocks, away_since = ["waiting for the first response"], "", list[Any](), None
    with Live(console=screen, auto_refresh=False, vertical_overflow="crop") as live:
        for status in statuses:
            note = ""
            if isinstance(status, PartitionNotFoundError):
                blocks, note = [], status.message
            elif isinstance(status, TqError):
                away_since = away_since or time.monotonic()
                away, message = time.monotonic() - away_since, status.message.partition(";")[0]
                note = f"reconnecting for {away:.0f} s, showing the last status: {message}"
            else:
                header, away_since = header_of(status, address), None
                heading, blocks = blocks_of(status, screen.width)
            height = screen.height if screen.is_terminal else _NO_SCREEN
            lines = fitting([*header, *([note] if note else [])], heading, blocks, height)
            live.update(Text("\n".join(lines), no_wrap=True, overflow="fold"), refresh=True)


_LEAST_WIDTH: Final = 60
_MOST_POLICIES: Final = 8  # maximum number of policies to list in the header
_MOST_NAME: Final = 24  # longer task names are printed on a separate line
_PIPED_COLUMNS: Final = 80
_LEAST_RATE: Final = 0.05
_Row: TypeAlias = tuple[str, str, str, str]
_TITLES: Final = ("TASK", "DELIVERED", "RATE", "WAITING FOR")


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """The lines of output that show one partition.

    Attributes:
        lines: lines of text.
        urgency: display priority. If not all blocks fit on the screen, blocks with lower numbers take precedence. 0
            means that calls are waiting, 1 that samples are being delivered, 2 that some tasks are incomplete, and 3
            that all tasks are complete.
    """

    lines: tuple[str, ...]
    urgency: int


def as_document(status: ServiceStatus) -> dict[str, Any]:
    """Return the status as a JSON document. Each partition's object directly contains the fields of its summary."""
    document = asdict(status)
    document["partitions"] = [{**each.pop("summary"), **each} for each in document["partitions"]]
    return document


def header_of(status: ServiceStatus, address: str) -> list[str]:
    """Return the header lines that describe the service itself."""
    service, storages = status.service, status.own_storages
    used = sum(each.used_bytes for each in storages)
    quotas = [each.max_bytes for each in storages]
    quota = "no quota" if None in quotas else decimal(sum(each or 0 for each in quotas))
    silent = sum(each.is_silent for each in storages)
    where = f" in {service.data_dir}" if service.data_dir else ""
    security = f"tls {_on(service.tls)}, tokens {_on(service.auth)}"
    lines = [
        f"tq-service {service.version}  {address}  up {span(service.uptime_seconds)}  "
        f"instance {service.instance_id.hex()[:8]}",
        f"durability {service.durability}{where}  {security}",
        f"storage {decimal(used)} of {quota} in {len(storages)} storage service{'s' * (len(storages) != 1)}"
        + (f", {silent} silent" if silent else ""),
        *_mirror_lines(status),
        *_recording_lines(service.recording),
        *map(_controller_line, status.controllers),
        *(
            f"policy {each.policy} at version {each.version:,}, published {span(each.published_ago_seconds)} ago"
            for each in status.policies[:_MOST_POLICIES]
        ),
    ]
    if (others := len(status.policies) - _MOST_POLICIES) > 0:
        lines.append(f"{others} other policies")
    return [part for line in lines for part in _wrapped(line, terminal_width())]


def _recording_lines(recording: RecordingStatus | None) -> Iterator[str]:
    """Yield a line about the recording if the service records batches."""
    if recording is not None:
        state = "" if recording.is_recording else f"; STOPPED: {recording.error or 'an error'}"
        skipped = f", {recording.skipped_step_count:,} skipped" if recording.skipped_step_count else ""
        yield (
            f"recording {recording.step_count:,} steps, {decimal(recording.stored_bytes)}{skipped}, "
            f"in {recording.place or 'an undisclosed place'}{state}"
        )


def _mirror_lines(status: ServiceStatus) -> Iterator[str]:
    """If any storage service has a mirror, yield lines about mirrors and adopted puts."""
    mirrors = [each.mirror for each in status.storages if each.mirror is not None]
    if not mirrors:
        return
    own = [each.mirror.is_reachable for each in status.own_storages if each.mirror is not None]
    unmirrored = decimal(sum(mirror.unmirrored_bytes for mirror in mirrors))
    short = _puts(sum(mirror.short_put_count for mirror in mirrors))
    if False in own:
        answers = f"mirror does not answer {own.count(False)} of {len(own)} storage services"
    else:
        answers = "mirror answers" if True in own else "mirror not contacted yet"
    spilled_bytes = sum(mirror.spilled_bytes for mirror in mirrors)
    spilled = f", {decimal(spilled_bytes)} mirror-only" if spilled_bytes else ""
    yield f"{answers}, {unmirrored} unmirrored, {short} lacking copies{spilled}"
    adopted = [each for each in status.storages if each.is_adopted]
    if adopted:
        unfetched_count = sum(mirror.unfetched_put_count for mirror in mirrors)
        puts = _puts(sum(each.put_count for each in adopted))
        yield f"{puts} taken over from lost storage services, {unfetched_count:,} not fetched yet"


def _puts(count: int) -> str:
    return f"{count:,} put{'s' * (count != 1)}"


def _controller_line(controller: ControllerStatus) -> str:
    if controller.is_leader:
        return f"controller {controller.name} at {controller.address}  leader, epoch {controller.epoch}"
    return f"controller {controller.name} at {controller.address}  standby, {controller.lag_count} records behind"


def _on(flag: bool) -> str:
    return "on" if flag else "off"


def span(seconds: float) -> str:
    """Format a number of seconds with its two largest units, such as "3h5m"."""
    days, rest = divmod(int(seconds), 86_400)
    hours, rest = divmod(rest, 3_600)
    minutes, left = divmod(rest, 60)
    parts = [(days, "d"), (hours, "h"), (minutes, "m"), (left, "s")]
    shown = [f"{count}{unit}" for count, unit in parts if count][:2]
    return "".join(shown) or "0s"


def terminal_width() -> int:
    """Return the maximum line length: the width of the terminal, but at least `_LEAST_WIDTH`."""
    return max(_LEAST_WIDTH, shutil.get_terminal_size((_PIPED_COLUMNS, 24)).columns)


def blocks_of(status: ServiceStatus, width: int | None = None) -> tuple[str, list[Block]]:
    """Return the line of column titles, and one block for each partition, sorted by partition name.

    Partitions that do not exist yet are included if calls are waiting for them.
    """
    width = max(_LEAST_WIDTH, width or terminal_width())
    waits: dict[str, list[PartitionWait]] = {}
    for wait in status.waits:
        waits.setdefault(wait.partition_id, []).append(wait)
    known = {each.summary.partition_id: each for each in status.partitions}
    rows = {name: _rows(known.get(name), waits.get(name, ())) for name in sorted({*known, *waits})}
    names, delivered, rates, _ = zip(_TITLES, *chain.from_iterable(rows.values()), strict=True)
    widths = (min(_MOST_NAME, max(map(len, names))), max(map(len, delivered)), max(map(len, rates)))
    blocks = []
    for name, of_one in rows.items():
        partition = known.get(name)
        facts = "does not exist" if partition is None else _facts(partition)
        lines = [name, f"  {facts}"] if len(name) + 2 + len(facts) > width else [f"{name}  {facts}"]
        lines += (line for row in of_one for line in _lines(row, widths, width))
        tasks = () if partition is None else partition.tasks
        blocks.append(Block(lines=tuple(lines), urgency=_urgency(tasks, waits.get(name, ()))))
    return "\n".join(_lines(_TITLES, widths, width)), blocks


def _rows(partition: PartitionDescription | None, waits: Sequence[PartitionWait]) -> list[_Row]:
    """Return a row for each task of a partition. Tasks known only from waiting calls also get a row."""
    tasks = {task.task_name: task for task in (() if partition is None else partition.tasks)}
    rows = []
    for name in dict.fromkeys([*tasks, *(wait.reason.task_name for wait in waits)]):
        notes = [_short(wait) for wait in waits if wait.reason.task_name == name]
        if partition is None or name not in tasks:
            rows.append((name or "(look-up)", "-", "-", "; ".join(notes)))
        else:
            task = tasks[name]
            delivered, rate = f"{task.consumed_count:,}/{partition.summary.inserted_count:,}", task.delivered_per_second
            shown_rate = "-" if rate < _LEAST_RATE else f"{rate:,.0f}/s" if rate >= 10 else f"{rate:.1f}/s"
            rows.append((name, delivered, shown_rate, "; ".join([*notes, *_notes(task)]) or "-"))
    return rows


def _lines(row: _Row, widths: tuple[int, int, int], width: int) -> Iterator[str]:
    """Yield the output lines for a task's row."""
    name, delivered, rate, rest = row
    first, rest_at = f"  {name:<{widths[0]}}", 8 + sum(widths)
    if len(name) > widths[0]:
        yield first
        first = " " * (2 + widths[0])
    first += f"  {delivered:>{widths[1]}}  {rate:>{widths[2]}}  "
    lines = _wrapped(rest, width - rest_at) or [""]
    yield (first + lines[0]).rstrip()
    yield from (" " * rest_at + line for line in lines[1:])


def _wrapped(text: str, width: int) -> list[str]:
    return textwrap.wrap(text, max(10, width), break_long_words=False, break_on_hyphens=False)


def _urgency(tasks: Sequence[TaskStatus], waits: Sequence[PartitionWait]) -> int:
    if waits:
        return 0
    if any(task.delivered_per_second >= _LEAST_RATE for task in tasks):
        return 1
    return 3 if tasks and all(task.complete for task in tasks) else 2


def _facts(partition: PartitionDescription) -> str:
    summary, expected = partition.summary, partition.expected_samples
    state = "sealed" if summary.sealed else "open"
    if partition.samples_per_round is not None and not summary.sealed:
        state = f"rounds of {partition.samples_per_round:,}"
    of = "" if expected is None else f" of {expected:,}"
    parts = [state, f"{summary.inserted_count:,}{of} samples"]
    cleared = summary.inserted_count - summary.present_count
    counts = ((cleared, "cleared"), (partition.held_count, "held"), (partition.failed_count, "failed"))
    parts += [f"{count:,} {what}" for count, what in counts if count]
    if partition.group_count:
        parts.append(f"{partition.group_count:,} groups")
    if partition.rollout_count:
        parts.append(f"{partition.rollout_count:,} rollouts")
    parts.append(decimal(partition.used_bytes))
    if partition.waiting_put_count:
        parts.append(f"{partition.waiting_put_count:,} puts wait")
    return "  ".join(parts)


def _notes(task: TaskStatus) -> Iterator[str]:
    if task.complete:
        yield "complete"
    counts = (
        (task.leased_count, "unacknowledged"),
        (task.redelivered_count, "redelivered"),
        (task.dead_lettered_count, "dead-lettered"),
        (task.skipped_count - task.dead_lettered_count, "skipped"),
    )
    yield from (f"{count:,} {what}" for count, what in counts if count > 0)


def _short(wait: PartitionWait) -> str:
    """Format the reason why calls are waiting. Omit the partition and task names, which the row already shows."""
    reason = wait.reason
    calls = "1 call" if reason.waiting_count == 1 else f"{reason.waiting_count:,} calls"
    text = reason.text.replace(f" of partition {wait.partition_id!r}", "").replace(
        f" for task {reason.task_name!r}", ""
    )
    return f"{calls}: {text}"


def fitting(header: Sequence[str], heading: str, blocks: Sequence[Block], height: int) -> list[str]:
    """Return lines that fit on a screen of `height` lines, showing the most urgent partitions with all their tasks."""
    left = height - len(header) - 5
    shown: set[int] = set()
    for place in sorted(range(len(blocks)), key=lambda each: (blocks[each].urgency, each)):
        if len(blocks[place].lines) <= left or not shown:
            shown.add(place)
            left -= len(blocks[place].lines)
    lines = [*header, ""]
    if not blocks:
        return [*lines, "no partitions"]
    lines += ["PARTITION", heading]
    lines += [line for place in sorted(shown) for line in blocks[place].lines]
    if hidden := len(blocks) - len(shown):
        lines.append(f"and {hidden:,} less active partitions; list them with tq-service partition ls")
    return lines
