"""Tiny random models that samplers are tested on."""

import shutil
from pathlib import Path
from typing import Any

import pytest

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")


@pytest.fixture(scope="session")
def qwen3_5(standin_cache: Path) -> str:
    """A tiny Qwen3.5: three layers of linear attention, then one of full attention."""
    return str(standin_cache / "models" / "Qwen" / "Qwen3___5-4B")


@pytest.fixture(scope="session")
def qwen3(qwen3_5: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    """A tiny Qwen3 with untied weights and 64 positions."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    return build(Qwen3ForCausalLM(Qwen3Config(
        vocab_size=512, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        head_dim=8, max_position_embeddings=64, tie_word_embeddings=False, eos_token_id=2, pad_token_id=0)),
        tmp_path_factory.mktemp("qwen3"), tokenizer=qwen3_5)


def build(model: Any, folder: Path, *, tokenizer: str) -> str:
    """Save a model whose weights are large enough that its distributions are not flat, with a tokenizer."""
    import torch

    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim > 1:
                scale = 0.4 if "embed" in name or "lm_head" in name else 0.15
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * scale)
    model.save_pretrained(folder)
    for name in TOKENIZER_FILES:
        shutil.copy(Path(tokenizer) / name, folder)
    return str(folder)
