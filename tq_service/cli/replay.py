"""`tq-service replay`: serves the batches of recorded steps, or lists the recorded steps."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from datetime import UTC, datetime
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer
from rich.filesize import decimal

from tq_service.cli.options import Answer, announce, show, table

if TYPE_CHECKING:
    from tq_service.recording.comparing import StepFacts
    from tq_service.recording.reading import Asked, Recording

EXAMPLES = """\
  tq-service replay recording --list
  tq-service replay recording --task update_actor --step 12
  tq-service replay s3://bucket/run-7 --task update_actor --partition train@step_12 --port 50052"""

Result = TypeVar("Result")
Place = Annotated[str, typer.Argument(help="Directory of the recording, or the URL of its object store.")]
Task = Annotated[str | None, typer.Option(help="Select only steps of this task.")]
Partition = Annotated[str | None, typer.Option(help="Select only steps of this partition.")]
Epoch = Annotated[int | None, typer.Option(min=0, help="Epoch of the task. Default: the latest epoch.")]
Incarnation = Annotated[
    str | None, typer.Option(help="First hex digits of the partition's incarnation. Default: the latest incarnation.")
]


def command(
    place: Place,
    *,
    task: Task = None,
    step: Annotated[
        int | None, typer.Option(min=0, help="Select only the step with this batch_index. Default: all steps.")
    ] = None,
    partition: Partition = None,
    epoch: Epoch = None,
    incarnation: Incarnation = None,
    list_steps: Annotated[bool, typer.Option("--list", help="List the recorded steps and exit.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="With --list, print JSON.")] = False,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on; 0 for any free port.")] = 0,
    log_level: Annotated[str, typer.Option(help="Minimum level to log: debug, info, warning or error.")] = "warning",
) -> None:
    """Serve recorded batches read-only until SIGTERM or SIGINT. Each rank receives its own recorded batches."""
    from tq_service.recording.reading import Asked  # noqa: PLC0415  (not needed by --help)

    asked = Asked(task_name=task, batch_index=step, partition_id=partition, epoch=epoch, incarnation=incarnation)
    if list_steps:
        show(_listed(*with_recording(place, asked, _steps)), as_json)
        return
    with_recording(place, asked, partial(_serve, host, port, log_level))


async def _steps(asked: Asked, recording: Recording) -> tuple[list[StepFacts], dict[str, str]]:
    from tq_service.recording.comparing import StepSamples  # noqa: PLC0415  (as above)

    return [StepSamples(step).facts() for step in recording.steps if asked.means(step)], recording.damaged


def _listed(steps: Sequence[StepFacts], damaged: dict[str, str]) -> Answer:
    yield {"steps": steps, "damaged": damaged}
    yield table(
        "task, partition, >step, >epoch, incarnation, recorded at (UTC), >ranks, >samples, >groups, >bytes of puts",
        [
            (
                each.task_name,
                each.partition_id,
                each.batch_index,
                each.epoch,
                each.incarnation[:8],
                datetime.fromtimestamp(each.recorded_at, UTC).isoformat(" ", "seconds").removesuffix("+00:00"),
                len(each.samples_per_rank),
                each.sample_count,
                each.group_count,
                decimal(each.put_bytes),
            )
            for each in steps
        ],
    )
    for name, reason in damaged.items():
        yield f"damaged: {name}: {reason}"


async def _serve(host: str, port: int, log_level: str, asked: Asked, recording: Recording) -> None:
    from tq_service.cli.log_lines import configure_logging  # noqa: PLC0415  (as above)
    from tq_service.config import load_settings  # noqa: PLC0415  (as above)
    from tq_service.server.replay import replay as serve_steps  # noqa: PLC0415  (as above)

    steps = recording.select(asked)
    flags = {"host": host, "port": port, "log_level": log_level, "role": "all"}
    settings = load_settings(flags).settings
    configure_logging(settings.log_level, settings.log_format)
    for name, reason in recording.damaged.items():
        typer.echo(f"skipped damaged {name}: {reason}", err=True)
    await serve_steps(recording, steps, settings, announce)


def with_recording(place: str, asked: Asked, work: Callable[[Asked, Recording], Coroutine[Any, Any, Result]]) -> Result:
    """Open a recording, and call `work` with the selected steps and the recording. Return the result."""

    async def run() -> Result:
        from tq_service.recording.places import place_of  # noqa: PLC0415  (not needed by --help)
        from tq_service.recording.reading import Recording  # noqa: PLC0415  (as above)

        recording = Recording(place_of(place))
        await recording.open(asked)
        try:
            return await work(asked, recording)
        finally:
            await recording.close()

    return asyncio.run(run())
