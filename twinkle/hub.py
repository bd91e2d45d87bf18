"""Where models and datasets come from."""

from twinkle_core.hub import resolve_dataset as resolve_dataset
from twinkle_core.hub import resolve_model as resolve_model
from twinkle_core.hub.interface import Hub as Hub
