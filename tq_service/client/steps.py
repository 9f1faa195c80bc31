"""How the samples of a batch are to be used: optimizer steps, made of packs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tq_service.v1 import metadata_pb2 as pb


@dataclass(frozen=True, slots=True, kw_only=True)
class Pack:
    """What one forward/backward pass takes: a micro-batch, or samples packed into one sequence.

    Attributes:
        positions: positions in the batch's `global_indexes`.
        lengths: token counts of these samples; None where the sampler does not know them.
        padding_tokens: tokens that fill the pack up to its length.
    """

    positions: tuple[int, ...]
    lengths: tuple[int, ...] | None = None
    padding_tokens: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """What ends with one optimizer step; every rank of a batch has the same number of packs in it."""

    packs: tuple[Pack, ...]


def steps_from_proto(messages: Iterable[pb.Step]) -> tuple[Step, ...]:
    """Return the steps of messages."""
    return tuple(Step(packs=tuple(_pack_from_proto(pack) for pack in message.packs)) for message in messages)


def _pack_from_proto(message: pb.Pack) -> Pack:
    return Pack(
        positions=tuple(message.rows),
        lengths=tuple(message.lengths) if len(message.lengths) == len(message.rows) and message.rows else None,
        padding_tokens=message.padding_tokens,
    )


def select_steps(steps: Sequence[Step], new_position: NDArray[np.int64]) -> tuple[Step, ...]:
    """Return the steps over a selection of the samples.

    A pack that loses samples has no padding any more; packs and steps that lose all of them are left out.

    Args:
        steps: the steps over the whole batch.
        new_position: for each sample of the batch its position in the selection, -1 where it is not in it.
    """
    selected = []
    for step in steps:
        packs = [_select_pack(pack, new_position) for pack in step.packs]
        kept = [new for old, new in zip(step.packs, packs, strict=True) if new.positions or not old.positions]
        if kept or not step.packs:
            selected.append(Step(packs=tuple(kept)))
    return tuple(selected)


def _select_pack(pack: Pack, new_position: NDArray[np.int64]) -> Pack:
    moved: list[int] = new_position[list(pack.positions)].tolist() if pack.positions else []
    kept: Any = [place for place, position in enumerate(moved) if position >= 0]
    return Pack(
        positions=tuple(moved[place] for place in kept),
        lengths=None if pack.lengths is None else tuple(pack.lengths[place] for place in kept),
        padding_tokens=pack.padding_tokens if len(kept) == len(moved) else 0,
    )


def shift_steps(steps: Sequence[Step], first: int) -> tuple[Step, ...]:
    """Return the steps of a batch that begins at position `first` of a larger one."""
    return tuple(
        Step(packs=tuple(replace(pack, positions=tuple(at + first for at in pack.positions)) for pack in step.packs))
        for step in steps
    )
