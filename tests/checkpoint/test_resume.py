"""A run that is saved and resumed goes on exactly as one that was not interrupted."""

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from twinkle_core import session
from twinkle_core.errors import CheckpointError
from twinkle_core.model.transformers_model import TransformersModel

LORA = {"r": 4, "lora_alpha": 8, "target_modules": "all-linear", "lora_dropout": 0.2, "init_lora_weights": False}
Rows = list[dict[str, list[int]]]


def start(
    folder: Path, *, lora: bool, accumulation: int = 1, schedule: bool = True, optimizer: Any = "AdamW", **options: Any,
) -> TransformersModel:
    """Begin a run anew, as another process would."""
    session.stop()
    torch.manual_seed(99)  # what another process draws from is not what was saved
    model = TransformersModel(str(folder), device="cpu", gradient_accumulation_steps=1 if lora else accumulation, **options)
    if lora:
        model.add_adapter_to_model("default", LORA, gradient_accumulation_steps=accumulation)
    model.set_optimizer(optimizer, lr=1e-2)
    if schedule:
        model.set_lr_scheduler("CosineWarmupScheduler", num_training_steps=12, num_warmup_steps=3)
    return model


def train(model: TransformersModel, rows: Rows, calls: int, begin: int = 0) -> list[tuple[float, bool, Any]]:
    """Train on rotating rows and return what can be seen of each call: loss, whether it stepped, learning rate."""
    seen = []
    for call in range(begin, begin + calls):
        batch = [rows[call % 4], rows[(call + 1) % 4]]
        loss = model.forward_backward(batch)["loss"]
        has_stepped = model.clip_grad_and_step(0.5)
        seen.append((loss, has_stepped, model.state().lr))
    return seen


def weights(model: TransformersModel) -> dict[str, torch.Tensor]:
    return model.get_state_dict()


def assert_same_bits(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> None:
    assert ours.keys() == theirs.keys()
    assert [name for name in ours if not torch.equal(ours[name], theirs[name])] == []


@pytest.mark.parametrize(("kind", "lora"), [
    ("qwen3", True), ("qwen3", False), *(pytest.param(kind, lora, marks=pytest.mark.slow) for kind, lora in (
        ("llama", False), ("qwen3_5", True), ("qwen3_5", False), ("qwen3_5_vl", False), ("qwen3_moe", False)))])
def test_losses_rates_and_weights_after_resume_equal_the_uninterrupted_run(tiny: Callable[..., Path], rows, tmp_path, kind, lora):
    folder = tiny(kind)
    model = start(folder, lora=lora)
    train(model, rows, 3)
    path = model.save("last", str(tmp_path), with_optimizer=True)
    expected, expected_weights = train(model, rows, 5, begin=3), weights(model)

    model = start(folder, lora=lora)
    assert model.resume_from_checkpoint(path) == path
    assert train(model, rows, 5, begin=3) == expected
    assert_same_bits(weights(model), expected_weights)
    assert model.state().step == 8


@pytest.mark.parametrize("lora", [True, False])
@pytest.mark.parametrize("calls", [4, 5])
def test_resume_in_the_middle_of_an_accumulation_window_takes_the_same_steps(tiny, rows, tmp_path, lora, calls):
    folder = tiny("qwen3")
    model = start(folder, lora=lora, accumulation=3)
    train(model, rows, calls)
    path = model.save("last", str(tmp_path), with_optimizer=True)
    expected, expected_weights = train(model, rows, 5, begin=calls), weights(model)

    model = start(folder, lora=lora, accumulation=3)
    model.resume_from_checkpoint(path)
    resumed = train(model, rows, 5, begin=calls)
    assert resumed == expected
    assert [calls + 1 + index for index, (_, has_stepped, _) in enumerate(resumed) if has_stepped] == [6, 9]
    assert_same_bits(weights(model), expected_weights)


def test_a_window_that_is_resumed_with_another_length_ends_at_that_length(tiny, rows, tmp_path):
    model = start(tiny("qwen3"), lora=True, accumulation=2)
    train(model, rows, 3)  # one step, and one backward pass of the next window
    path = model.save("last", str(tmp_path), with_optimizer=True)
    model = start(tiny("qwen3"), lora=True, accumulation=4)
    model.resume_from_checkpoint(path)
    assert [has_stepped for _, has_stepped, _ in train(model, rows, 8)] == [False, False, True, False, False, False, True, False]


def test_gradients_that_no_step_has_consumed_are_resumed(tiny, rows, tmp_path):
    model = start(tiny("qwen3"), lora=False)
    model.forward_backward(rows[:2])
    path = model.save("last", str(tmp_path), with_optimizer=True)
    model.forward_backward(rows[2:])
    model.clip_grad_and_step()
    expected = weights(model)

    model = start(tiny("qwen3"), lora=False)
    model.resume_from_checkpoint(path)
    model.forward_backward(rows[2:])
    model.clip_grad_and_step()
    assert_same_bits(weights(model), expected)


def test_resume_within_one_run_goes_back_to_the_checkpoint(tiny, rows, tmp_path):
    model = start(tiny("qwen3"), lora=True)
    train(model, rows, 2)
    path = model.save("last", str(tmp_path), with_optimizer=True)
    expected = train(model, rows, 3)
    model.resume_from_checkpoint(path)
    assert train(model, rows, 3) == expected


def test_a_checkpoint_from_before_the_first_step_resumes(tiny, rows, tmp_path):
    session.stop()
    model = TransformersModel(str(tiny("qwen3")), device="cpu")
    path = model.save("first", str(tmp_path), with_optimizer=True)
    expected = train(model, rows, 2)
    model.resume_from_checkpoint(path)
    assert model.state().step == 0
    assert train(model, rows, 2) == expected


@pytest.mark.parametrize("optimizer", ["SGD", "Adafactor", "NAdam", lambda ps, lr: torch.optim.AdamW(
    [{"params": ps[:3], "lr": lr / 2}, {"params": ps[3:]}], lr=lr, amsgrad=True)], ids=["SGD", "Adafactor", "NAdam", "groups"])
def test_every_kind_of_optimizer_state_survives(tiny, rows, tmp_path, optimizer):
    model = start(tiny("qwen3"), lora=True, optimizer=optimizer)
    train(model, rows, 3)
    path = model.save("last", str(tmp_path), with_optimizer=True)
    expected = train(model, rows, 3)
    model = start(tiny("qwen3"), lora=True, optimizer=optimizer)
    model.resume_from_checkpoint(path)
    assert train(model, rows, 3) == expected


@pytest.mark.parametrize(("name", "options"), [
    ("OneCycleLR", {"max_lr": 1e-2, "total_steps": 20}), ("MultiStepLR", {"milestones": [2, 2, 5]}), ("CyclicLR", {
        "base_lr": 1e-3, "max_lr": 1e-2, "cycle_momentum": False}), ("StepLR", {"step_size": 2})])
def test_every_kind_of_scheduler_state_survives(tiny, rows, tmp_path, name, options):
    def run() -> TransformersModel:
        model = start(tiny("qwen3"), lora=True, schedule=False)
        model.set_lr_scheduler(name, **options)
        return model

    model = run()
    train(model, rows, 3)
    path = model.save("last", str(tmp_path), with_optimizer=True)
    expected = train(model, rows, 4)
    model = run()
    model.resume_from_checkpoint(path)
    assert train(model, rows, 4) == expected


@pytest.mark.slow
def test_an_adapter_of_a_bf16_model_resumes(tiny, rows, tmp_path):
    folder = tiny("qwen3_5", dtype=torch.bfloat16)
    model = start(folder, lora=True)
    train(model, rows, 3)
    path = model.save("last", str(tmp_path), with_optimizer=True)
    expected, expected_weights = train(model, rows, 3), weights(model)
    model = start(folder, lora=True)
    model.resume_from_checkpoint(path)
    assert train(model, rows, 3) == expected
    assert_same_bits(weights(model), expected_weights)


def test_settings_that_the_checkpoint_overrules_are_named(tiny, rows, tmp_path):
    session.stop()
    model = start(tiny("qwen3"), lora=True)
    train(model, rows, 2)
    path = model.save("last", str(tmp_path), with_optimizer=True)
    expected = train(model, rows, 2)
    model = start(tiny("qwen3"), lora=True, schedule=False)
    model.set_optimizer("AdamW", lr=7e-2, weight_decay=0.5)
    model.set_lr_scheduler("CosineWarmupScheduler", num_training_steps=99, num_warmup_steps=3)
    text = (r"what the checkpoint says.*: weight_decay=0.01 \(script: 0.5\); lr=0.01 \(script: 0.07\); "
            r"num_training_steps=12 \(script: 99\)\. To")
    with pytest.warns(UserWarning, match=text):
        model.resume_from_checkpoint(path)
    assert train(model, rows, 2) == expected


def test_a_resume_with_the_same_settings_says_nothing(tiny, rows, tmp_path):
    for name, options in (("OneCycleLR", {"max_lr": 1e-2, "total_steps": 20}), ("CosineAnnealingWarmRestarts", {"T_0": 3})):
        model = start(tiny("qwen3"), lora=True, schedule=False)
        model.set_lr_scheduler(name, **options)
        train(model, rows, 4)
        path = model.save(name, str(tmp_path), with_optimizer=True)
        model = start(tiny("qwen3"), lora=True, schedule=False)
        model.set_lr_scheduler(name, **options)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            model.resume_from_checkpoint(path)


def test_the_loss_scale_of_fp16_is_resumed(tiny, rows, tmp_path):
    model = start(tiny("qwen3"), lora=False, mixed_precision="fp16")
    scaler = model.state().scaler
    assert scaler is not None
    train(model, rows, 2)
    scaler.scale, scaler.growth_interval = 256.0, 3
    path = model.save("last", str(tmp_path), with_optimizer=True)
    expected = train(model, rows, 3)
    grown = model.state().scaler
    model = start(tiny("qwen3"), lora=False, mixed_precision="fp16")
    model.resume_from_checkpoint(path)
    assert train(model, rows, 3) == expected
    assert model.state().scaler == grown


def test_adapters_resume_each_from_its_own_checkpoint(tiny, rows, tmp_path):
    def two() -> TransformersModel:
        session.stop()
        model = TransformersModel(str(tiny("qwen3")), device="cpu")
        for name in ("lora_1", "lora_10"):  # one name is the beginning of the other
            model.add_adapter_to_model(name, LORA)
        return model

    def turn(model: TransformersModel, name: str) -> float:
        loss = model.forward_backward(rows, adapter_name=name)["loss"]
        model.clip_grad_and_step(adapter_name=name)
        return loss

    model = two()
    turn(model, "lora_1")
    turn(model, "lora_10")
    turn(model, "lora_10")
    for name in ("lora_1", "lora_10"):
        model.save(name, str(tmp_path), adapter_name=name, with_optimizer=True)
    expected = [turn(model, "lora_1"), turn(model, "lora_1")]
    model = two()
    assert model.resume_from_checkpoint(str(tmp_path), adapter_name="lora_10") == str(tmp_path / "lora_10")
    assert model.resume_from_checkpoint(str(tmp_path), adapter_name="lora_1") == str(tmp_path / "lora_1")
    assert model.state("lora_10").step == 2
    assert [turn(model, "lora_1"), turn(model, "lora_1")] == expected


def test_a_folder_of_checkpoints_means_its_newest_resumable_one(tiny, rows, tmp_path):
    model = start(tiny("qwen3"), lora=True)
    for _ in range(2):
        train(model, rows, 1)
        newest = model.save("last", str(tmp_path), with_optimizer=True)
    train(model, rows, 1)
    model.save("weights", str(tmp_path))  # newer, but without an optimizer
    model = start(tiny("qwen3"), lora=True)
    assert model.resume_from_checkpoint(str(tmp_path)) == newest == str(tmp_path / "last@2")
    assert model.state().step == 2


@pytest.mark.parametrize("folder", ["", "not-there"])
def test_a_folder_without_checkpoints_resumes_nothing_and_says_so(tiny, tmp_path, folder, capsys):
    model = start(tiny("qwen3"), lora=True)
    before = weights(model)
    capsys.readouterr()
    assert model.resume_from_checkpoint(str(tmp_path / folder)) is False
    assert capsys.readouterr().err == f"twinkle: nothing to resume was found in `{tmp_path / folder}`; the model stays as it is.\n"
    assert_same_bits(weights(model), before)


def test_a_path_beside_a_checkpoint_of_a_similar_name_is_an_error(tiny, rows, tmp_path):
    model = start(tiny("qwen3"), lora=True)
    model.save("best", str(tmp_path), with_optimizer=True)
    with pytest.raises(CheckpointError, match=r"no checkpoint `.*/bset`. Did you mean `best`\?"):
        model.resume_from_checkpoint(str(tmp_path / "bset"))


def test_no_file_of_a_checkpoint_is_a_pickle(tiny, rows, tmp_path):
    model = start(tiny("qwen3"), lora=False)
    train(model, rows, 2)
    path = Path(model.save("last", str(tmp_path), with_optimizer=True))
    files = [file for file in path.rglob("*") if file.is_file()]
    assert {file.suffix for file in files} == {".json", ".safetensors", ".jinja"}
    assert [file.name for file in files if file.read_bytes()[:2] in (b"PK", b"\x80\x02", b"\x80\x04", b"\x80\x05")] == []
