"""The small random models of `tiny://`: what each consists of, and how its files are written.

Weights are drawn by numpy's frozen generator from the name of each parameter, so that they are the same bits on every machine and
with every version of torch, and torch's own generator is left as it was. Where they are kept is the hub's business.
"""

import copy
import json
import math
import shutil
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from twinkle_core.errors import MissingExtraError
from twinkle_core.model.loading import without_progress_bar

if TYPE_CHECKING:
    import torch

ASSETS = Path(__file__).parent / "assets"
VOCAB_SIZE = 1536
MAX_LENGTH = 2048
PAD, IM_END, VISION_START, VISION_END, IMAGE, VIDEO = 1522, 1524, 1525, 1526, 1528, 1529
"""Ids of `<|endoftext|>`, `<|im_end|>` and the marks of pictures in the tokenizer."""

EMBEDDING_STD = 0.12
"""Of the embeddings, which are the head as well. At the usual 0.02 a model whose embeddings are frozen (LoRA) cannot become sure of
a token: a normed state of width 128 times a row of length 0.02 * sqrt(128) gives logits of at most 2.6."""

_SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": MAX_LENGTH, "tie_word_embeddings": True,
    "eos_token_id": IM_END, "pad_token_id": PAD, "bos_token_id": None,
}
_LINEAR_ATTENTION = {  # head dims that vLLM's CPU kernels take: 64 or 128
    "linear_conv_kernel_dim": 4, "linear_key_head_dim": 64, "linear_value_head_dim": 64, "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "layer_types": ["linear_attention", "linear_attention", "linear_attention", "full_attention"],
}
_VISION = {"depth": 2, "hidden_size": 64, "intermediate_size": 128, "num_heads": 2, "out_hidden_size": 128, "patch_size": 16,
           "spatial_merge_size": 2, "temporal_patch_size": 2, "num_position_embeddings": 64}


@dataclass(frozen=True)
class Recipe:
    """One small model: its type and classes in transformers, its configuration, and its chat template in the assets."""

    model_type: str
    config_class: str
    model_class: str
    config: dict[str, Any]
    chat_template: str


RECIPES = {
    "qwen3": Recipe("qwen3", "Qwen3Config", "Qwen3ForCausalLM", _SHAPE, "qwen3.jinja"),
    "qwen3_moe": Recipe(
        "qwen3_moe", "Qwen3MoeConfig", "Qwen3MoeForCausalLM",
        {**_SHAPE, "moe_intermediate_size": 64, "num_experts": 4, "num_experts_per_tok": 2}, "qwen3.jinja"),
    "qwen3_5": Recipe("qwen3_5_text", "Qwen3_5TextConfig", "Qwen3_5ForCausalLM", {**_SHAPE, **_LINEAR_ATTENTION}, "qwen3_5.jinja"),
    "qwen3_5_vl": Recipe(
        "qwen3_5", "Qwen3_5Config", "Qwen3_5ForConditionalGeneration",
        {"text_config": {**_SHAPE, **_LINEAR_ATTENTION, "rope_parameters": {
            "rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 0.25, "mrope_section": [2, 1, 1],
            "mrope_interleaved": True}},
         "vision_config": _VISION, "tie_word_embeddings": True, "image_token_id": IMAGE, "video_token_id": VIDEO,
         "vision_start_token_id": VISION_START, "vision_end_token_id": VISION_END, "eos_token_id": IM_END, "pad_token_id": PAD},
        "qwen3_5.jinja"),
}


def write_tokenizer(name: str, folder: Path) -> None:
    """Write what transformers needs to load the tokenizer of the model `name`. Needs neither torch nor transformers."""
    recipe = RECIPES[name]
    _write_json(folder / "config.json", {"model_type": recipe.model_type, "architectures": [recipe.model_class], **recipe.config})
    shutil.copyfile(ASSETS / "tokenizer" / "tokenizer.json", folder / "tokenizer.json")
    shutil.copyfile(ASSETS / "templates" / recipe.chat_template, folder / "chat_template.jinja")
    _write_json(folder / "tokenizer_config.json", {
        "tokenizer_class": "TokenizersBackend", "eos_token": "<|im_end|>", "pad_token": "<|endoftext|>", "bos_token": None,
        "model_max_length": MAX_LENGTH, "clean_up_tokenization_spaces": False})


def write_model(name: str, folder: Path) -> None:
    """Write configuration, tokenizer and weights of the model `name`. Raises: `MissingExtraError` without torch."""
    try:
        import torch
        import transformers
    except ImportError as error:
        raise MissingExtraError(f"The weights of `tiny://{name}` are made with torch, which is not installed. "
                                "Run: pip install 'twinkle-core[train]'") from error
    recipe = RECIPES[name]
    write_tokenizer(name, folder)
    config = getattr(transformers, recipe.config_class)(**copy.deepcopy(recipe.config))
    with torch.random.fork_rng(devices=[]):
        model = getattr(transformers, recipe.model_class)(config)
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            _fill(parameter_name, parameter)
    model.generation_config = transformers.GenerationConfig(eos_token_id=IM_END, pad_token_id=PAD, do_sample=False)
    with without_progress_bar():
        model.save_pretrained(folder)
    (folder / "model.safetensors").chmod(0o644)


def _fill(name: str, parameter: "torch.Tensor") -> None:
    """Set a parameter from its name: matrices with the variance that keeps that of their input, norms as the model has them."""
    import numpy as np
    import torch

    draw = np.random.RandomState(zlib.crc32(name.encode()))
    if name.endswith("A_log"):  # decay rates between 1 and 16, the range that the model's own initialisation draws from
        values = np.log(draw.uniform(1.0, 16.0, size=tuple(parameter.shape)))
    elif parameter.dim() < 2:
        return
    else:
        inputs = parameter[0].numel() if parameter.dim() != 3 or "conv" in name else parameter.shape[-1]
        std = EMBEDDING_STD if "embed_tokens" in name or "lm_head" in name else 1 / math.sqrt(inputs)
        values = draw.standard_normal(tuple(parameter.shape)) * std
    parameter.copy_(torch.from_numpy(values))


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
