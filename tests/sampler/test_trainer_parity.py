"""The sampler and the trainer agree on log-probabilities (fp32, 1e-5 relative), with a LoRA and after full-parameter training too.

They cannot agree better: on linear attention the recurrent form that samples and the chunked form that trains are each up to 1e-5
off fp64.
"""

from pathlib import Path
from typing import Any

import pytest

from twinkle_core.data_format import SampleResponse, SamplingParams
from twinkle_core.errors import SamplerError
from twinkle_core.model.transformers_model import TransformersModel
from twinkle_core.sampler.torch_sampler import TorchSampler

PROMPTS: list[Any] = [{"input_ids": [17, 23, 41, 99, 180]}, {"input_ids": [201]}, {"input_ids": list(range(60, 75))}]
PARAMS = SamplingParams(max_tokens=12, temperature=1.4, top_k=100, seed=8, num_samples=2)


def check(responses: list[SampleResponse], model: TransformersModel, **options: Any) -> None:
    """Hold the sampled log-probabilities against those of the trainer on the same sequences."""
    trained = model.forward_only(responses, **options).get("logprobs")
    sequences = [sequence for response in responses for sequence in response.sequences]
    assert trained is not None
    assert len(trained) == len(sequences)
    for sequence, logprobs in zip(sequences, trained, strict=True):
        assert logprobs == pytest.approx(sequence.new_input_feature.get("old_logprobs"), rel=1e-5, abs=1e-5)


def train(model: TransformersModel, steps: int = 3) -> None:
    rows = [{**prompt, "labels": prompt["input_ids"]} for prompt in PROMPTS]
    model.set_optimizer("AdamW", lr=0.02)
    for _ in range(steps):
        model.forward_backward(rows)
        model.clip_grad_and_step()


@pytest.fixture(params=["qwen3", "qwen3_5", "tiny://qwen3_5_vl", "tiny://qwen3_moe"])
def model_id(request: pytest.FixtureRequest) -> str:
    return request.param if "://" in request.param else request.getfixturevalue(request.param)


def test_the_base_model_scores_as_the_trainer_does(model_id: str) -> None:
    check(TorchSampler(model_id, device="cpu").sample(PROMPTS, PARAMS), TransformersModel(model_id, device="cpu"))


def test_a_saved_lora_scores_as_it_does_in_the_trainer(model_id: str, tmp_path: Path) -> None:
    sampler, model = TorchSampler(model_id, device="cpu"), TransformersModel(model_id, device="cpu")
    model.add_adapter_to_model("tutor", {"r": 4, "target_modules": "all-linear"})
    train(model)
    uri = model.save("first", str(tmp_path))
    responses = sampler.sample(PROMPTS, PARAMS, adapter_uri=uri)
    check(responses, model)
    sampler.add_adapter_to_sampler("tutor", uri)
    check(sampler.sample(PROMPTS, PARAMS, adapter_name="tutor"), model)
    check(sampler.sample(PROMPTS, PARAMS), model, disable_lora=True)
    with pytest.raises(AssertionError):
        check(sampler.sample(PROMPTS, PARAMS), model)


@pytest.mark.parametrize("merge", [False, True])
def test_a_saved_model_scores_as_it_does_in_the_trainer(model_id: str, tmp_path: Path, merge: bool) -> None:
    model = TransformersModel(model_id, device="cpu")
    if merge:
        model.add_adapter_to_model("tutor", {"r": 4, "target_modules": "all-linear"})
    train(model)
    uri = model.save("first", str(tmp_path), merge=merge)
    check(TorchSampler(model_id, device="cpu").sample(PROMPTS, PARAMS, adapter_uri=uri), model)
    check(TorchSampler(uri, device="cpu").sample(PROMPTS, PARAMS), model)


def test_a_checkpoint_whose_file_was_changed_is_refused(qwen3: str, tmp_path: Path) -> None:
    model = TransformersModel(qwen3, device="cpu")
    model.add_adapter_to_model("tutor", {"r": 4, "target_modules": ["q_proj"]})
    uri = model.save("first", str(tmp_path))
    path = Path(uri) / "adapter_model.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with pytest.raises(SamplerError, match="checksum differs"):
        TorchSampler(qwen3, device="cpu").sample(PROMPTS, PARAMS, adapter_uri=uri)
