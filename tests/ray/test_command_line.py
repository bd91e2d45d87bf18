"""`twinkle launch --mode ray`: what it leaves behind, running again after a failure, and jobs of a remote cluster."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

TWINKLE = str(Path(sys.executable).with_name("twinkle"))
HERE = str(Path(__file__).parent)
BEGIN = f"""
import os, sys
sys.path.append({HERE!r})
import twinkle
from ray_components import Rows
"""


def write(folder: Path, text: str, name: str = "script.py") -> str:
    (folder / name).write_text(BEGIN + text)
    return name


@pytest.mark.slow
@pytest.mark.parametrize(("ending", "status"), [("", 0), ("rows.end(on_rank=5)\n", 130)], ids=["normal end", "Ctrl-C"])
def test_nothing_that_it_started_is_left(tmp_path: Path, ending: str, status: int) -> None:
    script = write(tmp_path, "twinkle.initialize()\nrows = Rows()\nprint(rows.pid(), flush=True)\ninput()\n"
                             "print('on', flush=True)\n" + ending)
    environ = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    process = subprocess.Popen([TWINKLE, "launch", "--mode", "ray", "--nproc-per-node", "2", script], cwd=tmp_path, env=environ,
                               text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdin is not None
    assert process.stdout is not None
    assert process.stdout.readline().startswith("["), process.communicate()[1]
    started = psutil.Process(process.pid).children(recursive=True)
    assert any("raylet" in child.name() for child in started)
    process.stdin.write("\n")
    process.stdin.flush()
    assert process.stdout.readline() == "on\n"
    if ending:
        process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=100)
    assert process.returncode == status, errors
    assert "Traceback" not in errors
    _, alive = psutil.wait_procs(started, timeout=20)
    assert alive == []


@pytest.mark.slow
def test_a_script_that_failed_is_run_again_with_new_groups(cluster: str, tmp_path: Path) -> None:
    script = write(tmp_path, """
rows = Rows()
print(rows.double([len(sys.argv)]), flush=True)
if not os.path.exists("seen"):
    open("seen", "w").close()
    os.kill(rows.pid()[1], 9)
    for _ in range(1000):
        rows.count()
print("done", flush=True)
""")
    run = subprocess.run([TWINKLE, "launch", "--mode", "ray", "--address", cluster, "--nproc-per-node", "2", "--max-restarts", "2",
                          script, "word"], cwd=tmp_path, capture_output=True, text=True, check=False, timeout=200)
    assert run.returncode == 0, run.stderr
    own = [line for line in run.stdout.splitlines() if "(raylet)" not in line]  # Ray's word on a dead process
    assert own == ["[4]", "[4]", "done"]
    assert "WorkerError: The process died" in run.stderr
    assert "rank 1 of group `ranks`" in run.stderr
    assert f"{script}:" in run.stderr
    assert "The script failed with exit status 1. Running it again (restart 1 of 2)." in run.stderr


def test_an_address_where_nothing_listens_is_an_error_within_seconds(tmp_path: Path) -> None:
    script = write(tmp_path, "Rows()\n")
    run = subprocess.run([TWINKLE, "launch", "--mode", "ray", "--address", "127.0.0.1:1", script], cwd=tmp_path,
                         capture_output=True, text=True, check=False, timeout=60)
    assert run.returncode == 1
    assert "ModeError: No Ray cluster answers at `127.0.0.1:1`. Start one there with `ray start --head`" in run.stderr
    run = subprocess.run([TWINKLE, "launch", "--mode", "ray", "--address", "http://127.0.0.1:8265", script], cwd=tmp_path,
                         capture_output=True, text=True, check=False, timeout=60)
    assert "is not of the form HOST:PORT" in run.stderr
    assert "add `--submit`" in run.stderr


@pytest.mark.soak
def test_a_submitted_script_runs_as_a_job_whose_output_and_status_come_back(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from ray.cluster_utils import Cluster

    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}")  # jobs run the `python` that stands there
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    write(tmp_path, "rows = Rows()\nprint('sum', rows.double([3, 4]), sys.argv[1:], flush=True)\n"
                    "if sys.argv[1] == 'fail':\n    rows.fail(ValueError('no luck'))\n")
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 4, "include_dashboard": True, "dashboard_port": 0})
    try:
        results = [subprocess.run(
            [TWINKLE, "launch", "--mode", "ray", "--submit", "--address", f"http://{cluster.webui_url}", "--nproc-per-node", "2",
             "script.py", word], cwd=tmp_path, capture_output=True, text=True, check=False, timeout=200) for word in ("go", "fail")]
    finally:
        cluster.shutdown()
    good, bad = results
    assert good.returncode == 0, good.stdout + good.stderr
    assert "sum [6, 8] ['go']" in good.stdout
    assert bad.returncode == 1
    assert "no luck" in bad.stdout + bad.stderr
    assert "rank 0 of group `ranks`" in bad.stdout + bad.stderr
