"""Qwen chat templates and model families, and the `tiny://` hub of small models and data that need no network."""

__version__ = "0.1.0"
