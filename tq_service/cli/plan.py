"""`tq-service plan`: previews each sampler's plan for a list of sample lengths. No service is required."""

from __future__ import annotations

import csv
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from numpy.typing import NDArray

from tq_service.balancing import AttentionCost, Overlong
from tq_service.cli.options import console, table
from tq_service.samplers import (
    ListView,
    PackedSampler,
    Plan,
    PlanRequest,
    RankAwareSampler,
    Sampler,
    SeqlenBalancedSampler,
    SequentialSampler,
    TokenBudgetSampler,
)

EXAMPLES = """\
  tq-service plan --lengths lengths.txt
  tq-service plan --lengths trace.csv --column prompt --column response
  tq-service plan --lengths lengths.txt --dp-size 64 --optimizer-steps 4"""

Int64s = NDArray[np.int64]


def command(
    *,
    lengths: Annotated[Path, typer.Option(help="File with one token count per line, or a CSV file (see --column).")],
    column: Annotated[
        list[str] | None, typer.Option(help="CSV column with token counts; repeat to add up several columns.")
    ] = None,
    dp_size: Annotated[int, typer.Option(min=1, help="Number of trainer ranks.")] = 8,
    optimizer_steps: Annotated[int, typer.Option(min=1, help="Number of optimizer steps per packed batch.")] = 1,
    pack_max_length: Annotated[
        int | None,
        typer.Option(min=1, help="Tokens per pack. Default: 16384, or the longest sample's length if larger."),
    ] = None,
    tokens_per_rank: Annotated[
        int | None, typer.Option(min=1, help="Tokens per rank for token_budget. Default: an equal share of all tokens.")
    ] = None,
    n_samples_per_prompt: Annotated[int, typer.Option(min=1, help="Number of consecutive samples per group.")] = 1,
    overlong: Annotated[Overlong, typer.Option(help="How to handle samples longer than a pack.")] = "error",
    limit: Annotated[int | None, typer.Option(min=1, help="Maximum number of lengths to read.")] = None,
) -> None:
    """Preview each sampler's plan for a file of sample lengths."""
    counts = np.array(_read(lengths, column or [])[:limit], np.int64)
    if not counts.size:
        raise typer.BadParameter(f"{lengths} contains no lengths", param_hint="--lengths")
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
        f"{counts.size:,} samples of {counts.min():,} to {counts.max():,} tokens, {counts.sum():,} in total; "
        f"{dp_size} ranks, packs of {shape.pack_max_length:,} tokens, budget of {shape.tokens_per_rank:,} per rank\n"
    )
    headings = (
        "sampler, >batches, >samples per rank, >heaviest rank, >above mean, >cost above mean, >all packs, >padding, "
        "packs of a rank by step"
    )
    console().print(table(headings, map(_cells, previews)))
    typer.echo("\nheaviest rank: its number of tokens in the first batch; cost: 24,576 L + L² for a sample of L tokens")


def _read(path: Path, columns: list[str]) -> list[int]:
    """Read token counts from a file. If `columns` is not empty, add up the values of these columns in each row."""
    try:
        with path.open(newline="", encoding="utf-8-sig") as lines:  # Excel files start with a byte order mark
            if not columns:
                return [_count(line, f"line {number}") for number, line in enumerate(lines, 1) if line.strip()]
            rows = csv.DictReader(lines)
            known = rows.fieldnames or ()
            for name in columns:
                if name not in known:
                    raise typer.BadParameter(f"got {name!r}, expected one of {', '.join(known)}", param_hint="--column")
            return [sum(_count(row[name], f"line {rows.line_num}, column {name}") for name in columns) for row in rows]
    except (OSError, UnicodeDecodeError) as error:
        raise typer.BadParameter(f"could not read {path}: {error}", param_hint="--lengths") from error


def _count(text: str | None, where: str) -> int:
    try:
        value = int(text or "")
    except ValueError:
        value = -1
    if not 0 <= value < 2**40:
        hint = "; select CSV columns with --column" if "," in (text or "") else ""
        raise typer.BadParameter(
            f"{where}: got {(text or '').strip()!r}, expected a token count of at least 0{hint}", param_hint="--lengths"
        )
    return value


def _cells(preview: Preview) -> list[object]:
    samples, tokens, costs = preview.rank_samples, preview.rank_tokens, preview.rank_costs
    fills, by_step = preview.pack_fills, preview.packs_by_step
    return [
        preview.sampler,
        preview.batches,
        f"{samples.min():,}-{samples.max():,}" if samples.min() < samples.max() else f"{samples.min():,}",
        int(tokens.max()),
        _above_mean(tokens),
        _above_mean(costs),
        None if fills is None else fills.size,
        None if fills is None else f"{1 - fills.mean():.2%}",
        None if by_step is None else " ".join(map(str, by_step)),
    ]


def _above_mean(of_ranks: NDArray[Any]) -> str | None:
    mean = of_ranks.mean()
    return f"{of_ranks.max() / mean - 1:.2%}" if mean else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Ranks, groups and limits used to compare samplers.

    Attributes:
        dp_size: number of ranks.
        optimizer_steps: number of optimizer steps per packed batch.
        pack_max_length: maximum number of tokens per pack.
        n_samples_per_prompt: number of consecutive samples per group. All samples of a group are assigned to the same
            rank.
        tokens_per_rank: token budget per rank for `token_budget`.
        overlong: how to handle samples that are longer than a pack.
    """

    dp_size: int
    optimizer_steps: int
    pack_max_length: int
    n_samples_per_prompt: int
    tokens_per_rank: int
    overlong: Overlong


@dataclass(frozen=True, slots=True, kw_only=True)
class Preview:
    """The result of planning all samples with a sampler.

    Attributes:
        sampler: name of the sampler, including the options that distinguish it.
        batches: number of batches that the sampler needs for all samples.
        rank_tokens: number of tokens that each rank gets in the first batch, as an array of shape `(dp_size,)`.
        rank_costs: estimated compute cost of the first batch on each rank, including attention, as an array of shape
            `(dp_size,)`.
        rank_samples: number of samples that each rank gets in the first batch, as an array of shape `(dp_size,)`.
        pack_fills: for packed batches, the filled fraction of each pack across all ranks and steps.
        packs_by_step: for packed batches, the number of packs per rank in each step.
    """

    sampler: str
    batches: int
    rank_tokens: Int64s
    rank_costs: NDArray[np.float64]
    rank_samples: Int64s
    pack_fills: NDArray[np.float64] | None = None
    packs_by_step: list[int] | None = None


def preview_samplers(lengths: Int64s, shape: Shape) -> list[Preview]:
    """With each sampler, plan all samples as a single batch. Only `token_budget` may split them into several.

    Raises:
        ValueError: a sample or group is longer than a sampler allows.
    """
    packed = partial(
        PackedSampler,
        optimizer_steps=shape.optimizer_steps,
        pack_max_length=shape.pack_max_length,
        overlong=shape.overlong,
    )
    samplers: dict[str, Sampler] = {
        "sequential": SequentialSampler(),
        "rank_aware": RankAwareSampler(),
        "seqlen_balanced": SeqlenBalancedSampler(),
        "token_budget": TokenBudgetSampler(tokens_per_rank=shape.tokens_per_rank),
        "packed": packed(),
        "packed, uneven steps": packed(even_steps=False),
    }
    return [_preview(name, sampler, lengths, shape) for name, sampler in samplers.items()]


def _preview(name: str, sampler: Sampler, lengths: Int64s, shape: Shape) -> Preview:
    first, *rest = _plans(sampler, lengths, shape)
    packs = [[pack for step in part.steps for pack in step] for part in first.ranks]
    is_packed = isinstance(sampler, PackedSampler)
    of_ranks = [lengths[part.rows] for part in first.ranks]
    if is_packed:  # the packs exclude dropped samples and contain truncated lengths
        of_ranks = [np.concatenate([pack.lengths for pack in of_rank]) for of_rank in packs]
    cost = AttentionCost()
    return Preview(
        sampler=name,
        batches=1 + len(rest),
        rank_tokens=np.array([of_rank.sum() for of_rank in of_ranks], np.int64),
        rank_costs=np.array([cost(of_rank).sum() for of_rank in of_ranks]),
        rank_samples=np.array([of_rank.size for of_rank in of_ranks], np.int64),
        pack_fills=np.array([1 - pack.padding_tokens / shape.pack_max_length for of_rank in packs for pack in of_rank])
        if is_packed
        else None,
        packs_by_step=[len(step) for step in first.ranks[0].steps] if is_packed else None,
    )


def _plans(sampler: Sampler, lengths: Int64s, shape: Shape) -> Iterator[Plan]:
    """Yield the sampler's plan for each batch until all samples are consumed."""
    group_count = -(-lengths.size // shape.n_samples_per_prompt)
    request = PlanRequest(batch_size=group_count, min_size=1, batch_unit="group", rank_count=shape.dp_size)
    view = ListView(lengths, group_size=shape.n_samples_per_prompt)
    while view.ready().size:
        plan = sampler.plan(view, request)
        if not isinstance(plan, Plan):
            raise TypeError(
                f"sampler {sampler.name!r} returned {plan!r} instead of a plan, although all samples are ready"
            )
        for part in plan.ranks:
            view.consume(part.rows)
        yield plan
