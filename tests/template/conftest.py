"""The real Qwen3.5 tokenizer, loaded once, and a small one of the tiny models."""

from pathlib import Path
from typing import Any

import pytest


@pytest.fixture(scope="session")
def qwen_tokenizer(assets: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(assets / "qwen3_5_tokenizer")


@pytest.fixture(scope="session")
def tiny_tokenizer() -> Any:
    from twinkle_core.template.template import load_tokenizer

    return load_tokenizer("tiny://qwen3_5")
