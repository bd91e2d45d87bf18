"""What of a checkpoint is uploaded to a hub."""

from pathlib import Path

import pytest

from twinkle_core import registry, session
from twinkle_core.errors import CheckpointError
from twinkle_core.model.transformers_model import TransformersModel


class RecordingHub:
    """Takes an upload and keeps the names and contents of its files."""

    files: dict[str, bytes]

    def upload(self, folder: Path, repo_id: str, *, kind: str, private: bool = True) -> str:
        type(self).files = {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
        return f"ms://{repo_id}?kind={kind}&private={private}"


@pytest.fixture
def model(tiny, monkeypatch) -> TransformersModel:
    session.stop()
    model = TransformersModel(str(tiny("qwen3")), device="cpu")
    resolve = registry.resolve
    monkeypatch.setattr(registry, "resolve", lambda kind, name: RecordingHub if kind == "hubs" else resolve(kind, name))
    return model


def test_weights_config_and_tokenizer_are_uploaded_and_the_training_state_is_not(model, rows, tmp_path):
    model.forward_backward(rows)
    model.step()
    path = Path(model.save("best", str(tmp_path), with_optimizer=True))
    assert model.upload_to_hub(str(path), "ms://org/name", private=False) == "ms://org/name?kind=model&private=False"
    assert set(RecordingHub.files) == {
        "config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json",
        "chat_template.jinja"}
    assert RecordingHub.files["model.safetensors"] == (path / "model.safetensors").read_bytes()


def test_a_damaged_checkpoint_is_not_uploaded(model, tmp_path):
    path = Path(model.save("best", str(tmp_path)))
    (path / "config.json").unlink()
    with pytest.raises(CheckpointError, match="config.json` is missing"):
        model.upload_to_hub(str(path), "ms://org/name")


def test_a_folder_that_is_not_there_is_not_uploaded(model, tmp_path):
    model.save("best", str(tmp_path))
    with pytest.raises(CheckpointError, match=r"bset` is not a folder. Did you mean `best`\? Pass what `save` returned"):
        model.upload_to_hub(str(tmp_path / "bset"), "ms://org/name")
