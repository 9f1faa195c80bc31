"""One rank of data-parallel training: gradients summed over micro-batches, then over the ranks, then one step."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from examples.demo.grpo import grpo_loss
from examples.demo.policy import Policy
from examples.demo.settings import RENDEZVOUS_FILE, TRAINER_RANKS
from examples.demo.tensors import padded

TOKEN_SCALE = 16.0
GRADIENT_NORM = 1.0


def join_ranks(output: str, rank: int, rank_count: int = TRAINER_RANKS) -> None:
    """Make this process one of the trainer ranks; they meet at a file in `output`."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo0" if sys.platform == "darwin" else "lo")  # all on this host
    dist.init_process_group(
        "gloo",
        init_method=(Path(output) / RENDEZVOUS_FILE).resolve().as_uri(),
        rank=rank,
        world_size=rank_count,
        timeout=timedelta(seconds=60),
    )


class Learner:
    """A replica of the policy and its optimizer; equal on all ranks after every update.

    Life of a step: `accumulate` for each micro-batch, any number of times, also never; then `update` on every rank.
    """

    def __init__(self, policy: Policy, *, learning_rate: float) -> None:
        self.policy = policy
        self._optimizer = torch.optim.Adam(policy.parameters(), lr=learning_rate, betas=(0.9, 0.95))
        self._loss_sum = 0.0

    def accumulate(
        self,
        prompts: Sequence[Tensor],
        responses: Sequence[Tensor],
        sampled_logprobs: Sequence[Tensor],
        advantages: Tensor,
    ) -> None:
        """Add the gradient of a micro-batch.

        Args:
            prompts: token rows.
            responses: token rows.
            sampled_logprobs: of the policy that sampled the responses.
            advantages: `(n,)`.
        """
        logprobs, mask = self.policy.response_logprobs(prompts, responses)
        loss = grpo_loss(logprobs, padded(sampled_logprobs), advantages, mask, token_scale=TOKEN_SCALE)
        loss.backward()  # type: ignore[no-untyped-call]  # torch ships it untyped
        self._loss_sum += loss.item()

    def update(self, sample_count: int) -> float:
        """Sum the gradients over the ranks, make one optimizer step, return the loss per sample.

        Args:
            sample_count: samples accumulated on this rank.
        """
        parameters = list(self.policy.parameters())
        gradients = [
            (torch.zeros_like(parameter) if parameter.grad is None else parameter.grad).reshape(-1)
            for parameter in parameters
        ]
        flat = torch.cat([*gradients, torch.tensor([self._loss_sum, float(sample_count)])])
        dist.all_reduce(flat)
        loss_sum, samples = flat[-2].item(), max(1.0, flat[-1].item())
        for parameter, gradient in zip(
            parameters, torch.split(flat[:-2], [parameter.numel() for parameter in parameters]), strict=True
        ):
            parameter.grad = (gradient / samples).reshape(parameter.shape)
        torch.nn.utils.clip_grad_norm_(parameters, GRADIENT_NORM)
        self._optimizer.step()
        self._optimizer.zero_grad()
        self._loss_sum = 0.0
        return loss_sum / samples
