"""`twinkle launch --mode torchrun` on one node: who writes where, how a failing rank ends the run, what is refused at once."""

import json
import signal
import socket
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from twinkle_core.errors import ArgumentError, ModeError
from twinkle_core.launchers.rank_logs import RankLogs
from twinkle_core.launchers.torchrun import TorchrunLauncher
from twinkle_core.settings import LaunchRequest

Launch = Callable[..., object]
RANK = "import atexit, json, os, signal, subprocess, sys, time\nrank = int(os.environ['RANK'])\n"
GROUP = RANK + "import torch.distributed as dist\ndist.init_process_group('gloo')\n"
MISSED = "the other ranks were stopped. Output of rank N: logs/rank_N.txt."


def test_rank_0_writes_to_the_terminal_and_the_others_to_their_files(launch, tmp_path: Path) -> None:
    (tmp_path / "beside.py").write_text("")
    run = launch(RANK + "import beside\nprint(rank, os.environ['LOCAL_RANK'], os.environ['WORLD_SIZE'], sys.argv[1:], __name__, "
                        "os.environ['OMP_NUM_THREADS'])\n")
    assert (run.status, run.stdout, run.stderr) == (0, "0 0 2 ['x'] __main__ 1\n", "")
    assert (tmp_path / "logs" / "rank_1.txt").read_text() == "1 1 2 ['x'] __main__ 1\n"


def test_one_rank_alone_shows_its_error_as_a_script_does(launch, tmp_path: Path) -> None:
    run = launch("raise ValueError('unhappy')\n", nproc=1)
    assert run.status == 1
    assert run.stderr.startswith("Traceback (most recent call last):\n")
    assert run.stderr.endswith("ValueError: unhappy\n")
    assert not (tmp_path / "logs").exists()


def test_arguments_reach_the_script_as_they_are(tmp_path: Path, launch) -> None:
    words = ["$$a", "${local_rank}", "--mode", "b c", ""]
    run = launch("import sys\nprint(sys.argv[1:])\n", nproc=1, arguments=words)
    assert run.stdout == f"{words}\n"


def test_both_streams_of_a_rank_stand_in_its_log_in_order(launch, tmp_path: Path) -> None:
    launch(RANK + "for number in range(3):\n    print(number, flush=True)\n    print('error', number, file=sys.stderr)\n")
    assert (tmp_path / "logs" / "rank_1.txt").read_text().splitlines() == ["0", "error 0", "1", "error 1", "2", "error 2"]


@pytest.mark.parametrize(("ending", "status", "first", "last"), [
    ("raise ValueError('unhappy')", 1, f"Rank 1 failed; {MISSED}", "ValueError: unhappy"),
    ("sys.exit(3)", 3, f"Rank 1 ended with exit status 3; {MISSED}", ""),
    ("sys.exit('no rows are left')", 1, f"Rank 1 failed; {MISSED}", "no rows are left"),
    ("os._exit(4)", 4, f"Rank 1 ended with exit status 4; {MISSED}", ""),
    ("os.kill(os.getpid(), signal.SIGKILL)", 137, f"Rank 1 was killed by signal 9 (SIGKILL); {MISSED}", ""),
    ("os.kill(os.getpid(), signal.SIGTERM); time.sleep(60)", 143, f"Rank 1 was killed by signal 15 (SIGTERM); {MISSED}", ""),
])
def test_the_rank_that_failed_is_shown_first_though_others_go_on(launch, ending: str, status: int, first: str, last: str) -> None:
    begin = time.monotonic()
    run = launch(RANK + f"def act():\n    {ending}\nif rank == 1:\n    act()\nprint('waits', flush=True)\ntime.sleep(600)\n")
    assert time.monotonic() - begin < 30
    assert run.status == status
    assert run.stderr.splitlines()[0] == first
    assert run.stderr.rstrip().endswith(last or first)


@pytest.mark.slow
@pytest.mark.parametrize(("ending", "status", "first"), [
    ("raise ValueError('unhappy')", 1, "Rank 1 failed"),
    ("os.kill(os.getpid(), signal.SIGKILL)", 137, "Rank 1 was killed by signal 9 (SIGKILL)"),
])
def test_a_rank_that_waits_in_a_collective_for_the_one_that_failed_is_not_taken_for_the_cause(
    launch, tmp_path: Path, ending: str, status: int, first: str,
) -> None:
    begin = time.monotonic()
    run = launch(GROUP + f"dist.barrier()\nif rank == 1:\n    {ending}\ndist.barrier()\n")
    assert time.monotonic() - begin < 30
    assert run.status == status
    assert run.stderr.splitlines()[0] == f"{first}; {MISSED}"
    assert "Connection" not in run.stderr
    assert "torch/distributed" not in run.stderr


def record(folder: Path, rank: int, when: float, *, is_consequence: bool) -> None:
    (folder / f"attempt_0_rank_{rank}.json").write_text(json.dumps({
        "report": f"report of {rank}\n", "summary": "", "status": 1, "time": when, "is_consequence": is_consequence}))


@pytest.mark.parametrize(("records", "statuses", "expected"), [
    ({0: (5.0, False), 1: (4.0, False)}, {0: 1, 1: 1}, "Rank 1 failed"),
    ({0: (4.0, True), 1: (5.0, False)}, {0: 1, 1: 1}, "Rank 1 failed"),
    ({0: (4.0, True)}, {0: 1, 1: -9}, "Rank 1 was killed by signal 9 (SIGKILL)"),
    ({0: (4.0, True), 1: (5.0, True)}, {0: 1, 1: 1}, "Rank 0 failed"),
    ({1: (4.0, False)}, {0: -6}, "Rank 1 failed"),  # rank 1 has not ended yet, and rank 0 was aborted because of it
    ({}, {0: -11, 1: 7}, "Rank 0 was killed by signal 11 (SIGSEGV)"),
], ids=["first in time", "own error, then missed peer", "death, then missed peer", "missed peers only", "not ended", "deaths"])
def test_the_cause_is_told_from_the_consequences(tmp_path: Path, records, statuses, expected: str) -> None:
    logs = RankLogs(tmp_path / "logs", error_folder=tmp_path)
    logs.reify({rank: {"RANK": str(rank)} for rank in range(2)})
    for rank, (when, is_consequence) in records.items():
        record(tmp_path, rank, when, is_consequence=is_consequence)
    assert logs.first_failure(statuses).what == expected


def test_the_script_is_run_again_after_a_failure_if_restarts_are_left(launch, tmp_path: Path) -> None:
    text = RANK + ("attempt = os.environ['TORCHELASTIC_RESTART_COUNT']\nprint(attempt)\nopen(f'{rank}_{attempt}', 'w').close()\n"
                   "if rank == 1 and attempt == '0':\n    while not os.path.exists('0_0'):\n        time.sleep(0.02)\n"
                   "    raise ValueError('once')\n"
                   "if rank == 0 and attempt == '1':\n    while not os.path.exists('1_1'):\n        time.sleep(0.02)\n"
                   "    os.kill(os.getpid(), signal.SIGKILL)\n"
                   "if attempt != '2':\n    time.sleep(600)\n")
    run = launch(text, "--max-restarts", "2")
    assert run.status == 0
    lines = run.stderr.splitlines()
    assert lines[0] == f"Rank 1 failed; {MISSED}"
    assert lines[-4:] == ["ValueError: once", "Running the script again (restart 1 of 2).",
                          f"Rank 0 was killed by signal 9 (SIGKILL); {MISSED}", "Running the script again (restart 2 of 2)."]
    assert len(list(tmp_path.glob("?_?"))) == 6
    logs = [(tmp_path / "logs" / f"rank_1.{end}").read_text().split()[0] for end in ("0.txt", "1.txt", "txt")]
    assert logs == ["0", "1", "2"]


def test_when_no_restart_is_left_the_last_failure_ends_the_run(launch) -> None:
    run = launch(RANK + "sys.exit(5 + int(os.environ['TORCHELASTIC_RESTART_COUNT']))\n", "--max-restarts", "1", nproc=1)
    assert run.status == 6
    assert run.stderr == ("Rank 0 ended with exit status 5.\nRunning the script again (restart 1 of 1).\n"
                          "Rank 0 ended with exit status 6.\n")


def is_running(pid: int) -> bool:
    state = subprocess.run(["ps", "-o", "stat=", "-p", str(pid)], capture_output=True, text=True, check=False).stdout
    return bool(state.strip()) and not state.startswith("Z")  # a zombie has ended; nobody has asked for its status yet


def all_end(pids: list[int], within_s: float = 20) -> bool:
    end = time.monotonic() + within_s
    while any(map(is_running, pids)) and time.monotonic() < end:
        time.sleep(0.05)
    return not any(map(is_running, pids))


STUCK = """
child = subprocess.Popen(['sleep', '600'])
open(f'pids_{rank}.part', 'w').write(f'{os.getpid()} {child.pid}')
os.replace(f'pids_{rank}.part', f'pids_{rank}')
atexit.register(lambda: open(f'end_{rank}', 'w').close())
while not (os.path.exists('pids_0') and os.path.exists('pids_1')):
    time.sleep(0.02)
if rank == 0:
    print('ready', flush=True)
"""


def pids(folder: Path) -> list[int]:
    return [int(pid) for rank in range(2) for pid in (folder / f"pids_{rank}").read_text().split()]


@pytest.mark.slow
@pytest.mark.parametrize(("number", "status", "said"), [
    (signal.SIGINT, 130, "\nInterrupted.\n"), (signal.SIGTERM, 143, ""), (signal.SIGHUP, 129, "")])
def test_a_signal_to_the_launcher_ends_every_rank_and_what_it_started(
    start, tmp_path: Path, number: int, status: int, said: str,
) -> None:
    """Under Ctrl-C rank 0 waits in a collective that never comes about."""
    text = GROUP + STUCK + "dist.barrier()\n" if number == signal.SIGINT else RANK + STUCK
    process = start(text + "if rank == 1 or 'dist' not in globals():\n    time.sleep(600)\ndist.barrier()\n")
    assert process.stdout.readline() == "ready\n"
    process.send_signal(number)
    begin = time.monotonic()
    _, stderr = process.communicate(timeout=60)
    assert time.monotonic() - begin < 15
    assert (process.returncode, stderr) == (status, said)
    assert all_end(pids(tmp_path), within_s=2)
    if number == signal.SIGTERM:  # a scheduler's way to end a job: what is to run at exit is run, as in mode `local`
        assert sorted(path.name for path in tmp_path.glob("end_*")) == ["end_0", "end_1"]


@pytest.mark.slow
def test_no_rank_survives_a_launcher_that_is_killed(start, tmp_path: Path) -> None:
    process = start(RANK + STUCK + "while True:\n    pass\n")
    assert process.stdout.readline() == "ready\n"
    process.kill()
    process.wait(10)
    assert all_end(pids(tmp_path))


@pytest.mark.slow
def test_two_runs_on_one_port_are_told_apart(start, launch, tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    first = start(RANK + "if rank == 0:\n    print('ready', flush=True)\ntime.sleep(600)\n", "--master-port", port, folder="first")
    assert first.stdout.readline() == "ready\n"
    second = launch("print('begun')", "--master-port", port)
    assert (second.status, second.stdout) == (1, "")
    assert second.stderr == (f"ArgumentError: Port {port} is in use on 127.0.0.1, perhaps by another run. Use a free port, or on a "
                             "single node leave it out.\n")
    assert first.poll() is None


@pytest.mark.parametrize(("options", "text"), [
    (["--mesh", "tp=3"], "but `--nnodes 1 --nproc-per-node 2` has 2. Start 3 processes, or choose sizes whose product is 2"),
    (["--mesh", "fsdp=2,dp=2"], "dp 2 x fsdp 2 x cp 1 x ep 1 x tp 1 has 4 ranks, but"),
    (["--mesh", "cp=2"], "context parallelism (`cp`) is not built yet. Leave `cp_size` out"),
    (["--mesh", "ep=2"], "expert parallelism (`ep`) is not built yet. Leave `ep_size` out"),
    (["--mesh", "fdsp=2"], "`fdsp` in the mesh `fdsp=2` is not an axis. Did you mean `fsdp`"),
    (["--mesh", "fsdp2"], "`fsdp2` in the mesh `fsdp2` is not of the form axis=size, as in `fsdp=4,dp=2`"),
    (["--mesh", "fsdp=2,"], "is not of the form axis=size"),
    (["--mesh", "dp=0"], "`dp_size=0` is not a size. Use an integer >= 1"),
    (["--mesh", "vpp=2"], "`vpp_size=2` needs `pp_size` > 1"),
    (["--nnodes", "2"], "Say `--node-rank I --master-addr A --master-port P`"),
    (["--nnodes", "2", "--node-rank", "2", "--master-port", "1"], "`--node-rank 2` is not a node of `--nnodes 2`. Use 0 to 1"),
    (["--nnodes", "0"], "use at least 1 process, 1 node and 0 restarts"),
    (["--max-restarts", "-1"], "`--nproc-per-node 2 --nnodes 1 --max-restarts -1`: use at least"),
    (["--nproc-per-node", "0"], "Invalid value for '--nproc-per-node': Input should be greater than or equal to 1"),
    (["--nproc-per-node", "-2"], "Invalid value for '--nproc-per-node': Input should be greater than or equal to 1"),
    (["--max-restart", "1"], "No such option"),
    (["--master-port", "70000"], "`--master-port 70000` is not a port. Use 1024 to 65535"),
    (["--master-addr", "192.0.2.1", "--master-port", "29500"], "`192.0.2.1` is not an address of this node. Use one of node 0's"),
    (["--rdzv-endpoint", "host"], "`--rdzv-endpoint host` is not of the form HOST:PORT, as in `10.0.0.1:29500`"),
    (["--rdzv-endpoint", "127.0.0.1:29500", "--node-rank", "0"], "they are numbered as they come. Leave out `--node-rank`"),
])
def test_what_cannot_be_is_refused_before_a_process_starts(launch, tmp_path: Path, options: list[str], text: str) -> None:
    run = launch("open('begun', 'w').close()", *options)
    assert run.status in (1, 2)
    assert text in run.stderr
    assert len(run.stderr.splitlines()) == 1
    assert not (tmp_path / "begun").exists()


def test_a_script_that_does_not_exist_is_refused(launch) -> None:
    run = launch(None)
    assert run.status == 1
    assert "The script `script.py` is not a file" in run.stderr


def test_logs_that_cannot_be_written_are_refused_before_a_process_starts(launch, tmp_path: Path) -> None:
    (tmp_path / "logs").write_text("a file")
    run = launch("open('begun', 'w').close()")
    assert run.status == 1
    assert "The folder `logs`, where rank N writes `rank_N.txt`, cannot be written to" in run.stderr
    assert "Start the run in a folder that can" in run.stderr
    assert not (tmp_path / "begun").exists()


def test_less_than_one_process_is_refused_by_the_launcher_itself(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.touch()
    with pytest.raises(ArgumentError, match="`--nproc-per-node 0 --nnodes 1 --max-restarts 0`: use at least 1 process"):
        TorchrunLauncher.launch(str(script), [], LaunchRequest(nproc_per_node=0))


def test_torchrun_is_not_a_mode_of_a_script() -> None:
    with pytest.raises(ModeError, match=r"each of them is in mode `local`. Use `initialize\(mode=\"local\"\)`"):
        TorchrunLauncher(options={}).start(None)  # type: ignore[arg-type]
