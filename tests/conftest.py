"""What all tests share: one thread a process, the real assets, the stand-in hub cache, and a session that ends with each test."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["HF_HUB_OFFLINE"] = "1"

import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
TOOLS = ROOT / "tests" / "tools"


@pytest.fixture(autouse=True)
def _one_session_a_test() -> Iterator[None]:
    from twinkle_core import session

    session.stop()
    yield
    session.stop()


@pytest.fixture(scope="session")
def assets() -> Path:
    """Real model, tokenizer, templates and chats, fetched by `make install`."""
    folder = ROOT / ".assets"
    if not (folder / "SmolLM2-135M-Instruct" / "model.safetensors").exists():
        pytest.fail(f"{folder} is incomplete. Run: make install")
    return folder


@pytest.fixture(scope="session")
def standin_cache() -> Path:
    """A ModelScope cache with a tiny Qwen3.5 as `Qwen/Qwen3.5-4B` and rows as `swift/self-cognition`, made once a checkout."""
    cache = ROOT / ".assets" / "modelscope"
    if not (cache / "models" / "Qwen" / "Qwen3___5-4B" / "tokenizer.json").exists():
        subprocess.run([sys.executable, str(TOOLS / "modelscope_standin.py"), str(cache)], check=True, capture_output=True)
    return cache


@pytest.fixture
def ms_cache(standin_cache: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The stand-in cache as this test's ModelScope cache."""
    monkeypatch.setenv("MODELSCOPE_CACHE", str(standin_cache))
    return standin_cache


class Sandbox:
    """A folder for other people's distributions, which Python finds as if pip had put them there, and a working directory.

    `python` and `twinkle` run as new processes that see both; the environment variables in `environ` are added to theirs.
    """

    def __init__(self, folder: Path) -> None:
        self.site = folder / "site"
        self.work = folder / "work"
        self.environ: dict[str, str] = {}
        for path in (self.site, self.work):
            path.mkdir()

    def add(self, distribution: str, source: str = "", *, entry: str | None = None, **modules: str) -> None:
        """Install `distribution` 1.0: entry point `entry` (default: its name) is the module `<name>_plugin` with `source`.

        `modules` are further modules: name -> source.
        """
        name = distribution.replace("-", "_")
        info = self.site / f"{name}-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text(f"[twinkle]\n{entry or distribution} = {name}_plugin\n")
        header = "from twinkle_core.hookspecs import hookimpl\n"
        for module, text in {f"{name}_plugin": header + textwrap.dedent(source), **modules}.items():
            (self.site / f"{module}.py").write_text(textwrap.dedent(text))

    def python(self, *arguments: str, **options: object) -> subprocess.CompletedProcess[str]:
        """Run Python with `arguments`."""
        return self._run([sys.executable, *arguments], **options)

    def twinkle(self, *arguments: str, **options: object) -> subprocess.CompletedProcess[str]:
        """Run the console script `twinkle` with `arguments`."""
        return self._run([str(Path(sys.executable).with_name("twinkle")), *arguments], **options)

    def script(self, source: str, name: str = "script.py") -> str:
        """Write a script into the working directory and return its name."""
        (self.work / name).write_text(textwrap.dedent(source))
        return name

    def _run(self, command: list[str], **options: object) -> subprocess.CompletedProcess[str]:
        kept = {name: value for name, value in os.environ.items() if not name.startswith("TWINKLE_") and name != "PYTHONPATH"}
        environ = {**kept, "PYTHONPATH": str(self.site), **self.environ}
        return subprocess.run(command, cwd=self.work, env=environ, capture_output=True, text=True, check=False, **options)


@pytest.fixture
def sandbox(tmp_path: Path) -> Sandbox:
    """A place for third-party plugins and scripts outside of this process."""
    return Sandbox(tmp_path)
