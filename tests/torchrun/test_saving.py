"""Checkpoints of models that are spread over ranks: streamed into files by one rank, read by each as far as it holds it."""

from pathlib import Path

import pytest
from safetensors import safe_open

from tests.torchrun.test_loading import launch
from twinkle_core.hub import resolve_model


def heads(path: Path) -> dict[str, tuple[str, list[int]]]:
    with safe_open(path, "pt") as file:
        return {name: (file.get_slice(name).get_dtype(), file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118


@pytest.mark.slow
@pytest.mark.parametrize(("mesh", "model_id"), [("fsdp=2,tp=2", "tiny://qwen3_moe"), ("pp=2,fsdp=2", "tiny://qwen3_5_vl")])
def test_a_checkpoint_has_the_sources_layout_and_gives_each_rank_its_part_back(mesh: str, model_id: str, tmp_path: Path) -> None:
    saved = launch(tmp_path, mesh, 4, "saving.py", str(tmp_path), model_id)
    source = resolve_model(model_id, trust_remote_code=None)
    assert heads(Path(saved[model_id]) / "model.safetensors") == heads(source / "model.safetensors")
    assert not (Path(saved[f"{model_id} lora"]) / "model.safetensors").exists()
