"""The trainer ranks as one process group that goes on when a rank has died and another process takes its place."""

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

GENERATION_FILE = "generation"  # in the output directory: how often a rank has been replaced
_JOIN_SECONDS = 60.0
_LOOK_SECONDS = 0.05


class RankLostError(RuntimeError):
    """A rank of the group has died; the others join the next generation of the group."""


class Ranks:
    """One rank's view of the group. Life: `join`, then `sum` once a step; after a RankLostError `join` again.

    A sum is the one moment at which a step counts: it has been made on the ranks that live, or it is made again.

    Args:
        output: directory in which the ranks find each other.
        rank: of this process.
        count: ranks of the group.
    """

    def __init__(self, output: str, rank: int, count: int = TRAINER_RANKS) -> None:
        self._output = Path(output).resolve()
        self._rank = rank
        self.count = count
        self._generation = -1

    def join(self, step: int, state: Tensor) -> tuple[int, Tensor]:
        """Join the newest generation; return the step and the state of the rank that is furthest.

        Args:
            step: updates that this rank has made; 0 where it has just begun.
            state: what must be the same on all ranks, `(n,)`.
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
        """Return the sum of all ranks' values, the same on each; every rank calls it.

        Raises:
            RankLostError: a rank has died, and no sum was made.
        """
        total = values.clone()
        try:
            dist.all_reduce(total)
        except RuntimeError as error:
            raise RankLostError(f"rank {self._rank} has lost another rank: {error}") from error
        return total

    def leave(self) -> None:
        """Leave the group."""
        dist.destroy_process_group()

    def _next_generation(self) -> int:
        """Wait for a generation that this rank has not been in, and return its number."""
        file, give_up_at = self._output / GENERATION_FILE, time.monotonic() + _JOIN_SECONDS
        while (generation := int(file.read_text(encoding="utf-8"))) <= self._generation:
            if time.monotonic() > give_up_at:
                raise RankLostError(f"no process has taken the place of the lost rank within {_JOIN_SECONDS:g} s")
            time.sleep(_LOOK_SECONDS)
        return generation
