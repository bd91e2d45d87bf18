"""A reward of the form of a completion."""

import re
from collections.abc import Mapping
from typing import Any

from twinkle_core.errors import ArgumentError, ArgumentTypeError, checks_keywords
from twinkle_core.reward.interface import TextReward

THINK_THEN_ANSWER = r"<think>(?:(?!</?think>).)*</think>\s*<answer>(?:(?!</?answer>).)*</answer>"
"""Reasoning and answer in tags, each once (DeepSeek-AI 2025, "DeepSeek-R1", table 1)."""


class FormatReward(TextReward):
    """1.0 where a regular expression matches the whole completion, but for white space around it, else 0.0.

    Args:
        pattern: in Python's syntax; "." matches line ends too. The default wants `<think>...</think>` and then
            `<answer>...</answer>`. Where the generation prompt opens a tag already, write a pattern without it.
    """

    @checks_keywords
    def __init__(self, pattern: str = THINK_THEN_ANSWER) -> None:
        if not isinstance(pattern, str):
            raise ArgumentTypeError(f"`pattern={pattern!r}` is of type {type(pattern).__name__}. Pass a regular expression as "
                                    "text.")
        try:
            self.pattern = re.compile(pattern, re.DOTALL)
        except re.error as error:
            raise ArgumentError(f"`pattern={pattern!r}` is no regular expression: {error}. Escape what is meant "
                                "literally.") from error

    def score(self, completion: str, user_data: Mapping[str, Any]) -> float:
        """Return the reward of one completion."""
        return float(self.pattern.fullmatch(completion.strip()) is not None)
