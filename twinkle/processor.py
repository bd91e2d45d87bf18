"""How features become tensors."""

from twinkle_core.processor import InputProcessor as InputProcessor
