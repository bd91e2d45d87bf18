"""Tiny models on disk for the tests of checkpoints: a vocabulary of 64 tokens, 2 to 4 layers, random weights."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    Qwen3_5Config,
    Qwen3_5ForCausalLM,
    Qwen3_5ForConditionalGeneration,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

VOCABULARY = 64
_SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 128}
_LINEAR: dict[str, Any] = {
    "num_hidden_layers": 4, "linear_conv_kernel_dim": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
    "linear_num_key_heads": 2, "linear_num_value_heads": 4}
_MOE: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
_VISION: dict[str, Any] = {
    "depth": 1, "hidden_size": 16, "num_heads": 2, "intermediate_size": 32, "out_hidden_size": 32, "patch_size": 4}


def _build(kind: str, folder: Path, *, dtype: torch.dtype = torch.float32, seed: int = 0, **changes: Any) -> Path:
    """Save a tiny model of `kind`: "llama", "qwen3", "qwen3_moe", "qwen3_5" or "qwen3_5_vl", and return its folder."""
    torch.manual_seed(seed)
    sizes = {**_SIZES, "tie_word_embeddings": kind != "llama", **changes}
    made: Any
    if kind == "llama":
        made = LlamaForCausalLM(LlamaConfig(**sizes))
    elif kind == "qwen3":
        made = Qwen3ForCausalLM(Qwen3Config(**sizes))
    elif kind == "qwen3_moe":
        made = Qwen3MoeForCausalLM(Qwen3MoeConfig(**sizes, **_MOE))
    elif kind == "qwen3_5":
        made = Qwen3_5ForCausalLM(Qwen3_5TextConfig(**{**sizes, **_LINEAR}))
    else:
        tie = {"tie_word_embeddings": True}
        made = Qwen3_5ForConditionalGeneration(Qwen3_5Config(text_config={**sizes, **_LINEAR}, vision_config=_VISION, **tie))
    made.to(dtype).save_pretrained(folder)
    _tokenizer().save_pretrained(folder)
    return folder


def _tokenizer() -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.WordLevel({f"t{index}": index for index in range(VOCABULARY)}, unk_token="t0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="t1", pad_token="t0",
                                   chat_template="{% for m in messages %}{{ m['content'] }}{% endfor %}")


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Returns the folder of a tiny model, saved once a session: `tiny("qwen3", vocab_size=96)`."""
    made: dict[str, Path] = {}

    def folder(kind: str, **changes: Any) -> Path:
        key = repr((kind, sorted(changes.items(), key=str)))
        if key not in made:
            made[key] = _build(kind, tmp_path_factory.mktemp(kind), **changes)
        return made[key]

    return folder


@pytest.fixture(scope="session")
def rows() -> list[dict[str, list[int]]]:
    """Four features of ragged length, the first two tokens of each unsupervised."""
    generator = torch.Generator().manual_seed(0)
    features = []
    for index in range(4):
        ids = torch.randint(1, VOCABULARY, (5 + index % 3,), generator=generator).tolist()
        features.append({"input_ids": ids, "labels": [-100, -100, *ids[2:]]})
    return features
