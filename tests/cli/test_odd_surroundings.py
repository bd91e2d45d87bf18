"""The command in odd surroundings: closed or full output, a narrow terminal, half an environment of torchrun, broken neighbours."""

import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from twinkle_core import settings
from twinkle_core.cli import doctor
from twinkle_core.errors import ArgumentError

TWINKLE = (sys.executable, "-c", "import sys; from twinkle_core.cli.app import main; raise SystemExit(main())")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no /dev/full")
@pytest.mark.parametrize("words", [("plugins",), ("plugins", "--json"), ("--help",)])
def test_a_full_disk_under_the_output_is_one_line_and_status_1(words):
    with open("/dev/full", "w") as full:
        run = subprocess.run([*TWINKLE, *words], stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert run.returncode == 1
    assert run.stderr.splitlines() == ["OSError: [Errno 28] No space left on device"]


def test_a_chat_whose_input_is_closed_is_one_line():
    run = subprocess.run(["bash", "-c", 'exec "$@" <&-', "bash", *TWINKLE, "chat", "tiny://qwen3"], capture_output=True, text=True,
                         check=False)
    assert run.returncode == 2
    assert run.stderr == "UsageError: There is nothing to answer: standard input is closed. Say something with `--prompt`.\n"


@pytest.mark.parametrize("columns", ["0", "1", "10"])
def test_the_table_of_plugins_can_be_read_on_any_terminal(columns):
    run = subprocess.run([*TWINKLE, "plugins"], capture_output=True, text=True, check=False, env={**os.environ, "COLUMNS": columns})
    assert "twinkle-core" in run.stdout


@pytest.mark.parametrize("variables", [
    {}, {"RANK": "a", "LOCAL_RANK": "0", "WORLD_SIZE": "2"}, {"RANK": "2", "LOCAL_RANK": "0", "WORLD_SIZE": "2"},
    {"RANK": "0", "LOCAL_RANK": "1", "WORLD_SIZE": "2"}, {"RANK": "-1", "LOCAL_RANK": "0", "WORLD_SIZE": "2"}, {"RANK": "0"}])
def test_half_an_environment_of_torchrun_is_an_error_that_shows_it(monkeypatch, variables):
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in {"TORCHELASTIC_RUN_ID": "run", **variables}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ArgumentError, match="RANK=.*WORLD_SIZE=.*Start the script with torchrun, or unset `TORCHELASTIC_RUN_ID`"):
        settings.torchrun_rank()


def test_a_whole_environment_of_torchrun_is_read(monkeypatch):
    for name, value in {"TORCHELASTIC_RUN_ID": "run", "RANK": "3", "LOCAL_RANK": "1", "WORLD_SIZE": "4"}.items():
        monkeypatch.setenv(name, value)
    assert settings.torchrun_rank() == settings.ProcessRank(3, 1, 4)


def test_a_library_that_does_not_load_without_docstrings_is_not_to_be_reinstalled(monkeypatch):
    monkeypatch.setattr(doctor, "TRAINING", {"torch": "no_such_module_at_all"})
    monkeypatch.setattr(doctor, "_has_docstrings", lambda: False)
    assert "without -OO" in next(doctor._libraries()).remedy


def test_a_file_that_hides_the_package_from_a_script_is_an_error(tmp_path):
    (tmp_path / "twinkle.py").write_text("")
    (tmp_path / "train.py").write_text("print('ran')")
    run = subprocess.run([*TWINKLE, "launch", str(tmp_path / "train.py")], capture_output=True, text=True, check=False)
    assert (run.returncode, run.stdout) == (1, "")
    assert "twinkle.py`, which lies beside it. Rename that file" in run.stderr


def test_a_distribution_whose_entry_points_cannot_be_read_breaks_no_command(tmp_path):
    info = tmp_path / "bad_neighbour-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: bad-neighbour\nVersion: 1.0\n")
    (info / "entry_points.txt").write_bytes(b"[console_scripts]\n\xff = a:b\n")
    path = os.pathsep.join(filter(None, (str(tmp_path), os.environ.get("PYTHONPATH"))))
    run = subprocess.run([*TWINKLE, "plugins"], capture_output=True, text=True, check=False,
                         env={**os.environ, "PYTHONPATH": path, "COLUMNS": "200"})
    assert run.returncode == 0, run.stderr
    assert "bad-neighbour 1.0" in run.stdout
    assert "its `entry_points.txt` cannot be read" in run.stdout
    assert "TransformersModel" in run.stdout or "twinkle-core" in run.stdout


def test_sigterm_lets_a_launched_script_close_what_it_has_open(tmp_path):
    (tmp_path / "train.py").write_text(textwrap.dedent("""
        import atexit, signal
        atexit.register(lambda: print("closed", flush=True))
        print("ready", flush=True)
        signal.pause()
    """))
    with subprocess.Popen([*TWINKLE, "launch", str(tmp_path / "train.py")], stdout=subprocess.PIPE, text=True) as run:
        assert run.stdout is not None
        assert run.stdout.readline() == "ready\n"
        run.send_signal(signal.SIGTERM)
        assert run.stdout.read() == "closed\n"
    assert run.returncode == 128 + signal.SIGTERM
