"""A rollout worker: samples groups of responses with the newest available weights, and puts them."""

from __future__ import annotations

import random
from collections.abc import Mapping

import torch

import tq_service as tq
from examples.demo.policy import Policy, load_flat_weights
from examples.demo.reports import Reporter
from examples.demo.role import run_role
from examples.demo.settings import ROLLOUT_WORKERS, DemoSettings, step_partition
from examples.demo.task import END_TOKEN, MAX_RESPONSE_TOKENS, VOCABULARY, encode, make_prompts
from examples.demo.weights import WeightSubscriber

GROUPS_PER_PUT = 4


def roll_out(settings: DemoSettings, worker: int) -> None:
    """Fill this worker's share of `train@step_0`, `train@step_1`, ... until the trainer is done."""
    with tq.Client(settings.address) as client:
        Reporter(client).send_event(f"rollout worker {worker} is ready")
        rollouts = RolloutWorker(client, settings, worker)
        for step in range(settings.steps):
            if not rollouts.fill(step):
                return


class RolloutWorker:
    """One of the workers that generate samples.

    The worker runs ahead of the trainer: it may generate the samples of step k with weights up to `max_version_lag`
    versions older than k. It can therefore start on step k while the trainer is still busy with earlier steps.
    """

    def __init__(self, client: tq.Client, settings: DemoSettings, worker: int) -> None:
        self._client = client
        self._settings = settings
        self._worker = worker
        self._rng = random.Random(f"{settings.seed}/{worker}")
        self._generator = torch.Generator().manual_seed(settings.seed * ROLLOUT_WORKERS + worker)
        self._policy = Policy(len(VOCABULARY))
        self._weights = WeightSubscriber(client, worker)

    def fill(self, step: int) -> bool:
        """Put this worker's share of a step; returns False if the trainer is done."""
        weights = self._weights.wait_for(max(0, step - self._settings.max_version_lag))
        if weights is None:
            return False
        load_flat_weights(self._policy, weights.flat)
        self._client.create_partition(step_partition(step), expected_samples=self._settings.samples_per_step)
        prompts = make_prompts(self._settings.prompts_per_step // ROLLOUT_WORKERS, self._rng)
        named = [(f"w{self._worker}_{i}", prompt) for i, prompt in enumerate(prompts)]
        for start in range(0, len(named), GROUPS_PER_PUT):
            self._put_groups(step, dict(named[start : start + GROUPS_PER_PUT]), weights.version)
        return True

    def _put_groups(self, step: int, prompt_of_group: Mapping[str, str], version: int) -> None:
        """Answer each prompt `group_size` times and put its responses as one group."""
        groups = [group for group in prompt_of_group for _ in range(self._settings.group_size)]
        prompts = [torch.tensor(encode(prompt_of_group[group])) for group in groups]
        responses = self._policy.generate(
            prompts, end_token=END_TOKEN, max_tokens=MAX_RESPONSE_TOKENS, generator=self._generator
        )
        self._client.put(
            step_partition(step),
            {
                "prompt": prompts,
                "response": [response.tokens for response in responses],
                "logprobs": [response.logprobs for response in responses],
            },
            groups=groups,
            group_size=self._settings.group_size,
            custom_meta=[
                {"total_lengths": len(prompt) + len(response.tokens), "version": version}
                for prompt, response in zip(prompts, responses, strict=True)
            ],
        )


if __name__ == "__main__":
    run_role(roll_out)
