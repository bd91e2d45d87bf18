"""On Ray a mesh gives the losses and gradient norms of one device, in full-parameter training and through a LoRA."""

import pytest

import twinkle
from twinkle import DeviceMesh
from twinkle.model import TransformersModel
from twinkle_core import session

ROWS = [{"input_ids": list(range(start, start + length)), "labels": list(range(start, start + length))}
        for start, length in ((5, 20), (50, 7), (400, 13), (700, 16), (90, 5), (300, 11), (31, 9))]
LORA = {"r": 4, "lora_alpha": 8, "target_modules": "all-linear"}


def numbers(lora: bool, **place) -> list[tuple[float, float]]:
    model = TransformersModel("tiny://qwen3", device="cpu", dtype="float32", **place)
    if lora:
        model.add_adapter_to_model("mine", LORA)
    model.set_optimizer("AdamW", lr=1e-3)
    model.set_processor(micro_batch_size=2)
    found = []
    for _ in range(3):
        model.forward_backward(inputs=ROWS)
        model.clip_grad_and_step()
        metrics = model.calculate_metric(is_training=True)
        found.append((metrics["loss"], metrics["grad_norm"]))
    return found


@pytest.fixture(scope="module")
def one_device() -> dict[bool, list[tuple[float, float]]]:
    twinkle.initialize(mode="local")
    found = {lora: numbers(lora) for lora in (False, True)}
    session.stop()
    return found


@pytest.mark.slow
@pytest.mark.parametrize("lora", [False, True], ids=["whole", "lora"])
@pytest.mark.parametrize("axis", ["dp", "fsdp", "tp", "pp"])
def test_two_ranks_train_as_one_device(one_device, start, axis: str, lora: bool) -> None:
    start(model=2)
    found = numbers(lora, remote_group="model", device_mesh=DeviceMesh.from_sizes(**{f"{axis}_size": 2}))
    for (loss, norm), (expected_loss, expected_norm) in zip(found, one_device[lora], strict=True):
        assert loss == pytest.approx(expected_loss, rel=1e-5)
        assert norm == pytest.approx(expected_norm, rel=1e-5)
