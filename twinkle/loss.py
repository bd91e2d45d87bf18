"""Losses: per-token log-probabilities to a sum and a count."""

from typing import TYPE_CHECKING

from twinkle_core.loss.interface import Loss as Loss

if TYPE_CHECKING:
    from twinkle_core.loss.cross_entropy import CrossEntropyLoss as CrossEntropyLoss
    from twinkle_core.loss.distillation import GKDLoss as GKDLoss
    from twinkle_core.loss.grpo import BNPOLoss as BNPOLoss
    from twinkle_core.loss.grpo import CISPOLoss as CISPOLoss
    from twinkle_core.loss.grpo import GRPOLoss as GRPOLoss
    from twinkle_core.loss.grpo import GSPOLoss as GSPOLoss
    from twinkle_core.loss.grpo import SAPOLoss as SAPOLoss
    from twinkle_core.loss.preference import CPOLoss as CPOLoss
    from twinkle_core.loss.preference import DPOLoss as DPOLoss
    from twinkle_core.loss.preference import ORPOLoss as ORPOLoss
    from twinkle_core.loss.preference import SimPOLoss as SimPOLoss
else:
    from twinkle_core.registry import lazy_exports

    __getattr__, __dir__ = lazy_exports(__name__, kind="losses")
