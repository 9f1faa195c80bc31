"""The trainer ranks as one process group, which continues after a dead rank is replaced by another process."""

from __future__ import annotations

import os
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from examples.demo.settings import TRAINER_RANKS

GENERATION_FILE = "generation"  # in the output directory: number of replacements of a rank
_JOIN_SECONDS = 60.0
_LOOK_SECONDS = 0.05


class RankLostError(RuntimeError):
    """A rank of the group died; the others join the next generation of the group."""


class Ranks:
    """One rank's view of the group. Lifecycle: `join`, then `sum` once per step; after a RankLostError `join` again.

    The sum commits a step. If the sum succeeds, all surviving ranks have completed the step; otherwise, they repeat it.

    Args:
        output: directory where the ranks find each other.
        rank: rank of this process.
        count: number of ranks in the group.
    """

    def __init__(self, output: str, rank: int, count: int = TRAINER_RANKS) -> None:
        self._output = Path(output).resolve()
        self._rank = rank
        self.count = count
        self._generation = -1

    def join(self, step: int, state: Tensor) -> tuple[int, Tensor]:
        """Join the newest generation; return the step and the state of the most advanced rank.

        Args:
            step: updates that this rank has made; 0 at the start.
            state: state that must be equal on all ranks, `(n,)`.
        """
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo0" if sys.platform == "darwin" else "lo")  # all on this host
        if dist.is_initialized():
            dist.destroy_process_group()
        self._generation = self._next_generation()
        dist.init_process_group(
            "gloo",
            init_method=(self._output / f"rendezvous_{self._generation}").as_uri(),
            rank=self._rank,
            world_size=self.count,
            timeout=timedelta(seconds=_JOIN_SECONDS),
        )
        steps = [torch.zeros(1, dtype=torch.int64) for _ in range(self.count)]
        dist.all_gather(steps, torch.tensor([step]))
        furthest = max(range(self.count), key=lambda rank: steps[rank].item())
        shared = state.clone()
        dist.broadcast(shared, src=furthest)
        return int(steps[furthest].item()), shared

    def sum(self, values: Tensor) -> Tensor:
        """Return the sum of all ranks' values, which is the same on each rank. Every rank must call this method.

        Raises:
            RankLostError: a rank died, and the sum failed.
        """
        total = values.clone()
        try:
            dist.all_reduce(total)
        except RuntimeError as error:
            raise RankLostError(f"rank {self._rank} lost another rank: {error}") from error
        return total

    def leave(self) -> None:
        """Leave the group."""
        dist.destroy_process_group()

    def _next_generation(self) -> int:
        """Wait for a generation that this rank has not joined, and return its number."""
        file, give_up_at = self._output / GENERATION_FILE, time.monotonic() + _JOIN_SECONDS
        while (generation := int(file.read_text(encoding="utf-8"))) <= self._generation:
            if time.monotonic() > give_up_at:
                raise RankLostError(f"the lost rank was not replaced within {_JOIN_SECONDS:g} s")
            time.sleep(_LOOK_SECONDS)
        return generation
