"""`twinkle launch --mode torchrun`: who writes where, how a failing rank ends the run, what is refused before anything starts."""

import subprocess
import sys
import time
from pathlib import Path

import pytest

from twinkle_core.errors import MeshError, ModeError
from twinkle_core.launchers.torchrun import TorchrunLauncher
from twinkle_core.mesh import DeviceMesh
from twinkle_core.parallel.pipeline import PipelineStrategy
from twinkle_core.parallel.tensor import TensorStrategy

TWINKLE = Path(sys.executable).with_name("twinkle")
RANK = "import os, signal, sys, time\nrank = int(os.environ['RANK'])\nprint('rank', rank, sys.argv[1:])\n"
WAIT = "import torch.distributed as dist\ndist.init_process_group('gloo')\n"


@pytest.fixture
def launch(tmp_path: Path):
    """Run a script on two ranks."""

    def run(text: str, *options: str) -> subprocess.CompletedProcess[str]:
        (tmp_path / "script.py").write_text(RANK + text)
        return subprocess.run([str(TWINKLE), "launch", "--mode", "torchrun", "--nproc-per-node", "2", *options, "script.py", "x"],
                              cwd=tmp_path, capture_output=True, text=True, check=False, timeout=100)

    return run


@pytest.mark.slow
def test_rank_0_writes_to_the_terminal_and_the_others_to_their_files(launch, tmp_path: Path) -> None:
    run = launch("")
    assert run.returncode == 0, run.stderr
    assert run.stdout == "rank 0 ['x']\n"
    assert (tmp_path / "logs" / "rank_1.txt").read_text() == "rank 1 ['x']\n"


@pytest.mark.slow
def test_the_traceback_of_the_rank_that_failed_comes_first_though_another_waits(launch) -> None:
    begin = time.monotonic()
    run = launch(WAIT + "if rank == 1:\n    raise ValueError('unhappy')\ndist.barrier()\n")
    assert run.returncode == 1
    assert time.monotonic() - begin < 30
    first, second = run.stderr.splitlines()[:2]
    assert first == "Rank 1 failed; the other ranks were stopped. Output of rank N: logs/rank_N.txt."
    assert "Traceback" in second
    assert run.stderr.rstrip().endswith("ValueError: unhappy")
    assert "torch/distributed" not in run.stderr


@pytest.mark.slow
def test_a_rank_that_is_killed_is_named_with_its_signal(launch) -> None:
    run = launch(WAIT + "if rank == 1:\n    os.kill(os.getpid(), signal.SIGKILL)\ndist.barrier()\n")
    assert run.returncode == 128 + 9
    assert "Rank 1 was killed by signal 9 (SIGKILL)" in run.stderr


@pytest.mark.slow
def test_the_script_is_run_again_after_a_failure_if_restarts_are_left(launch, tmp_path: Path) -> None:
    text = "if rank == 1 and not os.path.exists('seen'):\n    open('seen', 'w').close()\n    raise ValueError('once')\n"
    run = launch(text, "--max-restarts", "1")
    assert run.returncode == 0, run.stderr
    assert "ValueError: once" in run.stderr
    assert "Running the script again (restart 1)." in run.stderr


@pytest.mark.parametrize(("options", "text"), [
    (["--mesh", "tp=3"], "has 3 ranks, but `--nnodes 1 --nproc-per-node 2` has 2"),
    (["--nnodes", "2"], "Say `--node-rank I --master-addr A --master-port P`"),
    (["--nnodes", "2", "--node-rank", "2", "--master-port", "1"], "`--node-rank 2` is not a node of `--nnodes 2`. Use 0 to 1"),
    (["--nnodes", "0"], "use at least 1 node"),
    (["--max-restart", "1"], "No such option"),
])
def test_sizes_that_do_not_fit_are_refused_before_a_process_starts(launch, options: list[str], text: str) -> None:
    run = launch("", *options)
    assert run.returncode != 0
    assert text in run.stderr
    assert "rank" not in run.stdout


def test_a_port_in_use_is_refused_with_what_to_do(launch) -> None:
    import socket

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        run = launch("", "--master-port", str(taken.getsockname()[1]))
    assert run.returncode == 1
    assert "is in use on 127.0.0.1, perhaps by another run. Use a free port" in run.stderr


def test_torchrun_is_not_a_mode_of_a_script() -> None:
    with pytest.raises(ModeError, match=r"each of them is in mode `local`. Use `initialize\(mode=\"local\"\)`"):
        TorchrunLauncher(options={}).start(None)  # type: ignore[arg-type]


def config(**sizes: int) -> object:
    from transformers import Qwen3Config

    return Qwen3Config(**{"num_attention_heads": 8, "num_key_value_heads": 4, "vocab_size": 512, "num_hidden_layers": 4, **sizes})


@pytest.mark.parametrize(("sizes", "name"), [
    ({"num_attention_heads": 6}, "num_attention_heads=6"), ({"num_key_value_heads": 2}, "num_key_value_heads=2"),
    ({"vocab_size": 510}, "vocab_size=510"),
])
def test_a_tp_that_does_not_divide_says_what_would(sizes: dict[str, int], name: str) -> None:
    with pytest.raises(MeshError, match=rf"`tp=4` does not divide `{name}`.*Use tp in \{{1"):
        TensorStrategy().check(config(**sizes), DeviceMesh.from_sizes(tp_size=4))


def test_more_stages_than_layers_says_how_many_there_may_be() -> None:
    with pytest.raises(MeshError, match=r"makes 8 stages, but the model has `num_hidden_layers=4`. Use at most 4 stages"):
        PipelineStrategy().check(config(), DeviceMesh.from_sizes(pp_size=4, vpp_size=2))
