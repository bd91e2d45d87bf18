"""Metrics: numbers about a step."""

from typing import TYPE_CHECKING

from twinkle_core.metric.interface import Metric as Metric

if TYPE_CHECKING:
    from twinkle_core.metric.accuracy import Accuracy as Accuracy
    from twinkle_core.metric.policy import CompletionRewardMetric as CompletionRewardMetric
    from twinkle_core.metric.policy import GRPOMetric as GRPOMetric
    from twinkle_core.metric.preference import DPOMetric as DPOMetric
else:
    from twinkle_core.registry import lazy_exports

    __getattr__, __dir__ = lazy_exports(__name__, kind="metrics")
