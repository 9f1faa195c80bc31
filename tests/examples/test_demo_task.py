from __future__ import annotations

import random

import pytest

from examples.demo.task import VOCABULARY, decode, encode, make_prompts, score, sum_of


def test_text_survives_encoding() -> None:
    assert decode(encode("3+4=|||||||.")) == "3+4=|||||||."
    assert max(encode(VOCABULARY)) == len(VOCABULARY) - 1


def test_unknown_character_is_refused() -> None:
    with pytest.raises(ValueError, match="'x'"):
        encode("3x4")


def test_prompts_are_additions_of_digits() -> None:
    prompts = make_prompts(50, random.Random(0))
    assert len(prompts) == 50
    assert {len(prompt) for prompt in prompts} == {4}
    assert all(0 <= sum_of(prompt) <= 18 for prompt in prompts)


@pytest.mark.parametrize("prompt", ["34=", "a+b=", "", "+="])
def test_sum_of_something_else_is_refused(prompt: str) -> None:
    with pytest.raises(ValueError, match="expected two numbers"):
        sum_of(prompt)


def test_exact_answer_gets_the_whole_reward() -> None:
    assert score("3+4=", "|" * 7 + ".") == 1.0
    assert score("0+0=", ".") == 1.0


@pytest.mark.parametrize(
    ("better", "worse"),
    [
        ("||||||.", "|||||."),  # nearer
        ("||||||||.", "||||||||||||."),  # nearer, from above
        ("||||||.", "||||||"),  # ended
        ("||||||.", "||||||12."),  # pure
    ],
)
def test_partial_credit_orders_answers(better: str, worse: str) -> None:
    assert 1.0 > score("3+4=", better) > score("3+4=", worse) >= 0.0
