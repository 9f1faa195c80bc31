"""The contents of samples, which are derived from their keys alone, so any reader can check any sample."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np

import tq_service as tq

FIELDS: Final = ("ids", "blob", "text")
REWARD: Final = "reward"
GRADE: Final = "grade"
"""Put by some queue workers with the acknowledgement: a random number, different for every delivery."""
TAGS: Final[tuple[Any, ...]] = (7, "text", 0.5, tq.JSON_NULL, [1, "two", None], {"a": {"b": [True]}}, None)
"""Values of `tag` in the custom_meta of samples, used in turn: several types, null, and no tag."""

_HUGE_SHARE: Final = 0.01
_HUGE_BYTES: Final = (2 << 20, 3 << 20)  # sent over bulk connections unless memory is shared
_LARGE_SHARE: Final = 0.04
_LARGE_BYTES: Final = (64 << 10, 200 << 10)
_SMALL_BYTES: Final = (0, 200)


def key_of(producer: int, serial: int, row: int) -> str:
    """Return the key of one sample of a producer's put."""
    return f"p{producer}-{serial}-{row}"


def version_of(key: str) -> int:
    """Return the `version` in the custom_meta of a sample, which is the serial of its put."""
    return int(key.split("-")[1])


def tag_in(custom_meta: Mapping[str, Any]) -> Any:
    """Return a sample's tag as it was put."""
    return (tq.JSON_NULL if custom_meta["tag"] is None else custom_meta["tag"]) if "tag" in custom_meta else None


def columns_of(keys: Sequence[str]) -> dict[str, Any]:
    """Return the columns of new samples: jagged integers, jagged bytes (some of them large), and text."""
    samples = [_sample(key) for key in keys]
    return {name: [sample[name] for sample in samples] for name in FIELDS}


def rewards_of(keys: Sequence[str]) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Return the reward column, which some samples get in a second put."""
    return np.array([_rng(key).random() for key in keys])


def wrong_fields(keys: Sequence[str], batch: Mapping[str, Any]) -> list[str]:
    """Return "key: field" for each value of a batch that differs from the value put."""
    wrong = []
    rewards = rewards_of(keys)
    for position, key in enumerate(keys):
        sample = _sample(key)
        for name in set(batch) & set(FIELDS):
            got = batch[name][position]
            same = got == sample[name] if name == "text" else np.array_equal(np.asarray(got), sample[name])
            if not same:
                wrong.append(f"{key}: {name}")
        if REWARD in batch and float(batch[REWARD][position]) != rewards[position]:
            wrong.append(f"{key}: {REWARD}")
    return wrong


def _rng(key: str) -> random.Random:
    return random.Random(hashlib.blake2b(key.encode(), digest_size=8).digest())


def _sample(key: str) -> dict[str, Any]:
    rng = _rng(key)
    kind = rng.random()
    sizes = _HUGE_BYTES if kind < _HUGE_SHARE else _LARGE_BYTES if kind < _HUGE_SHARE + _LARGE_SHARE else _SMALL_BYTES
    size = rng.randint(*sizes)
    blob = np.frombuffer(hashlib.shake_128(key.encode()).digest(size), np.uint8)
    ids = np.frombuffer(hashlib.shake_128(b"ids" + key.encode()).digest(8 * rng.randint(1, 40)), np.int64)
    return {"ids": ids, "blob": blob, "text": f"text of {key} " + "é" * rng.randint(0, 30)}
