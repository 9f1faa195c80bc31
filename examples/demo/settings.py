"""What the processes of one run share: a small frozen record that travels to each of them as a JSON file."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

ROLLOUT_WORKERS = 2
TRAINER_RANKS = 2
UPDATE_TASK = "update_actor"
REWARD_TASK = "reward"
PARTITION_PREFIX = "demo/"
BALANCED_SAMPLER = "seqlen_balanced"
UNBALANCED_SAMPLER = "grpo_group_n"  # whole groups in the order in which they came
REPORTS_PARTITION = f"{PARTITION_PREFIX}reports"
WEIGHTS_PARTITION = f"{PARTITION_PREFIX}weights"


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoSettings:
    """One run of the demo.

    Attributes:
        address: where the service listens.
        output: directory for the curves, the history and the logs of the processes.
        steps: optimizer steps of the training run.
        seconds: after so many seconds of training the run ends early.
        seed: of the prompts, the sampling and the first weights.
        prompts_per_step: prompts, each answered `group_size` times; a multiple of ranks and rollout workers.
        group_size: responses to one prompt.
        micro_batch_groups: groups in one micro-batch of a rank.
        max_version_lag: how many versions behind the trainer the weights of a rollout may be.
        learning_rate: of Adam.
        unbalanced_steps: the first steps, whose batches are not balanced, so that the difference is seen.
    """

    address: str
    output: str
    steps: int = 300
    seconds: float = 75.0
    seed: int = 0
    prompts_per_step: int = 24
    group_size: int = 8
    micro_batch_groups: int = 4
    max_version_lag: int = 2
    learning_rate: float = 1e-3
    unbalanced_steps: int = 0

    def __post_init__(self) -> None:
        shares = ROLLOUT_WORKERS * TRAINER_RANKS
        if self.prompts_per_step <= 0 or self.prompts_per_step % shares:
            raise ValueError(
                f"got prompts_per_step={self.prompts_per_step}; expected a positive multiple of {shares}, so that "
                "rollout workers and trainer ranks have equal shares"
            )
        if self.steps <= 0 or self.seconds <= 0:
            raise ValueError(f"got steps={self.steps}, seconds={self.seconds}; expected both above 0")

    @property
    def samples_per_step(self) -> int:
        """Responses of one step, over all workers."""
        return self.prompts_per_step * self.group_size

    def sampler_of(self, step: int) -> str:
        """Return the sampler that makes the batches of a step."""
        return UNBALANCED_SAMPLER if step < self.unbalanced_steps else BALANCED_SAMPLER

    def save(self, path: Path) -> None:
        """Write the record as JSON."""
        path.write_text(json.dumps(asdict(self), indent=2) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: Path) -> DemoSettings:
        """Read what `save` wrote."""
        return cls(**json.loads(path.read_text(encoding="utf-8")))


def step_partition(step: int) -> str:
    """Return the name of the partition that holds the samples of one optimizer step."""
    return f"{PARTITION_PREFIX}train@step_{step}"
