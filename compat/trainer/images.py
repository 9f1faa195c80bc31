"""An image processor: it cuts images into patches, one token per four patches, like that of Qwen2.5-VL."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from transformers import AutoProcessor, AutoTokenizer, BatchFeature, Qwen2_5_VLConfig

from compat.trainer.model_files import IMAGE_TOKEN, VISION_END, VISION_START

_PATCH_PIXELS = 14
_PATCHES_PER_TOKEN = 4


def token_count(image: Any) -> int:
    """Return the number of tokens of an image."""
    return int(_grid(image).prod()) // _PATCHES_PER_TOKEN


def text_of(image: Any) -> str:
    """Return the tokens of an image as text."""
    return " ".join([VISION_START, *[IMAGE_TOKEN] * token_count(image), VISION_END])


def _grid(image: Any) -> np.ndarray[Any, Any]:
    return np.array([1, image.height // _PATCH_PIXELS, image.width // _PATCH_PIXELS])


def _patches(image: Any) -> np.ndarray[Any, Any]:
    """Return the pixels of each patch, (patches, pixels * colours), between 0 and 1."""
    _, rows, columns = _grid(image)
    pixels = np.asarray(image, dtype=np.float32) / 255
    cut = pixels.reshape(rows, _PATCH_PIXELS, columns, _PATCH_PIXELS, 3).transpose(0, 2, 1, 3, 4)
    return cut.reshape(rows * columns, -1)


class Qwen2_5_VLProcessor:  # noqa: N801  (verl knows processors by this name)
    """The methods that verl calls of a processor of this name."""

    image_token = IMAGE_TOKEN
    image_processor = SimpleNamespace(patch_size=_PATCH_PIXELS, merge_size=2)

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self.image_token_id = tokenizer.convert_tokens_to_ids(IMAGE_TOKEN)
        self.chat_template = "none"

    @classmethod
    def from_pretrained(cls, path: str, **_kwargs: Any) -> Qwen2_5_VLProcessor:
        """Return the processor for a model's directory."""
        return cls(AutoTokenizer.from_pretrained(path))

    def __call__(self, *, text: list[str], images: list[Any] | None = None, **_kwargs: Any) -> BatchFeature:
        """Return token ids, and the patches and grids of images, if any."""
        ids = torch.tensor([self.tokenizer.encode(text[0])], dtype=torch.int64)
        found = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "mm_token_type_ids": torch.zeros_like(ids)}
        if images:
            found["pixel_values"] = torch.from_numpy(np.concatenate([_patches(image) for image in images]))
            found["image_grid_thw"] = torch.from_numpy(np.stack([_grid(image) for image in images]))
        return BatchFeature(found)


def register() -> None:
    """Register it as the processor of Qwen2.5-VL models in this process."""
    AutoProcessor.register(Qwen2_5_VLConfig, Qwen2_5_VLProcessor, exist_ok=True)
