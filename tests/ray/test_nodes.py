"""Clusters of several machines, each a raylet of its own on this one."""

import ast
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

HERE = str(Path(__file__).parent)
BEGIN = f"""
import sys
sys.path.append({HERE!r})
import twinkle
from twinkle import DeviceGroup
from ray_components import Rows
"""

pytestmark = [pytest.mark.soak, pytest.mark.timeout(600)]


@pytest.fixture
def machines() -> Iterator[Any]:
    """A function that starts a cluster whose machines have these resources, the head first."""
    from ray.cluster_utils import Cluster

    made: list[Any] = []

    def start(*resources: dict[str, int]) -> Any:
        cluster = Cluster(initialize_head=True, connect=False, head_node_args={"include_dashboard": False, **resources[0]})
        made.append(cluster)
        nodes = [cluster.head_node, *(cluster.add_node(**one) for one in resources[1:])]
        cluster.wait_for_nodes()
        return cluster, nodes

    yield start
    for cluster in made:
        cluster.shutdown()


def start(folder: Path, text: str, address: str) -> "subprocess.Popen[str]":
    (folder / "script.py").write_text(BEGIN + text)
    return subprocess.Popen([sys.executable, "script.py", address], cwd=folder, text=True, stdout=subprocess.PIPE,
                            stderr=subprocess.PIPE)


def test_a_group_spans_three_machines_and_a_machine_that_dies_is_noticed_within_30_seconds(machines, tmp_path: Path) -> None:
    cluster, nodes = machines(*[{"num_cpus": 2}] * 3)
    process = start(tmp_path, """
twinkle.initialize(mode="ray", nproc_per_node=2, groups=[DeviceGroup("model", ranks=6, device_type="cpu")], address=sys.argv[1])
rows = Rows()
print(twinkle.get_device_placement(), flush=True)
print(rows.variables("RANK", "LOCAL_RANK"), flush=True)
print(rows.double(list(range(12))), flush=True)
rows.end(on_rank=7)
""", cluster.address)
    assert process.stdout is not None
    head = [process.stdout.readline() for _ in range(11)]
    ranks = [line.split()[3] for line in head if line.startswith("  rank ")]
    assert [ranks.count(node) for node in dict.fromkeys(ranks)] == [2, 2, 2], process.communicate()[1]
    assert [found["LOCAL_RANK"] for found in eval(head[9])] == ["0", "1"] * 3
    assert eval(head[10]) == [2 * n for n in range(12)]
    begin = time.monotonic()
    cluster.remove_node(nodes[2], allow_graceful=False)
    _, errors = process.communicate(timeout=100)
    assert time.monotonic() - begin < 30
    assert process.returncode == 1
    assert "WorkerError: " in errors
    assert "of group `model`" in errors
    assert "rows.end(on_rank=7)" in errors


def test_device_groups_go_to_the_machines_that_have_devices(machines, tmp_path: Path) -> None:
    cluster, nodes = machines({"num_cpus": 2, "num_gpus": 0}, {"num_cpus": 1, "num_gpus": 2}, {"num_cpus": 1, "num_gpus": 4})
    process = start(tmp_path, """
groups = [DeviceGroup("model", ranks=2, device_type="cuda", gpus_per_worker=2), DeviceGroup("sampler", ranks=2, device_type="cuda"),
          DeviceGroup("data", ranks=2, device_type="cpu")]
twinkle.initialize(mode="ray", groups=groups, address=sys.argv[1])
print(twinkle.get_device_placement())
""", cluster.address)
    text, errors = process.communicate(timeout=200)
    assert process.returncode == 0, errors
    found = [line.split() for line in text.splitlines() if line.startswith("  rank ")]
    assert [words[3] for words in found] == [nodes[index].node_id[:8] for index in (2, 2, 1, 1, 0, 0)]
    assert [sorted(words[-2:]) for words in found[:2]] != [sorted(words[-2:]) for words in found[1:2]]
    assert all("GPU" in words for words in found[:4])
    assert not any("GPU" in words for words in found[4:])


def test_the_contract_program_runs_on_three_machines(machines, ms_cache: Path, tmp_path: Path) -> None:
    cluster, _ = machines(*[{"num_cpus": 2}] * 3)
    program = Path(__file__).resolve().parents[1] / "contract" / "cluster.py"
    run = subprocess.run(
        [sys.executable, str(program)], cwd=tmp_path, capture_output=True, text=True, check=False, timeout=300,
        env={**os.environ, "OMP_NUM_THREADS": "1", "SAMPLER": "TorchSampler", "RAY_ADDRESS": cluster.address})
    assert run.returncode == 0, run.stderr[-3000:]
    used = {line.split()[3] for line in run.stdout.splitlines() if line.startswith("  rank ")}
    assert len(used) > 1, run.stdout
    numbers = ast.literal_eval(run.stdout.strip().splitlines()[-1])
    assert numbers["step"] == 4
    assert numbers["grad_norm"] > 0
