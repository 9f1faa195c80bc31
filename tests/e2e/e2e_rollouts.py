"""5,120 rollouts: recorded ones of GSM8K where the data is there, and self-made ones."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from pathlib import Path

import torch

RECORDED = Path(__file__).parents[3] / "shared" / "data" / "gsm8k_model_solutions.jsonl"
GROUP_SIZE = 4
PROMPT_COUNT = 1280


@dataclass(frozen=True, kw_only=True)
class Rollout:
    """One response to a prompt."""

    key: str
    group: str
    text: str
    reward: float

    @property
    def input_ids(self) -> torch.Tensor:
        """Its tokens: bytes."""
        return torch.frombuffer(bytearray(self.text.encode()), dtype=torch.uint8).to(torch.int32)


def recorded_rollouts() -> list[Rollout]:
    """Return the four recorded responses to each of the first 1,280 problems."""
    rollouts = []
    with RECORDED.open() as lines:
        for position, line in zip(range(PROMPT_COUNT), lines, strict=False):
            problem = json.loads(line)
            answers = [value for value in problem.values() if isinstance(value, dict)]
            rollouts += [
                Rollout(
                    key=f"p{position}_{number}",
                    group=f"p{position}",
                    text=problem["question"] + answer["solution"],
                    reward=float(answer["is_correct"]),
                )
                for number, answer in enumerate(answers[:GROUP_SIZE])
            ]
    return rollouts


def made_rollouts() -> list[Rollout]:
    """Return rollouts whose lengths are spread as those of a policy: many short, few long."""
    rng = random.Random(17)
    return [
        Rollout(
            key=f"p{position}_{number}",
            group=f"p{position}",
            text="".join(rng.choices("0123456789+=", k=1 + int(rng.lognormvariate(5.0, 0.9)))),
            reward=float(rng.random() < 0.3),
        )
        for position in range(PROMPT_COUNT)
        for number in range(GROUP_SIZE)
    ]
