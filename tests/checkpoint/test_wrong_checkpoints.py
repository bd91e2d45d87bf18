"""A checkpoint that does not fit, or is not whole, is an error that says why, and nothing in memory has changed."""

import json
import os
import random
import shutil
import subprocess
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from twinkle_core import session
from twinkle_core.checkpoint.folder import complete_checkpoints
from twinkle_core.errors import ArgumentError, CheckpointError
from twinkle_core.model.transformers_model import TransformersModel

LORA = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"], "init_lora_weights": False}


def start(folder: Path, config: dict[str, Any] | None = None, *, name: str = "default", **options: Any) -> TransformersModel:
    session.stop()
    model = TransformersModel(str(folder), device="cpu", **options)
    if config is not None:
        model.add_adapter_to_model(name, config)
    return model


def train(model: TransformersModel, rows) -> None:
    model.forward_backward(rows)
    model.clip_grad_and_step()
    model.forward_backward(rows[:1])


def snapshot(model: TransformersModel) -> list[Any]:
    """All that a failed load may not touch: weights, gradients, optimizer, counters and random state."""
    state = model.state()
    moments = [] if state.optimizer is None else [value for entry in state.optimizer.state.values() for value in entry.values()]
    gradients = [parameter.grad for parameter in state.parameters.values() if parameter.grad is not None]
    tensors = [*model.module.state_dict().values(), *moments, *gradients, torch.get_rng_state()]
    return [state.step, state.micro_steps, state.grad_count, state.lr, random.getstate(), *[tensor.clone() for tensor in tensors]]


def assert_unchanged(before: list[Any], after: list[Any]) -> None:
    assert len(before) == len(after)
    for one, other in zip(before, after, strict=True):
        assert torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other


def refused(
    model: TransformersModel, path: str | Path, match: str, *, methods: tuple[str, ...] = ("load", "resume_from_checkpoint"),
) -> None:
    """Assert that every method refuses the checkpoint with this text and changes nothing."""
    before = snapshot(model)
    for method in methods:
        with pytest.raises(CheckpointError, match=match):
            getattr(model, method)(str(path))
        assert_unchanged(before, snapshot(model))


def rewrite(path: Path, change: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    """Change a safetensors file and say nothing of it to the manifest, but for its size and checksum."""
    from twinkle_core.checkpoint.manifest import FILE_NAME, describe_files

    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path, metadata={"format": "pt"})
    manifest = json.loads((path.parent / FILE_NAME).read_text())
    manifest["files"] = describe_files(path.parent)
    (path.parent / FILE_NAME).write_text(json.dumps(manifest))


@pytest.fixture
def full(tiny, rows, tmp_path) -> tuple[TransformersModel, Path]:
    """A model that has been trained for a step and a half, and its checkpoint."""
    model = start(tiny("qwen3"))
    train(model, rows)
    return model, Path(model.save("full", str(tmp_path / "outputs"), with_optimizer=True))


@pytest.fixture
def adapter(tiny, rows, tmp_path) -> tuple[TransformersModel, Path]:
    model = start(tiny("qwen3"), LORA)
    train(model, rows)
    return model, Path(model.save("adapter", str(tmp_path / "outputs"), with_optimizer=True))


PARTS = ["model.safetensors", "config.json", "data_state.json", "training_state/state.json", "training_state/optimizer.safetensors",
         "training_state/gradients.safetensors", "training_state/rng_rank0.json"]


@pytest.mark.parametrize("part", PARTS)
def test_a_missing_part_is_an_error_that_names_it(full, rows, part):
    model, path = full
    train(model, rows)
    (path / part).unlink()
    refused(model, path, rf"full/{part}` is missing: the checkpoint is incomplete")


@pytest.mark.parametrize("part", PARTS)
def test_a_truncated_part_is_an_error_that_names_it(full, rows, part):
    model, path = full
    train(model, rows)
    os.truncate(path / part, 1)
    refused(model, path, rf"full/{part}` has 1 bytes, \d+ were saved: the file is truncated")


def test_a_flipped_bit_is_an_error_that_names_the_file(full, rows):
    model, path = full
    content = bytearray((path / "model.safetensors").read_bytes())
    content[-100] ^= 1
    (path / "model.safetensors").write_bytes(content)
    refused(model, path, r"full/model.safetensors` does not have the content that was saved: its checksum differs")


def test_a_checkpoint_of_a_model_of_other_sizes_names_them(full, rows, tiny):
    _, path = full
    model = start(tiny("qwen3", hidden_size=16, vocab_size=72))
    train(model, rows)
    refused(model, path, r"is of another model: vocab_size is 64 there, 72 here; hidden_size is 32 there, 16 here. Build the model")


def test_a_checkpoint_of_another_architecture_names_it(full, rows, tiny):
    _, path = full
    model = start(tiny("llama"))
    train(model, rows)
    refused(model, path, r"is of another model: model_type is 'qwen3' there, 'llama' here")


def test_an_adapter_of_another_base_model_names_the_difference(adapter, rows, tiny):
    _, path = adapter
    model = start(tiny("qwen3", num_hidden_layers=3), LORA)
    train(model, rows)
    refused(model, path, r"is of another model: num_hidden_layers is 2 there, 3 here")


@pytest.mark.parametrize(("changes", "text"), [
    ({"r": 8}, r"another configuration: r is 4 there, 8 here. Call `add_adapter_to_model` with the configuration in"),
    ({"lora_alpha": 16}, r"lora_alpha is 8 there, 16 here"),
    ({"target_modules": ["q_proj"]}, r"target_modules is \['q_proj', 'v_proj'\] there, \['q_proj'\] here"),
    ({"use_rslora": True, "r": 2}, r"r is 4 there, 2 here; use_rslora is False there, True here"),
])
def test_an_adapter_of_another_configuration_names_the_difference(adapter, rows, tiny, changes, text):
    _, path = adapter
    model = start(tiny("qwen3"), LORA | changes)
    train(model, rows)
    refused(model, path, text)


def test_weights_that_are_missing_unknown_or_of_another_shape_are_named(adapter, full):
    def change(tensors: dict[str, torch.Tensor]) -> None:
        first, second = sorted(tensors)[:2]
        tensors["extra"] = tensors.pop(first)
        tensors[second] = tensors[second][:1].clone()

    for model, path in (adapter, full):
        name = "adapter_model.safetensors" if model.state().is_lora else "model.safetensors"
        rewrite(path / name, change)
        refused(model, path, r"do not fit this model: `.*` is missing; `.*` has shape \(1.*\), here \(.*. Nothing was changed")


def test_an_adapter_is_not_a_model_and_a_model_not_an_adapter(full, adapter, tiny, rows):
    (_, model_path), (_, adapter_path) = full, adapter
    model = start(tiny("qwen3"))
    train(model, rows)
    refused(model, adapter_path, r"holds an adapter, but this model has none. Call `add_adapter_to_model` first",
            methods=("load",))
    model = start(tiny("qwen3"), LORA)
    train(model, rows)
    refused(model, model_path, r"holds a whole model, not the adapter `default`. Start from it with `TransformersModel\(model_id=",
            methods=("load",))


def test_an_adapter_of_other_weights_of_the_same_sizes_is_not_resumed_and_loaded_with_a_warning(adapter, tiny, rows):
    _, path = adapter
    model = start(tiny("qwen3", seed=1), LORA)
    train(model, rows)
    text = r"adapter` is an adapter of `.*qwen3.*`, whose weights are not those of `.*`, though the sizes are the same"
    refused(model, path, text + r".*Build the model that it was trained with", methods=("resume_from_checkpoint",))
    with pytest.warns(UserWarning, match=text):
        model.load(str(path))


def test_the_same_base_in_another_dtype_is_the_same_base(adapter, tiny, rows):
    _, path = adapter
    for dtype in ("bfloat16", "float16"):
        model = start(tiny("qwen3"), LORA, dtype=dtype)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            model.load(str(path))


def test_resume_of_another_adapters_checkpoint_is_an_error_and_load_is_not(adapter, tiny, rows):
    _, path = adapter
    model = start(tiny("qwen3"), LORA, name="other")
    train(model, rows)
    refused(model, path, r"is of the adapter `default`, not of `other`. Resume with `adapter_name='default'`",
            methods=("resume_from_checkpoint",))
    model.load(str(path))


@pytest.mark.parametrize("merge", [True, False])
def test_a_checkpoint_without_optimizer_cannot_be_resumed(adapter, rows, tmp_path, merge):
    model, _ = adapter
    path = model.save("weights", str(tmp_path / "other"), merge=merge)
    text = r"was saved without optimizer state, so training cannot go on.*`save\(..., with_optimizer=True\)`"
    refused(model, path, text, methods=("resume_from_checkpoint",))
    folder_text = r"none of the adapter `default`: `weights`" if merge else r"saved without optimizer state.*with_optimizer=True"
    refused(model, tmp_path / "other", folder_text, methods=("resume_from_checkpoint",))


def test_a_model_that_twinkle_did_not_save_cannot_be_resumed(full, tiny):
    model, _ = full
    refused(model, tiny("qwen3"), r"holds weights but no `checkpoint.json`: it was not saved by Twinkle, or is not complete",
            methods=("resume_from_checkpoint",))


def test_a_folder_of_checkpoints_is_not_loaded_but_named(full):
    model, path = full
    refused(model, path.parent, r"holds 1 checkpoints. Pass one of them, e.g. `.*full`", methods=("load",))


@pytest.mark.parametrize(("path", "text"), [
    ("twinkle://run/weights/best@1", "is a checkpoint of the training service"),
    ("ms://Qwen/Qwen3.5-4B", "is not a checkpoint on this machine. Pass a folder"),
])
def test_a_uri_of_elsewhere_is_an_error_with_advice(full, path, text):
    refused(full[0], path, text)


def test_a_missing_folder_is_an_error_with_near_names(full):
    model, path = full
    refused(model, path.with_name("fulll"), r"is not a folder. Did you mean `full`\?", methods=("load",))


def test_another_optimizer_or_scheduler_than_the_saved_one_is_an_error(full, tiny, rows, tmp_path):
    _, path = full
    model = start(tiny("qwen3"))
    model.set_optimizer("SGD", lr=0.1)
    train(model, rows)
    refused(model, path, r"saved with the optimizer `AdamW`, this script sets `SGD`. Call `set_optimizer\(\"AdamW\", ...\)` before",
            methods=("resume_from_checkpoint",))
    model = start(tiny("qwen3"))
    model.set_lr_scheduler("StepLR", step_size=2)
    train(model, rows)
    refused(model, path, r"saved without a scheduler, this script sets `StepLR`. Call `set_lr_scheduler` after resuming",
            methods=("resume_from_checkpoint",))
    scheduled = model.save("scheduled", str(tmp_path), with_optimizer=True)
    model = start(tiny("qwen3"))
    train(model, rows)
    refused(model, scheduled, r"saved with the scheduler `StepLR`, this script sets none. Call `set_lr_scheduler\(\"StepLR\"",
            methods=("resume_from_checkpoint",))


def test_other_parameter_groups_than_the_saved_ones_are_an_error(full, tiny, rows):
    _, path = full
    model = start(tiny("qwen3"))
    model.set_optimizer(lambda ps: torch.optim.AdamW([{"params": ps[:2]}, {"params": ps[2:]}]))
    train(model, rows)
    refused(model, path, r"other parameter groups than this script's: groups of \[\d+\] parameters, here \[2, \d+\]",
            methods=("resume_from_checkpoint",))


def test_a_loss_scale_on_one_side_only_is_an_error(full, tiny, rows):
    _, path = full
    model = start(tiny("qwen3"), mixed_precision="fp16")
    train(model, rows)
    refused(model, path, r"was trained without a loss scale \(fp16\), this model trains with one. Use the same `mixed_precision`",
            methods=("resume_from_checkpoint",))


@pytest.mark.parametrize("name", ["", "../x", "a/b", "/x", "x@2", "a\0b", "x" * 10_000])
def test_a_name_that_is_refused_leaves_no_folder(full, tmp_path, name):
    with pytest.raises(ArgumentError, match="A checkpoint cannot be called"):
        full[0].save(name, str(tmp_path / "new"))
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(("options", "text"), [
    ({"merge": True}, r"this model has no adapter to merge. Leave `merge` out"),
    ({"keep_last": 0}, r"`keep_last=0`: use an integer"),
])
def test_options_that_mean_nothing_are_refused_before_anything_is_written(full, tmp_path, options, text):
    with pytest.raises(ArgumentError, match=text):
        full[0].save("x", str(tmp_path / "new"), **options)
    assert not (tmp_path / "new").exists()


def test_a_merged_model_with_optimizer_is_refused(adapter, tmp_path):
    with pytest.raises(ArgumentError, match=r"a merged model cannot be resumed.*Save twice"):
        adapter[0].save("x", str(tmp_path / "new"), merge=True, with_optimizer=True)


def test_scheduler_state_that_json_cannot_hold_is_an_error_that_leaves_nothing(full, tmp_path):
    class Odd:
        def __call__(self, step: int) -> float:
            return 1.0

    model, _ = full
    factor = Odd()
    factor.made_of = object()  # type: ignore[attr-defined]
    model.set_lr_scheduler(lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, factor))
    with pytest.raises(CheckpointError, match=r"\['scheduler'\].*\['made_of'\]` is a object, which a checkpoint cannot hold"):
        model.save("x", str(tmp_path / "new"), with_optimizer=True)
    assert list((tmp_path / "new").iterdir()) == []


@pytest.fixture
def small_disk(tmp_path) -> Iterator[Path]:
    """A file system of 1 MiB."""
    mounted = tmp_path / "disk"
    mounted.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(mounted)]
    if subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("mounting a file system needs root")
    yield mounted
    subprocess.run(["umount", str(mounted)], check=True)


def test_a_full_disk_leaves_earlier_checkpoints_and_the_model_as_they_were(full, rows, small_disk):
    model, _ = full
    first = Path(model.save("best", str(small_disk)))
    train(model, rows)
    before = snapshot(model)
    text = r"disk/best` was not saved: the disk is full \(about 0.\d MiB are needed, .* are free\). Earlier checkpoints"
    for _ in range(20):
        try:
            model.save("best", str(small_disk), with_optimizer=True)
        except CheckpointError as error:
            failure = error
            break
    with pytest.raises(CheckpointError, match=text):
        raise failure
    assert_unchanged(before, snapshot(model))
    assert {path.name for path in small_disk.iterdir()} == {path.name for path, _ in complete_checkpoints(small_disk)}
    model.load(str(first))


def test_the_check_of_free_space_is_not_the_only_one(full, small_disk, monkeypatch):
    model, _ = full
    monkeypatch.setattr("twinkle_core.checkpoint.folder.shutil.disk_usage", lambda path: shutil._ntuple_diskusage(2**40, 0, 2**40))
    (small_disk / "filler").write_bytes(bytes(900_000))
    with pytest.raises(CheckpointError, match=r"disk/best` was not saved: the disk is full"):
        model.save("best", str(small_disk), with_optimizer=True)
    assert [path.name for path in small_disk.iterdir()] == ["filler"]


def test_an_adapter_of_a_model_that_was_trained_first_says_so_when_added_and_when_loaded(tiny, rows, tmp_path):
    model = start(tiny("qwen3"))
    model.set_optimizer("AdamW", lr=0.01)
    train(model, rows)
    with pytest.warns(UserWarning, match=r"has taken 1 steps, and these weights were not saved: the adapter `late` alone will not "
                                         r"fit .*Call `save` before"):
        model.add_adapter_to_model("late", LORA)
    path = model.save("late", str(tmp_path))
    other = start(tiny("qwen3"))
    other.add_adapter_to_model("late", LORA)
    with pytest.warns(UserWarning, match=r"after 1 steps of training the whole model, whose weights this model does not have: "
                                         r"begin with the checkpoint of the whole model"):
        other.load(path)


def test_an_adapter_of_a_model_that_was_saved_first_fits_that_checkpoint_without_a_warning(tiny, rows, tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model = start(tiny("qwen3"))
        train(model, rows)
        whole = model.save("whole", str(tmp_path))
        model.add_adapter_to_model("late", LORA)
        path = model.save("late", str(tmp_path))
        other = start(Path(whole))
        other.add_adapter_to_model("late", LORA)
        other.load(path)
