"""Tiny random models, one folder each, and batches for them."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

VOCAB = 101
_SMALL = dict(vocab_size=VOCAB, hidden_size=32, intermediate_size=48, num_attention_heads=4, num_key_value_heads=2, head_dim=8,
              max_position_embeddings=128)


def _llama() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig(**_SMALL, num_hidden_layers=2, tie_word_embeddings=True))


def _qwen3() -> Any:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    return Qwen3ForCausalLM(Qwen3Config(**_SMALL, num_hidden_layers=2, tie_word_embeddings=False))


def _qwen3_bf16() -> Any:
    return _qwen3().to(torch.bfloat16)


def _qwen3_sliding() -> Any:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    return Qwen3ForCausalLM(Qwen3Config(
        **_SMALL, num_hidden_layers=2, use_sliding_window=True, sliding_window=4, max_window_layers=1))


def _qwen3_moe() -> Any:
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    return Qwen3MoeForCausalLM(Qwen3MoeConfig(
        **_SMALL, num_hidden_layers=2, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16, tie_word_embeddings=False))


def _text_config() -> dict[str, Any]:
    return dict(_SMALL, num_hidden_layers=4, tie_word_embeddings=True, linear_conv_kernel_dim=4, linear_key_head_dim=8,
                linear_value_head_dim=8, linear_num_key_heads=2, linear_num_value_heads=4)


def _qwen3_5() -> Any:
    from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig

    return Qwen3_5ForCausalLM(Qwen3_5TextConfig(**_text_config()))


def _qwen3_5_vl() -> Any:
    from transformers import Qwen3_5Config, Qwen3_5ForConditionalGeneration

    vision = dict(depth=1, hidden_size=32, intermediate_size=32, num_heads=2, out_hidden_size=32, patch_size=4,
                  temporal_patch_size=2, spatial_merge_size=2, num_position_embeddings=16)
    return Qwen3_5ForConditionalGeneration(Qwen3_5Config(
        text_config=_text_config(), vision_config=vision, image_token_id=90, video_token_id=91, vision_start_token_id=92,
        vision_end_token_id=93, tie_word_embeddings=True))


def _gemma2() -> Any:
    from transformers import Gemma2Config, Gemma2ForCausalLM

    return Gemma2ForCausalLM(Gemma2Config(
        **_SMALL, num_hidden_layers=2, final_logit_softcapping=2.0, attn_logit_softcapping=20.0, query_pre_attn_scalar=8))


def _cohere() -> Any:
    from transformers import CohereConfig, CohereForCausalLM

    small = {key: value for key, value in _SMALL.items() if key != "head_dim"}
    return CohereForCausalLM(CohereConfig(
        **small, num_hidden_layers=2, logit_scale=0.25, pad_token_id=0, bos_token_id=1, eos_token_id=2))


def _recurrent_gemma() -> Any:
    from transformers import RecurrentGemmaConfig, RecurrentGemmaForCausalLM

    small = {key: value for key, value in _SMALL.items() if key != "max_position_embeddings"}
    return RecurrentGemmaForCausalLM(RecurrentGemmaConfig(
        **small, num_hidden_layers=3, lru_width=32, attention_window_size=16, block_types=("recurrent", "recurrent", "attention")))


_MAKERS = {
    "recurrent_gemma": _recurrent_gemma,
    "llama": _llama, "qwen3": _qwen3, "qwen3_bf16": _qwen3_bf16, "qwen3_sliding": _qwen3_sliding, "qwen3_moe": _qwen3_moe,
    "qwen3_5": _qwen3_5, "qwen3_5_vl": _qwen3_5_vl, "gemma2": _gemma2, "cohere": _cohere,
}


def _dtype(name: str) -> torch.dtype:
    return torch.float32 if "moe" in name else torch.float64  # torch's grouped matrix product knows no fp64


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], str]:
    """Return the folder of a tiny model, made when first asked for."""
    made: dict[str, Path] = {}

    def get(name: str) -> str:
        if name not in made:
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(1)
                model = _MAKERS[name]()
                for key, parameter in model.named_parameters():
                    if "norm" not in key:
                        parameter.data.mul_(5.0)  # far from uniform predictions, so that a wrong gradient shows
                made[name] = tmp_path_factory.mktemp(name) / "model"
                model.save_pretrained(made[name])
        return str(made[name])

    return get


@pytest.fixture
def build(folder: Callable[[str], str]) -> Callable[..., Any]:
    """Return `build(name, **options)`: a `TransformersModel` on the CPU, in fp64 (MoE: fp32) unless said otherwise."""
    from twinkle_core.model.transformers_model import TransformersModel

    def make(name: str = "qwen3", **options: Any) -> Any:
        return TransformersModel(folder(name), **{"dtype": _dtype(name), "device": "cpu", **options})

    return make


@pytest.fixture
def batch() -> Callable[..., list[dict[str, Any]]]:
    """Return `batch(*lengths)`: features whose first third is a prompt; row ids count from 100."""

    def make(*lengths: int, seed: int = 0) -> list[dict[str, Any]]:
        generator = torch.Generator().manual_seed(seed)
        features = []
        for row, length in enumerate(lengths):
            ids = torch.randint(0, VOCAB - 12, (length,), generator=generator).tolist()
            labels = [-100] * (length // 3) + ids[length // 3:]
            features.append({"input_ids": ids, "labels": labels, "row_id": 100 + row})
        return features

    return make


def alone(module: Any, features: list[dict[str, Any]]) -> tuple[float, int]:
    """Add the gradients of the summed loss of each sequence run by itself with the model's own forward; return (sum, count)."""
    total, count = 0.0, 0
    for feature in features:
        if len(feature["input_ids"]) < 2:
            continue
        logits = module(input_ids=torch.tensor([feature["input_ids"]])).logits[0, :-1]
        labels = torch.tensor(feature["labels"][1:])
        loss = torch.nn.functional.cross_entropy(logits, labels, ignore_index=-100, reduction="sum")
        loss.backward()
        total, count = total + loss.item(), count + int((labels != -100).sum())
    return total, count


@pytest.fixture
def run_alone() -> Callable[..., tuple[float, int]]:
    """The reference `alone`, as a fixture: test modules cannot import a conftest."""
    return alone


@pytest.fixture
def reference(folder: Callable[[str], str]) -> Callable[[str], Any]:
    """Return `reference(name)`: the bare transformers module in the same dtype."""

    def load(name: str) -> Any:
        from transformers import AutoModelForCausalLM

        return AutoModelForCausalLM.from_pretrained(folder(name), dtype=_dtype(name))

    return load


@pytest.fixture
def assert_same_gradients() -> Callable[..., None]:
    """Return a check that two modules hold the same gradients, by name, up to `tolerance` relative to the largest.

    1e-5 leaves room for transformers' norms, which compute in fp32 whatever the dtype.
    """

    def check(module: Any, expected: Any, *, factor: float = 1.0, tolerance: float = 1e-5) -> None:
        theirs = {name: parameter.grad for name, parameter in expected.named_parameters()}
        for name, parameter in module.named_parameters():
            if theirs[name] is None:
                assert parameter.grad is None or not parameter.grad.any(), name
                continue
            difference = float((parameter.grad * factor - theirs[name]).abs().max())
            assert difference <= tolerance * max(1e-3, float(theirs[name].abs().max())), (name, difference)

    return check
