"""Settings shared by the processes of one run: a small frozen record, passed to each of them as a JSON file."""

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
UNBALANCED_SAMPLER = "grpo_group_n"  # complete groups in order of arrival
REPORTS_PARTITION = f"{PARTITION_PREFIX}reports"
WEIGHTS_PARTITION = f"{PARTITION_PREFIX}weights"


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoSettings:
    """One run of the demo.

    Attributes:
        address: address of the service.
        output: directory for the curves, the history and the logs of the processes.
        steps: optimizer steps of the training run.
        seconds: maximum training time in seconds.
        seed: seed of the prompts, the sampling and the initial weights.
        prompts_per_step: number of prompts per step, each answered `group_size` times. Must be a multiple of ranks x
            rollout workers.
        group_size: responses per prompt.
        micro_batch_groups: groups per micro-batch of a rank.
        max_version_lag: maximum number of versions by which a rollout's weights may lag behind the trainer.
        learning_rate: learning rate of Adam.
        unbalanced_steps: number of initial steps without balanced batches, to show the difference that balancing makes.
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
                f"got prompts_per_step={self.prompts_per_step}; expected a positive multiple of {shares}, which gives "
                "rollout workers and trainer ranks equal shares"
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
        """Read a record written by `save`."""
        return cls(**json.loads(path.read_text(encoding="utf-8")))


def step_partition(step: int) -> str:
    """Return the name of the partition that holds the samples of one optimizer step."""
    return f"{PARTITION_PREFIX}train@step_{step}"
