"""The task of the demo: add two digits and write the sum in tally strokes, `3+4=` -> `|||||||.`.

Strokes are used instead of digits for two reasons. First, response lengths differ from the first step to the last, so
balancing matters. Second, a nearly correct response scores better than one that is far off, so the policy learns from
rewards alone, without a supervised warm start.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

VOCABULARY = "0123456789+=|."
STROKE = "|"
END_TOKEN = VOCABULARY.index(".")
LARGEST_DIGIT = 9
MAX_RESPONSE_TOKENS = 22

_TOKEN_OF = {character: token for token, character in enumerate(VOCABULARY)}


def encode(text: str) -> list[int]:
    """Return the tokens of `text`, one per character.

    Raises:
        ValueError: a character is not in the vocabulary.
    """
    unknown = sorted(set(text) - set(VOCABULARY))
    if unknown:
        raise ValueError(f"got characters {unknown} outside the vocabulary {VOCABULARY!r}; leave them out")
    return [_TOKEN_OF[character] for character in text]


def decode(tokens: Sequence[int]) -> str:
    """Return the text of `tokens`."""
    return "".join(VOCABULARY[token] for token in tokens)


def make_prompts(count: int, rng: random.Random) -> list[str]:
    """Return `count` random additions such as `3+4=`."""
    return [f"{rng.randint(0, LARGEST_DIGIT)}+{rng.randint(0, LARGEST_DIGIT)}=" for _ in range(count)]


def sum_of(prompt: str) -> int:
    """Return the correct answer to a prompt.

    Raises:
        ValueError: the prompt does not have the form `3+4=`.
    """
    left, plus, right = prompt.removesuffix("=").partition("+")
    if not plus or not left.isdigit() or not right.isdigit():
        raise ValueError(f"got prompt {prompt!r}; expected two numbers such as '3+4='")
    return int(left) + int(right)


def score(prompt: str, response: str) -> float:
    """Return the reward of a response in [0, 1].

    Half of the reward is for the exact answer, ended in time. The other half shrinks with the difference between the
    number of strokes and the sum, and with the share of other characters.

    >>> score("3+4=", "|||||||.")
    1.0
    >>> score("3+4=", "||||||||.") > score("3+4=", "|||.")
    True
    """
    expected = sum_of(prompt)
    ended = response.endswith(".")
    written = response.removesuffix(".")
    if ended and written == STROKE * expected:
        return 1.0
    strokes = written.count(STROKE)
    closeness = max(0.0, 1.0 - abs(strokes - expected) / (expected + 1))
    purity = (strokes + 1) / (len(written) + 1)
    return 0.5 * closeness * purity * (1.0 if ended else 0.5)
