"""The hub `tiny://`: the contract of hubs, determinism, and what happens when several processes or a broken cache are involved."""

import hashlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from twinkle_core.errors import HubError
from twinkle_core.hub import resolve_dataset, resolve_model
from twinkle_core.hub.completeness import what_is_missing
from twinkle_core.hub.interface import Hub
from twinkle_core.testing import HubContract
from twinkle_qwen.tiny import DATASETS, TinyHub
from twinkle_qwen.tiny_models import RECIPES


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TWINKLE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


class TestTinyHub(HubContract):
    scheme = "tiny"
    unknown_id = "qwen99"

    @pytest.fixture
    def hub(self) -> Hub:
        return TinyHub()

    @pytest.fixture
    def model_id(self) -> str:
        return "qwen3"

    @pytest.fixture
    def dataset_id(self) -> str:
        return "self-cognition"


def digest(folder: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.iterdir()}


@pytest.mark.parametrize("name", RECIPES)
def test_a_model_is_the_same_bytes_each_time_whatever_the_seed(name: str, cache: Path) -> None:
    import torch

    torch.manual_seed(1)
    first = digest(resolve_model(f"tiny://{name}"))
    shutil.rmtree(cache)
    torch.manual_seed(2)
    assert digest(resolve_model(f"tiny://{name}")) == first


def test_writing_a_model_leaves_the_random_numbers_of_torch_as_they_were() -> None:
    import torch

    torch.manual_seed(7)
    expected = torch.rand(3)
    torch.manual_seed(7)
    resolve_model("tiny://qwen3_5")
    assert torch.equal(torch.rand(3), expected)


def test_weights_have_the_values_that_the_recipe_says() -> None:
    """The first entries of one matrix, by the definition: numpy's Mersenne twister seeded with the CRC-32 of the name."""
    import zlib

    import numpy as np
    from safetensors.numpy import load_file

    weights = load_file(resolve_model("tiny://qwen3") / "model.safetensors")
    name = "model.layers.0.mlp.up_proj.weight"
    expected = np.random.RandomState(zlib.crc32(name.encode())).standard_normal((256, 128)) / np.sqrt(128)
    assert np.allclose(weights[name], expected, atol=1e-7)


def test_a_second_use_writes_nothing(cache: Path) -> None:
    folder = resolve_model("tiny://qwen3")
    before = {path: path.stat().st_mtime_ns for path in cache.rglob("*")}
    assert resolve_model("tiny://qwen3") == folder
    assert {path: path.stat().st_mtime_ns for path in cache.rglob("*")} == before


def test_a_damaged_model_is_written_again() -> None:
    folder = resolve_model("tiny://qwen3")
    before = digest(folder)
    (folder / "model.safetensors").write_bytes(b"cut")
    assert resolve_model("tiny://qwen3") == folder
    assert digest(folder) == before


def test_nothing_but_the_folder_stays_in_the_cache(cache: Path) -> None:
    folder = resolve_model("tiny://qwen3")
    assert list((cache / "tiny").iterdir()) == [folder]


def test_a_failed_write_leaves_nothing(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(name: str, folder: Path) -> None:
        (folder / "config.json").write_text("{}")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("twinkle_qwen.tiny.write_model", full)
    with pytest.raises(HubError, match=r"No space left on device\. Free space there, or set TWINKLE_CACHE"):
        resolve_model("tiny://qwen3")
    assert list((cache / "tiny").iterdir()) == []


def test_a_cache_that_is_no_folder_is_an_error_that_names_the_variable(cache: Path) -> None:
    cache.write_text("a file")
    with pytest.raises(HubError, match="set TWINKLE_CACHE to a folder that can be written"):
        resolve_model("tiny://qwen3", tokenizer_only=True)


def test_processes_that_write_at_once_agree(cache: Path) -> None:
    program = ("from twinkle_qwen.tiny import TinyHub; import sys; sys.stdin.read(); "
               "print(TinyHub().fetch('qwen3', kind='model', patterns=('tokenizer*',)))")
    running = [subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
               for _ in range(4)]
    for process in running:
        assert process.stdin is not None
        process.stdin.close()
    printed = {process.stdout.read().strip() for process in running if process.stdout is not None}
    assert [process.wait() for process in running] == [0] * 4
    assert len(printed) == 1
    assert [str(path) for path in (cache / "tiny").iterdir()] == list(printed)


def test_whoever_comes_second_uses_what_the_first_wrote(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another process finishes while this one is writing."""
    from twinkle_qwen import tiny, tiny_models

    first = resolve_model("tiny://qwen3")
    inode = first.stat().st_ino
    monkeypatch.setattr(TinyHub, "find_cached", lambda *arguments, **options: None)
    assert tiny._write(first, lambda folder: tiny_models.write_model("qwen3", folder)) == first
    assert first.stat().st_ino == inode
    assert what_is_missing(first, kind="model") == ""


def test_a_tokenizer_and_data_need_no_torch(cache: Path) -> None:
    program = """
import sys
sys.modules["torch"] = None
from twinkle_core.hub import resolve_dataset, resolve_model
from transformers import AutoTokenizer
tokenizer = AutoTokenizer.from_pretrained(resolve_model("tiny://qwen3_5", tokenizer_only=True))
assert tokenizer.decode(tokenizer.encode("Who are you? 你是谁？")) == "Who are you? 你是谁？"
assert (resolve_dataset("tiny://self-cognition") / "self_cognition.jsonl").is_file()
from twinkle_core.errors import MissingExtraError
try:
    resolve_model("tiny://qwen3_5")
except MissingExtraError as error:
    print(error)
"""
    finished = subprocess.run([sys.executable, "-c", program], env=dict(os.environ), capture_output=True, text=True, check=False)
    assert finished.returncode == 0, finished.stderr
    assert "pip install 'twinkle-core[train]'" in finished.stdout


def test_importing_the_hub_imports_nothing_heavy() -> None:
    program = "import sys, twinkle_qwen.tiny; print([name for name in ('torch', 'transformers', 'numpy') if name in sys.modules])"
    assert subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout == "[]\n"


def test_an_unknown_model_gets_near_matches_and_all_names() -> None:
    with pytest.raises(HubError, match=r"no model 'tiny://qwen3_6'\. Did you mean `qwen3_5`.*Its models: `qwen3`, `qwen3_5`"):
        resolve_model("tiny://qwen3_6")


def test_a_dataset_asked_for_as_a_model_is_said_to_be_one() -> None:
    with pytest.raises(HubError, match="It is a dataset"):
        resolve_model("tiny://self-cognition")


def test_a_revision_is_refused() -> None:
    with pytest.raises(HubError, match="Leave `revision` out"):
        resolve_model("tiny://qwen3", revision="main")


def test_rows_have_three_columns_placeholders_and_variety() -> None:
    path = resolve_dataset("tiny://self-cognition") / "self_cognition.jsonl"
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    assert {tuple(row) for row in rows} == {("query", "response", "tag")}
    assert {row["tag"] for row in rows} == {"en", "zh"}
    assert len({json.dumps(row) for row in rows}) == len(rows) >= 150
    assert all("{{NAME}}" in row["response"] for row in rows)
    assert len({row["query"] for row in rows}) >= 100
    assert len({row["response"] for row in rows}) >= 50
    assert {row["query"] for row in rows} >= {"Who are you?", "你是谁？"}


@pytest.mark.parametrize("tool", ["build_tokenizer", "build_self_cognition"])
def test_shipped_data_is_what_its_script_makes(tool: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import importlib.util

    path = Path(__file__).parent.parent / "tools" / f"{tool}.py"
    spec = importlib.util.spec_from_file_location(tool, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    if tool == "build_tokenizer":
        assert json.loads(module.build().to_str()) == json.loads((module.ASSETS / "tokenizer" / "tokenizer.json").read_text())
    else:
        lines = (DATASETS["self-cognition"] / "self_cognition.jsonl").read_text(encoding="utf-8").splitlines()
        assert module.rows() == [json.loads(line) for line in lines]
