"""Models on meshes that cut parameters: every value is that of one-device loading, and no rank holds more than its part."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
TWINKLE = Path(sys.executable).with_name("twinkle")
TINY = ("tiny://qwen3", "tiny://qwen3_5", "tiny://qwen3_moe", "tiny://qwen3_5_vl")
SMOL = "SmolLM2-135M-Instruct"
"""Llama, bf16 in its file; tp=2 does not divide its 9 heads."""


def launch(folder: Path, mesh: str, ranks: int, script: str, *arguments: str) -> dict[str, Any]:
    run = subprocess.run(
        [str(TWINKLE), "launch", "--mode", "torchrun", "--nproc-per-node", str(ranks), "--mesh", mesh, str(HERE / script),
         *arguments],
        cwd=folder, capture_output=True, text=True, check=False, env={**os.environ, "OMP_NUM_THREADS": "1"}, timeout=200)
    assert run.returncode == 0, run.stderr[-3000:]
    return json.loads(run.stdout.strip().splitlines()[-1])


@pytest.mark.slow
@pytest.mark.parametrize(("mesh", "ranks", "models", "most"), [
    ("fsdp=2", 2, [*TINY, SMOL], 0.5), ("tp=2", 2, TINY, 0.76), ("pp=2", 2, [*TINY, SMOL], 0.63), ("fsdp=2,tp=2", 4, TINY, 0.38)],
    ids=["fsdp", "tp", "pp", "fsdp and tp"])
def test_parameters_and_buffers_are_those_of_one_device(
    mesh: str, ranks: int, models: list[str], most: float, assets: Path, tmp_path: Path,
) -> None:
    seen = launch(tmp_path, mesh, ranks, "loading.py", *(str(assets / name) if name == SMOL else name for name in models))
    assert len(seen) == len(models)
    for model_id, (whole, lora) in seen.items():
        assert whole["is_hollow"], model_id
        assert lora["is_hollow"], model_id
        assert whole["buffers"] == lora["buffers"] == 2, model_id  # inv_freq and original_inv_freq
        assert lora["compared"] > whole["compared"] > 40, model_id
        assert whole["held"] <= most * whole["of"], model_id
        assert lora["held"] <= (most + 0.05) * lora["of"], model_id  # adapters stay whole on data ranks


@pytest.mark.slow
def test_loading_under_fsdp_4_takes_little_more_than_the_shard(assets: Path, tmp_path: Path) -> None:
    seen = launch(tmp_path, "fsdp=4", 4, "anonymous_memory.py", str(assets / "SmolLM2-135M-Instruct"))
    assert seen["held"] == pytest.approx(134_515_008 * 4 / 4, rel=0.01)  # fp32, a quarter of the elements
    assert seen["growth"] <= 1.5 * seen["held"]
