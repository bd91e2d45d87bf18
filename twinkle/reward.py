"""Rewards: numbers for sampled answers."""

from typing import TYPE_CHECKING

from twinkle_core.reward.interface import Reward as Reward

if not TYPE_CHECKING:
    from twinkle_core.registry import lazy_exports

    __getattr__, __dir__ = lazy_exports(__name__, kind="rewards")
