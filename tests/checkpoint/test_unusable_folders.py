"""Folders in which no checkpoint can be used are an error, never a silent beginning; nothing that cannot be read is deleted."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from twinkle_core import session
from twinkle_core.checkpoint.manifest import FILE_NAME, describe_files
from twinkle_core.errors import ArgumentError, CheckpointError
from twinkle_core.model.transformers_model import TransformersModel

LORA = {"r": 2, "target_modules": ["q_proj"]}


def start(folder: Path, *names: str) -> TransformersModel:
    session.stop()
    model = TransformersModel(str(folder), device="cpu")
    for name in names:
        model.add_adapter_to_model(name, LORA)
    return model


def step(model: TransformersModel, rows, name: str = "") -> None:
    options: dict[str, Any] = {"adapter_name": name} if name else {}
    model.forward_backward(rows, **options)
    model.clip_grad_and_step(**options)


@pytest.fixture
def saved(tiny, rows, tmp_path) -> tuple[TransformersModel, Path]:
    """A model after a step and its only checkpoint, `outputs/last`."""
    model = start(tiny("qwen3"), "default")
    step(model, rows)
    return model, Path(model.save("last", str(tmp_path / "outputs"), with_optimizer=True))


def edit(path: Path, **changes: Any) -> None:
    values = json.loads(path.read_text())
    path.write_text(json.dumps({**values, **changes}))


def edit_training_state(checkpoint: Path, file: str, content: bytes) -> None:
    """Change a file, and the manifest so that its checksums agree."""
    (checkpoint / "training_state" / file).write_bytes(content)
    edit(checkpoint / FILE_NAME, files=describe_files(checkpoint))


def newer_format(path: Path) -> None:
    edit(path / FILE_NAME, format_version=2)


def truncated(path: Path) -> None:
    weights = path / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:50])


def broken_manifest(path: Path) -> None:
    (path / FILE_NAME).write_text("{")


def no_manifest(path: Path) -> None:
    (path / FILE_NAME).unlink()


@pytest.mark.parametrize(("damage", "why"), [
    (newer_format, "reads up to format 1"), (truncated, "truncated"), (broken_manifest, "cannot be read"),
    (no_manifest, "has no `checkpoint.json`")])
def test_a_folder_of_checkpoints_none_of_which_can_be_used_is_an_error(saved, damage, why):
    model, path = saved
    damage(path)
    with pytest.raises(CheckpointError, match=rf"holds 1 checkpoint\(s\) that cannot be used, and none that can: .*{why}.*"
                                              "To begin anew, save to another folder"):
        model.resume_from_checkpoint(str(path.parent))


def test_a_damaged_checkpoint_beside_a_good_one_is_passed_over_with_a_warning(saved):
    model, path = saved
    broken_manifest(Path(model.save("last", str(path.parent), with_optimizer=True)))
    with pytest.warns(UserWarning, match="Passed over a damaged checkpoint"):
        assert model.resume_from_checkpoint(str(path.parent)) == str(path)


def test_a_folder_without_checkpoints_is_a_fresh_start(saved, tmp_path):
    (tmp_path / "other" / "logs").mkdir(parents=True)
    assert saved[0].resume_from_checkpoint(str(tmp_path / "other")) is False


def test_loading_an_empty_folder_says_that_it_holds_no_checkpoint(saved, tmp_path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(CheckpointError, match="empty` holds no checkpoint: neither a model"):
        saved[0].load(str(tmp_path / "empty"))


def test_the_home_of_nobody_is_no_place_for_checkpoints(saved):
    with pytest.raises(ArgumentError, match="'~no-such-user/x' is not the path of a checkpoint"):
        saved[0].save("last", "~no-such-user/x")


def test_a_warning_points_at_the_line_of_the_caller(saved):
    model, path = saved
    broken_manifest(Path(model.save("last", str(path.parent), with_optimizer=True)))
    with pytest.warns(UserWarning, match="Passed over") as caught:
        model.resume_from_checkpoint(str(path.parent))
    assert caught[0].filename == __file__


def test_a_path_that_is_a_file_is_an_error(saved):
    with pytest.raises(CheckpointError, match="is a file, not a folder of checkpoints"):
        saved[0].resume_from_checkpoint(str(saved[1] / FILE_NAME))


def test_keep_last_leaves_checkpoints_that_it_cannot_read(saved):
    model, path = saved
    newer_format(path)
    for _ in range(3):
        model.save("last", str(path.parent), with_optimizer=True, keep_last=1)
    assert sorted(entry.name for entry in path.parent.iterdir()) == ["last", "last@4"]


def test_keep_last_counts_the_versions_of_one_adapter_and_kind_only(tiny, rows, tmp_path):
    model = start(tiny("qwen3"), "ada", "bob")
    for _ in range(2):
        for name in ("ada", "bob"):
            model.save("last", str(tmp_path / "outputs"), adapter_name=name, with_optimizer=True, keep_last=1)
    model.save("last", str(tmp_path / "outputs"), adapter_name="ada", merge=True, keep_last=1)
    assert sorted(entry.name for entry in (tmp_path / "outputs").iterdir()) == ["last@3", "last@4", "last@5"]
    assert model.resume_from_checkpoint(str(tmp_path / "outputs"), adapter_name="ada") == str(tmp_path / "outputs" / "last@3")


@pytest.mark.parametrize("changes", [
    {"files": None}, {"files": []}, {"files": {"a": "x"}}, {"files": {"a": [1, "x"]}}, {"identity": None}, {"identity": [1]},
    {"identity": {"model": 5}}, {"identity": {"base_samples": [1]}}, {"identity": {"base_samples": {"a": "x"}}}, {"step": "x"},
    {"step": -1}, {"saved_at": "x"}, {"kind": "zzz"}, {"adapter_name": 5}, {"has_training_state": "no"}])
def test_a_manifest_with_a_wrong_type_is_an_error_that_names_file_and_field(saved, changes):
    model, path = saved
    edit(path / FILE_NAME, **changes)
    for call in (model.load, model.resume_from_checkpoint):
        with pytest.raises(CheckpointError, match=f"last/{FILE_NAME}` was changed: `{next(iter(changes))}` is "):
            call(str(path))


def test_a_deeply_nested_manifest_is_an_error_that_names_the_file(saved):
    model, path = saved
    (path / FILE_NAME).write_text("[" * 100_000)
    with pytest.raises(CheckpointError, match=f"last/{FILE_NAME}` cannot be read"):
        model.resume_from_checkpoint(str(path))


def test_one_edited_manifest_does_not_break_the_others(saved):
    model, path = saved
    edit(Path(model.save("last", str(path.parent), with_optimizer=True)) / FILE_NAME, step="x")
    with pytest.warns(UserWarning, match="`step` is 'x'"):
        assert model.resume_from_checkpoint(str(path.parent)) == str(path)


@pytest.mark.parametrize(("file", "content"), [
    ("state.json", b"[]"), ("state.json", b"{}"), ("state.json", b"[" * 100_000), ("optimizer.safetensors", b"xx"),
    ("gradients.safetensors", b"xx"), ("rng_rank0.json", b"{}"), ("rng_rank0.json", b'{"python": [1]}'),
    ("rng_rank0.json", b'{"$tensor": [1], "dtype": "no"}')])
def test_a_damaged_training_state_is_an_error_and_changes_nothing(tiny, saved, file, content):
    path = saved[1]
    edit_training_state(path, file, content)
    model = start(tiny("qwen3"), "default")
    before = [parameter.detach().clone() for parameter in model.module.parameters()] + [torch.get_rng_state()]
    with pytest.raises(CheckpointError, match="training_state"):
        model.resume_from_checkpoint(str(path))
    after = [*model.module.parameters(), torch.get_rng_state()]
    assert all(torch.equal(one, other) for one, other in zip(before, after, strict=True))


@pytest.mark.parametrize("changes", [
    {"step": "x"}, {"step": -1}, {"micro_steps": None}, {"optimizer": {"class": "AdamW"}}, {"optimizer": 5}, {"scheduler": 5},
    {"scaler": {"scale": "x"}}])
def test_an_edited_training_state_is_an_error(tiny, saved, changes):
    path = saved[1]
    state = path / "training_state" / "state.json"
    edit_training_state(path, "state.json", json.dumps({**json.loads(state.read_text()), **changes}).encode())
    with pytest.raises(CheckpointError):
        start(tiny("qwen3"), "default").resume_from_checkpoint(str(path))
