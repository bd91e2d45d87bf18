"""Meshes that do not fit are refused on every rank before one of them waits for another."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from twinkle_core.errors import MeshError
from twinkle_core.mesh import DeviceMesh
from twinkle_core.parallel.choice import choose_strategies

SCRIPT = Path(__file__).with_name("refused.py")
TORCHRUN = Path(sys.executable).with_name("torchrun")
SIZES = {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 64, "num_hidden_layers": 3, "hidden_size": 8,
         "intermediate_size": 8, "head_dim": 4}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three models of which each has one size that 2 does not divide."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    folder = tmp_path_factory.mktemp("models")
    for name, sizes in {"heads": {"num_attention_heads": 3, "num_key_value_heads": 3}, "kv_heads": {"num_key_value_heads": 1},
                        "vocabulary": {"vocab_size": 63}}.items():
        Qwen3ForCausalLM(Qwen3Config(**{**SIZES, **sizes})).save_pretrained(folder / name)
    return folder


@pytest.mark.slow
def test_every_rank_is_told_what_does_not_fit_and_what_would(launch, models: Path, tmp_path: Path) -> None:
    run = launch(SCRIPT.read_text(), "--mesh", "tp=2", arguments=(str(models),))
    assert run.status == 0, run.stderr
    refused = json.loads(run.stdout)
    assert json.loads((tmp_path / "logs" / "rank_1.txt").read_text().splitlines()[-1]) == refused
    assert refused == {
        "script": "MeshError: The script says mesh `fsdp=3`, the command line says `tp=2`. Change one of them, or leave it out "
                  "of the script.",
        "command line": "MeshError: The script says mesh `pp=2`, the command line says `tp=2`. Change one of them, or leave it out "
                        "of the script.",
        "component": "MeshError: The mesh pp 1 x dp 4 x fsdp 1 x cp 1 x ep 1 x tp 1 has 4 ranks, but mode `local` has 2. Start 4 "
                     "processes, or choose sizes whose product is 2.",
        "heads": "MeshError: `tp=2` does not divide `num_attention_heads=3` of model type `qwen3`. Use tp in {1}.",
        "kv_heads": "MeshError: `tp=2` does not divide `num_key_value_heads=1` of model type `qwen3`. Use tp in {1}.",
        "vocabulary": "MeshError: `tp=2` does not divide `vocab_size=63` of model type `qwen3`. Use tp in {1}.",
        "layers": "MeshError: `pp=2` x `vpp=2` makes 4 stages, but the model has `num_hidden_layers=3`. Use at most 3 stages.",
        "waiting": "False",
    }


@pytest.mark.slow
def test_plain_torchrun_refuses_a_mesh_of_another_size_too(tmp_path: Path) -> None:
    run = subprocess.run([str(TORCHRUN), "--nproc_per_node", "2", "--no-python", sys.executable, str(SCRIPT), "--initialize"],
                         cwd=tmp_path, capture_output=True, text=True, check=False, timeout=90,
                         env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert run.returncode == 0, run.stderr
    text = ("MeshError: The mesh pp 1 x dp 1 x fsdp 3 x cp 1 x ep 1 x tp 1 has 3 ranks, but torchrun has 2. Start 3 processes, or "
            "choose sizes whose product is 2.")
    assert run.stdout.count(json.dumps(text)) == 2


def test_a_mesh_without_torchrun_is_refused() -> None:
    from twinkle_core import session
    from twinkle_core.errors import MeshError
    from twinkle_core.mesh import DeviceMesh

    with pytest.raises(MeshError, match=r"tp 2 has 2 ranks, but this run \(mode `local`, one process\) has 1. Start 2 processes"):
        session.start("local", mesh=DeviceMesh.from_sizes(tp_size=2))


@pytest.mark.parametrize(("sizes", "advice"), [
    ({"tp_size": 3}, r"`tp=3` does not divide `num_attention_heads=4`.*Use tp in \{1, 2\}"),
    ({"tp_size": 4}, r"`tp=4` does not divide `num_key_value_heads=2`.*Use tp in \{1, 2\}"),
    ({"pp_size": 4}, "makes 4 stages, but the model has `num_hidden_layers=3`. Use at most 3 stages"),
])
def test_sizes_that_would_fit_are_named(sizes: dict[str, int], advice: str) -> None:
    from transformers import Qwen3Config

    from twinkle_core.errors import MeshError
    from twinkle_core.mesh import DeviceMesh
    from twinkle_core.parallel.choice import check_model, choose_strategies

    mesh = DeviceMesh.from_sizes(**sizes)
    with pytest.raises(MeshError, match=advice):
        check_model(Qwen3Config(**SIZES), mesh, choose_strategies(mesh))


@pytest.mark.parametrize(("sizes", "text"), [
    ({"dp_size": 2, "fsdp_size": 2, "tp_size": 2, "pp_size": 2}, r"uses all of .* at once, which is not tested. Use three of them"),
    ({"pp_size": 2, "vpp_size": 2, "tp_size": 2}, r"`vpp=2` with the mesh .*tested with `pp` alone. Leave `vpp` out, or `tp`"),
])
def test_a_product_of_axes_that_no_test_holds_against_one_device_is_refused_by_name(sizes: dict[str, int], text: str) -> None:
    with pytest.raises(MeshError, match=text):
        choose_strategies(DeviceMesh.from_sizes(**sizes))
