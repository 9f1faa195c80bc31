from __future__ import annotations

import random

import pytest
import torch

from examples.demo.grpo import group_advantages, grpo_loss
from examples.demo.policy import Policy, flat_weights, load_flat_weights
from examples.demo.task import END_TOKEN, VOCABULARY, decode, encode, make_prompts, score
from examples.demo.tensors import padded, rows_of


def _policy(seed: int = 0) -> Policy:
    torch.manual_seed(seed)
    return Policy(len(VOCABULARY), hidden_size=32)


def _prompts(count: int) -> list[torch.Tensor]:
    return [torch.tensor(encode(prompt)) for prompt in make_prompts(count, random.Random(0))]


def test_responses_differ_in_length_and_stop_at_their_end() -> None:
    responses = _policy().generate(
        _prompts(64), end_token=END_TOKEN, max_tokens=12, generator=torch.Generator().manual_seed(0)
    )
    assert len({len(response.tokens) for response in responses}) > 3
    for response in responses:
        ended = (response.tokens == END_TOKEN).nonzero().flatten().tolist()
        assert ended in ([], [len(response.tokens) - 1])
        assert ended or len(response.tokens) == 12
        assert response.logprobs.shape == response.tokens.shape


def test_logprobs_of_learning_equal_those_of_sampling() -> None:
    policy, prompts = _policy(), _prompts(16)
    responses = policy.generate(prompts, end_token=END_TOKEN, max_tokens=9, generator=torch.Generator().manual_seed(1))
    logprobs, mask = policy.response_logprobs(prompts, [response.tokens for response in responses])
    sampled = padded([response.logprobs for response in responses])
    assert mask.sum().item() == sum(len(response.tokens) for response in responses)
    assert torch.allclose(logprobs[mask], sampled[mask], atol=1e-5)


def test_prompts_and_responses_of_any_length_are_masked_apart() -> None:
    policy = _policy()
    prompts = [torch.tensor([1, 2, 3]), torch.tensor([4])]
    responses = [torch.tensor([5]), torch.tensor([6, 7, 8])]
    together, mask = policy.response_logprobs(prompts, responses)
    alone, _ = policy.response_logprobs(prompts[1:], responses[1:])
    assert mask.tolist() == [[True, False, False], [True, True, True]]
    assert torch.allclose(together[1], alone[0], atol=1e-6)


def test_flat_weights_carry_the_policy() -> None:
    source, target = _policy(0), _policy(1)
    load_flat_weights(target, flat_weights(source))
    assert torch.equal(flat_weights(target), flat_weights(source))


def test_weights_of_another_policy_are_refused() -> None:
    with pytest.raises(ValueError, match="use the same policy"):
        load_flat_weights(_policy(), torch.zeros(3))


def test_rows_come_out_of_nested_tensors_and_lists() -> None:
    rows = [torch.tensor([1, 2]), torch.tensor([3])]
    nested = torch.nested.nested_tensor(rows, layout=torch.jagged)
    for column in (nested, rows):
        assert [row.tolist() for row in rows_of(column)] == [[1, 2], [3]]
    assert padded([]).shape == (0, 0)


def test_rewards_alone_teach_the_policy() -> None:
    """Thirty steps in one process: the reward rises well above that of chance."""
    torch.manual_seed(0)
    rng, generator = random.Random(0), torch.Generator().manual_seed(0)
    policy = Policy(len(VOCABULARY))
    optimizer = torch.optim.Adam(policy.parameters(), lr=5e-3)
    means = []
    for _ in range(30):
        texts = [prompt for prompt in make_prompts(12, rng) for _ in range(8)]
        prompts = [torch.tensor(encode(text)) for text in texts]
        responses = policy.generate(prompts, end_token=END_TOKEN, max_tokens=22, generator=generator)
        tokens = [response.tokens for response in responses]
        rewards = torch.tensor([score(text, decode(row.tolist())) for text, row in zip(texts, tokens, strict=True)])
        means.append(rewards.mean().item())
        advantages = group_advantages(rewards, [f"g{i // 8}" for i in range(96)], 8)
        logprobs, mask = policy.response_logprobs(prompts, tokens)
        sampled = padded([response.logprobs for response in responses])
        optimizer.zero_grad()
        (grpo_loss(logprobs, sampled, advantages, mask, token_scale=16.0) / 96).backward()
        optimizer.step()
    assert sum(means[-5:]) > 3 * sum(means[:5])
