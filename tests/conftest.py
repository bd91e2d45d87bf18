"""What all tests share: one thread a process, the real assets, the stand-in hub cache, and a session that ends with each test."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["HF_HUB_OFFLINE"] = "1"

import subprocess
import sys
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
