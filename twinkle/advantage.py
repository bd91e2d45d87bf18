"""Advantages: rewards of sampled answers to the weights of a policy loss."""

from twinkle_core.advantage.group import GRPOAdvantage as GRPOAdvantage
from twinkle_core.advantage.group import RLOOAdvantage as RLOOAdvantage
from twinkle_core.advantage.interface import Advantage as Advantage
