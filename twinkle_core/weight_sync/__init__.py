"""Weights on their way from a model that is trained to a sampler."""
