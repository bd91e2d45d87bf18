"""Advantages turn the rewards of sampled answers into the numbers that a policy loss weighs them with. They need numpy only."""

from twinkle_core.advantage.group import GRPOAdvantage, RLOOAdvantage
from twinkle_core.advantage.interface import Advantage

__all__ = ["Advantage", "GRPOAdvantage", "RLOOAdvantage"]
