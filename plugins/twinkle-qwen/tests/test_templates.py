"""The Qwen templates keep the contract of all templates, and read their families' tool calls."""

import pytest
from twinkle_qwen.templates import Qwen2_5Template, Qwen3_5Template, Qwen3Template

from twinkle_core.testing.templates import CONVERSATIONS, TemplateContract, supervised_runs

WITHOUT_REASONING = {name: chat for name, chat in CONVERSATIONS.items() if name != "reasoning"}
QUESTION = {"role": "user", "content": "Who are you?"}


class TestQwen35(TemplateContract):
    @pytest.fixture(scope="class")
    def template(self):
        return Qwen3_5Template("tiny://qwen3_5")


class TestQwen35Thinking(TemplateContract):
    @pytest.fixture(scope="class")
    def template(self):
        return Qwen3_5Template("tiny://qwen3_5", enable_thinking=True)


class TestQwen3(TemplateContract):
    @pytest.fixture(scope="class")
    def template(self):
        return Qwen3Template("tiny://qwen3")


class TestQwen3WithoutThinking(TemplateContract):
    @pytest.fixture(scope="class")
    def template(self):
        return Qwen3Template("tiny://qwen3", enable_thinking=False)
