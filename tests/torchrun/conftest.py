"""Starting ranks: `twinkle launch --mode torchrun` inside this process, which saves the import of torch, or as a process."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from twinkle_core.cli.app import main

TWINKLE = Path(sys.executable).with_name("twinkle")
_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)


@dataclass(frozen=True)
class Ended:
    """How a launch ended."""

    status: int
    stdout: str
    stderr: str


@pytest.fixture
def launch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Iterator[Callable[..., Ended]]:
    """`launch(text, *options, nproc=2, arguments=("x",))`: run the text as a script in `tmp_path`; None: there is no such file."""
    handlers = {number: signal.getsignal(number) for number in _SIGNALS}
    environ = dict(os.environ)
    monkeypatch.chdir(tmp_path)

    def run(text: str | None, *options: str, nproc: int = 2, arguments: Sequence[str] = ("x",)) -> Ended:
        if text is not None:
            (tmp_path / "script.py").write_text(text)
        capfd.readouterr()
        status = main(["launch", "--mode", "torchrun", "--nproc-per-node", str(nproc), *options, "script.py", *arguments])
        printed = capfd.readouterr()
        return Ended(status, printed.out, printed.err)

    yield run
    os.environ.clear()
    os.environ.update(environ)
    for number, handler in handlers.items():
        signal.signal(number, handler)


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., "subprocess.Popen[str]"]]:
    """`start(text, *options, before=(), folder=...)`: begin a launch of two ranks a node as a process."""
    started: list[subprocess.Popen[str]] = []

    def begin(text: str, *options: str, before: tuple[str, ...] = (), folder: str = ".") -> "subprocess.Popen[str]":
        script = tmp_path / "script.py"
        script.write_text(text)
        (tmp_path / folder).mkdir(exist_ok=True)
        command = [*before, str(TWINKLE), "launch", "--mode", "torchrun", "--nproc-per-node", "2", *options, str(script), "x"]
        started.append(subprocess.Popen(
            command, cwd=tmp_path / folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"}))
        return started[-1]

    yield begin
    for process in started:
        process.kill()
        process.wait()
        for stream in (process.stdout, process.stderr):
            if stream is not None:
                stream.close()
