"""docs/samplers.md: its code runs, its examples and tables are true."""

import re
from pathlib import Path

import pytest
from fake_view import FakeView, Row, parts, view_of_groups, view_of_samples

from tq_service.samplers import (
    GRPOGroupNSampler,
    PackedSampler,
    PlanRequest,
    RankAwareSampler,
    SamplerRegistry,
    SeqlenBalancedSampler,
    SequentialSampler,
    TokenBudgetSampler,
)

DOCUMENT = (Path(__file__).parents[2] / "docs" / "samplers.md").read_text()


def request(batch_size, *, min_size=None):
    return PlanRequest(batch_size=batch_size, min_size=min_size or 2 * batch_size, rank_count=2)


def test_the_code_runs():
    blocks = re.findall(r"(<!-- not run -->\n)?```python\n(.*?)```", DOCUMENT, re.DOTALL)
    code = [block for not_run, block in blocks if not not_run]
    assert len(code) == 5
    exec(compile("\n".join(code), "docs/samplers.md", "exec"), {"__name__": "samplers_document"})


@pytest.mark.parametrize("info", SamplerRegistry().describe(), ids=lambda info: info.name)
def test_every_sampler_has_its_section_and_options(info):
    section = DOCUMENT.split(f"## `{info.name}`\n")[1].split("\n## ")[0]
    assert re.findall(r"^\| `(\w+)` \|", section, re.MULTILINE) == [option.name for option in info.options]


def test_the_worked_examples():
    assert parts(SequentialSampler().plan(view_of_samples(12), request(4))) == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert parts(SequentialSampler().plan(view_of_samples(5), request(4, min_size=1))) == [[0, 1, 2], [3, 4]]
    prompts = FakeView([Row(i, group="abcd"[i // 3], ready=i != 4) for i in range(12)])
    assert parts(GRPOGroupNSampler(n_samples_per_prompt=3).plan(prompts, request(3))) == [[0, 1, 2], [6, 7, 8]]
    runs = FakeView([Row(i, ready=i not in {0, 5}) for i in range(9)])
    assert parts(GRPOGroupNSampler(n_samples_per_prompt=3, blocks="anywhere").plan(runs, request(3))) == [
        [1, 2, 3],
        [6, 7, 8],
    ]
    assert parts(RankAwareSampler().plan(view_of_samples(6), request(3))) == [[0, 2, 4], [1, 3, 5]]
    pairs = RankAwareSampler(n_samples_per_prompt=2).plan(view_of_samples(8), request(4))
    assert parts(pairs) == [[0, 1, 4, 5], [2, 3, 6, 7]]
    tokens = view_of_groups([2, 2, 2, 2], lengths=[500, 400, 500, 300, 100, 200, 150, 50])
    balanced = SeqlenBalancedSampler(n_samples_per_prompt=2).plan(tokens, request(4))
    assert parts(balanced) == [[0, 1, 6, 7], [2, 3, 4, 5]]
    view = view_of_samples(7, lengths=[700, 300, 400, 500, 200, 600, 100])
    budget = TokenBudgetSampler(tokens_per_rank=1000).plan(view, request(8))
    assert parts(budget) == [[0, 1], [2, 3]]
    view = view_of_samples(6, lengths=[900, 800, 300, 250, 150, 100])
    packed = PackedSampler(optimizer_steps=1, pack_max_length=1000).plan(view, request(3))
    assert [[rank.rows[pack.positions].tolist() for pack in rank.steps[0]] for rank in packed.ranks] == [
        [[1, 4], [2]],
        [[0, 5], [3]],
    ]
