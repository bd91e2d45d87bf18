"""Samplers draw completions from a model."""
