from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from examples.demo.learner import Learner
from examples.demo.policy import Policy, flat_weights
from examples.demo.ranks import GENERATION_FILE, Ranks
from examples.demo.step_stats import StepStats, summary_of


@pytest.fixture
def only_rank(tmp_path: Path) -> Iterator[Ranks]:
    (tmp_path / GENERATION_FILE).write_text("0", encoding="utf-8")
    ranks = Ranks(str(tmp_path), 0, count=1)
    assert ranks.join(3, torch.arange(4.0))[0] == 3
    yield ranks
    ranks.leave()


def _counts(sample_count: int) -> torch.Tensor:
    return torch.tensor([sample_count], dtype=torch.float64)


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


def test_micro_batches_add_up_to_their_batch(only_rank: Ranks) -> None:
    whole, parts = _learner(), _learner()
    _accumulate(whole)
    for half in (slice(0, 2), slice(2, 4)):
        _accumulate(parts, half)
    assert whole.update(only_rank.sum, _counts(4)).tolist() == parts.update(only_rank.sum, _counts(4)).tolist() == [4.0]
    assert torch.allclose(flat_weights(whole.policy), flat_weights(parts.policy), atol=1e-6)


def test_an_update_makes_good_responses_likelier(only_rank: Ranks) -> None:
    learner = _learner()
    before, mask = learner.policy.response_logprobs(PROMPTS, RESPONSES)
    for _ in range(5):
        _accumulate(learner)
        learner.update(only_rank.sum, _counts(4))
    after, _ = learner.policy.response_logprobs(PROMPTS, RESPONSES)
    gain = ((after - before) * mask).sum(1) * ADVANTAGES
    assert gain.sum().item() > 0


def test_an_empty_rank_takes_part(only_rank: Ranks) -> None:
    learner = _learner()
    before = flat_weights(learner.policy)
    learner.update(only_rank.sum, _counts(0))
    assert torch.equal(flat_weights(learner.policy), before)


def test_a_rank_takes_over_the_state_of_another(only_rank: Ranks) -> None:
    one, other = _learner(), Learner(Policy(14, hidden_size=16), learning_rate=1e-2)
    for _ in range(2):
        _accumulate(one)
        one.update(only_rank.sum, _counts(4))
    _accumulate(other)  # of a step that was not made
    other.load_state(one.state())
    for learner in (one, other):
        _accumulate(learner)
        learner.update(only_rank.sum, _counts(4))
    assert torch.equal(one.state(), other.state())


def test_discarded_gradients_change_nothing(only_rank: Ranks) -> None:
    learner = _learner()
    before = flat_weights(learner.policy)
    _accumulate(learner)
    learner.discard()
    learner.update(only_rank.sum, _counts(4))
    assert torch.equal(flat_weights(learner.policy), before)


def test_stats_become_a_summary(only_rank: Ranks) -> None:
    stats = StepStats(trained=torch.zeros(5, dtype=torch.float64))
    stats.add(torch.tensor([1.0, 0.5]), indexes=[3, 1], tokens=30, lag_sum=3.0)
    stats.add(torch.tensor([0.0, 1.0]), indexes=[0, 3], tokens=20, lag_sum=1.0)
    summary = summary_of(7, only_rank.sum(stats.counts(0, 1, begun=stats.started)), 1)
    assert (summary.step, summary.samples, summary.tokens) == (7, 4, [50])
    assert (summary.reward, summary.solved, summary.version_lag) == (0.625, 0.5, 1.0)
    assert summary.imbalance == 0.0
    assert summary.samples_per_second > 0
    assert (summary.lost, summary.twice) == (2, 1)
