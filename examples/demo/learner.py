"""One rank of data-parallel training: sums gradients over micro-batches and then over ranks, and makes one step."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from examples.demo.grpo import grpo_loss
from examples.demo.policy import Policy, flat_weights, load_flat_weights
from examples.demo.tensors import padded

TOKEN_SCALE = 16.0
GRADIENT_NORM = 1.0


class Learner:
    """A replica of the policy and its optimizer; equal on all ranks after every update.

    Lifecycle of a step: `accumulate` for each micro-batch, if any; then `update` on every rank. If an update fails, the
    step has not been applied: call `discard`, and accumulate the step's micro-batches again.
    """

    def __init__(self, policy: Policy, *, learning_rate: float) -> None:
        self.policy = policy
        self._parameters = list(policy.parameters())
        self._optimizer = torch.optim.Adam(self._parameters, lr=learning_rate, betas=(0.9, 0.95))
        self.discard()

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
            sampled_logprobs: log probabilities under the policy that sampled the responses.
            advantages: `(n,)`.
        """
        logprobs, mask = self.policy.response_logprobs(prompts, responses)
        loss = grpo_loss(logprobs, padded(sampled_logprobs), advantages, mask, token_scale=TOKEN_SCALE)
        loss.backward()  # type: ignore[no-untyped-call]  # torch ships it untyped

    def update(self, sum_over_ranks: Callable[[Tensor], Tensor], counts: Tensor) -> Tensor:
        """Sum gradients and counts over the ranks, make one optimizer step, and return the sums of the counts.

        Args:
            sum_over_ranks: returns the sum of a vector over the ranks, such as `Ranks.sum`; the identity for one rank.
            counts: `(n,)` float64. The first count is the number of samples accumulated on this rank.

        Raises:
            RankLostError: a rank was lost; nothing has changed.
        """
        gradients = torch.cat([each.grad.reshape(-1) for each in self._parameters if each.grad is not None])
        total = sum_over_ranks(torch.cat([gradients.double(), counts]))
        summed, counted = total[: gradients.numel()], total[gradients.numel() :]
        sizes = [parameter.numel() for parameter in self._parameters]
        for parameter, gradient in zip(self._parameters, torch.split(summed, sizes), strict=True):
            parameter.grad = (gradient / max(1.0, counted[0].item())).to(parameter.dtype).reshape(parameter.shape)
        torch.nn.utils.clip_grad_norm_(self._parameters, GRADIENT_NORM)
        self._optimizer.step()
        self.discard()
        return counted

    def discard(self) -> None:
        """Drop the gradients since the last update."""
        for parameter in self._parameters:
            parameter.grad = torch.zeros_like(parameter)

    def state(self) -> Tensor:
        """Return weights and optimizer state as one vector `(3 x parameters + 1,)`, for a replacement rank."""
        moments = [self._moment(name) for name in ("exp_avg", "exp_avg_sq")]
        steps = self._optimizer.state[self._parameters[0]].get("step", torch.zeros(()))
        return torch.cat([flat_weights(self.policy), *moments, steps.reshape(1)])

    def load_state(self, state: Tensor) -> None:
        """Load the result of `state` of another rank."""
        weights, first, second, steps = torch.split(state, [*[(state.numel() - 1) // 3] * 3, 1])
        load_flat_weights(self.policy, weights)
        sizes = [parameter.numel() for parameter in self._parameters]
        parts = zip(self._parameters, torch.split(first, sizes), torch.split(second, sizes), strict=True)
        for parameter, of_first, of_second in parts:
            self._optimizer.state[parameter] = {
                "step": steps[0].clone(),
                "exp_avg": of_first.reshape(parameter.shape).clone(),
                "exp_avg_sq": of_second.reshape(parameter.shape).clone(),
            }
        self.discard()

    def _moment(self, name: str) -> Tensor:
        rows = [self._optimizer.state[each].get(name, torch.zeros_like(each)).reshape(-1) for each in self._parameters]
        return torch.cat(rows)
