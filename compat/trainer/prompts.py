"""Prompts, each with a fate, and the reward of an answer."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from omegaconf import DictConfig
from torch.utils.data import Dataset

from compat.trainer.model_files import WORD_COUNT

_TRAIN_COUNT, _VALIDATION_COUNT = 64, 5
_WORD_COUNTS = (3, 9, 1, 14, 6)
_IMAGE_SIZES = ((28, 28), (56, 28), (28, 84))
_REWARD_STEPS = 8


class Prompts(Dataset[dict[str, Any]]):
    """Rows like those of `verl.utils.dataset.RLHFDataset`.

    Args:
        data_files: "train" or "validation".
        tokenizer: not used.
        config: `data` of the configuration. Its `fates` are repeated over the prompts: "good"; "fails": one of its
            sessions fails; "late": it is answered so late that it is dropped; "alike": all sessions get the same
            reward. Its `images` controls whether two of three prompts have images.
        processor: not used.
        max_samples: not used.
    """

    def __init__(
        self, data_files: str, tokenizer: Any, config: DictConfig, processor: Any = None, max_samples: int = -1
    ) -> None:
        self._split = str(data_files)
        self._fates = list(config.fates) if self._split == "train" else ["good"]
        self._images = bool(config.images)

    def __len__(self) -> int:
        return _TRAIN_COUNT if self._split == "train" else _VALIDATION_COUNT

    def __getitem__(self, index: int) -> dict[str, Any]:
        rng = np.random.default_rng([index, len(self._split)])
        words = rng.integers(WORD_COUNT, size=_WORD_COUNTS[index % len(_WORD_COUNTS)])
        text = {"type": "text", "text": " ".join(f"w{word}" for word in words)}
        content: Any = [*self._pictures(index, rng), text] if self._images else text["text"]
        return {
            "data_source": f"compat/{self._split}/{index % 2}",
            "ability": "words",
            "reward_model": {"style": "rule", "ground_truth": f"w{words[0]}"},
            "extra_info": {"index": index, "fate": self._fates[index % len(self._fates)], "hints": [None, 0.5, []]},
            "raw_prompt": [{"role": "system", "content": ""}, {"role": "user", "content": content}],
            "dummy_tensor": torch.tensor([0], dtype=torch.uint8),
            "difficulty": torch.tensor([index / 7, -0.0], dtype=torch.float64),
            "index": index,
            "tools_kwargs": {},
            "interaction_kwargs": {},
        }

    def _pictures(self, index: int, rng: np.random.Generator) -> list[dict[str, Any]]:
        from PIL import Image

        sizes = [_IMAGE_SIZES[(index + n) % len(_IMAGE_SIZES)] for n in range(index % 3)]
        pixels = [rng.integers(256, size=(height, width, 3), dtype=np.uint8) for width, height in sizes]
        return [{"type": "image", "image": Image.fromarray(rows)} for rows in pixels]


def reward(
    data_source: str, solution_str: str, ground_truth: str, extra_info: dict[str, Any], **_kwargs: Any
) -> dict[str, Any]:
    """Return the score of an answer, with other values that a reward may have: numbers of other types, and text."""
    first = int(solution_str.split(maxsplit=1)[0].removeprefix("w"))
    score = 0.5 if extra_info["fate"] == "alike" else (first % _REWARD_STEPS) / _REWARD_STEPS
    return {"score": score, "acc": first % 2 == 0, "steps": 1 if first % 2 else 0.5, "said": solution_str[:12]}
