from __future__ import annotations

import math

import pytest
import torch

from examples.demo.grpo import group_advantages, grpo_loss


def test_advantages_are_relative_to_the_group() -> None:
    rewards = torch.tensor([1.0, 5.0, 0.0, 7.0])
    advantages = group_advantages(rewards, ["a", "b", "a", "b"], 2, floor=0.0)
    assert torch.allclose(advantages, torch.tensor([1.0, -1.0, -1.0, 1.0]))


def test_equal_rewards_give_no_advantage() -> None:
    advantages = group_advantages(torch.full((4,), 0.3), ["a"] * 4, 4)
    assert torch.allclose(advantages, torch.zeros(4), atol=1e-5)


def test_a_cut_group_is_refused() -> None:
    with pytest.raises(ValueError, match="'b' has 1 of 2 members"):
        group_advantages(torch.tensor([1.0, 2.0, 3.0]), ["a", "a", "b"], 2)


def test_one_group_name_a_reward() -> None:
    with pytest.raises(ValueError, match="3 rewards and 2 group names"):
        group_advantages(torch.zeros(3), ["a", "a"], 3)


def test_on_policy_loss_has_the_policy_gradient() -> None:
    logprobs = torch.tensor([[-1.0, -2.0], [-0.5, 0.0]], requires_grad=True)
    mask = torch.tensor([[True, True], [True, False]])
    loss = grpo_loss(logprobs, logprobs.detach(), torch.tensor([2.0, -1.0]), mask, token_scale=4.0)
    loss.backward()
    assert loss.item() == pytest.approx(-(2.0 + 2.0 - 1.0) / 4.0)
    assert logprobs.grad is not None
    assert torch.allclose(logprobs.grad, torch.tensor([[-0.5, -0.5], [0.25, 0.0]]))


@pytest.mark.parametrize(
    ("ratio", "advantage", "expected", "moves"),
    [
        (1.5, 1.0, 1.2, False),  # a good token, likely enough already
        (0.5, -1.0, -0.8, False),  # a bad token, unlikely enough already
        (1.5, -1.0, -1.5, True),  # a bad token that became likelier is pushed back
        (0.5, 1.0, 0.5, True),
    ],
)
def test_ratio_is_clipped_where_it_went_far_enough(
    ratio: float, advantage: float, expected: float, moves: bool
) -> None:
    logprobs = torch.tensor([[math.log(ratio)]], requires_grad=True)
    loss = grpo_loss(
        logprobs, torch.zeros(1, 1), torch.tensor([advantage]), torch.ones(1, 1, dtype=torch.bool), token_scale=1.0
    )
    loss.backward()
    assert loss.item() == pytest.approx(-expected)
    assert logprobs.grad is not None
    assert (logprobs.grad.abs().item() > 0) == moves


def test_padding_never_reaches_the_loss() -> None:
    logprobs = torch.tensor([[-1.0, -50.0]])
    mask = torch.tensor([[True, False]])
    loss = grpo_loss(logprobs, torch.tensor([[-1.0, 500.0]]), torch.ones(1), mask, token_scale=1.0)
    assert loss.item() == pytest.approx(-1.0)
