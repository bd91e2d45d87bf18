"""Rewards: numbers for sampled answers."""

from typing import TYPE_CHECKING

from twinkle_core.reward.interface import FunctionReward as FunctionReward
from twinkle_core.reward.interface import Reward as Reward
from twinkle_core.reward.interface import TextReward as TextReward

if TYPE_CHECKING:
    from twinkle_core.reward.gsm8k import GSM8KAccuracyReward as GSM8KAccuracyReward
    from twinkle_core.reward.gsm8k import GSM8KFormatReward as GSM8KFormatReward
    from twinkle_core.reward.mathematics import MathReward as MathReward
    from twinkle_core.reward.pattern import FormatReward as FormatReward
else:
    from twinkle_core.registry import lazy_exports

    __getattr__, __dir__ = lazy_exports(__name__, kind="rewards")
