"""The hubs of the core keep the promises of every hub."""

import json
from pathlib import Path

import pytest

from twinkle_core.hub.huggingface import HuggingFaceHub
from twinkle_core.hub.interface import Hub
from twinkle_core.hub.local import LocalHub
from twinkle_core.hub.modelscope import ModelScopeHub
from twinkle_core.testing import HubContract


class TestModelScopeHub(HubContract):
    scheme = "ms"

    @pytest.fixture
    def hub(self, ms_service: object) -> Hub:
        return ModelScopeHub()

    @pytest.fixture
    def model_id(self) -> str:
        return "org/small"

    @pytest.fixture
    def dataset_id(self) -> str:
        return "org/rows"


class TestHuggingFaceHub(HubContract):
    scheme = "hf"

    @pytest.fixture
    def hub(self, hf_service: object) -> Hub:
        return HuggingFaceHub()

    @pytest.fixture
    def model_id(self) -> str:
        return "org/small"

    @pytest.fixture
    def dataset_id(self) -> str:
        return "org/rows"


class TestLocalHub(HubContract):
    scheme = "file"
    unknown_id = "no/such/folder"
    hostile_ids = ("na\0me", "no/" + "x" * 10_000)

    @pytest.fixture
    def hub(self) -> Hub:
        return LocalHub()

    @pytest.fixture
    def model_id(self, tmp_path: Path) -> str:
        header = json.dumps({"w": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}).encode()
        folder = tmp_path / "model"
        folder.mkdir()
        (folder / "config.json").write_text("{}")
        (folder / "tokenizer.json").write_text("{}")
        (folder / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(4))
        return str(folder)

    @pytest.fixture
    def dataset_id(self, tmp_path: Path) -> str:
        (tmp_path / "rows.jsonl").write_text('{"query": "a", "response": "b"}\n')
        return str(tmp_path / "rows.jsonl")

    def upload_id(self, tmp_path: Path) -> str:
        return str(tmp_path / "uploaded")
