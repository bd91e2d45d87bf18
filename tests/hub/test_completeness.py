"""Which folders count as a whole model or dataset."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.hub.conftest import safetensors_bytes
from twinkle_core.hub.completeness import what_is_missing
from twinkle_core.hub.resolve import TOKENIZER_PATTERNS


@pytest.fixture
def model(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(safetensors_bytes())
    (tmp_path / "tokenizer.json").write_text("{}")
    return tmp_path


def shard(folder: Path, *names: str) -> None:
    (folder / "model.safetensors").unlink()
    for name in names:
        (folder / name).write_bytes(safetensors_bytes())


def test_configuration_and_weights_are_a_model(model: Path) -> None:
    assert what_is_missing(model, kind="model") == ""


def test_a_model_needs_its_configuration(model: Path) -> None:
    (model / "config.json").unlink()
    assert what_is_missing(model, kind="model") == "there is no `config.json`"


def test_an_adapter_needs_its_own_configuration_only(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text("{}")
    (tmp_path / "adapter_model.safetensors").write_bytes(safetensors_bytes())
    assert what_is_missing(tmp_path, kind="model") == ""


def test_an_index_that_names_a_missing_shard_is_incomplete(model: Path) -> None:
    shard(model, "model-00001-of-00002.safetensors")
    index = {"weight_map": {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}}
    (model / "model.safetensors.index.json").write_text(json.dumps(index))
    assert "`model-00002-of-00002.safetensors` is not there" in what_is_missing(model, kind="model")


def test_a_missing_shard_shows_without_an_index(model: Path) -> None:
    shard(model, "model-00001-of-00003.safetensors", "model-00003-of-00003.safetensors")
    assert what_is_missing(model, kind="model") == "`model-00002-of-00003.safetensors` is not there"


def test_all_shards_are_complete(model: Path) -> None:
    names = [f"model-0000{number}-of-00002.safetensors" for number in (1, 2)]
    shard(model, *names)
    (model / "model.safetensors.index.json").write_text(json.dumps({"weight_map": dict(zip("ab", names, strict=True))}))
    assert what_is_missing(model, kind="model") == ""


def test_a_damaged_index_is_incomplete(model: Path) -> None:
    (model / "model.safetensors.index.json").write_text("[1")
    assert what_is_missing(model, kind="model") == "`model.safetensors.index.json` is damaged"


@pytest.mark.parametrize("kept_bytes", [0, 4, 20, 4000])
def test_weights_that_are_cut_off_are_incomplete(model: Path, kept_bytes: int) -> None:
    (model / "model.safetensors").write_bytes(safetensors_bytes()[:kept_bytes])
    assert what_is_missing(model, kind="model") == "`model.safetensors` is cut off"


@pytest.mark.parametrize("name", ["model.safetensors.incomplete", "._____temp/model.safetensors"])
def test_the_rest_of_a_download_is_incomplete(model: Path, name: str) -> None:
    (model / name).parent.mkdir(exist_ok=True)
    (model / name).write_bytes(b"half")
    assert what_is_missing(model, kind="model") == f"`{name}` is the rest of an interrupted download"


def test_the_rest_of_weights_does_not_matter_to_a_tokenizer(model: Path) -> None:
    (model / "model.safetensors").rename(model / "model.safetensors.incomplete")
    assert what_is_missing(model, kind="model", patterns=TOKENIZER_PATTERNS) == ""


def test_a_link_to_nothing_is_incomplete(model: Path) -> None:
    (model / "generation_config.json").symlink_to(model / "gone")
    assert what_is_missing(model, kind="model") == "`generation_config.json` is a link to a file that does not exist"


def test_a_tokenizer_needs_a_vocabulary(model: Path) -> None:
    (model / "tokenizer.json").unlink()
    (model / "tokenizer_config.json").write_text("{}")
    assert "there is no vocabulary" in what_is_missing(model, kind="model", patterns=TOKENIZER_PATTERNS)


def test_a_configuration_alone_is_no_tokenizer(model: Path) -> None:
    (model / "tokenizer.json").unlink()
    assert what_is_missing(model, kind="model", patterns=TOKENIZER_PATTERNS) == "no file matches `tokenizer*`"


def test_a_dataset_needs_a_file(tmp_path: Path) -> None:
    assert what_is_missing(tmp_path, kind="dataset") == "it holds no files"
    (tmp_path / "train.jsonl").write_text("{}")
    assert what_is_missing(tmp_path, kind="dataset") == ""


@pytest.mark.parametrize("name", ["model.safetensors", "model.safetensors.index.json"])
def test_a_file_that_may_not_be_read_is_named(model: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    (model / "model.safetensors.index.json").write_text("{}")
    opened = Path.open

    def refuse(path: Path, *args: Any, **kwargs: Any) -> Any:
        if path.name == name:
            raise PermissionError(13, "Permission denied")
        return opened(path, *args, **kwargs)

    monkeypatch.setattr(Path, "open", refuse)
    if name != "model.safetensors.index.json":
        (model / "model.safetensors.index.json").unlink()
    assert what_is_missing(model, kind="model") == f"`{name}` cannot be read ([Errno 13] Permission denied)"
