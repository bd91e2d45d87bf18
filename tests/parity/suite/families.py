"""The models of the suite: small, with every kind of weight that parallelism treats in a way of its own.

Weights are wide enough for predictions far from uniform, and those of norms are not all one: a gradient that is missing, doubled
or misplaced then shows. 8 heads, 4 key/value heads and a vocabulary of 128 can be cut by 2 and by 4.
"""

from pathlib import Path
from typing import Any

import torch

VOCABULARY = 128
_SIZES: dict[str, Any] = dict(
    vocab_size=VOCABULARY, hidden_size=64, intermediate_size=96, num_attention_heads=8, num_key_value_heads=4, head_dim=8,
    max_position_embeddings=128)


def build(family: str, layers: int, folder: Path) -> None:
    """Write the model of a family to `folder`."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        model = MAKERS[family](layers)
        _spread(model)
        model.save_pretrained(folder)


def _spread(module: torch.nn.Module) -> None:
    """Make weights wide, in place, and those of norms differ."""
    generator = torch.Generator().manual_seed(11)
    for name, parameter in module.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        if "norm" in name:
            parameter.data += 0.1 * noise
        elif parameter.ndim > 1:
            parameter.data *= 1.5


def _llama(layers: int) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig(**_SIZES, num_hidden_layers=layers, tie_word_embeddings=False))


def _qwen3(layers: int) -> Any:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    return Qwen3ForCausalLM(Qwen3Config(**_SIZES, num_hidden_layers=layers, tie_word_embeddings=True))


def _qwen3_sliding(layers: int) -> Any:
    """The later half of the layers sees four tokens only: with the list of another stage a layer gets the wrong mask."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    return Qwen3ForCausalLM(Qwen3Config(
        **_SIZES, num_hidden_layers=layers, tie_word_embeddings=True, use_sliding_window=True, sliding_window=4,
        max_window_layers=layers // 2))


def _qwen3_moe(layers: int) -> Any:
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    return Qwen3MoeForCausalLM(Qwen3MoeConfig(
        **_SIZES, num_hidden_layers=layers, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32,
        tie_word_embeddings=False))


def _qwen3_5(layers: int) -> Any:
    from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig

    return Qwen3_5ForCausalLM(Qwen3_5TextConfig(
        **_SIZES, num_hidden_layers=layers, tie_word_embeddings=True, linear_conv_kernel_dim=4, linear_key_head_dim=8,
        linear_value_head_dim=8, linear_num_key_heads=4, linear_num_value_heads=8))


MAKERS = {"llama": _llama, "qwen3": _qwen3, "qwen3_sliding": _qwen3_sliding, "qwen3_moe": _qwen3_moe, "qwen3_5": _qwen3_5}
