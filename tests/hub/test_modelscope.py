"""ModelScope's client against the cache and against a server on the loopback interface."""

import socket
import time
from pathlib import Path

import pytest

from tests.hub.conftest import LoopbackHub, model_files, safetensors_bytes
from twinkle_core.errors import HubError, ModelError
from twinkle_core.hub import resolve_dataset, resolve_model
from twinkle_core.hub.modelscope import ModelScopeHub


@pytest.fixture
def unreachable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        monkeypatch.setenv("MODELSCOPE_ENDPOINT", f"http://127.0.0.1:{free.getsockname()[1]}")
    monkeypatch.setenv("MODELSCOPE_CACHE", str(tmp_path))


def write(folder: Path, files: dict[str, bytes]) -> Path:
    for name, data in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)
    return folder


@pytest.mark.usefixtures("unreachable")
@pytest.mark.parametrize("layout", [
    "models/org--na.me/snapshots/master", "models/org--na.me/snapshots/main", "models/org--na.me/snapshots/v1",
    "models/org/na___me", "hub/models/org/na___me", "models/org/na.me", "org/na.me", "org/na___me", "hub/org/na___me",
])
def test_a_model_in_any_layout_of_the_cache_is_used_without_a_request(tmp_path: Path, layout: str) -> None:
    folder = write(tmp_path / layout, model_files())
    assert resolve_model("ms://org/na.me") == folder


@pytest.mark.usefixtures("unreachable")
@pytest.mark.parametrize("layout", ["datasets/org--rows/snapshots/master", "datasets/org/rows", "hub/datasets/org/rows"])
def test_a_dataset_in_any_layout_of_the_cache_is_used_without_a_request(tmp_path: Path, layout: str) -> None:
    folder = write(tmp_path / layout, {"train.jsonl": b"{}\n"})
    assert resolve_dataset("ms://org/rows") == folder


@pytest.mark.usefixtures("unreachable")
def test_a_revision_is_looked_for_by_its_name(tmp_path: Path) -> None:
    write(tmp_path / "models/org--name/snapshots/master", model_files())
    folder = write(tmp_path / "models/org--name/snapshots/v2", model_files())
    assert resolve_model("ms://org/name", revision="v2") == folder
    with pytest.raises(HubError, match="cannot be reached"):
        resolve_model("ms://org/name", revision="v3")


def test_the_stand_in_cache_is_found(ms_cache: Path) -> None:
    assert resolve_model("ms://Qwen/Qwen3.5-4B") == ms_cache / "models" / "Qwen" / "Qwen3___5-4B"
    assert (resolve_dataset("ms://swift/self-cognition") / "self_cognition.jsonl").is_file()


@pytest.mark.usefixtures("unreachable")
def test_without_network_the_error_comes_at_once_and_says_what_where_and_what_to_do(tmp_path: Path) -> None:
    started = time.monotonic()
    with pytest.raises(HubError) as caught:
        resolve_model("ms://org/name")
    assert time.monotonic() - started < 5
    text = str(caught.value)
    assert "model `ms://org/name` is not complete in the cache" in text
    assert str(tmp_path) in text
    assert "set `MODELSCOPE_ENDPOINT` to a mirror, copy the repository into that cache, or give the path of a local folder" in text


@pytest.mark.usefixtures("unreachable")
def test_an_incomplete_model_in_the_cache_is_not_used(tmp_path: Path) -> None:
    folder = write(tmp_path / "models/org--name/snapshots/master", model_files())
    (folder / "model.safetensors").rename(folder / "model.safetensors.incomplete")
    with pytest.raises(HubError, match="not complete in the cache"):
        resolve_model("ms://org/name")


@pytest.mark.usefixtures("unreachable")
def test_the_state_of_the_service_is_described() -> None:
    assert "cannot be reached" in ModelScopeHub().describe()


def test_an_answering_service_is_described(ms_service: LoopbackHub) -> None:
    assert ModelScopeHub().describe().endswith(f"{ms_service.url} can be reached")


def test_a_model_is_downloaded_without_pickled_weights(ms_service: LoopbackHub) -> None:
    folder = resolve_model("ms://org/small")
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == {
        name: data for name, data in model_files().items() if name != "pytorch_model.bin"}


def test_a_tokenizer_is_downloaded_without_weights(ms_service: LoopbackHub) -> None:
    resolve_model("ms://org/small", tokenizer_only=True)
    assert ms_service.downloads() == ["config.json", "tokenizer.json", "tokenizer_config.json"]


def test_a_dataset_is_downloaded_whole(ms_service: LoopbackHub) -> None:
    assert {path.name for path in resolve_dataset("ms://org/rows").iterdir()} == {"train.jsonl", "README.md"}


def test_own_code_is_refused_before_weights_are_downloaded(ms_service: LoopbackHub) -> None:
    ms_service.repos["model", "org/own"] = model_files(model_type="mystery", auto_map={"AutoModel": "modeling.Model"})
    with pytest.raises(ModelError, match="code that ships with it"):
        resolve_model("ms://org/own")
    assert ms_service.downloads() == ["config.json"]


def test_a_name_the_service_does_not_know_is_said_to_be_unknown(ms_service: LoopbackHub) -> None:
    with pytest.raises(HubError, match=r"has no model `ms://org/smal`\. Check the spelling"):
        resolve_model("ms://org/smal")


@pytest.mark.parametrize("what", ["private", "gated"])
def test_a_repository_that_may_not_be_read_says_how_to_log_in(ms_service: LoopbackHub, what: str) -> None:
    getattr(ms_service, what).add("org/small")
    with pytest.raises(HubError, match=r"does not let you read.*modelscope login --token TOKEN`, or set MODELSCOPE_API_TOKEN"):
        resolve_model("ms://org/small")


def test_the_token_of_the_environment_is_sent(ms_service: LoopbackHub, monkeypatch: pytest.MonkeyPatch) -> None:
    ms_service.private.add("org/small")
    monkeypatch.setenv("MODELSCOPE_API_TOKEN", "secret")
    assert resolve_model("ms://org/small").is_dir()


def test_a_connection_dropped_in_a_file_is_an_error_and_the_next_run_completes(ms_service: LoopbackHub) -> None:
    ms_service.cut["model.safetensors"] = 1
    with pytest.raises(HubError, match="run again to fetch the rest"):
        resolve_model("ms://org/small")
    assert ModelScopeHub().find_cached("org/small", kind="model") is None
    ms_service.log.clear()
    folder = resolve_model("ms://org/small")
    assert (folder / "model.safetensors").read_bytes() == safetensors_bytes()
    assert ms_service.downloads() == ["model.safetensors"]


def test_a_repository_without_safetensors_is_an_error(ms_service: LoopbackHub) -> None:
    ms_service.repos["model", "org/old"] = {"config.json": b"{}", "pytorch_model.bin": b"x"}
    with pytest.raises(HubError, match="there are no weights.*safetensors files only"):
        resolve_model("ms://org/old")


def test_a_model_of_an_old_cache_is_completed_in_place(ms_service: LoopbackHub, tmp_path: Path) -> None:
    folder = write(tmp_path / "ms" / "models" / "org" / "small", model_files())
    for name in ("model.safetensors", "pytorch_model.bin"):
        (folder / name).unlink()
    assert resolve_model("ms://org/small") == folder
    assert ms_service.downloads() == ["model.safetensors"]


def test_an_upload_makes_the_repository_and_sends_every_file(
    ms_service: LoopbackHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("MODELSCOPE_API_TOKEN", "secret")
    files = {"config.json": b"{}", "model.safetensors": safetensors_bytes(), "README.md": b"# Mine\n"}
    folder = write(tmp_path / "mine", files)
    for _ in range(2):  # the second time the repository exists
        assert ModelScopeHub().upload(folder, "org/mine", kind="model") == "ms://org/mine"
    assert ms_service.uploaded["model", "org/mine"] == files
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == files


def test_an_upload_that_fails_says_why_and_how_to_log_in(ms_service: LoopbackHub, tmp_path: Path) -> None:
    folder = write(tmp_path / "mine", model_files())
    ms_service.gated.add("org/mine")
    with pytest.raises(HubError, match=r"upload of the model `ms://org/mine` .* failed.*modelscope login"):
        ModelScopeHub().upload(folder, "org/mine", kind="model")


@pytest.mark.usefixtures("unreachable")
def test_an_upload_without_network_is_an_error_at_once(tmp_path: Path) -> None:
    with pytest.raises(HubError, match="cannot be uploaded: .* cannot be reached"):
        ModelScopeHub().upload(tmp_path, "org/mine", kind="model")
