"""Weights go from the ranks of a model to the ranks of a sampler, on every kind of mesh, past the driver."""

import pytest

from twinkle import DeviceMesh
from twinkle.checkpoint_engine import CheckpointEngineManager
from twinkle.data_format import SamplingParams
from twinkle.model import TransformersModel
from twinkle.sampler import TorchSampler

MODEL = "tiny://qwen3"
ROWS = [{"input_ids": list(range(start, start + 12)), "labels": list(range(start, start + 12))} for start in (5, 50, 400, 700)]
LORA = {"r": 4, "lora_alpha": 64, "target_modules": "all-linear"}


def scores(sampler: TorchSampler) -> list[float]:
    prompts = [{"input_ids": row["input_ids"]} for row in ROWS]
    responses = sampler.sample(prompts, SamplingParams(max_tokens=0, prompt_logprobs=True))
    return [number for response in responses for number in response.prompt_logprobs[1:]]


def expected(model: TransformersModel) -> list[float]:
    return [number for row in model.forward_only(inputs=ROWS)["logprobs"] for number in row[1:]]


@pytest.mark.slow
@pytest.mark.parametrize(("axis", "lora", "merge"), [
    ("fsdp", False, False), ("fsdp", True, True), ("tp", False, False), ("tp", True, True), ("tp", True, False),
    ("pp", False, False), ("pp", True, True), ("pp", True, False), ("dp", True, False),
])
def test_the_sampler_s_next_tokens_have_the_model_s_probabilities(start, axis: str, lora: bool, merge: bool) -> None:
    start(model=2, sampler=2)
    mesh = DeviceMesh.from_sizes(**{f"{axis}_size": 2})
    model = TransformersModel(MODEL, device="cpu", dtype="float32", remote_group="model", device_mesh=mesh)
    sampler = TorchSampler(
        MODEL, device="cpu", dtype="float32", remote_group="sampler", device_mesh=DeviceMesh.from_sizes(dp_size=2))
    if lora:
        model.add_adapter_to_model("mine", LORA)
    model.set_optimizer("AdamW", lr=2e-2)
    weights = CheckpointEngineManager(model=model, sampler=sampler)
    before = scores(sampler)
    for _ in range(2):
        model.forward_backward(inputs=ROWS)
        model.clip_grad_and_step()
    weights.sync_weights(merge_and_sync=merge)
    assert scores(sampler) == pytest.approx(expected(model), abs=2e-4)
    assert scores(sampler) != pytest.approx(before, abs=1e-2)
