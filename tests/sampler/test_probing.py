"""Architectures that a key-value cache or padding would get wrong are found out."""

from typing import Any

import pytest
import torch
import transformers

from twinkle_core.errors import SamplerError
from twinkle_core.sampler.probing import can_pad
from twinkle_core.sampler.torch_sampler import TorchSampler

SIZES: dict[str, Any] = {
    "vocab_size": 300, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4}
KV: dict[str, Any] = {**SIZES, "num_key_value_heads": 2}
LINEAR = {"linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8}
RECURRENT_GEMMA = transformers.RecurrentGemmaConfig(**{**SIZES, "num_hidden_layers": 3}, lru_width=32, attention_window_size=8)


def make(config: Any) -> Any:
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    for parameter in model.parameters():
        if parameter.ndim > 1:
            parameter.data.normal_(0, 0.15)
    return model


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("config", [
    transformers.LlamaConfig(**KV), transformers.MistralConfig(**KV, sliding_window=6),
    transformers.Gemma2Config(**KV, head_dim=8, sliding_window=6),
    transformers.GPT2Config(vocab_size=300, n_embd=32, n_layer=2, n_head=4, n_positions=40),
    transformers.Qwen3_5TextConfig(**KV, head_dim=8, **LINEAR),
], ids=lambda config: config.model_type)
def test_attention_and_linear_attention_can_be_padded(config: Any, dtype: torch.dtype) -> None:
    assert can_pad(make(config).to(dtype), what="it")


def test_a_model_whose_state_takes_padding_in_is_found() -> None:
    assert not can_pad(make(RECURRENT_GEMMA), what="it")


def test_a_model_that_ignores_the_cache_is_refused() -> None:
    model = make(transformers.MambaConfig(vocab_size=300, hidden_size=32, num_hidden_layers=2, state_size=8))
    with pytest.raises(SamplerError, match=r"cannot sample from `it`: with a key-value cache.*differ from those without by \d"):
        can_pad(model, what="`it`")


def test_a_model_that_refuses_the_cache_is_refused_with_its_reason() -> None:
    model = make(transformers.MiniMaxConfig(**KV, head_dim=8, num_local_experts=2, num_experts_per_tok=1))
    with pytest.raises(SamplerError, match="its code raised ValueError: MiniMax"):
        can_pad(model, what="it")


def test_prompts_of_a_model_that_cannot_be_padded_are_batched_by_length(qwen3: str, monkeypatch: pytest.MonkeyPatch) -> None:
    sampler = TorchSampler(qwen3, device="cpu")
    features: list[Any] = [{"input_ids": prompt} for prompt in ([5, 6], [7], [8, 9], [1, 2, 3])]
    expected = sampler.sample(features, {"max_tokens": 4, "seed": 1})
    seen: list[list[int]] = []

    def watched(model: Any, job: Any) -> Any:
        seen.append([len(prompt) for prompt in job.prompts])
        return complete(model, job)

    from twinkle_core.sampler import torch_sampler
    from twinkle_core.sampler.decoding import complete

    monkeypatch.setattr(torch_sampler, "complete", watched)
    monkeypatch.setattr(sampler, "_can_pad", False)
    got = sampler.sample(features, {"max_tokens": 4, "seed": 1})
    assert seen == [[1], [2, 2], [3]]
    assert [r.sequences[0].tokens for r in got] == [r.sequences[0].tokens for r in expected]


def test_a_sampler_that_cannot_pad_says_so_once(qwen3: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from twinkle_core.sampler import torch_sampler

    monkeypatch.setattr(torch_sampler, "can_pad", lambda model, what: False)
    with pytest.warns(UserWarning, match=r"only prompts of one length are computed together") as caught:
        TorchSampler(qwen3, device="cpu").sample([{"input_ids": [1]}, {"input_ids": [1, 2]}], {"max_tokens": 1})
    assert len(caught) == 1
