"""A reward of mathematical answers, which Math-Verify compares: fractions, roots, sets, intervals, matrices, in LaTeX or plain."""

import threading
from collections.abc import Mapping
from typing import Any

from twinkle_core.errors import MissingExtraError, check_count, checks_keywords
from twinkle_core.reward.gsm8k import reference
from twinkle_core.reward.interface import TextReward


class MathReward(TextReward):
    """1.0 where the answer of a completion is mathematically equal to the reference answer, else 0.0.

    The answer is the last `\\boxed{}` of the text, or else the formula or number that Math-Verify finds. Needs the extra `rewards`.

    Args:
        key: where in `user_data` the reference answer is: LaTeX, with or without dollar signs, or a number.
        timeout_s: for reading an answer and for comparing it; what takes longer gets 0.0. It works by an alarm signal, so only in
            the main thread; elsewhere there is none.

    Raises: `MissingExtraError` where Math-Verify is not installed.
    """

    @checks_keywords
    def __init__(self, key: str = "ground_truth", timeout_s: int = 5) -> None:
        check_count("timeout_s", timeout_s, least=1)
        try:
            import math_verify
        except ImportError as error:
            raise MissingExtraError("`MathReward` needs math-verify, which is not installed. "
                                    "Run: pip install 'twinkle-core[rewards]'") from error
        self._library: Any = math_verify
        self.key, self.timeout_s = key, timeout_s

    def score(self, completion: str, user_data: Mapping[str, Any]) -> float:
        """Return the reward of one completion."""
        timeout = self.timeout_s if threading.current_thread() is threading.main_thread() else None
        gold = str(reference(user_data, self.key))
        expected = self._library.parse(gold if "$" in gold or "\\boxed" in gold else f"${gold}$", parsing_timeout=timeout)
        answer = self._library.parse(completion, parsing_timeout=timeout)
        return float(self._library.verify(expected, answer, timeout_seconds=timeout))
