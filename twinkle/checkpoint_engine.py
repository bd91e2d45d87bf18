"""Weights from the model that is trained to the sampler."""

from twinkle_core.weight_sync.manager import CheckpointEngineManager as CheckpointEngineManager
