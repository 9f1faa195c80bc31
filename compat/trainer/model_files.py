"""Writes the files that verl reads of a model: a tokenizer of words, and a configuration."""

from __future__ import annotations

from pathlib import Path

WORD_COUNT = 250
IMAGE_TOKEN = "<|image_pad|>"
VISION_START, VISION_END = "<|vision_start|>", "<|vision_end|>"
_SPECIAL_TOKENS = ("<pad>", "<eos>", "<unk>", "<|im_end|>", IMAGE_TOKEN, "<|video_pad|>", VISION_START, VISION_END)
_TOKENS = (*_SPECIAL_TOKENS, "\n")
FIRST_WORD_ID = len(_TOKENS)
VOCABULARY_SIZE = FIRST_WORD_ID + WORD_COUNT
_SIZES = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2}


def write_model(directory: Path, *, images: bool) -> None:
    """Write the tokenizer and configuration of a model with or without images."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen2_5_VLConfig, Qwen3Config

    ids = {token: number for number, token in enumerate((*_TOKENS, *(f"w{n}" for n in range(WORD_COUNT))))}
    tokenizer = Tokenizer(models.WordLevel(ids, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(" ", "removed")
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        eos_token="<eos>",
        unk_token="<unk>",
        additional_special_tokens=list(_SPECIAL_TOKENS[3:]),
    ).save_pretrained(directory)
    text = {
        "vocab_size": VOCABULARY_SIZE,
        "intermediate_size": 8,
        "bos_token_id": None,
        "eos_token_id": ids["<eos>"],
        **_SIZES,
    }
    if not images:
        Qwen3Config(architectures=["Qwen3ForCausalLM"], **text).save_pretrained(directory)
        return
    Qwen2_5_VLConfig(
        architectures=["Qwen2_5_VLForConditionalGeneration"],
        text_config=text,
        image_token_id=ids[IMAGE_TOKEN],
        video_token_id=ids["<|video_pad|>"],
        vision_start_token_id=ids[VISION_START],
        vision_end_token_id=ids[VISION_END],
    ).save_pretrained(directory)
