"""GRPO: advantages relative to the group, and the clipped policy-gradient loss.

Source: Shao et al., DeepSeekMath (https://arxiv.org/abs/2402.03300). The KL term is omitted, since the demo lacks a
reference model. The loss of a sequence is the sum over its tokens, not their mean, which would favor long responses
(Liu et al., Understanding R1-Zero-Like Training, https://arxiv.org/abs/2503.20783).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def group_advantages(rewards: Tensor, groups: Sequence[str | None], group_size: int, *, floor: float = 0.05) -> Tensor:
    """Return `(reward - mean of its group) / (standard deviation of its group + floor)`.

    Args:
        rewards: `(n,)`.
        groups: name of the group of each sample.
        group_size: samples per group.
        floor: prevents large advantages in groups with nearly equal rewards.

    Returns:
        `(n,)` float32, zero for groups with equal rewards.

    Raises:
        ValueError: lengths differ, or a group is incomplete.
    """
    if len(groups) != rewards.numel():
        raise ValueError(f"got {rewards.numel()} rewards and {len(groups)} group names; expected one name per reward")
    members: dict[str | None, list[int]] = {}
    for position, group in enumerate(groups):
        members.setdefault(group, []).append(position)
    advantages = torch.zeros(rewards.numel(), dtype=torch.float32)
    for group, positions in members.items():
        if len(positions) != group_size:
            raise ValueError(
                f"group {group!r} has {len(positions)} of {group_size} members here; make micro_batch_size a multiple "
                "of the group size to keep groups complete"
            )
        of_group = rewards[positions].float()
        advantages[positions] = (of_group - of_group.mean()) / (of_group.std(unbiased=False) + floor)
    return advantages


def grpo_loss(
    logprobs: Tensor,
    sampled_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    token_scale: float,
    clip: float = 0.2,
) -> Tensor:
    """Return the clipped surrogate loss, summed over the sequences.

    The importance ratio compares the current policy with the older one that sampled the tokens. It is clipped to
    `[1 - clip, 1 + clip]` if the advantage would push it further out.

    Args:
        logprobs: `(n, seq)` of the current policy, with gradient.
        sampled_logprobs: `(n, seq)` at the time of sampling.
        advantages: `(n,)`.
        mask: `(n, seq)`, true for tokens of the response.
        token_scale: divisor of the sum over a sequence, the same for all sequences.
        clip: largest deviation of the ratio from 1.
    """
    ratio = torch.exp(torch.where(mask, logprobs - sampled_logprobs, 0.0))
    gain = advantages.unsqueeze(1)
    surrogate = torch.minimum(ratio * gain, ratio.clamp(1 - clip, 1 + clip) * gain)
    return -(surrogate * mask).sum() / token_scale
