"""`tq-service plan`: what each sampler would do with samples of known lengths; needs no service."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tq_service.balancing import Overlong
from tq_service.cli.output import print_table

if TYPE_CHECKING:
    from tq_service.cli.plan_preview import Preview

EXAMPLES = """\
  tq-service plan --lengths lengths.txt
  tq-service plan --lengths trace.csv --column prompt --column response
  tq-service plan --lengths lengths.txt --dp-size 64 --png plan.png"""


def command(
    *,
    lengths: Annotated[Path, typer.Option(help="File of token counts: one a line, or a CSV file with --column.")],
    column: Annotated[
        list[str] | None, typer.Option(help="CSV column with token counts; given more than once, they are added up.")
    ] = None,
    dp_size: Annotated[int, typer.Option(min=1, help="Number of ranks.")] = 8,
    optimizer_steps: Annotated[int, typer.Option(min=1, help="Optimizer steps of a packed batch.")] = 1,
    pack_max_length: Annotated[
        int | None,
        typer.Option(min=1, help="Tokens of a pack; by default 16384, or the longest sample if that is more."),
    ] = None,
    tokens_per_rank: Annotated[
        int | None, typer.Option(min=1, help="Budget for token_budget; by default an even share of all tokens.")
    ] = None,
    n_samples_per_prompt: Annotated[int, typer.Option(min=1, help="Samples of a group, consecutive in the file.")] = 1,
    overlong: Annotated[Overlong, typer.Option(help="What packing does with samples longer than a pack.")] = "error",
    limit: Annotated[int | None, typer.Option(min=1, help="Take the first so many lengths only.")] = None,
    png: Annotated[Path | None, typer.Option(help="Draw tokens of ranks and fill of packs to this file.")] = None,
) -> None:
    """Show what each sampler would do with the samples of a file of lengths."""
    import numpy as np  # noqa: PLC0415  (--help does without)

    from tq_service.cli.plan_preview import Shape, draw, preview_samplers  # noqa: PLC0415  (--help does without)

    counts = np.array(_read(lengths, column or [])[:limit], np.int64)
    if not counts.size:
        raise typer.BadParameter(f"{lengths} has no lengths", param_hint="--lengths")
    group_tokens = np.add.reduceat(counts, np.arange(0, counts.size, n_samples_per_prompt))
    shape = Shape(
        dp_size=dp_size,
        optimizer_steps=optimizer_steps,
        pack_max_length=pack_max_length or max(int(counts.max()), 16_384),
        n_samples_per_prompt=n_samples_per_prompt,
        tokens_per_rank=tokens_per_rank or max(-(-int(counts.sum()) // dp_size), int(group_tokens.max()), 1),
        overlong=overlong,
    )
    try:
        previews = preview_samplers(counts, shape)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    typer.echo(
        f"{counts.size:,} samples of {counts.min():,} to {counts.max():,} tokens, {counts.sum():,} together; "
        f"{dp_size} ranks, packs of {shape.pack_max_length:,} tokens, budget of {shape.tokens_per_rank:,} a rank\n"
    )
    _print(previews)
    if png is not None:
        draw(previews, png)
        typer.echo(f"\nwritten: {png}")


def _read(path: Path, columns: list[str]) -> list[int]:
    """Return the token counts of a file."""
    try:
        with path.open(newline="", encoding="utf-8-sig") as lines:  # Excel begins its files with a byte order mark
            if not columns:
                return [_count(line, f"line {number}") for number, line in enumerate(lines, 1) if line.strip()]
            rows = csv.DictReader(lines)
            known = rows.fieldnames or ()
            for name in columns:
                if name not in known:
                    raise typer.BadParameter(f"got {name!r}, expected one of {', '.join(known)}", param_hint="--column")
            return [sum(_count(row[name], f"line {rows.line_num}, column {name}") for name in columns) for row in rows]
    except (OSError, UnicodeDecodeError) as error:
        raise typer.BadParameter(f"{path} cannot be read: {error}", param_hint="--lengths") from error


def _count(text: str | None, where: str) -> int:
    try:
        value = int(text or "")
    except ValueError:
        value = -1
    if not 0 <= value < 2**40:
        hint = "; name the columns of a CSV file with --column" if "," in (text or "") else ""
        raise typer.BadParameter(
            f"{where}: got {(text or '').strip()!r}, expected a token count of at least 0{hint}", param_hint="--lengths"
        )
    return value


def _print(previews: list[Preview]) -> None:
    print_table(
        "sampler, >batches, >samples a rank, >heaviest rank, >above mean, >cost above mean, >all packs, >padding, "
        "packs of a rank by step",
        map(_cells, previews),
    )
    typer.echo("\nheaviest rank: its tokens in the first batch; cost: with attention, 24,576 L + L² for L tokens")


def _cells(preview: Preview) -> list[object]:
    samples, tokens, costs = preview.rank_samples, preview.rank_tokens, preview.rank_costs
    fills, by_step = preview.pack_fills, preview.packs_by_step
    return [
        preview.sampler,
        preview.batches,
        f"{samples.min():,}-{samples.max():,}" if samples.min() < samples.max() else f"{samples.min():,}",
        int(tokens.max()),
        _above_mean(float(tokens.max()), float(tokens.mean())),
        _above_mean(float(costs.max()), float(costs.mean())),
        None if fills is None else fills.size,
        None if fills is None else f"{1 - fills.mean():.2%}",
        None if by_step is None else " ".join(map(str, by_step)),
    ]


def _above_mean(heaviest: float, mean: float) -> str | None:
    return f"{heaviest / mean - 1:.2%}" if mean else None
