from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from examples.demo.learner import Learner, join_ranks
from examples.demo.policy import Policy, flat_weights
from examples.demo.step_stats import StepStats


@pytest.fixture
def only_rank(tmp_path: Path) -> Iterator[None]:
    join_ranks(str(tmp_path), 0, rank_count=1)
    yield
    dist.destroy_process_group()


def _learner() -> Learner:
    torch.manual_seed(0)
    return Learner(Policy(14, hidden_size=16), learning_rate=1e-2)


def _accumulate(learner: Learner, rows: slice = slice(None)) -> None:
    """Learn from responses as if the policy of now had sampled them."""
    with torch.no_grad():
        logprobs, mask = learner.policy.response_logprobs(PROMPTS[rows], RESPONSES[rows])
    sampled = [row[is_token] for row, is_token in zip(logprobs, mask, strict=True)]
    learner.accumulate(PROMPTS[rows], RESPONSES[rows], sampled, ADVANTAGES[rows])


PROMPTS = [torch.tensor([1, 10, 2, 11]), torch.tensor([3, 10, 4, 11])] * 2
RESPONSES = [torch.tensor([12, 13]), torch.tensor([12, 12, 12, 13]), torch.tensor([13]), torch.tensor([12] * 6)]
ADVANTAGES = torch.tensor([1.0, -1.0, 0.5, -0.5])


@pytest.mark.usefixtures("only_rank")
def test_micro_batches_add_up_to_their_batch() -> None:
    whole, parts = _learner(), _learner()
    _accumulate(whole)
    for half in (slice(0, 2), slice(2, 4)):
        _accumulate(parts, half)
    assert whole.update(4) == pytest.approx(parts.update(4), abs=1e-6)
    assert torch.allclose(flat_weights(whole.policy), flat_weights(parts.policy), atol=1e-6)


@pytest.mark.usefixtures("only_rank")
def test_an_update_makes_good_responses_likelier() -> None:
    learner = _learner()
    before, mask = learner.policy.response_logprobs(PROMPTS, RESPONSES)
    for _ in range(5):
        _accumulate(learner)
        learner.update(4)
    after, _ = learner.policy.response_logprobs(PROMPTS, RESPONSES)
    gain = ((after - before) * mask).sum(1) * ADVANTAGES
    assert gain.sum().item() > 0


@pytest.mark.usefixtures("only_rank")
def test_an_empty_rank_takes_part() -> None:
    learner = _learner()
    before = flat_weights(learner.policy)
    assert learner.update(0) == 0.0
    assert torch.equal(flat_weights(learner.policy), before)


@pytest.mark.usefixtures("only_rank")
def test_stats_become_a_summary() -> None:
    stats = StepStats()
    stats.add(torch.tensor([1.0, 0.5]), tokens=30, lag_sum=3.0)
    stats.add(torch.tensor([0.0, 1.0]), tokens=20, lag_sum=1.0)
    summary = stats.sum_over_ranks(7, begun=stats.started)
    assert (summary.step, summary.samples, summary.tokens) == (7, 4, [50])
    assert (summary.reward, summary.solved, summary.version_lag) == (0.625, 0.5, 1.0)
    assert summary.imbalance == 0.0
    assert summary.samples_per_second > 0
