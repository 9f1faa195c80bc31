"""Asynchronous GRPO with the model of the demo: rollouts and training overlap, and staleness is bounded.

Two policies are trained at the same time, each with its own trainer, versions and bound. For each of them, rollout
workers claim prompts together with the slots of their responses (`admit=`), generate with the newest weights, and put
responses and rewards. Some rollouts are slow, as for long responses; a batch waits for a slow group only if the group
would otherwise be trained too late. Start a service with `tq-service serve`, then, in a clone of this repository:

    python -m examples.async_grpo --steps 150

The example prints a histogram of the responses by staleness in versions and, with matplotlib, plots the staleness of
each step.
"""

from __future__ import annotations

import argparse
import random
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import fmean

import torch

import tq_service as tq
from examples.demo.grpo import group_advantages
from examples.demo.learner import Learner
from examples.demo.policy import Policy, flat_weights, load_flat_weights
from examples.demo.task import END_TOKEN, MAX_RESPONSE_TOKENS, VOCABULARY, decode, encode, make_prompts, score
from examples.demo.tensors import rows_of

BOUNDS = {"eager": 1, "patient": 4}  # largest staleness of a response in versions, by policy
GLOBAL_BATCH, GROUP_SIZE, PROMPTS_PER_CLAIM, ROLLOUT_WORKERS = 16, 8, 4, 2
ROLLOUT, UPDATE, LEASE, WAIT = "rollout", "update_actor", 60.0, 60.0


@dataclass(kw_only=True)
class Run:
    """One policy: its partitions `<name>/prompts`, `<name>/train` and `<name>/weights`, and its results.

    Attributes:
        name: name of the policy.
        max_staleness: the bound.
        steps: versions to train.
        staleness: staleness of each response, in training order, by step.
        rewards: mean reward of each step.
    """

    name: str
    max_staleness: int
    steps: int
    staleness: list[list[int]] = field(default_factory=list)
    rewards: list[float] = field(default_factory=list)

    @property
    def prompts(self) -> str:
        """The partition of the prompts, whose keys name the groups of their responses."""
        return f"{self.name}/prompts"

    @property
    def train(self) -> str:
        """The partition of the responses."""
        return f"{self.name}/train"

    @property
    def weights(self) -> str:
        """The partition of the weights, one row per version."""
        return f"{self.name}/weights"

    def prepare(self, client: tq.Client, seed: int) -> None:
        """Put the prompts, and bound the staleness of their responses."""
        bound = tq.Admission(
            UPDATE, max_staleness=self.max_staleness, global_batch=GLOBAL_BATCH, unit="group", policy=self.name
        )
        client.create_partition(self.train, admissions=[bound])
        prompts = make_prompts(self.steps * GLOBAL_BATCH, random.Random(f"{seed}/{self.name}"))
        tokens = [torch.tensor(encode(prompt)) for prompt in prompts]
        client.put(self.prompts, {"prompt": tokens}, keys=[f"p{i}" for i in range(len(prompts))])
        client.seal_partition(self.prompts)

    def publish(self, client: tq.Client, version: int, policy: Policy) -> None:
        """Publish the weights of a version to the rollout workers, which frees the slots of trained groups."""
        parameters = {"parameters": flat_weights(policy).unsqueeze(0)}
        client.put(self.weights, parameters, keys=[f"v{version}"])
        trained = {(self.train, UPDATE): version - 1} if version else None
        client.publish_version(version, policy=self.name, trained=trained)
        client.clear_samples(self.weights, keys=[f"v{version - 2}"])


def roll_out(run: Run, worker: int, seed: int) -> None:
    """Answer prompts until all are answered."""
    policy, loaded, rng = Policy(len(VOCABULARY)), -1, random.Random(f"{seed}/{worker}")
    generator = torch.Generator().manual_seed(seed + worker)
    with tq.Client() as client:
        while True:
            claim = client.claim(
                partition_id=run.prompts, task_name=ROLLOUT, data_fields=["prompt"], batch_size=PROMPTS_PER_CLAIM,
                min_batch_size=1, lease=LEASE, admit=tq.Admit(run.train, group_size=GROUP_SIZE, on_lost="remove"),
                max_wait=WAIT,
            )  # fmt: skip
            if claim.status == "end":
                return
            if claim.admitted is None:
                continue
            if (version := client.get_version(policy=run.name)) != loaded:
                loaded = load_weights(client, run, policy, version)
            prompts = [each for each in rows_of(client.get_data(claim)["prompt"]) for _ in range(GROUP_SIZE)]
            responses = policy.generate(
                prompts, end_token=END_TOKEN, max_tokens=MAX_RESPONSE_TOKENS, generator=generator
            )
            time.sleep(min(1.0, 0.02 * rng.paretovariate(1.2)))  # a few take much longer than most
            texts = [(decode(p.tolist()), decode(r.tokens.tolist())) for p, r in zip(prompts, responses, strict=True)]
            client.put(
                claim.admitted,
                {
                    "prompt": prompts,
                    "response": [response.tokens for response in responses],
                    "logprobs": [response.logprobs for response in responses],
                    "reward": torch.tensor([score(*text) for text in texts]),
                },
                ack=True,
            )


def load_weights(client: tq.Client, run: Run, policy: Policy, version: int) -> int:
    """Load the weights of a version, or of a newer one if that version was cleared. Return the version loaded."""
    while True:
        try:
            flat = client.get_data(run.weights, keys=[f"v{version}"])["parameters"][0]
        except tq.errors.NotFoundError:
            version = client.get_version(policy=run.name)
            continue
        load_flat_weights(policy, flat)
        return version


def train(run: Run, learner: Learner) -> None:
    """Train one batch per version, and record the staleness of its responses."""
    with tq.Client() as client:
        for step in range(run.steps):
            batch = client.claim(
                partition_id=run.train, task_name=UPDATE, data_fields=["prompt", "response", "logprobs", "reward"],
                batch_size=GLOBAL_BATCH, batch_unit="group", dp_rank=0, dp_size=1, batch_index=step, max_wait=WAIT,
            )  # fmt: skip
            if batch.status != "batch":
                raise TimeoutError(f"no batch for step {step} of {run.name} within {WAIT:g} s")
            data = client.get_data(batch)
            advantages = group_advantages(data["reward"], batch.groups, GROUP_SIZE)
            learner.accumulate(
                rows_of(data["prompt"]), rows_of(data["response"]), rows_of(data["logprobs"]), advantages
            )
            learner.update(lambda values: values, torch.tensor([batch.size], dtype=torch.float64))
            run.staleness.append([step - int(row["start_version"]) for row in batch.custom_meta])
            run.rewards.append(float(data["reward"].mean()))
            run.publish(client, step + 1, learner.policy)
            client.clear_samples(batch)


def histogram(run: Run) -> str:
    """Return a histogram of the responses by staleness, as text."""
    counts = Counter(value for values in run.staleness for value in values)
    total = sum(counts.values())
    lines = [f"policy {run.name}: reward {run.rewards[0]:.2f} to {run.rewards[-1]:.2f}, {total} responses trained"]
    for late in range(run.max_staleness + 1):
        bar = "#" * round(60 * counts[late] / total)
        lines.append(f"  {late} versions late {counts[late]:>6} {bar}".rstrip())
    return "\n".join([*lines, f"  at most {max(counts)} late, bound {run.max_staleness}"])


def draw(runs: Sequence[Run], path: Path) -> None:
    """Draw the staleness of each step against its bound, and the rewards."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, panels = plt.subplots(2, len(runs), figsize=(6 * len(runs), 7), sharex=True, squeeze=False)
    for run, staleness, rewards in zip(runs, *panels, strict=True):
        staleness.plot([max(values) for values in run.staleness], label="most stale response")
        staleness.plot([fmean(values) for values in run.staleness], label="mean")
        staleness.axhline(run.max_staleness, color="black", linestyle=":", label="bound")
        staleness.set(title=f"{run.name}: versions late", ylim=(-0.2, max(BOUNDS.values()) + 2))
        staleness.legend()
        rewards.plot(run.rewards)
        rewards.set(title="Reward", xlabel="step", ylim=(0, 1.02))
    figure.savefig(path, dpi=120)
    plt.close(figure)


def main(arguments: Sequence[str] | None = None) -> list[Run]:
    """Train both policies at the same time, and show the staleness of their responses."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--steps", type=int, default=150, help="versions of each policy (default: 150)")
    parser.add_argument("--seed", type=int, default=0, help="seed of prompts, weights and sampling (default: 0)")
    parser.add_argument("--output", type=Path, default=Path("staleness.png"), help="plot file (default: %(default)s)")
    given = parser.parse_args(arguments)
    runs = [Run(name=name, max_staleness=bound, steps=given.steps) for name, bound in BOUNDS.items()]
    torch.manual_seed(given.seed)
    with tq.Client() as client:
        work: list[Callable[[], None]] = []
        for run in runs:
            learner = Learner(Policy(len(VOCABULARY)), learning_rate=1e-3)
            run.prepare(client, given.seed)
            run.publish(client, 0, learner.policy)
            work.append(partial(train, run, learner))
            work += [partial(roll_out, run, worker, given.seed) for worker in range(ROLLOUT_WORKERS)]
        with ThreadPoolExecutor(len(work)) as pool:
            for future in as_completed([pool.submit(each) for each in work]):
                future.result()
        for run in runs:
            print(histogram(run))
            for partition_id in (run.prompts, run.train, run.weights):
                client.clear_partition(partition_id)
            client.remove_policy(run.name)
    try:
        draw(runs, given.output)
        print(f"drawn in {given.output}")
    except ImportError:
        print("no plot: matplotlib is not installed (pip install '.[plots]')")
    return runs


if __name__ == "__main__":
    main()
