"""Hugging Face's client against the cache and against a server on the loopback interface."""

import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import huggingface_hub.constants
import pytest

from tests.hub.conftest import COMMIT, ROWS, LoopbackHub, model_files, safetensors_bytes
from twinkle_core.errors import HubError, ModelError
from twinkle_core.hub import resolve_dataset, resolve_model
from twinkle_core.hub.huggingface import HuggingFaceHub


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache, with no network."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    return tmp_path


def write_snapshot(cache: Path, files: dict[str, bytes], repo: str = "models--org--name") -> Path:
    """Lay files out as the client does: blobs, links to them in a snapshot, a reference."""
    snapshot = cache / repo / "snapshots" / COMMIT
    for folder in (snapshot, cache / repo / "blobs", cache / repo / "refs"):
        folder.mkdir(parents=True)
    (cache / repo / "refs" / "main").write_text(COMMIT)
    for number, (name, data) in enumerate(files.items()):
        blob = cache / repo / "blobs" / str(number)
        blob.write_bytes(data)
        (snapshot / name).symlink_to(blob)
    return snapshot


def test_a_model_in_the_cache_is_used_without_a_request(cache: Path) -> None:
    snapshot = write_snapshot(cache, model_files())
    assert resolve_model("hf://org/name") == snapshot
    assert resolve_model("hf://org/name", revision=COMMIT) == snapshot
    assert resolve_model("hf://org/name", tokenizer_only=True) == snapshot


def test_a_dataset_in_the_cache_is_used_without_a_request(cache: Path) -> None:
    snapshot = write_snapshot(cache, {"train.jsonl": ROWS}, "datasets--org--rows")
    assert resolve_dataset("hf://org/rows") == snapshot


def test_a_snapshot_whose_blob_is_gone_is_not_used(cache: Path) -> None:
    (write_snapshot(cache, model_files()) / "model.safetensors").resolve().unlink()
    with pytest.raises(HubError, match="not complete in the cache"):
        resolve_model("hf://org/name")


def test_a_snapshot_of_a_tokenizer_is_no_model(cache: Path) -> None:
    snapshot = write_snapshot(cache, {name: data for name, data in model_files().items() if name.endswith(".json")})
    assert resolve_model("hf://org/name", tokenizer_only=True) == snapshot
    with pytest.raises(HubError, match="not complete in the cache"):
        resolve_model("hf://org/name")


def write_listing(cache: Path, *names: str) -> None:
    """Write what the client notes of a commit's files when it lists them."""
    folder = cache / "models--org--name" / "trees"
    folder.mkdir()
    entries = {name: {"size": 1, "blob_id": "0"} for name in (*model_files(), *names)}
    (folder / f"{COMMIT}.json").write_text(json.dumps({"format_version": 1, "files": entries}))


def test_a_listing_that_names_files_which_loading_does_not_need_does_no_harm(cache: Path) -> None:
    snapshot = write_snapshot(cache, model_files())
    write_listing(cache, "README.md", "notes.txt", "original/params.json")
    assert resolve_model("hf://org/name") == snapshot


def test_a_listing_that_names_a_missing_part_makes_the_snapshot_incomplete(cache: Path) -> None:
    write_snapshot(cache, model_files())
    write_listing(cache, "tokenizer.model")
    with pytest.raises(HubError, match="not complete in the cache"):
        resolve_model("hf://org/name")


def test_offline_and_not_cached_says_what_where_and_what_to_do(cache: Path) -> None:
    with pytest.raises(HubError) as caught:
        resolve_model("hf://org/name")
    text = str(caught.value)
    assert "model `hf://org/name` is not complete in the cache" in text
    assert str(cache) in text
    assert "HF_HUB_OFFLINE is set" in text
    assert "set `HF_ENDPOINT` to a mirror" in text


def test_without_network_the_error_comes_at_once(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", f"http://127.0.0.1:{free.getsockname()[1]}")
    started = time.monotonic()
    with pytest.raises(HubError, match="cannot be reached"):
        resolve_model("hf://org/name")
    assert time.monotonic() - started < 5


def test_the_state_of_the_service_is_described(cache: Path, hf_service: LoopbackHub) -> None:
    assert HuggingFaceHub().describe().endswith(f"{hf_service.url} can be reached")


def test_a_model_is_downloaded_without_pickled_weights(hf_service: LoopbackHub) -> None:
    folder = resolve_model("hf://org/small")
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == {
        name: data for name, data in model_files().items() if name != "pytorch_model.bin"}


def test_a_tokenizer_is_downloaded_without_weights(hf_service: LoopbackHub) -> None:
    resolve_model("hf://org/small", tokenizer_only=True)
    assert hf_service.downloads() == ["config.json", "tokenizer.json", "tokenizer_config.json"]


def test_a_dataset_is_downloaded_whole(hf_service: LoopbackHub) -> None:
    assert (resolve_dataset("hf://org/rows") / "train.jsonl").read_bytes() == ROWS


def test_own_code_is_refused_before_weights_are_downloaded(hf_service: LoopbackHub) -> None:
    hf_service.repos["model", "org/own"] = model_files(model_type="mystery", auto_map={"AutoModel": "modeling.Model"})
    with pytest.raises(ModelError, match="code that ships with it"):
        resolve_model("hf://org/own")
    assert hf_service.downloads() == ["config.json"]


def test_a_name_the_service_does_not_know_is_said_to_be_unknown(hf_service: LoopbackHub) -> None:
    with pytest.raises(HubError, match=r"has no model `hf://org/smal`\. Check the spelling"):
        resolve_model("hf://org/smal")


def test_a_revision_the_service_does_not_know_is_said_to_be_unknown(hf_service: LoopbackHub) -> None:
    with pytest.raises(HubError, match=r"at revision `v9`. Check the spelling and the revision"):
        resolve_model("hf://org/small", revision="v9")


def test_an_answer_of_401_may_be_a_typo_or_a_missing_login(hf_service: LoopbackHub) -> None:
    hf_service.private.add("org/small")
    with pytest.raises(HubError, match=r"does not exist, or is private. Check the spelling.*`hf auth login`, or set HF_TOKEN"):
        resolve_model("hf://org/small")


def test_a_gated_repository_says_where_to_agree_to_its_terms(hf_service: LoopbackHub) -> None:
    hf_service.gated.add("org/small")
    with pytest.raises(HubError, match=r"does not let you read.*`hf auth login`.*terms, give it at http://127.0.0.1:\d+/org/small"):
        resolve_model("hf://org/small")


def test_the_token_of_the_environment_is_sent(hf_service: LoopbackHub, monkeypatch: pytest.MonkeyPatch) -> None:
    hf_service.private.add("org/small")
    monkeypatch.setenv("HF_TOKEN", "secret")
    assert resolve_model("hf://org/small").is_dir()


def test_a_connection_dropped_once_is_taken_up_again(hf_service: LoopbackHub) -> None:
    hf_service.cut["model.safetensors"] = 1
    assert (resolve_model("hf://org/small") / "model.safetensors").read_bytes() == safetensors_bytes()


def test_a_connection_that_keeps_dropping_is_an_error_and_the_next_run_completes(hf_service: LoopbackHub) -> None:
    hf_service.cut["model.safetensors"] = 100
    with pytest.raises(HubError, match="run again to fetch the rest"):
        resolve_model("hf://org/small")
    assert HuggingFaceHub().find_cached("org/small", kind="model") is None
    hf_service.cut.clear()
    assert (resolve_model("hf://org/small") / "model.safetensors").read_bytes() == safetensors_bytes()


def test_a_repository_without_safetensors_is_an_error(hf_service: LoopbackHub) -> None:
    hf_service.repos["model", "org/old"] = {"config.json": b"{}", "pytorch_model.bin": b"x"}
    with pytest.raises(HubError, match="there are no weights.*safetensors files only"):
        resolve_model("hf://org/old")


def test_an_upload_makes_the_repository_and_sends_every_file(
    hf_service: LoopbackHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("HF_TOKEN", "secret")
    files = {"config.json": b"{}", "README.md": b"# Mine\n"}
    (tmp_path / "mine").mkdir()
    for name, data in files.items():
        (tmp_path / "mine" / name).write_bytes(data)
    assert HuggingFaceHub().upload(tmp_path / "mine", "org/mine", kind="model") == "hf://org/mine"
    assert hf_service.uploaded["model", "org/mine"] == files


def test_an_upload_that_is_not_allowed_says_how_to_log_in(
    hf_service: LoopbackHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("HF_TOKEN", "secret")
    hf_service.gated.add("org/mine")
    with pytest.raises(HubError, match=r"upload of the model `hf://org/mine` .* failed.*`hf auth login`"):
        HuggingFaceHub().upload(tmp_path, "org/mine", kind="model")


def test_endpoint_and_cache_of_the_environment_are_used(server: LoopbackHub, tmp_path: Path) -> None:
    environ = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    program = "from twinkle_core.hub import resolve_dataset; print(resolve_dataset('hf://org/rows'))"
    finished = subprocess.run(
        [sys.executable, "-c", program], env={**environ, "HF_ENDPOINT": server.url, "HF_HOME": str(tmp_path)},
        capture_output=True, text=True, check=True)
    assert finished.stdout.strip() == str(tmp_path / "hub" / "datasets--org--rows" / "snapshots" / COMMIT)
